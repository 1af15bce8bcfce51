"""hibari: one voice, whole sentences, at a hundred times real time on one core.

A small network, distilled from Kokoro's voice heart, predicts for every 12.5 ms a spectrum in five parts and F0;
pulses at that F0, noise and an inverse STFT synthesize samples, which the package that carries the weights does.
Phonemes are its input as they are. The network takes one speed, which its graph divides durations by, so that it
can be one for every phoneme. Pitch scales the F0 of the pulses; energy scales the samples.

The network generates a third of a second of silence at either end: all but the edges of it is cut.

Source   hibari-tts 0.2.1 (Apache-2.0), distilled from Kokoro-82M (Apache-2.0, StyleTTS 2, arXiv:2306.07691);
         tests/models/test_hibari.py compares with that package's own samples
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np

from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints.onnx_session import OnnxSession
from asr_serve.models.interfaces import SynthesizedSentence, WholeSentenceTtsModel, validate_phonemes, validate_voice
from asr_serve.models.registry import PackagedWeights, TtsCard
from asr_serve.models.tts import prosody
from asr_serve.types import Sentence

GRAPH, VOCABULARY = "hibari.onnx", "vocab.json"
CARDS = (
    TtsCard(
        name="hibari",
        task="tts",
        kind="hibari",
        languages=("en",),
        parameters=6_200_000,
        licence="Apache-2.0",
        source="https://github.com/MMWilliams/hibari",
        hub="",
        packaged=PackagedWeights(
            requirement="hibari-tts==0.2.1",
            module="hibari",
            folder="assets",
            sha256={
                GRAPH: "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8",
                VOCABULARY: "70abefbe8a1c8865e43e0a43bbdc25b91a33e4aa053479d443ccf23e20a59e5d",
            },
        ),
        files=(GRAPH, VOCABULARY),
        rate_hz=24_000,
        alphabet="misaki",
        voices=("heart",),
        max_phonemes=400,
    ),
)
UNITS = "/Clip_output_0"
"""Value inside the graph that holds the durations of phonemes, in units of 25 ms."""
UNIT_SAMPLES, UNIT_FRAMES = 600, 2
PAUSE = 0
"""Id before the first phoneme and after the last."""


class Model(WholeSentenceTtsModel):
    """Network with its weights."""

    def __init__(self, card: TtsCard, folder: Path) -> None:
        """Loads the graph. Raises WeightsMissing when a package that it needs is not installed, WeightsCorrupt."""
        self.rate_hz, self._card, self._dsp = card.rate_hz, card, _dsp()
        self._graph = OnnxSession(folder / GRAPH, (UNITS,), lengths=[("speed", 0, "L")])
        try:
            self._ids: dict[str, int] = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as failure:
            raise WeightsCorrupt(f"{folder / VOCABULARY} cannot be read: {failure}") from failure

    @property
    def voices(self) -> tuple[str, ...]:
        return self._card.voices

    def validate(self, sentence: Sentence) -> None:
        validate_voice(sentence, self.voices, self._card.name)
        validate_phonemes(sentence, self._ids, self._card.name, self._card.alphabet)

    def synthesize(self, sentence: Sentence) -> SynthesizedSentence:
        ids = [PAUSE, *(self._ids[each] for each in sentence.phonemes), PAUSE]
        outputs = self._graph(
            ids=np.array([ids], np.int64), speed=prosody.per_phoneme(sentence, [each.speed for each in sentence.spans])
        )
        harmonic, phase, noise, rest, rest_phase, f0 = (each[0] for each in outputs[:6])
        units = outputs[6].reshape(-1).astype(np.int64)
        semitones = prosody.per_phoneme(sentence, [each.pitch for each in sentence.spans])
        f0 = f0 * np.exp2(np.repeat(semitones, UNIT_FRAMES * units) / 12)
        generator = np.random.default_rng(sentence.seed)
        pcm = self._dsp.synth(harmonic, phase, noise, rest, rest_phase, f0.astype(np.float32), generator)
        return prosody.finish_sentence(sentence, pcm, UNIT_SAMPLES * np.cumsum(units), self.rate_hz)


def load(folder: Path, card: TtsCard, device: Device) -> Model:
    """Loads the model. It runs on the host whatever the device: a graph of a few layers."""
    return Model(card, folder)


def _dsp() -> ModuleType:
    try:
        from hibari import dsp
    except ModuleNotFoundError as missing:
        raise WeightsMissing(
            "hibari needs the Python package hibari-tts", todo=f"pip install {CARDS[0].package}"
        ) from missing
    module: ModuleType = dsp
    return module
