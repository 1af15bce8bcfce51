"""Who is encoded next, and whose chunk is next. Pure: no tensors, no clock of its own.

A sentence has a deadline: when its caller would hear nothing any more, and before its first sound, when that is
wanted. The nearest deadline comes first, so that first chunks come before later ones. Who is far ahead of what can
have been played waits while others are there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from asr_serve.types import Priority

DEADLINE_S: dict[Priority, float] = {"live": 0.0, "interactive": 0.0, "bulk": 60.0}
"""How soon after its arrival a sentence should sound, unless it says so itself. Somebody waits for an interactive
one; a bulk one takes what is left, and nobody plays it meanwhile: so much later is all of it wanted."""
BULK_RESERVED_ROWS = 4
"""One in so many rows is kept for what is not bulk: that holds its row until nobody else wants a step."""
MAX_STALE_ENTRIES = 64
"""Of those who were taken back, so many may still be counted."""
MAX_AHEAD_S = 10.0
"""Sound beyond what can have been played; whoever has more waits while others are there."""


class TtsDeadline(NamedTuple):
    """A sentence that wants a step. Smaller ones come first."""

    deadline_s: float
    id: int
    started: bool = False
    """Some of it was heard."""


def first_deadline_s(arrived_s: float, priority: Priority, within_ms: int | None) -> float:
    """Of a sentence that was not heard yet. `within_ms`: so much later it would do."""
    return arrived_s + DEADLINE_S[priority] + max(0, within_ms or 0) / 1_000


class Playback:
    """What a caller has been given of a sentence, and until when that lasts, played as it came."""

    def __init__(self, deadline_s: float, later_s: float = 0.0) -> None:
        """`deadline_s`: of its first sound; `later_s`: how late all that follows may come."""
        self._played_until_s, self._slack_s, self._first_deadline_s = 0.0, later_s, deadline_s
        self.started = False

    @property
    def deadline_s(self) -> float:
        """When it must have more."""
        return self._played_until_s + self._slack_s if self.started else self._first_deadline_s

    def add_audio(self, seconds: float, now_s: float) -> None:
        """Whoever ran dry waits, and goes on from here; what comes before it is wanted is played when it is."""
        dry_s = self._played_until_s if self.started else self._first_deadline_s - self._slack_s
        self._played_until_s, self.started = max(dry_s, now_s) + seconds, True


class TtsWaitingQueue:
    """Sentences that are yet to be encoded, nearest deadline first."""

    def __init__(self) -> None:
        self._turns: dict[bool, list[TtsDeadline]] = {False: [], True: []}
        """Heaps, of bulk one of its own. Those who were taken back stay until they are in the way, or many."""
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, saying: int) -> bool:
        return saying in self._sizes

    def __iter__(self) -> Iterable[int]:
        return iter(self._sizes)

    def enqueue(self, saying: int, phonemes: int, deadline_s: float, *, bulk: bool = False) -> None:
        self._sizes[saying] = phonemes
        heapq.heappush(self._turns[bulk], TtsDeadline(deadline_s, saying))

    def remove(self, saying: int) -> bool:
        """False where it does not wait here."""
        there = self._sizes.pop(saying, None) is not None
        if sum(map(len, self._turns.values())) > 2 * len(self._sizes) + MAX_STALE_ENTRIES:
            for bulk, turns in self._turns.items():
                self._turns[bulk] = [turn for turn in turns if turn.id in self._sizes]
                heapq.heapify(self._turns[bulk])
        return there

    def pop_batch(self, most: int, phonemes: int, bulk: int) -> list[int]:
        """Up to `most` sentences of so many phonemes together, the first one however long; `bulk` of them may be
        bulk. They wait no more."""
        taken: list[int] = []
        room = phonemes
        while len(taken) < most:
            heaps = [self._drop_stale(False), *([self._drop_stale(True)] if bulk else [])]
            nearest = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
            if nearest is None or (taken and self._sizes[nearest[0].id] > room):
                break
            turn = heapq.heappop(nearest)
            bulk -= nearest is self._turns[True]
            room -= self._sizes.pop(turn.id)
            taken.append(turn.id)
        return taken

    def _drop_stale(self, bulk: bool) -> list[TtsDeadline]:
        """Its first one waits still."""
        turns = self._turns[bulk]
        while turns and turns[0].id not in self._sizes:
            heapq.heappop(turns)
        return turns


def select_for_step(turns: Iterable[TtsDeadline], most: int, now_s: float) -> list[int]:
    """Whose chunks the next step makes, `most` of them at most.

    The nearest deadline comes first; those that are far ahead only where nobody else is there. Where some have run
    dry, half of the step is theirs at most as long as others wait for a first sound, so that who came first waits
    for no second step; and half is for them, so that many who come do not silence those who are heard.
    """
    order = sorted(turns)
    near = [turn for turn in order if turn.deadline_s - now_s <= MAX_AHEAD_S]
    order = near or order
    first = [turn for turn in order if not turn.started and turn.deadline_s <= now_s]
    dry = [turn for turn in order if turn.started and turn.deadline_s <= now_s]
    if first and dry:
        share = max(1, most // 2)
        kept = {*first[:share], *dry[: most - min(share, len(first))]}
        order = [*(turn for turn in order if turn in kept), *(turn for turn in order if turn not in kept)]
    return [turn.id for turn in order[:most]]


class StepBudget:
    """How much fits into a step of so long, by what steps took lately."""

    def __init__(self, step_s: float, least: int, most: int) -> None:
        """`step_s`: how long a step may be; `least` and `most`: of whatever is counted, as far as that is
        known."""
        self._step_s, self._least, self._most = step_s, least, most
        self._each_s: float | None = None

    @property
    def max_count(self) -> int:
        if self._each_s is None:
            return self._least
        return max(self._least, min(self._most, int(self._step_s / self._each_s)))

    def record_step(self, seconds: float, count: int) -> None:
        each_s = seconds / max(1, count)
        self._each_s = each_s if self._each_s is None else 0.75 * self._each_s + 0.25 * each_s
