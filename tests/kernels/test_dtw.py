"""Dynamic time warping: native code and its reference are what trying every way finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

from asr_serve import kernels
from asr_serve.kernels import dtw_reference

Find = Callable[[np.ndarray], np.ndarray]


def finders() -> list[Find]:
    found: list[Find] = [dtw_reference.first_frames]
    return found if kernels.dtw() is dtw_reference else [*found, kernels.dtw().first_frames]


@cache
def ways(rows: int, frames: int) -> list[tuple[tuple[int, int], ...]]:
    """All of them, from the first corner to the last."""

    def on(way: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
        row, frame = way[-1]
        if (row, frame) == (rows - 1, frames - 1):
            yield way
        for each in ((row + 1, frame + 1), (row + 1, frame), (row, frame + 1)):
            if each[0] < rows and each[1] < frames:
                yield from on((*way, each))

    return list(on(((0, 0),)))


@pytest.mark.parametrize("find", finders())
@pytest.mark.parametrize(("rows", "frames"), [(1, 1), (1, 6), (5, 1), (2, 2), (3, 5), (5, 3), (4, 6)])
def test_the_path_is_the_cheapest_of_all(find: Find, rows: int, frames: int) -> None:
    rng = np.random.default_rng(rows * 31 + frames)
    for _ in range(20):
        cost = rng.standard_normal((rows, frames)).astype(np.float32)  # no two ways cost the same
        best = min(ways(rows, frames), key=lambda way: sum(float(cost[place]) for place in way))
        begins = [min(frame for row, frame in best if row == each) for each in range(rows)]
        assert find(cost).tolist() == begins


@pytest.mark.parametrize("find", finders())
def test_ties_are_resolved_as_by_the_reference(find: Find) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        cost = rng.integers(0, 3, (4, 6)).astype(np.float32)
        least = min(sum(float(cost[place]) for place in way) for way in ways(4, 6))
        begins = find(cost).tolist()
        same = [way for way in ways(4, 6) if sum(float(cost[place]) for place in way) == least]
        assert begins in [[min(f for r, f in way if r == row) for row in range(4)] for way in same]
        assert begins == dtw_reference.first_frames(cost).tolist(), "native code decides as its reference does"


@pytest.mark.parametrize("find", finders())
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3,)])
def test_an_empty_matrix_has_no_path(find: Find, shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        find(np.zeros(shape, np.float32))
