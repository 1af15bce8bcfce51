"""Drafts are verified, never believed: with any of them the answer is what decoding token by token would give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_moonshine import CARD, WAIT_S, build, clip, expect_empty, held, outcome, start

import asr_serve
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.seq2seq import NO_DRAFT, DraftTokens, Hypothesis, Recognition, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.seq2seq import decoder as runners
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.errors import Cancelled
from asr_serve.models.asr.moonshine import moonshine

LENGTHS = [1_600, 16_000, 40_000, 64_000, 9_000, 128_000, 30_000, 55_555]
CLIPS = [clip(seed, samples) for seed, samples in enumerate(LENGTHS)]
ONCE = SearchOptions(temperatures=(0.0,))
VOCABULARY = moonshine.tiny().vocab_size


class Forced(Hypothesis):
    """Decoding token by token, the first ones given: what a draft's `fixed` promises, by the other road."""

    def __init__(self, fixed: tuple[int, ...], eos: int, limit: int) -> None:
        super().__init__(ONCE, eos, limit, str)
        self.given, self.fixed = fixed, len(fixed)

    def append_token(self, token: int, logprob: float):
        at = len(self.tokens)
        return super().append_token(self.given[at] if at < len(self.given) else token, logprob)


@cache
def parts():
    return build()


@cache
def forced(index: int, fixed: tuple[int, ...] = ()) -> tuple[tuple[int, ...], str]:
    """The tokens of a clip and how it ends when it must begin with `fixed`; nothing is drafted."""
    made = parts()
    (result,) = EncodeRunner(made.model, made.device).encode([CLIPS[index]])
    decoder = DecodeRunner(made.model, made.device, 1, 1 << 20, result.frames)
    hypothesis = Forced(fixed, made.model.eos, limit(index))
    row = decoder.add_row(0, result, hypothesis)
    while not decoder.step():
        decoder.restart_row(row)  # its next token goes in as the hypothesis has it
    assert row.finish is not None
    return tuple(hypothesis.tokens), row.finish


def limit(index: int) -> int:
    """As engine/loop has it: tokens that a clip may have."""
    return min(moonshine.tiny().max_position_embeddings - 1, 4 + int(LENGTHS[index] / 16_000 * CARD.tokens_per_s))


def expect_as_without(came: object, index: int, draft: DraftTokens) -> None:
    within = draft.up_to(limit(index) - 1)
    tokens, finish = forced(index, within.tokens[: within.accepted_tokens])
    assert isinstance(came, Recognition), came
    assert (came.tokens, came.finish) == (tokens, finish), (index, draft)
    assert len(came.logprobs) == len(tokens)
    assert all(score <= 0 for score in came.logprobs)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, DraftTokens]:
    """A clip, and what it was heard as before: rightly, nearly, or not at all."""
    index = draw(st.integers(0, len(CLIPS) - 1))
    token = st.integers(0, VOCABULARY - 1)
    right = list(forced(index)[0])
    kind = draw(st.sampled_from(["none", "right", "start", "more", "flipped", "random", "long", "same"]))
    match kind:
        case "none":
            return index, NO_DRAFT
        case "right":
            tokens = right
        case "start":
            tokens = right[: draw(st.integers(0, len(right)))]
        case "more":
            tokens = right + draw(st.lists(token, min_size=1, max_size=5))
        case "flipped":
            tokens = list(right)
            tokens[draw(st.integers(0, len(right) - 1))] = draw(token)
        case "random":
            tokens = draw(st.lists(token, max_size=20))
        case "long":
            tokens = right + draw(st.lists(token, min_size=60, max_size=90))
        case _:
            tokens = [draw(token)] * draw(st.integers(1, 40))
    fixed = draw(st.just(0) | st.integers(0, len(tokens)))
    eos = parts().model.eos
    # What is fixed was said, and end-of-text never is; in the rest of a draft it may be.
    tokens = [t if t != eos or i >= fixed else eos + 1 for i, t in enumerate(tokens)]
    return index, DraftTokens(tuple(tokens), fixed)


@pytest.fixture(scope="module", params=["native", "twins"])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_NATIVE", "1" if request.param == "native" else "0")
        started = start(max_decode_rows=6)
    yield started
    started.close()


@pytest.fixture
def begin() -> Iterator:
    started: list[EngineClient] = []

    def starting(**kwargs) -> EngineClient:
        started.append(start(**kwargs))
        return started[-1]

    yield starting
    for each in started:
        each.close()


