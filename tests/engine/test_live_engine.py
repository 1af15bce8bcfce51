"""Live sessions in the engine: any voice activity, any packets, any load give the same segments.

The model is random and tiny; the probabilities of voice activity are written into the audio, so that segments
open, close and are torn apart far oftener, and more oddly, than speech does it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from math import inf
from typing import Any

import numpy as np
import pytest
from engine_clients import fail_calls, spy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_moonshine import CARD, WAIT_S, clip, expect_empty, held, on_loop, outcome, start, text

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine import vad_scheduler
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.partial_rate import MIN_SAMPLES, OVERLOADED_MS, PartialRateController
from asr_serve.engine.seq2seq.scheduler import LIVE_RESERVE_FRACTION
from asr_serve.engine.vad_runner import VadStepOutput
from asr_serve.errors import AtCapacity, StepFailed
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES
from asr_serve.pipelines.live.live_session import (
    ListenOptions,
    LivePartial,
    LiveSegmentDone,
    LiveSession,
    SessionFinished,
)
from asr_serve.pipelines.live.repeated_recognizer import DEADLINE_MS, URGENT_MS

ONCE = SearchOptions(temperatures=(0.0,))
HANG_S = 60.0
CLIPS = [clip(seed, samples) for seed, samples in enumerate([16_000, 40_000, 64_000, 128_000])]
Segments = list[tuple[int, int, str]]


class Vocabulary:
    decode = staticmethod(text)

    def encode(self, text: str) -> list[int]:
        raise AssertionError("no test here needs it")


VOCABULARY = Vocabulary()


@pytest.fixture
def begin(close_later: Any) -> Callable[..., EngineClient]:
    return lambda **settings: close_later(start(**settings))


def encoded_batches(client: EngineClient) -> list[list[int]]:
    """Record the requests of each later encode batch."""
    seen: list[list[int]] = []
    client.backend.loop.executor.requests.on_start = lambda ids: seen.append(list(ids))
    return seen


# --- who is served first --------------------------------------------------------------------------


def test_live_requests_go_before_interactive_before_bulk(begin):
    client = begin(max_decode_rows=1)
    with held(client):
        bulk = [client.submit(CLIPS[1], ONCE, "bulk") for _ in range(3)]
        near = [client.submit(CLIPS[1], ONCE, "interactive") for _ in range(3)]
        live = client.submit(CLIPS[1], ONCE, "live")
        seen = encoded_batches(client)
    expect_recognized([*bulk, *near, live])
    order = [i for batch in seen for i in batch]
    assert order[0] == live.id
    assert order.index(near[0].id) < order.index(bulk[0].id)


@pytest.mark.slow
def test_bulk_gets_its_share_under_constant_live_load(begin):
    """A live session's next request is there before the last is answered; a file still gets its share."""
    client = begin(max_decode_rows=2)
    stop, answered = threading.Event(), []

    def next_one(_: object = None) -> None:
        if not stop.is_set():
            answered.append(1)
            client.submit(CLIPS[0], ONCE, "live").future.add_done_callback(next_one)

    sessions = [client.open_vad_session(live=True) for _ in range(3)]
    for _ in range(3):
        next_one()
    files = [client.submit(CLIPS[3], ONCE, "bulk") for _ in range(3)]
    expect_recognized(files)
    stop.set()
    for session in sessions:
        session.close()
    assert len(answered) > 3
    while client.describe()["requests"]:
        threading.Event().wait(0.002)
    expect_empty(client)


def rows_of_files(client: EngineClient) -> list[int]:
    """Record how many rows files hold at each later step."""
    seen: list[int] = []
    executor = client.backend.loop.executor
    spy(
        executor.decode_runner,
        "step",
        lambda: seen.append(
            sum(executor.open_requests[row.request_id].priority != "live" for row in executor.decode_runner.rows)
        ),
    )
    return seen


