"""Rescoring of word lattices, against all of their paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from random_graphs import COLUMNS, WORDS, all_paths, random_graph, random_ngram
from streaming_search import chunk_of
from torch import Tensor

from asr_serve.decoding.wfst.lattice_rescoring import MAX_COST, LatticeTerm, rescore_lattice
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.kernels.lattice_reference import WordLattice
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


def cost_of(model: NgramModel, words: list[int | None]) -> float:
    total, state = 0.0, model.start_state
    for word in words:
        logprob, state = (-math.inf, 0) if word is None else model.step(state, word)
        total += min(-logprob, MAX_COST)
    return total + min(-float(model.final_logprobs[state]), MAX_COST)


@pytest.mark.parametrize("seed", range(60))
def test_best_paths_are_those_of_all_paths_with_the_other_model(seed):
    rng = np.random.default_rng(seed)
    graph, other = random_graph(rng, lm=seed % 2 == 1), random_ngram(rng)
    scores = rng.normal(-2, 1.5, (2 + seed % 2, COLUMNS)).astype(np.float32)
    moved = {word: (word + 1) % WORDS if word else None for word in range(WORDS)}
    terms = [LatticeTerm(other, 0.7, moved.get)]
    if graph.language_model is not None:
        terms.append(LatticeTerm(graph.language_model, -0.5))
    expected: dict[tuple[int, ...], float] = {}
    for path in all_paths(graph, scores):
        words = tuple(word for word, _ in path.words)
        cost = path.cost + 0.7 * cost_of(other, [moved[word] for word in words])
        if graph.language_model is not None:
            cost -= 0.5 * cost_of(graph.language_model, list(words))
        expected[words] = min(expected.get(words, math.inf), cost)
    found = rescore_lattice(lattice_of(graph, scores), terms, 12)
    ranked = sorted(expected.values())
    base = found[0][0] - ranked[0]  # a lattice's costs are those above its best path
    np.testing.assert_allclose([cost - base for cost, _ in found], ranked[:12], atol=5e-3)
    assert len({tuple(words) for _, words in found}) == len(found) == min(12, len(ranked))
    for cost, words in found:
        assert math.isclose(expected[tuple(words)], cost - base, abs_tol=5e-3)


def test_the_graphs_own_model_taken_out_and_put_back_changes_nothing():
    rng = np.random.default_rng(3)
    graph = random_graph(rng, lm=True)
    assert graph.language_model is not None
    lattice = lattice_of(graph, rng.normal(-2, 1.5, (3, COLUMNS)).astype(np.float32))
    same = [LatticeTerm(graph.language_model, factor) for factor in (-1.0, 1.0)]
    plain, again = rescore_lattice(lattice, [], 50), rescore_lattice(lattice, same, 50)
    assert len(plain) > 3
    np.testing.assert_allclose([cost for cost, _ in again], [cost for cost, _ in plain], atol=1e-5)
    assert plain[0][0] == pytest.approx(0.0, abs=1e-4)
