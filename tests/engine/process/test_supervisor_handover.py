"""Handover from a running engine process to a new one in mid-speech: no word is lost or repeated."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import streaming_moonshine
import tiny_moonshine
from case_tiers import exhaustive_after
from engine_clients import NEMO, NEMO_MODEL, WAIT_S, backend_of, engine_pid, start_engine, wait_until
from tiny_moonshine import clip

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import connection, supervisor
from asr_serve.engine.process import engine_process as children
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.handover import Handover, HandoverResult
from asr_serve.engine.process.in_flight import InFlight
from asr_serve.engine.process.supervisor import Supervisor
from asr_serve.engine.request import HypothesisRequest
from asr_serve.errors import AsrServeError, EngineClosed, NotAllowed
from asr_serve.transfer.sealed_buffer import SealedBuffer, SealedBufferLabel
from asr_serve.types import SearchResult

GREEDY = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 20_000 + 9_001 * seed) for seed in range(5)]
CHUNKS = (20_480, 2_560, 1_280, 10_240)
"""Samples that end where chunks of the models here do, as often as not."""
KINDS: dict[str, dict[str, Any]] = {
    "rnnt beam": {"head": "rnnt", "beam": 2},
    "growing": {"max_decode_rows": 4},
    "ctc": {"head": "ctc"},
    "whole": {"max_decode_rows": 4},
    "rnnt": {"head": "rnnt"},
    "ctc beam": {"head": "ctc", "beam": 3},
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Name and checkpoint of each kind."""
    growing = streaming_moonshine.write(tmp_path_factory.mktemp("growing"))
    whole = tiny_moonshine.save(tmp_path_factory.mktemp("whole"))
    named = {"growing": (streaming_moonshine.MODEL, growing), "whole": ("moonshine-tiny-en", whole)}
    return lambda kind: named.get(kind, (NEMO_MODEL, NEMO))


def config_of(kind: str) -> EngineConfig:
    return EngineConfig(**({"max_sessions": 8, "chunk_wait_ms": 1.0, "kv_bytes": 1 << 24} | KINDS[kind]))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineClient]]:
    """One of each kind, renewed by one test after the other: a start takes longer than most of them."""
    running: dict[str, EngineClient] = {}
    before = set(psutil.Process().children(recursive=True))
    yield running
    for client in running.values():
        close(client)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture
def start(
    weights: Callable[[str], tuple[str, Path]], engines: dict[str, EngineClient]
) -> Iterator[Callable[..., EngineClient]]:
    """An engine in a process of its own. It stays for the next test if no process of it has died; `fresh`: it is
    this test's alone. Sees that one process is left of each that stays, and none of the others."""
    started: list[EngineClient] = []
    used: list[str] = []
    before = set(psutil.Process().children(recursive=True))

    def launch(kind: str, fresh: bool = False) -> EngineClient:
        used.append(kind)
        if not fresh and kind in engines:
            return engines[kind]
        client = start_engine(
            *weights(kind), config_of(kind), process=True, ring=RingSize(256, 16_384), turn_model="none"
        )
        if fresh:
            started.append(client)
        else:
            engines[kind] = client
        return client

    yield launch
    for kind in used:
        client = engines.get(kind)
        if client is not None and (client.state != "ready" or backend_of(client).restarts or not idle(client)):
            started.append(engines.pop(kind))
    for client in started:
        close(client)
    stay = {psutil.Process(engine_pid(client)) for client in engines.values()}
    assert set(psutil.Process().children(recursive=True)) <= before | stay


def close(client: EngineClient) -> None:
    client.close()
    assert client.state == "closed"


@pytest.fixture(scope="module")
def reference(weights: Callable[[str], tuple[str, Path]]) -> Iterator[Callable[[str], EngineClient]]:
    """Engines of the same models on a thread, which are never replaced."""
    made: dict[str, EngineClient] = {}

    def get(kind: str) -> EngineClient:
        if kind not in made:
            made[kind] = start_engine(*weights(kind), config_of(kind))
        return made[kind]

    yield get
    for client in made.values():
        client.close()


class HandoverThread:
    """A handover on a thread of its own."""

    def __init__(self, client: EngineClient, timeout_s: float = WAIT_S) -> None:
        self.done: Future[HandoverResult] = Future()

        def work() -> None:
            try:
                self.done.set_result(backend_of(client).renew(timeout_s))
            except AsrServeError as failure:
                self.done.set_exception(failure)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def result(self) -> HandoverResult:
        return self.done.result(WAIT_S)