def expect_recognized(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        assert isinstance(outcome(ticket), Recognition)


def test_rows_are_reserved_while_a_live_session_is_open(begin):
    client = begin(max_decode_rows=8)
    live_session = client.open_vad_session(live=True)
    with held(client):
        live = [client.submit(CLIPS[1], ONCE, "live")]
        files = [client.submit(CLIPS[1], ONCE, "bulk") for _ in range(20)]
        seen = rows_of_files(client)
    expect_recognized([*live, *files])
    reserve = 8 // LIVE_RESERVE_FRACTION
    assert 0 < max(seen) <= 8, "an engine that does nothing else may be filled"
    live_session.close()
    with held(client):
        files = [client.submit(CLIPS[1], ONCE, "bulk") for _ in range(20)]
        seen = rows_of_files(client)
    for ticket in files:
        outcome(ticket)
    assert max(seen) > 8 - reserve, "with nobody on line nothing is kept"
    expect_empty(client)


def test_a_file_that_needs_every_page_runs_beside_an_idle_live_session(begin):
    """The reserve for live sessions does not keep an idle engine from working."""
    client = begin(kv_bytes=1)
    live_session = client.open_vad_session(live=True)
    for priority in ("bulk", "interactive", "live"):
        assert isinstance(outcome(client.submit(CLIPS[3], ONCE, priority)), Recognition)
    live_session.close()
    expect_empty(client)


def test_admitted_live_requests_find_room_in_a_full_engine(begin):
    client = begin(max_requests=2)
    with held(client):
        full = [client.submit(CLIPS[0], ONCE, "bulk") for _ in range(2)]
        with pytest.raises(AtCapacity):
            client.submit(CLIPS[0], ONCE, "interactive")
        live = [client.submit(CLIPS[0], ONCE, "live", admitted=True) for _ in range(3)]
    expect_recognized([*full, *live])
    expect_empty(client)


def test_windows_of_all_sessions_share_one_vad_step(begin):
    client = begin(max_sessions=24)
    sessions = [client.open_vad_session(live=True) for _ in range(24)]
    batches: list[int] = []
    spy(client.backend.loop.vad_runner, "step", lambda batch, _: batches.append(len(batch)))
    with held(client):
        futures = [session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32)) for session in sessions]
    assert [len(future.result(WAIT_S)) for future in futures] == [1] * 24
    assert batches == [24]
    lone = sessions[0].submit_windows(np.zeros(WINDOW_SAMPLES, np.float32))
    assert len(lone.result(WAIT_S)) == 1, "few windows wait a moment, not for ever"
    for session in sessions:
        session.close()
    expect_empty(client)


def test_closing_a_session_drops_its_waiting_windows(begin):
    client = begin()
    session, other = client.open_vad_session(live=True), client.open_vad_session(live=True)
    session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32)).result(WAIT_S)
    with held(client):
        session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32))
        session.close()
    assert len(other.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32)).result(WAIT_S)) == 1
    other.close()
    assert on_loop(client, lambda loop: loop.vad_scheduler.queued_windows) == 0
    expect_empty(client)


def test_an_urgent_request_waits_for_no_other_that_is_encoded(begin, monkeypatch):
    """Nor for those that wait for the encoders: it has a thread of its own, and so at its end has nobody waited."""
    monkeypatch.setenv("ASR_SERVE_THREADS", "2")
    client = begin(max_decode_rows=16)
    session, release, running = client.open_vad_session(live=True), threading.Event(), threading.Semaphore(0)
    runner = client.backend.loop.executor.encode_runner

    def hold(batch, *_):
        if any(len(pcm) > len(CLIPS[0]) for pcm in batch):
            running.release()
            assert release.wait(WAIT_S)

    spy(runner, "encode", hold)
    others = [client.submit(CLIPS[3], ONCE, "live", within_ms=2_000) for _ in range(6)]
    for _ in range(2):
        assert running.acquire(timeout=WAIT_S)
    urgent = [client.submit(CLIPS[0], ONCE, "live", within_ms=100) for _ in range(3)]
    expect_recognized(urgent)
    assert not any(ticket.future.done() for ticket in others)
    release.set()
    expect_recognized(others)
    session.close()
    expect_empty(client)


