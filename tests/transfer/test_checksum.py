"""What is copied and summed in one pass is what a copy and a sum give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve import kernels
from asr_serve.transfer import checksum as module
from asr_serve.transfer.checksum import BLOCK, LARGE, checksum, copy_and_sum

DATA = np.random.default_rng(3).integers(0, 256, LARGE + 3 * BLOCK + 200, np.uint8)
SIZES = st.one_of(
    st.integers(0, 200), st.integers(LARGE - 2, LARGE + 2), st.integers(0, 100).map(lambda n: LARGE + BLOCK + n)
)


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled" and kernels.copy() is None:
        pytest.skip("_copy was not built: there is no C++ compiler")
    if request.param == "plain":
        monkeypatch.setattr(module.kernels, "copy", lambda: None)
    return str(request.param)


def test_copied_and_summed(way: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(SIZES, st.integers(0, 70), st.integers(0, 70))
    def expect(nbytes: int, at: int, start: int) -> None:
        memory = np.full(nbytes + 150, 7, np.uint8)
        data = DATA[start : start + nbytes]
        assert copy_and_sum(memory[at : at + nbytes], data) == checksum(data)
        assert np.array_equal(memory[at : at + nbytes], data)
        assert set(memory[:at]) <= {7}
        assert set(memory[at + nbytes :]) <= {7}

    expect()


def test_memory_that_is_read_only_or_of_another_size_is_refused() -> None:
    if (compiled := kernels.copy()) is None:
        pytest.skip("_copy was not built: there is no C++ compiler")
    fixed = np.zeros(8, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(TypeError):
        compiled.past_caches(fixed, np.ones(8, np.uint8))
    with pytest.raises(ValueError, match="one size"):
        compiled.past_caches(np.zeros(9, np.uint8), np.ones(8, np.uint8))
    with pytest.raises(TypeError):
        compiled.past_caches(np.zeros(16, np.uint8)[::2], np.ones(8, np.uint8))