def test_the_clips_tell_apart_what_is_right():
    said = [forced(index)[0] for index in range(len(CLIPS))]
    assert len(set(said)) == len(said)
    assert forced(3, (5, 5, 7))[0][:3] == (5, 5, 7)
    assert forced(3, (5, 5, 7))[0] != said[3]


# --- any draft ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=12), st.integers(0, 2**32))
def test_any_draft_in_any_batch_is_as_without(client, asked, seed):
    """Drafted rows and plain ones, live and others, more than have room at once."""
    chance = random.Random(seed)
    with held(client):
        tickets = [
            client.submit(CLIPS[i], ONCE, chance.choice(["live", "interactive", "bulk"]), draft=draft)
            for i, draft in asked
        ]
    for (i, draft), ticket in zip(asked, tickets, strict=True):
        expect_as_without(outcome(ticket), i, draft)
    expect_empty(client)


@settings(max_examples=10, deadline=None)
@given(st.lists(drafts(), min_size=4, max_size=20), st.integers(0, 2**32))
def test_rows_that_come_and_go_change_nothing(client, asked, seed):
    chance, taken_back = random.Random(seed), set()
    tickets = []
    for number, (i, draft) in enumerate(asked):
        tickets.append(client.submit(CLIPS[i], ONCE, "live", draft=draft))
        if chance.random() < 0.3:
            taken_back.add(chance.randrange(number + 1))
            client.cancel(tickets[max(taken_back)])
        if chance.random() < 0.2:
            outcome(chance.choice(tickets))
    for (i, draft), ticket in zip(asked, tickets, strict=True):
        if (came := outcome(ticket)) is not Cancelled:
            expect_as_without(came, i, draft)
    expect_empty(client)


def test_a_right_draft_costs_one_pass_and_no_step(begin):
    client = begin()
    plain = [client.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    before = client.describe()
    for pcm, expected in zip(CLIPS, plain, strict=True):
        came = client.submit(pcm, ONCE, "live", draft=DraftTokens(expected.tokens)).future.result(WAIT_S)
        assert came.tokens == expected.tokens
        assert came.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert came.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-4)
    after = client.describe()
    ended = sum(a.finish == "stop" for a in plain)
    assert after["steps"] - before["steps"] <= len(CLIPS) - ended, "only what the limit ends has a token to go"
    held_tokens = after["draft_tokens_held"] - before["draft_tokens_held"]
    assert held_tokens >= sum(len(a.tokens) - 1 for a in plain)


def test_tokens_that_are_fixed_have_their_own_probability(begin):
    client = begin()
    plain = client.submit(CLIPS[3], ONCE).future.result(WAIT_S)
    for fixed in (1, 5, len(plain.tokens) - 1):
        same = client.submit(CLIPS[3], ONCE, draft=DraftTokens(plain.tokens, fixed)).future.result(WAIT_S)
        assert same.tokens == plain.tokens
        assert same.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    wrong = (plain.tokens[0] + 1) % VOCABULARY
    other = client.submit(CLIPS[3], ONCE, draft=DraftTokens((wrong,), 1)).future.result(WAIT_S)
    assert other.tokens[0] == wrong
    assert other.logprobs[0] < plain.logprobs[0], "greedy took the likeliest"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", ["1", "0"])
def test_poison_in_free_pages_changes_nothing(begin, monkeypatch, native):
    monkeypatch.setenv("ASR_SERVE_NATIVE", native)
    client = begin()
    decoder = client.backend.loop.executor.decode_runner

    def poisoned(function):
        def wrapper(*arguments):
            decoder.kv_cache[decoder.page_pool._free] = float("nan")
            return function(*arguments)

        return wrapper

    for name in ("add_row", "step", "prefill_and_verify"):
        setattr(decoder, name, poisoned(getattr(decoder, name)))
    for shift in range(3):
        asked = [(i, DraftTokens(forced((i + shift) % 2 * i)[0], shift)) for i in range(len(CLIPS))]
        with held(client):
            tickets = [client.submit(CLIPS[i], ONCE, draft=draft) for i, draft in asked]
        for (i, draft), ticket in zip(asked, tickets, strict=True):
            expect_as_without(outcome(ticket), i, draft)
    assert decoder.kv_cache.isnan().any()
    expect_empty(client)


