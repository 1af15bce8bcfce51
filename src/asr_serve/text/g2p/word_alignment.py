"""Which written words became which spoken ones.

What normalises a text rewrites it as a whole, because what a word means depends on its neighbours; it cannot tell
where its words come from. Nearly all stay as they are, and between those that do, the rest is where something was
rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

STROKES = "\"'“”()[]{}.,;:!?…—*`"
"""What may stand around a word and is no part of it."""


class WordAlignment(NamedTuple):
    """Written words, and the spoken ones that they are read as: ranges of two lists, each from `first` up to
    `end`."""

    first: int
    end: int
    spoken_first: int
    spoken_end: int


def align_spoken_words(
    written: Sequence[str], spoken: Sequence[str], normalise: Callable[[str], str]
) -> list[WordAlignment]:
    """Groups in order, which hold every word once, as fine as can be told. `normalise`: what made one of the
    other; words that were rewritten side by side are asked about one by one."""
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
    """Words that stayed: the heaviest common subsequence, a word weighing as much as it has letters."""
    shorter = min(len(written), len(spoken))
    front = next((at for at in range(shorter) if written[at] != spoken[at]), shorter)
    back = next((at for at in range(shorter - front) if written[-1 - at] != spoken[-1 - at]), shorter - front)
    inner, said = written[front : len(written) - back], spoken[front : len(spoken) - back]
    # best[i][j]: of inner[i:] and said[j:]
    best = [[0] * (len(said) + 1) for _ in range(len(inner) + 1)]
    for i in range(len(inner) - 1, -1, -1):
        row, below, word = best[i], best[i + 1], inner[i]
        weight = sum(map(str.isalnum, word))
        for j in range(len(said) - 1, -1, -1):
            most = max(below[j], row[j + 1])
            row[j] = max(most, below[j + 1] + weight) if said[j] == word else most
    same = [(at, at) for at in range(front)]
    i = j = 0
    while i < len(inner) and j < len(said):
        if inner[i] == said[j] and best[i][j] > max(best[i + 1][j], best[i][j + 1]):
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
    """One group for each written word, if each by itself is said as it is among the others."""
    words = written[group.first : group.end]
    if len(words) == 1:
        yield group
        return
    alone = [_bare(normalise(word).split()) for word in words]
    if [word for said in alone for word in said] != _bare(spoken[group.spoken_first : group.spoken_end]):
        yield group
        return
    at = group.spoken_first
    for offset, said in enumerate(alone):
        yield WordAlignment(group.first + offset, group.first + offset + 1, at, at + len(said))
        at += len(said)


def _bare(words: Sequence[str]) -> list[str]:
    """Without the punctuation around them, which a rewritten neighbour may have moved."""
    return [word.strip(STROKES) or word for word in words]