def test_drafts_of_urgent_requests_are_verified_first(begin):
    """Those of others wait for one pass, and plain rows decode in the same one."""
    client = begin(max_decode_rows=16)
    plain = [client.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    passes: list[tuple[set[int], set[int]]] = []
    spy(
        client.backend.loop.executor.decode_runner,
        "prefill_and_verify",
        lambda rows, beside: passes.append(({row.request_id for row in rows}, {row.request_id for row in beside})),
    )
    with held(client):
        drafted = [
            client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(plain[1].tokens), within_ms=within_ms)
            for within_ms in (2_000, 100, 2_000, 100)
        ]
        undrafted = client.submit(CLIPS[1], ONCE, "live")
    assert [outcome(ticket).tokens for ticket in (*drafted, undrafted)] == [plain[1].tokens] * 5
    first, second = passes[:2]
    assert first == ({drafted[1].id, drafted[3].id}, {undrafted.id})
    assert second[0] >= {drafted[0].id, drafted[2].id}
    expect_empty(client)


def test_rows_that_decode_beside_drafts_count_as_a_decoding_step(begin):
    client = begin(max_decode_rows=16)
    answer = client.submit(CLIPS[1], ONCE).future.result(WAIT_S)
    # On the loop's thread, between two steps: an answer is out before its step is counted.
    before, beside = on_loop(client, lambda loop: (loop.stats.steps, loop.stats.step_rows)), list[int]()
    loop = client.backend.loop
    spy(loop.executor.decode_runner, "prefill_and_verify", lambda rows, others: beside.append(len(others)))
    alone: list[int] = []
    spy(loop.executor.decode_runner, "step", lambda: alone.append(len(loop.executor.decode_runner.rows)))
    with held(client):
        undrafted = client.submit(CLIPS[1], ONCE, "live")
        slow = client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(answer.tokens), within_ms=2_000)
        urgent = client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(answer.tokens), within_ms=100)
    expect_recognized([undrafted, slow, urgent])
    passes = [rows for rows in beside if rows] + alone
    assert any(beside)
    after = on_loop(client, lambda loop: (loop.stats.steps, loop.stats.step_rows))
    assert after == (before[0] + len(passes), before[1] + sum(passes))


@pytest.mark.parametrize("cached", [False, True])
def test_a_request_that_becomes_urgent_overtakes_others_and_is_computed_once(begin, cached):
    client = begin(encode_frames=1, prefix_bytes=1 << 20 if cached else 0)  # each is a batch
    batches = encoded_batches(client)
    with held(client):
        *others, first = [client.submit(pcm, ONCE, "live", within_ms=2_000) for pcm in CLIPS]
        same = client.submit(CLIPS[-1], ONCE, "live", within_ms=2_000)  # waits for the answer, if that is cached
        ended = client.submit(CLIPS[0], ONCE, "live", within_ms=2_000)
        client.cancel(ended)
        for ticket in (same, ended):
            client.expedite(ticket, 100)
    expect_recognized([*others, first, same])
    started = [request_id for batch in batches for request_id in batch]
    assert started[:2] == [first.id, same.id] if cached else started[0] == same.id
    assert sorted(started) == sorted(ticket.id for ticket in (*others, first, same))
    client.expedite(same, 100)  # it is answered: nothing happens
    expect_empty(client)


# --- overload ---------------------------------------------------------------------------------------


def test_overload_counts_live_answers_and_refuses_live_sessions_only(begin):
    client = begin()
    outcome(client.submit(CLIPS[0], ONCE, "interactive"))
    assert client.partial_rate.turnaround_ms == 0
    outcome(client.submit(CLIPS[0], ONCE, "live"))
    assert client.partial_rate.turnaround_ms > 0
    with held(client):
        cancelled = client.submit(CLIPS[0], ONCE, "live")
        client.cancel(cancelled)
    before = client.partial_rate.turnaround_ms
    outcome(cancelled)
    assert client.partial_rate.turnaround_ms == before
    for _ in range(MIN_SAMPLES):
        client.partial_rate.record_turnaround(20 * OVERLOADED_MS, 1_000 * time.monotonic())
    live_session = client.open_vad_session(live=True)  # the only one: nobody waits
    with pytest.raises(AtCapacity, match=r"\d+ ms.*try again in \d+ ms") as refused:
        client.open_vad_session(live=True)
    assert refused.value.retry_after_ms > 0
    assert client.describe()["sessions"] == 1
    client.open_vad_session().close()  # a file's
    live_session.close()
    client.open_vad_session(live=True).close()
    assert client.describe()["sessions"] == 0


