"""Recordings of a speaker, taken apart into clips, and what is wrong with each."""

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
from asr_serve.errors import AudioError, AudioTooLong, EmptyAudio
from asr_serve.units import RATE_HZ as HEARD_HZ
from asr_serve.voices.cloning_messages import ClipReport
from asr_serve.voices.transcripts import recording_stem

SHORTEST_S, LONGEST_S = 1.0, 20.0
"""Of a clip: less says little, more does not fit into a batch."""
SILENT_S = 5.0
"""So much longer it may be with the silence around it."""
RECORDING_S = 1_800.0
"""Longest recording that is taken apart."""
BLOCK = RATE_HZ // 50
QUIET_DB = 38.0
"""So far below its loud parts a clip's ends are silence."""
EDGE_SILENCE_S = 0.15
"""Silence that is left at, or put to, both ends: voices are taught with it."""
CLIPPED_SHARE, AT_THE_TOP = 0.0005, 0.985
"""Of the samples, those that stand at the recording's greatest; a run of three or more counts."""
OTHERWISE, TOLD_WORDS = 0.6, 5
"""Share of a text's words that are heard otherwise, above which it is another clip's; of so many words at least:
of fewer a recogniser makes anything."""
FULL = 0.25
"""Below this of full scale nothing is clipped, however flat its tops are."""
NOTHING = 1e-10
"""Power of what a converter makes of silence."""
NOISY_DB, FAINT = 12.0, 0.002
"""Speech must stand so far above what is heard between words; and be no fainter than this, as root mean square."""


class RecognizedClipSpan(NamedTuple):
    """Part of a recording, and what is said in it; samples at 16 kHz."""

    start: int
    end: int
    text: str


ClipRecognizer = Callable[[np.ndarray], list[RecognizedClipSpan]]
"""(samples,) float32 at 16 kHz -> what is said in it, in order."""


class CloningClip(NamedTuple):
    """What may be learnt from. `pcm` float32 at 22.05 kHz, its ends silent for KEPT_S; `given`: somebody has told
    its text, else it was heard."""

    key: str
    pcm: np.ndarray
    text: str
    is_transcribed: bool
    heard: str = ""


def read_clip(source: Source) -> np.ndarray:
    """(samples,) float32 at 22.05 kHz, mono. Raises AudioError."""
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
    """Pieces of any rates, one after the other."""
    parts: list[np.ndarray] = []
    now: Resampler | None = None
    samples = 0
    for rate_hz, mono in pieces:
        if now is None or now.rate_hz != rate_hz:
            parts += [now.finish()] if now else []
            now = Resampler(rate_hz, RATE_HZ)
        parts.append(now.resample(mono))
        samples += len(parts[-1])
        if samples > RECORDING_S * RATE_HZ:
            raise AudioTooLong(
                f"the recording lasts over {RECORDING_S / 60:g} minutes", "half an hour", "cut it into parts"
            )
    parts += [now.finish()] if now else []
    pcm = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(pcm):
        raise EmptyAudio("0 samples came", "a voice needs some")
    return clipped(pcm)


def to_16k(pcm: np.ndarray) -> np.ndarray:
    """Of 22.05 kHz."""
    return resample_clip(pcm, RATE_HZ, HEARD_HZ)


def split_recording(item: InputItem, text: str | None, ear: ClipRecognizer) -> Iterator[CloningClip | ClipReport]:
    """The clips of a recording, or what is wrong with it or a part of it. One whose text is known is one clip."""
    try:
        pcm = read_clip(item.source)
    except AudioError as failure:
        yield ClipReport(item.key, 0.0, "", str(failure))
        return
    seconds = len(pcm) / RATE_HZ
    if text is not None and seconds > LONGEST_S + SILENT_S:
        yield ClipReport(
            item.key, round(seconds, 2), text, f"it is longer than {LONGEST_S:g} s: cut it with its text"
        )
        return
    heard = ear(to_16k(pcm))
    if text is not None:
        yield from _one(item.key, pcm, text, True, " ".join(each.text for each in heard))
        return
    if not heard:
        yield ClipReport(item.key, round(seconds, 2), "", "no speech was heard in it")
    for number, part in enumerate(heard, 1):
        key = item.key if len(heard) == 1 else f"{item.key}#{number}"
        first, last = (round(at * RATE_HZ / HEARD_HZ) for at in (part.start, part.end))
        yield from _one(key, pcm[first:last], part.text, False, part.text)


