"""Voice cloning from recordings to a voice file. START HERE.

1. `training_material.gather_material` splits recordings, recognizes those without a transcript, and selects clips.
2. `training_material.write_material` aligns the clips with the same texts in the model's most similar voices.
3. `fine_tuning` trains one more voice, with a number of steps that depends on the amount of speech.
4. The voice synthesizes the texts of held-out clips; a speaker encoder compares it with the recordings, and its
   loudness is adjusted to that of the voice that it was initialized from.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from asr_serve import __version__, devices
from asr_serve.audio.input_manifest import expand_inputs
from asr_serve.audio.resample import resample_clip
from asr_serve.cloning.acoustic_training import AcousticItem, acoustic_item
from asr_serve.cloning.base_model import CloningBaseModel
from asr_serve.cloning.cloning_recognizer import RECOGNISER, CloningRecognizer, TextPhonemizer
from asr_serve.cloning.fine_tuning import FineTuningResult, VoiceFineTuning
from asr_serve.cloning.pitch_tracking import track_pitch
from asr_serve.cloning.training_material import TrainingMaterial, gather_material, write_material
from asr_serve.cloning.voice_corpus import RATE_HZ, speech_rms
from asr_serve.devices.cpu import keep_memory
from asr_serve.engine.tts.builder import find_vocoder
from asr_serve.errors import Cancelled, EmptyAudio, UnsupportedOption, WeightsMissing
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints import store as weights
from asr_serve.models.interfaces import Vocoder
from asr_serve.models.registry import TtsCard as ModelCard
from asr_serve.models.registry import tts_card, vocoder_file
from asr_serve.models.tts.fastpitch_network import LN10_20
from asr_serve.units import RATE_HZ as HEARD_HZ
from asr_serve.voices.cloned_voice import ClonedVoiceCard
from asr_serve.voices.cloning_messages import STAGES, ClipReport, CloneProgress, CloneReport, CloneRequest, Stage
from asr_serve.voices.voice_store import VoiceStore

MOST_REFERENCES = 5
"""Number of the model's own voices that clips are aligned with: the most similar ones."""
COMPARED = 4
"""Number of clips whose texts are synthesized for comparison: held-out ones, then others."""
LOUDER_DB = 8.0
"""Largest change of a voice's loudness."""

OnCloneProgress = Callable[[CloneProgress], None]


class PreparedCloning(NamedTuple):
    """Training material of a voice."""

    items: list[AcousticItem]
    verdicts: list[ClipReport]
    material: TrainingMaterial
    start: str
    pitch: tuple[float, float]


def clone_voice(
    order: CloneRequest, on_progress: OnCloneProgress = lambda _: None, stop: Callable[[], bool] = lambda: False
) -> CloneReport:
    """Clones a voice into the folder of voices. `on_progress` receives progress; `stop` is polled often. Raises
    OptionError, TooFewClips, UnsupportedOption for a model that cannot clone, UnknownModel, WeightsMissing,
    WeightsCorrupt, Cancelled."""
    began = time.monotonic()
    store = VoiceStore(Path(order.voices_dir))
    card = tts_card(order.model)
    if not card.clones:
        raise UnsupportedOption(f"model={card.name}", "a model that can be taught voices", param="model")
    store.check_name_free(order.name, card.voices)
    if order.threads is not None:
        torch.set_num_threads(order.threads)
    keep_memory()
    progress = _ProgressReporter(on_progress, stop)
    progress("loading", 0.0)
    folder = weights.published_or_given_folder(card, order.weights)
    base, encoder = CloningBaseModel(folder), ge2e.load()
    vocoder = _load_vocoder(order.vocoder or card.vocoder)
    store.check_name_free(order.name, base.config.voices)
    ready = _prepared(order, base, encoder, card, progress)
    progress("learning", 0.0)
    base.norms.pitch[order.name] = ready.pitch
    tuning = VoiceFineTuning(base, order.name, ready.start, ready.items, order.seed)
    result = tuning.train(
        order.minutes,
        lambda going: progress("learning", going.share, round(going.held_out, 4), round(going.left_s, 1)),
        stop,
    )
    progress("comparing", 0.0)
    similarity, gain = (None, 0.0) if vocoder is None else _compare_with_recordings(tuning, ready, vocoder, encoder)
    result.tensors["gain"] = torch.tensor([gain])
    card_of = _card(order, base, ready, result, similarity)
    progress("comparing", 1.0)
    store.add(*card_of, reserved=base.config.voices)
    progress("done", 1.0)
    return CloneReport(
        card_of[0], ready.verdicts, round(result.before, 4), round(result.after, 4), time.monotonic() - began
    )


