"""Inverse text normalization of a segment; the entry point of the `inverse*` files.

The spoken text is kept: of the segment in `Segment.spoken`, of each changed word in `Word.spoken`. A written word
has the time from the first to the last of its spoken words, and the lowest of their confidences. Text that is
already in written form stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from asr_serve.errors import UnsupportedOption
from asr_serve.text.normalization.inverse_edits import TextEdit, find_edits
from asr_serve.text.normalization.inverse_numbers import numbers_match
from asr_serve.text.normalization.wetext_grammar import GRAMMAR_LANGUAGES, require_wetext
from asr_serve.text.word_timing import is_spoken_character, locate_words, split_words
from asr_serve.types import Segment, Word

MAX_ALIGNED_PARTS = 12
"""Most spoken words that are aligned with a written form by content; with more, they are divided evenly."""


def check_inverse_normalization(language: str) -> None:
    """Raise UnsupportedOption for a language without grammars, or without the package. An empty language is one
    still to be detected."""
    if language and language not in GRAMMAR_LANGUAGES:
        raise UnsupportedOption(
            f"itn with language={language}",
            f"there are grammars for {', '.join(GRAMMAR_LANGUAGES)}",
            "leave itn out",
            param="itn",
        )
    require_wetext()


def inverse_normalize(segment: Segment, language: str) -> Segment:
    """Segment in written form; in a language without grammars it is unchanged. Edits across two speakers are left
    out. Raises UnsupportedOption without the package."""
    if language not in GRAMMAR_LANGUAGES or not (edits := find_edits(segment.text, language)):
        return segment
    speakers = {word.speaker for word in segment.words}
    if len(speakers) > 1:
        edits = [edit for edit in edits if len({w.speaker for w in _covered_words(segment, edit)}) == 1]
    if not edits:
        return segment
    return msgspec.structs.replace(
        segment,
        text=apply_edits(segment.text, edits),
        spoken=segment.spoken or segment.text,
        words=tuple(_words(segment, edits, language)) if segment.words else (),
    )


def apply_edits(text: str, made: Sequence[TextEdit]) -> str:
    """Text with its edits applied."""
    parts, at = [], 0
    for edit in made:
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


def _covered_words(segment: Segment, change: TextEdit) -> list[Word]:
    """Words that an edit covers."""
    return [
        word
        for word, (start, end) in zip(segment.words, locate_words(segment.text, segment.words), strict=True)
        if start < change.end and end > change.start
    ]


def _words(segment: Segment, made: Sequence[TextEdit], language: str) -> Iterator[Word]:
    spans = locate_words(segment.text, segment.words)
    at = 0
    for edit in made:
        while at < len(spans) and spans[at][1] <= edit.start:
            yield segment.words[at]
            at += 1
        first = at
        while at < len(spans) and spans[at][0] < edit.end:
            at += 1
        if first == at:
            continue
        # Include punctuation, and letters, of these words outside the edit.
        lead = segment.text[spans[first][0] : edit.start]
        trail = segment.text[edit.end : spans[at - 1][1]]
        yield from _replaced(segment.words[first:at], f"{lead}{edit.text}{trail}", language)
    yield from segment.words[at:]


def _replaced(words: Sequence[Word], text: str, language: str) -> Iterator[Word]:
    """Words of `text`, each with the time of the words of `words` that it replaces."""
    parts = [text[start:end] for start, end in split_words(text)]
    for part, (first, behind) in zip(parts, _aligned([word.text for word in words], parts, language), strict=True):
        group = words[first:behind]
        spoken = strip_punctuation((" " if language == "en" else "").join(word.text for word in group))
        yield msgspec.structs.replace(
            group[0],
            text=part,
            end_samples=group[-1].end_samples,
            confidence=min(word.confidence for word in group),
            spoken="" if strip_punctuation(part) == spoken else group[0].spoken or spoken,
        )


def strip_punctuation(text: str) -> str:
    """Text without surrounding punctuation."""
    return re.sub(r"^\W+|[^\w%]+$", "", text) or text


def _aligned(words: Sequence[str], parts: Sequence[str], language: str) -> list[tuple[int, int]]:
    """Range of the spoken words of each written part: in order, covering all words, at least one each. With more
    parts than words, several parts share a word.

    Alignment of the least total `_distance`, which is 0 for a part spelled with the letters of its words.
    """
    count, total = len(words), len(parts)
    if count < total:
        return [(at * count // total, at * count // total + 1) for at in range(total)]
    if count > MAX_ALIGNED_PARTS:
        edges = [at * count // total for at in range(total + 1)]
        return list(pairwise(edges))
    best: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]] = {(0, 0): (0, ())}
    for part in range(total):
        for behind in range(part + 1, count - (total - part - 1) + 1):
            ways = []
            for first in range(part, behind):
                if (part, first) in best:
                    cost, path = best[part, first]
                    cost += _distance(tuple(words[first:behind]), parts[part], language)
                    ways.append((cost, (*path, (first, behind))))
            best[part + 1, behind] = min(ways)
    return list(best[total, count][1])


@lru_cache(4_096)
def _distance(words: tuple[str, ...], part: str, language: str) -> int:
    """Distance of a written part from the written form of these words, 0 to 10."""
    written = _signs(part)
    letters = "".join(_signs(word) for word in words)
    if letters == written:
        return 0
    digits = "".join(c for c in written if c.isdigit())
    if language == "en":
        same = numbers_match([part for word in words for part in strip_punctuation(word).casefold().split("-")], digits)
    else:
        text = "".join(strip_punctuation(word) for word in words)
        same = digits == "".join(c for c in apply_edits(text, find_edits(text, language)) if c.isdigit())
    if digits and same:
        return 1
    return 4 if letters and (written in letters or letters in written) else 10


def _signs(text: str) -> str:
    return "".join(c for c in text.casefold() if is_spoken_character(c) and c not in "%$€£¥&")