def test_a_refused_session_holds_nothing(begin):
    client = begin(max_sessions=1)
    first = client.open_vad_session(live=True)
    with pytest.raises(AtCapacity):
        LiveSession(client, VOCABULARY, ListenOptions(max_segment_ms=3_000), lambda: None)
    first.close()
    LiveSession(client, VOCABULARY, ListenOptions(max_segment_ms=3_000), lambda: None).close()
    expect_empty(client)


# --- failures ---------------------------------------------------------------------------------------


def test_a_failed_verification_fails_its_drafts_only(begin):
    client = begin()
    plain = [client.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    decoder = client.backend.loop.executor.decode_runner
    with held(client):
        drafted = [client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(plain[1].tokens)) for _ in range(2)]
        near = [client.submit(CLIPS[1], ONCE, "live"), client.submit(CLIPS[3], ONCE)]
        fail_calls(decoder, "prefill_and_verify", 1)
    assert [outcome(ticket) for ticket in drafted] == [StepFailed, StepFailed]
    assert outcome(near[0]).tokens == plain[1].tokens
    assert outcome(near[1]).tokens == plain[3].tokens
    again = client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(plain[1].tokens))
    assert outcome(again).tokens == plain[1].tokens
    expect_empty(client)


def test_a_verification_that_fails_at_its_end_fails_all_that_have_a_token_of_it(begin):
    """They would get it a second time."""
    client = begin()
    plain = client.submit(CLIPS[1], ONCE).future.result(WAIT_S)
    with held(client):
        drafted = client.submit(CLIPS[1], ONCE, "live", draft=DraftTokens(plain.tokens))
        near = client.submit(CLIPS[1], ONCE, "live")
        fail_calls(client.backend.loop.executor.decode_runner, "_advance_beams", 1)
    assert [outcome(drafted), outcome(near)] == [StepFailed, StepFailed]
    assert outcome(client.submit(CLIPS[1], ONCE)).tokens == plain.tokens
    expect_empty(client)


# --- listening, with probabilities to order -----------------------------------------------------------


@pytest.fixture(scope="module")
def scripted() -> Iterator[EngineClient]:
    """Voice activity reads each window's probability from its first sample."""

    def read(batch, state):
        found = [np.ascontiguousarray(pcm.reshape(-1, WINDOW_SAMPLES)[:, 0]) for pcm in batch]
        return VadStepOutput(found, state, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vad_scheduler, "VAD_STEP_INTERVAL_S", 0.0)
        client = start(max_sessions=4)
        client.backend.loop.vad_runner.step = read
        yield client
    expect_empty(client)
    client.close()


def audio_with_vad(probabilities: list[float], missing: int = 0, seed: int = 1) -> np.ndarray:
    pcm = clip(seed, len(probabilities) * WINDOW_SAMPLES)
    pcm[::WINDOW_SAMPLES] = probabilities
    return pcm[: len(pcm) - missing]


def fast_clock() -> Callable[[], float]:
    """A clock on which a minute passes between two readings."""
    return map(float, itertools.count(0, 60)).__next__


def stopped_clock() -> float:
    return 0.0


