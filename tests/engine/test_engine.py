"""Engine around a tiny random Moonshine: batching changes no answer, and every resource is freed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from engine_clients import fail_calls, poison_free_pages, spy
from tiny_moonshine import CARD, MAX_SAMPLES, WAIT_S, build, clip, expect_empty, held, on_loop, outcome, start

from asr_serve.cores import CoreContention
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import EngineComponents
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.seq2seq.encoder import ENCODER_NICENESS, EncoderPool
from asr_serve.engine.seq2seq.executor import CONCURRENT_BATCH_DIVISOR, GATHER_ROWS, GATHER_STEPS, UPLOADS_PER_THREAD
from asr_serve.errors import AtCapacity, AudioTooLong, Cancelled, EngineClosed, OptionError, StepFailed, WeightsMissing
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES

LENGTHS = [1_600, 16_000, 16_123, 40_000, 64_000, 64_000, 9_000, 128_000, 90_000, 3_000, 30_000, 55_555]
CLIPS = [clip(seed, samples) for seed, samples in enumerate(LENGTHS)]
ONCE = SearchOptions(temperatures=(0.0,))
Begin = Callable[..., EngineClient]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts engines and closes them."""
    started: list[EngineClient] = []

    def launch(*arguments: object, **settings: object) -> EngineClient:
        started.append(start(*arguments, **settings))
        return started[-1]

    yield launch
    for client in started:
        client.close()
        assert not client.backend._thread.is_alive()


@pytest.fixture(scope="module")
def alone() -> list[Recognition]:
    """Answer of every clip by itself."""
    client = start()
    answers = [client.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    client.close()
    assert len({a.tokens for a in answers}) == len(answers), "answers must tell the clips apart"
    assert len({len(a.tokens) for a in answers}) > 4, "rows must leave at different steps"
    return answers


def expect_same(result: Recognition, expected: Recognition) -> None:
    for name in ("tokens", "finish", "temperature"):
        assert getattr(result, name) == getattr(expected, name)
    assert result.avg_logprob == pytest.approx(expected.avg_logprob, abs=1e-4)


def submit_together(client: EngineClient) -> list[Ticket]:
    """Submit every clip before the loop sees any."""
    with held(client):
        return [client.submit(pcm, ONCE) for pcm in CLIPS]


def expect_answers(tickets: list[Ticket], expected: list[Recognition]) -> None:
    for ticket, answer in zip(tickets, expected, strict=True):
        expect_same(ticket.future.result(WAIT_S), answer)


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "native"), [({}, "1"), ({}, "0"), ({"kv_bytes": 1}, "1")], ids=["native", "reference", "few pages"]
)
def test_batched_is_the_same_as_alone(begin, alone, monkeypatch, settings, native):
    """With few pages there is room for one sequence of the greatest length: the others take turns."""
    monkeypatch.setenv("ASR_SERVE_NATIVE", native)
    client = begin(**settings)
    expect_answers(submit_together(client), alone)
    assert settings or client.describe()["rows_per_step"] > 1.5
    expect_empty(client)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_join_and_leave_a_batch_at_any_step(begin, alone, rows):
    client = begin(max_decode_rows=rows)
    runner = client.backend.loop.executor.decode_runner
    seen: list[dict[int, int]] = []
    spy(runner, "step", lambda: seen.append({row.request_id: len(row.hypothesis.tokens) for row in runner.rows}))
    chosen = random.Random(3)
    order = [chosen.randrange(len(CLIPS)) for _ in range(16)]
    tickets = [client.submit(CLIPS[i], ONCE, chosen.choice(["interactive", "bulk"])) for i in order]
    expect_answers(tickets, [alone[i] for i in order])
    assert max(map(len, seen)) == rows
    if rows > 1:
        assert any(len(set(at.values())) > 1 for at in seen), "rows at different steps share a step"
    expect_empty(client)


def test_poison_in_free_pages_changes_nothing(begin, alone):
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    poison_free_pages(runner)
    for _ in range(2):
        expect_answers([client.submit(pcm, ONCE) for pcm in CLIPS[:8]], alone[:8])
    assert runner.kv_cache.isnan().any()


