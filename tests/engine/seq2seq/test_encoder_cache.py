"""What was heard before changes when an answer comes, and never what it says."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_disk import MemoryDisk
from tiny_moonshine import WAIT_S, clip, expect_empty, held, on_loop, outcome

from asr_serve.decoding.seq2seq import NO_DRAFT, DraftTokens, Recognition, SearchOptions
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
Asked = tuple[int, int, int]
"""Which clip, which options, which draft."""


@cache
def plain(model: str) -> EngineClient:
    """It remembers nothing."""
    return STARTS[model](prefix_bytes=0)


@cache
def expected(model: str, asked: Asked) -> Recognition:
    index, options, draft = asked
    ticket = plain(model).submit(CLIPS[model][index], OPTIONS[model][options], draft=DRAFTS[draft])
    return ticket.future.result(WAIT_S)


@pytest.fixture(scope="module", autouse=True)
def _over() -> Iterator[None]:
    yield
    for model in STARTS:
        plain(model).close()
    plain.cache_clear()
    expected.cache_clear()


@pytest.fixture
def begin() -> Iterator[Callable[..., EngineClient]]:
    started: list[EngineClient] = []

    def starting(model: str, **wanted: Any) -> EngineClient:
        started.append(poisoned(STARTS[model](**{"prefix_bytes": 64 << 20} | wanted)))
        return started[-1]

    yield starting
    for client in started:
        client.close()


def poisoned(client: EngineClient) -> EngineClient:
    """Whatever nobody holds is no number."""

    def look(loop: Any) -> None:
        runner = loop.executor.decode_runner
        runner.kv_cache[1:] = float("nan")

        def spoil(pages: Any) -> None:
            runner.kv_cache[list(pages)] = float("nan")

        runner.page_pool.on_free = spoil

    on_loop(client, look)
    return client


def expect_same(came: object, wanted: Recognition) -> None:
    assert isinstance(came, Recognition), came
    for name in ("tokens", "finish", "temperature", "language"):
        assert getattr(came, name) == getattr(wanted, name), name
    assert came.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)
    assert came.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert came.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=1e-4)
    assert came.phases is not None
    at = [came.phases.submitted_ns, came.phases.encode_start_ns, came.phases.encode_end_ns]
    assert [*at, came.phases.decode_end_ns] == sorted([*at, came.phases.decode_end_ns])


def ask(client: EngineClient, model: str, asked: Asked, **wanted: Any) -> Ticket:
    index, options, draft = asked
    return client.submit(CLIPS[model][index], OPTIONS[model][options], draft=DRAFTS[draft], **wanted)


def counted(client: EngineClient) -> list[int]:
    """How many clips each batch has that is encoded from now on."""
    seen: list[int] = []

    def watch(loop: Any) -> None:
        runner = loop.executor.encode_runner
        run = runner.encode

        def spy(batch: Any, whole: Any = ()) -> Any:
            seen.append(len(batch))
            return run(batch, whole)

        runner.encode = spy

    on_loop(client, watch)
    return seen


# --- any mix --------------------------------------------------------------------------------------


def mixes(model: str) -> st.SearchStrategy[list[Any]]:
    asked = st.tuples(
        st.integers(0, len(CLIPS[model]) - 1),
        st.integers(0, len(OPTIONS[model]) - 1),
        st.sampled_from([0, 0, 0, 1, 2, 3]),
    )
    priority = st.sampled_from(["live", "interactive", "bulk"])
    submit = st.tuples(st.just("ask"), asked, priority)
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
def test_any_mix_is_answered_as_without_memory(engine, data):
    model, client = engine
    mix = data.draw(mixes(model))
    tickets: list[tuple[Asked, Ticket]] = []
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
    for number, (asked, ticket) in enumerate(tickets):
        came = outcome(ticket)
        if number in cancelled and came is Cancelled:
            continue
        if came is OptionError and beams(model, asked) > 1 and client.config.kv_bytes == 1:
            continue  # so many beams would not fit the least pool if they had it for themselves
        expect_same(came, expected(model, asked))
    expect_empty(client)


def beams(model: str, asked: Asked) -> int:
    return OPTIONS[model][asked[1]].beam


def test_a_pool_of_the_least_size_is_reclaimed_again_and_again(begin):
    client = begin("moonshine", kv_bytes=1, prefix_bytes=64 << 20)
    pages = on_loop(client, lambda loop: loop.executor.decode_runner.page_pool.pages)
    for round_ in range(3):
        for index in range(len(LENGTHS)):
            expect_same(
                outcome(ask(client, "moonshine", (index, round_ % 2, 0))), expected("moonshine", (index, 0, 0))
            )
    told = client.describe()
    assert told["pages"] == pages
    assert on_loop(client, lambda loop: loop.stats.evictions) > 0
    expect_empty(client)


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", STARTS)
def test_the_same_again_is_answered_without_encoding_or_decoding(begin, model):
    client = begin(model)
    firsts = [outcome(ask(client, model, (index, 0, 0))) for index in range(6)]
    assert {came.reused for came in firsts} == {""}
    seen, steps = counted(client), client.describe()["steps"]
    for index, first in enumerate(firsts):
        again = outcome(ask(client, model, (index, 0, 1)))  # a draft changes nothing that is not fixed
        expect_same(again, expected(model, (index, 0, 0)))
        assert (again.reused, again.logprobs, again.avg_logprob) == ("answer", first.logprobs, first.avg_logprob)
    assert (seen, client.describe()["steps"]) == ([], steps)
    assert client.describe()["reused_answer"] == 6
    expect_empty(client)


def test_what_differs_is_another_answer(begin):
    client = begin("whisper")
    seen: list[str] = []
    for options in (0, 1, 3):
        for draft in (0, 2, 3):
            for _ in range(2):
                came = outcome(ask(client, "whisper", (0, options, draft)))
                expect_same(came, expected("whisper", (0, options, draft)))
                seen.append(came.reused)
    assert seen == ["", "answer"] + ["audio", "answer"] * 8
    pcm = CLIPS["whisper"][0]
    other = pcm.copy()
    other[100] += 1e-6
    for changed in (other, pcm[:-1]):
        assert client.submit(changed, ONCE).future.result(WAIT_S).reused == ""
    longer = np.pad(CLIPS["whisper"][2], (0, 10))
    assert client.submit(longer, ONCE).future.result(WAIT_S).reused == ""
    expect_empty(client)


def test_how_long_a_clip_is_counts_though_it_is_padded_alike(begin):
    client = begin("moonshine")
    least = client.min_samples
    short, padded = np.zeros(least - 400, np.float32), np.zeros(least, np.float32)
    assert client.submit(short, ONCE).future.result(WAIT_S).reused == ""
    came = client.submit(padded, ONCE).future.result(WAIT_S)
    assert came.reused == "audio", "the same frames, and more that may be said"


@pytest.mark.parametrize("model", STARTS)
def test_without_memory_nothing_is_known(begin, model):
    client = begin(model, prefix_bytes=0)
    seen = counted(client)
    with held(client):
        tickets = [ask(client, model, (1, 0, 0)) for _ in range(3)]
    tickets.append(ask(client, model, (1, 0, 0)))
    for ticket in tickets:
        came = outcome(ticket)
        expect_same(came, expected(model, (1, 0, 0)))
        assert came.reused == ""
    assert sum(seen) == 4
    assert client.describe()["kept_bytes"] == 0
    expect_empty(client)


# --- frames, and tokens before an answer ----------------------------------------------------------


def test_other_options_over_the_same_audio_encode_nothing(begin):
    client = begin("whisper")
    seen = counted(client)
    for options in range(len(OPTIONS["whisper"])):
        came = outcome(ask(client, "whisper", (5, options, 0)))
        expect_same(came, expected("whisper", (5, options, 0)))
        assert came.reused == ("audio" if options else "")
    assert sum(seen) == 1
    expect_empty(client)


def test_what_is_read_first_is_fed_once(begin):
    client = begin("whisper")
    fed: list[tuple[list[int], list[int]]] = []
    seats = client.backend.loop.executor.decode_runner.batch
    ahead = seats.prefill_inputs

    def watched(rows, feeds, firsts):
        fed.append(([len(feed) for feed in feeds], list(firsts)))
        return ahead(rows, feeds, firsts)

    seats.prefill_inputs = watched
    start = on_loop(client, lambda loop: loop.executor.decode_runner.prompts.prompt_tokens(OPTIONS["whisper"][3]))
    expect_same(outcome(ask(client, "whisper", (0, 3, 0))), expected("whisper", (0, 3, 0)))
    assert fed == [([len(start)], [1])]
    fed.clear()
    reused = len(start) // PAGE * PAGE
    assert reused >= 2 * PAGE, "the prompt must be pages long"
    # The language is heard first, of the token "start" alone; then what was said before is there already.
    expect_same(outcome(ask(client, "whisper", (0, 2, 0))), expected("whisper", (0, 2, 0)))
    assert fed == [([1], [1]), ([len(start) + 1 - reused], [1 + reused])]
    assert client.describe()["reused_positions"] == reused
    fed.clear()
    expect_same(outcome(ask(client, "whisper", (1, 3, 0))), expected("whisper", (1, 3, 0)))
    assert fed == [([len(start)], [1])], "other audio, other keys and values"
    expect_empty(client)


def test_many_samples_of_one_clip_read_its_prompt_once(begin):
    client = begin("whisper", max_decode_rows=12)
    options = [
        SearchOptions(prompt=PROMPT, language="en", temperatures=(0.9,), seed=seed, **PASSES) for seed in range(9)
    ]
    pcm = CLIPS["whisper"][0]
    wanted = [plain("whisper").submit(pcm, each).future.result(WAIT_S) for each in options]
    assert len({came.tokens for came in wanted}) > 4
    seen = counted(client)
    with held(client):
        tickets = [client.submit(pcm, each) for each in options]
    for ticket, came in zip(tickets, wanted, strict=True):
        expect_same(outcome(ticket), came)
    assert sum(seen) == 1
    later = SearchOptions(prompt=PROMPT, language="en", temperatures=(0.9,), seed=99, **PASSES)
    client.submit(pcm, later).future.result(WAIT_S)
    assert client.describe()["reused_positions"] > 0
    expect_empty(client)


def test_a_window_heard_whole_is_other_audio(begin):
    """The first answer does not pass; it is asked for again with all of the silence, and both are kept."""
    client = begin("whisper", window="checked")
    seen = counted(client)
    pcm = clip(50, 4_000)
    options = [SearchOptions(language="en", temperatures=(0.0, t), seed=5, **FAILS) for t in (0.8, 0.7)]
    for each, encodes in zip(options, (2, 2), strict=True):
        came = client.submit(pcm, each).future.result(WAIT_S)
        expect_same(came, plain("whisper").submit(pcm, each).future.result(WAIT_S))
        assert sum(seen) == encodes
        assert came.reused == ("audio" if each is options[1] else "")
    expect_empty(client)


# --- at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", STARTS)
def test_what_many_ask_at_once_is_encoded_and_decoded_once(begin, model):
    client = begin(model, max_decode_rows=8)
    seen = counted(client)
    with held(client):
        tickets = [(asked, ask(client, model, asked)) for asked in [(1, 0, 0)] * 5 + [(1, 1, 0)] * 3]
    reused = []
    for asked, ticket in tickets:
        came = outcome(ticket)
        expect_same(came, expected(model, asked))
        reused.append(came.reused)
    assert sum(seen) == 1
    assert sorted(reused) == ["", *["answer"] * 6, "audio"]
    expect_empty(client)


@pytest.mark.parametrize("gone", [1, 3, 5])
def test_whoever_goes_first_and_leaves_is_followed(begin, gone):
    client = begin("moonshine", max_decode_rows=4)
    seen = counted(client)
    with held(client):
        tickets = [ask(client, "moonshine", (1, 0, 0)) for _ in range(6)]
        others = [ask(client, "moonshine", (1, 3, 0)) for _ in range(2)]
        for ticket in tickets[:gone]:
            client.cancel(ticket)
    assert {outcome(ticket) for ticket in tickets[:gone]} == {Cancelled}
    for ticket in tickets[gone:]:
        expect_same(outcome(ticket), expected("moonshine", (1, 0, 0)))
    for ticket in others:
        expect_same(outcome(ticket), expected("moonshine", (1, 3, 0)))
    assert sum(seen) == 1
    expect_empty(client)


def test_whoever_fails_is_followed(begin):
    client = begin("moonshine")
    failures = 2

    def spoil(loop: Any) -> None:
        run = loop.executor.encode_runner.encode

        def failing(*arguments: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise RuntimeError("the device hiccuped")
            return run(*arguments)

        loop.executor.encode_runner.encode = failing

    on_loop(client, spoil)
    with held(client):
        tickets = [ask(client, "moonshine", (2, options, 0)) for options in (0, 0, 0, 3)]
    came = [outcome(ticket) for ticket in tickets]
    assert came.count(StepFailed) == 2
    for ticket, one, options in zip(tickets, came, (0, 0, 0, 3), strict=True):
        if one is not StepFailed:
            expect_same(outcome(ticket), expected("moonshine", (2, options, 0)))
    expect_empty(client)


def test_who_has_less_time_goes_before_who_asked_first(begin):
    """Bulk work asked first; a caller wants the same: it is not behind all the bulk work there is."""
    client = begin("moonshine", max_decode_rows=4, encode_frames=100)
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


def test_what_a_peer_lost_is_encoded_again(begin):
    client = begin("moonshine", max_decode_rows=6)
    losses = 3

    def spoil(loop: Any) -> None:
        run = loop.executor.encode_runner.encode

        def losing(*arguments: Any) -> Any:
            nonlocal losses
            losses -= 1
            if losses >= 0:
                raise PeerGone("the peer is gone")
            return run(*arguments)

        loop.executor.encode_runner.encode = losing

    session = client.open_vad_session(live=True)
    on_loop(client, spoil)
    with held(client):
        tickets = [ask(client, "moonshine", (index, 0, 0), priority="live") for index in (0, 1, 1, 2, 3)]
    for ticket, index in zip(tickets, (0, 1, 1, 2, 3), strict=True):
        expect_same(outcome(ticket), expected("moonshine", (index, 0, 0)))
    assert losses < 0
    session.close()
    expect_empty(client)


def test_who_leaves_while_it_is_encoded_leaves_that_to_others(begin):
    client = begin("moonshine")
    entered, go_on = threading.Event(), threading.Event()
    seen = counted(client)

    def slow(loop: Any) -> None:
        runner = loop.executor.encode_runner
        run = runner.encode

        def waiting(*arguments: Any) -> Any:
            entered.set()
            assert go_on.wait(WAIT_S)
            return run(*arguments)

        runner.encode = waiting

    on_loop(client, slow)
    session = client.open_vad_session(live=True)
    first = ask(client, "moonshine", (1, 0, 0), priority="live")
    assert entered.wait(WAIT_S)
    beside = on_loop(client, lambda loop: len(loop.executor.encoder_pool.in_flight))
    assert beside == 1, "callers on line are encoded for beside the loop"
    second = ask(client, "moonshine", (1, 0, 0), priority="live")
    third = ask(client, "moonshine", (1, 3, 0), priority="live")
    client.cancel(first)
    assert outcome(first) is Cancelled
    go_on.set()
    expect_same(outcome(second), expected("moonshine", (1, 0, 0)))
    expect_same(outcome(third), expected("moonshine", (1, 3, 0)))
    assert sum(seen) == 1
    session.close()
    expect_empty(client)


# --- voice activity -------------------------------------------------------------------------------


def pieces(seed: int, counts: list[int]) -> list[np.ndarray]:
    pcm = clip(seed, sum(counts) * WINDOW_SAMPLES)
    return np.split(pcm, np.cumsum(counts)[:-1] * WINDOW_SAMPLES)


def steps(client: EngineClient) -> list[int]:
    seen: list[int] = []

    def watch(loop: Any) -> None:
        run = loop.vad_runner.step

        def spy(batch: Any) -> Any:
            seen.append(len(batch))
            return run(batch)

        loop.vad_runner.step = spy

    on_loop(client, watch)
    return seen


def hear(client: EngineClient, parts: list[np.ndarray]) -> list[np.ndarray]:
    session = client.open_vad_session()
    futures = [session.submit_windows(part) for part in parts]
    found = [future.result(WAIT_S) for future in futures]
    session.close()
    return found


def test_the_same_pieces_have_the_same_probabilities_and_cost_no_step(begin):
    client = begin("moonshine")
    parts = pieces(3, [3, 8, 1, 5])
    first = hear(client, parts)
    seen = steps(client)
    for _ in range(2):
        for one, other in zip(hear(client, parts), first, strict=True):
            assert np.array_equal(one, other)
    assert seen == []
    first[0][:] = -1.0
    assert hear(client, parts)[0].min() >= 0, "what is handed out is the caller's"


def test_whoever_goes_another_way_is_heard_on_from_there(begin):
    client, without = begin("moonshine"), begin("moonshine", prefix_bytes=0)
    parts, others = pieces(3, [3, 8, 1, 5]), pieces(4, [8, 2, 5])
    hear(client, parts)
    seen = steps(client)
    for known in range(len(parts)):
        mixed = parts[:known] + others
        seen.clear()
        for one, other in zip(hear(client, mixed), hear(without, mixed), strict=True):
            assert np.array_equal(one, other)
        assert sum(seen) == len(others)
    seen.clear()
    hear(client, parts[1:])
    assert sum(seen) == len(parts) - 1, "the same piece after another past is another"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_voices_in_any_company(data):
    client, without = plain_voice()
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    seeds = [chance.randrange(3) for _ in range(4)]
    parts = [pieces(seed, counts) for seed in seeds]
    sessions = [client.open_vad_session(live=bool(i % 2)) for i in range(4)]
    found: list[list[np.ndarray]] = [[] for _ in range(4)]
    waiting = [(i, part) for part in range(len(counts)) for i in range(4)]
    futures = [(i, sessions[i].submit_windows(parts[i][part])) for i, part in waiting]
    for i, future in futures:
        found[i].append(future.result(WAIT_S))
    for session in sessions:
        session.close()
    for i in range(4):
        assert all(
            np.allclose(one, other, atol=1e-6)
            for one, other in zip(found[i], hear(without, parts[i]), strict=True)
        )
    expect_empty(client)


@cache
def plain_voice() -> tuple[EngineClient, EngineClient]:
    return tiny_moonshine.start(prefix_bytes=60_000), plain("moonshine")


@pytest.fixture(scope="module", autouse=True)
def _voices_over() -> Iterator[None]:
    yield
    if plain_voice.cache_info().currsize:
        plain_voice()[0].close()
    plain_voice.cache_clear()


def test_a_step_that_fails_is_not_remembered(begin):
    client = begin("moonshine")
    parts = pieces(3, [3, 8, 5])

    def spoil(loop: Any) -> None:
        run, calls = loop.vad_runner.step, []

        def failing(batch: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("the device hiccuped")
            return run(batch)

        loop.vad_runner.step = failing

    on_loop(client, spoil)
    session = client.open_vad_session()
    futures = [session.submit_windows(part) for part in parts]
    came = [future.exception(WAIT_S) for future in futures]
    assert [type(error) for error in came] == [type(None), StepFailed, type(None)]
    session.close()
    right = hear(plain("moonshine"), parts)
    for one, other in zip(hear(client, parts), right, strict=True):
        assert np.array_equal(one, other), "what came after the failure was heard without what failed"
    expect_empty(client)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_kept_is_bounded_by_its_setting(begin):
    client = begin("moonshine", prefix_bytes=200_000, kv_bytes=4 << 20)
    for seed in range(40):
        pcm = clip(100 + seed, 20_000 + 100 * seed)
        client.submit(pcm, ONCE).future.result(WAIT_S)
        hear(client, pieces(seed, [4, 4]))
    told = client.describe()
    assert 0 < told["kept_bytes"] <= 200_000
    expect_empty(client)


def test_what_the_metrics_say(begin):
    from asr_serve.metrics import EngineMetrics

    client = begin("whisper")
    metrics = EngineMetrics("tiny")
    on_loop(client, lambda loop: setattr(loop.stats, "metrics", metrics))
    for asked in [(0, 3, 0), (0, 3, 0), (0, 2, 0), (1, 2, 0)]:
        expect_same(outcome(ask(client, "whisper", asked)), expected("whisper", asked))
    text = metrics.render().decode()
    for line in (
        'asr_serve_prefix_requests_total{found="answer",model="tiny"} 1.0',
        'asr_serve_prefix_requests_total{found="audio",model="tiny"} 1.0',
        'asr_serve_prefix_requests_total{found="none",model="tiny"} 2.0',
        'asr_serve_prefix_tokens_total{model="tiny"} 32.0',
    ):
        assert line in text, text


def test_an_answer_is_a_fact_of_the_wire_too():
    came = Recognition((1, 2), -0.1, 0.0, "stop", 1.0, (-0.1, -0.1), reused="answer")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(came), type=Recognition) == came


# --- below the pages ------------------------------------------------------------------------------


def small(begin: Callable[..., EngineClient], **more: Any) -> EngineClient:
    """Few clips have room in its pages; it remembers little, and has memory below that."""
    return begin("moonshine", prefix_bytes=200_000, kv_bytes=200_000, host_bytes=4 << 20, **more)


def crowd(client: EngineClient) -> None:
    for seed in range(12):
        client.submit(clip(300 + seed, 40_000), ONCE).future.result(WAIT_S)


def test_audio_that_came_again_and_gave_way_comes_back(begin):
    client = small(begin)
    seen = counted(client)
    asked = [(2, options, 0) for options in (0, 3, 4, 5)]
    for number, each in enumerate(asked):
        came = outcome(ask(client, "moonshine", each))
        expect_same(came, expected("moonshine", each))
        assert came.reused == ("audio" if number else "")
        seen.clear()
        if number:
            crowd(client)
            assert on_loop(client, lambda loop: len(loop.executor.coalescer.cache.prefix_cache)) < 12
            assert on_loop(client, lambda loop: loop.stats.evictions) > 5
    expect_empty(client)


@pytest.mark.parametrize("how", ["lost", "broken"])
def test_audio_that_is_lost_below_is_encoded_again(begin, how):
    client = small(begin)
    for each in [(2, 0, 0), (2, 3, 0)]:
        expect_same(outcome(ask(client, "moonshine", each)), expected("moonshine", each))
    crowd(client)

    def lose(loop: Any) -> None:
        kept = loop.executor.coalescer.cache
        assert len(kept._offload.describe()) > 0
        parts = None if how == "lost" else [bytes(8), bytes(kept._page_bytes + 4)]
        kept.fetch_offloaded = lambda root, came: threading.Timer(0.05, came, [parts]).start()

    on_loop(client, lose)
    seen = counted(client)
    with held(client):
        tickets = [(each, ask(client, "moonshine", each)) for each in [(2, 4, 0), (2, 5, 0), (2, 4, 0)]]
    for each, ticket in tickets:
        expect_same(outcome(ticket), expected("moonshine", each))
    assert sum(seen) == 1
    expect_empty(client)


def test_who_leaves_while_its_audio_is_on_its_way_is_followed(begin):
    client = small(begin)
    for each in [(2, 0, 0), (2, 3, 0)]:
        expect_same(outcome(ask(client, "moonshine", each)), expected("moonshine", each))
    crowd(client)
    come: list[Callable[[], None]] = []

    def delay(loop: Any) -> None:
        kept = loop.executor.coalescer.cache
        fetch = kept.fetch_offloaded
        kept.fetch_offloaded = lambda root, came: come.append(lambda: fetch(root, came))

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


def gave_way(client: EngineClient) -> bytes:
    """The name of audio that lies in the tiers."""
    for each in [(2, 0, 0), (2, 3, 0)]:
        expect_same(outcome(ask(client, "moonshine", each)), expected("moonshine", each))
    crowd(client)

    def find(loop: Any) -> bytes:
        kept = loop.executor.coalescer.cache
        (root,) = kept._reused_keys._entries
        assert kept.is_offloaded(root)
        return root

    return on_loop(client, find)


def test_a_disk_that_never_answers_is_given_up_and_the_audio_encoded_again(begin, monkeypatch):
    disk, answers, asked_for = MemoryDisk(8 << 20), threading.Event(), threading.Event()
    monkeypatch.setattr(tiered_store, "open_disk", lambda *_: disk)
    settings = {"prefix_bytes": 200_000, "kv_bytes": 200_000, "host_bytes": 1 << 20, "disk_bytes": 8 << 20}
    client = begin("moonshine", **settings)
    root = gave_way(client)

    def in_file_only(loop: Any) -> bool:
        shelves = loop.executor.coalescer.cache._offload._index
        (entry,) = [each for name, each in shelves.entries.items() if name.endswith(root)]
        return entry.memory is None and entry.file is not None

    for number in itertools.count():  # others want the host's memory
        name = b"other %d" % number
        on_loop(
            client,
            lambda loop, name=name: loop.executor.coalescer.cache._offload.put(name, [bytes(99_999)], keep=True),
        )
        if on_loop(client, in_file_only):
            break
        assert number < 60
        time.sleep(0.01)

    def stuck() -> None:
        asked_for.set()
        assert answers.wait(WAIT_S)

    disk.between = stuck
    seen = counted(client)
    tickets = [(2, options, 0) for options in (4, 5, 4)]
    try:
        with held(client):
            waiting = [(each, ask(client, "moonshine", each)) for each in tickets]
        for each, ticket in waiting:
            expect_same(outcome(ticket), expected("moonshine", each))
        assert asked_for.is_set(), "the disk was asked"
        assert sum(seen) == 1, "for all of them at once"
    finally:
        answers.set()
    phases = outcome(waiting[0][1]).phases
    assert (phases.encode_start_ns - phases.submitted_ns) / 1e9 >= FETCH_TIMEOUT_S, "it might have come"
    expect_same(outcome(ask(client, "moonshine", (2, 1, 0))), expected("moonshine", (2, 1, 0)))
    assert sum(seen) == 1
    expect_empty(client)


def test_what_gave_way_holds_nothing_of_who_had_its_pages_before(begin):
    """Its last page is not full, and what nobody holds is no number here."""
    client = small(begin)
    root = gave_way(client)

    def look(loop: Any) -> None:
        kept, runner = loop.executor.coalescer.cache, loop.executor.decode_runner
        came: list[list[memoryview]] = []
        kept.fetch_offloaded(root, came.append)
        ((head, data),) = came
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


def test_what_comes_back_is_read_where_it_lies(begin):
    """And nobody looks at it any more when it is there."""
    client = small(begin)
    root = gave_way(client)

    def restore(loop: Any) -> None:
        kept, pool = loop.executor.coalescer.cache, loop.executor.decode_runner.page_pool
        came: list[list[memoryview]] = []
        kept.fetch_offloaded(root, came.append)
        nbytes = len(came[0][1])
        tracemalloc.start()
        try:
            kept.insert_fetched(root, came[0], pool.free_count)
            assert tracemalloc.get_traced_memory()[1] < nbytes // 2
        finally:
            tracemalloc.stop()
        assert root in kept.prefix_cache
        assert kept._offload._index.returned.empty()
        came.clear()
        assert not kept._offload._index.returned.empty(), "somebody looks at it still"

    on_loop(client, restore)
    seen = counted(client)
    expect_same(outcome(ask(client, "moonshine", (2, 4, 0))), expected("moonshine", (2, 4, 0)))
    assert seen == []
    expect_empty(client)


# --- too little memory for one recording --------------------------------------------------------------


@pytest.mark.parametrize("model", STARTS)
def test_who_asks_at_once_shares_audio_that_cannot_be_kept(begin, model):
    client = begin(model, prefix_bytes=20_000)
    seen = counted(client)
    with held(client):
        tickets = [(asked, ask(client, model, asked)) for asked in [(2, 0, 0), (2, 3, 0), (2, 5, 0), (2, 0, 0)]]
    for asked, ticket in tickets:
        expect_same(outcome(ticket), expected(model, asked))
    assert sum(seen) == 1
    assert on_loop(client, lambda loop: loop.executor.coalescer.cache.prefix_cache.pages) == 0
    expect_empty(client)


def test_too_little_memory_for_one_recording_is_said_at_the_start(begin, caplog):
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
