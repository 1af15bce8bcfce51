"""Subtitle tokens: the smallest pieces of a segment that a line break may separate, with their times.

A token is text between spaces, or a character of a script without spaces, with adjacent marks that may not begin
or end a line. Tokens have the times of their words where these are known; else a segment's time is divided by
characters. All times are whole milliseconds, the resolution of SRT and VTT.

Source  marks that may not begin or end a line: JIS X 4051 ("kinsoku"), as far as subtitles need it
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import msgspec

from asr_serve.types import Segment
from asr_serve.units import samples_to_ms

LINE_COLUMNS = 42
"""Widest subtitle line. A wide character (Chinese, Japanese, Korean) takes two columns."""
FORBIDDEN_LINE_STARTS = (
    "。、，．！？；：）」』】》〉〕］｝〗〙”’・ー々ゝゞぁぃぅぇぉっゃゅょァィゥェォッャュョ…,.!?;:)]}\"'%％°"
)
"""Characters that may not begin a line."""
FORBIDDEN_LINE_ENDS = "「『【《〈〔［｛〖〘（“‘([{"
"""Characters that may not end a line."""
_HANGUL = ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF))
"""Ranges of a wide script that has spaces between words."""


class SubtitleToken(msgspec.Struct, frozen=True):
    """Text without spaces. `spaced`: a space separates it from the token before on the same line."""

    text: str
    start_ms: int
    end_ms: int
    spaced: bool = True
    timed: bool = False
    """Whether the times are those of a word, not a share of a segment's."""


def subtitle_tokens(segment: Segment) -> list[tuple[str, SubtitleToken]]:
    """Tokens of a segment in order, each with its speaker; from the segment's words where they spell its text."""
    found: list[tuple[str, SubtitleToken]] = []
    words = segment.words
    text = segment.text
    if words and "".join("".join(word.text.split()) for word in words) == "".join(text.split()):
        at = 0
        for word in words:
            first = text.index(word.text.split()[0], at) if word.text.split() else at
            spaced = text[at:first].isspace() or not found
            at = first + len(word.text)
            span = samples_to_ms(word.start_samples), samples_to_ms(word.end_samples)
            speaker = word.speaker or segment.speaker
            found += ((speaker, token) for token in _cut(word.text, *span, spaced=spaced, timed=True))
        return found
    span = samples_to_ms(segment.start_samples), samples_to_ms(segment.end_samples)
    return [(segment.speaker, token) for token in _cut(text, *span, spaced=True, timed=False)]


def speaker_label(name: str, at_ms: int) -> list[SubtitleToken]:
    """Tokens of a label like `Ada Lovelace:`, shown before the speaker's text."""
    return [*_cut(f"{name}:", at_ms, at_ms, spaced=True, timed=False)]


def clean_text(text: str) -> str:
    """Collapse white space and remove control characters."""
    printable = "".join(c if c.isspace() or unicodedata.category(c) != "Cc" else "" for c in text)
    return " ".join(printable.split())


def display_columns(text: str) -> int:
    """Display width of a text in columns."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def split_subtitle_tokens(text: str) -> list[tuple[str, bool]]:
    """Clean text as pieces that fit on a line, each with whether a space precedes it."""
    found: list[tuple[str, bool]] = []
    for chunk in text.split():
        first, width = 0, 0
        spaced = True
        for at, letter in enumerate(chunk):
            width += _width(letter)
            before = chunk[at - 1] if at else ""
            if at and at > first and (width > LINE_COLUMNS or _may_break(before, letter)):
                found.append((chunk[first:at], spaced))
                first, width, spaced = at, _width(letter), False
        found.append((chunk[first:], spaced))
    return found


def _cut(text: str, start_ms: int, end_ms: int, *, spaced: bool, timed: bool) -> Iterator[SubtitleToken]:
    parts = split_subtitle_tokens(clean_text(text))
    total = sum(len(part) for part, _ in parts)
    passed = 0
    for number, (part, gap) in enumerate(parts):
        begins = start_ms + (end_ms - start_ms) * passed // total
        passed += len(part)
        ends = start_ms + (end_ms - start_ms) * passed // total
        yield SubtitleToken(part, begins, ends, gap if number else spaced, timed)


def _width(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _may_break(before: str, letter: str) -> bool:
    if letter in FORBIDDEN_LINE_STARTS or before in FORBIDDEN_LINE_ENDS:
        return False
    return _is_unspaced(letter) or _is_unspaced(before)


def _is_unspaced(letter: str) -> bool:
    code = ord(letter)
    return code > 0x7F and _width(letter) == 2 and not any(low <= code <= high for low, high in _HANGUL)
