"""START HERE: windows, each with speakers of its own, to who speaks when in all of it.

1. grouping: which speakers of the windows are one person.
2. How likely each of them speaks, frame by frame: where windows overlap their mean, each weighted by how far it is
   from its edges, where it knows least; so many speak as are likely to in sum, the likeliest. That is how
   pyannote.audio does it (Bredin 2023, "pyannote.audio 2.1 speaker diarization pipeline").
3. Frames become turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from asr_serve import units
from asr_serve.diarization.clustering import ANY, SpeakerCount
from asr_serve.diarization.speaker_groups import (
    DiarizationWindow,
    WindowSpeaker,
    assign_groups,
    mean_embedding,
    voices_of,
)
from asr_serve.types import SpeakerTurn

PAUSE_SAMPLES = units.ms_to_samples(300)
"""A turn goes on over shorter pauses. On bench/meetings.py anything from nothing to this was equally good."""
LEAST_SAMPLES = units.ms_to_samples(150)
"""Shorter turns are none."""
SPEAKS = 0.5
"""Who is so likely to speak does. On bench/meetings.py 0.4 is 0.5 % worse: what is missed less is false alarm."""
UNHEARD = 0.1
"""Who is less likely to speak does not, however many do."""


class Diarization(NamedTuple):
    turns: tuple[SpeakerTurn, ...]
    """By start; those of one speaker never overlap."""
    voices: dict[str, np.ndarray]
    """Name of each speaker -> direction, of length 1; those that were heard well enough."""


def diarize(windows: Sequence[DiarizationWindow], how_many: SpeakerCount = ANY) -> Diarization:
    """Names are in the order of first speech: SPEAKER_00, SPEAKER_01."""
    voices = voices_of(windows)
    assign_groups(windows, voices, how_many)
    turns = turns_of(windows, voices)
    order = list(dict.fromkeys(who for who, _, _ in turns))
    names = {who: f"SPEAKER_{number:02d}" for number, who in enumerate(order)}
    centres = {names[who]: mean_embedding([each for each in voices if each.group == who]) for who in order}
    return Diarization(
        tuple(SpeakerTurn(names[who], start, end) for who, start, end in turns),
        {name: voice for name, voice in centres.items() if voice is not None},
    )


def turns_of(windows: Sequence[DiarizationWindow], voices: Sequence[WindowSpeaker]) -> list[tuple[int, int, int]]:
    """(group, start, end), in samples, by start. `windows` by start, of one kind of frames."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for stretch in _stretches(windows, voices):
        speaks = _speaks(stretch.likely)
        for who in np.flatnonzero(speaks.any(0)):
            runs.setdefault(int(who), []).extend(_runs(stretch, speaks[:, who], windows[0]))
    found = [
        (who, start, end)
        for who, spans in runs.items()
        for start, end in _joined(spans)
        if end - start >= LEAST_SAMPLES
    ]
    return sorted(found, key=lambda turn: turn[1:])


class SpeakerActivity(NamedTuple):
    first: int
    """Frame; the first that there is begins where the first window's does."""
    start_samples: int | None
    """Where audio begins, if it does with this stretch."""
    end_samples: int | None
    likely: np.ndarray
    """(frames, groups): how likely each group speaks."""


def _stretches(windows: Sequence[DiarizationWindow], voices: Sequence[WindowSpeaker]) -> Iterator[SpeakerActivity]:
    """From the start of one window to that of the next: no more than a window is held at once."""
    groups = max((each.group for each in voices), default=-1) + 1
    of_window: dict[int, list[WindowSpeaker]] = {}
    for each in voices:
        if each.group >= 0:
            of_window.setdefault(each.window, []).append(each)
    sums, weights = np.zeros((0, groups), np.float32), np.zeros(0, np.float32)
    at = start = end = 0
    """First frame of the sums; where the audio begins and ends that they are of."""
    fresh = True
    """They begin where the audio does."""
    for number, window in enumerate(windows):
        likely = window.local_speakers.likely
        frame = round((window.start_samples - windows[0].start_samples) / window.local_speakers.step_samples)
        if len(sums) and frame > at:
            over = frame >= at + len(sums)
            known = _mean(sums[: frame - at], weights[: frame - at])
            yield SpeakerActivity(at, start if fresh else None, end if over else None, known)
            fresh, sums, weights = over, sums[frame - at :], weights[frame - at :]
        if not len(sums):
            fresh, start = True, window.start_samples
        at, end = frame, max(end, window.end_samples)
        more = max(0, len(likely) - len(sums))
        sums = np.concatenate([sums, np.zeros((more, groups), np.float32)])
        weights = np.concatenate([weights, np.zeros(more, np.float32)])
        own = (np.arange(len(likely), dtype=np.float32) + 0.5) / max(1, len(likely))
        own = np.minimum(own, 1 - own)
        heard = np.zeros((len(likely), groups), np.float32)
        for each in of_window.get(number, []):
            heard[:, each.group] = np.maximum(heard[:, each.group], likely[:, each.local] / np.float32(255))
        sums[: len(likely)] += heard * own[:, None]
        weights[: len(likely)] += own
    if len(sums):
        yield SpeakerActivity(at, start if fresh else None, end, _mean(sums, weights))


def _mean(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(sums / weights[:, None])


def _speaks(likely: np.ndarray) -> np.ndarray:
    """Who does: (frames, groups) bool. Where windows are of two minds who it is, it is somebody: on
    bench/meetings.py less is missed far from the microphone (7.8 % for 9.7), and no more is wrong."""
    count = np.floor(likely.sum(1) + 1 - SPEAKS)
    places = np.empty(likely.shape, np.int64)
    np.put_along_axis(places, np.argsort(-likely, 1, kind="stable"), np.arange(likely.shape[1])[None], 1)
    return np.asarray((likely >= SPEAKS) | ((places < count[:, None]) & (likely >= UNHEARD)))


def spans_of(turns: Iterable[SpeakerTurn]) -> dict[str, list[tuple[int, int]]]:
    """What each speaker says, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for turn in turns:
        found.setdefault(turn.speaker, []).append((turn.start_samples, turn.end_samples))
    return {name: sorted(spans) for name, spans in found.items()}


def _runs(stretch: SpeakerActivity, speaks: np.ndarray, first: DiarizationWindow) -> list[tuple[int, int]]:
    """Where frames are true, in samples of the whole. What lies before the first frame of what was heard belongs
    to it, what lies after the last to that."""
    step = first.local_speakers.step_samples
    at = first.start_samples + first.local_speakers.first_samples + stretch.first * step
    edges = np.flatnonzero(np.diff(speaks.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [
        (
            stretch.start_samples if not a and stretch.start_samples is not None else at + int(a) * step,
            stretch.end_samples if b == len(speaks) and stretch.end_samples is not None else at + int(b) * step,
        )
        for a, b in edges
    ]


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= PAUSE_SAMPLES:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