def test_an_idle_engine_resumes(begin, alone):
    client = begin()
    for _ in range(3):
        for i in (0, 3):
            expect_same(client.submit(CLIPS[i], ONCE).future.result(WAIT_S), alone[i])
        expect_empty(client)


def test_requests_that_come_one_by_one_are_encoded_together_while_many_rows_decode(begin, alone):
    longest = max(range(len(CLIPS)), key=lambda i: len(alone[i].tokens))
    client = begin(max_decode_rows=2 * GATHER_ROWS, kv_bytes=1 << 22)
    runner, encode_runner = client.backend.loop.executor.decode_runner, client.backend.loop.executor.encode_runner
    rows: list[int] = []
    encoded: list[tuple[int, int]] = []
    """Decoding steps until a batch, and its clips."""
    late: list[Ticket] = []

    def on_step() -> None:
        rows.append(len(runner.rows))
        if rows[-1] == GATHER_ROWS and len(late) < GATHER_STEPS:
            late.append(client.submit(CLIPS[len(late)], ONCE, "bulk"))

    with held(client):
        first = [client.submit(CLIPS[longest], ONCE, "bulk") for _ in range(GATHER_ROWS)]
    spy(runner, "step", on_step)
    spy(encode_runner, "encode", lambda batch, *_: encoded.append((len(rows), len(batch))))
    expect_answers(first, [alone[longest]] * GATHER_ROWS)
    expect_answers(late, alone[:GATHER_STEPS])
    begun = rows.index(GATHER_ROWS) + 1
    assert encoded[-1] == (begun + GATHER_STEPS, GATHER_STEPS), (rows, encoded)
    expect_empty(client)


def test_a_request_is_encoded_at_once_where_few_rows_decode(begin, alone):
    client = begin(max_decode_rows=2 * GATHER_ROWS)
    runner, encode_runner = client.backend.loop.executor.decode_runner, client.backend.loop.executor.encode_runner
    steps: list[int] = []
    encoded: list[tuple[int, int]] = []
    late: list[Ticket] = []

    def on_step() -> None:
        steps.append(len(runner.rows))
        if not late:
            late.append(client.submit(CLIPS[0], ONCE))

    with held(client):
        first = [client.submit(CLIPS[4], ONCE) for _ in range(2)]
    spy(runner, "step", on_step)
    spy(encode_runner, "encode", lambda batch, *_: encoded.append((len(steps), len(batch))))
    expect_answers(first, [alone[4]] * 2)
    expect_answers(late, alone[:1])
    assert encoded == [(0, 2), (1, 1)]


def test_many_uploads_are_encoded_beside_the_loop(begin, alone):
    """Encoders have threads of their own while there are many interactive requests, and with one core never."""
    client = begin(max_decode_rows=16)
    executor = client.backend.loop.executor
    many, threads = UPLOADS_PER_THREAD * executor.device.threads, executor.encoder_pool.threads
    encoders: list[str] = []
    spy(executor.encode_runner, "encode", lambda *_: encoders.append(threading.current_thread().name))
    for count, beside in ((many, threads > 0), (many - 1, False), (many, threads > 0)):
        order = [i % len(CLIPS) for i in range(count)]
        with held(client):
            tickets = [client.submit(CLIPS[i], ONCE, "interactive") for i in order]
            encoders.clear()
        expect_answers(tickets, [alone[i] for i in order])
        expect_empty(client)
        assert encoders
        assert encoders[0].startswith("asr-serve encoder") == beside, encoders
    with held(client):
        tickets = [client.submit(CLIPS[i % len(CLIPS)], ONCE, "bulk") for i in range(many)]
        encoders.clear()
    expect_answers(tickets, [alone[i % len(CLIPS)] for i in range(many)])
    assert not any(name.startswith("asr-serve encoder") for name in encoders), "files have all cores in turn"


