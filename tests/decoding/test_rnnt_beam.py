"""Beam search of transducers: exact where the beam is wide enough, greedy where it is one entry, and the same for
any chunks and any company."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_transducer import Heard, TinyTransducer, noise, run

from asr_serve.decoding.rnnt import TransducerGreedy
from asr_serve.decoding.rnnt_beam import TransducerBeam
from asr_serve.errors import OptionError
from asr_serve.models.interfaces import NBestHypothesis, SearchToken

KINDS = [(), (0, 1, 2, 3, 4), (1, 2), (0, 3)]
Said = tuple[int, ...]


def total(*logprobs: float) -> float:
    return float(torch.tensor(logprobs, dtype=torch.float64).logsumexp(0))


@torch.inference_mode()
def all_alignments(model: TinyTransducer, hidden: torch.Tensor, max_symbols: int) -> dict[Said, float]:
    """The definition: the log-probability of everything that can be said, one path after another."""
    projected = model.project_encoder(hidden[None])[0]

    @cache
    def after(said: Said):
        memory = {name: torch.zeros(1, *spec.shape) for name, spec in model.predictor_state_specs().items()}
        memory = after(said[:-1])[1] if said else memory
        return model.predict(torch.tensor([said[-1] if said else model.blank_id]), memory)

    @cache
    def ways(frame: int, said: Said) -> list[tuple[int, int, float]]:
        """Token or blank, frames that it lasts, log-probability of both."""
        logits = model.joint(projected[frame : frame + 1], after(said)[0])[0].double()
        tokens, lasts = logits[: model.vocab_size].log_softmax(0), logits[model.vocab_size :].log_softmax(0)
        if not model.durations:
            return [(token, int(token == model.blank_id), float(tokens[token])) for token in range(model.vocab_size)]
        return [
            (token, duration, float(tokens[token] + lasts[index]))
            for token in range(model.vocab_size)
            for index, duration in enumerate(model.durations)
        ]

    paths: dict[Said, list[float]] = {}

    def walk(frame: int, symbols: int, said: Said, logprob: float) -> None:
        if frame >= len(hidden):
            paths.setdefault(said, []).append(logprob)
            return
        for token, lasts, gain in ways(frame, said):
            if token == model.blank_id or symbols + 1 == max_symbols:
                lasts = max(lasts, 1)
            longer = said if token == model.blank_id else (*said, token)
            walk(frame + lasts, 0 if lasts else symbols + 1, longer, logprob + gain)

    walk(0, 0, (), 0.0)
    return {said: total(*logprobs) for said, logprobs in paths.items()}


def ids(tokens: list[SearchToken]) -> Said:
    return tuple(token.id for token in tokens)


def said(heard: Heard) -> list[NBestHypothesis]:
    """The n-best list with all tokens of the session."""
    return [NBestHypothesis(heard.fixed + guess.tokens, guess.logprob) for guess in heard.guesses]


def same(found: list[NBestHypothesis], expected: list[NBestHypothesis]) -> None:
    where = [[[token[:2] for token in guess.tokens] for guess in each] for each in (found, expected)]
    assert where[0] == where[1]
    numbers = [
        [number for guess in each for number in (guess.logprob, *(token.logprob for token in guess.tokens))]
        for each in (found, expected)
    ]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


@pytest.mark.parametrize("durations", [(), (0, 1, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("max_symbols", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_wide_enough_is_exact(durations, max_symbols, seed):
    model = TinyTransducer.random(seed, vocab=3, sharp=0.4, eager=0.5, durations=durations)
    sessions = noise(seed, [3, 1, 2])
    search = TransducerBeam(model, 400, max_symbols, tail=8, margin=math.inf)
    for hidden, heard in zip(sessions, run(search, sessions, chunks=[1, 2], shuffle=seed), strict=True):
        expected = all_alignments(model, hidden, max_symbols)
        assert total(*expected.values()) == pytest.approx(0.0, abs=1e-6), "something is said for certain"
        found = {ids(guess.tokens): guess.logprob for guess in said(heard)}
        assert found == pytest.approx(expected, abs=1e-4)
        assert len(found) == len(heard.guesses), "everything is there once"
        assert [guess.logprob for guess in heard.guesses] == sorted(found.values(), reverse=True)


@pytest.mark.parametrize("durations", [(), (0, 1, 2)], ids=str)
def test_a_beam_of_four_finds_likelier_texts(durations):
    """Than greedy search does, by the sum over all alignments; mostly the likeliest there is; and it never claims
    more than that sum."""
    beam, greedy, best = 0.0, 0.0, 0
    for seed in range(12):
        model = TinyTransducer.random(seed, vocab=3, sharp=0.4, eager=0.5, durations=durations)
        (hidden,) = sessions = noise(seed, [3 if durations else 4])
        expected = all_alignments(model, hidden, 2)
        (heard,) = run(TransducerBeam(model, 4, 2), sessions, chunks=[2])
        for guess in said(heard):
            assert guess.logprob <= expected[ids(guess.tokens)] + 1e-4
        beam += expected[ids(heard.best)]
        best += expected[ids(heard.best)] == max(expected.values())
        (heard,) = run(TransducerGreedy(model, 2), sessions, chunks=[2])
        greedy += expected[ids(heard.best)]
    assert beam > greedy + 0.3
    assert best >= 10


@pytest.mark.parametrize("durations", KINDS, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    chunks=st.lists(st.sampled_from([1, 3, 5, 30]), min_size=1, max_size=3),
    max_symbols=st.sampled_from([1, 2, 5]),
    eager=st.sampled_from([-8.0, -4.0, -1.0, 2.0]),
)
def test_a_beam_of_one_is_greedy(durations, seed, lengths, chunks, max_symbols, eager):
    model = TinyTransducer.random(seed, eager=eager, durations=durations)
    sessions = noise(seed + 1, lengths)
    beam = run(TransducerBeam(model, 1, max_symbols), sessions, chunks=chunks, shuffle=seed)
    greedy = run(TransducerGreedy(model, max_symbols), sessions, chunks=chunks, shuffle=seed)
    for one, other in zip(beam, greedy, strict=True):
        same(said(one), said(other))
        assert [each[0] for each in one.partials] == [each[0] for each in other.partials]
        assert [ids(each.tokens) for each in one.partials] == [ids(each.tokens) for each in other.partials]
        assert all(partial.unfixed == 0 for partial in one.partials), "one entry agrees with itself"


@pytest.mark.slow
@pytest.mark.parametrize("durations", KINDS, ids=str)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    chunks=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3),
    beam=st.integers(2, 6),
    max_symbols=st.sampled_from([1, 2, 3]),
    room=st.sampled_from([1, 2, 5, 60]),
    sharp=st.sampled_from([0.3, 1.0]),
    eager=st.sampled_from([-4.0, 0.0]),
    company=st.integers(1, 4),
    slots=st.integers(1, 4),
    fill=st.integers(0, 2),
    idle=st.sampled_from([0.0, 0.2]),
)
def test_chunks_and_batching_change_nothing(
    durations, seed, lengths, chunks, beam, max_symbols, room, sharp, eager, company, slots, fill, idle
):
    model = TinyTransducer.random(seed, sharp=sharp, eager=sharp * eager, durations=durations)
    sessions = noise(seed + 1, lengths)
    search = TransducerBeam(model, beam, max_symbols, tail=max_symbols + room)
    mixed = run(search, sessions, slots=slots, chunks=chunks, company=company, shuffle=seed, fill=fill, idle=idle)
    for hidden, heard in zip(sessions, mixed, strict=True):
        (alone,) = run(search, [hidden], chunks=[len(hidden)])
        same(said(heard), said(alone))
        assert 1 <= len(heard.guesses) <= beam
        assert len({ids(guess.tokens) for guess in heard.guesses}) == len(heard.guesses)
        assert all(partial.unfixed <= max_symbols + room for partial in heard.partials)


@pytest.mark.parametrize(("seed", "max_symbols"), [(1, 1), (1, 2), (3, 2), (7, 2), (8, 1)])
def test_tokens_with_different_frames_in_entries_are_not_fixed(seed, max_symbols):
    """Else which of the frames is fixed would depend on where a chunk ends."""
    model = TinyTransducer.random(seed, vocab=5, sharp=0.3)
    sessions = noise(seed, [20])
    search = TransducerBeam(model, 3, max_symbols)
    (often,), (once,) = (run(search, sessions, chunks=[size]) for size in (1, 20))
    same(said(often), said(once))
    assert often.fixed


@pytest.mark.parametrize("seed", [0, 3, 5, 6, 7])
def test_the_tail_is_the_text_of_a_session_that_ends_here(seed):
    model = TinyTransducer.random(seed, sharp=0.2, eager=-0.5)
    (hidden,) = noise(seed, [30])
    search = TransducerBeam(model, 4)
    (heard,) = run(search, [hidden], chunks=[1, 4], shuffle=seed)
    changed = 0
    for frames, tokens, unfixed in heard.partials:
        (cut,) = run(search, [hidden[:frames]], chunks=[frames])
        assert [token[:2] for token in tokens] == [token[:2] for token in cut.best]
        changed += heard.best[: len(tokens)] != tokens
        assert heard.best[: len(tokens) - unfixed] == tokens[: len(tokens) - unfixed]
    assert changed, "what is not fixed does change"


def test_a_full_tail_fixes_the_oldest_token_of_the_best_entry():
    model = TinyTransducer.random(3, sharp=0.3, eager=0.5)
    (hidden,) = noise(3, [60])
    (free,) = run(TransducerBeam(model, 4, 1, tail=64), [hidden], chunks=[1])
    (tight,) = run(TransducerBeam(model, 4, 1, tail=4), [hidden], chunks=[1])
    assert max(partial.unfixed for partial in free.partials) > 4 >= max(each.unfixed for each in tight.partials)
    # Up to the first frame that forces it, both say the same; there the best entry's first token stays.
    first = next(index for index, partial in enumerate(free.partials) if partial.unfixed > 3)
    assert tight.partials[first].tokens == free.partials[first].tokens
    oldest = len(free.partials[first].tokens) - free.partials[first].unfixed
    assert tight.fixed[: oldest + 1] == free.partials[first].tokens[: oldest + 1]


def test_pruned_entries_are_less_likely_by_the_margin():
    model = TinyTransducer.random(24, eager=-6.0, layers=2)
    (hidden,) = noise(1, [60])
    (heard,) = run(TransducerBeam(model, 8, margin=2.0), [hidden])
    (wide,) = run(TransducerBeam(model, 8, margin=math.inf), [hidden])
    assert all(guess.logprob >= heard.guesses[0].logprob - 2.0 for guess in heard.guesses)
    assert len(heard.guesses) < len(wide.guesses) == 8


def test_silence_has_no_tokens_and_a_model_without_blanks_max_symbols_at_every_frame():
    for durations in ((), (0,), (0, 3)):
        (heard,) = run(TransducerBeam(TinyTransducer.random(5, eager=-1e6, durations=durations)), noise(6, [30]))
        assert heard.best == []
        assert heard.guesses[0].logprob > -1e3
    for durations in ((), (0,)):
        model = TinyTransducer.random(5, eager=1e6, durations=durations)
        (heard,) = run(TransducerBeam(model, 3, 2), noise(6, [7]))
        assert [token.frame for token in heard.best] == [frame for frame in range(7) for _ in range(2)]


def test_state_is_bounded_and_complete_for_a_new_session():
    specs = TransducerBeam(TinyTransducer.random(1, layers=2), 3, tail=16).state_specs()
    assert {name: spec.shape for name, spec in specs.items()} == {
        "begun": (),
        "h": (3, 2, 8),
        "c": (3, 2, 8),
        "predicted": (3, 10),
        "score": (3,),
        "skip": (3,),
        "key": (3,),
        "length": (3,),
        "token": (3, 16),
        "frame": (3, 16),
        "logprob": (3, 16),
    }
    assert [name for name, spec in specs.items() if spec.initial_value is not None] == ["begun"]


def test_a_session_without_frames_ends_empty():
    search = TransducerBeam(TinyTransducer.random(1))
    state = {name: torch.zeros(2, *spec.shape, dtype=spec.dtype) for name, spec in search.state_specs().items()}
    assert search.finish(0, state) == [NBestHypothesis([], 0.0)]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"beam": 0}, "beam"),
        ({"max_symbols": 0}, "max_symbols"),
        ({"tail": 2}, "tail"),
        ({"margin": 0.0}, "margin"),
        ({"margin": math.nan}, "margin"),
    ],
)
def test_options_are_checked(options, param):
    with pytest.raises(OptionError) as error:
        TransducerBeam(TinyTransducer.random(1), **options)
    assert error.value.param == param


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("durations", KINDS, ids=str)
def test_a_cuda_device_has_the_same_tokens(durations, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # an LSTM's products, which are compared here
    sessions = noise(1, [30, 7, 50])
    heard = []
    for device in ("cpu", "cuda"):
        model = TinyTransducer.random(24, sharp=0.3, durations=durations).to(device)
        search = TransducerBeam(model, 4, 2, device, tail=5)
        heard.append(run(search, sessions, chunks=[3, 8], fill=1, device=device))
    for ours, theirs in zip(*heard, strict=True):
        same(said(ours), said(theirs))
