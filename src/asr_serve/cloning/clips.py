"""Clips for cloning, cut from a speaker's recordings, with the reasons why others are rejected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asr_serve.audio.byte_source import ByteSource
from asr_serve.audio.input_manifest import InputItem
from asr_serve.audio.media_reader import MediaFile
from asr_serve.audio.pcm import clipped
from asr_serve.audio.reader import Source
from asr_serve.audio.resample import Resampler, resample_clip
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ
from asr_serve.errors import AudioError, AudioTooLong, EmptyAudio, MalformedRequest
from asr_serve.units import RATE_HZ as HEARD_HZ
from asr_serve.voices.cloning_messages import ClipReport
from asr_serve.voices.transcripts import recording_stem

SHORTEST_S, LONGEST_S = 1.0, 20.0
"""Shortest and longest clip: less has little to train on, more does not fit into a batch."""
SILENT_S = 5.0
"""Additional length allowed for the silence around a clip."""
RECORDING_S = 1_800.0
"""Longest recording that is read."""
BLOCK = RATE_HZ // 50
QUIET_DB = 38.0
"""Level below a clip's loud parts at which its ends count as silence."""
EDGE_SILENCE_S = 0.15
"""Silence that is left at, or added to, both ends: voices are trained with it."""
CLIPPED_SHARE, AT_THE_TOP = 0.0005, 0.985
"""Largest fraction of clipped samples, in runs of three or more; amplitude of one, relative to the greatest."""
OTHERWISE, LEAST_CHECKED_WORDS = 0.6, 5
"""Largest word error rate between transcript and recognition, above which the transcript belongs to another clip;
and the least number of words to check: recognition of fewer is unreliable."""
FULL = 0.25
"""Peak amplitude below which nothing counts as clipped, however flat."""
NOTHING = 1e-10
"""Power of digital silence, after a converter's rounding."""
NOISY_DB, FAINT = 12.0, 0.002
"""Least ratio of speech to the noise between words, and least root mean square of speech."""


class RecognizedClipSpan(NamedTuple):
    """Span of a recording with its text; samples at 16 kHz."""

    start: int
    end: int
    text: str


ClipRecognizer = Callable[[np.ndarray], list[RecognizedClipSpan]]
"""(samples,) float32 at 16 kHz -> recognized spans, in order."""


class CloningClip(NamedTuple):
    """Training clip. `pcm` float32 at 22.05 kHz, with EDGE_SILENCE_S of silence at its ends; `is_transcribed`: its
    text was supplied, not recognized."""

    key: str
    pcm: np.ndarray
    text: str
    is_transcribed: bool


def read_clip(source: Source) -> np.ndarray:
    """Decodes (samples,) float32 at 22.05 kHz, mono. Raises AudioError."""
    if isinstance(source, np.ndarray | tuple):
        pcm, rate_hz = source if isinstance(source, tuple) else (source, HEARD_HZ)
        return resample_clip(np.asarray(pcm), rate_hz, RATE_HZ)
    opened = ByteSource(source, None)
    try:
        media = MediaFile(opened)
        try:
            return _decoded(media.audio_chunks())
        finally:
            media.close()
    finally:
        opened.close()