@pytest.mark.parametrize("contended", [False, True])
def test_encoders_have_the_priority_of_the_loop_beside_busy_processes(begin, alone, monkeypatch, contended):
    monkeypatch.setattr(CoreContention, "contended", lambda self: contended)
    client = begin(max_decode_rows=16)
    executor = client.backend.loop.executor
    if executor.encoder_pool.threads == 0:
        pytest.skip("with one core nothing is encoded beside the loop")
    own, encoders = [], []
    spy(executor.decode_runner, "step", lambda: own.append(niceness()))
    spy(executor.encode_runner, "encode", lambda *_: encoders.append(niceness()))
    count = UPLOADS_PER_THREAD * executor.device.threads
    with held(client):
        tickets = [client.submit(CLIPS[i % len(CLIPS)], ONCE, "interactive") for i in range(count)]
    expect_answers(tickets, [alone[i % len(CLIPS)] for i in range(count)])
    expect_empty(client)
    assert encoders[0] == own[0] + (0 if contended else ENCODER_NICENESS)


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_uploads_that_wait_are_shared_by_the_free_encoders(begin, monkeypatch):
    """A batch beside the loop runs on one core: the first one leaves the others their part."""
    client = begin()
    executor = client.backend.loop.executor
    pool, most = executor.encoder_pool, executor.scheduler.encode_frames
    least = most // CONCURRENT_BATCH_DIVISOR
    with held(client), monkeypatch.context() as patched:  # the loop must not see what is not so
        patched.setattr(pool, "threads", 2)
        for waiting, share in ((most, most // 2), (3 * most, most), (least, least), (0, least)):
            patched.setattr(executor.scheduler, "waiting_frames", waiting)
            assert executor._concurrent_frames(live=False) == share
            assert executor._concurrent_frames(live=True) == least
        patched.setattr(executor.scheduler, "waiting_frames", 3 * most)
        patched.setattr(executor.loop.vad_scheduler, "live_count", 1)
        assert executor._concurrent_frames(live=False) == least, "partials of a silent caller wait behind a batch"


@pytest.mark.parametrize(
    ("cores", "encoders", "decoders", "shared"), [(2, 2, 1, True), (3, 3, 1, True), (4, 3, 1, False)]
)
def test_decoding_takes_a_core_from_encoders_only_where_there_are_few(cores, encoders, decoders, shared):
    device = SimpleNamespace(
        threads=cores, encoder_threads=encoders, decode_threads=lambda beside: decoders, set_threads=lambda count: None
    )
    pool = EncoderPool(SimpleNamespace(device=device), lambda *_: None)
    assert pool.shares_cores == shared
    pool.close()


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_uploads_that_are_encoded_beside_the_loop_are_answered_with_any_number_of_rows(begin, alone, rows):
    client = begin(max_decode_rows=rows)
    order = [i % len(CLIPS) for i in range(2 * UPLOADS_PER_THREAD * client.backend.loop.executor.device.threads)]
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE, "interactive") for i in order]
    expect_answers(tickets, [alone[i] for i in order])
    expect_empty(client)


# --- one mixed day --------------------------------------------------------------------------------


def test_two_hundred_mixed_requests_with_cancellations(begin, alone):
    client = begin(max_requests=60, kv_bytes=60 * 8_192)
    cancelled, answered, wrong = [], [], []

    def caller(seed: int) -> None:
        chance, mine = random.Random(seed), []
        for _ in range(50):
            i = chance.randrange(len(CLIPS))
            ticket = client.submit(CLIPS[i], ONCE, chance.choice(["interactive", "bulk"]), wait=True)
            mine.append((i, ticket))
            if chance.random() < 0.3:
                client.cancel(chance.choice(mine[-6:])[1])
            if chance.random() < 0.15:
                outcome(chance.choice(mine)[1])
        for i, ticket in mine:
            results = outcome(ticket)
            if results is Cancelled:
                cancelled.append(i)
            elif isinstance(results, Recognition) and results.tokens == alone[i].tokens:
                answered.append(i)
            else:
                wrong.append((i, results))

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "a caller hangs"
    assert wrong == []
    assert len(cancelled) + len(answered) == 200
    assert len(cancelled) >= 10
    assert len(answered) >= 100
    expect_empty(client)


# --- steps that fail ------------------------------------------------------------------------------


