"""Alignment of written words with spoken words.

Normalization rewrites a text as a whole, because the meaning of a word depends on its neighbours; it does not
report the origin of its words. Nearly all words stay unchanged, and rewritten ones are located between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

STROKES = "\"'“”()[]{}.,;:!?…—*`"
"""Punctuation that may surround a word and is not part of it."""


class WordAlignment(NamedTuple):
    """Written words and their spoken words: ranges of two lists, `first` up to but not including `end`."""

    first: int
    end: int
    spoken_first: int
    spoken_end: int


def align_spoken_words(
    written: Sequence[str], spoken: Sequence[str], normalise: Callable[[str], str]
) -> list[WordAlignment]:
    """Groups in order that contain every word once, as fine as possible. `normalise`: the function that made
    `spoken` of `written`; it is applied to each of several adjacent rewritten words."""
    found: list[WordAlignment] = []
    at = spoken_at = 0
    for first, spoken_first in [*_same(_bare(written), _bare(spoken)), (len(written), len(spoken))]:
        between = WordAlignment(at, first, spoken_at, spoken_first)
        if at < first and spoken_at < spoken_first:
            found += _finer(between, written, spoken, normalise)
        elif spoken_at < spoken_first and found:
            found[-1] = found[-1]._replace(spoken_end=spoken_first)
        elif at < first or spoken_at < spoken_first:
            found.append(between)
        if first < len(written):
            found.append(WordAlignment(first, first + 1, spoken_first, spoken_first + 1))
        at, spoken_at = first + 1, spoken_first + 1
    return found


def _same(written: Sequence[str], spoken: Sequence[str]) -> list[tuple[int, int]]:
    """Index pairs of unchanged words: the common subsequence with the most letters."""
    shorter = min(len(written), len(spoken))
    front = next((at for at in range(shorter) if written[at] != spoken[at]), shorter)
    back = next((at for at in range(shorter - front) if written[-1 - at] != spoken[-1 - at]), shorter - front)
    inner, inner_spoken = written[front : len(written) - back], spoken[front : len(spoken) - back]
    # best[i][j]: weight of inner[i:] and inner_spoken[j:]
    best = [[0] * (len(inner_spoken) + 1) for _ in range(len(inner) + 1)]
    for i in range(len(inner) - 1, -1, -1):
        row, below, word = best[i], best[i + 1], inner[i]
        weight = sum(map(str.isalnum, word))
        for j in range(len(inner_spoken) - 1, -1, -1):
            most = max(below[j], row[j + 1])
            row[j] = max(most, below[j + 1] + weight) if inner_spoken[j] == word else most
    same = [(at, at) for at in range(front)]
    i = j = 0
    while i < len(inner) and j < len(inner_spoken):
        if inner[i] == inner_spoken[j] and best[i][j] > max(best[i + 1][j], best[i][j + 1]):
            same.append((front + i, front + j))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return same + [(len(written) - at, len(spoken) - at) for at in range(back, 0, -1)]


def _finer(
    group: WordAlignment, written: Sequence[str], spoken: Sequence[str], normalise: Callable[[str], str]
) -> Iterator[WordAlignment]:
    """One group for each written word, if each is normalized alone as it is among the others; else the group
    itself."""
    words = written[group.first : group.end]
    if len(words) == 1:
        yield group
        return
    alone = [_bare(normalise(word).split()) for word in words]
    if [word for spoken_words in alone for word in spoken_words] != _bare(
        spoken[group.spoken_first : group.spoken_end]
    ):
        yield group
        return
    at = group.spoken_first
    for offset, spoken_words in enumerate(alone):
        yield WordAlignment(group.first + offset, group.first + offset + 1, at, at + len(spoken_words))
        at += len(spoken_words)


def _bare(words: Sequence[str]) -> list[str]:
    """Words without surrounding punctuation, which a rewritten neighbour may have moved."""
    return [word.strip(STROKES) or word for word in words]
