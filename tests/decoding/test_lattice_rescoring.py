"""Rescoring of word lattices, against all of their paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from random_graphs import COLUMNS, WORDS, all_paths, random_graph, random_ngram
from streaming_search import chunk_of
from torch import Tensor

from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.wfst import lattice_rescoring
from asr_serve.decoding.wfst import search as search_module
from asr_serve.decoding.wfst.lattice_rescoring import MAX_COST, LatticeTerm, best_paths, rescore_lattice
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.kernels.lattice_reference import LatticeArc, WordLattice
from asr_serve.models.decoding_graph import DecodingGraph, GraphSearchOptions
from asr_serve.models.ngram import NgramModel

WIDE = GraphSearchOptions(beam=1000.0, lattice_beam=1000.0, max_active=1 << 20, min_active=0)


class ScoreModel:
    """As much of a model as the search needs: its hidden frames are the scores."""

    heads = ("wfst",)
    vocab_size = COLUMNS

    def graph_scores(self, hidden: Tensor) -> Tensor:
        return hidden


def lattice_of(graph: DecodingGraph, scores: np.ndarray) -> WordLattice:
    search = WfstSearch(ScoreModel(), prepare_graph(graph), WIDE, hypotheses=2)  # type: ignore[arg-type]
    assert search.lattice(0).arcs == []
    search.step(torch.from_numpy(scores[None].copy()), chunk_of([0], [0], [len(scores)]), {})
    return search.lattice(0)


def cost_of(model: NgramModel, words: list[int]) -> float:
    total, state = 0.0, model.start_state
    for word in words:
        logprob, state = model.step(state, word)
        total += min(-logprob, MAX_COST)
    return total + min(-float(model.final_logprobs[state]), MAX_COST)


@pytest.mark.parametrize("seed", range(60))
def test_best_paths_are_those_of_all_paths_with_the_other_model(seed):
    rng = np.random.default_rng(seed)
    graph, other = random_graph(rng, lm=seed % 2 == 1), random_ngram(rng)
    scores = rng.normal(-2, 1.5, (2 + seed % 2, COLUMNS)).astype(np.float32)
    terms = [LatticeTerm(other, 0.7)]
    if graph.language_model is not None:
        terms.append(LatticeTerm(graph.language_model, -0.5))
    expected: dict[tuple[int, ...], float] = {}
    for path in all_paths(graph, scores):
        words = tuple(word for word, _ in path.words)
        cost = path.cost + 0.7 * cost_of(other, list(words))
        if graph.language_model is not None:
            cost -= 0.5 * cost_of(graph.language_model, list(words))
        expected[words] = min(expected.get(words, math.inf), cost)
    rescored = rescore_lattice(lattice_of(graph, scores), terms)
    assert all(arc.source < arc.target for arc in rescored.arcs)
    assert len({(arc.source, arc.word) for arc in rescored.arcs}) == len(rescored.arcs)
    assert rescored.finals[-1][0] < math.inf
    found = best_paths(rescored, 12)
    ranked = sorted(expected.values())
    base = found[0].cost - ranked[0]  # a lattice's costs are those above its best path
    np.testing.assert_allclose([path.cost - base for path in found], ranked[:12], atol=5e-3)
    assert len({tuple(path.words) for path in found}) == len(found) == min(12, len(ranked))
    for path in found:
        assert math.isclose(expected[tuple(path.words)], path.cost - base, abs_tol=5e-3)


def test_the_graphs_own_model_taken_out_and_put_back_changes_nothing():
    rng = np.random.default_rng(3)
    graph = random_graph(rng, lm=True)
    assert graph.language_model is not None
    lattice = lattice_of(graph, rng.normal(-2, 1.5, (3, COLUMNS)).astype(np.float32))
    same = [LatticeTerm(graph.language_model, factor) for factor in (-1.0, 1.0)]
    plain, again = best_paths(lattice, 50), best_paths(rescore_lattice(lattice, same), 50)
    assert len(plain) > 3
    np.testing.assert_allclose([path.cost for path in again], [path.cost for path in plain], atol=1e-5)
    assert plain[0].cost == pytest.approx(0.0, abs=1e-4)
    spans = [[(arc.word, arc.start, arc.end) for arc in path.arcs] for path in plain]
    assert [[(arc.word, arc.start, arc.end) for arc in path.arcs] for path in again] == spans


def test_a_rescored_lattice_that_is_too_large_has_fewer_contexts(monkeypatch):
    """Each word may follow each: as many contexts of a state as words."""
    rng = np.random.default_rng(3)
    other, places, words = random_ngram(rng), 8, WORDS
    arcs = [
        LatticeArc(place, place + 1, word, float(rng.exponential(2.0)), 0.0, place, place + 1)
        for place in range(places)
        for word in range(words)
    ]
    lattice = WordLattice(arcs, [*[(math.inf, 0.0)] * places, (0.0, 0.0)])
    costs = {(arc.source, arc.word): arc.cost for arc in arcs}
    whole = rescore_lattice(lattice, [LatticeTerm(other, 0.7)])
    monkeypatch.setattr(lattice_rescoring, "MAX_ARCS", len(whole.arcs) // 2)
    bounded = rescore_lattice(lattice, [LatticeTerm(other, 0.7)])
    assert words < len(bounded.arcs) <= len(whole.arcs) // 2
    (best,), found = best_paths(whole, 1), best_paths(bounded, 20)
    assert len(found) == 20
    assert best.cost <= found[0].cost + 1e-6
    for path in found:
        cost = sum(costs[place, word] for place, word in enumerate(path.words)) + 0.7 * cost_of(other, path.words)
        assert path.cost == pytest.approx(cost, abs=1e-4)


# --- in the search ----------------------------------------------------------------------------------------


def searched(
    graph: DecodingGraph, other: NgramModel, weight: float, options: GraphSearchOptions = WIDE, hypotheses: int = 12
) -> WfstSearch:
    """Search of which the session in row 1 has the language model."""
    search = WfstSearch(ScoreModel(), prepare_graph(graph), options, hypotheses)  # type: ignore[arg-type]
    search.set_language_model(1, LanguageModelFusion(NgramScorer(other), weight))
    return search


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("hypotheses", [1, 12])
def test_a_session_is_rescored_by_its_language_model_as_all_paths_are(seed, hypotheses):
    rng = np.random.default_rng(seed)
    graph, other = random_graph(rng, lm=seed % 2 == 1), random_ngram(rng)
    scores = rng.normal(-2, 1.5, (3, COLUMNS)).astype(np.float32)
    plain: dict[tuple[int, ...], float] = {}
    for path in all_paths(graph, scores):
        words = tuple(word for word, _ in path.words)
        plain[words] = min(plain.get(words, math.inf), path.cost)
    expected = {words: cost + 0.7 * cost_of(other, list(words)) for words, cost in plain.items()}
    search = searched(graph, other, 0.7, hypotheses=hypotheses)
    for start, piece in enumerate(torch.from_numpy(scores)):
        hidden = piece[None, None].repeat(2, 1, 1)
        search.step(hidden, chunk_of([0, 1], [start, start], [1, 1]), {})
    for row, costs in ((0, plain), (1, expected)):
        found = search.finish(row, {})
        ranked = sorted(costs.values())[:hypotheses]
        np.testing.assert_allclose([-each.logprob for each in found], ranked, atol=5e-3)
        for each in found:
            words = tuple(token.id for token in each.tokens)
            assert math.isclose(costs[words], -each.logprob, abs_tol=5e-3)
            assert all(token.logprob <= 0 and token.frame < token.end_frame <= len(scores) for token in each.tokens)
    search.free(1)
    search.step(torch.from_numpy(scores[None].copy()), chunk_of([1], [0], [len(scores)]), {})
    assert -search.finish(1, {})[0].logprob == pytest.approx(min(plain.values()), abs=5e-3)


@pytest.mark.parametrize("seed", range(8))
def test_weight_zero_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    graph, other = random_graph(rng, lm=True), random_ngram(rng)
    scores = torch.from_numpy(rng.normal(-2, 1.5, (4, COLUMNS)).astype(np.float32))
    for risk in (False, True):
        search = searched(graph, other, 0.0, WIDE._replace(minimum_risk=risk))
        search.step(scores[None].repeat(2, 1, 1), chunk_of([0, 1], [0, 0], [4, 4]), {})
        plain, rescored = search.finish(0, {}), search.finish(1, {})
        for before, after in zip(plain, rescored, strict=True):
            assert [token.id for token in before.tokens] == [token.id for token in after.tokens]
            assert after.logprob == pytest.approx(before.logprob, abs=1e-4)
            for one, other_token in zip(before.tokens, after.tokens, strict=True):
                assert other_token.logprob == pytest.approx(one.logprob, abs=1e-4)


def test_words_that_were_fixed_are_the_context_of_the_rest(monkeypatch):
    monkeypatch.setattr(search_module, "MAX_HISTORY_FRAMES", 4)
    continued = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        graph, other = random_graph(rng, lm=True), random_ngram(rng)
        scores = torch.from_numpy(rng.normal(-2, 3, (90, COLUMNS)).astype(np.float32))
        whole, moved = searched(graph, other, 0.7), searched(graph, other, 0.7)
        fixed: list[int] = []
        for start in range(0, 90, 10):
            chunk = scores[None, start : start + 10]
            (result,) = whole.step(chunk, chunk_of([1], [start], [10]), {})
            fixed += [token.id for token in result.fixed_tokens]
            if start == 50:
                numbers, tensor = moved.export_state(1)
                moved = searched(graph, other, 0.7)
                with pytest.raises(ValueError, match="language model"):
                    moved.import_state(1, numbers, b"", start, torch.device("cpu"))
                moved.import_state(1, numbers, tensor.numpy().tobytes(), start, torch.device("cpu"))
            moved.step(chunk, chunk_of([1], [start], [10]), {})
        context = other.start_state
        for word in fixed:
            _, context = other.step(context, word)
        continued += context != other.start_state
        rescored = rescore_lattice(whole.lattice(1), [LatticeTerm(other, 0.7)], (context,))
        best = [path.words for path in best_paths(rescored, 12)]
        assert [[token.id for token in each.tokens] for each in whole.finish(1, {})] == best
        assert [[token.id for token in each.tokens] for each in moved.finish(1, {})] == best
    assert continued >= 3
