"""Draft verification: with any draft the answer is what decoding token by token would give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_configs
import tiny_moonshine
from engine_clients import poison_free_pages, spy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_moonshine import CARD, WAIT_S, build, clip, expect_empty, held, outcome

import asr_serve
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Hypothesis, Recognition
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.seq2seq import decoder as runners
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.errors import Cancelled

LENGTHS = [1_600, 16_000, 40_000, 64_000, 9_000, 128_000, 30_000, 55_555]
CLIPS = [clip(seed, samples) for seed, samples in enumerate(LENGTHS)]
ENGINE, CLIENT_SETTINGS = tiny_moonshine, {"max_decode_rows": 6}
ONCE = SearchOptions(temperatures=(0.0,))
VOCABULARY = tiny_configs.moonshine_config().vocab_size


class ForcedHypothesis(Hypothesis):
    """Decoding token by token whose first tokens are given: the reference for accepted tokens of a draft."""

    def __init__(self, fixed: tuple[int, ...], eos: int, limit: int) -> None:
        super().__init__(ONCE, eos, limit, str)
        self.given, self.fixed = fixed, len(fixed)

    def append_token(self, token: int, logprob: float):
        at = len(self.tokens)
        return super().append_token(self.given[at] if at < len(self.given) else token, logprob)


@cache
def components():
    return build()


@cache
def forced_answer(index: int, fixed: tuple[int, ...] = ()) -> tuple[tuple[int, ...], str]:
    """The tokens of a clip and how it ends when it must begin with `fixed`; nothing is drafted."""
    made = components()
    (result,) = EncodeRunner(made.model, made.device).encode([CLIPS[index]])
    decoder = DecodeRunner(made.model, made.device, 1, 1 << 20, result.frames)
    hypothesis = ForcedHypothesis(fixed, made.model.eos, limit(index))
    row = decoder.add_row(0, result, hypothesis)
    while not decoder.step():
        decoder.restart_row(row)  # its next token goes in as the hypothesis has it
    assert row.finish is not None
    return tuple(hypothesis.tokens), row.finish


def limit(index: int) -> int:
    """As engine/loop has it: tokens that a clip may have."""
    return min(
        tiny_configs.moonshine_config().max_position_embeddings - 1,
        4 + int(LENGTHS[index] / 16_000 * CARD.tokens_per_s),
    )


def expect_as_without(result: object, index: int, draft: DraftTokens) -> None:
    within = draft.up_to(limit(index) - 1)
    tokens, finish = forced_answer(index, within.tokens[: within.accepted_tokens])
    assert isinstance(result, Recognition), result
    assert (result.tokens, result.finish) == (tokens, finish), (index, draft)
    assert len(result.logprobs) == len(tokens)
    assert all(score <= 0 for score in result.logprobs)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, DraftTokens]:
    """A clip, and what it was heard as before: rightly, nearly, or not at all."""
    index = draw(st.integers(0, len(CLIPS) - 1))
    token = st.integers(0, VOCABULARY - 1)
    right = list(forced_answer(index)[0])
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
    eos = components().model.eos
    # What is fixed was said, and end-of-text never is; in the rest of a draft it may be.
    tokens = [t if t != eos or i >= fixed else eos + 1 for i, t in enumerate(tokens)]
    return index, DraftTokens(tuple(tokens), fixed)


def expect_batch_as_without(
    client: EngineClient, requests: list[tuple[int, DraftTokens]], priority: Callable[[], str] = lambda: "interactive"
) -> None:
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE, priority(), draft=draft) for i, draft in requests]
    for (i, draft), ticket in zip(requests, tickets, strict=True):
        expect_as_without(outcome(ticket), i, draft)


def test_clips_have_answers_that_tell_them_apart():
    answers = [forced_answer(index)[0] for index in range(len(CLIPS))]
    assert len(set(answers)) == len(answers)
    assert forced_answer(3, (5, 5, 7))[0][:3] == (5, 5, 7)
    assert forced_answer(3, (5, 5, 7))[0] != answers[3]


# --- any draft ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=12), st.integers(0, 2**32))
def test_any_draft_in_any_batch_leaves_the_answer_as_without(client, requests, seed):
    """Drafted rows and plain ones, live and others, more than have room at once."""
    chance = random.Random(seed)
    expect_batch_as_without(client, requests, lambda: chance.choice(["live", "interactive", "bulk"]))
    expect_empty(client)


@settings(max_examples=10, deadline=None)
@given(st.lists(drafts(), min_size=4, max_size=20), st.integers(0, 2**32))
def test_cancelled_rows_leave_other_answers_alone(client, requests, seed):
    chance, cancelled = random.Random(seed), set()
    tickets = []
    for number, (i, draft) in enumerate(requests):
        tickets.append(client.submit(CLIPS[i], ONCE, "live", draft=draft))
        if chance.random() < 0.3:
            cancelled.add(chance.randrange(number + 1))
            client.cancel(tickets[max(cancelled)])
        if chance.random() < 0.2:
            outcome(chance.choice(tickets))
    for (i, draft), ticket in zip(requests, tickets, strict=True):
        if (result := outcome(ticket)) is not Cancelled:
            expect_as_without(result, i, draft)
    expect_empty(client)


def test_a_right_draft_costs_one_pass_and_no_step(begin):
    client = begin()
    plain = [client.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    before = client.describe()
    for pcm, expected in zip(CLIPS, plain, strict=True):
        result = client.submit(pcm, ONCE, "live", draft=DraftTokens(expected.tokens)).future.result(WAIT_S)
        assert result.tokens == expected.tokens
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert result.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-4)
    after = client.describe()
    ended = sum(a.finish == "stop" for a in plain)
    assert after["steps"] - before["steps"] <= len(CLIPS) - ended, "only what the limit ends has a token to go"
    held_tokens = after["draft_tokens_held"] - before["draft_tokens_held"]
    assert held_tokens >= sum(len(a.tokens) - 1 for a in plain)


def test_accepted_tokens_have_their_own_probability(begin):
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
    poison_free_pages(decoder)
    for shift in range(3):
        requests = [(i, DraftTokens(forced_answer((i + shift) % 2 * i)[0], shift)) for i in range(len(CLIPS))]
        expect_batch_as_without(client, requests)
    assert decoder.kv_cache.isnan().any()
    expect_empty(client)


@pytest.mark.parametrize("bound", [1, 9, 40])
def test_long_batches_of_drafts_are_verified_in_passes(begin, monkeypatch, bound):
    monkeypatch.setattr(runners, "MAX_VERIFY_POSITIONS", bound)
    client = begin()
    decoder = client.backend.loop.executor.decode_runner
    passes: list[list[int]] = []
    verified: set[int] = set()

    def record(rows):
        passes.append([len(row.proposal) + 1 for row in rows])
        verified.update(row.request_id for row in rows if row.needs_prefill)

    spy(decoder, "_verify_batch", record)
    requests = [(i, DraftTokens(forced_answer(i)[0][: 3 * i + 1], i % 2)) for i in range(len(CLIPS))]
    expect_batch_as_without(client, requests)
    worth_it = [draft for _, draft in requests if draft.accepted_tokens or len(draft.tokens) > 1]
    assert len(verified) == len(worth_it)
    assert all(len(rows) == 1 or sum(rows) <= bound for rows in passes)
    assert bound > 1 or all(len(rows) == 1 for rows in passes)


@pytest.mark.parametrize("fixed", [0, 40, 200])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.7,), (0.0, 0.7)])
def test_a_draft_longer_than_any_answer_is_truncated(begin, fixed, temperatures):
    """Nothing may be written past a row's pages, however its first try is verified."""
    client = begin()
    decoder = client.backend.loop.executor.decode_runner
    longest: list[int] = []
    spy(decoder, "_step_plain", lambda tokens, own, lengths, *_: longest.append(int(lengths.max())))
    for i in (0, 4, 3):
        draft = DraftTokens(tuple(7 + n % 50 for n in range(300)), fixed)
        options = SearchOptions(temperatures=temperatures, min_avg_logprob=-1e9, max_compression_ratio=1e9)
        result = outcome(client.submit(CLIPS[i], options, "live", draft=draft))
        assert isinstance(result, Recognition)
        assert len(result.tokens) <= limit(i)
        assert result.tokens[:fixed] == draft.tokens[: min(fixed, len(result.tokens) - 1)] + result.tokens[-1:] * (
            fixed >= len(result.tokens)
        )
        assert max(longest) <= limit(i)
        longest.clear()
    expect_empty(client)


