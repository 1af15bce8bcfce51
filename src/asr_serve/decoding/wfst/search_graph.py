"""Preparation of a decoding graph for the search: unigram look-ahead, and the order of its epsilon arcs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.decoding_graph import DecodingGraph
from asr_serve.models.ngram import NgramModel

MOST_EPSILON_ARCS = 1_000
"""Epsilon arcs that may follow each other."""
ROUNDING = 1e-3
"""Largest difference of a sum of costs from their true sum."""


class SearchGraph(NamedTuple):
    """Decoding graph as `kernels.wfst()` reads it; see DecodingGraph.

    With a language model, the costs of arcs hold a look-ahead: a word's unigram cost is paid as early as the graph
    tells it from other words, and given back on the arc that outputs the word, where the model's own cost is paid.
    Costs of whole paths stay the same, and a narrow beam no longer drops words because rarer ones look as cheap.

    Source: Ortmanns, Ney and Eiden 1996, Language-model look-ahead for large vocabulary speech recognition.
    """

    arc_offsets: np.ndarray
    epsilon_offsets: np.ndarray
    arc_labels: np.ndarray
    arc_words: np.ndarray
    arc_costs: np.ndarray
    arc_bounds: np.ndarray
    """(arcs,) float32: at most the cost of an arc together with that of its word in any state of the language model;
    rising among the arcs of a state that consume a frame, and among those that do not."""
    arc_states: np.ndarray
    final_costs: np.ndarray
    label_columns: np.ndarray
    label_phones: np.ndarray
    phone_boundaries: np.ndarray
    depths: np.ndarray
    """(states,) int32: epsilon arcs lead from smaller to greater numbers."""
    start_state: int
    language_model: NgramModel | None

    @property
    def columns(self) -> int:
        """Columns of the scores that the search reads."""
        used = self.arc_labels[self.arc_labels >= 0]
        return int(self.label_columns[used].max()) + 1 if len(used) else 0


def prepare_graph(graph: DecodingGraph, *, lookahead: bool = True) -> SearchGraph:
    """Graph for the search. Arcs that can be on no path are taken out of it: those that output a word which the
    language model lacks, those of infinite cost, and those that lead to where no final state can be reached.

    Raises WeightsCorrupt for a graph without a path, or with a loop of epsilon arcs.
    """
    model, states = graph.language_model, graph.states
    sources = np.repeat(np.arange(states), np.diff(graph.arc_offsets))
    word_costs = _unigram_costs(graph, model)
    usable = np.isfinite(graph.arc_costs) & np.isfinite(word_costs)
    ends = np.where(np.isfinite(graph.final_costs), 0.0, np.inf).astype(np.float32)
    reachable = np.isfinite(_least_ahead(ends, sources, graph.arc_states, usable))
    if not reachable[graph.start_state]:
        raise WeightsCorrupt("a decoding graph in which no path leads from its start to an end")
    usable &= reachable[graph.arc_states]
    costs = np.where(usable, graph.arc_costs, np.inf).astype(np.float32)
    finals = graph.final_costs.astype(np.float32)
    if model is not None and lookahead:
        outputs = graph.arc_words >= 0
        ahead = np.where(np.isfinite(finals), 0.0, np.inf).astype(np.float32)
        np.minimum.at(ahead, sources[outputs & usable], word_costs[outputs & usable])
        ahead = _least_ahead(ahead, sources, graph.arc_states, usable & ~outputs)
        ahead = np.where(np.isfinite(ahead), ahead, 0.0).astype(np.float64)
        costs = (costs + (ahead[graph.arc_states] - ahead[sources])).astype(np.float32)
        finals = (finals + (ahead[graph.start_state] - ahead)).astype(np.float32)
    bounds = costs if model is None else costs + _least_word_costs(graph, model)
    return _ordered(
        graph._replace(arc_costs=costs, final_costs=finals), sources, usable, bounds, _depths(graph, sources, usable)
    )


def _unigram_costs(graph: DecodingGraph, model: NgramModel | None) -> np.ndarray:
    """Unigram cost of each arc's word; 0 where it outputs none, inf where the model lacks it."""
    costs = np.zeros(len(graph.arc_words), np.float32)
    if model is None:
        return costs
    first, end = model.arc_offsets[0], model.arc_offsets[1]
    known, logprobs = model.arc_words[first:end], model.arc_logprobs[first:end]
    outputs = graph.arc_words >= 0
    words = graph.arc_words[outputs]
    places = np.searchsorted(known, words).clip(max=max(len(known) - 1, 0))
    costs[outputs] = np.where(known[places] == words, -logprobs[places], np.inf) if len(known) else np.inf
    return costs


