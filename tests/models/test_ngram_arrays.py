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


@pytest.mark.parametrize("seed", range(20))
def test_epsilon_backoffs_are_taken_where_they_are_likelier(seed: int) -> None:
    """Trigrams: contexts of one word are the states 1 to 3, of two the states 4 to 6."""
    rng = np.random.default_rng(seed)
    seen = [np.arange(3), *(np.flatnonzero(rng.random(3) < 0.7) for _ in range(6))]
    words = np.concatenate(seen).astype(np.int32)
    sources = np.repeat(np.arange(7), [len(each) for each in seen])
    model = NgramModel(
        arc_offsets=np.cumsum([0, *map(len, seen)]),
        arc_words=words,
        arc_logprobs=-rng.uniform(0, 4, len(words)).astype(np.float32),
        arc_states=np.where(sources == 0, words + 1, words + 4).astype(np.int32),
        backoff_states=np.array([-1, 0, 0, 0, 1, 2, 3], np.int32),
        backoff_logprobs=np.array([0, *-rng.uniform(0, 2, 6)], np.float32),
        final_logprobs=-rng.uniform(0, 4, 7).astype(np.float32),
        start_state=0,
    )
    model.validate()
    relaxed = model.with_epsilon_backoffs()
    relaxed.validate()

    def best(state: int, word: int) -> tuple[float, int]:
        """Of all paths: the arc of the state, or its back-off and then any path from there."""
        found = [(-math.inf, 0)]
        if word in seen[state]:
            found.append(model.step(state, word))
        if state:
            logprob, after = best(int(model.backoff_states[state]), word)
            found.append((float(model.backoff_logprobs[state]) + logprob, after))
        return max(found)

    for state in range(7):
        for word in range(4):
            logprob, after = relaxed.step(state, word)
            expected, then = best(state, word)
            assert logprob == pytest.approx(expected, abs=1e-5)
            assert after == then or word == 3
    ends = model.final_logprobs.tolist()
    for state in range(1, 7):
        ends[state] = max(ends[state], float(model.backoff_logprobs[state]) + ends[int(model.backoff_states[state])])
    np.testing.assert_allclose(relaxed.final_logprobs, ends, rtol=1e-5)


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