def run_session(
    client: EngineClient,
    pcm: np.ndarray,
    options: dict[str, object],
    sizes: list[int],
    clock: Callable[[], float],
    *,
    in_step: bool,
) -> Segments:
    """Segments of a live session; `in_step`: all events of a packet are read before the next one is appended."""
    client.partial_rate = PartialRateController()
    changed, segments, locked, at, ended = threading.Event(), [], "", 0, False
    listening = LiveSession(client, VOCABULARY, ListenOptions.of(options), changed.set, clock)
    next_size = itertools.cycle(sizes).__next__

    def read_events() -> bool:
        nonlocal locked
        changed.clear()
        done = False
        for event in listening.advance():
            assert not done
            match event:
                case LiveSegmentDone(segment=segment):
                    assert segment.text.startswith(locked), (locked, segment.text)
                    assert not segments or segments[-1][1] <= segment.start_samples
                    assert segment.start_samples < segment.end_samples <= listening.received_samples
                    segments.append((segment.start_samples, segment.end_samples, segment.text))
                    locked = ""
                case LivePartial():
                    assert event.locked_text.startswith(locked), (locked, event.locked_text)
                    assert not segments or event.start_samples >= segments[-1][1]
                    assert event.start_samples <= event.heard_samples <= listening.received_samples
                    locked = event.locked_text
                case SessionFinished():
                    done = True
        return done

    try:
        while True:
            if at < len(pcm) and not listening.full:
                size = next_size()
                listening.append_audio(pcm[at : at + size])
                at += size
            elif at >= len(pcm) and not ended:
                listening.finish()
                ended = True
            else:
                assert changed.wait(HANG_S), "nothing is under way, and it is not finished"
            done = read_events()
            while not done and in_step and not listening.idle:
                assert changed.wait(HANG_S)
                done = read_events()
            if done:
                assert listening.advance() == []
                return segments
    finally:
        listening.close()


@st.composite
def session_cases(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, object], list[int]]:
    level = st.sampled_from([0.0, 0.0, 0.1, 0.34, 0.4, 0.5, 0.9, 1.0])
    stretch = st.tuples(level, st.integers(1, 5) | st.integers(5, 90))
    stretches = draw(st.lists(stretch, min_size=1, max_size=9))
    probabilities = [p for p, count in stretches for _ in range(count)]
    schedules = [None, [(inf, 0)], [(inf, 30)], [(inf, 100)], [(2_000, 800), (inf, 200)]]
    options = {
        "max_segment_ms": draw(st.sampled_from([1_000, 1_500, 2_000, 3_000, 5_000])),
        "lock_ms": draw(st.sampled_from([200, 500, 1_920])),
        "partial_ms": draw(st.sampled_from([100, 480])),
        "silence_schedule": draw(st.sampled_from(schedules)),
    }
    pcm = audio_with_vad(probabilities, draw(st.sampled_from([0, 1, 100, 511])), draw(st.integers(0, 50)))
    return pcm, options, draw(st.lists(st.sampled_from([1, 100, 512, 1_600, 5_000]), min_size=5, max_size=5))


AT_ONCE, SOON = [(inf, 0)], [(inf, 30)]
TORN = {"lock_ms": 1_920, "partial_ms": 480}


@settings(max_examples=25, deadline=None)
@given(session_cases())
@example((audio_with_vad([0.0] * 100 + [0.9] * 200), {**TORN, "max_segment_ms": 1_000}, [1_600]))
@example(
    (
        audio_with_vad([0.9] * 31 + [0.0] * 2 + [0.9] * 40),
        {**TORN, "max_segment_ms": 1_000, "silence_schedule": SOON},
        [512],
    )
)
@example(
    (
        audio_with_vad([0.9] * 62 + [0.0] + [0.9] * 9),
        {**TORN, "max_segment_ms": 2_000, "silence_schedule": AT_ONCE},
        [512],
    )
)
@example((audio_with_vad([1.0] + [0.4] * 200 + [0.0] * 90), {"lock_ms": 200, "max_segment_ms": 5_000}, [512]))
def test_segments_depend_on_the_audio_alone(scripted, case):
    """However it is cut into packets, however often partials are requested, and wherever segments are split."""
    pcm, options, sizes = case
    segments = run_session(scripted, pcm, options, [1 << 40], stopped_clock, in_step=False)
    assert run_session(scripted, pcm, options, sizes * 40, fast_clock(), in_step=True) == segments
    assert run_session(scripted, pcm, options, [1_600], fast_clock(), in_step=False) == segments
    assert scripted.describe()["sessions"] == 0


