"""Voice-activity steps beside the loop: sessions that close, failures, a stop and the order of chunks while one
runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_clients import spy, wait_until
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome, start

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.devices.cpu import CpuDevice
from asr_serve.engine.client import EngineClient
from asr_serve.engine.vad_runner import VadRunner
from asr_serve.errors import Cancelled, EngineClosed, StepFailed
from asr_serve.models.auxiliary import silero
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES

PIECES = np.split(clip(7, 12 * WINDOW_SAMPLES), [3 * WINDOW_SAMPLES, 4 * WINDOW_SAMPLES, 8 * WINDOW_SAMPLES])


@pytest.fixture
def begin(close_later: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineClient]:
    monkeypatch.setenv("ASR_SERVE_THREADS", "2")
    return lambda **settings: close_later(start(**settings))


class HeldSteps:
    """Holds every voice-activity step of a client until `release`; then steps run freely."""

    def __init__(self, client: EngineClient) -> None:
        self.rows: list[int] = []
        self.threads: set[str] = set()
        self.most_at_once = self._running = 0
        self._entered, self._free = threading.Event(), threading.Event()
        self.error: Exception | None = None
        runner = client.backend.loop.vad_runner
        original = runner.step

        def step(batch, state):
            self.rows.append(len(batch))
            self.threads.add(threading.current_thread().name)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self._entered.set()
            try:
                assert self._free.wait(WAIT_S)
                if self.error is not None:
                    raise self.error
                return original(batch, state)
            finally:
                self._running -= 1

        runner.step = step

    def wait_in_flight(self) -> None:
        assert self._entered.wait(WAIT_S)

    def release(self) -> None:
        self._free.set()


def probabilities(client: EngineClient, parts: list[np.ndarray], live: bool = False) -> list[np.ndarray]:
    session = client.open_vad_session(live=live)
    futures = [session.submit_windows(part) for part in parts]
    found = [future.result(WAIT_S) for future in futures]
    session.close()
    return found


def expect_arrays(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_the_loop_goes_on_while_a_step_of_live_callers_runs(begin):
    client = begin()
    expected = probabilities(client, PIECES)
    steps = HeldSteps(client)
    session = client.open_vad_session(live=True)
    futures = [session.submit_windows(part) for part in PIECES]
    steps.wait_in_flight()
    ticket = client.submit(clip(1, 16_000), SearchOptions(temperatures=(0.0,)))
    assert isinstance(outcome(ticket), Recognition)
    assert not futures[0].done()
    steps.release()
    expect_arrays([future.result(WAIT_S) for future in futures], expected)
    session.close()
    assert [name.startswith("asr-serve vad") for name in steps.threads] == [True]
    assert client.describe()["vad_s"] > 0
    expect_empty(client)


@pytest.mark.parametrize(("threads", "live"), [("2", False), ("1", True)])
def test_files_alone_and_engines_of_one_thread_step_on_the_loop(begin, monkeypatch, threads, live):
    monkeypatch.setenv("ASR_SERVE_THREADS", threads)
    client = begin()
    steps = HeldSteps(client)
    steps.release()
    probabilities(client, PIECES, live=live)
    assert steps.threads == {client.backend._thread.name}


def test_files_have_steps_beside_the_loop_where_models_leave_the_cores_to_them(begin, monkeypatch):
    expected = probabilities(begin(), PIECES)
    monkeypatch.setattr(CpuDevice, "computes_on_host", False)
    client = begin()
    steps = HeldSteps(client)
    steps.release()
    expect_arrays(probabilities(client, PIECES), expected)
    assert [name.startswith("asr-serve vad") for name in steps.threads] == [True]
    expect_empty(client)


def test_a_session_closed_in_flight_leaves_its_row_to_the_next(begin):
    client = begin(max_sessions=2)
    expected = probabilities(client, PIECES)
    steps = HeldSteps(client)
    session, other = client.open_vad_session(live=True), client.open_vad_session(live=True)
    with_others = [other.submit_windows(part) for part in PIECES]
    closed = [session.submit_windows(part) for part in PIECES]
    steps.wait_in_flight()
    session.close()
    for future in closed:
        with pytest.raises(Cancelled):
            future.result(WAIT_S)
    next_session = client.open_vad_session(live=True)
    futures = [next_session.submit_windows(part) for part in PIECES]
    assert on_loop(client, lambda loop: loop.states.used) == 2
    steps.release()
    expect_arrays([future.result(WAIT_S) for future in futures], expected)
    expect_arrays([future.result(WAIT_S) for future in with_others], expected)
    next_session.close()
    other.close()
    assert on_loop(client, lambda loop: (loop.states.used, loop.vad_scheduler.queued_windows)) == (0, 0)
    expect_empty(client)


def test_a_step_that_fails_in_flight_fails_its_own_chunks(begin):
    client = begin()
    expected = probabilities(client, PIECES[1:])
    steps = HeldSteps(client)
    steps.error = RuntimeError("the network hiccuped")
    session, closed = client.open_vad_session(live=True), client.open_vad_session(live=True)
    failing, rejected = session.submit_windows(PIECES[0]), closed.submit_windows(PIECES[0])
    steps.wait_in_flight()
    closed.close()
    later = [session.submit_windows(part) for part in PIECES[1:]]
    on_loop(client, lambda _: None)  # all of these have arrived
    failing.add_done_callback(lambda _: setattr(steps, "error", None))
    steps.release()
    with pytest.raises(StepFailed, match="voice activity failed: RuntimeError: the network hiccuped"):
        failing.result(WAIT_S)
    with pytest.raises(Cancelled):
        rejected.result(WAIT_S)
    expect_arrays([future.result(WAIT_S) for future in later], expected)
    session.close()
    expect_empty(client)


def test_an_engine_stops_with_a_step_in_flight(begin):
    client = begin()
    steps = HeldSteps(client)
    session = client.open_vad_session(live=True)
    futures = [session.submit_windows(part) for part in PIECES]
    steps.wait_in_flight()
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    for future in futures:
        with pytest.raises(EngineClosed):
            future.result(WAIT_S)
    steps.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert steps.rows == [1]


def test_chunks_are_answered_in_order_one_step_at_a_time(begin):
    """The second chunk is cached, the first one no more: it is not answered before the first one's step is over."""
    client = begin(prefix_bytes=20_000)  # room for one entry of voice activity
    parts = PIECES[:2]
    expected = probabilities(client, parts)
    steps = HeldSteps(client)
    session = client.open_vad_session(live=True)
    answered: list[int] = []
    futures = []
    for number, part in enumerate(parts):
        futures.append(session.submit_windows(part))
        futures[-1].add_done_callback(lambda _, number=number: answered.append(number))
        steps.wait_in_flight()
    on_loop(client, lambda _: None)
    assert answered == []
    steps.release()
    expect_arrays([future.result(WAIT_S) for future in futures], expected)
    wait_until(lambda: len(answered) == 2)
    assert answered == [0, 1]
    session.close()