def _least_word_costs(graph: DecodingGraph, model: NgramModel) -> np.ndarray:
    """Lower bound (arcs,) float32 of the cost of each arc's word in any context: 0 where it outputs none."""
    backoffs = np.zeros(model.states)
    reached = np.arange(model.states)
    while (reached > 0).any():
        backoffs -= np.where(reached > 0, model.backoff_logprobs[reached], 0.0)
        reached = np.where(reached > 0, model.backoff_states[reached], 0)
    size = int(max(graph.arc_words.max(initial=0), model.arc_words.max(initial=0))) + 1
    least = np.full(size, np.inf)
    np.minimum.at(least, model.arc_words, -model.arc_logprobs)
    least += min(float(backoffs.min()), 0.0) - ROUNDING
    return np.where(graph.arc_words >= 0, least[graph.arc_words], 0.0).astype(np.float32)


def _least_ahead(own: np.ndarray, sources: np.ndarray, targets: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Least of `own` over the states that a state reaches by usable arcs, the state itself included."""
    least, sources, targets = own.copy(), sources[usable], targets[usable]
    while True:
        before = least.copy()
        np.minimum.at(least, sources, least[targets])
        if np.array_equal(before, least):
            return least


def _depths(graph: DecodingGraph, sources: np.ndarray, usable: np.ndarray) -> np.ndarray:
    epsilon = usable & (graph.arc_labels < 0)
    sources, targets = sources[epsilon], graph.arc_states[epsilon]
    depths = np.zeros(graph.states, np.int32)
    for _ in range(MOST_EPSILON_ARCS):
        before = depths.copy()
        np.maximum.at(depths, targets, depths[sources] + 1)
        if np.array_equal(before, depths):
            return depths
    raise WeightsCorrupt(
        f"a decoding graph with a loop of arcs that consume nothing, or {MOST_EPSILON_ARCS} of them in a row",
        "remove them with fstrmepsilon",
    )


def _ordered(
    graph: DecodingGraph, sources: np.ndarray, usable: np.ndarray, bounds: np.ndarray, depths: np.ndarray
) -> SearchGraph:
    """The graph with its usable arcs alone, those of a state by their bounds."""
    arcs = np.flatnonzero(usable)
    arcs = arcs[np.lexsort((bounds[arcs], graph.arc_labels[arcs] < 0, sources[arcs]))]
    offsets = np.zeros(graph.states + 1, np.int32)
    np.cumsum(np.bincount(sources[arcs], minlength=graph.states), out=offsets[1:])
    consuming = np.bincount(sources[arcs][graph.arc_labels[arcs] >= 0], minlength=graph.states)
    return SearchGraph(
        arc_offsets=offsets,
        epsilon_offsets=(offsets[:-1] + consuming).astype(np.int32),
        arc_labels=graph.arc_labels[arcs],
        arc_words=graph.arc_words[arcs],
        arc_costs=graph.arc_costs[arcs],
        arc_bounds=bounds[arcs],
        arc_states=graph.arc_states[arcs],
        final_costs=graph.final_costs,
        label_columns=graph.label_columns,
        label_phones=graph.label_phones,
        phone_boundaries=graph.phone_boundaries,
        depths=depths,
        start_state=graph.start_state,
        language_model=graph.language_model,
    )
