"""A transcript as text, JSON, SRT, WebVTT or one JSON line. Every function is pure.

Text is cleaned on the way into subtitles only: white space collapses, control characters go.
"""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from asr_serve.types import Segment, Transcript
from asr_serve.units import samples_to_ms
from asr_serve.values import unknown

LINE_COLUMNS = 42
"""Widest subtitle line. A wide character (Chinese, Japanese, Korean) takes two columns."""
CUE_LINES = 2
"""Most lines on screen at once."""
SEEK_SAMPLES = 160
"""One unit of verbose_json's `seek`: a 10 ms frame."""


class Cue(msgspec.Struct, frozen=True):
    """What is on screen from `start_ms` to `end_ms`. Milliseconds: SRT and VTT know no finer."""

    start_ms: int
    end_ms: int
    lines: tuple[str, ...]


def render(transcript: Transcript, form: str) -> str:
    """The transcript in one of FORMATS. Raises OptionError for any other name."""
    if form not in FORMATS:
        raise unknown("format", form, list(FORMATS))
    return FORMATS[form](transcript)


def text(transcript: Transcript) -> str:
    """One line a segment that has words; a transcript without segments is one line."""
    lines = [" ".join(segment.text.split()) for segment in transcript.segments] or [transcript.text.strip()]
    return "".join(f"{line}\n" for line in lines if line)


def json(transcript: Transcript) -> str:
    """`{key, text, language, duration, model, segments: [{start, end, text}]}`; times in seconds."""
    return _indented(_brief(transcript) | {"model": transcript.model})


def jsonl(transcript: Transcript) -> str:
    """The same without `model`, on one line: FunASR's `{"key", "text", ...}`."""
    return msgspec.json.encode(_brief(transcript)).decode() + "\n"


def verbose_json(transcript: Transcript) -> str:
    """OpenAI's `verbose_json`, and our `key`."""
    return _indented({"key": transcript.key, **verbose(transcript)})


def verbose(transcript: Transcript) -> dict[str, Any]:
    """OpenAI's `verbose_json` as data. `seek` counts 10 ms frames to the start of the window decoded.
    `no_speech_prob` is 0 of a model that cannot tell: clients need the number."""
    return {
        "task": "transcribe",
        "language": transcript.language,
        "duration": transcript.duration_s,
        "text": transcript.text,
        "segments": [
            {
                "id": index,
                "seek": segment.start_samples // SEEK_SAMPLES,
                "start": segment.start_s,
                "end": segment.end_s,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": compression_ratio(segment.text),
                "no_speech_prob": segment.no_speech_prob,
            }
            for index, segment in enumerate(transcript.segments)
        ],
    }


def srt(transcript: Transcript) -> str:
    """SubRip. It has no escapes, so an arrow inside the text is written as one character."""
    blocks = (
        f"{number}\n{stamp(cue.start_ms, ',')} --> {stamp(cue.end_ms, ',')}\n"
        + "".join(f"{line.replace('-->', '→')}\n" for line in cue.lines)
        for number, cue in enumerate(cues(transcript.segments), start=1)
    )
    return "\n".join(blocks)


def vtt(transcript: Transcript) -> str:
    """WebVTT; `&`, `<` and `>` (and so `-->`) are escaped."""
    blocks = (
        f"{stamp(cue.start_ms, '.')} --> {stamp(cue.end_ms, '.')}\n"
        + "".join(f"{line.translate(_VTT_ESCAPES)}\n" for line in cue.lines)
        for cue in cues(transcript.segments)
    )
    return "\n".join(["WEBVTT\n", *blocks])


FORMATS: dict[str, Callable[[Transcript], str]] = {
    "text": text,
    "json": json,
    "verbose_json": verbose_json,
    "srt": srt,
    "vtt": vtt,
    "jsonl": jsonl,
}
SUFFIXES = {name: f".{name}" for name in FORMATS} | {"text": ".txt", "verbose_json": ".json"}
_VTT_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def cues(segments: Iterable[Segment]) -> Iterator[Cue]:
    """Segments cut into cues of at most two lines of 42 columns.

    Inside a segment time is shared out by characters. Cues never overlap and each lasts 1 ms or more; only a
    segment too short for that many cues runs over its end, by as many milliseconds as it has cues.
    """
    free_ms = 0
    for segment in segments:
        lines = split_lines(_clean(segment.text))
        if not lines:
            continue
        shown = [tuple(lines[i : i + CUE_LINES]) for i in range(0, len(lines), CUE_LINES)]
        start_ms = max(free_ms, samples_to_ms(segment.start_samples))
        end_ms = max(start_ms + len(shown), samples_to_ms(segment.end_samples))
        edges = _share(start_ms, end_ms, [sum(map(len, each)) for each in shown])
        for each, start, end in zip(shown, edges, edges[1:], strict=False):
            yield Cue(start, end, each)
        free_ms = edges[-1]


def split_lines(words: str) -> list[str]:
    """As few lines as 42 columns allow, then as even as they can be; a word too long for a line is cut."""
    pieces = [piece for word in words.split() for piece in _cut(word)]
    if not pieces:
        return []
    fewest = len(_fill(pieces, LINE_COLUMNS))
    low, high = max(map(_columns, pieces)), LINE_COLUMNS
    while low < high:
        middle = (low + high) // 2
        if len(_fill(pieces, middle)) == fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(pieces, high)


def stamp(ms: int, point: str) -> str:
    """`01:02:03,004`; hours grow past two digits when they must."""
    seconds, ms = divmod(ms, 1_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{ms:03}"


def compression_ratio(words: str) -> float:
    """Bytes of text per byte after zlib: high when a text repeats itself. As Whisper reports it."""
    raw = words.encode()
    return len(raw) / len(zlib.compress(raw))


def _brief(transcript: Transcript) -> dict[str, Any]:
    return {
        "key": transcript.key,
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "segments": [{"start": s.start_s, "end": s.end_s, "text": s.text} for s in transcript.segments],
    }


def _indented(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _clean(words: str) -> str:
    kept = "".join(c if c.isspace() or unicodedata.category(c) != "Cc" else "" for c in words)
    return " ".join(kept.split())


def _columns(words: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in words)


def _cut(word: str) -> list[str]:
    """A word in pieces of at most 42 columns; text without spaces comes as one long word."""
    pieces, width = [""], 0
    for c in word:
        width += _columns(c)
        if width > LINE_COLUMNS:
            pieces.append("")
            width = _columns(c)
        pieces[-1] += c
    return pieces


def _fill(pieces: list[str], columns: int) -> list[str]:
    """Pieces on lines, each line as full as it goes."""
    lines, width = [pieces[0]], _columns(pieces[0])
    for piece in pieces[1:]:
        more = 1 + _columns(piece)
        if width + more <= columns:
            lines[-1] += f" {piece}"
            width += more
        else:
            lines.append(piece)
            width = more - 1
    return lines


def _share(start_ms: int, end_ms: int, weights: list[int]) -> list[int]:
    """Edges from start to end in proportion to the weights, each at least 1 ms after the one before."""
    total, passed, edges = sum(weights), 0, [start_ms]
    for left, weight in zip(range(len(weights) - 1, -1, -1), weights, strict=True):
        passed += weight
        edge = start_ms + (end_ms - start_ms) * passed // total
        edges.append(min(max(edge, edges[-1] + 1), end_ms - left))
    return edges
