"""Cached audio, prompts and answers change when an answer comes, and never what it is."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_moonshine
import tiny_whisper
from engine_clients import fail_calls, spy
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_disk import MemoryDisk
from tiny_moonshine import WAIT_S, clip, expect_empty, held, on_loop, outcome

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.engine.cache import tiered_store
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.seq2seq.coalescing import FETCH_TIMEOUT_S
from asr_serve.errors import Cancelled, OptionError, PeerGone, StepFailed
from asr_serve.kernels import PAGE
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES

PASSES: dict[str, Any] = {"min_avg_logprob": -1e9, "max_compression_ratio": 1e9}
FAILS: dict[str, Any] = {"min_avg_logprob": 0.0, "max_no_speech": 1.0}
ONCE = SearchOptions(temperatures=(0.0,), **PASSES)
PROMPT = tuple(range(2, 42))
LENGTHS = [1_600, 16_000, 40_000, 9_000, 64_000, 30_000]
STARTS: dict[str, Callable[..., EngineClient]] = {"moonshine": tiny_moonshine.start, "whisper": tiny_whisper.start}
CLIPS = {"moonshine": [clip(seed, samples) for seed, samples in enumerate(LENGTHS)], "whisper": tiny_whisper.CLIPS}
OPTIONS = {
    "moonshine": [
        ONCE,
        SearchOptions(temperatures=(0.0,), seed=1, **PASSES),
        SearchOptions(temperatures=(0.0, 0.7), **FAILS),
        SearchOptions(temperatures=(0.8,), seed=3, **PASSES),
        SearchOptions(temperatures=(0.0,), prefix=(9, 8, 7), **PASSES),
        SearchOptions(temperatures=(0.0,), beam=3, **PASSES),
        SearchOptions(temperatures=(0.0, 0.5), beam=2, **FAILS),
    ],
    "whisper": [
        ONCE,
        SearchOptions(language="en", temperatures=(0.0,), **PASSES),
        SearchOptions(prompt=PROMPT, temperatures=(0.0,), **PASSES),
        SearchOptions(language="en", prompt=PROMPT, timestamps=True, temperatures=(0.0,), **PASSES),
        SearchOptions(prompt=PROMPT[:20], temperatures=(0.0, 0.6), **FAILS),
        SearchOptions(prompt=PROMPT, temperatures=(0.7,), seed=4, **PASSES),
        SearchOptions(prompt=PROMPT, beam=3, temperatures=(0.0,), **PASSES),
        SearchOptions(language="en", prefix=(8, 3), temperatures=(0.0,), **PASSES),
    ],
}
DRAFTS = [NO_DRAFT, DraftTokens((5, 6, 7, 8)), DraftTokens((5, 6, 7, 8), 2), DraftTokens(tuple(range(3, 23)), 18)]
Request = tuple[int, int, int]
"""Indices of a clip, of options and of a draft."""


@cache
def plain(model: str) -> EngineClient:
    """An engine without a cache."""
    return STARTS[model](prefix_bytes=0)


@cache
def expected(model: str, request: Request) -> Recognition:
    index, options, draft = request
    ticket = plain(model).submit(CLIPS[model][index], OPTIONS[model][options], draft=DRAFTS[draft])
    return ticket.future.result(WAIT_S)


@pytest.fixture(scope="module", autouse=True)
def _close_engines() -> Iterator[None]:
    yield
    for model in STARTS:
        plain(model).close()
    plain.cache_clear()
    expected.cache_clear()


@pytest.fixture
def begin(close_later: Any) -> Callable[..., EngineClient]:
    return lambda model, **wanted: close_later(poisoned(STARTS[model](**{"prefix_bytes": 64 << 20} | wanted)))


def poisoned(client: EngineClient) -> EngineClient:
    """Fill pages that nobody holds with NaN."""

    def look(loop: Any) -> None:
        runner = loop.executor.decode_runner
        runner.kv_cache[1:] = float("nan")

        def spoil(pages: Any) -> None:
            runner.kv_cache[list(pages)] = float("nan")

        runner.page_pool.on_free = spoil

    on_loop(client, look)
    return client


def expect_same(result: object, wanted: Recognition) -> None:
    assert isinstance(result, Recognition), result
    for name in ("tokens", "finish", "temperature", "language"):
        assert getattr(result, name) == getattr(wanted, name), name
    assert result.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)
    assert result.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert result.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=1e-4)
    assert result.phases is not None
    at = [result.phases.submitted_ns, result.phases.encode_start_ns, result.phases.encode_end_ns]
    assert [*at, result.phases.decode_end_ns] == sorted([*at, result.phases.decode_end_ns])


def ask(client: EngineClient, model: str, request: Request, **wanted: Any) -> Ticket:
    index, options, draft = request
    return client.submit(CLIPS[model][index], OPTIONS[model][options], draft=DRAFTS[draft], **wanted)


def encoded_batches(client: EngineClient) -> list[int]:
    """Record how many clips each batch has that is encoded from now on."""
    seen: list[int] = []
    spy(client.backend.loop.executor.encode_runner, "encode", lambda batch, *_: seen.append(len(batch)))
    return seen


def expect_answers(model: str, tickets: list[tuple[Request, Ticket]]) -> list[str]:
    """Compare answers with those of an engine without cache; return what each has reused."""
    results = [outcome(ticket) for _, ticket in tickets]
    for (request, _), result in zip(tickets, results, strict=True):
        expect_same(result, expected(model, request))
    return [result.reused for result in results]


def submit_together(client: EngineClient, model: str, requests: list[Request], **options: Any) -> list[Any]:
    """Submit requests that the loop sees at once."""
    with held(client):
        return [(request, ask(client, model, request, **options)) for request in requests]


# --- any mix --------------------------------------------------------------------------------------


def mixes(model: str) -> st.SearchStrategy[list[Any]]:
    request = st.tuples(
        st.integers(0, len(CLIPS[model]) - 1),
        st.integers(0, len(OPTIONS[model]) - 1),
        st.sampled_from([0, 0, 0, 1, 2, 3]),
    )
    priority = st.sampled_from(["live", "interactive", "bulk"])
    submit = st.tuples(st.just("ask"), request, priority)
    cancel = st.tuples(st.just("cancel"), st.integers(0, 30), st.none())
    rest = st.tuples(st.just("rest"), st.integers(1, 3), st.none())
    return st.lists(st.one_of(submit, submit, submit, submit, cancel, rest), min_size=4, max_size=24)


ROOMS = [
    {"prefix_bytes": 64 << 20},
    {"prefix_bytes": 64 << 20, "kv_bytes": 1, "max_decode_rows": 3},
    {"prefix_bytes": 300_000, "kv_bytes": 400_000},
    {"prefix_bytes": 20_000},
]
"""Enough; a pool where everything that is kept is in the way; little memory, so that most of it is given up; and
of which nothing but a few answers can be kept."""


@pytest.fixture(
    scope="module", params=[(model, room) for model in STARTS for room in range(len(ROOMS))], ids=lambda p: f"{p}"
)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, EngineClient]]:
    model, room = request.param
    client = poisoned(STARTS[model](**ROOMS[room]))
    yield model, client
    client.close()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.repeats(engine={("moonshine", 2), ("whisper", 0), ("whisper", 3)})
def test_any_mix_is_answered_as_without_a_cache(engine, data):
    model, client = engine
    mix = data.draw(mixes(model))
    tickets: list[tuple[Request, Ticket]] = []
    cancelled: set[int] = set()
    for kind, what, priority in mix:
        if kind == "ask":
            if beams(model, what) <= client.config.max_decode_rows:
                tickets.append((what, ask(client, model, what, priority=priority)))
        elif kind == "cancel" and tickets:
            number = what % len(tickets)
            client.cancel(tickets[number][1])
            cancelled.add(number)
        elif kind == "rest" and tickets:
            outcome(tickets[-what % len(tickets)][1])
    for number, (request, ticket) in enumerate(tickets):
        result = outcome(ticket)
        if number in cancelled and result is Cancelled:
            continue
        if result is OptionError and beams(model, request) > 1 and client.config.kv_bytes == 1:
            continue  # so many beams would not fit the least pool if they had it for themselves
        expect_same(result, expected(model, request))
    expect_empty(client)


def beams(model: str, request: Request) -> int:
    return OPTIONS[model][request[1]].beam


def test_the_smallest_pool_is_reclaimed_again_and_again(begin):
    client = begin("moonshine", kv_bytes=1, prefix_bytes=64 << 20)
    pages = on_loop(client, lambda loop: loop.executor.decode_runner.page_pool.pages)
    for round_ in range(3):
        for index in range(len(LENGTHS)):
            expect_same(outcome(ask(client, "moonshine", (index, round_ % 2, 0))), expected("moonshine", (index, 0, 0)))
    stats = client.describe()
    assert stats["pages"] == pages
    assert on_loop(client, lambda loop: loop.stats.evictions) > 0
    expect_empty(client)


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", STARTS)
def test_a_repeated_request_is_neither_encoded_nor_decoded(begin, model):
    client = begin(model)
    firsts = [outcome(ask(client, model, (index, 0, 0))) for index in range(6)]
    assert {result.reused for result in firsts} == {""}
    seen, steps = encoded_batches(client), client.describe()["steps"]
    for index, first in enumerate(firsts):
        again = outcome(ask(client, model, (index, 0, 1)))  # a draft changes nothing that is not fixed
        expect_same(again, expected(model, (index, 0, 0)))
        assert (again.reused, again.logprobs, again.avg_logprob) == ("answer", first.logprobs, first.avg_logprob)
    assert (seen, client.describe()["steps"]) == ([], steps)
    assert client.describe()["reused_answer"] == 6
    expect_empty(client)


def test_other_options_or_audio_are_another_answer(begin):
    client = begin("whisper")
    seen: list[str] = []
    for options in (0, 1, 3):
        for draft in (0, 2, 3):
            for _ in range(2):
                result = outcome(ask(client, "whisper", (0, options, draft)))
                expect_same(result, expected("whisper", (0, options, draft)))
                seen.append(result.reused)
    assert seen == ["", "answer"] + ["audio", "answer"] * 8
    pcm = CLIPS["whisper"][0]
    other = pcm.copy()
    other[100] += 1e-6
    for changed in (other, pcm[:-1]):
        assert client.submit(changed, ONCE).future.result(WAIT_S).reused == ""
    longer = np.pad(CLIPS["whisper"][2], (0, 10))
    assert client.submit(longer, ONCE).future.result(WAIT_S).reused == ""
    expect_empty(client)


def test_the_length_of_a_padded_clip_counts(begin):
    client = begin("moonshine")
    least = client.min_samples
    short, padded = np.zeros(least - 400, np.float32), np.zeros(least, np.float32)
    assert client.submit(short, ONCE).future.result(WAIT_S).reused == ""
    result = client.submit(padded, ONCE).future.result(WAIT_S)
    assert result.reused == "audio", "the same frames, and more that may be said"


@pytest.mark.parametrize("model", STARTS)
def test_without_a_cache_nothing_is_reused(begin, model):
    client = begin(model, prefix_bytes=0)
    seen = encoded_batches(client)
    tickets = submit_together(client, model, [(1, 0, 0)] * 3)
    tickets.append(((1, 0, 0), ask(client, model, (1, 0, 0))))
    assert expect_answers(model, tickets) == [""] * 4
    assert sum(seen) == 4
    assert client.describe()["kept_bytes"] == 0
    expect_empty(client)


# --- frames, and tokens before an answer ----------------------------------------------------------


def test_other_options_over_the_same_audio_encode_nothing(begin):
    client = begin("whisper")
    seen = encoded_batches(client)
    for options in range(len(OPTIONS["whisper"])):
        result = outcome(ask(client, "whisper", (5, options, 0)))
        expect_same(result, expected("whisper", (5, options, 0)))
        assert result.reused == ("audio" if options else "")
    assert sum(seen) == 1
    expect_empty(client)


def test_initial_tokens_are_prefilled_once(begin):
    client = begin("whisper")
    fed: list[tuple[list[int], list[int]]] = []
    spy(
        client.backend.loop.executor.decode_runner.batch,
        "prefill_inputs",
        lambda rows, feeds, firsts: fed.append(([len(feed) for feed in feeds], list(firsts))),
    )
    start = on_loop(client, lambda loop: loop.executor.decode_runner.prompts.prompt_tokens(OPTIONS["whisper"][3]))
    expect_same(outcome(ask(client, "whisper", (0, 3, 0))), expected("whisper", (0, 3, 0)))
    assert fed == [([len(start)], [1])]
    fed.clear()
    reused = len(start) // PAGE * PAGE
    assert reused >= 2 * PAGE, "the prompt must be pages long"
    # The language is detected first, of the token "start" alone; then the prompt is there already.
    expect_same(outcome(ask(client, "whisper", (0, 2, 0))), expected("whisper", (0, 2, 0)))
    assert fed == [([1], [1]), ([len(start) + 1 - reused], [1 + reused])]
    assert client.describe()["reused_positions"] == reused
    fed.clear()
    expect_same(outcome(ask(client, "whisper", (1, 3, 0))), expected("whisper", (1, 3, 0)))
    assert fed == [([len(start)], [1])], "other audio, other keys and values"
    expect_empty(client)


def test_many_samples_of_one_clip_prefill_its_prompt_once(begin):
    client = begin("whisper", max_decode_rows=12)
    options = [
        SearchOptions(prompt=PROMPT, language="en", temperatures=(0.9,), seed=seed, **PASSES) for seed in range(9)
    ]
    pcm = CLIPS["whisper"][0]
    wanted = [plain("whisper").submit(pcm, each).future.result(WAIT_S) for each in options]
    assert len({result.tokens for result in wanted}) > 4
    seen = encoded_batches(client)
    with held(client):
        tickets = [client.submit(pcm, each) for each in options]
    for ticket, result in zip(tickets, wanted, strict=True):
        expect_same(outcome(ticket), result)
    assert sum(seen) == 1
    later = SearchOptions(prompt=PROMPT, language="en", temperatures=(0.9,), seed=99, **PASSES)
    client.submit(pcm, later).future.result(WAIT_S)
    assert client.describe()["reused_positions"] > 0
    expect_empty(client)


def test_a_whole_window_is_other_audio(begin):
    """The first answer does not pass; it is asked for again with all of the silence, and both are kept."""
    client = begin("whisper", window="checked")
    seen = encoded_batches(client)
    pcm = clip(50, 4_000)
    options = [SearchOptions(language="en", temperatures=(0.0, t), seed=5, **FAILS) for t in (0.8, 0.7)]
    for each, encodes in zip(options, (2, 2), strict=True):
        result = client.submit(pcm, each).future.result(WAIT_S)
        expect_same(result, plain("whisper").submit(pcm, each).future.result(WAIT_S))
        assert sum(seen) == encodes
        assert result.reused == ("audio" if each is options[1] else "")
    expect_empty(client)


# --- at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "requests", "reused"),
    [
        ({}, [(1, 0, 0)] * 5 + [(1, 1, 0)] * 3, ["", *["answer"] * 6, "audio"]),
        ({"prefix_bytes": 20_000}, [(2, 0, 0), (2, 3, 0), (2, 5, 0), (2, 0, 0)], None),
    ],
    ids=["", "audio that cannot be cached"],
)
@pytest.mark.parametrize("model", STARTS)
def test_requests_for_one_clip_at_once_are_encoded_once(begin, model, cache, requests, reused):
    client = begin(model, max_decode_rows=8, **cache)
    seen = encoded_batches(client)
    found = expect_answers(model, submit_together(client, model, requests))
    assert sum(seen) == 1
    if reused is not None:
        assert sorted(found) == reused
    else:
        assert on_loop(client, lambda loop: loop.executor.coalescer.cache.prefix_cache.pages) == 0
    expect_empty(client)


@pytest.mark.parametrize("gone", [1, 3, 5])
def test_others_take_over_when_the_first_requests_are_cancelled(begin, gone):
    client = begin("moonshine", max_decode_rows=4)
    seen = encoded_batches(client)
    with held(client):
        tickets = [(each, ask(client, "moonshine", each)) for each in [(1, 0, 0)] * 6 + [(1, 3, 0)] * 2]
        for _, ticket in tickets[:gone]:
            client.cancel(ticket)
    assert {outcome(ticket) for _, ticket in tickets[:gone]} == {Cancelled}
    expect_answers("moonshine", tickets[gone:])
    assert sum(seen) == 1
    expect_empty(client)


def test_others_take_over_when_encoding_fails(begin):
    client = begin("moonshine")
    fail_calls(client.backend.loop.executor.encode_runner, "encode", 1, 2)
    tickets = submit_together(client, "moonshine", [(2, options, 0) for options in (0, 0, 0, 3)])
    failed = [outcome(ticket) is StepFailed for _, ticket in tickets]
    assert failed.count(True) == 2
    expect_answers("moonshine", [each for each, lost in zip(tickets, failed, strict=True) if not lost])
    expect_empty(client)


def test_the_more_urgent_request_for_one_clip_goes_first(begin):
    """Bulk work asked first; a caller wants the same: it is not behind all the bulk work there is."""
    client = begin("moonshine", max_decode_rows=4, encode_frames=1)  # each is a batch
    order: list[int] = []
    on_loop(client, lambda loop: setattr(loop.executor.requests, "on_start", order.extend))
    with held(client):
        many = [ask(client, "moonshine", (index, 1, 0), priority="bulk") for index in (0, 2, 3, 4, 5)]
        slow = ask(client, "moonshine", (1, 0, 0), priority="bulk")
        frames = ask(client, "moonshine", (1, 3, 0), priority="interactive")
        quick = ask(client, "moonshine", (1, 0, 0), priority="live")
    for ticket in [*many, slow, frames, quick]:
        assert isinstance(outcome(ticket), Recognition)
    assert order[:3] == [quick.id, frames.id, slow.id], "it goes first, and whatever waits for it depends on it"
    assert slow.id not in order[3:], "its answer was there"
    assert outcome(slow).reused == "answer"
    assert outcome(frames).reused == "audio"
    expect_empty(client)


def test_clips_that_a_lost_peer_had_are_encoded_again(begin):
    client = begin("moonshine", max_decode_rows=6)
    session = client.open_vad_session(live=True)
    counter = fail_calls(client.backend.loop.executor.encode_runner, "encode", 1, 2, 3, error=PeerGone("it is gone"))
    requests = [(index, 0, 0) for index in (0, 1, 1, 2, 3)]
    expect_answers("moonshine", submit_together(client, "moonshine", requests, priority="live"))
    assert next(counter) > 4
    session.close()
    expect_empty(client)


def test_a_request_cancelled_while_encoded_leaves_its_audio_to_others(begin):
    client = begin("moonshine")
    entered, go_on = threading.Event(), threading.Event()
    seen = encoded_batches(client)

    def pause(*_: Any) -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    spy(client.backend.loop.executor.encode_runner, "encode", pause)
    session = client.open_vad_session(live=True)
    first = ask(client, "moonshine", (1, 0, 0), priority="live")
    assert entered.wait(WAIT_S)
    in_flight = on_loop(client, lambda loop: len(loop.executor.encoder_pool.in_flight))
    assert in_flight == 1, "live audio is encoded beside the loop"
    others = [(each, ask(client, "moonshine", each, priority="live")) for each in [(1, 0, 0), (1, 3, 0)]]
    client.cancel(first)
    assert outcome(first) is Cancelled
    go_on.set()
    expect_answers("moonshine", others)
    assert sum(seen) == 1
    session.close()
    expect_empty(client)


# --- voice activity -------------------------------------------------------------------------------


def pieces(seed: int, counts: list[int]) -> list[np.ndarray]:
    pcm = clip(seed, sum(counts) * WINDOW_SAMPLES)
    return np.split(pcm, np.cumsum(counts)[:-1] * WINDOW_SAMPLES)


def vad_batches(client: EngineClient) -> list[int]:
    seen: list[int] = []
    spy(client.backend.loop.vad_runner, "step", lambda batch, _: seen.append(len(batch)))
    return seen


def probabilities(client: EngineClient, parts: list[np.ndarray]) -> list[np.ndarray]:
    session = client.open_vad_session()
    futures = [session.submit_windows(part) for part in parts]
    found = [future.result(WAIT_S) for future in futures]
    session.close()
    return found


def expect_arrays(found: list[np.ndarray], wanted: list[np.ndarray], atol: float = 0) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def test_the_same_pieces_have_the_same_probabilities_and_cost_no_step(begin):
    client = begin("moonshine")
    parts = pieces(3, [3, 8, 1, 5])
    first = probabilities(client, parts)
    seen = vad_batches(client)
    for _ in range(2):
        expect_arrays(probabilities(client, parts), first)
    assert seen == []
    first[0][:] = -1.0
    assert probabilities(client, parts)[0].min() >= 0, "what is handed out is the caller's"


def test_vad_goes_on_from_the_last_shared_piece(begin):
    client, without = begin("moonshine"), begin("moonshine", prefix_bytes=0)
    parts, others = pieces(3, [3, 8, 1, 5]), pieces(4, [8, 2, 5])
    probabilities(client, parts)
    seen = vad_batches(client)
    for known in range(len(parts)):
        mixed = parts[:known] + others
        seen.clear()
        expect_arrays(probabilities(client, mixed), probabilities(without, mixed))
        assert sum(seen) == len(others)
    seen.clear()
    probabilities(client, parts[1:])
    assert sum(seen) == len(parts) - 1, "the same piece after another past is another"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_vad_of_interleaved_sessions_equals_each_alone(data):
    client, without = plain_voice()
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    seeds = [chance.randrange(3) for _ in range(4)]
    parts = [pieces(seed, counts) for seed in seeds]
    sessions = [client.open_vad_session(live=bool(i % 2)) for i in range(4)]
    found: list[list[np.ndarray]] = [[] for _ in range(4)]
    order = [(i, part) for part in range(len(counts)) for i in range(4)]
    futures = [(i, sessions[i].submit_windows(parts[i][part])) for i, part in order]
    for i, future in futures:
        found[i].append(future.result(WAIT_S))
    for session in sessions:
        session.close()
    for i in range(4):
        expect_arrays(found[i], probabilities(without, parts[i]), atol=1e-6)
    expect_empty(client)


@cache
def plain_voice() -> tuple[EngineClient, EngineClient]:
    return tiny_moonshine.start(prefix_bytes=60_000), plain("moonshine")


@pytest.fixture(scope="module", autouse=True)
def _close_vad_engines() -> Iterator[None]:
    yield
    if plain_voice.cache_info().currsize:
        plain_voice()[0].close()
    plain_voice.cache_clear()


def test_a_failed_vad_step_is_not_cached(begin):
    client = begin("moonshine")
    parts = pieces(3, [3, 8, 5])
    fail_calls(client.backend.loop.vad_runner, "step", 2)
    session = client.open_vad_session()
    errors = [future.exception(WAIT_S) for future in [session.submit_windows(part) for part in parts]]
    assert [type(error) for error in errors] == [type(None), StepFailed, type(None)]
    session.close()
    # What came after the failure was computed without what failed.
    expect_arrays(probabilities(client, parts), probabilities(plain("moonshine"), parts))
    expect_empty(client)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cache_is_bounded_by_its_setting(begin):
    client = begin("moonshine", prefix_bytes=200_000, kv_bytes=4 << 20)
    for seed in range(40):
        pcm = clip(100 + seed, 20_000 + 100 * seed)
        client.submit(pcm, ONCE).future.result(WAIT_S)
        probabilities(client, pieces(seed, [4, 4]))
    stats = client.describe()
    assert 0 < stats["kept_bytes"] <= 200_000
    expect_empty(client)


def test_cache_metrics(begin):
    from asr_serve.metrics import EngineMetrics

    client = begin("whisper")
    metrics = EngineMetrics("tiny")
    on_loop(client, lambda loop: setattr(loop.stats, "metrics", metrics))
    for request in [(0, 3, 0), (0, 3, 0), (0, 2, 0), (1, 2, 0)]:
        expect_same(outcome(ask(client, "whisper", request)), expected("whisper", request))
    text = metrics.render().decode()
    for line in (
        'asr_serve_prefix_requests_total{found="answer",model="tiny"} 1.0',
        'asr_serve_prefix_requests_total{found="audio",model="tiny"} 1.0',
        'asr_serve_prefix_requests_total{found="none",model="tiny"} 2.0',
        'asr_serve_prefix_tokens_total{model="tiny"} 32.0',
    ):
        assert line in text, text


def test_reuse_survives_the_wire():
    result = Recognition((1, 2), -0.1, 0.0, "stop", 1.0, (-0.1, -0.1), reused="answer")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=Recognition) == result


# --- below the pages ------------------------------------------------------------------------------


def small_engine(begin: Callable[..., EngineClient], **more: Any) -> EngineClient:
    """Few clips have room in its pages; it remembers little, and has memory below that."""
    return begin("moonshine", prefix_bytes=200_000, kv_bytes=200_000, host_bytes=4 << 20, **more)


def fill_cache(client: EngineClient) -> None:
    for seed in range(12):
        client.submit(clip(300 + seed, 40_000), ONCE).future.result(WAIT_S)


def test_offloaded_audio_that_was_reused_is_fetched(begin):
    client = small_engine(begin)
    seen = encoded_batches(client)
    request = [(2, options, 0) for options in (0, 3, 4, 5)]
    for number, each in enumerate(request):
        result = outcome(ask(client, "moonshine", each))
        expect_same(result, expected("moonshine", each))
        assert result.reused == ("audio" if number else "")
        seen.clear()
        if number:
            fill_cache(client)
            assert on_loop(client, lambda loop: len(loop.executor.coalescer.cache.prefix_cache)) < 12
            assert on_loop(client, lambda loop: loop.stats.evictions) > 5
    expect_empty(client)


def test_offloaded_audio_in_8_bits_is_fetched(begin):
    """Their pages have another layout, and nothing of whoever had them before goes along."""

    def in_8_bits(client: EngineClient) -> EngineClient:
        assert client.describe()["cross_kv"] == "fp32"
        on_loop(client, lambda loop: setattr(loop.executor.decode_runner.decoder, "int8_audio", True))
        assert client.describe()["cross_kv"] == "int8"
        return client

    plain, client = in_8_bits(begin("moonshine", prefix_bytes=0)), in_8_bits(small_engine(begin))
    requests = [(2, options, 0) for options in (0, 3, 4, 5)]
    wanted = [outcome(ask(plain, "moonshine", each)) for each in requests]
    for number, (each, answer) in enumerate(zip(requests, wanted, strict=True)):
        result = outcome(ask(client, "moonshine", each))
        assert (result.tokens, result.logprobs) == (answer.tokens, answer.logprobs)
        assert result.reused == ("audio" if number else "")
        if number:  # what was reused is worth offloading
            fill_cache(client)
    expect_empty(client)


@pytest.mark.parametrize("how", ["lost", "broken"])
def test_lost_offloaded_audio_is_encoded_again(begin, how):
    client = small_engine(begin)
    offload_audio(client)

    def lose(loop: Any) -> None:
        cache = loop.executor.coalescer.cache
        assert len(cache._offload.describe()) > 0
        parts = None if how == "lost" else [bytes(8), bytes(cache._page_bytes + 4)]
        cache.fetch_offloaded = lambda root, result: threading.Timer(0.05, result, [parts]).start()

    on_loop(client, lose)
    seen = encoded_batches(client)
    expect_answers("moonshine", submit_together(client, "moonshine", [(2, 4, 0), (2, 5, 0), (2, 4, 0)]))
    assert sum(seen) == 1
    expect_empty(client)


def test_others_take_over_when_a_request_is_cancelled_during_a_fetch(begin):
    client = small_engine(begin)
    offload_audio(client)
    come: list[Callable[[], None]] = []

    def delay(loop: Any) -> None:
        cache = loop.executor.coalescer.cache
        fetch = cache.fetch_offloaded
        cache.fetch_offloaded = lambda root, result: come.append(lambda: fetch(root, result))

    on_loop(client, delay)
    gone = ask(client, "moonshine", (2, 4, 0))
    stays = ask(client, "moonshine", (2, 5, 0))
    on_loop(client, lambda loop: None)
    assert len(come) == 1
    client.cancel(gone)
    assert outcome(gone) is Cancelled
    expect_same(outcome(stays), expected("moonshine", (2, 5, 0)))
    on_loop(client, lambda loop: come[0]())
    expect_empty(client)


def offload_audio(client: EngineClient) -> bytes:
    """Root of audio that was moved to the offload store."""
    for each in [(2, 0, 0), (2, 3, 0)]:
        expect_same(outcome(ask(client, "moonshine", each)), expected("moonshine", each))
    fill_cache(client)

    def find(loop: Any) -> bytes:
        cache = loop.executor.coalescer.cache
        (root,) = cache._reused_keys._entries
        assert cache.is_offloaded(root)
        return root

    return on_loop(client, find)


def test_audio_on_a_stuck_disk_is_encoded_again(begin, monkeypatch):
    disk, answers, asked_for = MemoryDisk(8 << 20), threading.Event(), threading.Event()
    monkeypatch.setattr(tiered_store, "open_disk", lambda *_: disk)
    settings = {"prefix_bytes": 200_000, "kv_bytes": 200_000, "host_bytes": 1 << 20, "disk_bytes": 8 << 20}
    client = begin("moonshine", **settings)
    root = offload_audio(client)

    def in_file_only(loop: Any) -> bool:
        index = loop.executor.coalescer.cache._offload._index
        (entry,) = [each for name, each in index.entries.items() if name.endswith(root)]
        return entry.memory is None and entry.file is not None

    for number in itertools.count():  # others want the host's memory
        name = b"other %d" % number
        on_loop(
            client,
            lambda loop, name=name: loop.executor.coalescer.cache._offload.put(name, [bytes(99_999)], pinned=True),
        )
        if on_loop(client, in_file_only):
            break
        assert number < 60
        time.sleep(0.01)

    def stuck() -> None:
        asked_for.set()
        assert answers.wait(WAIT_S)

    disk.between = stuck
    seen = encoded_batches(client)
    tickets = [(2, options, 0) for options in (4, 5, 4)]
    try:
        waiting = submit_together(client, "moonshine", tickets)
        expect_answers("moonshine", waiting)
        assert asked_for.is_set(), "the disk was asked"
        assert sum(seen) == 1, "for all of them at once"
    finally:
        answers.set()
    phases = outcome(waiting[0][1]).phases
    assert (phases.encode_start_ns - phases.submitted_ns) / 1e9 >= FETCH_TIMEOUT_S, "it might have come"
    expect_same(outcome(ask(client, "moonshine", (2, 1, 0))), expected("moonshine", (2, 1, 0)))
    assert sum(seen) == 1
    expect_empty(client)


def test_offloaded_audio_holds_nothing_of_former_pages(begin):
    """Its last page is not full, and what nobody holds is no number here."""
    client = small_engine(begin)
    root = offload_audio(client)

    def look(loop: Any) -> None:
        cache, runner = loop.executor.coalescer.cache, loop.executor.decode_runner
        result: list[list[memoryview]] = []
        cache.fetch_offloaded(root, result.append)
        ((head, data),) = result
        frames = int.from_bytes(head, "little")
        assert frames % PAGE
        layers, _, heads, block = runner.kv_cache.shape[1:]
        pages = np.frombuffer(data, np.float32).reshape(-1, layers, 2, heads, block)
        assert np.isfinite(pages).all()
        keys = pages[:, :, 0].reshape(-1, layers, heads, block // PAGE, PAGE)
        values = pages[:, :, 1].reshape(-1, layers, heads, PAGE, block // PAGE)
        held = frames % PAGE
        assert not keys[-1, ..., held:].any()
        assert not values[-1, :, :, held:].any()
        assert keys[-1, ..., :held].all(axis=(0, 1, 2)).all(), "what it heard is there"
        assert values[-1, :, :, :held].all(axis=(0, 1, 3)).all()

    on_loop(client, look)
    expect_empty(client)


def test_fetched_audio_is_read_in_place(begin):
    """And nobody looks at it any more when it is there."""
    client = small_engine(begin)
    root = offload_audio(client)

    def restore(loop: Any) -> None:
        cache, pool = loop.executor.coalescer.cache, loop.executor.decode_runner.page_pool
        result: list[list[memoryview]] = []
        cache.fetch_offloaded(root, result.append)
        nbytes = len(result[0][1])
        tracemalloc.start()
        try:
            cache.insert_fetched(root, result[0], pool.free_count)
            assert tracemalloc.get_traced_memory()[1] < nbytes // 2
        finally:
            tracemalloc.stop()
        assert root in cache.prefix_cache
        assert cache._offload._index.returned.empty()
        result.clear()
        assert not cache._offload._index.returned.empty(), "somebody looks at it still"

    on_loop(client, restore)
    seen = encoded_batches(client)
    expect_same(outcome(ask(client, "moonshine", (2, 4, 0))), expected("moonshine", (2, 4, 0)))
    assert seen == []
    expect_empty(client)


# --- too little memory for one recording --------------------------------------------------------------


def test_too_little_memory_for_one_recording_is_warned_about(begin, caplog):
    with caplog.at_level(logging.WARNING):
        begin("moonshine", prefix_bytes=20_000)
    (record,) = [record for record in caplog.records if "prefix_bytes=20000" in record.getMessage()]
    least = record.args[-1]
    assert str(least) in record.getMessage()
    caplog.clear()
    client = begin("moonshine", prefix_bytes=least, kv_bytes=4 << 20)
    begin("moonshine", prefix_bytes=0)
    assert not [record for record in caplog.records if "prefix_bytes" in record.getMessage()]
    longest = clip(70, tiny_moonshine.MAX_SAMPLES)
    assert client.submit(longest, ONCE).future.result(WAIT_S).reused == ""
    assert client.submit(longest, OPTIONS["moonshine"][3]).future.result(WAIT_S).reused == "audio"
