"""More people at once than there are said to be: what the caller says holds."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_windows import windows

from asr_serve.diarization.clustering import SpeakerCount, cluster
from asr_serve.diarization.speaker_groups import assign_groups, voices_of

VOICES = np.array([[1, 0, 0], [0.9, 0.436, 0], [0, 1, 0], [0, 0, 1]], np.float64)
APART = ~np.eye(4, dtype=bool)
"""All four were heard in one window."""


@pytest.mark.parametrize(("most", "groups"), [(4, 4), (3, 3), (2, 2), (1, 1)])
def test_the_requested_number_of_speakers_is_found(most: int, groups: int) -> None:
    labels = cluster(VOICES, np.ones(4), APART, 0.4, SpeakerCount(1, most))
    assert sorted(set(labels.tolist())) == list(range(groups))
    if groups < 4:
        assert labels[0] == labels[1]  # those that are most alike


@pytest.mark.parametrize("people", range(2, 9))
def test_no_speaker_is_left_out_where_the_number_is_given(people: int) -> None:
    """Two of them, as the networks hear it, who are said to be more people: each has a voice."""
    heard = windows([("ann" if turn % 2 else "bob", 5.0 * turn, 5.0 * turn + 4) for turn in range(6)], 32)
    voices = voices_of(heard)
    assign_groups(heard, voices, SpeakerCount(people, people))
    assert len({each.group for each in voices}) == people
