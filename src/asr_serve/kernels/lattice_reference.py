"""Minimum Bayes risk decoding of word lattices in Python: the oracle and fallback of kernels/src/lattice.hpp, which
describes the algorithm and names its source. Results are equal to the last bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Word = tuple[int, int, int, float]
"""Word, first frame, end frame, natural-log probability."""
NO_WORD = -1
"""Word of an arc that outputs none."""
MAX_ITERATIONS, DELETION_DELTA = 100, 1e-5


class LatticeArc(NamedTuple):
    """Arc of a word lattice: states, word, costs, and the first and end frame of the word."""

    source: int
    target: int
    word: int
    cost: float
    graph_cost: float
    start: int
    end: int


class WordLattice(NamedTuple):
    """Acyclic lattice whose arcs lead to states of higher numbers. State 0 is its start."""

    arcs: list[LatticeArc]
    finals: list[tuple[float, float]]
    """Final cost of each state, and the part of it that the graph has."""


class _Arc(NamedTuple):
    source: int
    target: int
    word: int
    start: float
    end: float
    share: float


class BayesRisk:
    """Expected edit distances between word sequences and the paths of a lattice."""

    def __init__(self, lattice: WordLattice, graph_scale: float) -> None:
        self.states = states = len(lattice.finals)
        arcs = [(a.source, a.target, a.word, a.start, a.end, a.cost, a.graph_cost) for a in lattice.arcs]
        for state, (cost, graph_cost) in enumerate(lattice.finals):
            if cost < math.inf:
                arcs.append((state, states, NO_WORD, 0, 0, cost, graph_cost))
        arcs.sort(key=lambda arc: arc[1])
        logprobs = [-(cost - (1.0 - graph_scale) * graph_cost) for *_, cost, graph_cost in arcs]
        forward = [0.0] + [-math.inf] * states
        for (source, target, *_), logprob in zip(arcs, logprobs, strict=True):
            forward[target] = _log_add(forward[target], forward[source] + logprob)
        self.arcs = [
            _Arc(source, target, word, start, end, math.exp(forward[source] + logprob - forward[target]))
            for (source, target, word, start, end, *_), logprob in zip(arcs, logprobs, strict=True)
        ]

    def evaluate(self, words: Sequence[int]) -> float:
        """Returns the expected edit distance of words; sets `bins` to their confusion network."""
        self.reference = [NO_WORD] * (2 * len(words) + 1)
        self.reference[1::2] = words
        return self._accumulate()

    def confidences(self, words: Sequence[int]) -> list[float]:
        """Natural-log probability of each word in the confusion network that is aligned with the words."""
        self.evaluate(words)
        return [
            _log_of(next((entry[0] for key, entry in self.bins[2 * i + 1].items() if key == word), 0.0))
            for i, word in enumerate(words)
        ]

    def decode(self, words: Sequence[int]) -> list[Word]:
        """Returns words of a local minimum of the expected edit distance, by descent from `words`."""
        words, iteration = list(words), 0
        while True:
            self.evaluate(words)
            found: list[Word] = []
            for entries in self.bins:
                best = max(entries, key=lambda word: (entries[word][0], word), default=NO_WORD)
                if best != NO_WORD:
                    weight, start, end = entries[best]
                    times = math.floor(start / weight + 0.5), math.floor(end / weight + 0.5)
                    found.append((best, *times, _log_of(weight)))
            better = [word for word, *_ in found]
            if better == words or iteration == MAX_ITERATIONS:
                return _separated(found)
            words, iteration = better, iteration + 1

    def _follow(self, arc: _Arc, source: list[float]) -> tuple[list[float], list[int]]:
        dropped = 1.0 + DELETION_DELTA if arc.word != NO_WORD else 0.0
        along, moves = [source[0] + dropped], [0]
        for q, reference in enumerate(self.reference, 1):
            match = source[q - 1] + (0.0 if arc.word == reference else 1.0)
            drop, insert = source[q] + dropped, along[q - 1] + (0.0 if reference == NO_WORD else 1.0)
            move = (1 if match <= insert else 3) if match <= drop else (2 if drop <= insert else 3)
            moves.append(move)
            along.append((match, drop, insert)[move - 1])
        return along, moves

    def _add(self, place: int, word: int, weight: float, start: float, end: float) -> None:
        entry = self.bins[place].setdefault(word, [0.0, 0.0, 0.0])
        entry[0] += weight
        entry[1] += weight * start
        entry[2] += weight * end

    def _accumulate(self) -> float:
        places = len(self.reference)
        distances = [[0.0] * (places + 1) for _ in range(self.states + 1)]
        weights = [[0.0] * (places + 1) for _ in range(self.states + 1)]
        self.bins: list[dict[int, list[float]]] = [{} for _ in range(places)]
        for q, reference in enumerate(self.reference, 1):
            distances[0][q] = distances[0][q - 1] + (0.0 if reference == NO_WORD else 1.0)
        for arc in self.arcs:
            along, _ = self._follow(arc, distances[arc.source])
            to = distances[arc.target]
            for q in range(places + 1):
                to[q] += arc.share * along[q]
        weights[self.states][places] = 1.0
        for arc in reversed(self.arcs):
            _, moves = self._follow(arc, distances[arc.source])
            source = weights[arc.source]
            weight = [arc.share * each for each in weights[arc.target]]
            for q in range(places, 0, -1):
                if weight[q] == 0:
                    continue
                if moves[q] == 1:
                    source[q - 1] += weight[q]
                    self._add(q - 1, arc.word, weight[q], arc.start, arc.end)
                elif moves[q] == 2:
                    source[q] += weight[q]
                else:
                    weight[q - 1] += weight[q]
                    self._add(q - 1, NO_WORD, weight[q], 0.0, 0.0)
            source[0] += weight[0]
        rest = 0.0
        for q in range(places, 0, -1):
            rest += weights[0][q]
            if rest > 0:
                self._add(q - 1, NO_WORD, rest, 0.0, 0.0)
        return distances[self.states][places]


def _log_add(a: float, b: float) -> float:
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log(1.0 + math.exp(b - a))


def _log_of(weight: float) -> float:
    return math.log(min(max(weight, 1e-10), 1.0))


def _separated(words: list[Word]) -> list[Word]:
    """Separates words whose mean times overlap: neighbours get half of the frames each."""
    out: list[Word] = []
    for word, start, end, logprob in words:
        if out and start < out[-1][2]:
            before = out[-1]
            low, high = min(before[1], start), max(before[2], end)
            first = max(low, out[-2][2] if len(out) > 1 else low)
            start = max(first + 1, low + (high - low) // 2)
            out[-1] = (before[0], first, start, before[3])
            end = max(high, start + 1)
        out.append((word, start, max(end, start + 1), logprob))
    return out


def cost_of(lattice: WordLattice, words: Sequence[int], most: float) -> float:
    """Cost of words above that of the lattice's best path, at most `most`, which is also that of words not in the
    lattice."""
    arcs = {(arc.source, arc.word): arc for arc in reversed(lattice.arcs)}
    cost, state = 0.0, 0
    for word in words:
        if (arc := arcs.get((state, word))) is None:
            return most
        cost, state = cost + arc.cost, arc.target
    return min(cost + lattice.finals[state][0], most)
