"""TTS scheduling: which sentences are encoded next, and which get the next chunks. Pure: no tensors, no clock.

A sentence has a deadline: when playback would run dry, or when its first audio is requested. The nearest deadline
comes first, so first chunks come before later ones. A sentence far ahead of playback waits while others need a
step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from asr_serve.types import Priority

DEADLINE_S: dict[Priority, float] = {"live": 0.0, "interactive": 0.0, "bulk": 60.0}
"""Time from arrival to first audio, by priority, unless the request allows more. A client waits for an interactive
sentence; a bulk one uses spare capacity and is not played meanwhile, so all of its audio may be that late."""
BULK_RESERVED_ROWS = 4
"""One row in so many is reserved for other priorities: a bulk sentence holds its row until no other needs a
step."""
MAX_STALE_ENTRIES = 64
"""Removed sentences that the heaps may hold, beyond as many as are waiting."""
MAX_AHEAD_S = 10.0
"""Audio ahead of playback beyond which a sentence waits while others need a step."""


class TtsDeadline(NamedTuple):
    """Sentence that needs a step. Smaller ones come first."""

    deadline_s: float
    id: int
    started: bool = False
    """Whether some of it was delivered."""


def first_deadline_s(arrived_s: float, priority: Priority, slack_ms: int | None) -> float:
    """Returns the deadline of a sentence's first audio. `slack_ms`: how much later it may be."""
    return arrived_s + DEADLINE_S[priority] + max(0, slack_ms or 0) / 1_000


class Playback:
    """Playback of a sentence: how long the audio delivered so far lasts, if played as it came."""

    def __init__(self, deadline_s: float, later_s: float = 0.0) -> None:
        """`deadline_s`: of its first audio; `later_s`: how late all that follows may be."""
        self._played_until_s, self._slack_s, self._first_deadline_s = 0.0, later_s, deadline_s
        self.started = False

    @property
    def deadline_s(self) -> float:
        """Time at which more audio is needed."""
        return self._played_until_s + self._slack_s if self.started else self._first_deadline_s

    def add_audio(self, seconds: float, now_s: float) -> None:
        """Records delivered audio. After an underrun playback continues at `now_s`; early audio is played when it
        is due."""
        dry_s = self._played_until_s if self.started else self._first_deadline_s - self._slack_s
        self._played_until_s, self.started = max(dry_s, now_s) + seconds, True


class TtsWaitingQueue:
    """Sentences waiting to be encoded, nearest deadline first."""

    def __init__(self) -> None:
        self._turns: dict[bool, list[TtsDeadline]] = {False: [], True: []}
        """Heaps, one of bulk sentences. Removed sentences stay until they reach the top, or are too many."""
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
        """Removes a sentence; returns False where it is not waiting."""
        waiting = self._sizes.pop(saying, None) is not None
        if sum(map(len, self._turns.values())) > 2 * len(self._sizes) + MAX_STALE_ENTRIES:
            for bulk, turns in self._turns.items():
                self._turns[bulk] = [turn for turn in turns if turn.id in self._sizes]
                heapq.heapify(self._turns[bulk])
        return waiting

    def pop_batch(self, most: int, phonemes: int, bulk: int) -> list[int]:
        """Removes and returns up to `most` sentences of up to `phonemes` phonemes together, the first one however
        long; at most `bulk` of them are bulk."""
        batch: list[int] = []
        room = phonemes
        while len(batch) < most:
            heaps = [self._drop_stale(False), *([self._drop_stale(True)] if bulk else [])]
            nearest = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
            if nearest is None or (batch and self._sizes[nearest[0].id] > room):
                break
            turn = heapq.heappop(nearest)
            bulk -= nearest is self._turns[True]
            room -= self._sizes.pop(turn.id)
            batch.append(turn.id)
        return batch

    def _drop_stale(self, bulk: bool) -> list[TtsDeadline]:
        """Removes stale entries from the top of the heap, and returns it."""
        turns = self._turns[bulk]
        while turns and turns[0].id not in self._sizes:
            heapq.heappop(turns)
        return turns


def select_for_step(turns: Iterable[TtsDeadline], most: int, now_s: float) -> list[int]:
    """Returns the sentences that get chunks in the next step, at most `most`.

    The nearest deadline comes first; sentences far ahead only where no other needs a step. While some have run dry
    and others wait for their first audio, each side gets half of the step: a new sentence need not wait for a
    second step, and many new ones do not interrupt those in playback.
    """
    order = sorted(turns)
    near = [turn for turn in order if turn.deadline_s - now_s <= MAX_AHEAD_S]
    order = near or order
    first = [turn for turn in order if not turn.started and turn.deadline_s <= now_s]
    dry = [turn for turn in order if turn.started and turn.deadline_s <= now_s]
    if first and dry:
        half = max(1, most // 2)
        preferred = {*first[:half], *dry[: most - min(half, len(first))]}
        order = [*(turn for turn in order if turn in preferred), *(turn for turn in order if turn not in preferred)]
    return [turn.id for turn in order[:most]]


class StepBudget:
    """Number of items that fit into a step of a target duration, estimated from recent steps."""

    def __init__(self, step_s: float, least: int, most: int) -> None:
        """`step_s`: target duration of a step; `least`, `most`: bounds of the number of items."""
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
