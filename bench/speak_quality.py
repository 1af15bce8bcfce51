"""How good a voice of ours is, beside the one that taught it: understood, alike, in one piece.

Both read the same phonemes. Ours is read twice: in chunks, as the engine does it, and as a whole.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import msgspec
import numpy as np
import speak_codecs
import torch
from matplotlib.figure import Figure

from asr_serve.audio.features.slaney_mel import RATE_HZ, SlaneyMel
from asr_serve.audio.resample import resample_clip
from asr_serve.config import EngineConfig
from asr_serve.devices.cpu import CpuDevice
from asr_serve.engine import builder
from asr_serve.engine.tts.chunked_runner import ChunkedTtsRunner, fade_in
from asr_serve.engine.tts.custom_voices import CustomVoiceLoader
from asr_serve.engine.tts.runner import TtsStepOutput
from asr_serve.errors import WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.interfaces import WholeSentenceTtsModel
from asr_serve.models.registry import TtsCard, model_modules, tts_card
from asr_serve.models.tts.fastpitch import Model as FastPitchModel
from asr_serve.pipelines.tts.frontend import frontend_for
from asr_serve.text.g2p.clauses import Pause
from asr_serve.types import Sentence
from asr_serve_tools.evaluate import voice_quality as measures
from asr_serve_tools.evaluate.wer import normalize, wer

Row = dict[str, Any]
Say = Callable[[str], None]
DRAWN_S = 4.0
"""The sentence that is drawn is the first that lasts so long."""


class Reading(NamedTuple):
    pcm: np.ndarray
    whole: np.ndarray
    """The same, said as a whole: of another length never."""
    places: list[int]
    """Samples at which chunks begin."""


class Ours:
    """A model of ours that speaks in chunks, without a server around it."""

    def __init__(self, name: str, codec: str | None, device: str) -> None:
        config = EngineConfig(codec=codec)
        checkpoint = builder.find_checkpoint(name, None, config)
        built = checkpoint.build(device, "auto")
        assert isinstance(built.model, FastPitchModel)
        assert built.vocoder is not None
        card = builder.card_of_loaded(checkpoint.card, built)
        assert isinstance(card, TtsCard)
        self.card, self._model, self._vocoder = card, built.model, built.vocoder
        voices = CustomVoiceLoader(self._model, self.card, Path("."))
        self._runner = ChunkedTtsRunner(self._model, self._vocoder, voices, built.device, rows=1, step_rows=1)

    @torch.inference_mode()
    def read(self, sentence: Sentence) -> Reading:
        self._runner.validate(sentence)
        (row,) = self._runner.start_sequences([sentence])
        pieces: list[TtsStepOutput] = []
        try:
            while not pieces or not pieces[-1].finished:
                pieces += self._runner.step([row])
        finally:
            self._runner.free_sequence(row)
        places = np.cumsum([0, *(len(piece.pcm) for piece in pieces)])[:-1]
        (encoded,) = self._model.encode([sentence])
        whole = self._vocoder.vocode(self._model.whole(encoded))[0, encoded.lead_frames * self._vocoder.hop_samples :]
        pcm = np.concatenate([piece.pcm for piece in pieces])
        return Reading(pcm, fade_in(whole.float().cpu().numpy()), places.tolist())


class Teacher:
    """hibari's heart, or a voice of Kokoro's by its name without the prefix."""

    def __init__(self, name: str) -> None:
        """Raises WeightsMissing."""
        self._card = tts_card("hibari" if name == "heart" else "kokoro")
        folder = store.verified_published_folder(self._card)
        self._model: WholeSentenceTtsModel = model_modules("tts")[self._card.kind].load(folder, self._card, CpuDevice())
        self._voice = next(each for each in self._card.voices if each.rpartition("_")[2] == name)
        self.rate_hz = self._model.rate_hz

    def read(self, sentence: Sentence) -> np.ndarray:
        return self._model.synthesize(msgspec.structs.replace(sentence, voice=self._voice)).pcm


def measure(args: argparse.Namespace, texts: Sequence[str], say: Say) -> dict[str, list[Row]]:
    """{"voices": a row for each that is asked for, `skipped` where its teacher is not on this machine; "codecs": a
    row for each, and one for speech that went through none}."""
    ours, rows = Ours(args.voice_model, args.codec, "cpu"), []
    with measures.EvaluationRecognizer(args.recogniser) as listener:
        for name in args.teachers:
            try:
                teacher = Teacher(name)
            except WeightsMissing as missing:
                rows.append({"voice": name, "skipped": str(missing)})
                continue
            say(f"quality  {name}: {len(texts)} sentences")
            rows.append(one(name, ours, teacher, listener, texts, args.spectrogram if not rows else None))
            say(f"quality  {rows[-1]}")
        try:
            codecs = speak_codecs.measure(texts, listener, say)
        except WeightsMissing as missing:
            codecs = [{"codec": ", ".join(speak_codecs.CODECS), "skipped": str(missing)}]
    return {"voices": rows, "codecs": codecs}


def one(
    name: str,
    ours: Ours,
    teacher: Teacher,
    listener: measures.EvaluationRecognizer,
    texts: Sequence[str],
    picture: Path | None,
) -> Row:
    said: list[np.ndarray] = []
    theirs: list[np.ndarray] = []
    likeness, joins = [], []
    for text in texts:
        readings, other = [], []
        for passage in frontend_for(ours.card, name).passages(text):
            if isinstance(passage, Pause):
                readings.append(np.zeros(passage.ms * ours.card.rate_hz // 1_000, np.float32))
                other.append(np.zeros(passage.ms * teacher.rate_hz // 1_000, np.float32))
                continue
            sentence = Sentence(passage.phoneme_spans, name)
            reading = ours.read(sentence)
            joins.append(measures.join_quality(reading.pcm, reading.whole, reading.places, ours.card.rate_hz))
            readings.append(reading.pcm)
            other.append(teacher.read(sentence))
        said.append(np.concatenate(readings))
        theirs.append(np.concatenate(other))
        pair = (
            resample_clip(said[-1], ours.card.rate_hz, RATE_HZ),
            resample_clip(theirs[-1], teacher.rate_hz, RATE_HZ),
        )
        likeness.append(measures.voice_distance(*pair))
        if picture is not None and min(map(len, pair)) > DRAWN_S * RATE_HZ:
            draw(picture, text, *pair)
            picture = None
    heard, heard_theirs = (listener.transcribe(said, ours.card.rate_hz), listener.transcribe(theirs, teacher.rate_hz))
    errors, errors_theirs = wer(texts, heard), wer(texts, heard_theirs)
    found = {
        key: rounded(value) for key, value in msgspec.structs.asdict(measures.mean_voice_distance(likeness)).items()
    }
    return {
        "voice": name,
        "sentences": len(texts),
        "wer": round(errors.percent, 2),
        "teacher_wer": round(errors_theirs.percent, 2),
        "wer_more": round(errors.percent - errors_theirs.percent, 2),
        "words": errors.reference,
        "first_words_wrong": first_words_wrong(texts, heard),
        "teacher_first_words_wrong": first_words_wrong(texts, heard_theirs),
        **found,
        "joins": sum(join.joins for join in joins),
        "join_jump_db": rounded(max(join.jump_db for join in joins), 4),
        "join_apart": rounded(max(join.apart for join in joins), 7),
        "length": round(sum(map(len, said)) / ours.card.rate_hz / (sum(map(len, theirs)) / teacher.rate_hz), 3),
        **alike(said, ours.card.rate_hz, theirs, teacher.rate_hz),
    }


def first_words_wrong(texts: Sequence[str], heard: Sequence[str]) -> int:
    """Sentences that seem to begin with another word: what an onset that is cut sounds like."""
    pairs = [(normalize(text).split(), normalize(found).split()) for text, found in zip(texts, heard, strict=True)]
    return sum(said[:1] != found[:1] for said, found in pairs)


def alike(ours: Sequence[np.ndarray], rate_hz: int, theirs: Sequence[np.ndarray], their_hz: int) -> Row:
    """Returns whether the speaker is the same: ours beside other sentences of the teacher's, and those beside the
    rest."""
    same = [resample_clip(clip, their_hz, rate_hz) for clip in theirs]
    try:
        found = measures.similarity(ours[::2], same[1::2], rate_hz)
        ceiling = measures.similarity(same[::2], same[1::2], rate_hz)
    except WeightsMissing as missing:
        return {"similarity": None, "similarity_ceiling": None, "similarity_skipped": str(missing)}
    return {"similarity": rounded(found), "similarity_ceiling": rounded(ceiling)}


def rounded(value: float, digits: int = 3) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def draw(path: Path, text: str, ours: np.ndarray, teacher: np.ndarray) -> None:
    """Both spectrograms, with what is heard as F0."""
    from asr_serve.cloning.pitch_tracking import track_pitch

    mpl.use("agg")
    figure = Figure(figsize=(11, 5.2), layout="constrained", dpi=140)
    panels = figure.subplots(2, 1, sharex=True)
    mel = SlaneyMel()
    for axes, (name, pcm) in zip(panels, (("teacher", teacher), ("ours", ours)), strict=True):
        with torch.inference_mode():
            bands = mel(torch.from_numpy(pcm)[None])[0].numpy().T
        length_s = len(pcm) / RATE_HZ
        axes.imshow(bands, origin="lower", aspect="auto", extent=(0, length_s, 0, len(bands)), cmap="magma", vmin=-9)
        heights = track_pitch(pcm)
        times_s = (np.arange(len(heights)) + 0.5) * length_s / len(heights)
        pitch = axes.twinx()
        pitch.plot(times_s, np.where(heights > 0, heights, np.nan), color="#7fe0ff", linewidth=1.2)
        pitch.set_ylim(50, 500)
        pitch.set_ylabel("F0, Hz")
        axes.set_ylabel("mel band")
        axes.set_title("its teacher" if name == "teacher" else "asr-serve, chunk by chunk", fontsize=10)
    panels[-1].set_xlabel("s")
    figure.suptitle(text, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
