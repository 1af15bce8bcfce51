"""The engine in a process of its own: the same answers, through its death and another's birth."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from children import Child
from tiny_moonshine import WAIT_S, clip, outcome, save

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.config import EngineConfig
from asr_serve.decoding.seq2seq import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.in_flight import InFlight
from asr_serve.engine.process.message_sender import OutgoingMessage
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.process.supervisor import Supervisor
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import Cancelled, EngineClosed, EngineCrashed, UnknownModel, WeightsCorrupt

MODEL = "moonshine-tiny-en"
CONFIG = EngineConfig(max_decode_rows=8, kv_bytes=1 << 20, max_sessions=6)
RING = RingSize(slots=64, payload_bytes=16_384)
"""Small, so that a load of clips goes round it several times."""
ONCE = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 16_000 + 7_919 * seed) for seed in range(12)]
Begin = Callable[..., EngineClient]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Moonshine on disk, as another process can load it."""
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def begin(checkpoint: Path) -> Iterator[Begin]:
    """Starts engine processes and closes them."""
    started: list[EngineClient] = []
    before = set(psutil.Process().children(recursive=True))

    def starting(folder: Path = checkpoint, **settings: object) -> EngineClient:
        spec = EngineSpec(model=MODEL, device="cpu", dtype="fp32", weights=str(folder))
        started.append(EngineClient(msgspec.structs.replace(CONFIG, **settings), process_backend(spec, RING)))
        return started[-1]

    yield starting
    for client in started:
        pid = process(client) if client.state != "closed" else None
        client.close()
        assert client.state == "closed"
        assert pid is None or not psutil.pid_exists(pid)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> EngineClient:
    """The same model on a thread of ours: what every answer is compared with."""
    found = AsrCheckpoint.find(MODEL, checkpoint)
    client = EngineClient(CONFIG, thread_backend(found.card, lambda: found.build("cpu", "fp32")))
    yield client
    client.close()


def link(client: EngineClient) -> ProcessBackend:
    assert isinstance(client.backend, ProcessBackend)
    return client.backend


def process(client: EngineClient) -> int:
    current = link(client)._current
    assert current is not None
    return current.process.pid


def kill(client: EngineClient) -> None:
    os.kill(process(client), signal.SIGKILL)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def expect_idle(client: EngineClient) -> None:
    def idle() -> bool:
        told = client.describe()
        return (told["requests"], told["sessions"], told["pages_used"], told["sessions_used"]) == (0, 0, 0, 0)

    until(idle)  # what was cancelled or closed is a message on its way
    assert link(client).ring_depth == 0


