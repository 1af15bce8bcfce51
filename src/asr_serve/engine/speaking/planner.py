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

WITHIN_S: dict[Priority, float] = {"live": 0.0, "interactive": 0.0, "bulk": 60.0}
"""How soon after its arrival a sentence should sound, unless it says so itself. Somebody waits for an interactive
one; a bulk one takes what is left."""
AHEAD_S = 10.0
"""Sound beyond what can have been played; whoever has more waits while others are there."""


class Turn(NamedTuple):
    """A sentence that wants a step. Smaller ones come first."""

    deadline_s: float
    id: int


def first_deadline_s(arrived_s: float, priority: Priority, within_ms: int | None) -> float:
    """Of a sentence that was not heard yet."""
    return arrived_s + (WITHIN_S[priority] if within_ms is None else within_ms / 1_000)


class Playback:
    """What a caller has been given of a sentence, and until when that lasts, played as it came."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        """When it must have more."""
        self.begun = False

    def give(self, seconds: float, now_s: float) -> None:
        """Whoever ran dry waits, and goes on from here."""
        dry_s = max(self.deadline_s, now_s) if self.begun else now_s
        self.deadline_s, self.begun = dry_s + seconds, True


class Waiting:
    """Sentences that are yet to be encoded, nearest deadline first."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, saying: int) -> bool:
        return saying in self._sizes

    def __iter__(self) -> Iterable[int]:
        return iter(self._sizes)

    def add(self, saying: int, phonemes: int, deadline_s: float) -> None:
        self._sizes[saying] = phonemes
        heapq.heappush(self._turns, Turn(deadline_s, saying))

    def remove(self, saying: int) -> bool:
        """False where it does not wait here."""
        return self._sizes.pop(saying, None) is not None

    def take(self, most: int, phonemes: int) -> list[int]:
        """Up to `most` sentences of so many phonemes together; the first one however long. They wait no more."""
        taken: list[int] = []
        room = phonemes
        while self._turns and len(taken) < most:
            saying = self._turns[0].id
            size = self._sizes.get(saying)
            if size is not None and taken and size > room:
                break
            heapq.heappop(self._turns)
            if size is None:  # cancelled
                continue
            del self._sizes[saying]
            taken.append(saying)
            room -= size
        return taken


def choose(turns: Iterable[Turn], most: int, now_s: float) -> list[int]:
    """Whose chunks the next step makes: up to `most`, nearest deadline first; those that are far ahead only where
    nobody else is there."""
    order = sorted(turns)
    near = [turn for turn in order if turn.deadline_s - now_s <= AHEAD_S]
    return [turn.id for turn in (near or order)[:most]]


class Pace:
    """How much fits into a step of so long, by what steps took lately."""

    def __init__(self, step_s: float, least: int, most: int) -> None:
        """`step_s`: how long a step may be; `least` and `most`: of whatever is counted, as far as that is
        known."""
        self._step_s, self._least, self._most = step_s, least, most
        self._each_s: float | None = None

    @property
    def room(self) -> int:
        if self._each_s is None:
            return self._least
        return max(self._least, min(self._most, int(self._step_s / self._each_s)))

    def took(self, seconds: float, count: int) -> None:
        each_s = seconds / max(1, count)
        self._each_s = each_s if self._each_s is None else 0.75 * self._each_s + 0.25 * each_s