def test_a_failed_encode_fails_its_own_batch_only(begin, alone):
    client = begin(encode_frames=400)
    runner = client.backend.loop.executor.encode_runner
    with held(client):
        near = [client.submit(CLIPS[i], ONCE) for i in (4, 5)]  # of 165 frames: one batch
        far = client.submit(CLIPS[7], ONCE)
        fail_calls(runner, "encode", 1)
    for ticket in near:
        with pytest.raises(StepFailed, match="encoding failed: RuntimeError: the device hiccuped") as failed:
            ticket.future.result(WAIT_S)
        assert isinstance(failed.value.__cause__, RuntimeError)
    expect_same(far.future.result(WAIT_S), alone[7])
    expect_same(client.submit(CLIPS[4], ONCE).future.result(WAIT_S), alone[4])
    expect_empty(client)


@pytest.mark.parametrize("on_call", [1, 2])
def test_a_failed_join_frees_the_rows_of_its_batch(begin, alone, on_call):
    client = begin()
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE) for i in (4, 5)]
        fail_calls(client.backend.loop.executor.decode_runner, "add_row", on_call)
    assert [outcome(ticket) for ticket in tickets] == [StepFailed, StepFailed]
    expect_same(client.submit(CLIPS[4], ONCE).future.result(WAIT_S), alone[4])
    expect_empty(client)


def test_a_failed_decode_step_fails_its_rows_only(begin, alone):
    client = begin(max_decode_rows=2)
    runner = client.backend.loop.executor.decode_runner
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE) for i in (4, 5, 3)]
        fail_calls(runner, "step", 3)
    outcomes = [outcome(ticket) for ticket in tickets]
    assert outcomes[:2] == [StepFailed, StepFailed]
    expect_same(outcomes[2], alone[3])
    expect_empty(client)


def test_a_failed_detokenization_fails_its_own_row(begin, alone):
    def broken() -> EngineComponents:
        parts = build()
        return parts._replace(decode_text=lambda tokens: parts.decode_text(tokens) if tokens != bad else 1 / 0)

    bad = list(alone[4].tokens)
    client = begin(broken)
    tickets = [client.submit(CLIPS[i], ONCE) for i in (3, 4, 5)]
    results = [outcome(ticket) for ticket in tickets]
    assert results[1] is StepFailed
    expect_same(results[0], alone[3])
    expect_same(results[2], alone[5])
    expect_empty(client)


def test_a_dead_loop_refuses_with_its_reason(begin):
    client = begin()
    with held(client):
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        session = client.open_vad_session()
        piece = session.submit_windows(np.zeros(512, np.float32))
        fail_calls(client.backend.loop, "_step", 1)
    for future in (*(t.future for t in tickets), piece):
        with pytest.raises(EngineClosed, match="the engine stopped: RuntimeError: the device hiccuped"):
            future.result(WAIT_S)
    client.backend._thread.join(WAIT_S)
    submit_windows = partial(session.submit_windows, np.zeros(512, np.float32))
    for call in (partial(client.submit, CLIPS[0]), client.open_vad_session, submit_windows):
        with pytest.raises(EngineClosed):
            call()
    client.cancel(tickets[0])
    session.close()
    client.close()
    assert client.describe()["pages_used"] == 0


def test_a_load_error_is_raised_by_the_constructor():
    def missing() -> EngineComponents:
        raise WeightsMissing("no weights here")

    with pytest.raises(WeightsMissing, match="no weights here"):
        start(missing)


# --- admission ------------------------------------------------------------------------------------


def test_a_full_engine_refuses_with_a_retry_time_or_waits(begin, alone):
    client = begin(max_requests=3)
    waited = []
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE) for i in range(3)]
        with pytest.raises(AtCapacity, match=r"try again in \d+ ms") as full:
            client.submit(CLIPS[3], ONCE)
        assert full.value.retry_after_ms >= 100
        patient = threading.Thread(target=lambda: waited.append(client.submit(CLIPS[3], ONCE, wait=True)))
        patient.start()
        assert client.describe()["requests"] == 3
    patient.join(WAIT_S)
    expect_same(waited[0].future.result(WAIT_S), alone[3])
    expect_answers(tickets, alone[:3])
    expect_empty(client)