@contextmanager
def before_swap(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> Iterator[None]:
    """Runs `do` when the new process is ready and has taken nothing over."""
    start_new = Supervisor._start

    def launch(self: Supervisor, given: Any) -> Any:
        ready = start_new(self, given)
        do()
        return ready

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_start", launch)
        yield


# --- streams ---------------------------------------------------------------


def make_driver(client: EngineClient, kind: str) -> StreamDriver:
    return {"growing": HypothesisDriver, "whole": OfflineDriver}.get(kind, StreamDriver)(client)


class StreamDriver:
    """A stream of a streaming model: submits pieces of a clip, and keeps the future of each."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.futures: list[Future[Any]] = []

    def open(self, pcm: np.ndarray) -> None:
        self.stream = self.client.open_stream(live=True, samples=len(pcm))

    def write(self, piece: np.ndarray, at: int, last: bool) -> None:
        self.futures.append(self.stream.submit_audio(piece, last=last))

    def results(self) -> list[Any]:
        found: list[SearchResult] = [future.result(WAIT_S) for future in self.futures]
        return [
            ([(t.id, t.frame) for t in each.fixed_tokens], [(t.id, t.frame) for t in each.tail_tokens])
            for each in found
        ]


class HypothesisDriver(StreamDriver):
    """The same for a model with an incremental encoder, which is asked for hypotheses; some have a draft."""

    def write(self, piece: np.ndarray, at: int, last: bool) -> None:
        if not last and len(self.futures) % 4 == 1:
            self.futures.append(self.stream.submit_audio(piece))
            return
        done: list[Recognition] = [each.result() for each in self.futures if each.done() and not each.exception()]
        draft = DraftTokens(done[-1].tokens) if done and hasattr(done[-1], "tokens") else DraftTokens(())
        wanted = HypothesisRequest(at + len(piece), GREEDY, draft, "live")
        self.futures.append(self.stream.submit_hypothesis(piece, wanted, last=last))

    def results(self) -> list[Any]:
        found = [future.result(WAIT_S) for future in self.futures]
        return [each.tokens if isinstance(each, Recognition) else None for each in found]


class OfflineDriver(StreamDriver):
    """The same for an offline model: voice activity of the clip, and its transcript at the end."""

    def open(self, pcm: np.ndarray) -> None:
        self.session = self.client.open_vad_session(live=True)
        self.pcm = pcm
        self.at = 0

    def write(self, piece: np.ndarray, at: int, last: bool) -> None:
        whole = (at + len(piece)) // WINDOW_SAMPLES * WINDOW_SAMPLES
        most = self.client.config.vad_windows * WINDOW_SAMPLES
        while self.at < whole:
            self.futures.append(self.session.submit_windows(self.pcm[self.at : min(whole, self.at + most)]))
            self.at = min(whole, self.at + most)
        if last:
            self.futures.append(self.client.submit(self.pcm, GREEDY, "live").future)

    def results(self) -> list[Any]:
        found = [future.result(WAIT_S) for future in self.futures]
        self.session.close()
        probabilities = np.concatenate(found[:-1])
        return [np.round(probabilities, 4).tolist(), found[-1].tokens]


class ClipStream:
    """Sends a clip in pieces whose lengths `seed` decides."""

    def __init__(self, client: EngineClient, kind: str, index: int, seed: int) -> None:
        self.index, self.seed = index, seed
        self.pcm, self.at, self._roll = CLIPS[index], 0, random.Random(seed)
        self._driver = make_driver(client, kind)
        self._driver.open(self.pcm)
        self._results: list[Any] | None = None

    @property
    def finished(self) -> bool:
        return self.at == len(self.pcm)

    def send_next(self, wait: bool = False) -> None:
        size = self._roll.choice([160, 1_601, 5_121, 20_000, *CHUNKS])
        if self._roll.random() < 0.3:  # to where a chunk ends
            size = -self.at % 1_280 or size
        piece = self.pcm[self.at : self.at + size]
        at, self.at = self.at, self.at + len(piece)
        self._driver.write(piece, at, self.finished)
        if wait and self._driver.futures:
            self._driver.futures[-1].result(WAIT_S)

    def send_rest(self) -> None:
        while not self.finished:
            self.send_next()

    def expect_reference(self, reference: Callable[[str], EngineClient], kind: str) -> None:
        """The same, piece by piece, as from an engine that is never replaced."""
        other = ClipStream(reference(kind), kind, self.index, self.seed)
        other.send_rest()
        assert self.results() == other.results(), (kind, self.index, self.seed)

    def results(self) -> list[Any]:
        """All results; the stream holds nothing afterwards."""
        if self._results is None:
            self._results = self._driver.results()
        return self._results

    def futures(self) -> list[Future[Any]]:
        return self._driver.futures


def idle(client: EngineClient) -> bool:
    stats = client.describe()
    held = ("requests", "sessions", "pages_used", "slots_used", "sessions_used")
    return backend_of(client)._current.idle and not any(stats.get(each, 0) for each in held)


def expect_empty(client: EngineClient) -> None:
    wait_until(lambda: idle(client))
    assert backend_of(client).ring_depth == 0
    assert backend_of(client)._supervisor.handover is None


def start_streams(client: EngineClient, kind: str, count: int) -> list[ClipStream]:
    """Streams whose first piece is answered."""
    streams = [ClipStream(client, kind, index % len(CLIPS), index) for index in range(count)]
    send_next(streams, wait=True)
    return streams


def start_stream(client: EngineClient, kind: str, index: int = 2) -> ClipStream:
    stream = ClipStream(client, kind, index, index)
    stream.send_next(wait=True)
    return stream


def send_next(streams: list[ClipStream], wait: bool = False) -> None:
    for stream in streams:
        stream.send_next(wait)


def expect_reference(streams: list[ClipStream], reference: Callable[[str], EngineClient], kind: str) -> None:
    for stream in streams:
        stream.send_rest()
        stream.expect_reference(reference, kind)


@contextmanager
def stopped_handover(
    monkeypatch: pytest.MonkeyPatch, client: EngineClient, meanwhile: Callable[[], None]
) -> Iterator[tuple[int, HandoverThread]]:
    """A handover whose old process stands still since before the swap; `meanwhile` submits what it does not see.
    Inside the block the new process has taken over."""
    old = engine_pid(client)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        meanwhile()

    with before_swap(monkeypatch, stop):
        handover = HandoverThread(client)
        wait_until(lambda: engine_pid(client) != old)
    yield old, handover


def tokens_of(client: EngineClient, pcm: np.ndarray) -> tuple[int, ...]:
    return client.submit(pcm, GREEDY).future.result(WAIT_S).tokens


# --- at any moment ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_after(3, KINDS))
@pytest.mark.repeats(kind="ctc")
def test_results_through_a_handover_equal_those_without(start, reference, kind):
    client, roll = start(kind), random.Random(kind)
    active: list[ClipStream] = []
    ended: list[ClipStream] = []
    before, handover = engine_pid(client), HandoverThread(client)
    while not handover.done.done() or len(ended) < 4:
        while len(active) < 5:
            active.append(ClipStream(client, kind, roll.randrange(len(CLIPS)), len(active) + len(ended)))
        for stream in list(active):
            if roll.random() < 0.3:
                stream.send_next(wait=roll.random() < 0.3)
            if stream.finished:
                stream.results()
                active.remove(stream)
                ended.append(stream)
        time.sleep(roll.choice([0.001, 0.01, 0.05]))
    found = handover.result()
    assert engine_pid(client) != before
    assert not psutil.pid_exists(before)
    assert (found.replayed, found.repeated) == (0, 0), found
    assert (found.sessions if kind == "whole" else found.streams) > 0
    for stream in active:
        stream.send_rest()
    for stream in [*ended, *active]:
        stream.expect_reference(reference, kind)
    assert backend_of(client).restarts == 0
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_after(3, KINDS))
@pytest.mark.repeats(kind="ctc")
def test_handover_in_the_middle_of_an_answer_loses_nothing(start, reference, kind, monkeypatch):
    """The old process has unanswered pieces, hypotheses and requests; more come while it is to end."""
    client = start(kind)
    streams = start_streams(client, kind, 5)
    with stopped_handover(monkeypatch, client, lambda: send_next(streams)) as (old, handover):
        send_next(streams)
        os.kill(old, signal.SIGCONT)
        found = handover.result()
    assert (found.sessions, found.streams) == ((5, 0) if kind == "whole" else (0, 5))
    expect_reference(streams, reference, kind)
    expect_empty(client)


def test_the_old_process_finishes_its_requests(start, reference, monkeypatch):
    client = start("whole")
    tickets: list[Any] = []

    def submit() -> None:
        tickets.extend(client.submit(pcm, GREEDY) for pcm in CLIPS[:2])

    with stopped_handover(monkeypatch, client, submit) as (old, handover):
        new = client.submit(CLIPS[2], GREEDY)
        assert new.future.result(WAIT_S).tokens  # the old one stands still
        assert not tickets[0].future.done()
        os.kill(old, signal.SIGCONT)
        assert handover.result().repeated == 0
    for ticket, pcm in zip([*tickets, new], CLIPS, strict=False):
        assert ticket.future.result(WAIT_S).tokens == tokens_of(reference("whole"), pcm)
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rnnt", "whole"])
def test_the_new_process_repeats_requests_that_take_too_long(start, reference, kind, monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_TIMEOUT_S", 0.5)
    client = start(kind)
    streams, tickets, old = start_streams(client, kind, 2), [], engine_pid(client)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        tickets.append(client.submit(CLIPS[0], GREEDY))
        send_next(streams)

    with before_swap(monkeypatch, stop):
        found = HandoverThread(client, timeout_s=0.1).result()
    assert not psutil.pid_exists(old)
    assert found.repeated == 1
    assert found.replayed == (0 if kind == "whole" else 2)
    assert tickets[0].future.result(WAIT_S).tokens == tokens_of(reference(kind), CLIPS[0])
    expect_reference(streams, reference, kind)
    expect_empty(client)


@pytest.mark.slow
def test_handover_of_an_idle_engine(start, reference):
    client = start("ctc")
    assert backend_of(client).renew()[:4] == (0, 0, 0, 0)
    silent = client.open_stream(live=True)  # opened, and nothing was put
    assert backend_of(client).renew()[:4] == (0, 1, 0, 0)
    assert fixed_token_ids(silent.submit_audio(CLIPS[1], last=True)) == fixed_token_ids(
        reference("ctc").open_stream(live=True).submit_audio(CLIPS[1], last=True)
    )
    expect_empty(client)


def fixed_token_ids(future: Future[SearchResult]) -> list[int]:
    return [token.id for token in future.result(WAIT_S).fixed_tokens]


def test_streams_closed_during_a_handover_are_not_moved(start, reference, monkeypatch):
    client = start("rnnt")
    streams = start_streams(client, "rnnt", 4)
    with stopped_handover(monkeypatch, client, lambda: send_next(streams)) as (old, handover):
        for stream in streams[:2]:
            stream._driver.stream.close()
        os.kill(old, signal.SIGCONT)
        assert handover.result().streams == 2
    expect_reference(streams[2:], reference, "rnnt")
    expect_empty(client)


def test_more_streams_move_than_may_at_once(start, reference, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.handover.MAX_STREAMS_MOVING", 2)
    client = start("ctc")
    streams = start_streams(client, "ctc", 8)
    open_streams = sum(not stream.finished for stream in streams)
    assert open_streams > 2 * 2
    assert backend_of(client).renew().streams == open_streams
    expect_reference(streams, reference, "ctc")
    expect_empty(client)


# --- what cannot go on from where it stood ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("rnnt beam", "torn"),
        ("rnnt beam", "of another model"),
        ("growing", "of another model"),
        ("growing", "nothing was saved"),
    ],
)
@pytest.mark.repeats(kind="growing", how="of another model")
def test_a_stream_whose_state_is_lost_is_replayed(start, reference, kind, how, monkeypatch):
    client = start(kind)
    streams = start_streams(client, kind, 3)
    send_next(streams, wait=True)
    receive = connection.receive_buffer

    def spoil(pipe: Any, label: SealedBufferLabel) -> SealedBuffer | None:
        buffer = receive(pipe, label)
        if how == "torn":
            buffer.label = msgspec.structs.replace(label, checksum=label.checksum ^ 1)
            return buffer
        buffer.close()
        return SealedBuffer.pack([b"\x93\x01\x02\x03", b"abc"]) if how == "of another model" else None

    monkeypatch.setattr(connection, "receive_buffer", spoil)
    found = backend_of(client).renew()
    assert (found.streams, found.replayed) == (0, 3)
    expect_reference(streams, reference, kind)
    expect_empty(client)


@pytest.mark.slow
def test_handover_to_other_weights_is_refused(tmp_path):
    """Half a sentence by one and half by another would be neither's."""
    folder = tiny_moonshine.save(tmp_path)
    client = start_engine("moonshine-tiny-en", folder, config_of("whole"), process=True, turn_model="none")
    try:
        before = engine_pid(client)
        tokens = client.submit(CLIPS[0], GREEDY).future.result(WAIT_S).tokens
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(NotAllowed, match="files are not those that were loaded"):
            backend_of(client).renew()
        assert (engine_pid(client), client.state) == (before, "ready")
        assert client.submit(CLIPS[0], GREEDY).future.result(WAIT_S).tokens == tokens
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)  # another file of the same content
        assert backend_of(client).renew()
        expect_empty(client)
    finally:
        client.close()


