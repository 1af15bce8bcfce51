"""Which speakers of all the windows are one person.

1. Voices that were heard alone for long enough are clustered; those of one window are different people. Then each
   goes where it is most like the whole group, for the first groups were made of few.
2. Where windows overlap, speakers that speak in the same frames are the same: that holds of voices that nobody can
   know, too, as of somebody who is never alone, and of windows whose voices were not listened to.
3. Of what is left, whoever speaks for long is a person of their own; the rest, a word or a laugh, goes to somebody
   near.
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
"""Least cosine of two groups of voices that are one speaker, where voices were listened to for ALIKE_SAMPLES: the
shorter, the less is a voice like itself. On bench/meetings.py 0.30 was best of 0.25 to 0.5 for 1.5 s a voice,
0.45 for 3.7 s."""
ALIKE_SAMPLES = (units.s_to_samples(1), units.s_to_samples(4))
SURE_SAMPLES = units.ms_to_samples(1_500)
"""A voice that was heard alone for so long may be a group of its own: of 0.5, 1, 1.5 and 2 s the best there."""
OWN_SAMPLES, OTHER_SAMPLES = units.ms_to_samples(1_500), units.ms_to_samples(1_000)
"""Who is like nobody is somebody, with so much speech; with so much, who speaks beside everybody that is known."""
SHARED_SAMPLES, SHARED = units.ms_to_samples(250), 0.5
"""Two speakers of windows that overlap are one, who speak together for so long, and for such a part of the time in
which either does."""
NEAR_WINDOWS = 6
"""So far away may be whoever a word is given to: a minute, in a short recording 15 s."""
MOST_VOICES = 1_500
"""That are clustered at once: two hours or so of talk. Of more, so many at a time are clustered first."""


class DiarizationWindow(NamedTuple):
    start_samples: int
    samples: int
    local_speakers: LocalSpeakers

    @property
    def end_samples(self) -> int:
        return self.start_samples + self.samples


class WindowSpeaker(msgspec.Struct, eq=False):
    """A speaker of a window."""

    window: int
    local: int
    active_samples: int
    clean_samples: int
    """Heard alone; what tells how much its direction is worth."""
    heard_samples: int
    """Listened to."""
    direction: np.ndarray | None
    """Of length 1; None where it was not heard well enough."""
    group: int = -1
    """-1: nobody's."""


def voices_of(windows: Sequence[DiarizationWindow]) -> list[WindowSpeaker]:
    found = []
    for number, window in enumerate(windows):
        heard, active = window.local_speakers, window.local_speakers.active
        told = zip(heard.clean_samples, heard.heard_samples, heard.embeddings, strict=True)
        known = dict(zip(heard.who, told, strict=True))
        for local in np.flatnonzero(active.any(0)):
            clean, listened, direction = known.get(int(local), (0, 0, None))
            samples = int(active[:, local].sum()) * heard.step_samples
            found.append(WindowSpeaker(number, int(local), samples, clean, listened, direction))
    return found


def mean_embedding(voices: Sequence[WindowSpeaker]) -> np.ndarray | None:
    """Where they point together, (width,) of length 1; None where none is known."""
    known = [each.direction * max(each.clean_samples, 1) for each in voices if each.direction is not None]
    if not known:
        return None
    total = np.sum(known, axis=0)
    return np.asarray(total / max(float(np.linalg.norm(total)), 1e-12), np.float32)


def clustering_threshold(voices: Sequence[WindowSpeaker]) -> float:
    """Least cosine of two of them, or of two groups of them, that are one speaker."""
    listened = [each.heard_samples for each in voices if each.direction is not None]
    return float(np.interp(np.mean(listened) if listened else 0, ALIKE_SAMPLES, ALIKE))


def assign_groups(
    windows: Sequence[DiarizationWindow], voices: Sequence[WindowSpeaker], how_many: SpeakerCount
) -> None:
    """Give each voice its group; who is heard too little for any stays without."""
    mates: dict[int, list[WindowSpeaker]] = {}
    for each in voices:
        mates.setdefault(each.window, []).append(each)
    heard = [each for each in voices if each.direction is not None]
    sure = [each for each in heard if each.clean_samples >= SURE_SAMPLES]
    if len(sure) < how_many.minimum:
        sure = heard
    if sure:
        _cluster(sure, how_many)
        clustered = [each.group for each in voices]
        _seat(mates, sure)
        if len({each.group for each in voices} - {-1}) < min(how_many.minimum, len(set(clustered) - {-1})):
            for each, who in zip(voices, clustered, strict=True):  # so many there are: nobody is left out
                each.group = who
    _follow(windows, mates, voices)
    groups = max((each.group for each in voices), default=-1) + 1
    room = len(voices) if how_many.maximum is None else how_many.maximum - groups

    def somebody(each: WindowSpeaker) -> bool:
        others = {mate.group for mate in mates[each.window] if mate.group >= 0}
        return each.active_samples >= (OTHER_SAMPLES if len(others) == groups else OWN_SAMPLES)

    own = [each for each in heard if each.group < 0 and somebody(each)]
    if own and room > 0:
        _cluster(own, SpeakerCount(1, room), groups)
    elif not groups and voices:  # a sound now and then, of nobody in particular
        longest = max(voices, key=lambda each: each.active_samples)
        longest.group = 0
    _rest(mates, voices)


