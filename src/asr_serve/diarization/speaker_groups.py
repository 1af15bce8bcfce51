"""Grouping of the local speakers of all windows into speakers of the recording.

1. Voices with enough non-overlapped speech are clustered; those of one window are different people. Each is then
   reassigned to the group it is most similar to, since the first groups were made from few voices.
2. Where windows overlap, speakers active in the same frames are the same. This includes voices without an
   embedding, such as somebody who is never alone, and windows without embeddings.
3. Of the remaining voices, those that speak for long become new speakers; the rest, a word or a laugh, joins a
   neighbouring speaker.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.diarization.clustering import ANY, SpeakerCount, cluster
from asr_serve.diarization.local_speakers import LocalSpeakers

ALIKE = (0.27, 0.46)
"""Least cosine of two groups of voices that are one speaker, for embeddings of ALIKE_SAMPLES of speech: embeddings
of less speech are less consistent. On bench/meetings.py 0.30 was best of 0.25 to 0.5 for 1.5 s a voice, 0.45 for
3.7 s."""
ALIKE_SAMPLES = (units.s_to_samples(1), units.s_to_samples(4))
SURE_SAMPLES = units.ms_to_samples(1_500)
"""Non-overlapped speech with which a voice may be a group of its own: of 0.5, 1, 1.5 and 2 s the best there."""
OWN_SAMPLES, OTHER_SAMPLES = units.ms_to_samples(1_500), units.ms_to_samples(1_000)
"""Least speech of a new speaker who is similar to no known one; less where all known speakers are in the window."""
SHARED_SAMPLES, SHARED = units.ms_to_samples(250), 0.5
"""Least overlap of two speakers of overlapping windows that are one: in samples; as a share of either's time."""
NEAR_WINDOWS = 6
"""Windows that a short voice may be away from the speaker it joins: a minute, in a short recording 15 s."""
MOST_VOICES = 1_500
"""Voices clustered at once: two hours or so of talk. More are clustered in parts of this size first."""


class DiarizationWindow(NamedTuple):
    start_samples: int
    samples: int
    local_speakers: LocalSpeakers

    @property
    def end_samples(self) -> int:
        return self.start_samples + self.samples


class WindowSpeaker(msgspec.Struct, eq=False):
    """Speaker of a window."""

    window: int
    local: int
    active_samples: int
    clean_samples: int
    """Speech without overlap; the weight of `direction`."""
    heard_samples: int
    """Speech that the embedding was computed from."""
    direction: np.ndarray | None
    """Embedding of length 1; None where there was too little speech."""
    group: int = -1
    """-1: none."""


def voices_of(windows: Sequence[DiarizationWindow]) -> list[WindowSpeaker]:
    speakers = []
    for number, window in enumerate(windows):
        local_speakers, active = window.local_speakers, window.local_speakers.active
        stats = zip(local_speakers.clean_samples, local_speakers.heard_samples, local_speakers.embeddings, strict=True)
        known = dict(zip(local_speakers.who, stats, strict=True))
        for local in np.flatnonzero(active.any(0)):
            clean, heard, direction = known.get(int(local), (0, 0, None))
            samples = int(active[:, local].sum()) * local_speakers.step_samples
            speakers.append(WindowSpeaker(number, int(local), samples, clean, heard, direction))
    return speakers


def mean_embedding(voices: Sequence[WindowSpeaker]) -> np.ndarray | None:
    """Weighted mean direction, (width,) of length 1; None where none of the voices has an embedding."""
    known = [voice.direction * max(voice.clean_samples, 1) for voice in voices if voice.direction is not None]
    if not known:
        return None
    total = np.sum(known, axis=0)
    return np.asarray(total / max(float(np.linalg.norm(total)), 1e-12), np.float32)


def clustering_threshold(voices: Sequence[WindowSpeaker]) -> float:
    """Least cosine of two voices, or of two groups of them, that are one speaker."""
    heard_samples = [voice.heard_samples for voice in voices if voice.direction is not None]
    return float(np.interp(np.mean(heard_samples) if heard_samples else 0, ALIKE_SAMPLES, ALIKE))