@settings(max_examples=40, deadline=None)
@given(session_cases(), st.integers(0, 400))
def test_closing_at_any_moment_frees_everything(scripted, case, after):
    pcm, options, sizes = case
    scripted.partial_rate = PartialRateController()
    changed = threading.Event()
    listening = LiveSession(scripted, VOCABULARY, ListenOptions.of(options), changed.set, fast_clock())
    at, next_size = 0, itertools.cycle(sizes).__next__
    for turn in range(after):
        if at < len(pcm):
            size = next_size()
            listening.append_audio(pcm[at : at + size])
            at += size
        elif at < 1 << 40:
            listening.finish()
            at = 1 << 40
        if turn % 3 == 0:
            changed.wait(0.002)
        listening.advance()
    listening.close()
    listening.close()
    assert listening.advance() == []
    expect_empty(scripted)
    assert scripted.describe()["sessions"] == 0
    assert scripted.describe()["sessions_used"] == 0


def test_a_segment_that_ends_does_not_wait_for_an_anchor_that_was_not_urgent(scripted, monkeypatch):
    """It becomes as urgent as the final that follows it, and changes nothing in the text."""
    pcm, options = audio_with_vad([0.9] * 90), {"lock_ms": 500, "max_segment_ms": 5_000}
    expected = run_session(scripted, pcm, options, [1 << 40], stopped_clock, in_step=False)
    original, cancel = scripted.submit, scripted.cancel
    unanswered: dict[int, tuple[Future[Recognition], Callable[[], Future[Recognition]]]] = {}
    expedited: list[int] = []

    def submit(pcm, *arguments, within_ms, **keywords):
        if within_ms != DEADLINE_MS["anchor"]:
            return original(pcm, *arguments, within_ms=within_ms, **keywords)
        answer, number = Future(), -1 - len(unanswered)
        unanswered[number] = answer, lambda: original(pcm, *arguments, within_ms=within_ms, **keywords).future
        return Ticket(number, answer)

    def expedite(ticket: Ticket, within_ms: int) -> None:
        assert within_ms == URGENT_MS
        expedited.append(ticket.id)
        answer, recognize = unanswered[ticket.id]
        recognize().add_done_callback(lambda done: answer.set_result(done.result()))

    monkeypatch.setattr(scripted, "expedite", expedite)
    monkeypatch.setattr(scripted, "cancel", lambda ticket: None if ticket.id in unanswered else cancel(ticket))
    monkeypatch.setattr(scripted, "submit", submit)
    changed, segments = threading.Event(), []
    listening = LiveSession(scripted, VOCABULARY, ListenOptions.of(options), changed.set, stopped_clock)

    def finished() -> bool:
        changed.clear()
        events = listening.advance()
        segments.extend(
            (event.segment.start_samples, event.segment.end_samples, event.segment.text)
            for event in events
            if isinstance(event, LiveSegmentDone)
        )
        return any(isinstance(event, SessionFinished) for event in events)

    listening.append_audio(pcm[: len(pcm) // 2])
    while not (finished() or unanswered):
        assert changed.wait(HANG_S)
    listening.append_audio(pcm[len(pcm) // 2 :])
    listening.finish()
    while not finished():
        assert changed.wait(HANG_S)
    assert segments == expected
    assert expedited
    assert len(set(expedited)) == len(expedited)


def test_a_model_with_a_short_segment_limit_works_live(scripted):
    """Segments end at the limit of the model, which is shorter than the usual one of live segments."""
    assert CARD.max_segment_ms < 16_000
    segments = run_session(scripted, audio_with_vad([0.9] * 400), {}, [1 << 40], stopped_clock, in_step=False)
    assert len(segments) > 1
    assert all(end - begun < 8 * 16_000 for begun, end, _ in segments)