def test_one_step_is_in_flight_at_a_time_and_the_loop_sleeps(begin):
    client = begin(vad_windows=256)
    steps = HeldSteps(client)
    sessions = [client.open_vad_session(live=True) for _ in range(3)]
    sessions[0].submit_windows(PIECES[0])
    steps.wait_in_flight()
    futures = [session.submit_windows(np.zeros(128 * WINDOW_SAMPLES, np.float32)) for session in sessions]
    on_loop(client, lambda _: None)
    iterations: list[None] = []
    spy(client.backend.loop.executor, "step", lambda: iterations.append(None))
    time.sleep(0.2)
    waiting = on_loop(client, lambda loop: (loop.vad_scheduler.queued_windows, loop.vad_scheduler.due_s))
    assert waiting == (3 * 128, None)
    assert len(iterations) <= 2, "the loop spins while it waits for a step"
    steps.release()
    for future in futures:
        assert len(future.result(WAIT_S)) == 128
    assert steps.most_at_once == 1
    for session in sessions:
        session.close()
    expect_empty(client)


def test_states_are_exported_together_as_one_by_one():
    runner = VadRunner(silero.load(), 4)
    slots = [runner.states.allocate() for _ in range(3)]
    output = runner.step([clip(seed, (seed + 1) * WINDOW_SAMPLES) for seed in range(3)], runner.gather_states(slots))
    exported = output.export_states()
    runner.scatter_states(slots[1:], output.state, [1, 2])
    assert [runner.states.export_state(slot) for slot in slots[1:]] == exported[1:]
    assert not any(runner.states.export_state(slots[0])), "its session was closed"
    assert len(set(exported)) == 3
