"""START HERE: windows, each with speakers of its own, to who speaks when in all of it.

1. Voices that were heard alone for long enough are clustered; those of one window are different people.
2. Each of the others goes to the group that it is most like and that is not in its window already.
3. Frames of each window become the turns of its groups. Where two windows overlap, each is believed up to the middle:
   at its edges a window knows least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.speaker.clustering import HowMany, cluster
from asr_serve.speaker.local import WINDOW_SAMPLES, LocalVoices
from asr_serve.types import SpeakerTurn

STEP_SAMPLES = WINDOW_SAMPLES
"""From one window to the next."""
ALIKE = 0.40
"""Least cosine of two groups of voices that are one speaker."""
SURE_SAMPLES = units.ms_to_samples(1_500)
"""A voice that was heard alone for so long may be a group of its own."""
PAUSE_SAMPLES = units.ms_to_samples(300)
"""A turn goes on over shorter pauses."""
LEAST_SAMPLES = units.ms_to_samples(150)
"""Shorter turns are none."""


class Window(NamedTuple):
    start_samples: int
    samples: int
    heard: LocalVoices


class Voice(msgspec.Struct):
    """A speaker of a window."""

    window: int
    local: int
    active_samples: int
    clean_samples: int
    direction: np.ndarray | None
    group: int = -1


class Diarized(NamedTuple):
    turns: tuple[SpeakerTurn, ...]
    voices: dict[str, np.ndarray]
    """Name of each speaker -> direction, of length 1; those that were heard well enough."""


def starts_of(samples: int) -> list[int]:
    """Where windows begin in so many samples. The last reaches back, so that it is a whole one too."""
    last = max(0, samples - WINDOW_SAMPLES)
    return [*range(0, last, STEP_SAMPLES), last]


def diarize(windows: Sequence[Window], how_many: HowMany = HowMany()) -> Diarized:
    voices = voices_of(windows)
    group(voices, how_many)
    turns = turns_of(windows, voices)
    return named(turns, voices)


def voices_of(windows: Sequence[Window]) -> list[Voice]:
    found = []
    for number, window in enumerate(windows):
        heard, active = window.heard, window.heard.active
        known = dict(zip(heard.who, zip(heard.clean_samples, heard.embeddings, strict=True), strict=True))
        for local in np.flatnonzero(active.any(0)):
            clean, direction = known.get(int(local), (0, None))
            samples = int(active[:, local].sum()) * heard.step_samples
            found.append(Voice(number, int(local), samples, clean, direction))
    return found


def group(voices: list[Voice], how_many: HowMany) -> None:
    """Give each its group."""
    heard = [each for each in voices if each.direction is not None]
    sure = [each for each in heard if each.clean_samples >= SURE_SAMPLES]
    if len(sure) < how_many.least or not sure:
        sure = heard
    if not sure:
        for each in voices:
            each.group = each.local
        return
    of_window = np.array([each.window for each in sure])
    apart = of_window[:, None] == of_window[None]
    np.fill_diagonal(apart, False)
    weights = np.array([max(each.clean_samples, 1) for each in sure], np.float64)
    directions = np.stack([each.direction for each in sure if each.direction is not None])
    labels = cluster(directions, weights, apart, ALIKE, how_many)
    for each, label in zip(sure, labels, strict=True):
        each.group = int(label)
    groups = int(labels.max()) + 1
    centres = np.stack([(directions * weights[:, None])[labels == g].sum(0) for g in range(groups)])
    centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    for each in sorted((v for v in voices if v.group < 0), key=lambda v: -v.active_samples):
        taken = {v.group for v in voices if v.window == each.window and v.group >= 0}
        free = [g for g in range(groups) if g not in taken]
        if not free:
            if how_many.most is None or groups < how_many.most:
                continue
            free = list(range(groups))
        if each.direction is not None:
            each.group = max(free, key=lambda g: float(centres[g] @ each.direction))
        else:
            near = [v for v in voices if v.group in free]
            each.group = min(near, key=lambda v: abs(v.window - each.window)).group if near else free[0]


def turns_of(windows: Sequence[Window], voices: Sequence[Voice]) -> list[tuple[int, int, int]]:
    """(group, start, end), in samples, by group and start."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for number, window in enumerate(windows):
        ends = window.start_samples + window.samples
        low = window.start_samples if not number else _middle(windows[number - 1], window)
        high = ends if number + 1 == len(windows) else _middle(window, windows[number + 1])
        heard, active = window.heard, window.heard.active
        groups = sorted({v.group for v in voices if v.window == number and v.group >= 0})
        for each in groups:
            locals_ = [v.local for v in voices if v.window == number and v.group == each]
            speaks = active[:, locals_].any(1)
            edges = np.flatnonzero(np.diff(speaks.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
            for first, last in edges:
                start = window.start_samples + heard.first_samples + int(first) * heard.step_samples
                end = window.start_samples + heard.first_samples + int(last) * heard.step_samples
                start = window.start_samples if first == 0 else start
                end = ends if last == len(speaks) else end
                start, end = max(start, low), min(end, high)
                if start < end:
                    runs.setdefault(each, []).append((start, end))
    found = []
    for each, spans in runs.items():
        joined: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if joined and start - joined[-1][1] <= PAUSE_SAMPLES:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        found += [(each, start, end) for start, end in joined if end - start >= LEAST_SAMPLES]
    return sorted(found, key=lambda turn: turn[1:])


def _middle(before: Window, after: Window) -> int:
    return (before.start_samples + before.samples + after.start_samples) // 2


def named(turns: Sequence[tuple[int, int, int]], voices: Sequence[Voice]) -> Diarized:
    """Groups by the order in which they first speak."""
    order = list(dict.fromkeys(each for each, _, _ in turns))
    names = {each: f"SPEAKER_{number:02d}" for number, each in enumerate(order)}
    directions = {}
    for each in order:
        known = [v for v in voices if v.group == each and v.direction is not None]
        if known:
            total = np.sum([v.direction * max(v.clean_samples, 1) for v in known if v.direction is not None], axis=0)
            directions[names[each]] = (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)
    return Diarized(tuple(SpeakerTurn(names[g], start, end) for g, start, end in turns), directions)
