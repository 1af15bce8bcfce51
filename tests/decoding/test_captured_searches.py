"""Batched searches as a device captures them: nothing is read back, and what is replayed is the search itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording_device import RecordingDevice, RefuseSynchronisation
from streaming_search import PosteriorModel, chunk_of, posteriors, state_of
from test_biasing_streaming import BLANK, VOCAB, letter_scorer, words_of
from test_wfst_batched import COLUMNS, ScoreModel, random_graph
from torch import Tensor

from asr_serve import devices
from asr_serve.decoding.ctc import CtcBeamOptions
from asr_serve.decoding.ctc_batched import BatchedCtcPrefixBeam
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.wfst.batched_search import BatchedWfstSearch
from asr_serve.devices.interface import Device
from asr_serve.models.decoding_graph import GraphSearchOptions
from asr_serve.types import SearchResult

CPU = devices.make_device("cpu", "fp32")
SESSIONS, FRAMES, CHUNK = 4, 9, 3
LENGTHS = [9, 2, 7, 0]
WORDS = words_of("abba", "bad", "deaf", "ba", weight=3.0)
LONG_CHAINS = words_of(*("a " * count + "b" for count in range(1, 20)), weight=2.0)
"""A list whose nodes have long ways to the root: its search is not captured."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "hotwords": (WORDS,),
    "hotwords of long chains": (LONG_CHAINS,),
    "language model": (None, LanguageModelFusion(letter_scorer(3), 0.6)),
    "both": (WORDS, LanguageModelFusion(letter_scorer(4), 0.9)),
}


def ctc(device: Device) -> tuple[Any, int]:
    """A search, and the columns of its scores."""
    model: Any = PosteriorModel(VOCAB, BLANK)
    search = BatchedCtcPrefixBeam(model, device, CtcBeamOptions(6), tail=8, boost=1.0, fuses=True, token_bonus=0.3)
    return search, VOCAB


def wfst(seed: int) -> Callable[[Device], tuple[Any, int]]:
    def made(device: Device) -> tuple[Any, int]:
        model: Any = ScoreModel()
        options = GraphSearchOptions(beam=9.0, max_active=12)
        return BatchedWfstSearch(model, random_graph(seed), device, options, max_tail_words=8), COLUMNS

    return made


CASES: dict[str, tuple[Callable[[Device], tuple[Any, int]], tuple[Any, ...]]] = {
    **{f"ctc {name}": (ctc, more) for name, more in OPTIONS.items()},
    **{f"wfst {seed}": (wfst(seed), ()) for seed in (2, 3)},
}


def sessions(search: Any, columns: int, seed: int, more: tuple[Any, ...], device: str = "cpu") -> list[Any]:
    """All that a search returns for sessions that come and go: each begins at a chunk of its own."""
    drawn, scores = random.Random(seed), posteriors(seed, SESSIONS, FRAMES + CHUNK, columns).to(device)
    state, at = state_of(search, SESSIONS, device=device), [0] * SESSIONS
    told: list[Any] = [[] for _ in range(SESSIONS)]
    while moving := [row for row in range(SESSIONS) if at[row] < LENGTHS[row]]:
        moving = sorted(drawn.sample(moving, 3 if len(moving) > 2 and drawn.random() < 0.7 else 1))
        seen, counts = [at[row] for row in moving], [min(CHUNK, LENGTHS[row] - at[row]) for row in moving]
        hidden = torch.stack([scores[row, first : first + CHUNK] for row, first in zip(moving, seen, strict=True)])
        found = search.step(hidden, chunk_of(moving, seen, counts, device), state, *more)
        for row, count, result in zip(moving, counts, found, strict=True):
            told[row].append(result)
            at[row] += count
    return [[*results, search.finish(row, state, *more)] for row, results in enumerate(told)]


@pytest.mark.parametrize("case", CASES)
def test_what_is_replayed_is_the_search(case: str) -> None:
    make, more = CASES[case]
    device = RecordingDevice()
    search, columns = make(device)
    for seed in range(2):  # with other state tensors each time
        assert sessions(search, columns, seed, more) == sessions(*make(CPU), seed, more)
    if case == "ctc hotwords of long chains":
        assert not device.recordings
    else:
        assert len(device.recordings) == 2
        assert all(len(each.graphs) <= 2 for each in device.recordings)  # of 1 and of 4 rows


