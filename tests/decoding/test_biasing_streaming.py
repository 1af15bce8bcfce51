"""Hotwords in the searches of streaming models: the native search and its reference, sums that are taken back, chunks,
and sessions that are not alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming_search import PosteriorModel, chunk_of, posteriors, run_search, state_of
from tiny_transducer import TinyTransducer, noise
from torch import Tensor

from asr_serve import devices, kernels
from asr_serve.decoding.biasing_graph import BiasingPhrase, pack_phrases
from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.ctc import CtcBeamOptions, CtcGreedy, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import (
    BIASING_NODE,
    LANGUAGE_STATE,
    LAST,
    LENGTH,
    TOKEN,
    TOTAL,
    BatchedCtcPrefixBeam,
)
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.rnnt import TransducerGreedy
from asr_serve.decoding.rnnt_beam import TransducerBeam
from asr_serve.engine.streaming.search_router import BiasingSearchRouter
from asr_serve.kernels import ctc_search_reference
from asr_serve.models.interfaces import NBestHypothesis, SearchToken, StreamingSearch

LETTERS = " abcdefg"
BLANK = len(LETTERS)
VOCAB = BLANK + 1


def text(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token != BLANK).strip()


def words_of(*words: str, weight: float = 1.0) -> StreamingBiasingList:
    bias = pack_phrases([BiasingPhrase(word, weight) for word in words])
    return StreamingBiasingList(bias, lambda said: [LETTERS.index(c) for c in said.lower()], text, VOCAB)


def run(
    search: Any, hidden: Tensor, words: StreamingBiasingList | None, widths: list[int]
) -> tuple[list[SearchToken], list[NBestHypothesis]]:
    """One session: what was fixed, and how it may end."""
    fixed, _, guesses = run_search(search, hidden, widths, words)
    return fixed, guesses


def gain_of(words: StreamingBiasingList, tokens: list[SearchToken], boost: float = 1.0) -> float:
    """Gain of a text by walking the graph."""
    node, total = 1, 0.0
    for token in tokens:
        node, gain = words.graph.step(node, token.id)
        total += gain
    return boost * (total + words.graph.final_cost(node))


def letter_logprobs(said: str, *, unsure: dict[int, str] | None = None) -> Tensor:
    """A frame for each letter, and a blank behind it; at places in `unsure` another is a little likelier."""
    logits = torch.zeros(2 * len(said), VOCAB)
    for at, letter in enumerate(said):
        logits[2 * at, LETTERS.index(letter)] = 10.0
        logits[2 * at + 1, BLANK] = 10.0
        if unsure and at in unsure:
            logits[2 * at, LETTERS.index(unsure[at])] = 11.0
    return logits.log_softmax(-1)


def best(heard: tuple[list[SearchToken], list[NBestHypothesis]]) -> str:
    fixed, guesses = heard
    return text([token.id for token in (*fixed, *guesses[0].tokens)])


def letter_scorer(seed: int) -> NgramScorer:
    """N-gram model of random letters."""
    drawn = random.Random(seed)
    texts = [[str(drawn.randrange(VOCAB)) for _ in range(drawn.randint(1, 8))] for _ in range(20)]
    ngrams = train(texts, 3, vocabulary=[str(token) for token in range(VOCAB)]).to_model()
    return NgramScorer(ngrams.reindexed({str(token): token for token in range(VOCAB)}))


def batched_ctc(**options: Any) -> BatchedCtcPrefixBeam:
    model: Any = PosteriorModel(VOCAB, BLANK)
    return BatchedCtcPrefixBeam(model, devices.make_device("cpu", "fp32"), CtcBeamOptions(8), **options)


def ctc(**options: Any) -> CtcPrefixBeam:
    return CtcPrefixBeam(PosteriorModel(VOCAB, BLANK), 8, boost=1.0, **options)


# --- CTC -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 40), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_reference_leaves_the_same_state(seed: int, chunk: int, frames: int, fuses: bool):
    if kernels.search() is ctc_search_reference:
        pytest.skip("the native search is not built or not wanted: pip install -e . builds it")
    drawn = random.Random(seed)
    words = words_of(*("".join(drawn.choices(LETTERS[1:5], k=drawn.randint(2, 5))) for _ in range(8)))
    hidden, left = posteriors(seed, frames, VOCAB), []
    fusion = LanguageModelFusion(letter_scorer(seed), 0.6) if fuses else None
    for search in (ctc(nodes=20, fuses=fuses), ctc(nodes=20, fuses=fuses)):
        if left:
            search._native = ctc_search_reference
        state, found = state_of(search, 1), []
        for at in range(0, frames, chunk):
            width = min(chunk, frames - at)
            found += search.step(hidden[None, at : at + width], chunk_of([0], [at], [width]), state, words, fusion)
        left.append(
            (found, search.finish(0, state, words, fusion), {name: each[0].tolist() for name, each in state.items()})
        )
    assert left[0] == left[1]


@given(st.integers(0, 10_000), st.integers(1, 12), st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_the_batched_search_gives_the_same_hot_words(seed: int, chunk: int, lengths: list[int]):
    drawn = random.Random(seed)
    words = words_of(*("".join(drawn.choices(LETTERS[1:5], k=drawn.randint(2, 5))) for _ in range(8)), weight=2.0)
    batched = batched_ctc(boost=1.0)
    hidden, state = posteriors(seed, len(lengths), max(lengths), VOCAB), state_of(batched, len(lengths))
    rows, fixed = list(range(len(lengths))), [list[SearchToken]() for _ in lengths]
    for at in range(0, max(lengths), chunk):
        counts = [min(max(length - at, 0), chunk) for length in lengths]
        found = batched.step(hidden[:, at : at + chunk], chunk_of(rows, [at] * len(rows), counts), state, words)
        for row, result in enumerate(found):
            fixed[row] += result.fixed_tokens
    for row, length in enumerate(lengths):
        expected, guesses = run(ctc(nodes=4_096), hidden[row, :length], words, [length])
        ours = batched.finish(row, state, words)
        assert fixed[row] == expected
        assert [guess.tokens for guess in ours] == [guess.tokens for guess in guesses]
        for name in ("logprob", "gain"):
            sums = [[getattr(guess, name) for guess in each] for each in (ours, guesses)]
            assert sums[0] == pytest.approx(sums[1], abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunks_change_nothing(chunk: int):
    words = words_of("abba", "bad", "deaf")
    for seed in range(10):
        hidden = posteriors(seed, 30, VOCAB)
        whole = run(ctc(), hidden, words, [30])
        assert run(ctc(), hidden, words, [chunk] * (30 // chunk)) == whole


def test_a_nearly_recognized_word_is_found():
    hidden = letter_logprobs("a bad cab", unsure={3: "e"})
    assert best(run(ctc(), hidden, None, [len(hidden)])) == "a bed cab"
    assert best(run(ctc(), hidden, words_of("bad"), [len(hidden)])) == "a bad cab"


def test_a_partial_word_has_no_gain():
    """`badge` begins as was said; nothing of it is left at the end, nor where the text goes on otherwise."""
    hidden = letter_logprobs("a bed", unsure={3: "a"})
    plain = run(ctc(), hidden, None, [len(hidden)])[1]
    biased = run(ctc(), hidden, words_of("badge"), [len(hidden)])[1]
    assert {guess.gain for guess in biased} == {0.0}
    assert [token.id for token in biased[0].tokens] == [token.id for token in plain[0].tokens]


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=40)
def test_a_gain_is_that_of_the_graph(seed: int):
    words = words_of("ab", "abba", "bad", "d a", weight=2.0)
    search = ctc()
    fixed, guesses = run(search, posteriors(seed, 25, VOCAB), words, [25])
    for guess in guesses:
        assert guess.gain == pytest.approx(gain_of(words, [*fixed, *guess.tokens]), abs=1e-9)


def test_blanks_give_no_hot_word():
    logits = torch.full((200, VOCAB), -8.0)
    logits[:, BLANK] = 0.0
    for words in (words_of("a"), words_of("bad", "ab", weight=10.0)):
        assert best(run(ctc(), logits.log_softmax(-1), words, [200])) == ""


@pytest.mark.parametrize("name", ["ctc_spots", "ctc_contexts"])
def test_a_corrupt_row_is_refused(name: str):
    words, hidden = words_of("bad"), posteriors(1, 4, VOCAB)
    for module in {kernels.search(), ctc_search_reference}:
        search, fusion = ctc(fuses=True), LanguageModelFusion(letter_scorer(1), 0.5)
        search._native = module
        state = state_of(search, 1)
        search.step(hidden[None], chunk_of([0], [0], [4]), state, words, fusion)
        search.validate_row(0, state, words, fusion)
        state[name][0, 0] = 10_000
        with pytest.raises(ValueError, match="corrupt"):
            search.validate_row(0, state, words, fusion)


@pytest.mark.parametrize("plane", [LAST, LENGTH, BIASING_NODE, LANGUAGE_STATE])
@pytest.mark.parametrize("value", [10_000_000, -1])
def test_a_corrupt_row_of_the_batched_search_is_refused(plane: int, value: int):
    """Before a step has it among the rows of others."""
    words, hidden, fusion = words_of("bad"), posteriors(1, 2, 4, VOCAB), LanguageModelFusion(letter_scorer(1), 0.5)
    search = batched_ctc(boost=1.0, fuses=True)
    state = state_of(search, 2)
    search.validate_row(0, state, words, fusion)
    search.step(hidden, chunk_of([0, 1], [0, 0], [4, 4]), state, words, fusion)
    for row in (0, 1):
        search.validate_row(row, state, words, fusion)
    state["ctc_numbers"][0, plane, 1] = value
    with pytest.raises(ValueError, match="corrupt"):
        search.validate_row(0, state, words, fusion)
    search.validate_row(1, state, words, fusion)


def test_rows_that_no_batched_search_left_are_refused():
    search, hidden = batched_ctc(), posteriors(1, 1, 4, VOCAB)
    state = state_of(search, 1)
    search.step(hidden, chunk_of([0], [0], [4]), state)
    lengths = state["ctc_numbers"][0, LENGTH]
    assert lengths[0] > 0
    changes = {"ctc_scores": (TOTAL, float("-inf")), "ctc_tails": (TOKEN, VOCAB), "ctc_started": ((), 2)}
    for name, (plane, value) in changes.items():
        changed = {each: tensor.clone() for each, tensor in state.items()}
        changed[name][0][plane] = value
        with pytest.raises(ValueError, match="corrupt"):
            search.validate_row(0, changed)
    search.validate_row(0, state)


# --- transducers ---------------------------------------------------------------------------------------------


def transducer(seed: int) -> TinyTransducer:
    return TinyTransducer.random(seed)


def biasing_list(model: TinyTransducer, *words: list[int]) -> StreamingBiasingList:
    """Words by their tokens."""
    spelt = {f"w{number}": tokens for number, tokens in enumerate(words)}
    bias = pack_phrases([BiasingPhrase(word) for word in spelt])
    return StreamingBiasingList(bias, lambda said: spelt.get(said, []), lambda _: " ", model.vocab_size)


def test_a_transducer_prefers_listed_words_and_withdraws_partial_gains():
    more = 0
    for seed in range(8):
        model, [hidden] = transducer(seed), noise(seed, [14])
        plain = TransducerBeam(model, 4, 2)
        fixed, guesses = run(plain, hidden, None, [14])
        said = [token.id for token in (*fixed, *guesses[0].tokens)]
        other = next((guess for guess in guesses[1:] if guess.tokens), None)
        if other is None:
            continue
        wanted = [token.id for token in (*fixed, *other.tokens)]
        words = biasing_list(model, wanted)
        search = TransducerBeam(model, 4, 2, boost=2.0, tokens=6)
        fixed, guesses = run(search, hidden, words, [14])
        found = [token.id for token in (*fixed, *guesses[0].tokens)]
        more += found == wanted != said
        for guess in guesses:
            assert guess.gain == pytest.approx(gain_of(words, [*fixed, *guess.tokens], 2.0), abs=1e-6)
    assert more >= 3


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunks_change_nothing_for_transducers(chunk: int):
    model, [hidden] = transducer(3), noise(3, [14])
    words = biasing_list(model, [1, 2], [2, 3, 1])
    whole = run(TransducerBeam(model, 4, 2, boost=1.0, tokens=6), hidden, words, [14])
    parts = run(TransducerBeam(model, 4, 2, boost=1.0, tokens=6), hidden, words, [chunk] * (14 // chunk))
    ids = [[token[:2] for token in (*fixed, *guesses[0].tokens)] for fixed, guesses in (whole, parts)]
    assert ids[0] == ids[1]


# --- neighbours ----------------------------------------------------------------------------------------------


def search_pairs() -> list[tuple[StreamingSearch, Any, StreamingBiasingList, list[Tensor]]]:
    model = transducer(2)
    return [
        (
            CtcGreedy(PosteriorModel(VOCAB, BLANK)),
            ctc(),
            words_of("abba", "bad"),
            [posteriors(each, 20, VOCAB) for each in range(4)],
        ),
        (
            CtcPrefixBeam(PosteriorModel(VOCAB, BLANK), 4),
            ctc(),
            words_of("abba", "bad"),
            [posteriors(each, 20, VOCAB) for each in range(4)],
        ),
        (
            TransducerGreedy(model),
            TransducerBeam(model, 4, 2, boost=1.0, tokens=6),
            biasing_list(model, [1, 2], [2, 3]),
            noise(4, [20] * 4),
        ),
    ]


@pytest.mark.parametrize("which", range(3), ids=["ctc", "ctc beam", "rnnt"])
def test_biasing_does_not_change_neighbours(which: int):
    plain, biased, words, hidden = search_pairs()[which]

    def session(hot: set[int]) -> list[Any]:
        search = BiasingSearchRouter(plain, biased)
        state, told = state_of(search, 4), [[] for _ in range(4)]
        for row in hot:
            search.set_biasing(row, words)
        for at in range(0, 20, 5):
            given = torch.stack([each[at : at + 5] for each in hidden])
            found = search.step(given, chunk_of([0, 1, 2, 3], [at] * 4, [5] * 4), state)
            for row, each in enumerate(found):
                told[row].append(each)
        return [(told[row], search.finish(row, state)) for row in range(4)]

    def said(told: list[Any]) -> Any:
        if which < 2:
            return told  # to the last bit
        # A product of other rows may round its last bit otherwise.
        found, guesses = told
        tokens = [[token[:2] for token in (*each.fixed_tokens, *each.tail_tokens)] for each in found]
        return tokens, [[token[:2] for token in guess.tokens] for guess in guesses]

    alone, beside, all_hot = session(set()), session({1, 3}), session({0, 1, 2, 3})
    assert [said(beside[row]) for row in (0, 2)] == [said(alone[row]) for row in (0, 2)]
    assert [said(beside[row]) for row in (1, 3)] == [said(all_hot[row]) for row in (1, 3)]


def test_a_reused_row_has_no_hot_words():
    plain, biased, words, _ = search_pairs()[0]
    search, hidden = BiasingSearchRouter(plain, biased), letter_logprobs("bad", unsure={1: "e"})
    state = state_of(search, 1)
    for hot, said in ((words, "bad"), (None, "bed")):
        search.set_biasing(0, hot)
        for name, spec in search.state_specs().items():
            state[name][0] = spec.initial_value or 0
        [found] = search.step(hidden[None], chunk_of([0], [0], [6]), state)
        tokens = [*found.fixed_tokens, *search.finish(0, state)[0].tokens]
        assert text([token.id for token in tokens]) == said
