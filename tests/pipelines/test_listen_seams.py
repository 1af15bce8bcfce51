"""Sentences joined with pauses, live: no word is lost or doubled where one ends and the next begins.

The model itself hears some seams differently when their surroundings differ, also in a file. A seam is bad when
words at it are missing or too many live, and the same joined audio as a file has them right.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from case_tiers import exhaustive_after
from live_client import RATE_HZ, plain_words, run_session
from loaded_models import expect_idle, load_model

from asr_serve.api.library import Model
from asr_serve.audio import read_audio

PAUSES_S = (0.0, 0.3, 1.0, 0.1, 3.0)
"""None, one inside a segment, one that ends a segment; and two more of these."""
JOINED = 3
"""Sentences in one go."""
MOST_S = 9
"""Of a sentence: more seams in the same time."""
SENTENCES = 12


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model() as loaded:
        yield loaded
        expect_idle(loaded._client)


@pytest.fixture(scope="module")
def sentences(speech_data: Path) -> list[np.ndarray]:
    folder = speech_data / "librispeech-test-other"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} in {speech_data}")
    found = (read_audio(path) for path in sorted(folder.rglob("*.flac")))
    short = [pcm for pcm in found if len(pcm) <= MOST_S * RATE_HZ]
    return short[:SENTENCES]


@pytest.fixture(scope="module")
def alone(model: Model, sentences: list[np.ndarray]) -> list[list[str]]:
    return [plain_words(run_session(model, pcm).text) for pcm in sentences]


def lost_or_doubled(parts: list[list[str]], heard: list[str]) -> dict[int, str]:
    """Seams at which `heard` has fewer or more words than the parts, and what is there instead."""
    whole = [word for part in parts for word in part]
    seams = list(accumulate(map(len, parts)))[:-1]
    bad = {}
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, whole, heard, autojunk=False).get_opcodes():
        if tag == "equal" or i2 - i1 == j2 - j1:
            continue
        for number, seam in enumerate(seams):
            if i1 <= seam + 1 and i2 >= seam - 1:
                bad[number] = f"{whole[max(0, i1 - 3) : i2 + 3]} -> {heard[max(0, j1 - 3) : j2 + 3]}"
    return bad


def test_what_counts_as_bad():
    parts = [["it", "was", "here"], ["no", "it", "was", "not"]]
    right = [*parts[0], *parts[1]]
    assert lost_or_doubled(parts, right) == {}
    assert lost_or_doubled(parts, [*right[:3], *right[4:]]).keys() == {0}
    assert lost_or_doubled(parts, [*right[:3], "here", *right[3:]]).keys() == {0}
    assert lost_or_doubled(parts, [*right[:2], "hear", *right[3:]]) == {}, "heard otherwise, not lost"
    assert lost_or_doubled(parts, right[:-1]) == {}, "not at a seam"


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", exhaustive_after(3, PAUSES_S))
def test_no_word_is_lost_or_doubled_at_a_seam(model, sentences, alone, pause_s):
    pause = np.zeros(int(pause_s * RATE_HZ), np.float32)
    bad = []
    for first in range(0, len(sentences) - JOINED + 1, JOINED):
        group = slice(first, first + JOINED)
        parts = [piece for pcm in sentences[group] for piece in (pcm, pause)][:-1]
        joined = np.concatenate(parts)
        live = lost_or_doubled(alone[group], plain_words(run_session(model, joined).text))
        if live:
            file = lost_or_doubled(alone[group], plain_words(model.transcribe(joined)[0].text))
            bad += [f"{first + seam}: {what}" for seam, what in live.items() if seam not in file]
    assert not bad
