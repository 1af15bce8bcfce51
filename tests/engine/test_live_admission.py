"""Admission of live callers who connect in a burst, on a virtual clock."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import tiny_moonshine
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_moonshine import CARD

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.config import EngineConfig
from asr_serve.engine.builder import measure_new_live_callers
from asr_serve.engine.client import EngineClient, VadSession
from asr_serve.engine.executor import EngineComponents
from asr_serve.engine.partial_rate import (
    MIN_SAMPLES,
    OVERLOADED_MS,
    PROOF_MS,
    PROVEN_FOR_MS,
    RESERVATION_MS,
    LiveAdmission,
    PartialRateController,
)
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.errors import AtCapacity, EngineClosed
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.registry import AsrCard, asr_card

MIN_RESERVATIONS = 32
SECOND = 31 * WINDOW_SAMPLES
"""About a second of audio in whole windows."""


class ScriptedBackend:
    """Engine that answers when the test says so."""

    card, turn_card, speakers, state = CARD, None, True, "ready"
    new_live_callers = MIN_RESERVATIONS

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.requests: list[Any] = []

    def open_vad_session(self, session: int, live: bool, state: bytes | None = None) -> None: ...
    def close_session(self, session: int) -> None: ...
    def describe(self) -> dict[str, Any]:
        return {}

    def diarize_window(self, *_: object) -> None: ...
    def submit_vad_chunk(self, chunk: Any) -> None:
        self.chunks.append(chunk)

    def submit(self, request: Any) -> None:
        self.requests.append(request)

    def answer(self, probability: float = 0.9) -> None:
        """Answer all voice activity that waits."""
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            chunk.future.set_result(np.full(chunk.window_count, probability, np.float32))


class Engine:
    """Client of a scripted backend, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.backend = ScriptedBackend()

        def connect(_: EngineConfig, __: object, stopped: Callable[[], None]) -> ScriptedBackend:
            self.stopped = stopped
            return self.backend

        self.client = EngineClient(EngineConfig(), connect, lambda: self.now_s)

    def burst(self, callers: int, api_client: str | None = None) -> tuple[list[VadSession], list[int]]:
        """Callers who connect in one instant: the sessions of those admitted, the retry times of the others."""
        sessions, retries = [], []
        for _ in range(callers):
            try:
                sessions.append(self.client.open_vad_session(live=True, api_client=api_client))
            except AtCapacity as error:
                retries.append(error.retry_after_ms)
        return sessions, retries

    def speak(self, sessions: list[VadSession], seconds: int, *, probability: float = 0.9, late_s: float = 0) -> None:
        """Each caller sends audio in real time, and all of it is answered `late_s` after it was sent."""
        for _ in range(seconds):
            for session in sessions:
                session.submit_windows(np.zeros(SECOND, np.float32))
            self.now_s += late_s
            self.backend.answer(probability)
            self.now_s += 1 - late_s


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_burst_is_bounded_and_the_others_are_told_when_to_try_again(engine: Engine) -> None:
    sessions, retries = engine.burst(300)
    assert len(sessions) == MIN_RESERVATIONS
    assert len(retries) == 300 - MIN_RESERVATIONS
    assert min(retries) > 0
    assert engine.client.describe()["sessions"] == MIN_RESERVATIONS
    engine.client.open_vad_session().close()  # a recording needs no reservation


def test_a_caller_who_leaves_returns_the_reservation(engine: Engine) -> None:
    sessions, _ = engine.burst(300)
    for session in sessions[:5]:
        session.close()
        session.close()
    assert len(engine.burst(300)[0]) == 5


