"""What may stand on a line of subtitles: the smallest pieces of a segment, and when each is said.

A piece is what stands between spaces, or a character of a script without spaces, with the marks that may not begin
or end a line beside it. Where words have times, pieces have theirs; else a segment's time is shared out by
characters. All times are whole milliseconds: SRT and VTT know no finer.

Source  which marks may not begin or end a line: JIS X 4051 ("kinsoku"), as far as subtitles need it
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
"""What may not begin a line."""
FORBIDDEN_LINE_ENDS = "「『【《〈〔［｛〖〘（“‘([{"
"""What may not end one."""
_HANGUL = ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF))
"""Wide, and with spaces between words."""


class SubtitleToken(msgspec.Struct, frozen=True):
    """Text without spaces. `spaced`: on the same line as the one before, a space stands between them."""

    text: str
    start_ms: int
    end_ms: int
    spaced: bool = True
    timed: bool = False
    """The times are those of a word, not a share of a segment's."""


def subtitle_tokens(segment: Segment) -> list[tuple[str, SubtitleToken]]:
    """All of a segment, in order, each with who says it: as its words tell, where they spell its text."""
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
            found += ((speaker, each) for each in _cut(word.text, *span, spaced=spaced, timed=True))
        return found
    span = samples_to_ms(segment.start_samples), samples_to_ms(segment.end_samples)
    return [(segment.speaker, each) for each in _cut(text, *span, spaced=True, timed=False)]


def speaker_label(name: str, at_ms: int) -> list[SubtitleToken]:
    """`Ada Lovelace:`, before what she says."""
    return [*_cut(f"{name}:", at_ms, at_ms, spaced=True, timed=False)]


def clean_text(text: str) -> str:
    """White space collapses, control characters go."""
    kept = "".join(c if c.isspace() or unicodedata.category(c) != "Cc" else "" for c in text)
    return " ".join(kept.split())


def display_columns(text: str) -> int:
    """How wide it is shown."""
    if text.isascii():
        return len(text)
    return sum(map(_width, text))


def split_subtitle_tokens(text: str) -> list[tuple[str, bool]]:
    """Clean text in pieces that fit a line, each with whether a space stands before it."""
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
