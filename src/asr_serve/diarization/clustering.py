"""Agglomerative clustering of voices: the two most similar groups are merged first.

The similarity of groups is that of their mean directions, each voice weighted by its amount of speech. Two that
spoke at once, or in one window, are two people and are never merged, unless more spoke at once than the requested
maximum.
"""

from __future__ import annotations

import msgspec
import numpy as np


class SpeakerCount(msgspec.Struct, frozen=True):
    """Number of speakers: exact, or within bounds."""

    minimum: int = 1
    maximum: int | None = None

    @classmethod
    def of(cls, exactly: int | None, least: int | None, most: int | None) -> SpeakerCount:
        if exactly is not None:
            return cls(exactly, exactly)
        return cls(least or 1, most)


ANY = SpeakerCount()


def cluster(
    voices: np.ndarray, weights: np.ndarray, apart: np.ndarray, alike: float, how_many: SpeakerCount = ANY
) -> np.ndarray:
    """Returns the group of each voice, (n,) int64, numbered by first appearance.

    In      voices (n, width), each of length 1; weights (n,) above 0; apart (n, n) bool, symmetric: these two are
            two people; alike: least cosine of two groups that are one speaker
    """
    count = len(voices)
    labels = np.arange(count)
    if not count:
        return labels
    sums = voices * weights[:, None]
    units = _units(sums)
    apart = apart.copy()
    closeness = np.asarray(units @ units.T, np.float32)
    closeness[apart] = -np.inf
    np.fill_diagonal(closeness, -np.inf)
    best = closeness.argmax(1)
    value = closeness[np.arange(count), best]
    groups, alive = count, np.ones(count, bool)
    most = how_many.maximum if how_many.maximum is not None else count
    while groups > how_many.minimum:
        first = int(value.argmax())
        second = int(best[first])
        if value[first] == -np.inf or (value[first] < alike and groups <= most):
            break
        labels[labels == labels[second]] = labels[first]
        sums[first] += sums[second]
        units[first] = _units(sums[first])
        apart[first] |= apart[second]
        apart[:, first] = apart[first]
        closeness[second] = closeness[:, second] = -np.inf
        value[second], alive[second] = -np.inf, False
        similarity = np.asarray(units @ units[first], np.float32)
        similarity[apart[first] | ~alive] = -np.inf
        similarity[first] = -np.inf
        closeness[first] = closeness[:, first] = similarity
        outdated = (best == first) | (best == second)
        outdated[first] = True
        outdated[second] = False
        best[outdated] = closeness[outdated].argmax(1)
        value[outdated] = closeness[outdated, best[outdated]]
        better = similarity > value
        best[better], value[better] = first, similarity[better]
        groups -= 1
    if groups > most:  # more spoke at once than the maximum: merge some of them nevertheless
        survivors = np.flatnonzero(alive)
        totals = np.array([weights[labels == labels[index]].sum() for index in survivors])
        no_constraints = np.zeros((len(survivors), len(survivors)), bool)
        joined = cluster(sums[survivors] / totals[:, None], totals, no_constraints, alike, how_many)
        first_of = {
            int(index): int(survivors[joined == number][0]) for index, number in zip(survivors, joined, strict=True)
        }
        labels = np.array([first_of[int(index)] for index in labels])
    _, first_index, numbers = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first_index))
    return np.asarray(order[numbers])


def _units(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12))
