"""START HERE: a segment as one writes it.

What was said stays beside it: the whole in `Segment.spoken`, of each word that changed in `Word.spoken`. A written
word lasts from the first to the last of the words that were said for it, and is as certain as the least certain of
them. A text that is already written stays as it is.
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
"""Spoken words that are tried one by one for what they are in the written form; of more, time is shared."""


def check_inverse_normalization(language: str) -> None:
    """Raises UnsupportedOption where nothing can be written so: in another language, or without the package. No
    language: it is yet to be heard."""
    if language and language not in GRAMMAR_LANGUAGES:
        raise UnsupportedOption(
            f"itn with language={language}",
            f"there are grammars for {', '.join(GRAMMAR_LANGUAGES)}",
            "leave itn out",
            param="itn",
        )
    require_wetext()


def inverse_normalize(segment: Segment, language: str) -> Segment:
    """In a language without grammars: the segment as it is. Raises UnsupportedOption without the package."""
    if language not in GRAMMAR_LANGUAGES or not (made := find_edits(segment.text, language)):
        return segment
    told = {word.speaker for word in segment.words}
    if len(told) > 1:
        made = [change for change in made if len({w.speaker for w in _said(segment, change)}) == 1]
    if not made:
        return segment
    return msgspec.structs.replace(
        segment,
        text=apply_edits(segment.text, made),
        spoken=segment.spoken or segment.text,
        words=tuple(_words(segment, made, language)) if segment.words else (),
    )


def apply_edits(text: str, made: Sequence[TextEdit]) -> str:
    """The text with its changes."""
    parts, at = [], 0
    for change in made:
        parts += [text[at : change.start], change.text]
        at = change.end
    return "".join([*parts, text[at:]])


def _said(segment: Segment, change: TextEdit) -> list[Word]:
    """The words that a change is of."""
    return [
        word
        for word, (start, end) in zip(segment.words, locate_words(segment.text, segment.words), strict=True)
        if start < change.end and end > change.start
    ]


def _words(segment: Segment, made: Sequence[TextEdit], language: str) -> Iterator[Word]:
    spans = locate_words(segment.text, segment.words)
    at = 0
    for change in made:
        while at < len(spans) and spans[at][1] <= change.start:
            yield segment.words[at]
            at += 1
        first = at
        while at < len(spans) and spans[at][0] < change.end:
            at += 1
        if first == at:
            continue
        # With the marks, and letters, of its words that are not the change's.
        lead = segment.text[spans[first][0] : change.start]
        trail = segment.text[change.end : spans[at - 1][1]]
        yield from _replaced(segment.words[first:at], f"{lead}{change.text}{trail}", language)
    yield from segment.words[at:]


def _replaced(said: Sequence[Word], text: str, language: str) -> Iterator[Word]:
    """Words for `text`, each with the times of those of `said` that it stands for."""
    parts = [text[start:end] for start, end in split_words(text)]
    for part, (first, behind) in zip(parts, _aligned([word.text for word in said], parts, language), strict=True):
        group = said[first:behind]
        spoken = strip_punctuation((" " if language == "en" else "").join(word.text for word in group))
        yield msgspec.structs.replace(
            group[0],
            text=part,
            end_samples=group[-1].end_samples,
            confidence=min(word.confidence for word in group),
            spoken="" if strip_punctuation(part) == spoken else group[0].spoken or spoken,
        )


def strip_punctuation(text: str) -> str:
    """Without the marks around it."""
    return re.sub(r"^\W+|[^\w%]+$", "", text) or text


def _aligned(said: Sequence[str], parts: Sequence[str], language: str) -> list[tuple[int, int]]:
    """For each written part the words said for it: in order, all of them, one at least. Where there are more parts
    than words, some stand for the same.

    Cheapest way: a part costs nothing where it is written for just these words, or spelt of their letters.
    """
    count, wanted = len(said), len(parts)
    if count < wanted:
        return [(at * count // wanted, at * count // wanted + 1) for at in range(wanted)]
    if count > MAX_ALIGNED_PARTS:
        edges = [at * count // wanted for at in range(wanted + 1)]
        return list(pairwise(edges))
    best: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]] = {(0, 0): (0, ())}
    for part in range(wanted):
        for behind in range(part + 1, count - (wanted - part - 1) + 1):
            ways = []
            for first in range(part, behind):
                if (part, first) in best:
                    cost, path = best[part, first]
                    cost += _distance(tuple(said[first:behind]), parts[part], language)
                    ways.append((cost, (*path, (first, behind))))
            best[part + 1, behind] = min(ways)
    return list(best[wanted, count][1])


@lru_cache(4_096)
def _distance(said: tuple[str, ...], part: str, language: str) -> int:
    """How far what is written is from what is written for just these words: 0 to 10."""
    wanted = _signs(part)
    letters = "".join(_signs(word) for word in said)
    if letters == wanted:
        return 0
    have = "".join(c for c in wanted if c.isdigit())
    if language == "en":
        told = numbers_match(
            [part for word in said for part in strip_punctuation(word).casefold().split("-")], have
        )
    else:
        text = "".join(strip_punctuation(word) for word in said)
        told = have == "".join(c for c in apply_edits(text, find_edits(text, language)) if c.isdigit())
    if have and told:
        return 1
    return 4 if letters and (wanted in letters or letters in wanted) else 10


def _signs(text: str) -> str:
    return "".join(c for c in text.casefold() if is_spoken_character(c) and c not in "%$€£¥&")
