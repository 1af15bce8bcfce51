"""Teacher voices: synthesized sentences with phoneme durations and pitch.

Both are ONNX graphs from packages with permissive licences. Durations and pitch are inner values of the graphs,
which are exposed as outputs here. Both have units of 25 ms for durations and of 12.5 ms for pitch.

Source  Kokoro-82M (StyleTTS 2, arXiv:2306.07691) and hibari-tts, which was distilled from one of its voices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from asr_serve.audio.resample import resample_clip
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ, CorpusUtterance, normalize_level
from asr_serve.errors import WeightsMissing
from asr_serve.models.checkpoints.onnx_session import OnnxSession
from asr_serve.models.checkpoints.store import verified_published_folder
from asr_serve.models.registry import tts_card
from asr_serve.models.tts import kokoro
from asr_serve.models.tts.fastpitch import PAUSE

TEACHER_HZ, UNIT = 24_000, 600
"""Sampling rate of the teachers, and samples in a unit of duration: 25 ms."""
VOICED_HZ = 50.0
ENGLISH = (
    "af_alloy af_aoede af_bella af_heart af_jessica af_kore af_nicole af_nova af_river af_sarah af_sky "
    "am_adam am_echo am_eric am_fenrir am_liam am_michael am_onyx am_puck am_santa "
    "bf_alice bf_emma bf_isabella bf_lily bm_daniel bm_fable bm_george bm_lewis"
)
"""Kokoro's English voices: American and British, female and male."""


class TeacherReading(NamedTuple):
    """Output of a teacher. `units`: duration of each phoneme in units of 25 ms; `f0`: Hz, two values to a unit."""

    pcm: np.ndarray
    units: np.ndarray
    f0: np.ndarray


class TeacherVoice(Protocol):
    name: str

    def read(self, ids: list[int], speed: float) -> TeacherReading: ...


class TeacherPhonemizer:
    """Text to the teachers' input: hibari's phonemes, in Kokoro's alphabet."""

    def __init__(self) -> None:
        self._hibari = _hibari().Hibari(threads=1)

    def phonemes(self, text: str) -> str:
        return " ".join(self._hibari.phonemize(text))

    def ids(self, phonemes: str) -> list[int]:
        return list(self._hibari.ids(phonemes))

    def spoken(self, phonemes: str) -> str:
        """Phonemes with one character for each id: those in the vocabulary, with a pause at both ends."""
        known = "".join(letter for letter in phonemes if letter in self._hibari.vocab)
        return f"{PAUSE}{known}{PAUSE}"


class HeartTeacher:
    """hibari's own voice: spectra by a small network, with a pulse source."""

    name = "heart"

    def __init__(self, seed: int = 0) -> None:
        hibari = _hibari()
        from hibari import dsp

        self._dsp, self._noise = dsp, np.random.default_rng(seed)
        self._session = OnnxSession(Path(hibari.__file__).parent / "assets" / "hibari.onnx", ("/Clip_output_0",))

    def read(self, ids: list[int], speed: float) -> TeacherReading:
        found = self._session(ids=np.array([ids], np.int64), speed=np.array([speed], np.float32))
        spectra = [output[0] for output in found[:6]]
        pcm = self._dsp.synth(*spectra, self._noise)
        return TeacherReading(pcm, np.asarray(found[6]).reshape(-1).astype(np.int64), spectra[5])


class KokoroTeacher:
    """One of Kokoro's voices."""

    def __init__(self, name: str, session: OnnxSession | None = None) -> None:
        """`session`: session of another instance, to share. Raises WeightsMissing."""
        folder = verified_published_folder(tts_card("kokoro"))
        self.name, self._style = name, kokoro.styles_of(folder)[name]
        self.session = session or OnnxSession(kokoro.graph_of(folder), (kokoro.UNITS, kokoro.F0))

    def read(self, ids: list[int], speed: float) -> TeacherReading:
        found = self.session(
            tokens=np.array([ids], np.int64),
            style=self._style[min(len(ids) - 2, len(self._style)) - 1][None],
            speed=np.array([speed], np.float32),
        )
        pcm, units, f0 = found[0], found[-2], found[-1]
        return TeacherReading(pcm.reshape(-1), units.reshape(-1).astype(np.int64), f0.reshape(-1))


def vocabulary() -> dict[str, int]:
    """Ids of phonemes: Kokoro's, and the pause around a sentence."""
    return {PAUSE: 0, **kokoro.IDS}


def corpus_utterance(
    text: str, phonemes: str, reading: TeacherReading
) -> tuple[CorpusUtterance, np.ndarray, np.ndarray] | None:
    """Utterance in the corpus's form: 22.05 kHz, normalized level, durations in mel frames, pitch at the middle
    of each frame. None if a phoneme would have no frame."""
    pcm = normalize_level(resample_clip(reading.pcm, TEACHER_HZ, RATE_HZ))
    total = len(pcm) // HOP
    pcm = pcm[: total * HOP]
    ends = np.round(np.cumsum(reading.units) * UNIT / TEACHER_HZ * RATE_HZ / HOP).astype(np.int64)
    ends[-1] = total
    frames = np.diff(ends, prepend=0)
    if len(frames) != len(phonemes) or frames.min() < 1:
        return None
    f0 = interpolate_f0(reading.f0, (np.arange(total) + 0.5) * HOP / RATE_HZ * TEACHER_HZ * 2 / UNIT)
    return CorpusUtterance(text, phonemes, len(pcm), frames.tolist()), pcm, f0


def interpolate_f0(f0: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """F0 in Hz at `positions`, in units of cells of f0: linear between the middles of two voiced cells, because
    steps would blur high harmonics; 0 where the nearest cell is unvoiced."""
    middles = positions - 0.5
    left = np.floor(middles).astype(np.int64).clip(0, len(f0) - 1)
    right = (left + 1).clip(0, len(f0) - 1)
    share = (middles - left).clip(0, 1)
    nearest = f0[np.minimum(positions.astype(np.int64), len(f0) - 1)]
    both = (f0[left] > VOICED_HZ) & (f0[right] > VOICED_HZ)
    found = np.where(both, (1 - share) * f0[left] + share * f0[right], nearest)
    return np.where(nearest > VOICED_HZ, found, 0).astype(np.float32)


def _hibari() -> Any:
    try:
        import hibari
    except ModuleNotFoundError as missing:
        raise WeightsMissing("hibari-tts is not installed", todo="pip install 'hibari-tts[fast]==0.2.1'") from missing
    return hibari