@pytest.mark.parametrize("bound", [1, 9, 40])
def test_long_batches_of_drafts_are_verified_in_passes(begin, monkeypatch, bound):
    monkeypatch.setattr(runners, "MAX_VERIFY_POSITIONS", bound)
    client = begin()
    decoder = client.backend.loop.executor.decode_runner
    passes: list[list[int]] = []
    verified: set[int] = set()
    verify = decoder._verify_batch

    def watched(rows):
        passes.append([len(row.proposal) + 1 for row in rows])
        verified.update(row.request_id for row in rows)
        return verify(rows)

    decoder._verify_batch = watched
    asked = [(i, DraftTokens(forced(i)[0][: 3 * i + 1], i % 2)) for i in range(len(CLIPS))]
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE, draft=draft) for i, draft in asked]
    for (i, draft), ticket in zip(asked, tickets, strict=True):
        expect_as_without(outcome(ticket), i, draft)
    worth_it = [draft for _, draft in asked if draft.accepted_tokens or len(draft.tokens) > 1]
    assert len(verified) == len(worth_it)
    assert all(len(rows) == 1 or sum(rows) <= bound for rows in passes)
    assert bound > 1 or all(len(rows) == 1 for rows in passes)


@pytest.mark.parametrize("fixed", [0, 40, 200])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.7,), (0.0, 0.7)])
def test_a_draft_longer_than_any_answer_is_cut(begin, fixed, temperatures):
    """Nothing may be written past a row's pages, whichever road its first try takes."""
    client = begin()
    decoder = client.backend.loop.executor.decode_runner
    longest: list[int] = []
    forward = decoder._step_plain

    def watched(tokens, own, own_lengths, audio, audio_lengths):
        longest.append(int(own_lengths.max()))
        return forward(tokens, own, own_lengths, audio, audio_lengths)

    decoder._step_plain = watched
    for i in (0, 4, 3):
        draft = DraftTokens(tuple(7 + n % 50 for n in range(300)), fixed)
        options = SearchOptions(temperatures=temperatures, min_avg_logprob=-1e9, max_compression_ratio=1e9)
        came = outcome(client.submit(CLIPS[i], options, "live", draft=draft))
        assert isinstance(came, Recognition)
        assert len(came.tokens) <= limit(i)
        assert came.tokens[:fixed] == draft.tokens[: min(fixed, len(came.tokens) - 1)] + came.tokens[-1:] * (
            fixed >= len(came.tokens)
        )
        assert max(longest) <= limit(i)
        longest.clear()
    expect_empty(client)


# --- the search -----------------------------------------------------------------------------------


def test_a_row_that_samples_from_the_start_says_what_it_says_without_a_draft(begin):
    client = begin()
    hot = SearchOptions(temperatures=(0.9,), min_avg_logprob=-1e9, max_compression_ratio=1e9, seed=11)
    for i in range(len(CLIPS)):
        plain = client.submit(CLIPS[i], hot).future.result(WAIT_S)
        drafted = client.submit(CLIPS[i], hot, draft=DraftTokens(forced(i)[0])).future.result(WAIT_S)
        assert drafted.tokens == plain.tokens
        begun = client.submit(CLIPS[i], hot, draft=DraftTokens((9, 8, 7), 3)).future.result(WAIT_S)
        assert begun.tokens[:3] == (9, 8, 7)
        assert begun.temperature == 0.9


def test_fall_back_is_as_without_and_keeps_what_is_fixed(begin):
    """No answer passes, so each temperature is tried, from the fixed tokens on."""
    client = begin()
    hard = SearchOptions(temperatures=(0.0, 0.5, 1.0), min_avg_logprob=0.0)
    tries = client.describe()["fallbacks"]
    for i in range(1, len(CLIPS)):
        plain = client.submit(CLIPS[i], hard).future.result(WAIT_S)
        drafted = client.submit(CLIPS[i], hard, draft=DraftTokens(forced(i)[0])).future.result(WAIT_S)
        assert (drafted.tokens, drafted.temperature) == (plain.tokens, plain.temperature)
        fixed = (*forced(i)[0][:2], 9, 8)
        begun = client.submit(CLIPS[i], hard, draft=DraftTokens(fixed, 4)).future.result(WAIT_S)
        assert begun.tokens[:4] == fixed
        assert len(begun.logprobs) == len(begun.tokens)
    assert client.describe()["fallbacks"] - tries == 3 * 2 * (len(CLIPS) - 1)
    expect_empty(client)


def test_every_try_of_a_row_starts_from_its_fixed_tokens(begin):
    client = begin()
    decoder = client.backend.loop.executor.decode_runner
    again, seen = decoder.restart_row, []

    def watched(row):
        seen.append(list(row.hypothesis.tokens))
        assert len(row.hypothesis.logprobs) == len(row.hypothesis.tokens)
        again(row)

    decoder.restart_row = watched
    hard = SearchOptions(temperatures=(0.0, 0.5, 1.0), min_avg_logprob=0.0)
    outcome(client.submit(CLIPS[2], hard, draft=DraftTokens((9, 8, 7, *forced(2)[0]), 3)))
    assert seen == [[9, 8, 7]] * 2


