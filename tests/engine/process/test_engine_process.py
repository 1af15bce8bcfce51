"""Engine in its own process: same answers as on a thread, also across crashes, hangs and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from children import Child
from engine_clients import RING, backend_of, engine_pid, start_engine, wait_until
from tiny_moonshine import WAIT_S, clip, outcome, save

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.engine.process.backend import process_backend
from asr_serve.engine.process.in_flight import InFlight
from asr_serve.engine.process.message_sender import OutgoingMessage
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.supervisor import Supervisor
from asr_serve.errors import Cancelled, EngineClosed, EngineCrashed, UnknownModel, WeightsCorrupt

MODEL = "moonshine-tiny-en"
CONFIG = EngineConfig(max_decode_rows=8, kv_bytes=1 << 20, max_sessions=6, prefix_bytes=0)
ONCE = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 16_000 + 7_919 * seed) for seed in range(12)]
StartEngine = Callable[..., EngineClient]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Moonshine on disk, as another process can load it."""
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def kept() -> Iterator[list[EngineClient]]:
    """The engine, or none, that one test leaves to the next: a start takes longer than most of them."""
    left: list[EngineClient] = []
    before = set(psutil.Process().children(recursive=True))
    yield left
    for client in left:
        client.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def engines_of(clients: list[EngineClient]) -> set[psutil.Process]:
    return {psutil.Process(engine_pid(client)) for client in clients}


@pytest.fixture
def start(checkpoint: Path, kept: list[EngineClient]) -> Iterator[StartEngine]:
    """Starts engine processes and closes them. One that is as it was stays for the next test."""
    started: list[EngineClient] = []
    before = set(psutil.Process().children(recursive=True)) - engines_of(kept)

    def launch(folder: Path = checkpoint) -> EngineClient:
        if folder == checkpoint and kept:
            started.append(kept.pop())
        else:
            started.append(start_engine(MODEL, folder, CONFIG, process=True, threads=None))
        return started[-1]

    yield launch
    for client in started:
        whole = client.state == "ready" and not backend_of(client).restarts and backend_of(client)._current.idle
        if whole and not kept:
            kept.append(client)
            continue
        pid = engine_pid(client) if client.state != "closed" else None
        client.close()
        assert client.state == "closed"
        assert pid is None or not psutil.pid_exists(pid)
    assert set(psutil.Process().children(recursive=True)) <= before | engines_of(kept)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Iterator[EngineClient]:
    """Engine of the same model on a thread: the answers to compare with."""
    client = start_engine(MODEL, checkpoint, CONFIG)
    yield client
    client.close()


