"""Online diarization: speaker names that stay while people speak, and offline clustering of everything at the end.

A voice similar to a known speaker gets that name; a voice similar to none, with enough non-overlapped speech,
becomes a new speaker. Reported names never change, so an early mistake stays; `finalize` clusters everything anew.
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
    """Sum of embeddings weighted by their speech; None until there is one."""


class OnlineDiarizer:
    """Diarization of one client's audio. Ten seconds with two voices take 3.3 KB, segments of a minute 9 KB."""

    def __init__(self) -> None:
        self._windows: list[DiarizationWindow] = []
        self._people: list[OnlineSpeaker] = []
        self._told: list[SpeakerTurn] = []

    def append_windows(self, windows: Sequence[DiarizationWindow]) -> tuple[SpeakerTurn, ...]:
        """Returns the turns in the windows of one segment, which must follow all earlier ones."""
        voices = voices_of(windows)
        assign_groups(windows, voices, ANY)
        members: dict[int, list[WindowSpeaker]] = {}
        for voice in voices:
            members.setdefault(voice.group, []).append(voice)
        members.pop(-1, None)
        people = self._recognise(members)
        for voice in voices:
            voice.group = people.get(voice.group, -1)
        turns = tuple(
            SpeakerTurn(self._people[index].name, start, end) for index, start, end in turns_of(windows, voices)
        )
        self._windows += windows
        self._told += turns
        return turns

    def finalize(self, how_many: SpeakerCount = ANY) -> Diarization:
        """Diarizes all windows offline; speakers get the reported names that they overlap most with."""
        diarization = diarize(self._windows, how_many)
        common: dict[tuple[str, str], int] = {}
        reported = spans_of(self._told)
        for speaker, spans in spans_of(diarization.turns).items():
            for name, others in reported.items():
                common[speaker, name] = _common(spans, others)
        names: dict[str, str] = {}
        for (speaker, name), samples in sorted(common.items(), key=lambda item: -item[1]):
            if samples and speaker not in names and name not in names.values():
                names[speaker] = name
        number = len(self._people)
        for speaker in spans_of(diarization.turns):
            if speaker not in names:
                names[speaker] = f"SPEAKER_{number:02d}"
                number += 1
        turns = tuple(
            SpeakerTurn(names[turn.speaker], turn.start_samples, turn.end_samples) for turn in diarization.turns
        )
        return Diarization(turns, {names[speaker]: voice for speaker, voice in diarization.voices.items()})

    def _recognise(self, members: dict[int, list[WindowSpeaker]]) -> dict[int, int]:
        """Returns the known speaker of each group of a segment, adding new ones. The most similar pairs come
        first. Two groups in one window are two people; two in different windows may both be one known speaker,
        though they are not similar enough to each other to be grouped."""
        assigned: dict[int, int] = {}
        windows = {group: {voice.window for voice in voices} for group, voices in members.items()}
        active_windows: dict[int, set[int]] = {}
        """Windows in which each known speaker is active."""
        pairs = []
        for group, voices in members.items():
            direction = mean_embedding(voices)
            for index, person in enumerate(self._people):
                if direction is not None and person.direction is not None:
                    known = person.direction / max(float(np.linalg.norm(person.direction)), 1e-12)
                    pairs.append((float(known @ direction), group, index))

        def assign(who: int, place: int) -> None:
            assigned[who] = place
            active_windows[place] = active_windows.get(place, set()) | windows[who]

        for cosine, group, index in sorted(pairs, reverse=True):
            if group in assigned or not windows[group].isdisjoint(active_windows.get(index, ())):
                continue
            likely = cosine >= clustering_threshold(members[group])
            if not likely and (index in active_windows or _clean(members[group]) >= SURE_SAMPLES):
                continue
            assign(group, index)
            if likely:
                self._learn(self._people[index], members[group])
        for group in sorted(members, key=lambda group: -_clean(members[group])):
            if group in assigned:
                continue
            free = [index for index in range(len(self._people)) if index not in active_windows]
            voice = mean_embedding(members[group])
            if free and voice is None:  # no embedding: the last speaker
                last = next((t.speaker for t in reversed(self._told)), self._people[free[0]].name)
                assign(group, next((index for index in free if self._people[index].name == last), free[0]))
            elif len(self._people) == 1 and free and self._people[0].direction is None:  # no embedding so far
                assign(group, 0)
                self._learn(self._people[0], members[group])
            else:
                assign(group, len(self._people))
                self._people.append(OnlineSpeaker(f"SPEAKER_{assigned[group]:02d}"))
                self._learn(self._people[assigned[group]], members[group])
        return assigned

    def _learn(self, person: OnlineSpeaker, voices: list[WindowSpeaker]) -> None:
        direction = mean_embedding(voices)
        if direction is not None:
            weighted = direction * max(_clean(voices), 1)
            person.direction = weighted if person.direction is None else person.direction + weighted


def _clean(voices: Sequence[WindowSpeaker]) -> int:
    return sum(voice.clean_samples for voice in voices)


def _common(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Returns the number of samples in both. Each is sorted and free of overlaps."""
    total, at = 0, 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        place = at
        while place < len(others) and others[place][0] < end:
            total += max(0, min(end, others[place][1]) - max(start, others[place][0]))
            place += 1
    return total
