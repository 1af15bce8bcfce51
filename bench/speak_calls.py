"""What a caller of a voice hears: how soon, whether what has come ever runs out, and which sayings count.

Only the standard library: peers' environments import this too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

RECOVER_S = 0.5
"""How long a caller waits who heard nothing."""
Saying = dict[str, Any]
"""One sentence of one caller, as it is written down; see `saying`."""


class Arrival(NamedTuple):
    at_s: float
    samples: int
    """That came then; more than none."""


class Played(NamedTuple):
    """A sentence played from its first sound on, by somebody who waits where there is none and then goes on."""

    first_s: float
    """From asking to the first sound."""
    gaps: int
    """How often there was nothing to play before the end had come."""
    starved_s: float
    """How long, in all."""
    ends_s: float
    """When the last sample was played, by the clock of the arrivals."""
    audio_s: float


def play(asked_s: float, arrivals: Sequence[Arrival], rate_hz: int) -> Played | None:
    """None where no sound came at all."""
    if not arrivals:
        return None
    first = arrivals[0].at_s
    dry_s, gaps, starved_s = first, 0, 0.0
    for at_s, samples in arrivals:
        if at_s > dry_s:
            gaps, starved_s, dry_s = gaps + 1, starved_s + at_s - dry_s, at_s
        dry_s += samples / rate_hz
    total = sum(arrival.samples for arrival in arrivals)
    return Played(first - asked_s, gaps, starved_s, dry_s, total / rate_hz)


def saying(
    caller: int, text: int, asked_s: float, arrivals: Sequence[Arrival], rate_hz: int, error: str = ""
) -> Saying:
    """`error`: why it has no end, or no beginning; empty where all is well."""
    played = play(asked_s, arrivals, rate_hz)
    if played is None:
        return {"caller": caller, "text": text, "error": error or "no sound"}
    return {
        "caller": caller,
        "text": text,
        "error": error,
        "first_ms": 1_000 * played.first_s,
        "gaps": played.gaps,
        "starved_ms": 1_000 * played.starved_s,
        "audio_s": played.audio_s,
        "made_s": arrivals[-1].at_s - asked_s,
    }


def played_s(found: Saying, asked_s: float) -> float:
    """When its last sample has been played; a little after asking, where no sound came."""
    if "audio_s" not in found:
        return asked_s + RECOVER_S
    return asked_s + (found["first_ms"] + found["starved_ms"]) / 1_000 + float(found["audio_s"])


class Level:
    """Which sayings count: those begun while it is open. It opens when all callers speak, so that neither the rush
    of the start counts nor what was asked of a server with nothing else to do; and the others go on speaking until
    the last that counts has been heard."""

    def __init__(self, begins_s: float, settle_s: float, seconds: float) -> None:
        self.opens_s = begins_s + settle_s
        self.closes_s = self.opens_s + seconds
        self.sayings: list[Saying] = []
        self._owed, self._counted = 0, 0

    def begin(self, asked_s: float) -> bool:
        """Returns whether the saying counts: the first one does however late, of a voice that is slower than the
        level."""
        counts = self.opens_s <= asked_s and (asked_s < self.closes_s or not self._counted)
        self._owed, self._counted = self._owed + counts, self._counted + counts
        return counts

    def end(self, counts: bool, found: Saying) -> None:
        if counts:
            self._owed -= 1
            self.sayings.append(found)

    def over(self, now_s: float) -> bool:
        return now_s >= self.closes_s and self._counted > 0 and not self._owed