@pytest.fixture
def short_hang_timeout(kept: list[EngineClient], monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that are started after this: one that is kept has another."""
    while kept:
        kept.pop().close()
    monkeypatch.setattr("asr_serve.engine.process.supervisor.HANG_TIMEOUT_S", 1.0)


def kill(client: EngineClient) -> None:
    os.kill(engine_pid(client), signal.SIGKILL)


def stop_engine(client: EngineClient) -> None:
    """SIGSTOP: it answers nothing until it is killed, or goes on. Returns when each of its threads has stopped, which
    takes a loaded machine a moment."""
    pid = engine_pid(client)
    os.kill(pid, signal.SIGSTOP)
    states = [Path("/proc", str(pid), "task", str(thread.id), "stat") for thread in psutil.Process(pid).threads()]
    wait_until(lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in states))


def resume_engine(client: EngineClient) -> None:
    os.kill(engine_pid(client), signal.SIGCONT)


def expect_idle(client: EngineClient) -> None:
    def idle() -> bool:
        stats = client.describe()
        return (stats["requests"], stats["sessions"], stats["pages_used"], stats["sessions_used"]) == (0, 0, 0, 0)

    wait_until(idle)  # what was cancelled or closed is a message on its way
    assert backend_of(client).ring_depth == 0


def expect_answers(
    client: EngineClient, reference: EngineClient, while_waiting: Callable[[], object] = lambda: None
) -> None:
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS[:2]]
    while_waiting()
    tickets += [client.submit(pcm, ONCE) for pcm in CLIPS[2:]]
    results = [ticket.future.result(WAIT_S) for ticket in tickets]
    expected = [reference.submit(pcm, ONCE).future.result(WAIT_S) for pcm in CLIPS]
    assert [answer.tokens for answer in results] == [answer.tokens for answer in expected]
    assert len({answer.tokens for answer in results}) > len(CLIPS) // 2, "answers must tell the clips apart"
    for answer in results:
        assert answer.phases is not None
        at = answer.phases
        assert at.submitted_ns <= at.encode_start_ns <= at.encode_end_ns <= at.decode_end_ns


def test_a_process_answers_as_an_engine_on_a_thread(start, reference):
    client = start()
    expect_answers(client, reference)
    expect_idle(client)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [kill, stop_engine], ids=["killed", "hangs"])
def test_an_engine_lost_under_load_is_replaced_and_every_request_answered(request, start, reference, harm):
    if harm is stop_engine:
        request.getfixturevalue("short_hang_timeout")
    client = start()
    expect_answers(client, reference, while_waiting=lambda: harm(client))  # more than the ring holds
    assert backend_of(client).restarts == 1
    expect_idle(client)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "killed midway"])
def test_a_session_has_the_probabilities_of_one_on_a_thread(start, reference, killed):
    client = start()
    pieces = np.split(clip(5, 64 * WINDOW_SAMPLES), 8)
    session, other = client.open_vad_session(), reference.open_vad_session()
    answers = [session.submit_windows(piece) for piece in pieces[:3]]
    for answer in answers:
        answer.result(WAIT_S)
    if killed:
        kill(client)
    answers += [session.submit_windows(piece) for piece in pieces[3:]]
    for answer, piece in zip(answers, pieces, strict=True):
        np.testing.assert_array_equal(answer.result(WAIT_S), other.submit_windows(piece).result(WAIT_S))
    assert backend_of(client).restarts == killed
    session.close()
    other.close()
    expect_idle(client)


@pytest.mark.slow
def test_a_request_that_crashed_three_processes_fails_and_others_are_answered(start, reference):
    client = start()
    stop_engine(client)
    doomed, bystander = client.submit(CLIPS[0], ONCE), client.submit(CLIPS[1], ONCE)
    for _ in range(3):
        in_flight = backend_of(client)._current
        in_flight.requests[doomed.id].started = True  # as the engine says when it encodes it
        backend_of(client)._deliver(in_flight.record_death("signal SIGKILL"))  # as for each death
    kill(client)
    with pytest.raises(EngineCrashed, match="died 3 times while it worked on this request"):
        doomed.future.result(WAIT_S)
    assert bystander.future.result(WAIT_S).tokens == reference.submit(CLIPS[1], ONCE).future.result(WAIT_S).tokens
    expect_answers(client, reference)
    expect_idle(client)


@pytest.mark.slow
def test_a_failed_process_start_is_retried(start, reference, monkeypatch):
    client = start()
    attempts = []

    def refuse(*_):
        attempts.append(1)
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("asr_serve.engine.process.engine_process.socket.socketpair", refuse)
        kill(client)
        wait_until(lambda: len(attempts) >= 2)
    expect_answers(client, reference)


@pytest.mark.slow
def test_requests_during_a_restart_wait_for_the_next_engine(start, reference):
    client = start()
    kill(client)
    wait_until(lambda: client.state == "restarting")
    expect_answers(client, reference)


@pytest.mark.slow
def test_a_process_that_hangs_while_loading_is_killed(start, reference, short_hang_timeout, monkeypatch):
    client = start()
    monkeypatch.setattr("asr_serve.engine.process.supervisor.LOAD_TIMEOUT_S", 20.0)
    old = engine_pid(client)
    kill(client)
    wait_until(lambda: engine_pid(client) != old)
    stop_engine(client)
    expect_answers(client, reference)


def fill(client: EngineClient) -> None:
    """More small messages than its pipe holds; they mean nothing to it."""
    with backend_of(client)._lock:
        for _ in range(2_000):
            backend_of(client)._current.send(messages.CancelRequest(1 << 30))


def unsent(client: EngineClient) -> list[OutgoingMessage]:
    return list(backend_of(client)._current.process._sender._queue)


@pytest.mark.slow
@pytest.mark.parametrize("full_pipe", [False, True], ids=["idle", "full pipe"])
def test_a_hanging_engine_is_noticed_and_replaced(start, reference, short_hang_timeout, full_pipe):
    client = start()
    stop_engine(client)
    if full_pipe:
        fill(client)
        assert unsent(client)
    wait_until(lambda: backend_of(client).restarts == 1)
    expect_answers(client, reference)


def test_an_engine_whose_messages_nobody_reads_still_reads_its_own(start, reference, monkeypatch):
    """Its own messages wait while it reads others: else both sides would wait for ever."""
    client = start()
    hold, handle = threading.Event(), Supervisor._handle_message

    def late(self: Supervisor, in_flight: InFlight, message: Any) -> None:
        assert hold.wait(WAIT_S)
        handle(self, in_flight, message)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_handle_message", late)
        reports: list[Future[messages.EngineReport]] = [Future() for _ in range(60)]
        with backend_of(client)._lock:
            for answer in reports:  # several times what its pipe holds
                backend_of(client)._current.request_report(answer)
        fill(client)
        wait_until(lambda: not unsent(client))
        hold.set()
    assert [each.result(WAIT_S).number for each in reports] == sorted(each.result().number for each in reports)
    expect_answers(client, reference)
    expect_idle(client)


def test_submitting_does_not_block_on_a_hanging_engine(start, reference):
    """The server's event loop submits live audio: one recording must not hold up everybody."""
    client = start()
    files = [client.open_vad_session() for _ in range(3)]
    live = client.open_vad_session(live=True)
    pieces = [clip(seed, 512 * WINDOW_SAMPLES) for seed in range(3)]  # each fills the ring
    stop_engine(client)
    answers = [session.submit_windows(piece) for session, piece in zip(files, pieces, strict=True)]
    speech = clip(7, WINDOW_SAMPLES)
    answers.append(live.submit_windows(speech))
    assert backend_of(client).restarts == 0, "it was killed first"
    assert psutil.Process(engine_pid(client)).status() == psutil.STATUS_STOPPED
    assert not any(answer.done() for answer in answers)
    resume_engine(client)
    for session, piece, answer in zip([*files, live], [*pieces, speech], answers, strict=True):
        other = reference.open_vad_session()
        np.testing.assert_array_equal(answer.result(WAIT_S), other.submit_windows(piece).result(WAIT_S))
        other.close()
        session.close()
    expect_idle(client)


def test_audio_cancelled_before_it_was_sent_is_released(start, reference):
    client = start()
    session = client.open_vad_session()
    stop_engine(client)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]  # more than the ring holds
    answer = session.submit_windows(clip(1, 8 * WINDOW_SAMPLES))
    assert any(message.pcm is not None for message in unsent(client))
    for ticket in tickets:
        client.cancel(ticket)
    session.close()
    assert not any(message.pcm is not None for message in unsent(client))
    assert {outcome(ticket) for ticket in tickets} == {Cancelled}
    with pytest.raises(Cancelled):
        answer.result(WAIT_S)
    resume_engine(client)
    expect_answers(client, reference)
    expect_idle(client)


