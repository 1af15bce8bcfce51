"""Segments to cues: what is on screen, from when to when.

A cue is at most two lines of 42 columns, by one speaker. Of all ways to cut what somebody says, the one is taken
that costs least: cues end where sentences end, at clause marks or where the speaker pauses, are neither shorter
than 5/6 s nor longer than 7 s, and leave time to read. Then cues stay on screen while there is room, until they
can have been read. They never overlap.

Costs are whole numbers, so that `clients/js` cuts alike.

Source  line length, reading speed, shortest and longest cue: Netflix's timed text style guides for English;
        cutting as a shortest path: Knuth and Plass, "Breaking paragraphs into lines", 1981
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

import msgspec

from asr_serve.text.formats.subtitle_tokens import (
    LINE_COLUMNS,
    SubtitleToken,
    clean_text,
    display_columns,
    speaker_label,
    split_subtitle_tokens,
    subtitle_tokens,
)
from asr_serve.types import Segment

CUE_LINES = 2
"""Most lines on screen at once."""
READ_CHARACTERS = 17
"""A second, as fast as most people read; a wide character counts twice."""
LEAST_MS, MOST_MS = 833, 7_000
"""On screen, where there is time and text enough."""
PAUSE_MS = 300
"""A pause at which a cue may well end; shorter, the next cue follows at once."""
LONG_PAUSE_MS = 1_000
"""What stands still so long is another cue's."""

SENTENCE_MARKS = ".!?。！？…．"
CLAUSE_MARKS = ",;:、，；：—–"
BEHIND_MARKS = "\"'”’)]}」』】》）"
"""They may stand behind a mark that ends something."""

CUE, WITHIN, CLAUSE, BROKEN, TORN = 40, 15, 12, 60, 80
"""What it costs: a cue; the end of a sentence, or a pause, inside one; to end at a clause mark or a pause, between
words, between characters of a script without spaces."""
STILL, SHORT, LONG, FEW = 200, 60, 100, 30
"""A long pause inside; less than LEAST_MS; more than MOST_MS; a cue of FEW_COLUMNS or less."""
FEW_COLUMNS = 10
HURRIED_MOST = 100


class Cue(msgspec.Struct, frozen=True):
    """What is on screen from `start_ms` to `end_ms`."""

    start_ms: int
    end_ms: int
    rows: tuple[tuple[SubtitleToken, ...], ...]
    speaker: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(map(join_row, self.rows))


def build_cues(segments: Iterable[Segment], end_ms: int | None = None, *, names: bool = False) -> Iterator[Cue]:
    """Cues in order; each lasts 1 ms or more. `end_ms`: of the recording, behind which nothing is shown unless its
    segments are. `names`: where the speaker changes the text begins with a name, for formats that have no other
    place for it."""
    waiting: Cue | None = None
    free_ms = 0
    for cut in _cut(segments, names):
        if waiting is not None:
            waiting = _timed(waiting, free_ms, cut.start_ms)
            free_ms = waiting.end_ms
            yield waiting
        waiting = cut
    if waiting is not None:
        last = max(waiting.end_ms, free_ms)
        yield _timed(waiting, free_ms, last if end_ms is None else max(end_ms, last), is_last=True)


def split_lines(text: str) -> list[str]:
    """As few lines as 42 columns allow, then as even as they can be; a word too long for a line is cut."""
    row = [SubtitleToken(part, 0, 0, spaced) for part, spaced in split_subtitle_tokens(clean_text(text))]
    if not row:
        return []
    fewest = len(_fill(row, LINE_COLUMNS))
    low, high = max(display_columns(each.text) for each in row), LINE_COLUMNS
    while low < high:
        middle = (low + high) // 2
        if len(_fill(row, middle)) == fewest:
            high = middle
        else:
            low = middle + 1
    return [join_row(line) for line in _fill(row, high)]


def join_row(row: Iterable[SubtitleToken]) -> str:
    """A line as it is shown."""
    return "".join(f" {each.text}" if number and each.spaced else each.text for number, each in enumerate(row))


def ends_with(text: str, marks: str) -> bool:
    """
    >>> ends_with('He said "no."', SENTENCE_MARKS), ends_with("3.5", SENTENCE_MARKS)
    (True, False)
    """
    bare = text.rstrip(BEHIND_MARKS)
    return bool(bare) and bare[-1] in marks


def _cut(segments: Iterable[Segment], names: bool) -> Iterator[Cue]:
    """With the times of what they say."""
    told = ""
    for segment in segments:
        for speaker, group in groupby(subtitle_tokens(segment), key=lambda each: each[0]):
            said = [piece for _, piece in group]
            if names and speaker and speaker != told:
                said = [*speaker_label(clean_text(speaker), said[0].start_ms), *said]
            told = speaker
            for part in _cheapest(said):
                yield Cue(part[0].start_ms, part[-1].end_ms, _rows(part), speaker)


