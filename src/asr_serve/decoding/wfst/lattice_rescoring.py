"""Rescoring of word lattices: other language models in place of the graph's, or beside it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asr_serve.kernels.lattice_reference import WordLattice
from asr_serve.models.ngram import NgramModel

MAX_CONTEXTS = 64
"""Contexts of the language models that a state of a lattice is reached in; the dearest ones are dropped."""
MAX_COST = 16.0
"""Cost of a word, or of an end, that a language model lacks, natural log."""


class LatticeTerm(NamedTuple):
    """Language model whose costs are added to a lattice's."""

    model: NgramModel
    factor: float
    """Factor of its costs; -1 with the graph's own model takes those out."""
    word: Callable[[int], int | None] = lambda word: word
    """The model's word for a word of the lattice; None where it has none."""


Contexts = tuple[int, ...]
"""State of each language model."""


class _Reached(NamedTuple):
    cost: float
    """Cost of the best path."""
    arcs: list[tuple[int, Contexts, int, float]]
    """Arcs that leave: target, contexts there, word and cost."""


def rescore_lattice(lattice: WordLattice, terms: Sequence[LatticeTerm], most: int) -> list[tuple[float, list[int]]]:
    """Composes a lattice with language models.

    Args:
        lattice: states in topological order, from the start of a sentence on.
        terms: each path costs its own cost and those of its words by each model, times the model's factor.
        most: word sequences that are returned at most.

    Returns: costs and words, the cheapest first. Exact unless a state is reached in more than MAX_CONTEXTS contexts.
    """
    leaving: list[list[tuple[int, int, float]]] = [[] for _ in lattice.finals]
    for source, target, word, cost, *_ in lattice.arcs:
        leaving[source].append((target, word, cost))
    start = tuple(term.model.start_state for term in terms)
    reached: list[dict[Contexts, _Reached]] = [{} for _ in lattice.finals]
    reached[0][start] = _Reached(0.0, [])
    for state, arcs in enumerate(leaving):
        kept = heapq.nsmallest(MAX_CONTEXTS, reached[state].items(), key=lambda item: item[1].cost)
        reached[state] = dict(kept)
        for contexts, before in kept:
            for target, word, cost in arcs:
                more, after = _step(terms, contexts, word)
                before.arcs.append((target, after, word, cost + more))
                there = reached[target].get(after)
                total = before.cost + cost + more
                if there is None or total < there.cost:
                    reached[target][after] = _Reached(total, [])
    rest: list[dict[Contexts, float]] = [{} for _ in lattice.finals]
    ends: list[dict[Contexts, float]] = [{} for _ in lattice.finals]
    for state in range(len(lattice.finals) - 1, -1, -1):
        for contexts, found in reached[state].items():
            ends[state][contexts] = lattice.finals[state][0] + _end(terms, contexts)
            onward = (cost + rest[target].get(after, math.inf) for target, after, _, cost in found.arcs)
            rest[state][contexts] = min(ends[state][contexts], min(onward, default=math.inf))
    out: list[tuple[float, list[int]]] = []
    queue: list[tuple[float, float, list[int], int, Contexts | None]] = [(rest[0][start], 0.0, [], 0, start)]
    while queue and len(out) < most:
        total, cost, words, state, place = heapq.heappop(queue)
        if place is None:
            out.append((total, words))
            continue
        if (end := cost + ends[state][place]) < math.inf:
            heapq.heappush(queue, (end, end, words, state, None))
        for target, after, word, more in reached[state][place].arcs:
            if (least := cost + more + rest[target].get(after, math.inf)) < math.inf:
                heapq.heappush(queue, (least, cost + more, [*words, word], target, after))
    return out


def _step(terms: Sequence[LatticeTerm], contexts: Contexts, word: int) -> tuple[float, Contexts]:
    cost, after = 0.0, []
    for term, context in zip(terms, contexts, strict=True):
        known = term.word(word)
        logprob, following = (-math.inf, 0) if known is None else term.model.step(context, known)
        cost += term.factor * min(-logprob, MAX_COST)
        after.append(following)
    return cost, tuple(after)


def _end(terms: Sequence[LatticeTerm], contexts: Contexts) -> float:
    return sum(
        term.factor * min(-float(term.model.final_logprobs[context]), MAX_COST)
        for term, context in zip(terms, contexts, strict=True)
    )
