"""CTC forced alignment: the best of all paths, the same by every way, and where ctc-segmentation has it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asr_serve import kernels
from asr_serve.decoding import ctc_alignment
from asr_serve.decoding.ctc_alignment import CtcAlignment, align_columns, repeats
from asr_serve.kernels import ctc_alignment_reference

FIXTURE = Path(__file__).parent / "fixtures" / "align.npz"


@pytest.fixture(params=["native", "reference"])
def aligner(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "reference":
        return ctc_alignment_reference
    if kernels.align() is ctc_alignment_reference:
        pytest.skip("the native alignment is not built or not wanted: pip install -e . builds it")
    return kernels.align()


def posteriors(seed: int, *shape: int, rounded: bool = False) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2
    return made.round() if rounded else made.log_softmax(-1)


def collapsed(path: tuple[int, ...]) -> list[int]:
    """What a path of symbols says: repeats are one, and 0 is the blank."""
    return [symbol for symbol, _ in itertools.groupby(path) if symbol]


def runs(path: tuple[int, ...]) -> list[tuple[int, int]]:
    found, at = [], 0
    for symbol, group in itertools.groupby(path):
        length = len(list(group))
        if symbol:
            found.append((at, at + length))
        at += length
    return found


CASES = st.tuples(st.integers(0, 1 << 30), st.integers(1, 6), st.lists(st.integers(1, 2), max_size=4))


@given(CASES)
@settings(max_examples=150, deadline=None)
def test_the_alignment_is_the_best_of_all_paths(case: tuple[int, int, list[int]]) -> None:
    seed, frames, tokens = case
    logprobs = posteriors(seed, frames, 3)
    rows = logprobs.double()
    scores = {
        path: sum(float(rows[frame, symbol]) for frame, symbol in enumerate(path))
        for path in itertools.product(range(3), repeat=frames)
        if collapsed(path) == tokens
    }
    if not scores:
        with pytest.raises(ValueError, match="cannot be said"):
            ctc_alignment.align(logprobs[None], [frames], [tokens], 0)
        return
    (found,) = ctc_alignment.align(logprobs[None], [frames], [tokens], 0)
    best = max(scores, key=scores.__getitem__)
    assert found.logprob == pytest.approx(scores[best], abs=1e-9)
    assert found.spans == runs(best)


@given(seed=st.integers(0, 1 << 30), frames=st.integers(0, 12), tokens=st.integers(0, 5), rounded=st.booleans())
@settings(max_examples=150, deadline=None)
def test_native_and_reference_alignments_are_equal(seed: int, frames: int, tokens: int, rounded: bool) -> None:
    """To the bit, also where paths are equally likely, and where probabilities are none."""
    if kernels.align() is ctc_alignment_reference:
        pytest.skip("the native alignment is not built or not wanted")
    chance = np.random.default_rng(seed)
    heard = chance.standard_normal((frames, tokens + 1)).astype(np.float32) * 2
    heard = heard.round() if rounded else heard
    heard[chance.random(heard.shape) < 0.05] = chance.choice([np.nan, np.inf, -np.inf])
    blank, labels = np.ascontiguousarray(heard[:, 0]), np.ascontiguousarray(heard[:, 1:])
    again = chance.random(tokens) < 0.4

    def answer(module: ModuleType) -> object:
        try:
            return module.align(blank, labels, again)
        except ValueError as error:
            return str(error)

    assert answer(kernels.align()) == answer(ctc_alignment_reference)


@given(seed=st.integers(0, 1 << 30), rounded=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_batch_equals_each_alone(seed: int, rounded: bool) -> None:
    chance = np.random.default_rng(seed)
    frames = [int(each) for each in chance.integers(1, 16, size=4)]
    tokens = [[int(x) for x in chance.integers(1, 4, size=int(chance.integers(0, n // 2 + 1)))] for n in frames]
    logprobs = posteriors(seed, 4, 16, 4, rounded=rounded)
    one: list[CtcAlignment] = []
    try:
        one = ctc_alignment.align(logprobs, frames, tokens, 0)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)):
            ctc_alignment._align_batch(logprobs, frames, tokens, 0)
        return
    assert ctc_alignment._align_batch(logprobs, frames, tokens, 0) == one


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_has_the_alignment_of_the_cpu() -> None:
    logprobs = posteriors(5, 6, 200, 40)
    chance = np.random.default_rng(5)
    tokens = [[int(x) for x in chance.integers(1, 40, size=30 + row)] for row in range(6)]
    frames = [200 - 7 * row for row in range(6)]
    assert ctc_alignment.align(logprobs.cuda(), frames, tokens, 0) == ctc_alignment.align(logprobs, frames, tokens, 0)


def test_repeats_need_a_blank_between(aligner: ModuleType) -> None:
    blank = np.full(3, -3, np.float32)
    labels = np.full((3, 2), -0.1, np.float32)
    assert aligner.align(blank, labels, repeats([7, 8]))[0] in ([(0, 1), (1, 3)], [(0, 2), (2, 3)])
    assert aligner.align(blank, labels, repeats([7, 7]))[0] == [(0, 1), (2, 3)]
    with pytest.raises(ValueError, match="2 tokens cannot be said in 2 frames"):
        aligner.align(blank[:2], labels[:2], repeats([7, 7]))


def test_alignment_of_no_tokens(aligner: ModuleType) -> None:
    none = np.zeros((4, 0), np.float32)
    assert aligner.align(np.full(4, -0.5, np.float32), none, repeats([])) == ([], -2.0)
    assert aligner.align(none[:0, 0:0].reshape(0), none[:0], repeats([])) == ([], 0.0)


@pytest.mark.parametrize("wrong", [(4, (3, 2), 2), (3, (3, 2), 3), (3, (3, 2), 1)])
def test_invalid_shapes_are_refused(aligner: ModuleType, wrong: tuple[int, tuple[int, int], int]) -> None:
    frames, labels, tokens = wrong
    with pytest.raises(ValueError, match=r"blank \(frames,\)"):
        aligner.align(np.zeros(frames, np.float32), np.zeros(labels, np.float32), np.zeros(tokens, bool))


def test_real_speech_has_the_alignment_of_ctc_segmentation() -> None:
    """Each letter begins at the frame at which that package's path enters it. But a letter that comes twice: the
    package does not ask for a blank between the two, as CTC does, and may have the second begin at once."""
    made = np.load(FIXTURE)
    logprobs, frames = torch.from_numpy(made["logprobs"].astype(np.float32)), made["frames"]
    tokens, blank = made["tokens"].tolist(), int(made["blank"])
    found = align_columns(logprobs[:, blank].numpy(), logprobs[:, tokens].numpy(), tokens)
    first, again = np.array([first for first, _ in found.spans]), repeats(tokens)
    assert len(tokens) > 130
    assert again.any()
    assert (first[~again] == frames[~again]).all()
    assert (first[again] >= frames[again]).all()
    assert json.loads(str(made["versions"]))["ctc-segmentation"] == "1.7.4"
