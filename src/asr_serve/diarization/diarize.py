"""START HERE: diarization of a recording, from windows with local speakers to speaker turns.

1. speaker_groups: which local speakers are one person.
2. Speech probability of each speaker, frame by frame: the mean over overlapping windows, each weighted by the
   distance from its edges, where it is least reliable. The number of speakers is the sum of the probabilities,
   rounded; the likeliest are active. This follows pyannote.audio (Bredin 2023, "pyannote.audio 2.1 speaker
   diarization pipeline").
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
"""Pauses shorter than this do not end a turn. On bench/meetings.py anything from nothing to this was equally good."""
LEAST_SAMPLES = units.ms_to_samples(150)
"""Shorter turns are dropped."""
SPEAKS = 0.5
"""Probability from which a speaker is active. On bench/meetings.py 0.4 is 0.5 % worse: less missed, more false."""
UNHEARD = 0.1
"""Probability below which a speaker is inactive, whatever the number of speakers."""


class Diarization(NamedTuple):
    turns: tuple[SpeakerTurn, ...]
    """Sorted by start; those of one speaker never overlap."""
    voices: dict[str, np.ndarray]
    """Embedding of length 1 by speaker name, for speakers with enough speech."""


def diarize(windows: Sequence[DiarizationWindow], how_many: SpeakerCount = ANY) -> Diarization:
    """Returns turns and voices; speakers are named in the order of first speech: SPEAKER_00, SPEAKER_01."""
    voices = voices_of(windows)
    assign_groups(windows, voices, how_many)
    turns = turns_of(windows, voices)
    order = list(dict.fromkeys(group for group, _, _ in turns))
    names = {group: f"SPEAKER_{number:02d}" for number, group in enumerate(order)}
    centres = {names[group]: mean_embedding([voice for voice in voices if voice.group == group]) for group in order}
    return Diarization(
        tuple(SpeakerTurn(names[group], start, end) for group, start, end in turns),
        {name: direction for name, direction in centres.items() if direction is not None},
    )


def turns_of(windows: Sequence[DiarizationWindow], voices: Sequence[WindowSpeaker]) -> list[tuple[int, int, int]]:
    """Returns (group, start, end) in samples, sorted by start, of `windows` sorted by start with one frame step."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for stretch in _stretches(windows, voices):
        speaks = _speaks(stretch.likely)
        for group in np.flatnonzero(speaks.any(0)):
            runs.setdefault(int(group), []).extend(_runs(stretch, speaks[:, group], windows[0]))
    turns = [
        (group, start, end)
        for group, spans in runs.items()
        for start, end in _joined(spans)
        if end - start >= LEAST_SAMPLES
    ]
    return sorted(turns, key=lambda turn: turn[1:])


class SpeakerActivity(NamedTuple):
    first: int
    """Frame number; 0 is where the first window begins."""
    start_samples: int | None
    """Sample at which audio begins, if it does in this stretch."""
    end_samples: int | None
    likely: np.ndarray
    """(frames, groups): speech probability of each group."""


def _stretches(windows: Sequence[DiarizationWindow], voices: Sequence[WindowSpeaker]) -> Iterator[SpeakerActivity]:
    """Yields the activity from the start of one window to that of the next: no more than a window is held at once."""
    groups = max((voice.group for voice in voices), default=-1) + 1
    by_window: dict[int, list[WindowSpeaker]] = {}
    for voice in voices:
        if voice.group >= 0:
            by_window.setdefault(voice.window, []).append(voice)
    sums, weights = np.zeros((0, groups), np.float32), np.zeros(0, np.float32)
    at = start = end = 0
    """First frame of the sums; start and end of the audio they cover."""
    fresh = True
    """Whether they begin where the audio does."""
    for number, window in enumerate(windows):
        likely = window.local_speakers.likely
        frame = round((window.start_samples - windows[0].start_samples) / window.local_speakers.step_samples)
        if len(sums) and frame > at:
            complete = frame >= at + len(sums)
            known = _mean(sums[: frame - at], weights[: frame - at])
            yield SpeakerActivity(at, start if fresh else None, end if complete else None, known)
            fresh, sums, weights = complete, sums[frame - at :], weights[frame - at :]
        if not len(sums):
            fresh, start = True, window.start_samples
        at, end = frame, max(end, window.end_samples)
        missing = max(0, len(likely) - len(sums))
        sums = np.concatenate([sums, np.zeros((missing, groups), np.float32)])
        weights = np.concatenate([weights, np.zeros(missing, np.float32)])
        edge_weights = (np.arange(len(likely), dtype=np.float32) + 0.5) / max(1, len(likely))
        edge_weights = np.minimum(edge_weights, 1 - edge_weights)
        activity = np.zeros((len(likely), groups), np.float32)
        for voice in by_window.get(number, []):
            activity[:, voice.group] = np.maximum(activity[:, voice.group], likely[:, voice.local] / np.float32(255))
        sums[: len(likely)] += activity * edge_weights[:, None]
        weights[: len(likely)] += edge_weights
    if len(sums):
        yield SpeakerActivity(at, start if fresh else None, end, _mean(sums, weights))


def _mean(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(sums / weights[:, None])


def _speaks(likely: np.ndarray) -> np.ndarray:
    """Returns (frames, groups) bool: the active speakers. Where windows disagree on who speaks, somebody does: on
    bench/meetings.py less is missed far from the microphone (7.8 % instead of 9.7 %), and no more is wrong."""
    count = np.floor(likely.sum(1) + 1 - SPEAKS)
    places = np.empty(likely.shape, np.int64)
    np.put_along_axis(places, np.argsort(-likely, 1, kind="stable"), np.arange(likely.shape[1])[None], 1)
    return np.asarray((likely >= SPEAKS) | ((places < count[:, None]) & (likely >= UNHEARD)))


def spans_of(turns: Iterable[SpeakerTurn]) -> dict[str, list[tuple[int, int]]]:
    """Returns the (start, end) spans of each speaker, in order."""
    result: dict[str, list[tuple[int, int]]] = {}
    for turn in turns:
        result.setdefault(turn.speaker, []).append((turn.start_samples, turn.end_samples))
    return {name: sorted(spans) for name, spans in result.items()}


def _runs(stretch: SpeakerActivity, speaks: np.ndarray, first: DiarizationWindow) -> list[tuple[int, int]]:
    """Returns the spans where `speaks` is true, in samples of the recording. Audio before the first frame of a
    stretch belongs to that frame, audio after the last to the last."""
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
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= PAUSE_SAMPLES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
