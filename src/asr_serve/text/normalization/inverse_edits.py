"""Edits that rewrite a spoken text in written form.

A grammar accepts only plain words in lower case, so a text is cut into stretches at punctuation, and only words
near a number are passed to the grammar: most of a text costs nothing, and no call is long.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from asr_serve.text.normalization import inverse_cjk, inverse_english
from asr_serve.text.normalization.inverse_numbers import NUMBERS
from asr_serve.text.normalization.inverse_telephone import find_telephones
from asr_serve.text.normalization.wetext_grammar import GrammarRewrite, find_rewrites
from asr_serve.text.word_timing import is_unspaced

NEAR = 3
"""Words beside a number that may belong to it: a month, a currency, `the`."""
NEAR_DOT = 8
"""Words beside a `dot` that may belong to a spoken address."""
MAX_SPAN_WORDS = 24
MAX_SPAN_CHARACTERS = 48
"""Most characters in one call, whose time grows with the square of the length."""
_CHUNK = re.compile(r"\S+")
_ABBREVIATION = re.compile(r"[A-Za-z](?:\.[A-Za-z])+\.?")
_PLAIN = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*(?:-[A-Za-z]+)*")
_OPENING = "\"'“‘([{«"
_CLOSING = "\"'”’)]}».,;:!?…"


class TextEdit(NamedTuple):
    """Range of characters of a text, and their replacement."""

    start: int
    end: int
    text: str


class PlainWord(NamedTuple):
    """A plain word with its range of characters."""

    word: str
    """Word in lower case."""
    start: int
    end: int


def find_edits(text: str, language: str) -> list[TextEdit]:
    """Edits of a text in order, never overlapping. Raises UnsupportedOption."""
    if language == "en":
        telephones = [TextEdit(*found) for found in find_telephones(text)]
        others = [change for stretch in _english(text) for change in _of_words(text, stretch)]
        separate = [edit for edit in others if not any(edit.start < d.end and d.start < edit.end for d in telephones)]
        return sorted(separate + telephones)
    return [change for start, end in _asian(text) for change in _of_characters(text, start, end, language)]


def _of_words(text: str, units: Sequence[PlainWord]) -> Iterator[TextEdit]:
    words = [unit.word for unit in units]
    starts, at = {}, 0
    for index, word in enumerate(words):
        starts[at] = index
        at += len(word) + 1
    ends = {start + len(words[index]): index + 1 for start, index in starts.items()}
    proposed: list[tuple[int, int, GrammarRewrite]] = []
    for rewrite in find_rewrites(" ".join(words), "en"):
        if rewrite.start in starts and rewrite.end in ends:
            proposed.append((starts[rewrite.start], ends[rewrite.end], rewrite))
    for first, behind, written in inverse_english.select_english_rewrites(words, proposed):
        start, end = units[first].start, units[behind - 1].end
        if written.endswith(".") and text[end : end + 1] == ".":
            end += 1
        yield TextEdit(start, end, _cased(written, text, units[first:behind]))


def _cased(written: str, text: str, units: Sequence[PlainWord]) -> str:
    """Written form with the original case of words that it has in common with the text."""
    half = text[units[-2].start : units[-1].end] if len(units) > 1 else ""
    if written.endswith((" a.m.", " p.m.")) and " " not in half:  # PM
        return f"{written[:-4]}{half}{'.' if '.' in half else ''}"
    own = {unit.word: text[unit.start : unit.end] for unit in units}
    return re.sub(r"[a-z']+", lambda found: own.get(found[0], found[0]), written)


def _of_characters(text: str, start: int, end: int, language: str) -> Iterator[TextEdit]:
    stretch = text[start:end]
    found = find_rewrites(stretch, language)
    split = {index for index, pair in enumerate(pairwise(found)) if inverse_cjk.splits_number(stretch, *pair)}
    for index, rewrite in enumerate(found):
        if index in split or index - 1 in split:
            continue
        written = inverse_cjk.select_cjk_rewrite(stretch, rewrite)
        if written is not None and written != stretch[rewrite.start : rewrite.end]:
            yield TextEdit(start + rewrite.start, start + rewrite.end, written)


def _english(text: str) -> Iterator[list[PlainWord]]:
    """Stretches of plain English words around numbers."""
    run: list[PlainWord] = []
    for chunk in _CHUNK.finditer(text):
        units, opens, closes = _units(chunk[0], chunk.start(), run)
        if not units or opens:
            yield from _near(run, inverse_english.TRIGGERS)
            run = []
        run += units
        if closes:
            yield from _near(run, inverse_english.TRIGGERS)
            run = []
    yield from _near(run, inverse_english.TRIGGERS)


def _units(chunk: str, start: int, run: Sequence[PlainWord]) -> tuple[list[PlainWord], bool, bool]:
    """Plain words of a chunk between two spaces, whether punctuation precedes them, and whether it follows."""
    core = chunk.lstrip(_OPENING)
    start += len(chunk) - len(core)
    opens = len(core) < len(chunk)
    if found := _ABBREVIATION.match(core):  # p.m.
        letters = [PlainWord(core[at].lower(), start + at, start + at + 1) for at in range(0, found.end(), 2)]
        rest = core[found.end() :]
        return (letters, opens, bool(rest)) if not rest.strip(_CLOSING) else ([], False, False)
    bare = core.rstrip(_CLOSING)
    if not _PLAIN.fullmatch(bare):
        return [], False, False
    closes = len(bare) < len(core)
    if bare.lower() in ("am", "pm") and run and run[-1].word in NUMBERS:
        return [PlainWord(c.lower(), start + at, start + at + 1) for at, c in enumerate(bare)], opens, closes
    parts, at = [], start
    for part in bare.split("-"):
        parts.append(PlainWord(part.lower().replace("’", "'"), at, at + len(part)))
        at += len(part) + 1
    if len(parts) > 1 and not all(part.word in inverse_english.TRIGGERS or part.word == "and" for part in parts):
        return [], False, False
    return parts, opens, closes


def _near(run: Sequence[PlainWord], triggers: Collection[str]) -> Iterator[list[PlainWord]]:
    """Words of a run near a trigger, in parts of up to MAX_SPAN_WORDS."""
    close = [False] * len(run)
    for at, unit in enumerate(run):
        if unit.word in triggers:
            near = NEAR_DOT if unit.word == "dot" else NEAR
            low, high = max(0, at - near), min(len(run), at + near + 1)
            close[low:high] = [True] * (high - low)
    part: list[PlainWord] = []
    for unit, wanted in zip(run, close, strict=True):
        if wanted:
            part.append(unit)
        else:
            yield from _short(part)
            part = []
    yield from _short(part)


def _short(part: Sequence[PlainWord]) -> Iterator[list[PlainWord]]:
    """Parts of up to MAX_SPAN_WORDS that never end inside a number. A longer number stays in spoken form."""
    inside = [unit.word in inverse_english.TRIGGERS or unit.word == "and" for unit in part]
    first = 0
    while len(part) - first > MAX_SPAN_WORDS:
        cuts = range(first + MAX_SPAN_WORDS, first, -1)
        if (cut := next((at for at in cuts if not inside[at - 1]), None)) is not None:
            yield list(part[first:cut])
            first = cut
        else:
            first = next((at for at in range(first, len(part)) if not inside[at]), len(part))
    if first < len(part):
        yield list(part[first:])


def _asian(text: str) -> Iterator[tuple[int, int]]:
    """Ranges of Chinese or Japanese characters that contain a numeral: without spaces and punctuation, up to
    MAX_SPAN_CHARACTERS, never ending inside a number. A longer number stays in spoken form."""
    start = 0
    too_long = False
    for at in range(len(text) + 1):
        inside = at < len(text) and (is_unspaced(text[at]) or text[at] in "・〇ー")
        too_long = too_long and inside and text[at] in inverse_cjk.NUMERALS
        if too_long:
            start = at + 1
        if inside and at - start < MAX_SPAN_CHARACTERS:
            continue
        cut = at
        while inside and cut > start and text[cut - 1] in inverse_cjk.NUMERALS:
            cut -= 1
        if any(letter in inverse_cjk.NUMERALS for letter in text[start:cut]):
            yield start, cut
        too_long = inside and cut == start
        start = at + 1 if not inside or too_long else cut
