"""Speaker of each word, and segments split where the speaker changes."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from asr_serve.types import Segment, SpeakerTurn, Word

KEPT_SHARE = 0.5
"""Advantage, as a share of the word, that another speaker needs over the last one: where two speak at once, a
sentence stays with whoever began it."""

Timed = TypeVar("Timed", Segment, Word)


class TurnIndex:
    """Speaker turns by time."""

    def __init__(self, turns: Sequence[SpeakerTurn]) -> None:
        self._turns = sorted(turns, key=lambda turn: turn.start_samples)
        self._starts = [turn.start_samples for turn in self._turns]
        self._longest = max((turn.end_samples - turn.start_samples for turn in self._turns), default=0)

    def shares(self, start: int, end: int) -> dict[str, float]:
        """Returns the share of start..end, 0 to 1, in which each speaker is active; inactive ones are omitted."""
        shares: dict[str, float] = {}
        first = bisect.bisect_left(self._starts, start - self._longest)
        for turn in self._turns[first : bisect.bisect_left(self._starts, end)]:
            common = min(end, turn.end_samples) - max(start, turn.start_samples)
            if common > 0:
                shares[turn.speaker] = shares.get(turn.speaker, 0.0) + common / max(1, end - start)
        return shares

    def speaker(self, start: int, end: int, last: str = "") -> str:
        """Returns the speaker from `start` to `end`; `last` is the speaker before. Outside all turns, the speaker
        of the nearest one; empty where there are no turns."""
        shares = self.shares(start, end)
        if not shares:
            near = min(self._turns, key=lambda t: max(t.start_samples - end, start - t.end_samples), default=None)
            return near.speaker if near else ""
        best = max(shares, key=lambda name: (shares[name], name == last))
        if last in shares and shares[best] - shares[last] < KEPT_SHARE:
            return last
        return best


def split_by_speaker(segment: Segment, turns: TurnIndex, words: bool) -> list[Segment]:
    """Splits a segment at speaker changes: one segment for each run of words of one speaker. A segment without
    words stays whole, with its main speaker. `words`: whether the result has words."""
    if not segment.words:
        return [msgspec.structs.replace(segment, speaker=turns.speaker(segment.start_samples, segment.end_samples))]
    last, tagged = "", list[Word]()
    for word in segment.words:
        last = turns.speaker(word.start_samples, word.end_samples, last)
        tagged.append(msgspec.structs.replace(word, speaker=last))
    runs = [0, *(i for i in range(1, len(tagged)) if tagged[i].speaker != tagged[i - 1].speaker), len(tagged)]
    if len(runs) == 2:
        return [msgspec.structs.replace(segment, speaker=last, words=tuple(tagged) if words else ())]
    return [_part(segment, tagged, first, after, words) for first, after in itertools.pairwise(runs)]


def outside_ranges(segment: Segment, ranges: Sequence[tuple[int, int]]) -> list[Segment]:
    """Returns the parts of a segment whose words are outside of the ranges (start, end), in samples, by their middles.
    No part or word of the result reaches into a range. A segment without words is left whole."""

    def inside(at: float) -> bool:
        return any(start <= at < end for start, end in ranges)

    def clipped(each: Timed, at: float) -> Timed:
        """Returns `each`, which `at` is in, without what is in a range before or after `at`."""
        start = max((end for _, end in ranges if end <= at), default=each.start_samples)
        end = min((start for start, _ in ranges if start > at), default=each.end_samples)
        return msgspec.structs.replace(
            each, start_samples=max(start, each.start_samples), end_samples=min(end, each.end_samples)
        )

    ranges = [each for each in ranges if each[0] < segment.end_samples and segment.start_samples < each[1]]
    if not segment.words or not ranges:
        return [segment]
    words, middles = list(segment.words), [(word.start_samples + word.end_samples) / 2 for word in segment.words]
    # A gap between two words that a range is in separates parts, too.
    parts = list[list[int]]()
    for index, middle in enumerate(middles):
        if inside(middle):
            continue
        last = parts[-1][-1] if parts else -1
        if last == index - 1 >= 0 and not any(middles[last] < start < middle for start, _ in ranges):
            parts[-1].append(index)
        else:
            parts.append([index])
    words = list(map(clipped, words, middles))
    if len(parts) == 1 and len(parts[0]) == len(words):  # keeps its tokens
        return [clipped(msgspec.structs.replace(segment, words=tuple(words)), middles[0])]
    return [clipped(_part(segment, words, part[0], part[-1] + 1, True), middles[part[0]]) for part in parts]


def _part(segment: Segment, said: list[Word], first: int, after: int, words: bool) -> Segment:
    """Returns a part of the segment without tokens, since the split of tokens is not known here."""
    cuts = _cuts(segment.text, said)
    start = segment.start_samples if not first else said[first].start_samples
    end = segment.end_samples if after == len(said) else said[after - 1].end_samples
    return msgspec.structs.replace(
        segment,
        start_samples=start,
        end_samples=max(start, end),
        text=segment.text[cuts[first] : cuts[after]].strip(),
        tokens=(),
        logprobs=(),
        speaker=said[first].speaker,
        words=tuple(said[first:after]) if words else (),
    )


def _cuts(text: str, said: Sequence[Word]) -> list[int]:
    """Returns the offset of each word in the text, and the end of the text."""
    cuts, position = [], 0
    for word in said:
        offset = text.find(word.text, position)
        cuts.append(position if offset < 0 else offset)
        position = cuts[-1] + (0 if offset < 0 else len(word.text))
    return [0, *cuts[1:], len(text)]