def expect_answers(client: EngineClient, alone: EngineClient, while_waiting: Callable[[], None]) -> None:
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS[:2]]
    while_waiting()
    tickets += [client.submit(pcm, ONCE) for pcm in CLIPS[2:]]
    came = [ticket.future.result(WAIT_S) for ticket in tickets]
    expected = [alone.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    assert [answer.tokens for answer in came] == [answer.tokens for answer in expected]
    assert len({answer.tokens for answer in came}) > len(CLIPS) // 2, "answers must tell the clips apart"
    for answer in came:
        assert answer.phases is not None
        assert (
            answer.phases.submitted_ns
            <= answer.phases.encode_start_ns
            <= answer.phases.encode_end_ns
            <= answer.phases.decode_end_ns
        )


def test_the_same_answers_as_on_a_thread(begin, alone):
    client = begin()
    expect_answers(client, alone, while_waiting=lambda: None)
    expect_idle(client)


def test_the_same_probabilities_as_on_a_thread(begin, alone):
    client = begin()
    speech = clip(3, 40 * WINDOW_SAMPLES)
    pieces = [speech[at : at + 8 * WINDOW_SAMPLES] for at in range(0, len(speech), 8 * WINDOW_SAMPLES)]
    mine, theirs = client.open_vad_session(), alone.open_vad_session()
    for piece in pieces:
        np.testing.assert_array_equal(
            mine.submit_windows(piece).result(WAIT_S), theirs.submit_windows(piece).result(WAIT_S)
        )
    mine.close()
    theirs.close()
    expect_idle(client)


@pytest.mark.slow
def test_killed_under_load_every_request_is_still_answered(begin, alone):
    client = begin()
    expect_answers(client, alone, while_waiting=lambda: kill(client))
    assert link(client).restarts == 1
    expect_idle(client)


@pytest.mark.slow
def test_killed_in_mid_sentence_a_session_goes_on_where_it_stood(begin, alone):
    client = begin()
    speech = clip(5, 64 * WINDOW_SAMPLES)
    pieces = [speech[at : at + 8 * WINDOW_SAMPLES] for at in range(0, len(speech), 8 * WINDOW_SAMPLES)]
    mine, theirs = client.open_vad_session(), alone.open_vad_session()
    answers = [mine.submit_windows(piece) for piece in pieces[:3]]
    for answer in answers:
        answer.result(WAIT_S)
    kill(client)
    answers += [mine.submit_windows(piece) for piece in pieces[3:]]
    for answer, piece in zip(answers, pieces, strict=True):
        np.testing.assert_array_equal(answer.result(WAIT_S), theirs.submit_windows(piece).result(WAIT_S))
    assert link(client).restarts == 1
    mine.close()
    theirs.close()
    expect_idle(client)


@pytest.mark.slow
def test_what_three_processes_died_over_is_given_up_and_the_rest_goes_on(begin, alone):
    client = begin()
    stop_engine(client)
    doomed, bystander = client.submit(CLIPS[0], ONCE), client.submit(CLIPS[1], ONCE)
    for _ in range(3):
        given = link(client)._current
        given.requests[doomed.id].started = True  # as the engine says when it encodes it
        link(client)._deliver(given.record_death("signal SIGKILL"))  # as for each death
    kill(client)
    with pytest.raises(EngineCrashed, match="died 3 times while it worked on this request"):
        doomed.future.result(WAIT_S)
    assert bystander.future.result(WAIT_S).tokens == alone.submit(CLIPS[1], ONCE).future.result(WAIT_S).tokens
    expect_answers(client, alone, while_waiting=lambda: None)
    expect_idle(client)


@pytest.mark.slow
def test_a_process_that_cannot_be_made_is_tried_again(begin, alone, monkeypatch):
    client = begin()
    tried = []

    def none(*_):
        tried.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("asr_serve.engine.process.process.socket.socketpair", none)
        kill(client)
        until(lambda: len(tried) >= 2)
    expect_answers(client, alone, while_waiting=lambda: None)


def stop_engine(client: EngineClient) -> None:
    """SIGSTOP: it answers nothing until it is killed."""
    os.kill(process(client), signal.SIGSTOP)


@pytest.mark.slow
def test_requests_that_come_while_there_is_no_engine_wait_for_the_next(begin, alone):
    client = begin()
    kill(client)
    until(lambda: client.state == "restarting")
    expect_answers(client, alone, while_waiting=lambda: None)


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_its_work_done_by_another(begin, alone, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.HANG_TIMEOUT_S", 1.0)
    client = begin()
    expect_answers(client, alone, while_waiting=lambda: stop_engine(client))  # more than the ring holds
    assert link(client).restarts == 1
    expect_idle(client)


@pytest.mark.slow
def test_an_idle_engine_that_hangs_is_noticed(begin, alone, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.HANG_TIMEOUT_S", 1.0)
    client = begin()
    stop_engine(client)
    until(lambda: link(client).restarts == 1)
    expect_answers(client, alone, while_waiting=lambda: None)


@pytest.mark.slow
def test_a_process_that_hangs_while_it_loads_is_killed(begin, alone, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.HANG_TIMEOUT_S", 1.0)
    client = begin()
    monkeypatch.setattr("asr_serve.engine.process.supervisor.LOAD_TIMEOUT_S", 8.0)
    old = process(client)
    kill(client)
    until(lambda: process(client) != old)
    stop_engine(client)
    expect_answers(client, alone, while_waiting=lambda: None)


def fill(client: EngineClient) -> None:
    """More small messages than its pipe holds; they mean nothing to it."""
    with link(client)._lock:
        for _ in range(2_000):
            link(client)._current.send(messages.CancelRequest(1 << 30))


def unsent(client: EngineClient) -> list[OutgoingMessage]:
    return list(link(client)._current.current_process._sender._queue)


@pytest.mark.slow
def test_an_engine_that_hangs_with_a_full_pipe_is_noticed(begin, alone, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.HANG_TIMEOUT_S", 1.0)
    client = begin()
    stop_engine(client)
    fill(client)
    assert unsent(client)
    until(lambda: link(client).restarts == 1)
    expect_answers(client, alone, while_waiting=lambda: None)


def test_an_engine_that_nobody_listens_to_still_listens(begin, alone, monkeypatch):
    """What it says waits, and what it is told is heard: else both sides would wait for ever."""
    client = begin()
    hold, take = threading.Event(), Supervisor._handle_message

    def late(self: Supervisor, given: InFlight, message: Any) -> None:
        assert hold.wait(WAIT_S)
        take(self, given, message)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_handle_message", late)
        reports: list[Future[messages.EngineReport]] = [Future() for _ in range(60)]
        with link(client)._lock:
            for answer in reports:  # several times what its pipe holds
                link(client)._current.request_report(answer)
        fill(client)
        until(lambda: not unsent(client))
        hold.set()
    assert [each.result(WAIT_S).number for each in reports] == sorted(each.result().number for each in reports)
    expect_answers(client, alone, while_waiting=lambda: None)
    expect_idle(client)


def test_callers_do_not_wait_for_an_engine_that_hangs(begin, alone):
    """The server's event loop puts what live callers say: one recording must not hold up everybody."""
    client = begin()
    files = [client.open_vad_session() for _ in range(3)]
    live = client.open_vad_session(live=True)
    pieces = [clip(seed, 512 * WINDOW_SAMPLES) for seed in range(3)]  # each fills the ring
    stop_engine(client)
    came = [session.submit_windows(piece) for session, piece in zip(files, pieces, strict=True)]
    said = clip(7, WINDOW_SAMPLES)
    came.append(live.submit_windows(said))
    assert link(client).restarts == 0, "it was killed first"
    assert psutil.Process(process(client)).status() == psutil.STATUS_STOPPED
    assert not any(answer.done() for answer in came)
    os.kill(process(client), signal.SIGCONT)
    for session, piece, answer in zip([*files, live], [*pieces, said], came, strict=True):
        other = alone.open_vad_session()
        np.testing.assert_array_equal(answer.result(WAIT_S), other.submit_windows(piece).result(WAIT_S))
        other.close()
        session.close()
    expect_idle(client)


def test_what_is_given_up_before_it_was_sent_is_not_held(begin, alone):
    client = begin()
    session = client.open_vad_session()
    stop_engine(client)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]  # more than the ring holds
    answer = session.submit_windows(clip(1, 8 * WINDOW_SAMPLES))
    assert any(letter.pcm is not None for letter in unsent(client))
    for ticket in tickets:
        client.cancel(ticket)
    session.close()
    assert not any(letter.pcm is not None for letter in unsent(client))
    assert {outcome(ticket) for ticket in tickets} == {Cancelled}
    with pytest.raises(Cancelled):
        answer.result(WAIT_S)
    os.kill(process(client), signal.SIGCONT)
    expect_answers(client, alone, while_waiting=lambda: None)
    expect_idle(client)


def test_closing_an_engine_that_hangs(begin, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.EXIT_TIMEOUT_S", 0.5)
    client = begin()
    stop_engine(client)
    client.close()


@pytest.mark.slow
def test_cancelled_while_the_engine_stands_still(begin, alone):
    client = begin()
    stop_engine(client)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS[:2]]  # they are in the ring and the pipe
    for ticket in tickets:
        client.cancel(ticket)
        assert outcome(ticket) is Cancelled
    assert client.describe()["requests"] == 0
    os.kill(process(client), signal.SIGCONT)
    expect_answers(client, alone, while_waiting=lambda: None)
    expect_idle(client)


def test_a_closed_session_rejects_what_is_under_way(begin):
    client = begin()
    session = client.open_vad_session()
    stop_engine(client)
    answer = session.submit_windows(clip(1, WINDOW_SAMPLES * 2))
    session.close()
    with pytest.raises(Cancelled):
        answer.result(WAIT_S)
    os.kill(process(client), signal.SIGCONT)
    expect_idle(client)


def test_closing_rejects_what_is_under_way_and_leaves_no_process(begin):
    client = begin()
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    client.close()
    assert {outcome(ticket) for ticket in tickets} <= {EngineClosed} | {type(None)} or all(
        ticket.future.done() for ticket in tickets
    )
    with pytest.raises(EngineClosed):
        client.submit(CLIPS[0], ONCE)
    with pytest.raises(EngineClosed):
        client.open_vad_session()


def test_what_loading_raises_is_raised_here(begin, tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsCorrupt, match="is no JSON"):
        begin(tmp_path)
    with pytest.raises(UnknownModel, match="did you mean 'moonshine-tiny-en'"):
        EngineClient(CONFIG, process_backend(EngineSpec(model="moonshine-tiny-e"), RING))


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_again_refuses_and_comes_back(begin, checkpoint, alone, tmp_path):
    folder = tmp_path / "moving"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    client = begin(folder)
    (folder / "config.json").rename(folder / "away.json")
    kill(client)
    waiting = client.submit(CLIPS[0], ONCE)
    with pytest.raises(EngineClosed, match="cannot be started at the moment") as told:
        waiting.future.result(WAIT_S)
    assert str(folder) not in str(told.value), "clients learn no paths"
    assert client.state == "failed"
    with pytest.raises(EngineClosed, match="cannot be started"):
        client.submit(CLIPS[0], ONCE)
    (folder / "away.json").rename(folder / "config.json")
    until(lambda: client.state == "ready")
    expect_answers(client, alone, while_waiting=lambda: None)


@pytest.mark.slow
def test_a_server_that_is_killed_takes_its_engine_along(checkpoint):
    script = f"""
import sys, time
from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.process.client import process_backend
from asr_serve.engine.process.messages import EngineSpec
spec = EngineSpec(model={MODEL!r}, device="cpu", dtype="fp32", weights={str(checkpoint)!r})
client = EngineClient(EngineConfig(kv_bytes=1 << 20), process_backend(spec, RingSize()))
assert "torch" not in sys.modules, "the server must not load torch"
print(client.backend._current.process.pid, flush=True)
time.sleep(600)
"""
    server = Child([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait(WAIT_S)
    server.stdout.close()
    engine.wait(WAIT_S)


@pytest.mark.slow
def test_no_descriptor_is_left_behind(begin):
    client = begin()
    before = psutil.Process().num_fds()
    for _ in range(2):
        kill(client)
        until(lambda: client.state != "ready")
        until(lambda: client.state == "ready")
    assert psutil.Process().num_fds() == before
