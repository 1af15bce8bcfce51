"""START HERE: windows, each with speakers of its own, to who speaks when in all of it.

1. grouping: which speakers of the windows are one person.
2. Frames of each window become the turns of its groups. Where two windows overlap, each is believed up to the
middle:
   at its edges a window knows least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from asr_serve import units
from asr_serve.speaker.clustering import ANY, HowMany
from asr_serve.speaker.grouping import Voice, Window, centre, group, voices_of
from asr_serve.speaker.local import WINDOW_SAMPLES
from asr_serve.types import SpeakerTurn

STEP_SAMPLES = WINDOW_SAMPLES
"""From one window to the next: each second is heard once. With twice as many windows 1.3 % less of the time was
wrong on bench/meetings.py, at twice the cost."""
PAUSE_SAMPLES = units.ms_to_samples(300)
"""A turn goes on over shorter pauses. On bench/meetings.py anything from nothing to this was equally good."""
LEAST_SAMPLES = units.ms_to_samples(150)
"""Shorter turns are none."""


class Diarized(NamedTuple):
    turns: tuple[SpeakerTurn, ...]
    """By start; those of one speaker never overlap."""
    voices: dict[str, np.ndarray]
    """Name of each speaker -> direction, of length 1; those that were heard well enough."""


def starts_of(samples: int) -> list[int]:
    """Where windows begin in so many samples. The last reaches back, so that it is a whole one too."""
    last = max(0, samples - WINDOW_SAMPLES)
    return [*range(0, last, STEP_SAMPLES), last] if samples else []


def diarize(windows: Sequence[Window], how_many: HowMany = ANY) -> Diarized:
    """Names are in the order of first speech: SPEAKER_00, SPEAKER_01."""
    voices = voices_of(windows)
    group(windows, voices, how_many)
    turns = turns_of(windows, voices)
    order = list(dict.fromkeys(who for who, _, _ in turns))
    names = {who: f"SPEAKER_{number:02d}" for number, who in enumerate(order)}
    centres = {names[who]: centre([each for each in voices if each.group == who]) for who in order}
    return Diarized(
        tuple(SpeakerTurn(names[who], start, end) for who, start, end in turns),
        {name: voice for name, voice in centres.items() if voice is not None},
    )


def turns_of(windows: Sequence[Window], voices: Sequence[Voice]) -> list[tuple[int, int, int]]:
    """(group, start, end), in samples, by start."""
    runs: dict[int, list[tuple[int, int]]] = {}
    borders = [_middle(before, after) for before, after in itertools.pairwise(windows)]
    of_window: dict[int, list[Voice]] = {}
    for each in voices:
        of_window.setdefault(each.window, []).append(each)
    for number, window in enumerate(windows):
        low = borders[number - 1] if number else window.start_samples
        high = borders[number] if number < len(borders) else window.end_samples
        active = window.heard.active
        groups: dict[int, list[int]] = {}
        for each in of_window.get(number, []):
            if each.group >= 0:
                groups.setdefault(each.group, []).append(each.local)
        for who, locals_ in groups.items():
            for start, end in _runs(window, np.any(active[:, locals_], axis=1)):
                if max(start, low) < min(end, high):
                    runs.setdefault(who, []).append((max(start, low), min(end, high)))
    found = [
        (who, start, end)
        for who, spans in runs.items()
        for start, end in _joined(spans)
        if end - start >= LEAST_SAMPLES
    ]
    return sorted(found, key=lambda turn: turn[1:])


def spans_of(turns: Iterable[SpeakerTurn]) -> dict[str, list[tuple[int, int]]]:
    """What each speaker says, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for turn in turns:
        found.setdefault(turn.speaker, []).append((turn.start_samples, turn.end_samples))
    return {name: sorted(spans) for name, spans in found.items()}


def _runs(window: Window, speaks: np.ndarray) -> list[tuple[int, int]]:
    """Where frames are true, in samples of the whole. What lies before the first frame belongs to it, what lies
    after the last to that."""
    edges = np.flatnonzero(np.diff(speaks.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    first, step = window.start_samples + window.heard.first_samples, window.heard.step_samples
    return [
        (
            window.start_samples if not start else first + int(start) * step,
            window.end_samples if end == len(speaks) else first + int(end) * step,
        )
        for start, end in edges
    ]


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= PAUSE_SAMPLES:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _middle(before: Window, after: Window) -> int:
    return (before.end_samples + after.start_samples) // 2