def test_queued_audio_is_bounded_but_one_request_always_fits(begin, alone):
    client = begin(max_audio_s=1.0)
    with held(client):
        long = client.submit(CLIPS[7], ONCE)
        with pytest.raises(AtCapacity, match=r"up to .* 1 s"):
            client.submit(CLIPS[0], ONCE)
    expect_same(long.future.result(WAIT_S), alone[7])
    expect_same(client.submit(CLIPS[0], ONCE, wait=True).future.result(WAIT_S), alone[0])


def test_a_refused_request_leaves_nothing_behind(begin):
    client = begin(max_requests=1)
    with held(client):
        ticket = client.submit(CLIPS[0], ONCE)
        for _ in range(5):
            with pytest.raises(AtCapacity):
                client.submit(CLIPS[0], ONCE)
    outcome(ticket)
    expect_empty(client)


def test_an_utterance_has_the_length_limit_of_the_model(begin):
    client = begin()
    assert isinstance(outcome(client.submit(clip(1, MAX_SAMPLES), ONCE)), Recognition)
    with pytest.raises(AudioTooLong, match=f"{CARD.name} takes up to 8 s") as refused:
        client.submit(clip(1, MAX_SAMPLES + 1))
    assert "8.0 s" in refused.value.came
    expect_empty(client)


@pytest.mark.parametrize("samples", [0, 1, 200, 1_599])
def test_short_audio_is_padded_with_silence(begin, samples):
    client = begin()
    pcm = clip(2, samples)
    padded = np.pad(pcm, (0, 1_600 - samples))
    short, whole = (client.submit(x, ONCE).future.result(WAIT_S) for x in (pcm, padded))
    # the limit is that of the audio that came, not of the silence behind it
    assert short.tokens == whole.tokens[: len(short.tokens)]


def test_audio_may_be_read_only_and_is_never_changed(begin, alone):
    client = begin()
    pcm = CLIPS[3].copy()
    pcm.flags.writeable = False
    expect_same(client.submit(pcm, ONCE).future.result(WAIT_S), alone[3])
    assert np.array_equal(pcm, CLIPS[3])
    assert np.array_equal(CLIPS[3], clip(3, LENGTHS[3]))


# --- taking back ----------------------------------------------------------------------------------


def test_cancel_before_the_loop_reads_the_request(begin):
    client = begin()
    with held(client):
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        for ticket in tickets:
            client.cancel(ticket)
    assert [outcome(ticket) for ticket in tickets] == [Cancelled] * len(CLIPS)
    assert client.describe()["steps"] == 0
    expect_empty(client)


def test_cancel_while_waiting_for_a_row(begin, alone):
    client = begin(max_decode_rows=1)
    with held(client):
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        spy(client.backend.loop.executor.decode_runner, "step", lambda: [client.cancel(t) for t in tickets[1:]])
    outcomes = [outcome(ticket) for ticket in tickets]
    expect_same(outcomes[0], alone[0])
    assert outcomes[1:] == [Cancelled] * (len(CLIPS) - 1)
    expect_empty(client)


@pytest.mark.parametrize("at_step", [1, 2, 5])
def test_cancel_while_decoding(begin, alone, at_step):
    client = begin()
    steps = itertools.count(1)
    chosen = [i for i, answer in enumerate(alone) if len(answer.tokens) > 8][:4]
    with held(client):
        tickets = [client.submit(CLIPS[i], ONCE) for i in chosen]
        spy(
            client.backend.loop.executor.decode_runner,
            "step",
            lambda: client.cancel(tickets[1]) if next(steps) == at_step else None,
        )
    outcomes = [outcome(ticket) for ticket in tickets]
    assert outcomes[1] is Cancelled
    for i, results in zip(chosen, outcomes, strict=True):
        if results is not Cancelled:
            expect_same(results, alone[i])
    expect_empty(client)


def test_cancelling_a_finished_or_cancelled_request_does_nothing(begin, alone):
    client = begin()
    done = client.submit(CLIPS[0], ONCE)
    expect_same(done.future.result(WAIT_S), alone[0])
    client.cancel(done)
    with held(client):
        twice = client.submit(CLIPS[1], ONCE)
        client.cancel(twice)
        client.cancel(twice)
    assert outcome(twice) is Cancelled
    expect_same(done.future.result(WAIT_S), alone[0])
    expect_empty(client)


