"""Voices that belong together."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_windows import direction

from asr_serve.diarization.clustering import ANY, SpeakerCount, cluster


def people(names: str, noise: float = 0.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    voices = np.stack([direction(name, noise, seed) for seed, name in enumerate(names)])
    return voices, np.ones(len(names)), np.zeros((len(names), len(names)), bool)


def as_text(labels: np.ndarray) -> str:
    return "".join("abcdefgh"[each] for each in labels)


def test_clusters_are_numbered_by_appearance():
    assert as_text(cluster(*people("bbaabcc"), 0.4, ANY)) == "aabbacc"


@pytest.mark.parametrize(
    ("names", "bounds", "expected"),
    [
        *(("aaabbbccc", SpeakerCount.of(count, None, None), count) for count in (1, 2, 3, 5)),
        ("ab", SpeakerCount(9, 9), 2),
        ("aabbcc", SpeakerCount(1, 2), 2),
        ("aaaa", SpeakerCount(2, 3), 2),
        ("aabbcc", SpeakerCount(1, 9), 3),
    ],
)
def test_number_of_clusters(names, bounds, expected):
    assert len(set(cluster(*people(names), 0.4, bounds))) == expected


def test_separated_voices_are_never_merged():
    voices, weights, apart = people("aaaa", 0.1)
    apart[0, 1] = apart[1, 0] = True
    labels = cluster(voices, weights, apart, 0.4, ANY)
    assert labels[0] != labels[1]
    assert len(set(labels)) == 2


def test_longer_speech_counts_for_more():
    a, b = direction("a"), direction("b")
    between = (a + 0.8 * b) / np.linalg.norm(a + 0.8 * b)
    voices, apart = np.stack([a, between, b]), np.zeros((3, 3), bool)
    assert as_text(cluster(voices, np.array([1.0, 1.0, 1.0]), apart, 0.1, SpeakerCount(2, 2))) == "aab"


def test_clusters_equal_those_of_a_plain_loop():
    """Against a plain loop over all pairs."""
    chance = np.random.default_rng(3)
    for _ in range(5):
        voices = chance.standard_normal((30, 8))
        voices /= np.linalg.norm(voices, axis=1, keepdims=True)
        weights = chance.uniform(0.5, 3, 30)
        apart = chance.random((30, 30)) < 0.1
        apart |= apart.T
        np.fill_diagonal(apart, False)
        assert cluster(voices, weights, apart, 0.3, ANY).tolist() == _slowly(voices, weights, apart, 0.3)


def test_no_embeddings_have_no_clusters():
    assert cluster(np.zeros((0, 4)), np.zeros(0), np.zeros((0, 0), bool), 0.4, ANY).shape == (0,)


def _slowly(voices: np.ndarray, weights: np.ndarray, apart: np.ndarray, alike: float) -> list[int]:
    groups = [[each] for each in range(len(voices))]
    while True:
        best, pair = alike, None
        for i, one in enumerate(groups):
            for j, other in enumerate(groups[:i]):
                if apart[np.ix_(one, other)].any():
                    continue
                left, right = (weights[g] @ voices[g] for g in (one, other))
                value = float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
                if value >= best:
                    best, pair = value, (i, j)
        if pair is None:
            break
        groups[pair[1]] += groups.pop(pair[0])
    firsts = sorted(min(each) for each in groups)
    return [next(firsts.index(min(g)) for g in groups if each in g) for each in range(len(voices))]
