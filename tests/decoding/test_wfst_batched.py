"""Batched search of decoding graphs: against all paths of small random graphs, chunk by chunk, many at once."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from case_tiers import exhaustive_after
from streaming_search import chunk_of, posteriors, run_search, state_of
from test_language_model import corpus
from torch import Tensor

from asr_serve import devices
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.wfst.batched_search import BatchedWfstSearch, epsilon_rounds, words_of_frame
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.decoding_graph import DecodingGraph, GraphSearchOptions
from asr_serve.models.ngram import NgramModel

CPU = devices.make_device("cpu", "fp32")
COLUMNS, WORDS = 4, "abc"
EXACT = GraphSearchOptions(beam=math.inf, max_active=200)


class ScoreModel:
    """As much of a model as the search needs: its hidden frames are the scores."""

    heads = ("wfst",)

    def graph_scores(self, hidden: Tensor) -> Tensor:
        return hidden


class Arc(NamedTuple):
    source: int
    label: int
    word: int
    cost: float
    target: int


def graph_of(states: int, arcs: list[Arc], finals: dict[int, float], language: NgramModel | None) -> DecodingGraph:
    arcs = sorted(arcs, key=lambda arc: (arc.source, arc.label < 0))
    counts = [sum(arc.source == s for arc in arcs) for s in range(states)]
    emitting = [sum(arc.source == s and arc.label >= 0 for arc in arcs) for s in range(states)]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    graph = DecodingGraph(
        offsets,
        (offsets[:-1] + emitting).astype(np.int32),
        np.array([arc.label for arc in arcs], np.int32),
        np.array([arc.word for arc in arcs], np.int32),
        np.array([arc.cost for arc in arcs], np.float32),
        np.array([arc.target for arc in arcs], np.int32),
        np.array([finals.get(s, math.inf) for s in range(states)], np.float32),
        np.arange(COLUMNS, dtype=np.int32)[::-1].copy(),
        np.full(COLUMNS, -1, np.int32),
        np.zeros(0, np.int8),
        0,
        language,
    )
    graph.validate()
    return graph


def random_graph(seed: int) -> DecodingGraph:
    """Every state can go on; arcs without a frame lead to later states."""
    drawn = random.Random(seed)
    states = drawn.randint(2, 5)
    arcs = []
    for source in range(states):
        for _ in range(drawn.randint(1, 3)):
            word = drawn.choice([-1, -1, *range(len(WORDS))])
            arcs.append(Arc(source, drawn.randrange(COLUMNS), word, drawn.random() * 2, drawn.randrange(states)))
        if source + 1 < states and drawn.random() < 0.5:
            word = drawn.choice([-1, -1, *range(len(WORDS))])
            arcs.append(Arc(source, -1, word, drawn.random(), drawn.randrange(source + 1, states)))
    finals = {s: drawn.random() for s in range(states) if drawn.random() < 0.7}
    language = None
    if drawn.random() < 0.6:
        ngrams = train(corpus(seed, 20, WORDS), 3).to_model()
        language = ngrams.reindexed({word: index for index, word in enumerate(WORDS)})
    return graph_of(states, arcs, finals, language)


def all_paths(graph: DecodingGraph, scores: Tensor) -> dict[tuple[int, ...], float]:
    """Least cost of every word sequence, by following every path."""
    found: dict[tuple[int, ...], float] = {}
    incomplete: dict[tuple[int, ...], float] = {}
    lm = graph.language_model

    def follow(state: int, frame: int, words: tuple[int, ...], language: int, cost: float) -> None:
        if frame == len(scores):
            final = cost + float(graph.final_costs[state]) - (0.0 if lm is None else float(lm.final_logprobs[language]))
            found[words] = min(found.get(words, math.inf), final)
            incomplete[words] = min(incomplete.get(words, math.inf), cost)
        for arc in range(graph.arc_offsets[state], graph.arc_offsets[state + 1]):
            label, word = int(graph.arc_labels[arc]), int(graph.arc_words[arc])
            if label >= 0 and frame == len(scores):
                continue
            more, then = cost + float(graph.arc_costs[arc]), language
            if label >= 0:
                more -= float(scores[frame, graph.label_columns[label]])
            if word >= 0 and lm is not None:
                logprob, then = lm.step(language, word)
                more -= logprob
            spoken = (*words, word) if word >= 0 else words
            follow(int(graph.arc_states[arc]), frame + (label >= 0), spoken, then, more)

    follow(graph.start_state, 0, (), lm.start_state if lm is not None else 0, 0.0)
    found = {words: cost for words, cost in found.items() if math.isfinite(cost)}
    return found or {words: cost for words, cost in incomplete.items() if math.isfinite(cost)}


def search_of(graph: DecodingGraph, options: GraphSearchOptions = EXACT, **more: int) -> BatchedWfstSearch:
    model: Any = ScoreModel()
    return BatchedWfstSearch(model, graph, CPU, options, **{"arcs_per_token": 8, **more})


@pytest.mark.parametrize("first", exhaustive_after(6, range(0, 500, 25)))
def test_the_best_path_is_that_of_all(first: int) -> None:
    for seed in range(first, first + 25):
        graph, frames = random_graph(seed), seed % 5 + 1
        scores = posteriors(seed, frames, COLUMNS)
        fixed, _, guesses = run_search(search_of(graph), scores, [1] * frames if seed % 2 else [frames])
        costs = all_paths(graph, scores)
        best = min(costs.values())
        assert -guesses[0].logprob == pytest.approx(best, abs=1e-4), seed
        for guess in guesses:
            words = tuple(token.id for token in (*fixed, *guess.tokens))
            assert -guess.logprob >= costs[words] - 1e-4, seed
        words = tuple(token.id for token in (*fixed, *guesses[0].tokens))
        assert costs[words] == pytest.approx(best, abs=1e-4), seed
        logprobs = sum(token.logprob for token in guesses[0].tokens)
        assert math.isfinite(logprobs)


def test_company_and_chunks_change_nothing() -> None:
    for seed in range(12):
        graph, lengths = random_graph(seed), [7, 3, 12, 1]
        search = search_of(graph, GraphSearchOptions(beam=6.0, max_active=6), arcs_per_token=3)
        scores = posteriors(seed, len(lengths), max(lengths), COLUMNS)
        alone = [run_search(search, scores[row, :length]) for row, length in enumerate(lengths)]
        state, fixed, tails = state_of(search, len(lengths)), [[] for _ in lengths], [[] for _ in lengths]
        for at in range(0, max(lengths), 2):
            counts = [min(max(length - at, 0), 2) for length in lengths]
            moving = [row for row, count in enumerate(counts) if count]
            numbers = [[*moving, len(lengths)], [at] * (len(moving) + 1), [*(counts[row] for row in moving), 0]]
            hidden = torch.cat([scores[moving, at : at + 2], torch.full((1, 2, COLUMNS), math.nan)])
            for row, result in zip(moving, search.step(hidden, chunk_of(*numbers), state), strict=False):
                fixed[row] += result.fixed_tokens
                tails[row] = result.tail_tokens
        for row, (fixed_alone, tail_alone, guesses_alone) in enumerate(alone):
            guesses = search.finish(row, state)
            assert [t.id for t in fixed[row] + tails[row]] == [t.id for t in fixed_alone + tail_alone]
            assert [t.frame for t in fixed[row] + tails[row]] == [t.frame for t in fixed_alone + tail_alone]
            ends = [
                [[t.id for t in (*before, *guess.tokens)] for guess in some]
                for before, some in ((fixed[row], guesses), (fixed_alone, guesses_alone))
            ]
            assert ends[0] == ends[1]
            assert [g.logprob for g in guesses] == pytest.approx([g.logprob for g in guesses_alone], abs=1e-4)


def test_a_long_session_keeps_a_bounded_tail() -> None:
    """Two words sound alike for ever, and nothing but the limit would fix one."""
    arcs = [Arc(0, 0, word, 0.001 * word, word) for word in (0, 1)] + [Arc(1, 0, 0, 0.0, 1), Arc(1, 0, 1, 0.001, 1)]
    search = search_of(graph_of(2, arcs, {0: 0.0, 1: 0.0}, None), max_tail_words=8)
    state, words = state_of(search, 1), []
    for at in range(0, 60, 2):
        [found] = search.step(torch.zeros(1, 2, COLUMNS), chunk_of([0], [at], [2]), state)
        words += found.fixed_tokens
        assert len(found.tail_tokens) <= 4
    assert [token.frame for token in words + found.tail_tokens] == list(range(60))
    assert [token.id for token in words + found.tail_tokens] == [0] * 60


@pytest.mark.parametrize("tail", [8, 64])
@pytest.mark.parametrize("epsilon", [False, True])
def test_a_word_in_each_frame_is_never_lost(tail: int, epsilon: bool) -> None:
    """Chunks of many frames output more words than a tail holds."""
    if epsilon:  # three words in a frame
        arcs = [Arc(0, 0, 0, 0.0, 1), Arc(1, -1, 1, 0.0, 2), Arc(2, -1, 2, 0.0, 0), Arc(0, 1, -1, 0.5, 0)]
        graph = graph_of(3, arcs, {0: 0.0}, None)
    else:
        arcs = [Arc(0, column, column % len(WORDS), 0.1 * column, 0) for column in range(COLUMNS)]
        graph = graph_of(1, arcs, {0: 0.0}, None)
    assert words_of_frame(graph, epsilon_rounds(graph)) == (3 if epsilon else 1)
    scores, options = posteriors(2, 96, COLUMNS), GraphSearchOptions(beam=4.0, max_active=50)
    model: Any = ScoreModel()
    native = WfstSearch(model, prepare_graph(graph), options)
    results = [
        run_search(search, scores, [32] * 3) for search in (search_of(graph, options, max_tail_words=tail), native)
    ]
    ours, theirs = ([token.id for token in (*fixed, *guesses[0].tokens)] for fixed, _, guesses in results)
    assert ours == theirs
    assert len(ours) > 64


def test_a_saved_row_resumes() -> None:
    graph = random_graph(3)
    search, scores = search_of(graph, GraphSearchOptions(max_active=20)), posteriors(3, 10, COLUMNS)
    first, second = state_of(search, 1), state_of(search, 2, poison=-5)
    search.step(scores[None, :4], chunk_of([0], [0], [4]), first)
    for name, tensor in first.items():
        second[name][1] = tensor[0]
    rest = [search.step(scores[None, 4:], chunk_of([row], [4], [6]), s) for row, s in ((0, first), (1, second))]
    assert rest[0] == rest[1]
    assert search.finish(0, first) == search.finish(1, second)


@pytest.mark.parametrize(
    "name", ["wfst_states", "wfst_language_states", "wfst_token_nodes", "wfst_parents", "wfst_words"]
)
@pytest.mark.parametrize("value", [10_000_000, -2])
def test_a_corrupt_row_is_refused(name: str, value: int) -> None:
    """Before a step has it among the rows of others."""
    search, scores = search_of(random_graph(3), GraphSearchOptions(max_active=20)), posteriors(3, 2, 4, COLUMNS)
    state = state_of(search, 2)
    search.validate_row(0, state)
    search.step(scores, chunk_of([0, 1], [0, 0], [4, 4]), state)
    for row in (0, 1):
        search.validate_row(row, state)
    state[name][0, 1] = value
    with pytest.raises(ValueError, match="corrupt"):
        search.validate_row(0, state)
    search.validate_row(1, state)


def test_circles_without_a_frame_end() -> None:
    arcs = [Arc(0, -1, -1, 0.5, 1), Arc(1, -1, 0, 0.5, 0), Arc(1, 0, 1, 0.0, 1)]
    graph = graph_of(2, arcs, {1: 0.0}, None)
    assert epsilon_rounds(graph) == 8
    fixed, _, guesses = run_search(search_of(graph), torch.zeros(2, COLUMNS))
    assert [token.id for token in (*fixed, *guesses[0].tokens)] == [1, 1]
    assert guesses[0].logprob == pytest.approx(-0.5)


def test_impossible_frames_are_skipped() -> None:
    graph = random_graph(1)
    scores = posteriors(1, 6, COLUMNS)
    broken = torch.cat([scores[:3], torch.full((2, COLUMNS), -math.inf), scores[3:]])
    ours, clean = run_search(search_of(graph), broken), run_search(search_of(graph), scores)
    assert [t.id for t in ours[0] + ours[2][0].tokens] == [t.id for t in clean[0] + clean[2][0].tokens]
    assert ours[2][0].logprob == pytest.approx(clean[2][0].logprob)


def test_an_option_that_needs_a_lattice_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match=r"minimum_risk=True.*keeps no lattice.*WfstSearch"):
        search_of(random_graph(0), EXACT._replace(minimum_risk=True))


@pytest.mark.parametrize(
    ("option", "value"),
    [("beam", 0.0), ("beam", math.nan), ("max_active", 0), ("max_active", 1 << 21), ("acoustic_scale", 0.0)],
)
def test_options_out_of_range_are_named(option: str, value: float) -> None:
    with pytest.raises(OptionError, match=option):
        search_of(random_graph(0), GraphSearchOptions(**{option: value}))