# --- closing --------------------------------------------------------------------------------------


def test_close_fails_open_requests_and_wakes_waiting_callers(begin):
    client = begin(max_requests=12)
    results = []

    def patient() -> None:
        try:
            client.submit(CLIPS[0], wait=True)
        except EngineClosed as error:
            results.append(error)

    with held(client):
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        session = client.open_vad_session()
        piece = session.submit_windows(np.zeros(1_024, np.float32))
        waiter = threading.Thread(target=patient)
        waiter.start()
        closer = threading.Thread(target=client.close)
        closer.start()
        while client.backend.loop.inbox.qsize() < len(CLIPS) + 3:  # until `stop` is in
            threading.Event().wait(0.001)
    closer.join(WAIT_S)
    waiter.join(WAIT_S)
    assert not closer.is_alive()
    assert not waiter.is_alive()
    assert len(results) == 1
    assert [outcome(ticket) for ticket in tickets] == [EngineClosed] * len(CLIPS)
    with pytest.raises(EngineClosed):
        piece.result(WAIT_S)
    with pytest.raises(EngineClosed):
        client.submit(CLIPS[0])
    assert client.describe()["pages_used"] == 0
    assert client.describe()["requests"] == 0
    client.close()


def test_close_may_be_called_from_a_callback(begin):
    client = begin()
    closed = threading.Event()

    def close(_: object) -> None:
        client.close()
        closed.set()

    with held(client):
        first, second = client.submit(CLIPS[0], ONCE), client.submit(CLIPS[7], ONCE)
        first.future.add_done_callback(close)
    assert closed.wait(WAIT_S)
    client.backend._thread.join(WAIT_S)
    assert not client.backend._thread.is_alive()
    assert outcome(second) is EngineClosed or isinstance(outcome(second), Recognition)


# --- the search inside the engine -----------------------------------------------------------------


HARD = {"temperatures": (0.0, 0.5, 1.0), "min_avg_logprob": 0.0}
"""No answer passes: every temperature is tried."""


def test_temperature_fallback_is_deterministic_and_the_same_in_a_batch(begin):
    client = begin()
    first = [client.submit(pcm, SearchOptions(**HARD)).future.result(WAIT_S) for pcm in CLIPS]
    assert client.describe()["fallbacks"] == 2 * len(CLIPS)
    with held(client):
        tickets = [client.submit(pcm, SearchOptions(**HARD)) for pcm in CLIPS]
    expect_answers(tickets, first)
    assert {answer.temperature for answer in first} <= {0.0, 0.5, 1.0}
    expect_empty(client)


def test_another_seed_samples_other_tokens(begin):
    client = begin()
    hot = {"temperatures": (1.5,)}
    answers = {client.submit(CLIPS[7], SearchOptions(seed=s, **hot)).future.result(WAIT_S) for s in range(4)}
    assert len(answers) > 1


def test_a_sampling_row_leaves_greedy_rows_alone(begin, alone):
    client = begin()
    with held(client):
        tickets = [client.submit(pcm, SearchOptions(**HARD) if i % 2 else ONCE) for i, pcm in enumerate(CLIPS)]
    outcomes = [outcome(ticket) for ticket in tickets]
    for i in range(0, len(CLIPS), 2):
        expect_same(outcomes[i], alone[i])


def test_the_smallest_temperature_is_almost_greedy(begin, alone):
    client = begin()
    results = client.submit(CLIPS[3], SearchOptions(temperatures=(1e-300,))).future.result(WAIT_S)
    assert results.tokens == alone[3].tokens


def test_the_token_limit_follows_the_length_of_the_audio(begin):
    client = begin()
    for pcm in CLIPS:
        limit = 4 + int(len(pcm) / 16_000 * CARD.tokens_per_s)
        assert len(client.submit(pcm, ONCE).future.result(WAIT_S).tokens) <= limit


# --- voice activity -------------------------------------------------------------------------------


def pieces_of(pcm: np.ndarray, windows: list[int]) -> list[np.ndarray]:
    return np.split(pcm, np.cumsum(windows)[:-1] * WINDOW_SAMPLES)