def test_handover_of_an_encode_worker_is_refused(tmp_path):
    """Nothing is started: two cannot listen at one port."""
    config = EngineConfig(role="encode", max_sessions=2)
    client = start_engine("moonshine-tiny-en", tiny_moonshine.save(tmp_path), config, process=True, turn_model="none")
    try:
        before = engine_pid(client)
        with pytest.raises(NotAllowed, match="encodes for others"):
            backend_of(client).renew()
        assert backend_of(client)._supervisor._replacement is None
        assert (engine_pid(client), client.state) == (before, "ready")
    finally:
        client.close()


# --- deaths -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_after(3, KINDS))
@pytest.mark.repeats(kind="ctc")
def test_the_old_process_dies_before_all_have_left_it(start, reference, kind, monkeypatch):
    client = start(kind)
    streams, tickets = start_streams(client, kind, 4), []

    def submit() -> None:
        tickets.append(client.submit(CLIPS[3], GREEDY))
        send_next(streams)

    with stopped_handover(monkeypatch, client, submit) as (old, handover):
        os.kill(old, signal.SIGKILL)
        found = handover.result()
    assert found.repeated == 1 + (kind == "whole") * sum(stream.finished for stream in streams)
    assert found.replayed == (0 if kind == "whole" else 4)
    assert tickets[0].future.result(WAIT_S).tokens == tokens_of(reference(kind), CLIPS[3])
    expect_reference(streams, reference, kind)
    assert backend_of(client).restarts == 0
    expect_empty(client)


