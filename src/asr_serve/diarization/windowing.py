"""Window plan of a recording: where windows begin, and how much speech of each is used for speaker embeddings.

In a short recording every second counts: each is covered by four windows, since a window may take two people for
one, and up to 5 s of each voice in every second window are embedded. A long one has more speech of everybody, and
the cost matters.
"""

from __future__ import annotations

from typing import NamedTuple

from asr_serve import units
from asr_serve.diarization.local_speakers import WINDOW_SAMPLES

CLOSE_SAMPLES = units.s_to_samples(60)
"""Longest recording with the dense plan; it is also used for the start of one of unknown length. Dense diarization
takes three times as long as transcription without speakers: a second more for a minute."""


class WindowPlan(NamedTuple):
    step_samples: int
    """Distance between the starts of two windows."""
    every: int
    """One window in `every` is used for embeddings; speakers of the others are matched by shared frames."""
    budget_samples: int
    """Speech embedded in each of those; see EngineClient.diarize_window."""


DENSE = WindowPlan(150 * 270, 2, units.s_to_samples(15))
"""Plan of short recordings. On bench/meetings.py (means over kinds, seed 7) 16.2 % of the time is wrong; with
windows of 10 s and 3 s of each 19.2 %, with windows every 5 s 16.2 % too. The step is a whole number of the
network's frames."""
SPARSE = WindowPlan(WINDOW_SAMPLES, 1, units.s_to_samples(2))
"""Plan of long recordings. On kind long there (14 recordings, an hour, seed 41) 14.6 % of the time is wrong; with
3 s of each window 12.7 %, but then a recording takes a half longer, where it takes 41 % longer now
(bench/rich_speakers.py --parts cost)."""


def plan_windows(at: int, whole: int | None) -> WindowPlan:
    """Returns the plan for audio from sample `at` on. `whole`: the recording's length in samples; None: unknown."""
    return DENSE if max(at, whole or 0) <= CLOSE_SAMPLES else SPARSE


def window_starts(samples: int, step: int) -> list[int]:
    """Returns the first sample of each window. The last one is moved back so that it is a whole window too."""
    last = max(0, samples - WINDOW_SAMPLES)
    return [*range(0, last, step), last] if samples else []
