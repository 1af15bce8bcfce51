"""Arrays of n-gram models and of decoding graphs: queries with back-off, and files that no search may read."""

import math

import numpy as np
import pytest

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.decoding_graph import GRAPH_FILE, DecodingGraph
from asr_serve.models.ngram import NgramModel

A, B = 0, 1


def bigram_model() -> NgramModel:
    """Words a and b; state 1 is the context a, with the one bigram "a b"."""
    return NgramModel(
        arc_offsets=np.array([0, 2, 3], np.int64),
        arc_words=np.array([A, B, B], np.int32),
        arc_logprobs=np.log(np.array([0.5, 0.25, 0.9], np.float32)),
        arc_states=np.array([1, 0, 0], np.int32),
        backoff_states=np.array([-1, 0], np.int32),
        backoff_logprobs=np.array([0.0, math.log(0.1)], np.float32),
        final_logprobs=np.log(np.array([0.25, 0.025], np.float32)),
        start_state=0,
    )


def graph() -> DecodingGraph:
    return DecodingGraph(
        arc_offsets=np.array([0, 2, 2], np.int32),
        epsilon_offsets=np.array([1, 2], np.int32),
        arc_labels=np.array([0, -1], np.int32),
        arc_words=np.array([A, -1], np.int32),
        arc_costs=np.array([0.5, 1.0], np.float32),
        arc_states=np.array([0, 1], np.int32),
        final_costs=np.array([np.inf, 0.0], np.float32),
        label_columns=np.array([0], np.int32),
        label_phones=np.array([-1], np.int32),
        phone_boundaries=np.array([], np.int8),
        start_state=0,
        language_model=bigram_model(),
    )


@pytest.mark.parametrize(
    ("state", "word", "probability", "after"), [(0, A, 0.5, 1), (1, B, 0.9, 0), (1, A, 0.05, 1), (1, 7, 0.0, 0)]
)
def test_words_are_looked_up_in_shorter_contexts(state: int, word: int, probability: float, after: int) -> None:
    logprob, then = bigram_model().step(state, word)
    assert math.exp(logprob) == pytest.approx(probability)
    assert then == after


def test_a_graph_comes_back_from_its_file(tmp_path) -> None:
    graph().save(tmp_path)
    again = DecodingGraph.load(tmp_path / GRAPH_FILE)
    assert again.language_model is not None
    for saved, loaded in zip((*graph()[:-1], *bigram_model()), (*again[:-1], *again.language_model), strict=True):
        assert np.array_equal(saved, loaded)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arc_states", np.array([1, 0, 9], np.int32)),
        ("arc_words", np.array([B, A, B], np.int32)),
        ("arc_offsets", np.array([0, 3, 2], np.int64)),
        ("arc_logprobs", np.zeros(3, np.float64)),
        ("backoff_states", np.array([-1, 1], np.int32)),
        ("start_state", 2),
    ],
)
def test_broken_language_models_are_refused(field: str, value: object) -> None:
    with pytest.raises(WeightsCorrupt):
        bigram_model()._replace(**{field: value}).validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arc_states", np.array([0, 2], np.int32)),
        ("arc_labels", np.array([-1, 0], np.int32)),
        ("arc_labels", np.array([1, -1], np.int32)),
        ("epsilon_offsets", np.array([3, 2], np.int32)),
        ("arc_costs", np.array([np.nan, 0], np.float32)),
        ("start_state", -1),
    ],
)
def test_broken_graphs_are_refused(field: str, value: object) -> None:
    with pytest.raises(WeightsCorrupt):
        graph()._replace(**{field: value}).validate()