def assign_groups(
    windows: Sequence[DiarizationWindow], voices: Sequence[WindowSpeaker], how_many: SpeakerCount
) -> None:
    """Sets the group of each voice; voices with too little speech stay without."""
    mates: dict[int, list[WindowSpeaker]] = {}
    for voice in voices:
        mates.setdefault(voice.window, []).append(voice)
    embedded = [voice for voice in voices if voice.direction is not None]
    sure = [voice for voice in embedded if voice.clean_samples >= SURE_SAMPLES]
    if len(sure) < how_many.minimum:
        sure = embedded
    if sure:
        _cluster(sure, how_many)
        clustered = [voice.group for voice in voices]
        _seat(mates, sure)
        if len({voice.group for voice in voices} - {-1}) < min(how_many.minimum, len(set(clustered) - {-1})):
            for voice, group in zip(voices, clustered, strict=True):  # no one may vanish
                voice.group = group
    _follow(windows, mates, voices)
    groups = max((voice.group for voice in voices), default=-1) + 1
    remaining = len(voices) if how_many.maximum is None else how_many.maximum - groups

    def is_speaker(each: WindowSpeaker) -> bool:
        others = {mate.group for mate in mates[each.window] if mate.group >= 0}
        return each.active_samples >= (OTHER_SAMPLES if len(others) == groups else OWN_SAMPLES)

    new_speakers = [voice for voice in embedded if voice.group < 0 and is_speaker(voice)]
    if new_speakers and remaining > 0:
        _cluster(new_speakers, SpeakerCount(1, remaining), groups)
    elif not groups and voices:  # occasional sounds only: one speaker
        longest = max(voices, key=lambda voice: voice.active_samples)
        longest.group = 0
    _rest(mates, voices)


def _cluster(voices: Sequence[WindowSpeaker], how_many: SpeakerCount, first: int = 0) -> None:
    """Clusters the voices into groups numbered from `first` on."""
    labels = np.arange(len(voices))
    if len(voices) > MOST_VOICES:
        parts = [np.arange(at, min(at + MOST_VOICES, len(voices))) for at in range(0, len(voices), MOST_VOICES)]
        count = 0
        for part in parts:
            labels[part] = count + _labels([[voices[int(index)]] for index in part], ANY)
            count = int(labels[part].max()) + 1
    groups: list[list[WindowSpeaker]] = [[] for _ in range(labels.max() + 1)]
    for voice, label in zip(voices, labels, strict=True):
        groups[label].append(voice)
    clusters = _labels(groups, how_many)
    for voice, label in zip(voices, labels, strict=True):
        voice.group = first + int(clusters[label])


def _labels(groups: Sequence[Sequence[WindowSpeaker]], how_many: SpeakerCount) -> np.ndarray:
    """Returns the cluster of each group of voices."""
    by_window: dict[int, list[int]] = {}
    for number, members in enumerate(groups):
        for window in {voice.window for voice in members}:
            by_window.setdefault(window, []).append(number)
    apart = np.zeros((len(groups), len(groups)), bool)
    for numbers in by_window.values():
        apart[np.ix_(numbers, numbers)] = True
    np.fill_diagonal(apart, False)
    weights = np.array([sum(max(voice.clean_samples, 1) for voice in members) for members in groups], np.float64)
    directions = np.stack([mean for members in groups if (mean := mean_embedding(members)) is not None])
    return cluster(
        directions, weights, apart, clustering_threshold([voice for members in groups for voice in members]), how_many
    )


