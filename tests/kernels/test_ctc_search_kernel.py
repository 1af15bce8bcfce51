"""The native CTC search and its reference: the same answers and the same bytes, and the posteriors are never copied."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asr_serve import kernels
from asr_serve.kernels import ctc_search_reference

SLOTS = 5
NAN, INF = float("nan"), math.inf


def built() -> ModuleType:
    search = kernels.search()
    if search is ctc_search_reference:
        pytest.skip("the native search is not built or not wanted: pip install -e . builds it")
    return search


@pytest.fixture(params=["native", "reference"])
def search(request: pytest.FixtureRequest) -> ModuleType:
    return built() if request.param == "native" else ctc_search_reference


def state_of(beam: int, arena: int) -> tuple[Tensor, ...]:
    """Of SLOTS - 1 new sessions; what no step may read is poison."""
    return (
        torch.zeros(SLOTS, 3, dtype=torch.int64),
        torch.full((SLOTS, beam), 1 << 40),
        torch.full((SLOTS, beam, 2), NAN, dtype=torch.float64),
        torch.full((SLOTS, arena, 3), 1 << 40),
        torch.full((SLOTS, arena, 2), NAN, dtype=torch.float64),
    )


def posteriors(seed: int, *shape: int, sharp: float = 2.0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (made * sharp).log_softmax(-1)


def hear(
    search: ModuleType,
    logprobs: Tensor,
    state: tuple[Tensor, ...],
    rows: list[int] | None = None,
    seen: int = 0,
    frames: list[int] | None = None,
    **options: Any,
) -> list[Any]:
    n, width, vocab = logprobs.shape
    told = {"blank": 0, "top": vocab, "min_logprob": -INF, "max_gap": INF, "threads": 1} | options
    where = torch.tensor(list(range(n)) if rows is None else rows)
    count = torch.tensor([width] * n if frames is None else frames)
    return search.step(logprobs, where, torch.full((n,), seen), count, *state, *told.values())


def bits(state: tuple[Tensor, ...]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in state)


# --- native against the reference ----------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([2, 3, 7, 70]),
    widths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    beam=st.sampled_from([1, 2, 5, 16]),
    arena=st.sampled_from([1, 4, 20, 300]),
    top=st.sampled_from([1, 3, 100]),
    min_logprob=st.sampled_from([-INF, -6.3, -1.0]),
    max_gap=st.sampled_from([INF, 8.0, 0.5]),
    threads=st.sampled_from([1, 2]),
    rounded=st.booleans(),
    broken=st.sampled_from([None, NAN, -INF, INF]),
)
def test_both_say_the_same_and_leave_the_same_bytes(
    seed: int,
    vocab: int,
    widths: list[int],
    beam: int,
    arena: int,
    top: int,
    min_logprob: float,
    max_gap: float,
    threads: int,
    rounded: bool,
    broken: float | None,
) -> None:
    options = {"blank": seed % vocab, "top": top, "min_logprob": min_logprob, "max_gap": max_gap}
    states = state_of(beam, arena), state_of(beam, arena)
    seen = 0
    for step, width in enumerate(widths):
        logprobs = posteriors(seed + step, 3, width, vocab)
        if rounded:
            logprobs = (logprobs * 2).round() / 2  # many of them are equal
        if broken is not None:
            logprobs[posteriors(seed - step, 3, width, vocab) > -0.7] = broken
        heard = {"rows": [2, 0, SLOTS - 1], "seen": seen, "frames": [width, width // 2, width]}
        ours = hear(built(), logprobs, states[0], **heard, **options, threads=threads)
        assert ours == hear(ctc_search_reference, logprobs, states[1], **heard, **options)
        assert bits(states[0]) == bits(states[1])
        seen += width


def test_threads_change_nothing() -> None:
    search, logprobs = built(), posteriors(1, SLOTS - 1, 30, 40)
    alone, together = state_of(8, 64), state_of(8, 64)
    assert hear(search, logprobs, alone) == hear(search, logprobs, together, threads=4)
    assert bits(alone) == bits(together)


# --- what they promise ----------------------------------------------------------------------------


def test_the_posteriors_are_read_where_they_lie(search: ModuleType) -> None:
    logprobs = posteriors(1, 2, 3, 5)
    assert search.address(logprobs) == logprobs.data_ptr()
    assert search.address(logprobs[1:]) == logprobs.data_ptr() + 3 * 5 * 4


@pytest.mark.parametrize("wrong", ["strided", "float64", "bfloat16"])
def test_what_would_have_to_be_copied_is_refused(search: ModuleType, wrong: str) -> None:
    logprobs = posteriors(1, 2, 3, 10)
    wanting = logprobs[:, :, ::2] if wrong == "strided" else logprobs.to(getattr(torch, wrong))
    state = state_of(2, 8)
    before = bits(state)
    with pytest.raises(TypeError):
        search.address(wanting)
    with pytest.raises(TypeError):
        hear(search, wanting, state)
    assert bits(state) == before


def test_a_row_that_belongs_to_nobody_stays_as_it_is(search: ModuleType) -> None:
    state, logprobs = state_of(4, 32), posteriors(1, 3, 5, 6)
    found = hear(search, logprobs, state, rows=[SLOTS - 1, 1, SLOTS - 1])
    assert found[0] == found[2] == ([], [])
    assert found[1][0] + found[1][1]
    assert state[0].ne(0).any(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [1, 1]},
        {"rows": [0, SLOTS]},
        {"rows": [0, -1]},
        {"rows": [0]},
        {"frames": [4, 3]},
        {"frames": [-1, 3]},
        {"blank": 6},
        {"blank": -1},
        {"top": 0},
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_refused(search: ModuleType, wrong: dict[str, Any]) -> None:
    state = state_of(2, 8)
    before = bits(state)
    with pytest.raises(ValueError):
        hear(search, posteriors(1, 2, 3, 6), state, **wrong)
    assert bits(state) == before


def test_a_state_of_another_shape_is_refused() -> None:
    for i in range(5):
        state = list(state_of(2, 8))
        state[i] = state[i][:-1].contiguous()
        with pytest.raises(ValueError):
            hear(built(), posteriors(1, 2, 3, 6), tuple(state))


@pytest.mark.parametrize(
    ("tensor", "at", "value"),
    [
        (0, (0,), 3),
        (0, (0,), -1),
        (0, (1,), 9),
        (0, (2,), 7),
        (1, (0,), 99),
        (1, (1,), -2),
        (3, (0, 0), 5),
        (3, (0, 0), -9),
        (3, (0, 1), 6),
    ],
)
def test_a_corrupt_row_is_refused(search: ModuleType, tensor: int, at: tuple[int, ...], value: int) -> None:
    state = state_of(2, 8)
    flat = torch.full((1, 4, 6), -math.log(6.0))
    hear(search, flat, state)
    assert state[0][0, 1] > 0, "there are nodes to corrupt"
    state[tensor][(0, *at)] = value
    with pytest.raises(ValueError, match="corrupt"):
        hear(search, flat, state, seen=4)
