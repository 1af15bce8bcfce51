"""Segments to subtitle cues with times on screen.

A cue is at most two lines of 42 columns, by one speaker. Speech is cut into cues at minimal cost: cues end at
ends of sentences, at clause marks or at pauses, are neither shorter than 5/6 s nor longer than 7 s, and leave
time to read. Cues are then extended into free time, until they can be read. They never overlap.

Costs are integers, so that `clients/js` cuts in the same way.

Source  line length, reading speed, shortest and longest cue: Netflix's timed text style guides for English;
        cutting as a shortest path: Knuth and Plass, "Breaking paragraphs into lines", 1981
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
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
"""Reading speed in characters per second; a wide character counts twice."""
LEAST_MS, MOST_MS = 833, 7_000
"""Shortest and longest time of a cue on screen, where speech and text allow."""
PAUSE_MS = 300
"""Least pause at which a cue may end like at a clause mark; at a shorter one the next cue follows at once."""
LONG_PAUSE_MS = 1_000
"""Least pause that should end a cue."""

SENTENCE_MARKS = ".!?。！？…．"
CLAUSE_MARKS = ",;:、，；：—–"
BEHIND_MARKS = "\"'”’)]}」』】》）"
"""Characters that may follow a mark of a sentence's or clause's end."""

CUE, WITHIN, CLAUSE, BROKEN, TORN, NAMED = 40, 15, 12, 60, 80, 2_000
"""Costs of a cue; of a sentence's end, or a pause, inside it; of an end at a clause mark or a pause, between
words, between characters of a script without spaces; within a name, and between it and what its speaker says."""
STILL, SHORT, LONG, FEW = 200, 60, 100, 30
"""Costs of a long pause inside a cue; of less than LEAST_MS; of more than MOST_MS; of FEW_COLUMNS or less."""
FEW_COLUMNS = 10
HURRIED_MOST = 100


class Cue(msgspec.Struct, frozen=True):
    """Text on screen from `start_ms` to `end_ms`."""

    start_ms: int
    end_ms: int
    rows: tuple[tuple[SubtitleToken, ...], ...]
    speaker: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(map(join_row, self.rows))


def build_cues(segments: Iterable[Segment], end_ms: int | None = None, *, names: bool = False) -> Iterator[Cue]:
    """Cues in order; each lasts 1 ms or more, and one is shown at a time, but for those of speakers who talk at once.
    `end_ms`: end of the recording, after which no cue is shown unless its segment is later. `names`: text begins with
    a name where the speaker changes, for formats without a field for it."""
    pending: list[Cue] = []
    free_ms = 0
    for group in _groups(segments, names):
        if pending:
            cues = _timed_group(pending, free_ms, group[0].start_ms)
            free_ms = max(cue.end_ms for cue in cues)
            yield from cues
        pending = group
    if pending:
        last = max(free_ms, *(cue.end_ms for cue in pending))
        yield from _timed_group(pending, free_ms, last if end_ms is None else max(end_ms, last), is_last=True)


def split_lines(text: str) -> list[str]:
    """Split text into the fewest lines of 42 columns, as even as possible; a word too long for a line is cut."""
    row = [SubtitleToken(part, 0, 0, spaced) for part, spaced in split_subtitle_tokens(clean_text(text))]
    if not row:
        return []
    fewest = len(_fill(row, LINE_COLUMNS))
    low, high = max(display_columns(token.text) for token in row), LINE_COLUMNS
    while low < high:
        middle = (low + high) // 2
        if len(_fill(row, middle)) == fewest:
            high = middle
        else:
            low = middle + 1
    return [join_row(line) for line in _fill(row, high)]


def join_row(row: Iterable[SubtitleToken]) -> str:
    """Text of a line."""
    return "".join(f" {token.text}" if number and token.spaced else token.text for number, token in enumerate(row))


def ends_with(text: str, marks: str) -> bool:
    """Returns whether a text ends with one of `marks`, apart from closing quotes and brackets.

    >>> ends_with('He said "no."', SENTENCE_MARKS), ends_with("3.5", SENTENCE_MARKS)
    (True, False)
    """
    bare = text.rstrip(BEHIND_MARKS)
    return bool(bare) and bare[-1] in marks


def _groups(segments: Iterable[Segment], names: bool) -> Iterator[list[Cue]]:
    """Cues with the times of their speech, not yet extended for reading: one alone, or those of segments that overlap
    in time, in order."""
    last_speaker = ""
    for group in _overlapping(segments):
        cues = list(_cut(group, last_speaker, names))
        last_speaker = cues[-1].speaker if cues else last_speaker
        if len(group) == 1:
            yield from ([cue] for cue in cues)
        elif cues:
            yield cues


def _overlapping(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Segments one by one, those of different speakers that overlap in time together."""
    group: list[Segment] = []
    for segment in segments:
        if group and segment.start_samples >= max(each.end_samples for each in group):
            yield group
            group = []
        group.append(segment)
        if not segment.speaker:  # no other one can overlap it
            yield group
            group = []
    if group:
        yield group


def _timed_group(cues: list[Cue], free_ms: int, next_ms: int, *, is_last: bool = False) -> list[Cue]:
    """Cues with their times on screen, in order; those of one speaker do not overlap."""
    following_ms: dict[str, int] = {}
    limits_ms: list[int | None] = []
    for cue in reversed(cues):
        limits_ms.append(following_ms.get(cue.speaker))
        following_ms[cue.speaker] = cue.start_ms
    shown_ms: dict[str, int] = {}
    timed: list[Cue] = []
    for cue, limit_ms in zip(cues, reversed(limits_ms), strict=True):
        at_ms = shown_ms.get(cue.speaker, free_ms)
        is_final = is_last and limit_ms is None
        timed.append(_timed(cue, at_ms, next_ms if limit_ms is None else limit_ms, is_last=is_final))
        shown_ms[cue.speaker] = timed[-1].end_ms
    return sorted(timed, key=lambda cue: cue.start_ms)