def _prepared(
    order: CloneRequest, base: CloningBaseModel, encoder: ge2e.Ge2eEncoder, card: ModelCard, progress: _ProgressReporter
) -> PreparedCloning:
    """Recognizes, selects and aligns the recordings. Nothing of them remains on disk."""
    recogniser = order.recogniser or RECOGNISER
    with CloningRecognizer(recogniser) as ear:
        material = gather_material(expand_inputs(order.audio), order.texts, ear, encoder, progress.of("listening"))
    pitch_hz = np.concatenate([track_pitch(accepted.clip.pcm) for accepted in material.clips])
    nearest = base.nearest_voices(material.voice, float(np.log(pitch_hz[pitch_hz > 0]).mean()))[:MOST_REFERENCES]
    numbers = [base.number(name) for name in nearest]
    with tempfile.TemporaryDirectory(prefix="asr-serve-voice-") as folder:
        voice, verdicts = write_material(
            material,
            TextPhonemizer(card, nearest[0]),
            lambda phonemes: [base.synthesize_mel(phonemes, number) for number in numbers],
            Path(folder),
            "clone",
            progress.of("aligning"),
        )
        items = [acoustic_item(recording, base.speaker, base.config.vocabulary) for recording in voice]
    return PreparedCloning(items, verdicts, material, nearest[0], pitch_statistics(items))


def pitch_statistics(items: Sequence[AcousticItem]) -> tuple[float, float]:
    """Returns mean and deviation of the natural log of F0, over phonemes."""
    pitch = np.concatenate([each.pitch[each.voiced > 0] for each in items])
    return float(pitch.mean()), float(pitch.std()) or 1.0


def _compare_with_recordings(
    tuning: VoiceFineTuning, ready: PreparedCloning, vocoder: Vocoder, encoder: ge2e.Ge2eEncoder
) -> tuple[float | None, float]:
    """Returns the cosine of the synthesized voice with the recordings, None where it is silent; and the gain,
    natural log, that makes it as loud as the voice that it was initialized from. A model with little training data
    predicts a mean of many spectra, in logarithms, which is quieter than any of them."""
    base, names = tuning.base, {number: letter for letter, number in tuning.base.config.vocabulary.items()}
    synthesized, levels = [], []
    for item in [*tuning.held_out_items, *tuning.training_items][:COMPARED]:
        phonemes = "".join(names[number] for number in item.ids[1:-1].tolist())
        mel, f0, _ = base.synthesize_prosody(phonemes, base.speaker, tuning.delta.changes(), ready.pitch)
        start_mel, start_f0, _ = base.synthesize_prosody(phonemes, base.number(ready.start))
        pcm, start_pcm = vocode(mel, f0, vocoder), vocode(start_mel, start_f0, vocoder)
        synthesized.append(resample_clip(pcm, RATE_HZ, HEARD_HZ))
        levels.append((speech_rms(pcm), speech_rms(start_pcm)))
    level, start_level = np.array(levels).mean(0)
    gain = math.log(start_level / level) if level and start_level else 0.0
    limit = LOUDER_DB * LN10_20
    try:
        cosine = ge2e.similarity(encoder.embed_speaker(synthesized[: len(tuning.held_out_items)]), ready.material.voice)
    except EmptyAudio:
        cosine = None
    return cosine, min(limit, max(-limit, gain))


@torch.no_grad()
def vocode(mel: Tensor, f0: Tensor, vocoder: Vocoder) -> np.ndarray:
    pcm: np.ndarray = vocoder.vocode(torch.cat([mel, f0[:, None]], 1)[None])[0].float().numpy()
    return pcm


def _load_vocoder(named: str) -> Vocoder | None:
    """Loads the vocoder; None where its weights are not on this machine: a voice can be trained without it."""
    try:
        card, folder = find_vocoder(named)
    except WeightsMissing:
        return None
    return vocoder_file(card.kind).load(folder, card, devices.make_device("cpu", "fp32"))


def _card(
    order: CloneRequest, base: CloningBaseModel, ready: PreparedCloning, found: FineTuningResult, like: float | None
) -> tuple[ClonedVoiceCard, bytes]:
    """Returns the voice's card, and its file."""
    marks = {"fingerprint": base.fingerprint, "model": order.model, "made_by": f"asr-serve {__version__}"}
    tensors = save({name: tensor.contiguous() for name, tensor in found.tensors.items()}, marks)
    used = [verdict for verdict in ready.verdicts if not verdict.left_out]
    card = ClonedVoiceCard(
        name=order.name,
        created=int(time.time()),
        model=order.model,
        fingerprint=base.fingerprint,
        consent=order.consent,
        clips=len(used),
        seconds=round(sum(verdict.seconds for verdict in used), 1),
        start=ready.start,
        similarity=None if like is None else round(like, 3),
        ceiling=round(ready.material.ceiling, 3),
        steps=found.steps,
        seed=order.seed,
        sha256=hashlib.sha256(tensors).hexdigest(),
        release=__version__,
    )
    return card, tensors


class _ProgressReporter:
    """Reports overall progress, and raises Cancelled when cloning is to stop."""

    def __init__(self, on_progress: OnCloneProgress, stop: Callable[[], bool]) -> None:
        self._on_progress, self._stop = on_progress, stop

    def __call__(self, stage: Stage, share: float, held_out: float | None = None, left_s: float | None = None) -> None:
        if self._stop():
            raise Cancelled("the cloning was cancelled")
        names = list(STAGES)
        first = STAGES[stage]
        last = STAGES[names[min(names.index(stage) + 1, len(names) - 1)]]
        self._on_progress(CloneProgress(stage, round(first + share * (last - first), 4), held_out, left_s))

    def of(self, stage: Stage) -> Callable[[float], None]:
        return lambda share: self(stage, share)
