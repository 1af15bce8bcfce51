"""Who speaks, told while people speak: names that stay, and at the end once more, as all that was said shows.

A voice that is like one that is known is that one's; one that is like none, and was heard alone for long enough,
is new. So an early mistake stays in what was told, for names never change; `settle` clusters everything anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asr_serve.diarization.clustering import ANY, SpeakerCount
from asr_serve.diarization.diarize import Diarization, diarize, spans_of, turns_of
from asr_serve.diarization.speaker_groups import (
    SURE_SAMPLES,
    DiarizationWindow,
    WindowSpeaker,
    assign_groups,
    clustering_threshold,
    mean_embedding,
    voices_of,
)
from asr_serve.types import SpeakerTurn


class OnlineSpeaker(msgspec.Struct):
    name: str
    direction: np.ndarray | None = None
    """Sum of what was heard, weighted by how long; None until a voice was."""


class OnlineDiarizer:
    """One caller. What is kept of ten seconds with two voices is 3.3 KB, of segments of a minute 9 KB."""

    def __init__(self) -> None:
        self._windows: list[DiarizationWindow] = []
        self._people: list[OnlineSpeaker] = []
        self._told: list[SpeakerTurn] = []

    def append_windows(self, windows: Sequence[DiarizationWindow]) -> tuple[SpeakerTurn, ...]:
        """Who speaks in the windows of one segment, which follow all that came before."""
        voices = voices_of(windows)
        assign_groups(windows, voices, ANY)
        members: dict[int, list[WindowSpeaker]] = {}
        for each in voices:
            members.setdefault(each.group, []).append(each)
        members.pop(-1, None)
        people = self._recognise(members)
        for each in voices:
            each.group = people.get(each.group, -1)
        turns = tuple(
            SpeakerTurn(self._people[who].name, start, end) for who, start, end in turns_of(windows, voices)
        )
        self._windows += windows
        self._told += turns
        return turns

    def finalize(self, how_many: SpeakerCount = ANY) -> Diarization:
        """Of all that was heard: turns by the names that were told, as far as they are the same people."""
        found = diarize(self._windows, how_many)
        common: dict[tuple[str, str], int] = {}
        told = spans_of(self._told)
        for who, spans in spans_of(found.turns).items():
            for name, others in told.items():
                common[who, name] = _common(spans, others)
        names: dict[str, str] = {}
        for (who, name), samples in sorted(common.items(), key=lambda each: -each[1]):
            if samples and who not in names and name not in names.values():
                names[who] = name
        number = len(self._people)
        for who in spans_of(found.turns):
            if who not in names:
                names[who] = f"SPEAKER_{number:02d}"
                number += 1
        turns = tuple(
            SpeakerTurn(names[each.speaker], each.start_samples, each.end_samples) for each in found.turns
        )
        return Diarization(turns, {names[who]: voice for who, voice in found.voices.items()})

    def _recognise(self, members: dict[int, list[WindowSpeaker]]) -> dict[int, int]:
        """Which of the people each group of a segment is. The surest choose first; two that are heard in one
        window are two people, two that are not may both be one that is known, though they are not alike enough to
        be taken for one by themselves."""
        found: dict[int, int] = {}
        windows = {who: {each.window for each in voices} for who, voices in members.items()}
        taken: dict[int, set[int]] = {}
        """The windows in which each of the people is heard."""
        pairs = []
        for who, voices in members.items():
            direction = mean_embedding(voices)
            for place, person in enumerate(self._people):
                if direction is not None and person.direction is not None:
                    known = person.direction / max(float(np.linalg.norm(person.direction)), 1e-12)
                    pairs.append((float(known @ direction), who, place))

        def be(who: int, place: int) -> None:
            found[who] = place
            taken[place] = taken.get(place, set()) | windows[who]

        for cosine, who, place in sorted(pairs, reverse=True):
            if who in found or not windows[who].isdisjoint(taken.get(place, ())):
                continue
            likely = cosine >= clustering_threshold(members[who])
            if not likely and (place in taken or _clean(members[who]) >= SURE_SAMPLES):
                continue
            be(who, place)
            if likely:
                self._learn(self._people[place], members[who])
        for who in sorted(members, key=lambda each: -_clean(members[each])):
            if who in found:
                continue
            free = [place for place in range(len(self._people)) if place not in taken]
            voice = mean_embedding(members[who])
            if free and voice is None:  # a sound: whoever has spoken last
                last = next((t.speaker for t in reversed(self._told)), self._people[free[0]].name)
                be(who, next((place for place in free if self._people[place].name == last), free[0]))
            elif len(self._people) == 1 and free and self._people[0].direction is None:  # whose first was a sound
                be(who, 0)
                self._learn(self._people[0], members[who])
            else:
                be(who, len(self._people))
                self._people.append(OnlineSpeaker(f"SPEAKER_{found[who]:02d}"))
                self._learn(self._people[found[who]], members[who])
        return found

    def _learn(self, person: OnlineSpeaker, voices: list[WindowSpeaker]) -> None:
        direction = mean_embedding(voices)
        if direction is not None:
            heard = direction * max(_clean(voices), 1)
            person.direction = heard if person.direction is None else person.direction + heard


def _clean(voices: Sequence[WindowSpeaker]) -> int:
    return sum(each.clean_samples for each in voices)


def _common(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Samples that are in both. Each is in order, and overlaps nothing of its own."""
    total, at = 0, 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        place = at
        while place < len(others) and others[place][0] < end:
            total += max(0, min(end, others[place][1]) - max(start, others[place][0]))
            place += 1
    return total