def _seat(mates: dict[int, list[WindowSpeaker]], sure: Sequence[WindowSpeaker]) -> None:
    """Reassigns each voice with an embedding to the most similar group, no two of a window to one: the assignment
    with the best weighted sum."""
    members: dict[int, list[WindowSpeaker]] = {}
    for voice in sure:
        members.setdefault(voice.group, []).append(voice)
    centres = np.stack([mean for group in sorted(members) if (mean := mean_embedding(members[group])) is not None])
    for local in mates.values():
        known = [voice for voice in local if voice.direction is not None]
        if not known or len(known) > len(centres):
            continue
        alike = np.stack([voice.direction for voice in known if voice.direction is not None]) @ centres.T
        # The most similar groups of each voice: as many as voices, so one is free whatever the others get.
        likely = [np.argsort(-row)[: len(known)] for row in alike]
        weights = [max(voice.clean_samples, 1) for voice in known]
        best = max(
            (groups for groups in itertools.product(*likely) if len(set(groups)) == len(groups)),
            key=lambda groups: sum(alike[i, g] * weights[i] for i, g in enumerate(groups)),
        )
        for voice, group in zip(known, best, strict=True):
            voice.group = int(group)


def _follow(
    windows: Sequence[DiarizationWindow], mates: dict[int, list[WindowSpeaker]], voices: Sequence[WindowSpeaker]
) -> None:
    """Assigns voices without a group to that of speakers active in the same frames of neighbouring windows, the
    surest first; then repeats with the voices assigned so."""
    matches: dict[int, list[tuple[float, WindowSpeaker]]] = {}
    for number in range(len(windows)):
        for later in range(number + 1, len(windows)):
            if windows[number].end_samples - windows[later].start_samples < SHARED_SAMPLES:
                break
            for agreement, first, second in _shared(windows, number, later, mates):
                matches.setdefault(id(first), []).append((agreement, second))
                matches.setdefault(id(second), []).append((agreement, first))
    remaining = [voice for voice in voices if voice.group < 0 and id(voice) in matches]
    while remaining:
        pairs: list[tuple[float, int, int]] = []
        for index, voice in enumerate(remaining):
            sums: dict[int, float] = {}
            for agreement, second in matches[id(voice)]:
                if second.group >= 0:
                    sums[second.group] = sums.get(second.group, 0.0) + agreement
            pairs += [(agreement, index, group) for group, agreement in sums.items()]
        for _, index, group in sorted(pairs, reverse=True):
            voice = remaining[index]
            if voice.group < 0 and all(mate.group != group for mate in mates[voice.window]):
                voice.group = group
        unassigned = [voice for voice in remaining if voice.group < 0]
        if len(unassigned) == len(remaining):
            break
        remaining = unassigned


def _shared(
    windows: Sequence[DiarizationWindow], number: int, later: int, mates: dict[int, list[WindowSpeaker]]
) -> list[tuple[float, WindowSpeaker, WindowSpeaker]]:
    """Returns pairs of voices of two windows that are one speaker, and the frames by which they exceed the share."""
    before, after = windows[number], windows[later]
    step = before.local_speakers.step_samples
    active_before = before.local_speakers.active[round((after.start_samples - before.start_samples) / step) :]
    frames = min(len(active_before), len(after.local_speakers.active))
    active_before, active_after = active_before[:frames], after.local_speakers.active[:frames]
    pairs = []
    for first, second in itertools.product(mates.get(number, []), mates.get(later, [])):
        both = int((active_before[:, first.local] & active_after[:, second.local]).sum())
        either = int((active_before[:, first.local] | active_after[:, second.local]).sum())
        if both * step >= SHARED_SAMPLES and both > SHARED * either:
            pairs.append((both - SHARED * either, first, second))
    return pairs


def _rest(mates: dict[int, list[WindowSpeaker]], voices: Sequence[WindowSpeaker]) -> None:
    """Assigns each remaining voice to the nearest speaker in time who is not in its window."""
    grouped = {number: [voice for voice in local if voice.group >= 0] for number, local in mates.items()}
    for voice in [voice for voice in voices if voice.group < 0]:
        groups = {mate.group for mate in mates[voice.window]}
        for distance in range(NEAR_WINDOWS + 1):
            nearby = grouped.get(voice.window - distance, []) + (
                grouped.get(voice.window + distance, []) if distance else []
            )
            if candidates := [other for other in nearby if other.group not in groups]:
                voice.group = max(candidates, key=lambda other: other.active_samples).group
                break