def test_the_old_process_dies_before_the_new_one_is_ready(start, reference, monkeypatch):
    """What is loading already is what comes next: no third process is loaded."""
    client = start("rnnt")
    streams, old = start_streams(client, "rnnt", 3), engine_pid(client)

    def kill() -> None:
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: client.state == "restarting")
        send_next(streams)

    with before_swap(monkeypatch, kill):
        found = HandoverThread(client).result()
    assert found.replayed == 3
    assert backend_of(client).restarts == 0
    expect_reference(streams, reference, "rnnt")
    expect_empty(client)


def test_the_new_process_dies_while_loading(start, reference, monkeypatch):
    client = start("rnnt")
    stream, old = start_stream(client, "rnnt"), engine_pid(client)

    def killed(self: Any, others: Any) -> Any:
        self.kill()
        return ready(self, others)

    ready = children.EngineProcess.wait_ready
    with monkeypatch.context() as patch:
        patch.setattr(children.EngineProcess, "wait_ready", killed)
        with pytest.raises(EngineClosed, match="ended while it was loading"):
            backend_of(client).renew()
    assert engine_pid(client) == old
    assert client.state == "ready"
    assert backend_of(client).renew().streams == 1
    expect_reference([stream], reference, "rnnt")
    expect_empty(client)