def _decoded(pieces: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Concatenates pieces of any rates. Raises AudioTooLong, EmptyAudio."""
    parts: list[np.ndarray] = []
    resampler: Resampler | None = None
    samples = 0
    for rate_hz, mono in pieces:
        if resampler is None or resampler.rate_hz != rate_hz:
            parts += [resampler.finish()] if resampler else []
            resampler = Resampler(rate_hz, RATE_HZ)
        parts.append(resampler.resample(mono))
        samples += len(parts[-1])
        if samples > RECORDING_S * RATE_HZ:
            raise AudioTooLong(
                f"the recording lasts over {RECORDING_S / 60:g} minutes", "half an hour", "cut it into parts"
            )
    parts += [resampler.finish()] if resampler else []
    pcm = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(pcm):
        raise EmptyAudio("0 samples came", "a voice needs some")
    return clipped(pcm)


def to_16k(pcm: np.ndarray) -> np.ndarray:
    """Resamples from 22.05 kHz to 16 kHz."""
    return resample_clip(pcm, RATE_HZ, HEARD_HZ)


def split_recording(item: InputItem, text: str | None, ear: ClipRecognizer) -> Iterator[CloningClip | ClipReport]:
    """Yields the clips of a recording, or reports on what is wrong with it or its parts. With a transcript it is
    one clip."""
    try:
        pcm = read_clip(item.source)
    except AudioError as failure:
        yield ClipReport(item.key, 0.0, "", str(failure))
        return
    seconds = len(pcm) / RATE_HZ
    if text is not None and seconds > LONGEST_S + SILENT_S:
        yield ClipReport(item.key, round(seconds, 2), text, f"it is longer than {LONGEST_S:g} s: cut it with its text")
        return
    spans = ear(to_16k(pcm))
    if text is not None:
        yield _one(item.key, pcm, text, True, " ".join(each.text for each in spans))
        return
    if not spans:
        yield ClipReport(item.key, round(seconds, 2), "", "no speech was recognized in it")
    for number, part in enumerate(spans, 1):
        key = item.key if len(spans) == 1 else f"{item.key}#{number}"
        first, last = (round(at * RATE_HZ / HEARD_HZ) for at in (part.start, part.end))
        yield _one(key, pcm[first:last], part.text, False, part.text)


def _one(key: str, pcm: np.ndarray, text: str, is_transcribed: bool, recognized: str) -> CloningClip | ClipReport:
    fault = clip_fault(pcm) or ("" if re.search(r"\w", text) else "no words were recognized in it")
    trimmed = pcm if fault else trim_silence(pcm)
    seconds = round(len(trimmed) / RATE_HZ, 2)
    if not fault and not SHORTEST_S + 2 * EDGE_SILENCE_S <= seconds <= LONGEST_S + 2 * EDGE_SILENCE_S:
        fault = f"{seconds - 2 * EDGE_SILENCE_S:.1f} s of speech: {SHORTEST_S:g} to {LONGEST_S:g} s are needed"
    if not fault and is_transcribed and len(words(text)) >= LEAST_CHECKED_WORDS:
        share = word_error_share(text, recognized)
        if share > OTHERWISE:
            fault = f"{recognized!r} was recognized in it: {100 * share:.0f} % of the words differ from its text"
    return ClipReport(key, seconds, text, fault) if fault else CloningClip(key, trimmed, text, is_transcribed)


def powers(pcm: np.ndarray) -> np.ndarray:
    """Computes the power of blocks of 20 ms."""
    blocks = len(pcm) // BLOCK
    power: np.ndarray = np.square(pcm[: blocks * BLOCK].reshape(blocks, BLOCK), dtype=np.float64).mean(1)
    return power


def between(power: np.ndarray, percent: float) -> float:
    """Returns the noise between words: a percentile of the blocks' power. Digital silence is excluded: it is no
    room noise."""
    audible = power[power > NOTHING]
    return float(np.percentile(audible, percent)) if len(audible) else NOTHING


def clip_fault(pcm: np.ndarray) -> str:
    """Returns the reason to reject a clip; empty where there is none."""
    power = powers(pcm)
    if len(power) < 10:
        return f"{len(pcm) / RATE_HZ:.1f} s: {SHORTEST_S:g} s or more are needed"
    loud = power > np.percentile(power, 95) * 10 ** (-20 / 10)
    level = math.sqrt(float(power[loud].mean())) if loud.any() else 0.0
    if level < FAINT:
        below_db = 20 * math.log10(level + 1e-9)
        return f"it is too faint ({below_db:.0f} dB below full scale): record it closer to the microphone"
    top = np.abs(pcm) >= max(FULL, AT_THE_TOP * float(np.abs(pcm).max()))
    flat = top[2:] & top[1:-1] & top[:-2]
    if flat.mean() > CLIPPED_SHARE:
        return f"it is clipped ({100 * flat.mean():.1f} % of the samples are at full scale): record it at a lower level"
    noise = between(power, 8)
    snr_db = 10 * math.log10(level**2 / noise)
    if snr_db < NOISY_DB:
        return f"it is noisy: speech is {snr_db:.0f} dB above the noise between words, and {NOISY_DB:g} dB are needed"
    return ""


def trim_silence(pcm: np.ndarray) -> np.ndarray:
    """Trims a clip to its speech with EDGE_SILENCE_S around it, padded where there is less. Whole frames."""
    power = powers(pcm)
    floor = max(float(np.percentile(power, 95)) * 10 ** (-QUIET_DB / 10), 3 * between(power, 5))
    spoken = np.flatnonzero(power > floor)
    edge = round(EDGE_SILENCE_S * RATE_HZ)
    first, last = spoken[0] * BLOCK - edge, (spoken[-1] + 1) * BLOCK + edge
    padded = np.pad(pcm[max(0, first) : last], (max(0, -first), max(0, last - len(pcm))))
    return padded[: len(padded) // HOP * HOP].astype(np.float32)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower().replace("'", ""))


def word_error_share(text: str, hypothesis: str) -> float:
    """Returns the fraction of a text's words, without figures, that were substituted, missed or added."""
    reference, recognized = words(text), words(hypothesis)
    row = list(range(len(recognized) + 1))
    for number, word in enumerate(reference, 1):
        before, row[0] = row[0], number
        for at, other in enumerate(recognized, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (word != other))
    return row[-1] / max(1, len(reference))


def transcript_of(key: str, known: Mapping[str, str]) -> str | None:
    """Returns a recording's transcript by name, or from the file beside it that ends in .txt or .lab; else None. Raises
    MalformedRequest for a file that is not UTF-8."""
    if (text := known.get(recording_stem(key))) is not None:
        return spoken_case(text)
    for suffix in (".txt", ".lab"):
        beside = Path(key).with_suffix(suffix)
        if beside.is_file():
            try:
                return spoken_case(beside.read_text("utf-8").strip())
            except UnicodeDecodeError:
                raise MalformedRequest(f"{beside.name} is not UTF-8", "transcripts in UTF-8") from None
    return None


def spoken_case(text: str) -> str:
    """Lowers text in capitals: some corpora are written so, and it would be read as abbreviations."""
    return text.capitalize() if text.isupper() and len(text.split()) > 2 else text