def test_closing_a_hanging_engine_returns(start, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.EXIT_TIMEOUT_S", 0.5)
    client = start()
    stop_engine(client)
    client.close()


@pytest.mark.slow
def test_requests_are_cancelled_while_the_engine_hangs(start, reference):
    client = start()
    stop_engine(client)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS[:2]]  # they are in the ring and the pipe
    for ticket in tickets:
        client.cancel(ticket)
        assert outcome(ticket) is Cancelled
    assert client.describe()["requests"] == 0
    resume_engine(client)
    expect_answers(client, reference)
    expect_idle(client)


def test_a_request_that_became_urgent_is_so_in_this_process_and_in_the_next_one(checkpoint):
    """Each is a batch, and there are more than the process encodes before it has read all messages."""
    config = msgspec.structs.replace(CONFIG, encode_frames=1)
    clips = [clip(seed, 16_000) for seed in range(24)]
    with contextlib.closing(start_engine(MODEL, checkpoint, config, process=True, threads=None)) as client:
        for go_on in (resume_engine, kill):
            stop_engine(client)
            tickets = [client.submit(pcm, ONCE, "live", within_ms=2_000) for pcm in clips]
            client.expedite(tickets[-1], 100)
            go_on(client)
            *others, urgent = [ticket.future.result(WAIT_S).phases.encode_start_ns for ticket in tickets]
            assert urgent < others[-1]
            assert others == sorted(others)
            expect_idle(client)