@pytest.mark.slow
def test_the_old_process_dies_while_the_new_one_hangs_in_loading(start, reference, monkeypatch):
    """Nobody waits as long as weights over a slow line may take: what hangs is killed, and another is started."""
    monkeypatch.setattr(supervisor, "HANG_TIMEOUT_S", 1.0)
    client = start("rnnt", fresh=True)
    stream, old = start_stream(client, "rnnt"), engine_pid(client)
    handover = HandoverThread(client)
    wait_until(
        lambda: (coming := backend_of(client)._supervisor._replacement) is not None and coming.process is not None
    )
    os.kill(backend_of(client)._supervisor._replacement.process.pid, signal.SIGSTOP)
    os.kill(old, signal.SIGKILL)
    with pytest.raises(EngineClosed, match="ended while it was loading"):
        handover.result()
    expect_reference([stream], reference, "rnnt")
    assert backend_of(client).restarts == 1
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_after(2, ["growing", "whole", "ctc"]))
def test_the_new_process_dies_while_streams_move(start, reference, kind, monkeypatch):
    client = start(kind)
    streams = start_streams(client, kind, 4)
    with stopped_handover(monkeypatch, client, lambda: send_next(streams[:2])) as (old, handover):
        os.kill(engine_pid(client), signal.SIGKILL)
        wait_until(lambda: client.state == "restarting")
        os.kill(old, signal.SIGCONT)  # its messages wait for the next process
        send_next(streams)
        assert handover.result().sessions == (4 if kind == "whole" else 0)
    wait_until(lambda: backend_of(client).restarts == 1)
    expect_reference(streams, reference, kind)
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["while it loads", "while streams are on their way"])
def test_closing_the_client_during_a_handover(start, when, monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_TIMEOUT_S", 0.5)
    client = start("rnnt")
    stream, old = start_stream(client, "rnnt"), engine_pid(client)
    closing = threading.Thread(target=client.close)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        stream.send_next()
        if when == "while it loads":
            closing.start()
            wait_until(lambda: backend_of(client)._supervisor._closing.is_set())

    with before_swap(monkeypatch, stop):
        handover = HandoverThread(client)
        if when != "while it loads":
            wait_until(lambda: engine_pid(client) != old)
            closing.start()
        with pytest.raises(EngineClosed):
            handover.result()
    closing.join(WAIT_S)
    assert client.state == "closed"
    with pytest.raises(EngineClosed):
        stream.futures()[-1].result(WAIT_S)
    with pytest.raises(EngineClosed):
        backend_of(client).renew()


@pytest.mark.slow
def test_a_second_handover_after_one_that_timed_out(start, reference, monkeypatch):
    """A stream is told of to a process that is to be replaced itself before it has answered."""
    client = start("rnnt")
    stream = start_stream(client, "rnnt")
    handed_over = threading.Event()
    on_exported = Handover._on_exported

    def stop_new(self: Handover, number: int, saved: Any) -> None:
        os.kill(self.new.process.pid, signal.SIGSTOP)
        on_exported(self, number, saved)
        handed_over.set()

    with monkeypatch.context() as patch:
        patch.setattr(Handover, "_on_exported", stop_new)
        assert HandoverThread(client, timeout_s=1.0).result()[:4] == (0, 0, 0, 0)
    assert handed_over.is_set()
    second = engine_pid(client)
    stream.send_next()

    with before_swap(monkeypatch, lambda: None):
        handover = HandoverThread(client)
        wait_until(lambda: engine_pid(client) != second)
    os.kill(second, signal.SIGCONT)
    assert handover.result().streams == 1
    expect_reference([stream], reference, "rnnt")
    expect_empty(client)


def test_an_unexpected_error_closes_the_engine_and_fails_pending_requests(start, monkeypatch):
    client = start("ctc")
    stream, engine = start_stream(client, "ctc"), engine_pid(client)

    handle, broken = InFlight.handle_message, backend_of(client)._current

    def handle_message(self: InFlight, message: Any) -> Any:
        if self is broken:  # not the other engines, which stay for the next test
            raise KeyError(1)
        return handle(self, message)

    with monkeypatch.context() as patch:
        patch.setattr(InFlight, "handle_message", handle_message)
        stream.send_next()
        with pytest.raises(EngineClosed):
            stream.futures()[-1].result(WAIT_S)
    wait_until(lambda: client.state == "closed")
    assert not psutil.pid_exists(engine)


def test_a_handover_during_another_is_refused(start, monkeypatch):
    client, errors = start("whole"), list[Exception]()

    def again() -> None:
        try:
            backend_of(client).renew()
        except AsrServeError as failure:
            errors.append(failure)

    with before_swap(monkeypatch, again):
        assert HandoverThread(client).result()
    assert [type(each) for each in errors] == [NotAllowed]
    expect_empty(client)


@pytest.mark.slow
def test_repeated_handovers_leak_nothing(start, reference):
    """No process, descriptor, thread or memory: what each of four left behind would be counted four times.

    There may be less than before them: what earlier tests ended is not always gone when this one begins to count.
    """
    client, me = start("rnnt"), psutil.Process()
    stream, moved = start_stream(client, "rnnt", 4), 0
    backend_of(client).renew()

    def held() -> tuple[int, ...]:
        gc.collect()
        maps = Path("/proc/self/maps")
        ours = maps.read_text().count("asr-serve") if maps.exists() else 0
        return me.num_fds(), len(me.children(recursive=True)), threading.active_count(), ours

    before = held()
    for _ in range(4):
        if not stream.finished:
            stream.send_next()
        moved += backend_of(client).renew().streams
    wait_until(
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)), lambda: f"{held()} after {before}"
    )
    assert moved >= 3
    expect_reference([stream], reference, "rnnt")
    expect_empty(client)