def _cut(segments: Iterable[Segment], last_speaker: str, names: bool) -> Iterator[Cue]:
    """Cues of segments in order of time, each of one speaker; those of one segment stay in its order. With `names`,
    a cue of another speaker than the one before begins with a name, and what is left of its speech is cut again."""
    waiting: list[tuple[int, bool, int, deque[tuple[str, list[SubtitleToken]]]]] = []
    """Start of each segment's next cue, whether it is the first one, the segment's number, and the cues left. At equal
    starts a segment goes on before another begins: a name that fills a cue is followed by its text."""
    for number, segment in enumerate(segments):
        runs = groupby(subtitle_tokens(segment), key=lambda each: each[0])
        parts = deque((speaker, part) for speaker, run in runs for part in _cheapest([piece for _, piece in run]))
        if parts:
            heappush(waiting, (parts[0][1][0].start_ms, True, number, parts))
    while waiting:
        start_ms, _, number, parts = heappop(waiting)
        speaker = parts[0][0]
        if names and speaker and speaker != last_speaker:
            tokens = speaker_label(clean_text(speaker), start_ms)
            label_tokens = len(tokens)
            while parts and parts[0][0] == speaker:
                tokens += parts.popleft()[1]
            parts.extendleft((speaker, part) for part in reversed([*_cheapest(tokens, label_tokens)]))
        last_speaker, part = parts.popleft()
        yield Cue(part[0].start_ms, part[-1].end_ms, _rows(part), speaker)
        if parts:
            heappush(waiting, (parts[0][1][0].start_ms, False, number, parts))


def _cheapest(tokens: list[SubtitleToken], label_tokens: int = 0) -> Iterator[list[SubtitleToken]]:
    """Cut one speaker's tokens of a segment into cues at minimal total cost. `label_tokens`: how many are the name."""
    count = len(tokens)
    best = [0] + [-1] * count
    """Minimal cost of cutting all tokens before an index; -1: none found yet."""
    origin = [0] * (count + 1)
    ends = [NAMED if at < label_tokens else _cost_behind(tokens, at) for at in range(count)]
    inside = [_cost_within(tokens, at) for at in range(count)]
    for first in range(count):
        within = rows = width = total = 0
        for last in range(first, count):
            wide = display_columns(tokens[last].text)
            gap = int(tokens[last].spaced and last > first)
            total += wide + gap
            if last > first and width + gap + wide <= LINE_COLUMNS:
                width += gap + wide
            else:
                rows, width = rows + 1, wide
            if rows > CUE_LINES:
                break
            cost = best[first] + CUE + within + ends[last] + _cost_of_time(tokens, first, last, total)
            if best[last + 1] < 0 or cost < best[last + 1]:
                best[last + 1], origin[last + 1] = cost, first
            within += inside[last]
    edges = [count]
    while edges[-1]:
        edges.append(origin[edges[-1]])
    edges.reverse()
    for first, behind in pairwise(edges):
        yield tokens[first:behind]


def _pause_behind(tokens: list[SubtitleToken], at: int) -> int:
    """Pause after a token in ms; 0 if unknown."""
    if at + 1 == len(tokens) or not (tokens[at].timed and tokens[at + 1].timed):
        return 0
    return tokens[at + 1].start_ms - tokens[at].end_ms


def _cost_behind(tokens: list[SubtitleToken], at: int) -> int:
    """Cost of ending a cue after this token."""
    if at + 1 == len(tokens) or ends_with(tokens[at].text, SENTENCE_MARKS):
        return 0
    if ends_with(tokens[at].text, CLAUSE_MARKS) or _pause_behind(tokens, at) >= PAUSE_MS:
        return CLAUSE
    return BROKEN if tokens[at + 1].spaced else TORN


def _cost_within(tokens: list[SubtitleToken], at: int) -> int:
    """Cost of continuing a cue after this token."""
    pause = _pause_behind(tokens, at)
    if pause >= LONG_PAUSE_MS:
        return STILL
    return WITHIN * ((pause >= PAUSE_MS) + ends_with(tokens[at].text, SENTENCE_MARKS))


def _cost_of_time(tokens: list[SubtitleToken], first: int, last: int, width: int) -> int:
    start, end = tokens[first].start_ms, tokens[last].end_ms
    free = tokens[last + 1].start_ms if last + 1 < len(tokens) else end
    cost = FEW if width <= FEW_COLUMNS else 0
    if free - start < LEAST_MS:
        cost += SHORT
    if end - start > MOST_MS:
        cost += LONG + (end - start - MOST_MS) // 50
    hurried = width * 1_000 // READ_CHARACTERS - (free - start)
    return cost + max(0, min(HURRIED_MOST, hurried // 20))


def _rows(part: list[SubtitleToken]) -> tuple[tuple[SubtitleToken, ...], ...]:
    """Lines of a cue: one if it fits, else two, as even as possible, preferably with a shorter upper line and a
    break after a mark."""
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
    """Cue with its time on screen extended until it can be read, as far as the next cue allows."""
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
    """Tokens on lines, each line as full as possible."""
    lines: list[list[SubtitleToken]] = []
    width = 0
    for token in row:
        wide = display_columns(token.text)
        gap = int(token.spaced)
        if lines and width + gap + wide <= most:
            lines[-1].append(token)
            width += gap + wide
        else:
            lines.append([token])
            width = wide
    return lines