# --- the search -----------------------------------------------------------------------------------


def test_a_draft_does_not_change_what_a_row_samples(begin):
    client = begin()
    hot = SearchOptions(temperatures=(0.9,), min_avg_logprob=-1e9, max_compression_ratio=1e9, seed=11)
    for i in range(len(CLIPS)):
        plain = client.submit(CLIPS[i], hot).future.result(WAIT_S)
        drafted = client.submit(CLIPS[i], hot, draft=DraftTokens(forced_answer(i)[0])).future.result(WAIT_S)
        assert drafted.tokens == plain.tokens
        begun = client.submit(CLIPS[i], hot, draft=DraftTokens((9, 8, 7), 3)).future.result(WAIT_S)
        assert begun.tokens[:3] == (9, 8, 7)
        assert begun.temperature == 0.9


def test_temperature_fallback_keeps_accepted_tokens(begin):
    """No answer passes, so each temperature is tried, from the fixed tokens on."""
    client = begin()
    hard = SearchOptions(temperatures=(0.0, 0.5, 1.0), min_avg_logprob=0.0)
    tries = client.describe()["fallbacks"]
    for i in range(1, len(CLIPS)):
        plain = client.submit(CLIPS[i], hard).future.result(WAIT_S)
        drafted = client.submit(CLIPS[i], hard, draft=DraftTokens(forced_answer(i)[0])).future.result(WAIT_S)
        assert (drafted.tokens, drafted.temperature) == (plain.tokens, plain.temperature)
        fixed = (*forced_answer(i)[0][:2], 9, 8)
        begun = client.submit(CLIPS[i], hard, draft=DraftTokens(fixed, 4)).future.result(WAIT_S)
        assert begun.tokens[:4] == fixed
        assert len(begun.logprobs) == len(begun.tokens)
    assert client.describe()["fallbacks"] - tries == 3 * 2 * (len(CLIPS) - 1)
    expect_empty(client)


