"""Decoding graphs of tokens, a lexicon and a language model: every sentence and alignment is in them, at its cost."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
import torch
from random_graphs import all_paths
from streaming_search import chunk_of
from torch import Tensor

from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.wfst.graph_builder import GraphStep, build_decoding_graph, cheaper_backoffs
from asr_serve.decoding.wfst.lexicon import CtcTokens, DecodingLexicon
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.errors import OptionError
from asr_serve.models.checkpoints.openfst_files import make_transducer, read_transducer, write_transducer
from asr_serve.models.decoding_graph import DecodingGraph, GraphSearchOptions
from asr_serve.models.interfaces import NBestHypothesis
from asr_serve.models.ngram import NgramModel

pytest.importorskip("kaldifst", reason="kaldifst is not installed: pip install 'asr-serve[build]'")

EVERYTHING = GraphSearchOptions(1e6, 1e6, 1.0, 1 << 20, 0)
Sentence = tuple[int, ...]
A, B, SPACE = 1, 2, 3
"""Tokens beside the blank, which is 0."""


def tokens_of(count: int, separator: int | None = None) -> CtcTokens:
    return CtcTokens("tiny", ("<blank>", "a", "b", "c", "d")[:count], 0, separator)


def lexicon_of(*spellings: tuple[int, Sentence]) -> DecodingLexicon:
    return DecodingLexicon(tuple(f"w{n}" for n in range(1 + max(word for word, _ in spellings))), spellings)


HARD = lexicon_of((0, (A,)), (1, (A, A)), (2, (A, B)), (3, (B,)), (4, (A, B)), (3, (B, A)))
"""Words that are prefixes of others, a repeated token, homophones, and a word with two spellings."""


def random_lexicon(rng: np.random.Generator, words: int = 4) -> DecodingLexicon:
    found: dict[tuple[int, Sentence], None] = {}
    for word in range(words):
        for _ in range(rng.integers(1, 3)):
            found[word, tuple(rng.integers(1, 3, rng.integers(1, 4)).tolist())] = None
    order = list(found)
    return DecodingLexicon(tuple(f"w{n}" for n in range(words)), tuple(order[i] for i in rng.permutation(len(order))))


def random_ngram(rng: np.random.Generator, words: int) -> NgramModel:
    """Bigram model whose back-offs may be more probable than its n-grams."""
    offsets, arcs, states = [0, words], list(range(words)), list(range(1, words + 1))
    for _ in range(words):
        seen = np.flatnonzero(rng.random(words) < 0.5).tolist()
        arcs += seen
        states += [word + 1 for word in seen]
        offsets.append(len(arcs))
    return NgramModel(
        np.array(offsets, np.int64),
        np.array(arcs, np.int32),
        -rng.uniform(0.1, 3, len(arcs)).astype(np.float32),
        np.array(states, np.int32),
        np.array([-1] + [0] * words, np.int32),
        np.array([0.0, *(-rng.uniform(0, 2, words))], np.float32),
        -rng.uniform(0.1, 3, words + 1).astype(np.float32),
        int(rng.integers(words + 1)),
    )


def sentence_cost(model: NgramModel, sentence: Sentence, *, exact: bool) -> float:
    """Cost of a sentence; unless `exact`, any word may take its back-off."""

    @cache
    def least(state: int, at: int) -> float:
        if at == len(sentence):
            return -float(model.final_logprobs[state])
        if exact:
            logprob, after = model.step(state, sentence[at])
            return -logprob + least(after, at + 1)
        first, end = model.arc_offsets[state : state + 2]
        costs = [
            -float(model.arc_logprobs[arc]) + least(int(model.arc_states[arc]), at + 1)
            for arc in range(first, end)
            if model.arc_words[arc] == sentence[at]
        ]
        if state:
            costs.append(-float(model.backoff_logprobs[state]) + least(int(model.backoff_states[state]), at))
        return min(costs, default=math.inf)

    return least(model.start_state, 0)


def readings(tokens: Sentence, lexicon: DecodingLexicon, separator: int | None) -> list[Sentence]:
    """Sentences that a sequence of tokens spells, one for each way to do so."""
    if separator is not None:
        parts = [tuple(part) for is_space, part in itertools.groupby(tokens, separator.__eq__) if not is_space]
        own = [[word for word, spelling in lexicon.spellings if spelling == part] for part in parts]
        return list(itertools.product(*own))
    if not tokens:
        return [()]
    return [
        (word, *rest)
        for word, spelling in lexicon.spellings
        if tokens[: len(spelling)] == spelling
        for rest in readings(tokens[len(spelling) :], lexicon, separator)
    ]


def enumerate_alignments(
    scores: np.ndarray, lexicon: DecodingLexicon, separator: int | None = None
) -> dict[Sentence, list[float]]:
    """Acoustic costs of all alignments of all sentences."""
    found: dict[Sentence, list[float]] = defaultdict(list)
    frames, columns = scores.shape
    for alignment in itertools.product(range(columns), repeat=frames):
        collapsed = tuple(token for token, _ in itertools.groupby(alignment) if token)
        cost = -float(scores[np.arange(frames), alignment].sum())
        for sentence in readings(collapsed, lexicon, separator):
            found[sentence].append(cost)
    return found


class ScoreModel:
    heads = ("ctc",)

    def __init__(self, columns: int) -> None:
        self.vocab_size = columns

    def graph_scores(self, hidden: Tensor) -> Tensor:
        return hidden


def search(graph: DecodingGraph, scores: np.ndarray, hypotheses: int = 1) -> list[NBestHypothesis]:
    found = WfstSearch(ScoreModel(scores.shape[1]), prepare_graph(graph), EVERYTHING, hypotheses)
    fixed = found.step(torch.from_numpy(scores)[None], chunk_of([0], [0], [len(scores)]), {})[0].fixed_tokens
    assert not fixed
    return found.finish(0, {})


def random_scores(rng: np.random.Generator, frames: int, columns: int) -> np.ndarray:
    return np.log(rng.dirichlet(np.full(columns, 0.7), frames) + 1e-4).astype(np.float32)


@pytest.mark.parametrize("on_the_fly", [False, True], ids=["composed", "on the fly"])
@pytest.mark.parametrize("separator", [None, SPACE], ids=["", "space"])
@pytest.mark.parametrize("seed", range(12))
def test_every_sentence_has_its_cost_and_the_best_path_is_found(
    seed: int, separator: int | None, on_the_fly: bool
) -> None:
    rng = np.random.default_rng(seed)
    lexicon = HARD if seed == 0 else random_lexicon(rng)
    model = random_ngram(rng, len(lexicon.words))
    columns = 3 if separator is None else 4
    graph = build_decoding_graph(tokens_of(columns, separator), lexicon, model, on_the_fly=on_the_fly)
    scores = random_scores(rng, 5, columns)
    alignments = enumerate_alignments(scores, lexicon, separator)
    expected = {
        sentence: min(costs) + sentence_cost(model, sentence, exact=on_the_fly)
        for sentence, costs in alignments.items()
    }
    assert len(expected) > 5
    found: dict[Sentence, list[float]] = defaultdict(list)
    for path in all_paths(graph, scores):
        found[tuple(word for word, _ in path.words)].append(path.cost)
    assert found.keys() == expected.keys()
    for sentence, cost in expected.items():
        assert min(found[sentence]) == pytest.approx(cost, abs=2e-3), sentence
        # Each alignment is one path; back-offs of words that were seen add others.
        if on_the_fly:
            assert len(found[sentence]) == len(alignments[sentence])
        else:
            assert len(found[sentence]) >= len(alignments[sentence])
    ranked = sorted(expected, key=expected.__getitem__)
    (best,) = search(graph, scores)
    assert tuple(token.id for token in best.tokens) == ranked[0]
    assert -best.logprob == pytest.approx(expected[ranked[0]], abs=2e-3)
    listed = {tuple(t.id for t in each.tokens): -each.logprob for each in search(graph, scores, 8)}
    assert [expected[sentence] for sentence in listed] == pytest.approx(
        [expected[sentence] for sentence in ranked[: len(listed)]], abs=4e-3
    )
    assert len(listed) == min(8, len(expected))


def test_costs_are_those_of_a_trained_model() -> None:
    text = [["w0", "w3"], ["w2", "w1", "w3"], ["w3", "w0", "w3"], ["w4", "w2"]]
    ngrams = train(text, 3).to_model()
    model = ngrams.for_words(HARD.words)
    assert cheaper_backoffs(model) == 0
    graph = build_decoding_graph(tokens_of(3), HARD, model)
    scores = np.zeros((5, 3), np.float32)
    found: dict[Sentence, float] = defaultdict(lambda: math.inf)
    for path in all_paths(graph, scores):
        sentence = tuple(word for word, _ in path.words)
        found[sentence] = min(found[sentence], path.cost)
    assert found.keys() == enumerate_alignments(scores, HARD).keys()
    for sentence, cost in found.items():
        state, logprob = ngrams.model.start_state, 0.0
        for word in sentence:
            step, state = ngrams.model.step(state, ngrams.words.index(f"w{word}"))
            logprob += step
        assert cost == pytest.approx(-logprob - ngrams.model.final_logprobs[state], abs=1e-3)


def test_a_repeated_token_wants_a_blank_between() -> None:
    lexicon = lexicon_of((0, (A,)), (1, (A, A)))
    graph = build_decoding_graph(tokens_of(2), lexicon, random_ngram(np.random.default_rng(0), 2))

    def sentences(*frames: int) -> set[Sentence]:
        scores = np.full((len(frames), 2), -1000.0, np.float32)
        scores[np.arange(len(frames)), frames] = 0.0
        return {tuple(word for word, _ in path.words) for path in all_paths(graph, scores) if path.cost < 900}

    assert sentences(A, A, A) == {(0,)}
    assert sentences(A, 0, A) == {(1,), (0, 0)}
    assert sentences(0, A, 0, A, A, 0) == {(1,), (0, 0)}
    assert sentences(0, 0) == {()}


def test_words_have_the_frames_of_their_tokens() -> None:
    lexicon = lexicon_of((0, (A, B)), (1, (B, A, B)), (2, (B,)))
    graph = build_decoding_graph(tokens_of(3), lexicon, random_ngram(np.random.default_rng(1), 3))
    frames = [0, 0, A, A, 0, B, 0, 0, B, B, 0, A, B, B, 0]
    scores = np.full((len(frames), 3), -30.0, np.float32)
    scores[np.arange(len(frames)), frames] = 0.0
    (best,) = search(graph, scores)
    assert [(token.id, token.frame, token.end_frame) for token in best.tokens] == [(0, 2, 6), (1, 8, 14)]
    assert all(-1.0 < token.logprob <= 0.0 for token in best.tokens)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_a_lexicon_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, scores = random_ngram(rng, len(HARD.words)), random_scores(rng, 5, 3)
    first, second = (
        search(build_decoding_graph(tokens_of(3), HARD._replace(spellings=spellings), model), scores, 64)
        for spellings in (HARD.spellings, HARD.spellings[::-1])
    )
    costs = [{tuple(t.id for t in each.tokens): each.logprob for each in found} for found in (first, second)]
    assert costs[0].keys() == costs[1].keys()
    assert list(costs[0].values()) == pytest.approx([costs[1][sentence] for sentence in costs[0]], abs=2e-3)


def test_homophones_differ_by_the_language_model_alone() -> None:
    lexicon = lexicon_of((0, (A,)), (1, (A,)), (2, (A,)))
    model = train([["w0", "w1"], ["w0", "w1"], ["w0", "w1"], ["w2"]], 2).to_model().for_words(lexicon.words)
    graph = build_decoding_graph(tokens_of(3), lexicon, model)
    scores = np.full((3, 3), -20.0, np.float32)
    scores[[0, 1, 2], [A, 0, A]] = 0.0
    assert {tuple(t.id for t in each.tokens) for each in search(graph, scores, 64)} >= set(
        itertools.product(range(3), repeat=2)
    )
    assert [token.id for token in search(graph, scores)[0].tokens] == [0, 1]


def test_ngrams_less_probable_than_their_back_off_are_counted() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        model = random_ngram(rng, 4)
        expected = sum(
            float(model.arc_logprobs[arc]) + 2**-14
            < float(model.backoff_logprobs[state] + model.arc_logprobs[model.arc_words[arc]])
            for state in range(1, 5)
            for arc in range(model.arc_offsets[state], model.arc_offsets[state + 1])
        )
        assert cheaper_backoffs(model) == expected


def test_a_language_model_without_a_sentence_is_refused() -> None:
    model = random_ngram(np.random.default_rng(0), 2)
    lexicon = lexicon_of((0, (A,)), (1, (B,)))
    endless = model._replace(final_logprobs=np.full(3, -np.inf, np.float32))
    for on_the_fly in (False, True):
        with pytest.raises(OptionError, match="no sentence"):
            build_decoding_graph(tokens_of(3), lexicon, endless, on_the_fly=on_the_fly)


def test_steps_are_reported() -> None:
    steps: list[GraphStep] = []
    model = random_ngram(np.random.default_rng(0), len(HARD.words))
    graph = build_decoding_graph(tokens_of(3), HARD, model, report=steps.append)
    assert [step.name for step in steps] == ["L", "G", "L o G", "det", "min", "T o"]
    assert steps[-1][1:3] == (graph.states, len(graph.arc_costs))
    assert all(step.states and step.arcs for step in steps)


def test_transducers_are_read_as_they_were_written(tmp_path) -> None:
    rng = np.random.default_rng(5)
    finals = np.where(rng.random(7) < 0.5, rng.random(7), np.inf).astype(np.float32)
    columns = rng.integers(0, 7, (4, 20))
    made = make_transducer(3, finals, *columns[:3], rng.random(20), columns[3])
    write_transducer(made, tmp_path / "made.fst")
    found = read_transducer(tmp_path / "made.fst")
    assert found.start_state == 3
    for ours, theirs in zip(made[1:4], found[1:4], strict=True):
        np.testing.assert_array_equal(ours, theirs)
