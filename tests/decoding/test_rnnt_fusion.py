"""Language models in the beam search of transducers: exact where the beam is wide enough, and the same for any
chunks and any company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rnnt_beam import KINDS, all_alignments, ids, said
from tiny_transducer import TinyTransducer, noise, run
from token_language_model import FusedSearch, sentence_logprob, token_model

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.rnnt import LENGTH
from asr_serve.decoding.rnnt_beam import LANGUAGE_STATE, TransducerBeam
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk


@pytest.mark.parametrize("durations", [(), (0, 1, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("max_symbols", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_wide_enough_is_exact(durations: tuple[int, ...], max_symbols: int, seed: int) -> None:
    model = TinyTransducer.random(seed, vocab=3, sharp=0.4, eager=0.5, durations=durations)
    sessions = noise(seed, [3, 1, 2])
    language_model, weight = token_model(seed, [0, 1]), 0.7
    beam = TransducerBeam(model, 400, max_symbols, tail=8, margin=math.inf, fuses=True)
    search = FusedSearch.of(beam, language_model, weight)
    for hidden, heard in zip(sessions, run(search, sessions, chunks=[1, 2], shuffle=seed), strict=True):
        recognised = all_alignments(model, hidden, max_symbols)
        expected = {
            tokens: (logprob, weight * sentence_logprob(language_model, tokens))
            for tokens, logprob in recognised.items()
        }
        found = {ids([*heard.fixed, *guess.tokens]): (guess.logprob, guess.gain) for guess in heard.guesses}
        assert found.keys() == expected.keys()
        for tokens, scores in found.items():
            assert scores == pytest.approx(expected[tokens], abs=1e-4), tokens
        totals = [guess.logprob + guess.gain for guess in heard.guesses]
        assert totals == sorted(totals, reverse=True)


def test_the_language_model_changes_what_is_found() -> None:
    changed = 0
    for seed in range(8):
        model = TinyTransducer.random(seed, vocab=4, sharp=0.3, eager=0.5)
        sessions, language_model = noise(seed, [8]), token_model(seed, [0, 1, 2])
        (plain,) = run(TransducerBeam(model, 8, 2, fuses=True), sessions)
        (fused,) = run(FusedSearch.of(TransducerBeam(model, 8, 2, fuses=True), language_model, 2.0), sessions)
        scores = [sentence_logprob(language_model, ids(each.best)) for each in (plain, fused)]
        changed += ids(plain.best) != ids(fused.best)
        assert scores[1] >= scores[0] - 1e-9
    assert changed >= 4


@pytest.mark.parametrize("durations", KINDS, ids=str)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    chunks=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=3),
)
def test_any_chunks_give_the_same(durations: tuple[int, ...], seed: int, lengths: list[int], chunks: list[int]) -> None:
    model = TinyTransducer.random(seed, eager=-1.0, durations=durations)
    sessions, language_model = noise(seed, lengths), token_model(seed, list(range(8)))
    search = FusedSearch.of(TransducerBeam(model, 4, 2, fuses=True), language_model, 0.5)
    together = run(search, sessions, chunks=chunks, shuffle=seed, slots=3, fill=1)
    for hidden, heard in zip(sessions, together, strict=True):
        (alone,) = run(search, [hidden], chunks=[len(hidden)])
        assert [ids(guess.tokens) for guess in said(heard)] == [ids(guess.tokens) for guess in said(alone)]
        numbers = [
            [score for guess in each.guesses for score in (guess.logprob, guess.gain)] for each in (heard, alone)
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


def test_sessions_without_a_model_are_as_in_a_search_without() -> None:
    model = TinyTransducer.random(3, eager=-1.0)
    sessions = noise(3, [12, 5])
    plain = run(TransducerBeam(model, 4, 2), sessions)
    fusing = run(TransducerBeam(model, 4, 2, fuses=True), sessions)
    assert [said(each) for each in plain] == [said(each) for each in fusing]


def test_tokens_that_the_model_lacks_are_never_found() -> None:
    model = TinyTransducer.random(5, vocab=4, sharp=0.3, eager=1.0)
    search = FusedSearch.of(TransducerBeam(model, 16, 2, fuses=True), token_model(5, [0, 2]), 0.5)
    (heard,) = run(search, noise(5, [10]))
    assert heard.guesses
    assert all(1 not in ids(guess.tokens) for guess in said(heard))
    assert all(math.isfinite(guess.logprob + guess.gain) for guess in heard.guesses)


def test_a_model_without_an_end_ranks_what_it_has() -> None:
    model, language_model = TinyTransducer.random(5, vocab=4, sharp=0.3, eager=1.0), token_model(5, [0, 1, 2])
    endless = language_model._replace(final_logprobs=np.full_like(language_model.final_logprobs, -math.inf))
    (heard,) = run(FusedSearch.of(TransducerBeam(model, 16, 2, fuses=True), endless, 0.5), noise(5, [10]))
    totals = [guess.logprob + guess.gain for guess in heard.guesses]
    assert all(math.isfinite(total) for total in totals)
    assert totals == sorted(totals, reverse=True)


def test_hot_words_and_a_language_model_add_up() -> None:
    letters = "abc"
    model = TinyTransducer.random(7, vocab=4, sharp=0.3, eager=0.5)
    words = StreamingBiasingList(
        "ab\t1",
        lambda text: [letters.index(c) for c in text.strip().lower()],
        lambda tokens: "".join((letters + " ")[token] for token in tokens),
        4,
    )
    language_model, weight = token_model(7, [0, 1, 2]), 0.4
    fusion = LanguageModelFusion(NgramScorer(language_model), weight)

    class Both(FusedSearch):
        def step(self, hidden, chunk, state):
            return self.search.step(hidden, chunk, state, words, self.fusion)

        def finish(self, row, state):
            return self.search.finish(row, state, words, self.fusion)

    def gains(fused: LanguageModelFusion | None) -> dict[tuple[int, ...], float]:
        beam = TransducerBeam(model, 400, 1, tail=8, margin=math.inf, boost=1.0, fuses=True)
        (heard,) = run(Both(beam, fused), noise(7, [3]))
        return {ids([*heard.fixed, *guess.tokens]): guess.gain for guess in heard.guesses}

    boosted, both = gains(None), gains(fusion)
    assert any(boosted.values())
    assert both.keys() == boosted.keys()
    for tokens, gain in both.items():
        expected = boosted[tokens] + weight * sentence_logprob(language_model, tokens)
        assert gain == pytest.approx(expected, abs=1e-9), tokens


def test_each_session_has_its_own_weight() -> None:
    model, language_model, hidden = TinyTransducer.random(1), token_model(1, [0, 1]), noise(1, [9])[0]
    search, chosen = TransducerBeam(model, 3, fuses=True), [0.0, 0.5, 4.0]
    fusion = LanguageModelFusion(NgramScorer(language_model), 0.5)

    def chunk(rows: int) -> StreamingChunk:
        numbers = (torch.arange(rows), *(torch.full((rows,), each) for each in (0, 9, UNBOUNDED_SAMPLES)))
        return StreamingChunk(torch.zeros(rows, 0), *numbers)

    def rows(count: int) -> dict[str, torch.Tensor]:
        specs = search.state_specs().items()
        return {name: torch.zeros(count, *spec.shape, dtype=spec.dtype) for name, spec in specs}

    state, weights = rows(3), torch.tensor(chosen, dtype=torch.float64)
    together = search.step(hidden.expand(3, -1, -1), chunk(3), state, None, fusion, weights)
    gains = []
    for row, weight in enumerate(chosen):
        alone, one = rows(1), fusion._replace(weight=weight)
        [found] = search.step(hidden[None], chunk(1), alone, None, one)
        pairs = [(found.fixed_tokens, together[row].fixed_tokens), (found.tail_tokens, together[row].tail_tokens)]
        ours, expected = search.finish(row, state, None, one), search.finish(0, alone, None, one)
        pairs += [(a.tokens, b.tokens) for a, b in zip(ours, expected, strict=True)]
        for some, same in pairs:
            assert [token[:2] for token in some] == [token[:2] for token in same]
        for name in ("logprob", "gain"):
            sums = [[getattr(guess, name) for guess in each] for each in (ours, expected)]
            assert sums[0] == pytest.approx(sums[1], abs=1e-4)
        gains.append(ours[0].gain)
    assert gains[0] == 0.0
    assert len(set(gains)) == 3


def test_a_corrupt_row_is_refused() -> None:
    model = TinyTransducer.random(1)
    search = FusedSearch.of(TransducerBeam(model, 2, fuses=True), token_model(1, [0, 1]), 0.5)
    state = {name: torch.zeros(1, *spec.shape, dtype=spec.dtype) for name, spec in search.state_specs().items()}
    (hidden,) = noise(1, [2])
    numbers = [torch.tensor([each]) for each in (0, 0, 2, UNBOUNDED_SAMPLES)]
    chunk = StreamingChunk(torch.zeros(1, 0), *numbers)
    search.step(hidden[None], chunk, state)
    beam = search.search
    beam.validate_row(0, state, None, search.fusion)
    for name, value in ((LANGUAGE_STATE, 10**6), (LENGTH, 10**6), (LENGTH, -1)):
        changed = state | {name: torch.full_like(state[name], value)}
        with pytest.raises(ValueError, match="corrupt"):
            beam.validate_row(0, changed, None, search.fusion)