def test_every_fallback_starts_from_the_accepted_tokens(begin):
    client = begin()
    seen: list[tuple[list[int], int]] = []
    spy(
        client.backend.loop.executor.decode_runner,
        "restart_row",
        lambda row: seen.append((list(row.hypothesis.tokens), len(row.hypothesis.logprobs))),
    )
    hard = SearchOptions(temperatures=(0.0, 0.5, 1.0), min_avg_logprob=0.0)
    outcome(client.submit(CLIPS[2], hard, draft=DraftTokens((9, 8, 7, *forced_answer(2)[0]), 3)))
    assert seen == [([9, 8, 7], 3)] * 2


def hypothesis(draft: DraftTokens, limit: int = 80) -> Hypothesis:
    return Hypothesis(ONCE, 2, limit, lambda tokens: " ".join(map(str, tokens)), draft)


@settings(deadline=None)
@given(
    st.lists(st.integers(3, 6), max_size=8),
    st.lists(st.integers(3, 5), min_size=1, max_size=4),
    st.integers(1, 12),
    st.lists(st.integers(3, 5), max_size=60),
)
def test_loop_detection_never_removes_accepted_tokens(before, phrase, times, after):
    fixed = tuple(before + phrase * times)
    h = hypothesis(DraftTokens(fixed, len(fixed)), limit=200)
    for number, token in enumerate([*fixed, *after]):
        finish = h.append_token(token, -0.1)
        assert number >= len(fixed) or finish is None
        if finish:
            break
    assert tuple(h.tokens[: len(fixed)]) == fixed
    assert len(h.tokens) == len(h.logprobs)