def _cluster(voices: Sequence[WindowSpeaker], how_many: SpeakerCount, first: int = 0) -> None:
    """Groups from `first` on."""
    labels = np.arange(len(voices))
    if len(voices) > MOST_VOICES:
        parts = [np.arange(at, min(at + MOST_VOICES, len(voices))) for at in range(0, len(voices), MOST_VOICES)]
        made = 0
        for part in parts:
            labels[part] = made + _labels([[voices[int(each)]] for each in part], ANY)
            made = int(labels[part].max()) + 1
    groups: list[list[WindowSpeaker]] = [[] for _ in range(labels.max() + 1)]
    for each, label in zip(voices, labels, strict=True):
        groups[label].append(each)
    found = _labels(groups, how_many)
    for each, label in zip(voices, labels, strict=True):
        each.group = first + int(found[label])


def _labels(groups: Sequence[Sequence[WindowSpeaker]], how_many: SpeakerCount) -> np.ndarray:
    """The cluster of each group of voices."""
    where: dict[int, list[int]] = {}
    for number, members in enumerate(groups):
        for window in {each.window for each in members}:
            where.setdefault(window, []).append(number)
    apart = np.zeros((len(groups), len(groups)), bool)
    for here in where.values():
        apart[np.ix_(here, here)] = True
    np.fill_diagonal(apart, False)
    weights = np.array([sum(max(each.clean_samples, 1) for each in members) for members in groups], np.float64)
    directions = np.stack([found for members in groups if (found := mean_embedding(members)) is not None])
    return cluster(
        directions,
        weights,
        apart,
        clustering_threshold([each for members in groups for each in members]),
        how_many,
    )


def _seat(mates: dict[int, list[WindowSpeaker]], sure: Sequence[WindowSpeaker]) -> None:
    """Each voice that is known to the group that it is most like, no two of a window to one: of all ways to do
    that the best in sum."""
    members: dict[int, list[WindowSpeaker]] = {}
    for each in sure:
        members.setdefault(each.group, []).append(each)
    centres = np.stack([found for who in sorted(members) if (found := mean_embedding(members[who])) is not None])
    for here in mates.values():
        known = [each for each in here if each.direction is not None]
        if not known or len(known) > len(centres):
            continue
        alike = np.stack([each.direction for each in known if each.direction is not None]) @ centres.T
        # Of each voice the groups that it is most like: with others taken, one of so many is free.
        likely = [np.argsort(-row)[: len(known)] for row in alike]
        weights = [max(each.clean_samples, 1) for each in known]
        best = max(
            (who for who in itertools.product(*likely) if len(set(who)) == len(who)),
            key=lambda who: sum(alike[i, g] * weights[i] for i, g in enumerate(who)),
        )
        for each, who in zip(known, best, strict=True):
            each.group = int(who)


def _follow(
    windows: Sequence[DiarizationWindow], mates: dict[int, list[WindowSpeaker]], voices: Sequence[WindowSpeaker]
) -> None:
    """Voices without a group to that of who speaks in the same frames of windows before and after, the surest
    first; then those who are the same as these."""
    same: dict[int, list[tuple[float, WindowSpeaker]]] = {}
    for number in range(len(windows)):
        for later in range(number + 1, len(windows)):
            if windows[number].end_samples - windows[later].start_samples < SHARED_SAMPLES:
                break
            for agreement, one, other in _shared(windows, number, later, mates):
                same.setdefault(id(one), []).append((agreement, other))
                same.setdefault(id(other), []).append((agreement, one))
    left = [each for each in voices if each.group < 0 and id(each) in same]
    while left:
        pairs: list[tuple[float, int, int]] = []
        for place, each in enumerate(left):
            sums: dict[int, float] = {}
            for agreement, other in same[id(each)]:
                if other.group >= 0:
                    sums[other.group] = sums.get(other.group, 0.0) + agreement
            pairs += [(agreement, place, who) for who, agreement in sums.items()]
        for _, place, who in sorted(pairs, reverse=True):
            each = left[place]
            if each.group < 0 and all(mate.group != who for mate in mates[each.window]):
                each.group = who
        still = [each for each in left if each.group < 0]
        if len(still) == len(left):
            break
        left = still


def _shared(
    windows: Sequence[DiarizationWindow], number: int, later: int, mates: dict[int, list[WindowSpeaker]]
) -> list[tuple[float, WindowSpeaker, WindowSpeaker]]:
    """Voices of two windows that are one speaker, and for how many frames they agree more than they need to."""
    before, after = windows[number], windows[later]
    step = before.local_speakers.step_samples
    one = before.local_speakers.active[round((after.start_samples - before.start_samples) / step) :]
    frames = min(len(one), len(after.local_speakers.active))
    one, other = one[:frames], after.local_speakers.active[:frames]
    found = []
    for left, right in itertools.product(mates.get(number, []), mates.get(later, [])):
        both = int((one[:, left.local] & other[:, right.local]).sum())
        either = int((one[:, left.local] | other[:, right.local]).sum())
        if both * step >= SHARED_SAMPLES and both > SHARED * either:
            found.append((both - SHARED * either, left, right))
    return found


def _rest(mates: dict[int, list[WindowSpeaker]], voices: Sequence[WindowSpeaker]) -> None:
    """Each to whoever speaks next to it and does not in its window."""
    grouped = {number: [each for each in here if each.group >= 0] for number, here in mates.items()}
    for each in [each for each in voices if each.group < 0]:
        taken = {mate.group for mate in mates[each.window]}
        for away in range(NEAR_WINDOWS + 1):
            there = grouped.get(each.window - away, []) + (grouped.get(each.window + away, []) if away else [])
            if near := [other for other in there if other.group not in taken]:
                each.group = max(near, key=lambda other: other.active_samples).group
                break
