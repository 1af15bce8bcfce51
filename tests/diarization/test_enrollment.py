"""Known speakers among those that were heard: directions that are made here."""

from __future__ import annotations

import numpy as np
import pytest

from asr_serve.diarization.diarize import Diarization
from asr_serve.diarization.enrollment import dominant_embedding, rename_enrolled
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.speaker_groups import ALIKE as SHORT_AND_LONG
from asr_serve.types import SpeakerTurn

ALIKE = SHORT_AND_LONG[1]
EAST, NORTH, UP = np.eye(3, dtype=np.float32)


def between(one: np.ndarray, other: np.ndarray, cosine: float) -> np.ndarray:
    """As alike to `one` as that, and else like `other`."""
    return np.asarray(cosine * one + np.sqrt(1 - cosine**2) * other, np.float32)


def heard(**voices: np.ndarray) -> Diarization:
    turns = tuple(SpeakerTurn(name, 1_000 * n, 1_000 * n + 900) for n, name in enumerate((*voices, *voices)))
    return Diarization(turns, dict(voices))


def speakers(found: Diarization) -> list[str]:
    return list(dict.fromkeys(turn.speaker for turn in found.turns))


def test_enrolled_speakers_have_names_and_others_numbers():
    found = rename_enrolled(heard(SPEAKER_00=EAST, SPEAKER_01=NORTH, SPEAKER_02=UP), {"agent": NORTH})
    assert speakers(found) == ["SPEAKER_00", "agent", "SPEAKER_01"]
    assert {name: direction.tolist() for name, direction in found.voices.items()} == {
        "SPEAKER_00": EAST.tolist(),
        "agent": NORTH.tolist(),
        "SPEAKER_01": UP.tolist(),
    }


@pytest.mark.parametrize(("cosine", "name"), [(ALIKE + 0.01, "agent"), (ALIKE - 0.01, "SPEAKER_00")])
def test_only_a_similar_voice_gets_a_name(cosine, name):
    assert speakers(rename_enrolled(heard(SPEAKER_00=EAST), {"agent": between(EAST, UP, cosine)})) == [name]


def test_each_name_is_given_once_to_the_most_similar_speaker():
    two = heard(SPEAKER_00=between(EAST, NORTH, 0.7), SPEAKER_01=between(EAST, UP, 0.9))
    assert speakers(rename_enrolled(two, {"agent": EAST})) == ["SPEAKER_00", "agent"]
    assert speakers(rename_enrolled(two, {"agent": EAST, "customer": NORTH})) == ["customer", "agent"]


def test_without_a_known_voice_names_are_unchanged():
    assert rename_enrolled(heard(SPEAKER_00=EAST), {}) == heard(SPEAKER_00=EAST)
    assert speakers(rename_enrolled(Diarization((), {}), {"agent": EAST})) == []
    unheard = Diarization((SpeakerTurn("SPEAKER_00", 0, 500),), {})  # too short a voice to be known by
    assert speakers(rename_enrolled(unheard, {"agent": EAST})) == ["SPEAKER_00"]


def test_the_voice_of_a_reference_is_its_main_speaker():
    chances = np.array([[255, 0, 0]] * 2 + [[0, 200, 90]] * 3 + [[0, 0, 0]], np.uint8)
    both = np.stack([EAST, NORTH]).tobytes()
    reference = LocalSpeakers(0, 270, 3, chances.tobytes(), (0, 1), (540, 810), (540, 810), both)
    assert dominant_embedding(reference).tolist() == NORTH.tolist()
    assert dominant_embedding(LocalSpeakers(0, 270, 3, bytes(6))) is None
