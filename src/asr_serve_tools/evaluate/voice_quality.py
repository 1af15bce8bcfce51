"""Voice quality: intelligibility, distance from a reference reading, joins of chunks, and speaker similarity.

Two readings of one text differ in length: their frames are first aligned (dynamic time warping of cepstra), and
compared along that path.

Source  mel-cepstral distortion: Kubichek 1993, "Mel-cepstral distance measure for objective speech quality
        assessment", here of cepstra of HiFi-GAN's 80 mel bands; F0 error and voicing error as in text-to-speech
        papers (Skerry-Ryan et al. 2018, arXiv:1803.09047); round trip through a recognizer with Whisper's
        normalizer (asr_serve_tools/evaluate/wer)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import torch

from asr_serve.api.library import Model
from asr_serve.audio.features.slaney_mel import MELS, RATE_HZ, SlaneyMel
from asr_serve.audio.resample import resample_clip
from asr_serve.cloning.phoneme_alignment import dtw_path
from asr_serve.cloning.pitch_tracking import track_pitch
from asr_serve.errors import EmptyAudio, OptionError
from asr_serve.models.auxiliary import ge2e
from asr_serve.units import RATE_HZ as HEARD_HZ
from asr_serve_tools.evaluate.wer import ErrorRate, wer

CEPSTRA = 12
"""Number of compared cepstral coefficients, without the zeroth, which is loudness."""
TO_DB = 10 / math.log(10) * math.sqrt(2)
"""Factor from the distance of cepstra to the root mean square difference of the spectra over mel, in decibels."""
SHORTEST_S = 0.1
GROSS = 0.2
"""Relative F0 difference above which it is an octave error, or an error of the tracker."""
JOIN_MS = 5
"""Audio on either side of a join that is measured."""
FAINT = 1e-6
"""Added to mean squares before the logarithm: -60 dB of full scale."""


class VoiceDistance(msgspec.Struct, frozen=True):
    """Differences between two readings of the same text; or their mean over many pairs."""

    mcd_db: float
    """Mel-cepstral distortion, without loudness."""
    mel: float
    """Mean absolute difference of the natural logs of mel magnitudes, at equal loudness."""
    f0_cents: float
    """Root mean square F0 difference over frames that are voiced in both and differ by at most GROSS; NaN if none."""
    f0_gross_percent: float
    """Share of larger F0 differences among frames that are voiced in both."""
    voicing_percent: float
    """Share of frames that are voiced in only one of them."""


class JoinQuality(msgspec.Struct, frozen=True):
    """Artefacts at the joins of chunks, compared with whole-sentence synthesis."""

    joins: int
    jump_db: float
    """Largest excess of the energy change at a join over that at the same position of the whole."""
    apart: float
    """Largest absolute difference of two samples."""


def voice_distance(one: np.ndarray, other: np.ndarray, rate_hz: int = RATE_HZ) -> VoiceDistance:
    """Distance of two readings (n,) and (m,) float32 of one text, at one rate. Raises EmptyAudio for less than
    SHORTEST_S, or silence."""
    pcm = [_ready(each, rate_hz) for each in (one, other)]
    mels = [_mel(each) for each in pcm]
    cepstra = [mel_cepstra(each) for each in mels]
    path = _path(*cepstra)
    a, b = path[:, 0], path[:, 1]
    cepstral_difference = cepstra[0][a, 1:] - cepstra[1][b, 1:]
    bands = mels[0][a] - mels[1][b]
    pitches = [track_pitch(each, len(mel)) for each, mel in zip(pcm, mels, strict=True)]
    first, second = pitches[0][a], pitches[1][b]
    both = (first > 0) & (second > 0)
    ratio = first[both] / second[both]
    gross = np.abs(ratio - 1) > GROSS
    cents = 1_200 * np.log2(ratio[~gross])
    return VoiceDistance(
        mcd_db=float(TO_DB * np.sqrt((cepstral_difference**2).sum(1)).mean()),
        mel=float(np.abs(bands - bands.mean()).mean()),
        f0_cents=float(np.sqrt((cents**2).mean())) if len(cents) else math.nan,
        f0_gross_percent=100.0 * float(gross.mean()) if len(gross) else 0.0,
        voicing_percent=100.0 * float(((first > 0) != (second > 0)).mean()),
    )


def mean_voice_distance(found: Sequence[VoiceDistance]) -> VoiceDistance:
    """Mean of every measure over the pairs for which it is finite. Raises OptionError for no pairs."""
    columns = np.array([msgspec.structs.astuple(distance) for distance in found], np.float64)
    if not len(columns):
        raise OptionError("no readings came", "one pair at least")
    finite = np.isfinite(columns)
    sums = np.where(finite, columns, 0).sum(0)
    return VoiceDistance(*(float(s / n) if n else math.nan for s, n in zip(sums, finite.sum(0), strict=True)))


def join_quality(chunked: np.ndarray, whole: np.ndarray, chunk_starts: Sequence[int], rate_hz: int) -> JoinQuality:
    """Join quality of chunked synthesis. `chunk_starts`: samples at which chunks begin. `chunked` and `whole`: (n,)
    float32 of the same length, else OptionError."""
    if len(chunked) != len(whole):
        raise OptionError(
            f"{len(chunked)} samples in chunks, {len(whole)} as a whole", "as many of one as of the other"
        )
    size = rate_hz * JOIN_MS // 1_000
    inside = [start for start in chunk_starts if size <= start <= len(whole) - size]
    excess = [_jump(chunked, start, size) - _jump(whole, start, size) for start in inside]
    difference = float(np.abs(chunked.astype(np.float64) - whole).max()) if len(whole) else 0.0
    return JoinQuality(len(inside), max(excess, default=0.0), difference)


def similarity(one: Sequence[np.ndarray], other: Sequence[np.ndarray], rate_hz: int) -> float:
    """Cosine similarity of two speakers, from some clips of each (models/auxiliary/ge2e). Raises WeightsMissing."""
    network = ge2e.load()
    voices = [network.embed_speaker(resample_clip(clip, rate_hz, HEARD_HZ) for clip in clips) for clips in (one, other)]
    return ge2e.similarity(*voices)


class EvaluationRecognizer:
    """Recognizer that measures the intelligibility of synthesized speech."""

    def __init__(self, model: str = "whisper-base", weights: str | None = None) -> None:
        """Raises UnknownModel, WeightsMissing."""
        self._model = Model.load(model, device="cpu", weights=weights)

    def transcribe(self, clips: Sequence[np.ndarray], rate_hz: int) -> list[str]:
        """Text of each clip, which is recognized as a whole, without voice activity detection."""
        pcm = [resample_clip(clip, rate_hz, HEARD_HZ) for clip in clips]
        return [found.text for found in self._model.transcribe(pcm, vad=False, language="en")]

    def errors(self, texts: Sequence[str], clips: Sequence[np.ndarray], rate_hz: int) -> ErrorRate:
        """Word error rate of the round trip: text, speech, text."""
        return wer(texts, self.transcribe(clips, rate_hz))

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def mel_cepstra(mel: np.ndarray) -> np.ndarray:
    """Cepstra of log-mel frames: (frames, 80) natural log -> (frames, 1 + CEPSTRA) c, with the spectrum smoothed
    to c0 + c1 cos(w) + c2 cos(2 w) and so on, the usual scale of mel-cepstra."""
    found: np.ndarray = mel @ _cosines()
    return found


def _ready(pcm: np.ndarray, rate_hz: int) -> np.ndarray:
    if len(pcm) < SHORTEST_S * rate_hz or not np.abs(pcm).max() > 0:
        raise EmptyAudio(f"{len(pcm)} samples came, or silence", f"{SHORTEST_S} s of speech at least")
    return resample_clip(pcm, rate_hz, RATE_HZ)


def _path(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Alignment of frames, (steps, 2), which ignores a difference in loudness."""
    one, other = (each - np.eye(1, each.shape[1]) * each[:, 0].mean() for each in (one, other))
    squares = (one**2).sum(1)[:, None] - 2 * one @ other.T + (other**2).sum(1)
    distance = np.sqrt(np.maximum(0, squares))
    return dtw_path(distance / (float(distance.mean()) or 1.0))


def _mel(pcm: np.ndarray) -> np.ndarray:
    """Log-mel frames, (frames, 80) float64."""
    with torch.inference_mode():
        found: np.ndarray = _spectrogram()(torch.from_numpy(pcm)[None])[0].double().numpy()
    return found


@cache
def _spectrogram() -> SlaneyMel:
    return SlaneyMel()


@cache
def _cosines() -> np.ndarray:
    """DCT-II matrix, (80, 1 + CEPSTRA)."""
    angles = (np.arange(MELS) + 0.5)[:, None] * np.arange(1 + CEPSTRA) * np.pi / MELS
    found = np.cos(angles) * 2 / MELS
    found[:, 0] /= 2
    return np.asarray(found)


def _jump(pcm: np.ndarray, start: int, size: int) -> float:
    """Absolute change of energy at `start`, in dB."""
    before, after = (
        np.square(part, dtype=np.float64).mean() for part in (pcm[start - size : start], pcm[start : start + size])
    )
    return abs(10 * math.log10((after + FAINT) / (before + FAINT)))