def test_a_separation_that_nobody_waits_for_is_withdrawn(start):
    client = start()
    speaker_ranges = (((0, 320_000),), ((160_000, 480_000),))
    stop_engine(client)
    running, waiting, last = (client.separate_speakers(clip(1, 480_000), speaker_ranges) for _ in range(3))
    client.cancel_separation(waiting)
    resume_engine(client)
    with pytest.raises(Cancelled):
        waiting.result(WAIT_S)
    assert not last.done()
    np.testing.assert_array_equal(running.result(WAIT_S), last.result(WAIT_S))
    client.cancel_separation(running)  # it is answered: nothing happens
    expect_idle(client)


def test_closing_a_session_cancels_its_pending_windows(start):
    client = start()
    session = client.open_vad_session()
    stop_engine(client)
    answer = session.submit_windows(clip(1, WINDOW_SAMPLES * 2))
    session.close()
    with pytest.raises(Cancelled):
        answer.result(WAIT_S)
    resume_engine(client)
    expect_idle(client)


def test_closing_the_client_ends_pending_requests_and_the_process(start):
    client = start()
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    client.close()
    assert {outcome(ticket) for ticket in tickets} <= {EngineClosed} | {type(None)} or all(
        ticket.future.done() for ticket in tickets
    )
    with pytest.raises(EngineClosed):
        client.submit(CLIPS[0], ONCE)
    with pytest.raises(EngineClosed):
        client.open_vad_session()


def test_a_load_error_of_the_process_is_raised_by_the_client(start, tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightsCorrupt, match="is no JSON"):
        start(tmp_path)
    with pytest.raises(UnknownModel, match="did you mean 'moonshine-tiny-en'"):
        EngineClient(CONFIG, process_backend(EngineSpec(model="moonshine-tiny-e"), RING))


@pytest.mark.slow
def test_an_engine_that_cannot_restart_refuses_requests_until_it_can(start, checkpoint, reference, tmp_path):
    folder = tmp_path / "moving"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    client = start(folder)
    (folder / "config.json").rename(folder / "away.json")
    kill(client)
    waiting = client.submit(CLIPS[0], ONCE)
    with pytest.raises(EngineClosed, match="cannot be started at the moment") as error:
        waiting.future.result(WAIT_S)
    assert str(folder) not in str(error.value), "clients learn no paths"
    assert client.state == "failed"
    with pytest.raises(EngineClosed, match="cannot be started"):
        client.submit(CLIPS[0], ONCE)
    (folder / "away.json").rename(folder / "config.json")
    wait_until(lambda: client.state == "ready")
    expect_answers(client, reference)


@pytest.mark.slow
def test_killing_the_server_ends_its_engine(checkpoint):
    script = f"""
import sys, time
from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.backend import process_backend
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
def test_restarts_leak_no_descriptor(start):
    client = start()
    before = psutil.Process().num_fds()
    for _ in range(2):
        kill(client)
        wait_until(lambda: client.state != "ready")
        wait_until(lambda: client.state == "ready")
    assert psutil.Process().num_fds() == before