def test_a_loop_that_continues_accepted_tokens_ends_with_them():
    fixed = (7, 8) * 10
    h = hypothesis(DraftTokens(fixed, len(fixed)))
    for token in fixed:
        assert h.append_token(token, -0.1) is None
    assert h.append_token(7, -0.1) == "repetition"
    assert tuple(h.tokens) == fixed


# --- drafts that cannot be --------------------------------------------------------------------------


def test_a_draft_that_accepts_more_tokens_than_it_has(begin):
    client = begin()
    with held(client):
        odd = client.submit(CLIPS[2], ONCE, draft=DraftTokens(forced_answer(2)[0][:3], 9))
        near = client.submit(CLIPS[2], ONCE, draft=DraftTokens(forced_answer(2)[0][:3]))
    expect_as_without(outcome(near), 2, NO_DRAFT)
    expect_as_without(outcome(odd), 2, DraftTokens(forced_answer(2)[0][:3], 3))
    expect_empty(client)


# --- real speech ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(packaged_speech: Path) -> Iterator[tuple[EngineClient, list[np.ndarray]]]:
    sound = read_audio(packaged_speech / "two_cities.wav")
    clips = [sound[at * 16_000 : (at + seconds) * 16_000] for at, seconds in ((1, 4), (5, 7), (9, 2), (14, 9))]
    with asr_serve.load("moonshine-tiny-en", dtype="fp32", engine=EngineConfig(prefix_bytes=0)) as model:
        yield model._client, clips


@pytest.mark.slow
def test_real_speech_has_the_same_tokens_with_any_draft(real):
    client, clips = real
    plain = [client.submit(pcm).future.result(WAIT_S) for pcm in clips]
    chance = random.Random(1)
    requests: list[tuple[int, DraftTokens]] = []
    for i, answer in enumerate(plain):
        before = client.submit(clips[i][: len(clips[i]) * 2 // 3], ONCE, "live").future.result(WAIT_S)
        flipped = list(answer.tokens)
        flipped[chance.randrange(len(flipped))] = 100
        several = [before.tokens, answer.tokens, tuple(flipped), plain[i - 1].tokens, (11,) * 500, ()]
        requests += [(i, DraftTokens(tokens)) for tokens in several]
        requests.append((i, DraftTokens(before.tokens, 3)))
    with held(client):
        tickets = [client.submit(clips[i], priority="live", draft=draft) for i, draft in requests]
    for (i, draft), ticket in zip(requests, tickets, strict=True):
        result = ticket.future.result(WAIT_S)
        if draft.accepted_tokens:
            assert result.tokens[: draft.accepted_tokens] == draft.tokens[: draft.accepted_tokens]
        else:
            assert result.tokens == plain[i].tokens
            assert result.avg_logprob == pytest.approx(plain[i].avg_logprob, abs=1e-3)
    expect_empty(client)


def test_accepted_tokens_of_the_greedy_answer_change_nothing(real):
    """Fixed tokens that decoding chooses anyway change nothing, however many they are."""
    client, clips = real
    plain = client.submit(clips[1]).future.result(WAIT_S)
    for fixed in range(0, len(plain.tokens) + 1, 4):
        result = client.submit(clips[1], draft=DraftTokens(plain.tokens, fixed)).future.result(WAIT_S)
        assert result.tokens == plain.tokens