def _one(key: str, pcm: np.ndarray, text: str, given: bool, heard: str) -> Iterator[CloningClip | ClipReport]:
    wrong = clip_fault(pcm) or ("" if re.search(r"\w", text) else "no words were heard in it")
    cut = pcm if wrong else trim_silence(pcm)
    seconds = round(len(cut) / RATE_HZ, 2)
    if not wrong and not SHORTEST_S + 2 * EDGE_SILENCE_S <= seconds <= LONGEST_S + 2 * EDGE_SILENCE_S:
        wrong = f"{seconds - 2 * EDGE_SILENCE_S:.1f} s of speech: {SHORTEST_S:g} to {LONGEST_S:g} s are wanted"
    if (
        not wrong
        and given
        and len(words(text)) >= TOLD_WORDS
        and (share := word_error_share(text, heard)) > OTHERWISE
    ):
        wrong = f"{heard!r} was heard in it: {100 * share:.0f} % other words than its text"
    yield ClipReport(key, seconds, text, wrong) if wrong else CloningClip(key, cut, text, given, heard)


def powers(pcm: np.ndarray) -> np.ndarray:
    """Of blocks of 20 ms."""
    blocks = len(pcm) // BLOCK
    found: np.ndarray = np.square(pcm[: blocks * BLOCK].reshape(blocks, BLOCK), dtype=np.float64).mean(1)
    return found


def between(power: np.ndarray, percent: float) -> float:
    """What is heard between words: of the blocks, that percentile. Digital silence is nobody's room."""
    heard = power[power > NOTHING]
    return float(np.percentile(heard, percent)) if len(heard) else NOTHING


def clip_fault(pcm: np.ndarray) -> str:
    """What makes it no good to learn from, in words; empty where nothing does."""
    power = powers(pcm)
    if len(power) < 10:
        return f"{len(pcm) / RATE_HZ:.1f} s: {SHORTEST_S:g} s or more are wanted"
    loud = power > np.percentile(power, 95) * 10 ** (-20 / 10)
    level = math.sqrt(float(power[loud].mean())) if loud.any() else 0.0
    if level < FAINT:
        return f"it is too faint ({20 * math.log10(level + 1e-9):.0f} dB below full scale): record it nearer"
    top = np.abs(pcm) >= max(FULL, AT_THE_TOP * float(np.abs(pcm).max()))
    flat = top[2:] & top[1:-1] & top[:-2]
    if flat.mean() > CLIPPED_SHARE:
        return f"it is clipped ({100 * flat.mean():.1f} % of the samples stand at its top): record it less loud"
    noise = between(power, 8)
    above = 10 * math.log10(level**2 / noise)
    if above < NOISY_DB:
        return f"it is noisy: speech is {above:.0f} dB above what is heard between words, {NOISY_DB:g} are wanted"
    return ""


def trim_silence(pcm: np.ndarray) -> np.ndarray:
    """KEPT_S of silence before and after what is spoken: its own as far as there is any. Whole frames."""
    power = powers(pcm)
    floor = max(float(np.percentile(power, 95)) * 10 ** (-QUIET_DB / 10), 3 * between(power, 5))
    spoken = np.flatnonzero(power > floor)
    kept = round(EDGE_SILENCE_S * RATE_HZ)
    first, last = spoken[0] * BLOCK - kept, (spoken[-1] + 1) * BLOCK + kept
    padded = np.pad(pcm[max(0, first) : last], (max(0, -first), max(0, last - len(pcm))))
    return padded[: len(padded) // HOP * HOP].astype(np.float32)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower().replace("'", ""))


def word_error_share(text: str, heard: str) -> float:
    """Share of a text's words that were heard otherwise, missed or added: its word error rate, without figures."""
    wanted, came = words(text), words(heard)
    row = list(range(len(came) + 1))
    for number, word in enumerate(wanted, 1):
        before, row[0] = row[0], number
        for at, other in enumerate(came, 1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (word != other))
    return row[-1] / max(1, len(wanted))


def transcript_of(key: str, known: Mapping[str, str]) -> str | None:
    """By the recording's name; or what stands beside it, in a file of the same name that ends in .txt or .lab."""
    if (text := known.get(recording_stem(key))) is not None:
        return spoken_case(text)
    for suffix in (".txt", ".lab"):
        beside = Path(key).with_suffix(suffix)
        if beside.is_file():
            return spoken_case(beside.read_text("utf-8").strip())
    return None


def spoken_case(text: str) -> str:
    """Capitals throughout are how a corpus writes, and no abbreviations."""
    return text.capitalize() if text.isupper() and len(text.split()) > 2 else text