@pytest.mark.slow
def test_vad_windows_of_a_session_keep_their_order(begin):
    client = begin(vad_step_windows=40)
    sounds = [clip(50 + i, 60 * WINDOW_SAMPLES) for i in range(4)]
    whole = []
    for pcm in sounds:
        session = client.open_vad_session()
        whole.append(session.submit_windows(pcm).result(WAIT_S))
        session.close()
    sessions = [client.open_vad_session() for _ in sounds]
    cuts = [[60], [1] * 60, [7, 13, 1, 39], [30, 30]]
    with held(client):
        futures = [
            [session.submit_windows(piece) for piece in pieces_of(pcm, cut)]
            for session, pcm, cut in zip(sessions, sounds, cuts, strict=True)
        ]
    for expected, parts in zip(whole, futures, strict=True):
        results = np.concatenate([future.result(WAIT_S) for future in parts])
        np.testing.assert_allclose(results, expected, atol=1e-5)
    for session in sessions:
        session.close()


@pytest.mark.parametrize("samples", [0, 1, 511, 513, 1_000, 65 * 512])
def test_vad_takes_whole_windows_within_the_bound(begin, samples):
    client = begin(vad_windows=64)
    session = client.open_vad_session()
    with pytest.raises(OptionError, match="multiple of 512, up to 32768"):
        session.submit_windows(np.zeros(samples, np.float32))
    assert len(session.submit_windows(np.zeros(64 * 512, np.float32)).result(WAIT_S)) == 64


def test_closing_a_session_with_work_in_flight(begin):
    client = begin()
    other, session = client.open_vad_session(), client.open_vad_session()
    with held(client):
        futures = [session.submit_windows(np.zeros(512, np.float32)) for _ in range(3)]
        pending = other.submit_windows(np.zeros(512, np.float32))
        session.close()
        late = session.submit_windows(np.zeros(512, np.float32))
    for future in (*futures, late):
        with pytest.raises(Cancelled):
            future.result(WAIT_S)
    assert len(pending.result(WAIT_S)) == 1
    session.close()
    on_loop(client, lambda loop: loop.check())
    assert on_loop(client, lambda loop: loop.vad_runner.states.used) == 1


def test_vad_sessions_are_bounded_and_freed_at_once(begin):
    client = begin(max_sessions=2)
    sessions = [client.open_vad_session(), client.open_vad_session()]
    with pytest.raises(AtCapacity):
        client.open_vad_session()
    for _ in range(20):
        sessions.pop().close()
        sessions.append(client.open_vad_session())
    assert on_loop(client, lambda loop: loop.vad_runner.states.used) == 2


def test_a_failed_vad_step_fails_its_own_windows(begin):
    client = begin()
    session = client.open_vad_session()
    runner = client.backend.loop.vad_runner
    fail_calls(runner, "step", 1)
    with pytest.raises(StepFailed, match="voice activity failed"):
        session.submit_windows(np.zeros(512, np.float32)).result(WAIT_S)
    assert len(session.submit_windows(np.zeros(512, np.float32)).result(WAIT_S)) == 1


# --- from an event loop ---------------------------------------------------------------------------


async def test_answers_can_be_awaited(begin, alone):
    client = begin()
    futures = [asyncio.wrap_future(client.submit(pcm, ONCE).future) for pcm in CLIPS]
    for results, expected in zip(await asyncio.gather(*futures), alone, strict=True):
        expect_same(results, expected)


async def test_a_cancelled_future_disturbs_no_other(begin, alone):
    client = begin()
    with held(client):
        futures = [asyncio.wrap_future(client.submit(pcm, ONCE).future) for pcm in CLIPS]
        for future in futures[::2]:
            future.cancel()
        await asyncio.sleep(0)
    for results, expected in zip(await asyncio.gather(*futures[1::2]), alone[1::2], strict=True):
        expect_same(results, expected)
    last = client.submit(CLIPS[0], ONCE, "bulk")
    expect_same(await asyncio.wrap_future(last.future), alone[0])
    while client.describe()["requests"]:
        await asyncio.sleep(0.001)
    expect_empty(client)