def _cheapest(said: list[SubtitleToken]) -> Iterator[list[SubtitleToken]]:
    """Cuts what one speaker says in a segment, so that the whole costs least."""
    count = len(said)
    best = [0] + [-1] * count
    """What the cheapest way costs to cut all before a piece; -1: there is none yet."""
    origin = [0] * (count + 1)
    ends = [_cost_behind(said, at) for at in range(count)]
    inside = [_cost_within(said, at) for at in range(count)]
    for first in range(count):
        within = rows = width = total = 0
        for last in range(first, count):
            wide = display_columns(said[last].text)
            gap = int(said[last].spaced and last > first)
            total += wide + gap
            if last > first and width + gap + wide <= LINE_COLUMNS:
                width += gap + wide
            else:
                rows, width = rows + 1, wide
            if rows > CUE_LINES:
                break
            cost = best[first] + CUE + within + ends[last] + _cost_of_time(said, first, last, total)
            if best[last + 1] < 0 or cost < best[last + 1]:
                best[last + 1], origin[last + 1] = cost, first
            within += inside[last]
    edges = [count]
    while edges[-1]:
        edges.append(origin[edges[-1]])
    edges.reverse()
    for first, behind in pairwise(edges):
        yield said[first:behind]


def _pause_behind(said: list[SubtitleToken], at: int) -> int:
    """In ms, where it is known."""
    if at + 1 == len(said) or not (said[at].timed and said[at + 1].timed):
        return 0
    return said[at + 1].start_ms - said[at].end_ms


def _cost_behind(said: list[SubtitleToken], at: int) -> int:
    """Of a cue that ends with this piece."""
    if at + 1 == len(said) or ends_with(said[at].text, SENTENCE_MARKS):
        return 0
    if ends_with(said[at].text, CLAUSE_MARKS) or _pause_behind(said, at) >= PAUSE_MS:
        return CLAUSE
    return BROKEN if said[at + 1].spaced else TORN


def _cost_within(said: list[SubtitleToken], at: int) -> int:
    """Of a cue that goes on behind this piece."""
    pause = _pause_behind(said, at)
    if pause >= LONG_PAUSE_MS:
        return STILL
    return WITHIN * ((pause >= PAUSE_MS) + ends_with(said[at].text, SENTENCE_MARKS))


def _cost_of_time(said: list[SubtitleToken], first: int, last: int, width: int) -> int:
    start, end = said[first].start_ms, said[last].end_ms
    free = said[last + 1].start_ms if last + 1 < len(said) else end
    cost = FEW if width <= FEW_COLUMNS else 0
    if free - start < LEAST_MS:
        cost += SHORT
    if end - start > MOST_MS:
        cost += LONG + (end - start - MOST_MS) // 50
    hurried = width * 1_000 // READ_CHARACTERS - (free - start)
    return cost + max(0, min(HURRIED_MOST, hurried // 20))


def _rows(part: list[SubtitleToken]) -> tuple[tuple[SubtitleToken, ...], ...]:
    """One line if it fits, else two: as even as may be, the upper rather the shorter, better behind a mark."""
    if len(_fill(part, LINE_COLUMNS)) == 1:
        return (tuple(part),)
    best: tuple[int, int] | None = None
    for at in range(1, len(part)):
        upper, lower = display_columns(join_row(part[:at])), display_columns(join_row(part[at:]))
        if max(upper, lower) > LINE_COLUMNS:
            continue
        marked = ends_with(part[at - 1].text, SENTENCE_MARKS + CLAUSE_MARKS)
        cost = abs(upper - lower) + (0 if marked else 12) + (4 if upper > lower else 0)
        cost += 0 if part[at].spaced else 12
        if best is None or cost < best[0]:
            best = cost, at
    assert best is not None, "what two lines hold can be cut into two"
    return tuple(part[: best[1]]), tuple(part[best[1] :])


def _timed(cue: Cue, free_ms: int, next_ms: int, *, is_last: bool = False) -> Cue:
    """On screen until it can have been read, as far as there is room before the next."""
    start = max(cue.start_ms, free_ms)
    limit = max(next_ms, start + 1)
    end = min(max(cue.end_ms, start + 1), limit)
    width = sum(display_columns(line) for line in cue.lines)
    needed = min(MOST_MS, max(LEAST_MS, -(-width * 1_000 // READ_CHARACTERS)))
    end = max(end, min(start + needed, limit))
    if not is_last and limit - end < PAUSE_MS and limit - start <= MOST_MS:
        end = limit
    return Cue(start, end, cue.rows, cue.speaker)


def _fill(row: list[SubtitleToken], most: int) -> list[list[SubtitleToken]]:
    """Pieces on lines, each line as full as it goes."""
    lines: list[list[SubtitleToken]] = []
    width = 0
    for piece in row:
        wide = display_columns(piece.text)
        gap = int(piece.spaced)
        if lines and width + gap + wide <= most:
            lines[-1].append(piece)
            width += gap + wide
        else:
            lines.append([piece])
            width = wide
    return lines