def test_hot_word_lists_of_similar_size_share_a_recording() -> None:
    device = RecordingDevice()
    search, columns = ctc(device)
    state, scores = state_of(search, 2), posteriors(1, 1, CHUNK, columns)
    for row, words in enumerate((WORDS, words_of("cab", "fed"))):
        expected = ctc(CPU)[0].step(scores, chunk_of([row], [0], [CHUNK]), state_of(search, 2), words)
        assert search.step(scores, chunk_of([row], [0], [CHUNK]), state, words) == expected
    [recording] = device.recordings
    assert len(recording.graphs) == 1


@pytest.mark.parametrize(("case", "most"), [("ctc plain", 99), ("ctc both", 169), ("wfst 2", 300)])
def test_a_frame_is_few_operations(case: str, most: int) -> None:
    """Each is a kernel of a captured graph, or two; docs/decisions/0031 counts on it."""
    (make, more), counts = CASES[case], []
    search, columns = make(CPU)
    sessions(search, columns, 1, more)  # hotwords are compiled once
    for width in (4, 5):
        state, scores = state_of(search, 2), posteriors(1, 2, width, columns)
        with RefuseSynchronisation() as mode:
            search.step(scores, chunk_of([0, 1], [0, 0], [width, width]), state, *more)
        counts.append(mode.operations)
    assert counts[1] - counts[0] <= most


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda x: (x + int(x.sum()),),
    "a branch": lambda x: (x + 1,) if x.sum() > 0 else (x,),
    "a list": lambda x: (x + x.tolist()[0],),
    "an array": lambda x: (x + float(x.numpy()[0]),),
    "an index of booleans": lambda x: (x[x > 0],),
    "places": lambda x: ((x > 0).nonzero(),),
    "a selection": lambda x: (x.masked_select(x > 0),),
    "repeats": lambda x: (x.repeat_interleave(x.long().abs()),),
    "different ones": lambda x: (x.unique(),),
    "an equality": lambda x: (x + torch.equal(x, x),),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_recording_refuses_what_a_graph_cannot_hold(how: str) -> None:
    """The device of these tests sees each of the ways to read a value back."""
    with pytest.raises((AssertionError, RuntimeError)):
        RecordingDevice().capture(REFUSED[how])(torch.tensor([1.0, -2.0, 3.0]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_a_cuda_graph_gives_what_the_cpu_does(case: str) -> None:
    make, more = CASES[case]
    device = devices.make_device("cuda", "fp32")
    moved = tuple(_on_device(each, device.torch_device) for each in more)
    search, columns = make(device)
    for seed in range(4):
        captured, expected = sessions(search, columns, seed, moved, "cuda"), sessions(*make(CPU), seed, more)
        for ours, theirs in zip(captured, expected, strict=True):
            assert [_places(each) for each in ours] == [_places(each) for each in theirs]
            assert _numbers(ours) == pytest.approx(_numbers(theirs), abs=1e-4)


def _on_device(option: Any, device: torch.device) -> Any:
    if not isinstance(option, LanguageModelFusion):
        return option
    assert isinstance(option.scorer, NgramScorer)
    return option._replace(scorer=NgramScorer(option.scorer.model, device))


def _places(found: Any) -> Any:
    """Tokens and frames of a step's result, or of an n-best list."""
    lists = [found.fixed_tokens, found.tail_tokens] if isinstance(found, SearchResult) else [h.tokens for h in found]
    return [[(token.id, token.frame) for token in tokens] for tokens in lists]


def _numbers(told: list[Any]) -> list[float]:
    """Log-probabilities of all tokens, and scores of the n-best list."""
    *results, guesses = told
    tokens = [token for each in results for token in (*each.fixed_tokens, *each.tail_tokens)]
    return [*(token.logprob for token in tokens), *(x for guess in guesses for x in (guess.logprob, guess.gain))]