def hypothesis(draft: DraftTokens, limit: int = 80) -> Hypothesis:
    return Hypothesis(ONCE, 2, limit, lambda tokens: " ".join(map(str, tokens)), draft)


@settings(deadline=None)
@given(
    st.lists(st.integers(3, 6), max_size=8),
    st.lists(st.integers(3, 5), min_size=1, max_size=4),
    st.integers(1, 12),
    st.lists(st.integers(3, 5), max_size=60),
)
def test_the_guard_against_loops_never_eats_what_is_fixed(before, phrase, times, after):
    fixed = tuple(before + phrase * times)
    h = hypothesis(DraftTokens(fixed, len(fixed)), limit=200)
    for number, token in enumerate([*fixed, *after]):
        finish = h.append_token(token, -0.1)
        assert number >= len(fixed) or finish is None
        if finish:
            break
    assert tuple(h.tokens[: len(fixed)]) == fixed
    assert len(h.tokens) == len(h.logprobs)


def test_a_loop_that_goes_on_from_what_is_fixed_ends_with_it():
    fixed = (7, 8) * 10
    h = hypothesis(DraftTokens(fixed, len(fixed)))
    for token in fixed:
        assert h.append_token(token, -0.1) is None
    assert h.append_token(7, -0.1) == "repetition"
    assert tuple(h.tokens) == fixed


# --- drafts that cannot be --------------------------------------------------------------------------


def test_a_draft_that_fixes_more_than_it_says_hurts_nobody(begin):
    client = begin()
    with held(client):
        odd = client.submit(CLIPS[2], ONCE, draft=DraftTokens(forced(2)[0][:3], 9))
        near = client.submit(CLIPS[2], ONCE, draft=DraftTokens(forced(2)[0][:3]))
    expect_as_without(outcome(near), 2, NO_DRAFT)
    expect_as_without(outcome(odd), 2, DraftTokens(forced(2)[0][:3], 3))
    expect_empty(client)


# --- real speech ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(packaged_speech: Path) -> Iterator[tuple[EngineClient, list[np.ndarray]]]:
    sound = read_audio(packaged_speech / "two_cities.wav")
    clips = [sound[at * 16_000 : (at + seconds) * 16_000] for at, seconds in ((1, 4), (5, 7), (9, 2), (14, 9))]
    with asr_serve.load("moonshine-tiny-en", dtype="fp32", engine=EngineConfig(prefix_bytes=0)) as model:
        yield model._client, clips


@pytest.mark.slow
def test_real_speech_is_heard_the_same_with_any_draft(real):
    client, clips = real
    plain = [client.submit(pcm).future.result(WAIT_S) for pcm in clips]
    chance = random.Random(1)
    asked: list[tuple[int, DraftTokens]] = []
    for i, answer in enumerate(plain):
        before = client.submit(clips[i][: len(clips[i]) * 2 // 3], ONCE, "live").future.result(WAIT_S)
        flipped = list(answer.tokens)
        flipped[chance.randrange(len(flipped))] = 100
        several = [before.tokens, answer.tokens, tuple(flipped), plain[i - 1].tokens, (11,) * 500, ()]
        asked += [(i, DraftTokens(tokens)) for tokens in several]
        asked.append((i, DraftTokens(before.tokens, 3)))
    with held(client):
        tickets = [client.submit(clips[i], priority="live", draft=draft) for i, draft in asked]
    for (i, draft), ticket in zip(asked, tickets, strict=True):
        came = ticket.future.result(WAIT_S)
        if draft.accepted_tokens:
            assert came.tokens[: draft.accepted_tokens] == draft.tokens[: draft.accepted_tokens]
        else:
            assert came.tokens == plain[i].tokens
            assert came.avg_logprob == pytest.approx(plain[i].avg_logprob, abs=1e-3)
    expect_empty(client)


def test_what_was_said_goes_on_as_it_would_have(real):
    """Fixed tokens that decoding chooses anyway change nothing, however many they are."""
    client, clips = real
    plain = client.submit(clips[1]).future.result(WAIT_S)
    for fixed in range(0, len(plain.tokens) + 1, 4):
        came = client.submit(clips[1], draft=DraftTokens(plain.tokens, fixed)).future.result(WAIT_S)
        assert came.tokens == plain.tokens
