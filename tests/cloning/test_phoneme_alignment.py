"""Frames laid upon those of somebody who says the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from spoken_by_heart import Known, spoken

from asr_serve.audio.features.slaney_mel import SlaneyMel
from asr_serve.cloning import phoneme_alignment
from asr_serve.cloning.voice_corpus import HOP, RATE_HZ


def mel(pcm: np.ndarray) -> np.ndarray:
    return SlaneyMel()(torch.from_numpy(pcm.astype(np.float32))[None])[0].numpy()


def deeper(pcm: np.ndarray) -> np.ndarray:
    """Another voice, somewhat: its spectrum is tilted, and it is in a room and on a line."""
    tilted = np.append(pcm[0], pcm[1:] - 0.6 * pcm[:-1])
    echo = np.concatenate([np.zeros(331), 0.25 * tilted])[: len(tilted)]
    return (3 * (tilted + echo) + 0.001 * np.random.default_rng(0).standard_normal(len(pcm))).astype(np.float32)


@pytest.fixture(scope="module")
def said() -> tuple[list[Known], list[Known]]:
    """Both say the same, one a quarter faster than the other."""
    return spoken(1.0), spoken(1.25)


@pytest.mark.slow
def test_boundaries_are_found(said):
    """Between voices of different people, Kokoro's to hibari's, the median is a frame too: see docs/voices.md."""
    off_ms: list[float] = []
    for slow, fast in zip(*said, strict=True):
        found = phoneme_alignment.align_phonemes(mel(deeper(slow.pcm)), mel(fast.pcm), np.array(fast.line.frames))
        assert found is not None
        assert found.frames.sum() == len(slow.pcm) // HOP
        assert found.frames.min() >= 1
        apart = np.abs(np.cumsum(found.frames)[:-1] - np.cumsum(slow.line.frames)[:-1])
        off_ms += (1_000 * HOP / RATE_HZ * apart).tolist()
        assert found.cost < 0.6
    assert np.median(off_ms) < 15
    assert np.mean(np.array(off_ms) < 50) > 0.95


def test_several_voices_agree(said):
    """One that is lost does not count."""
    slow, fast = said[0][1], said[1][1]
    heard, wanted = mel(deeper(slow.pcm)), np.cumsum(slow.line.frames)[:-1]
    good = [(mel(each.pcm), np.array(each.line.frames)) for each in (fast, spoken(1.1)[1])]
    lost = (np.roll(good[0][0], len(good[0][0]) // 2, 0), good[0][1])
    found = phoneme_alignment.consensus_alignment(heard, [*good, lost])
    assert found is not None
    assert found.frames.sum() == len(heard)
    off = np.abs(np.cumsum(found.frames)[:-1] - wanted)
    alone = phoneme_alignment.align_phonemes(heard, *lost)
    assert alone is not None
    assert np.median(off) <= 1
    assert off.mean() < 0.3 * np.abs(np.cumsum(alone.frames)[:-1] - wanted).mean()
    right = phoneme_alignment.consensus_alignment(heard, good)
    assert right is not None
    assert right.apart < 1.5
    assert right.apart < found.apart
    assert phoneme_alignment.consensus_alignment(heard[:3], good) is None


def test_a_pause_in_the_middle_stays_with_its_neighbours(said):
    slow, fast = said[0][0], said[1][0]
    ends = np.cumsum(slow.line.frames)
    blank = slow.line.phonemes.index(" ", 8)
    cut = int(ends[blank]) * HOP
    pause = np.zeros(20 * HOP, np.float32)
    found = phoneme_alignment.align_phonemes(
        mel(np.concatenate([slow.pcm[:cut], pause, slow.pcm[cut:]])), mel(fast.pcm), np.array(fast.line.frames)
    )
    assert found is not None
    after = np.cumsum(found.frames)
    assert np.abs(after[: blank - 2] - ends[: blank - 2]).max() <= 5
    assert np.abs(after[blank + 3 :] - 20 - ends[blank + 3 :]).max() <= 5


def test_another_text_costs_more(said):
    for number, one in enumerate(said[0][:-1]):
        heard, same, other = mel(deeper(one.pcm)), said[1][number], said[1][number + 1]
        right = phoneme_alignment.align_phonemes(heard, mel(same.pcm), np.array(same.line.frames))
        wrong = phoneme_alignment.align_phonemes(heard, mel(other.pcm), np.array(other.line.frames))
        assert right is not None
        assert wrong is None or wrong.cost > 1.1 * right.cost


def test_fewer_frames_than_phonemes_have_no_alignment(said):
    fast = said[1][0]
    frames = np.array(fast.line.frames)
    assert phoneme_alignment.align_phonemes(mel(fast.pcm)[: len(frames) - 1], mel(fast.pcm), frames) is None


@pytest.mark.parametrize(
    ("ends", "phonemes", "frames", "wanted"),
    [
        ([3, 7], 3, 10, [3, 4, 3]),
        ([0, 0, 0], 4, 10, [1, 1, 1, 7]),
        ([10, 10, 10], 4, 10, [7, 1, 1, 1]),
        ([5, 4], 3, 6, [4, 1, 1]),
        ([], 1, 5, [5]),
        ([1, 2, 3], 4, 4, [1, 1, 1, 1]),
    ],
)
def test_every_phoneme_has_a_frame(ends, phonemes, frames, wanted):
    assert phoneme_alignment.ends_to_durations(np.array(ends, np.int64), phonemes, frames).tolist() == wanted


def test_the_path_is_the_cheapest(rng):
    distance = rng.random((7, 5))
    path = phoneme_alignment.dtw_path(distance)
    assert path[0].tolist() == [0, 0]
    assert path[-1].tolist() == [6, 4]
    steps = np.diff(path, axis=0)
    assert ((steps >= 0) & (steps <= 1)).all()
    assert (steps.sum(1) >= 1).all()

    def cost(i: int, j: int) -> float:
        """By trying all."""
        if (i, j) == (0, 0):
            return 2 * float(distance[0, 0])
        ways = []
        if i and j:
            ways.append(cost(i - 1, j - 1) + 2 * distance[i, j])
        if i:
            ways.append(cost(i - 1, j) + distance[i, j] + phoneme_alignment.SLANT)
        if j:
            ways.append(cost(i, j - 1) + distance[i, j] + phoneme_alignment.SLANT)
        return float(min(ways))

    mine = 2 * distance[0, 0]
    for (di, dj), (i, j) in zip(steps.tolist(), path[1:].tolist(), strict=True):
        mine += 2 * distance[i, j] if di and dj else distance[i, j] + phoneme_alignment.SLANT
    assert mine == pytest.approx(cost(6, 4))
