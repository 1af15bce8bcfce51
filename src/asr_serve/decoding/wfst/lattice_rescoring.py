"""Rescoring of word lattices: other language models in place of the graph's, or beside it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from asr_serve.kernels.lattice_reference import LatticeArc, WordLattice
from asr_serve.models.ngram import NgramModel

MAX_CONTEXTS = 64
"""Contexts of the language models that a state of a lattice is reached in; the dearest ones are dropped."""
MAX_ARCS = 1 << 14
"""Arcs of a rescored lattice, four times as many as one may have before: with more, fewer contexts are kept.
Confidences take time for each arc and word, and other sessions wait for them."""
MAX_COST = 16.0
"""Cost of a word, or of an end, that a language model lacks, natural log."""


class LatticeTerm(NamedTuple):
    """Language model whose costs are added to a lattice's."""

    model: NgramModel
    factor: float
    """Factor of its costs; -1 with the graph's own model takes those out."""


Contexts = tuple[int, ...]
"""State of each language model."""


_Steps = dict[tuple[Contexts, int], tuple[float, Contexts]]
"""Cost of a word in each context, and the contexts after it."""
_ComposedArc = tuple[tuple[int, Contexts], tuple[int, Contexts], LatticeArc, float]
"""State and contexts at both ends of an arc, the arc, and what the language models add to its cost."""
_Composed = tuple[list[dict[Contexts, float]], list[_ComposedArc]]
"""Contexts in which each state is reached, with the least cost, and all arcs."""


class LatticePath(NamedTuple):
    """Word sequence of a lattice."""

    cost: float
    arcs: list[LatticeArc]

    @property
    def words(self) -> list[int]:
        return [arc.word for arc in self.arcs]


def rescore_lattice(
    lattice: WordLattice, terms: Sequence[LatticeTerm], contexts: Contexts | None = None
) -> WordLattice:
    """Composes a lattice with language models.

    Args:
        lattice: states in topological order; no two arcs of a state have the same word.
        terms: each path costs its own cost and those of its words by each model, times the model's factor.
        contexts: states of the models before the first word; None: the start of a sentence.

    Returns: a lattice of the same form and of the same word sequences, with those costs, in which the costs of the
    language models count as the graph's; its last state is final. Exact unless a state is reached in more than
    MAX_CONTEXTS contexts, or the lattice would have more than MAX_ARCS arcs.
    """
    leaving: list[list[LatticeArc]] = [[] for _ in lattice.finals]
    for arc in lattice.arcs:
        leaving[arc.source].append(arc)
    start = tuple(term.model.start_state for term in terms) if contexts is None else contexts
    steps: _Steps = {}
    most = MAX_CONTEXTS
    while (composed := _compose(leaving, terms, start, most, steps)) is None:
        most //= 2
    reached, arcs = composed
    ends = {
        (state, place): _end(terms, place)
        for state, (cost, _) in enumerate(lattice.finals)
        if cost < math.inf
        for place in reached[state]
    }
    useful = set(ends)  # states that lead to an end
    for source, target, _, _ in reversed(arcs):
        if target in useful:
            useful.add(source)
    states = [(state, place) for state, places in enumerate(reached) for place in places if (state, place) in useful]
    numbers = {state: number for number, state in enumerate(states)}
    return WordLattice(
        [
            arc._replace(
                source=numbers[source], target=numbers[target], cost=arc.cost + more, graph_cost=arc.graph_cost + more
            )
            for source, target, arc, more in arcs
            if target in useful
        ],
        [
            (lattice.finals[state[0]][0] + ends[state], lattice.finals[state[0]][1] + ends[state])
            if state in ends
            else (math.inf, 0.0)
            for state in states
        ],
    )


def _compose(
    leaving: Sequence[Sequence[LatticeArc]], terms: Sequence[LatticeTerm], start: Contexts, most: int, steps: _Steps
) -> _Composed | None:
    """Reaches each state of a lattice in `most` contexts at most.

    Args:
        leaving: arcs that leave each state.
        steps: costs and contexts after words, to which those that are computed are added.

    Returns: None where there are more than MAX_ARCS arcs, and `most` is above 1.
    """
    reached: list[dict[Contexts, float]] = [{} for _ in leaving]
    reached[0][start] = 0.0
    arcs: list[_ComposedArc] = []
    for state, outgoing in enumerate(leaving):
        reached[state] = dict(heapq.nsmallest(most, reached[state].items(), key=lambda item: item[1]))
        if most > 1 and len(arcs) + len(outgoing) * len(reached[state]) > MAX_ARCS:
            return None
        for place, before in reached[state].items():
            for arc in outgoing:
                if (found := steps.get((place, arc.word))) is None:
                    found = steps[place, arc.word] = _step(terms, place, arc.word)
                more, after = found
                arcs.append(((state, place), (arc.target, after), arc, more))
                total = before + arc.cost + more
                if total < reached[arc.target].get(after, math.inf):
                    reached[arc.target][after] = total
    return reached, arcs


def best_paths(lattice: WordLattice, most: int) -> list[LatticePath]:
    """Returns up to `most` paths of a lattice, the cheapest first."""
    leaving: list[list[LatticeArc]] = [[] for _ in lattice.finals]
    for arc in lattice.arcs:
        leaving[arc.source].append(arc)
    rest = [cost for cost, _ in lattice.finals]
    for state in range(len(rest) - 1, -1, -1):
        rest[state] = min([rest[state], *(arc.cost + rest[arc.target] for arc in leaving[state])])
    out: list[LatticePath] = []
    numbers = itertools.count()
    """Order of entries of equal cost: the first that was found."""
    queue: list[tuple[float, int, LatticePath, int]] = [(rest[0], next(numbers), LatticePath(0.0, []), 0)]
    while queue and len(out) < most:
        _, _, path, state = heapq.heappop(queue)
        if state < 0:  # it has ended
            out.append(path)
            continue
        if (end := path.cost + lattice.finals[state][0]) < math.inf:
            heapq.heappush(queue, (end, next(numbers), path._replace(cost=end), -1))
        for arc in leaving[state]:
            longer = LatticePath(path.cost + arc.cost, [*path.arcs, arc])
            if (least := longer.cost + rest[arc.target]) < math.inf:
                heapq.heappush(queue, (least, next(numbers), longer, arc.target))
    return out


def _step(terms: Sequence[LatticeTerm], contexts: Contexts, word: int) -> tuple[float, Contexts]:
    cost, after = 0.0, []
    for term, context in zip(terms, contexts, strict=True):
        logprob, following = term.model.step(context, word)
        cost += term.factor * min(-logprob, MAX_COST)
        after.append(following)
    return cost, tuple(after)


def _end(terms: Sequence[LatticeTerm], contexts: Contexts) -> float:
    return sum(
        term.factor * min(-float(term.model.final_logprobs[context]), MAX_COST)
        for term, context in zip(terms, contexts, strict=True)
    )
