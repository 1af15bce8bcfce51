"""How closely a recording is listened to: where windows begin, and how much of each its voices are taken from.

Of a short one every second counts: each is heard four times, for a window may take two people for one, and each
voice is listened to for up to 5 s in every second window. In a long one there is more of everybody, and what it
costs is felt.
"""

from __future__ import annotations

from typing import NamedTuple

from asr_serve import units
from asr_serve.diarization.local_speakers import WINDOW_SAMPLES

CLOSE_SAMPLES = units.s_to_samples(60)
"""Longer recordings are not short; of one whose length nobody knows so much is listened to as of a short one. So
close a recording takes three times as long as without speakers: of a minute, a second more."""


class WindowPlan(NamedTuple):
    step_samples: int
    """From one window to the next."""
    every: int
    """Of so many windows one is listened to for voices; speakers of the others are known by shared frames."""
    budget_samples: int
    """Of those: see EngineClient.voices."""


DENSE = WindowPlan(150 * 270, 2, units.s_to_samples(15))
"""On bench/meetings.py (means over kinds, seed 7) 16.2 % of the time is wrong, with windows of 10 s and 3 s of
each 19.2, with windows every 5 s 16.2 too. Whole frames of the network."""
SPARSE = WindowPlan(WINDOW_SAMPLES, 1, units.s_to_samples(2))
"""Of kind long there (14 recordings, an hour, seed 41) 14.6 % of the time is wrong; with 3 s of each window 12.7,
but then a recording takes a half longer, where it takes 41 % longer now (bench/rich_speakers.py --parts cost)."""


def plan_windows(at: int, whole: int | None) -> WindowPlan:
    """Of what is heard from sample `at` on, of so many as the recording says that it has; None: nobody knows."""
    return DENSE if max(at, whole or 0) <= CLOSE_SAMPLES else SPARSE


def window_starts(samples: int, step: int) -> list[int]:
    """Where windows begin in so many samples. The last reaches back, so that it is a whole one too."""
    last = max(0, samples - WINDOW_SAMPLES)
    return [*range(0, last, step), last] if samples else []