def test_the_next_burst_may_double_what_was_answered_on_time(engine: Engine) -> None:
    sessions: list[VadSession] = []
    for expected in (32, 64, 128, 256):
        sessions += engine.burst(300)[0]
        assert len(sessions) == expected
        assert not engine.burst(1)[0]
        engine.speak(sessions, PROOF_MS // 1_000 + 1)
    for session in sessions:
        session.close()
    assert len(engine.burst(300)[0]) == MIN_RESERVATIONS, "callers who have left prove nothing"


def test_audio_sent_at_once_is_no_proof_before_its_time(engine: Engine) -> None:
    sessions, _ = engine.burst(300)
    for _ in range(5):
        for session in sessions:
            session.submit_windows(np.zeros(SECOND, np.float32))
    engine.backend.answer()
    engine.now_s += PROOF_MS / 1_000 - 0.001
    assert not engine.burst(1)[0]
    engine.now_s += 0.002
    for session in sessions:
        session.submit_windows(np.zeros(WINDOW_SAMPLES, np.float32))
    engine.backend.answer()
    assert len(engine.burst(300)[0]) == MIN_RESERVATIONS


@pytest.mark.parametrize("sends_silence", [False, True])
def test_silent_callers_leave_half_of_the_places_and_prove_nothing(engine: Engine, sends_silence: bool) -> None:
    sessions, _ = engine.burst(300)
    seconds = RESERVATION_MS // 1_000
    for rounds in range(3):
        engine.speak(sessions if sends_silence else [], seconds - 1, probability=0.1)
        assert not engine.burst(1)[0], rounds
        engine.now_s += 1
        admitted_now, _ = engine.burst(300)
        assert len(admitted_now) == MIN_RESERVATIONS // 2, rounds
        sessions += admitted_now
    engine.speak(sessions, PROOF_MS // 1_000 + 1)  # at last
    assert len(engine.burst(300)[0]) == len(sessions)


def test_silent_callers_who_speak_at_once_are_new_callers(engine: Engine) -> None:
    """Nobody else is admitted until they were served: their load returns, and was not measured."""
    sessions, _ = engine.burst(300)
    engine.now_s += RESERVATION_MS / 1_000
    sessions += engine.burst(300)[0]
    assert len(sessions) == MIN_RESERVATIONS * 3 // 2
    engine.now_s += RESERVATION_MS / 1_000
    engine.speak(sessions, 1)
    assert not engine.burst(1)[0]
    engine.speak(sessions, PROOF_MS // 1_000)
    assert len(engine.burst(300)[0]) == len(sessions)


def test_who_comes_again_at_the_time_that_it_was_told_finds_a_place(engine: Engine) -> None:
    """A tenth of a burst may be told twice: the clock of this test goes in seconds."""
    sessions, retries = engine.burst(300)
    due = sorted(engine.now_s + retry_ms / 1_000 for retry_ms in retries)
    refused_again = 0
    assert max(retries) < 20_000
    while due:
        engine.speak(sessions, 1)
        while due and due[0] <= engine.now_s:
            due.pop(0)
            found, retry_again = engine.burst(1)
            sessions += found
            refused_again += len(retry_again)
            due = sorted(due + [engine.now_s + retry_ms / 1_000 for retry_ms in retry_again])
    assert len(sessions) == 300
    assert refused_again <= 30


def test_one_client_leaves_places_to_others(engine: Engine) -> None:
    first, _ = engine.burst(300, "key-1")
    assert len(first) == MIN_RESERVATIONS, "alone, it has all"
    assert not engine.burst(1, "key-2")[0]
    engine.now_s += RESERVATION_MS / 1_000
    assert len(engine.burst(300, "key-1")[0]) == MIN_RESERVATIONS // 2, "the idle ones have the rest"
    for session in first:
        session.close()
    assert len(engine.burst(300, "key-1")[0]) == MIN_RESERVATIONS // 4, "three quarters of the places"
    assert len(engine.burst(300, "key-2")[0]) == MIN_RESERVATIONS // 4
    engine.now_s += PROVEN_FOR_MS / 1_000
    assert len(engine.burst(300, "key-1")[0]) == MIN_RESERVATIONS // 2, "nobody else has come for long"


def test_late_answers_prove_nothing(engine: Engine) -> None:
    sessions, _ = engine.burst(300)
    engine.speak(sessions, 5, late_s=0.5)
    sessions += engine.burst(32)[0]
    assert len(sessions) == 64
    for _ in range(3):
        for session in sessions:
            session.submit_windows(np.zeros(SECOND, np.float32))
        engine.now_s += 2
        engine.backend.answer()
    assert not engine.burst(1)[0]


def test_words_that_nobody_has_answered_yet_count_as_late(engine: Engine) -> None:
    """Voice activity on time says little while requests for the words wait."""
    sessions, _ = engine.burst(300)
    tickets = [engine.client.submit(np.zeros(16_000, np.float32), priority="live") for _ in range(MIN_SAMPLES)]
    engine.speak(sessions, RESERVATION_MS // 1_000)
    with pytest.raises(AtCapacity, match="10000 ms for their words") as refused:
        engine.client.open_vad_session(live=True)
    assert refused.value.retry_after_ms > 0
    assert len(tickets) == len(engine.backend.requests)
    for request in engine.backend.requests:
        request.future.cancel()
    assert len(engine.burst(300)[0]) == MIN_RESERVATIONS // 2, "those who were late for so long are idle"


@pytest.mark.parametrize(("words_ms", "admitted_now"), [(0, 32), (250, 24), (500, 16), (900, 3)])
def test_fewer_are_admitted_the_longer_words_take(engine: Engine, words_ms: int, admitted_now: int) -> None:
    """What a caller costs grows with its sentence, and shows after its proof."""
    sessions, _ = engine.burst(300)
    engine.speak(sessions, PROOF_MS // 1_000 + 1)
    for _ in range(MIN_SAMPLES):
        engine.client.partial_rate.record_turnaround(words_ms, 1_000 * engine.now_s)
    found, retries = engine.burst(300)
    assert len(found) == admitted_now
    assert min(retries) >= 200
    for session in sessions[:10]:
        session.close()
    more, _ = engine.burst(300)
    assert len(found) + len(more) == max(10, int(22 * (1 - words_ms / 1_000)), admitted_now), "places of those who left"


def test_voice_activity_that_nobody_has_answered_yet_counts_as_late(engine: Engine) -> None:
    sessions, _ = engine.burst(300)
    engine.speak(sessions, PROOF_MS // 1_000 + 1)
    for session in sessions[:MIN_SAMPLES]:
        session.submit_windows(np.zeros(SECOND, np.float32))
    engine.now_s += OVERLOADED_MS / 1_000 + 1
    with pytest.raises(AtCapacity, match="2000 ms for their words"):
        engine.client.open_vad_session(live=True)
    for chunk in engine.backend.chunks:
        chunk.future.cancel()
    assert engine.burst(1)[0]


def test_an_engine_that_closes_keeps_no_reservation(engine: Engine) -> None:
    def closed(*_: object) -> None:
        raise EngineClosed("closed")

    opens, engine.backend.open_vad_session = engine.backend.open_vad_session, closed
    for _ in range(2 * MIN_RESERVATIONS):
        with pytest.raises(EngineClosed):
            engine.client.open_vad_session(live=True)
    engine.backend.open_vad_session = opens
    assert len(engine.burst(300)[0]) == MIN_RESERVATIONS


@pytest.mark.parametrize("places", ["sessions", "diarization windows"])
def test_who_waits_for_a_place_hears_that_the_engine_closed(engine: Engine, places: str) -> None:
    client = engine.client

    def closed(*_: object) -> None:
        raise EngineClosed("closed")

    def stop() -> None:
        engine.backend.open_vad_session = engine.backend.diarize_window = closed
        engine.stopped()

    def fill() -> None:
        for _ in range(100_000):
            if places == "sessions":
                client.open_vad_session(wait=True, check=waits.set)
            else:
                client.diarize_window(np.zeros(WINDOW_SAMPLES, np.float32), wait=True, check=waits.set)

    waits = threading.Event()  # `check` runs under the lock, before the wait that `stop` ends
    stopper = threading.Thread(target=lambda: (waits.wait(10), stop()))
    stopper.start()
    with pytest.raises(EngineClosed):
        fill()
    stopper.join(10)
    assert waits.is_set()


# --- the rule alone ---------------------------------------------------------------------------------


def test_a_proof_is_forgotten_after_a_while_and_renewed_by_speech() -> None:
    admission, now = LiveAdmission(MIN_RESERVATIONS), 0.0
    for start, at_ms in ((0, 0), (100, PROOF_MS)):
        for caller in range(start, start + MIN_RESERVATIONS):
            admission.admit(caller, at_ms)
        for caller in range(start, start + MIN_RESERVATIONS):
            admission.record_answer(caller, PROOF_MS, 0.0, at_ms + PROOF_MS)
    now = 2 * PROOF_MS
    assert admitted(admission, now) == 2 * MIN_RESERVATIONS
    now += PROVEN_FOR_MS
    assert admitted(admission, now) == MIN_RESERVATIONS // 2, "all of them are idle"
    now += PROOF_MS
    for caller in (*range(MIN_RESERVATIONS), *range(100, 105)):
        for answered_ms in (now - PROOF_MS, now):
            admission.record_answer(caller, PROOF_MS, OVERLOADED_MS, answered_ms)
    now += RESERVATION_MS
    assert admitted(admission, now) == (MIN_RESERVATIONS + 5) - (MIN_RESERVATIONS + 5) // 2


def test_admission_takes_as_many_steps_with_thousands_of_callers_as_with_ten() -> None:

    def steps(admission: LiveAdmission, number: int, now_ms: float) -> int:
        """Lines and calls of `admit` that the interpreter runs."""
        counted = 0

        def count(*_: object) -> object:
            nonlocal counted
            counted += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            admission.admit(number, now_ms)
        finally:
            sys.settrace(before)
        return counted

    found = []
    for known in (10, 5_000):
        admission = LiveAdmission(5_000)
        for caller in range(known):
            admission.admit(caller, 0.0)
            admission.record_answer(caller, PROOF_MS, 0.0, PROOF_MS)
        found.append(steps(admission, known, PROOF_MS))
    assert found[0] == found[1]


def admitted(admission: LiveAdmission, now_ms: float) -> int:
    """Callers of a burst of 300 who are admitted; their numbers are of no other caller."""
    found = 0
    for number in range(300):
        try:
            admission.admit(int(1_000 * now_ms) + 1_000 + number, now_ms)
        except AtCapacity:
            continue
        found += 1
    return found


actions = st.tuples(st.sampled_from(["admit", "answer", "silence", "late", "leave", "wait"]), st.integers(0, 400))


@given(st.lists(actions, max_size=150))
def test_new_callers_are_never_more_than_the_proven_or_the_start_value(steps: list[tuple[str, int]]) -> None:
    admission, now, numbers = LiveAdmission(MIN_RESERVATIONS), 0.0, itertools.count()
    on_line: dict[int, float] = {}
    for action, number in steps:
        if action == "admit":
            for caller in itertools.islice(numbers, number):
                try:
                    admission.admit(caller, now)
                except AtCapacity:
                    break
                on_line[caller] = now
                new = sum(now - since < PROOF_MS for since in on_line.values())
                assert new <= max(MIN_RESERVATIONS, len(on_line) - new)
        elif action == "leave":
            for caller in list(on_line)[:number]:
                admission.release(caller)
                del on_line[caller]
        elif action == "wait":
            now += 40 * number
        else:
            for caller in list(on_line)[:number]:
                wait_ms = 2 * OVERLOADED_MS if action == "late" else 0.0
                admission.record_answer(caller, 0.0 if action == "silence" else 1_000.0, wait_ms, now)


def test_few_requests_that_wait_are_no_overload() -> None:
    controller = PartialRateController()
    for request in range(MIN_SAMPLES - 1):
        controller.record_request(request, 0.0)
    controller.check_overload(60_000.0)
    controller.record_request(MIN_SAMPLES, 59_000.0)
    controller.check_overload(60_000.0)
    with pytest.raises(AtCapacity):
        controller.check_overload(60_001.0)
    controller.record_end(0)
    controller.record_end(0)
    controller.check_overload(60_001.0)


# --- the first number -------------------------------------------------------------------------------------


@pytest.fixture
def parts() -> EngineComponents:
    return tiny_moonshine.build()


@pytest.mark.parametrize(("speed", "callers"), [(3.0, 4), (120.0, 10), (600.0, 50)])
def test_as_many_may_be_new_as_the_encoder_is_fast(
    monkeypatch: pytest.MonkeyPatch, parts: EngineComponents, speed: float, callers: int
) -> None:
    monkeypatch.setattr(EncodeRunner, "measure_speed", lambda _: speed)
    assert measure_new_live_callers(parts, CARD, EngineConfig()) == callers


@pytest.mark.parametrize(
    ("card", "settings", "callers"),
    [
        (CARD, {"new_live_callers": 3}, 3),
        (asr_card("moonshine-streaming-tiny-en"), {}, 32),
        (asr_card("armspeech-hy"), {}, 32),
        (CARD, {"role": "decode"}, 32),
        (CARD, {"peers": ("127.0.0.1:1",)}, 32),
    ],
)
def test_what_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, parts: EngineComponents, card: AsrCard, settings: dict[str, Any], callers: int
) -> None:
    monkeypatch.delattr(EncodeRunner, "measure_speed")
    assert measure_new_live_callers(parts, card, EngineConfig(**settings)) == callers


@pytest.mark.parametrize(("runs_s", "speed"), [((0.4, 0.2, 0.1), 80.0), ((0.4, 2.4), 20.0), ((3.2,), 2.5)])
def test_the_speed_is_that_of_the_fastest_run(parts: EngineComponents, runs_s: tuple[float, ...], speed: float) -> None:
    """There are no more after one that takes long. Two encoder threads take a clip each."""
    assert isinstance(parts.model, EncoderDecoderModel)
    moments = itertools.accumulate(chain.from_iterable((0.0, run_s) for run_s in runs_s))
    runner = EncodeRunner(parts.model, parts.device)
    parts.device.encoder_threads = 2
    encode, threads = runner.encode, []

    def counted(batch: Any) -> Any:
        threads.append((threading.current_thread().name, torch.get_num_threads()))
        return encode(batch)

    runner.encode = counted  # type: ignore[method-assign]
    assert runner.measure_speed(lambda: next(moments)) == pytest.approx(speed)
    assert not list(moments)
    assert len(threads) == 2 * len(runs_s)
    assert {number for _, number in threads} == {1}
    assert threading.current_thread().name not in {name for name, _ in threads}
