"""Another engine process takes the place of one that lives, while people speak: no word is lost or said twice."""

from __future__ import annotations

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
from tiny_moonshine import WAIT_S, clip

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.config import EngineConfig
from asr_serve.decoding.seq2seq import DraftTokens, Recognition, SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import process as children
from asr_serve.engine.process import supervisor
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.in_flight import InFlight
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.process.supervisor import Handover, HandoverResult, Supervisor
from asr_serve.engine.request import HypothesisRequest
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import AsrServeError, EngineClosed, NotAllowed
from asr_serve.transfer.sealed_buffer import SealedBuffer, SealedBufferLabel
from asr_serve.types import SearchResult

NEMO = Path(__file__).parents[2] / "models" / "fixtures" / "fastconformer_hybrid.nemo"
GREEDY = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 20_000 + 9_001 * seed) for seed in range(5)]
CHUNKS = (20_480, 2_560, 1_280, 10_240)
"""Samples that end where chunks of the models here do, as often as not."""
KINDS: dict[str, dict[str, Any]] = {
    "ctc": {"head": "ctc"},
    "ctc beam": {"head": "ctc", "beam": 3},
    "rnnt": {"head": "rnnt"},
    "rnnt beam": {"head": "rnnt", "beam": 2},
    "growing": {"max_decode_rows": 4},
    "whole": {"max_decode_rows": 4},
}
STREAMS = [kind for kind in KINDS if kind != "whole"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Name and checkpoint of each kind."""
    growing = streaming_moonshine.write(tmp_path_factory.mktemp("growing"))
    whole = tiny_moonshine.save(tmp_path_factory.mktemp("whole"))
    named = {"growing": (streaming_moonshine.MODEL, growing), "whole": ("moonshine-tiny-en", whole)}
    return lambda kind: named.get(kind, ("fastconformer-streaming-medium-en", NEMO))


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
def begin(
    weights: Callable[[str], tuple[str, Path]], engines: dict[str, EngineClient]
) -> Iterator[Callable[..., EngineClient]]:
    """An engine in a process of its own. It stays for the next test if no process of it has died; `fresh`: it is
    this test's alone. Sees that one process is left of each that stays, and none of the others."""
    started: list[EngineClient] = []
    used: list[str] = []
    before = set(psutil.Process().children(recursive=True))

    def starting(kind: str, fresh: bool = False) -> EngineClient:
        used.append(kind)
        if not fresh and kind in engines:
            return engines[kind]
        model, folder = weights(kind)
        spec = EngineSpec(
            model=model, device="cpu", dtype="fp32", weights=str(folder), turn_model="none", threads=1
        )
        client = EngineClient(config_of(kind), process_backend(spec, RingSize(256, 16_384)))
        if fresh:
            started.append(client)
        else:
            engines[kind] = client
        return client

    yield starting
    for kind in used:
        client = engines.get(kind)
        if client is not None and (client.state != "ready" or link(client).restarts or not idle(client)):
            started.append(engines.pop(kind))
    for client in started:
        close(client)
    stay = {psutil.Process(pid(client)) for client in engines.values()}
    assert set(psutil.Process().children(recursive=True)) <= before | stay


def close(client: EngineClient) -> None:
    client.close()
    assert client.state == "closed"


@pytest.fixture(scope="module")
def still(weights: Callable[[str], tuple[str, Path]]) -> Iterator[Callable[[str], EngineClient]]:
    """Engines of the same models in which nothing moves."""
    made: dict[str, EngineClient] = {}

    def of(kind: str) -> EngineClient:
        if kind not in made:
            found = AsrCheckpoint.find(*weights(kind))
            made[kind] = EngineClient(
                config_of(kind), thread_backend(found.card, lambda: found.build("cpu", "fp32"))
            )
        return made[kind]

    yield of
    for client in made.values():
        client.close()


def link(client: EngineClient) -> ProcessBackend:
    assert isinstance(client.backend, ProcessBackend)
    return client.backend


def pid(client: EngineClient) -> int:
    return link(client)._current.process.pid


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


class Renewing:
    """A renewal on a thread of its own."""

    def __init__(self, client: EngineClient, timeout_s: float = WAIT_S) -> None:
        self.done: Future[HandoverResult] = Future()

        def work() -> None:
            try:
                self.done.set_result(link(client).renew(timeout_s))
            except AsrServeError as failure:
                self.done.set_exception(failure)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def result(self) -> HandoverResult:
        return self.done.result(WAIT_S)


@contextmanager
def before_the_swap(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> Iterator[None]:
    """When the new process is there, and has taken nothing over."""
    start = Supervisor._start

    def starting(self: Supervisor, given: Any) -> Any:
        ready = start(self, given)
        do()
        return ready

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_start", starting)
        yield


# --- what callers put, and what they hear ---------------------------------------------------------------


def answers(client: EngineClient, kind: str) -> Says:
    return {"growing": Grows, "whole": Listens}.get(kind, Says)(client)


class Says:
    """A caller of a streaming model: puts pieces of a clip, and keeps what comes for each."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.came: list[Future[Any]] = []

    def open(self, pcm: np.ndarray) -> None:
        self.stream = self.client.open_stream(live=True, samples=len(pcm))

    def write(self, piece: np.ndarray, at: int, last: bool) -> None:
        self.came.append(self.stream.submit_audio(piece, last=last))

    def said(self) -> list[Any]:
        found: list[SearchResult] = [future.result(WAIT_S) for future in self.came]
        return [
            ([(t.id, t.frame) for t in each.fixed_tokens], [(t.id, t.frame) for t in each.tail_tokens])
            for each in found
        ]


class Grows(Says):
    """The same of a model that is asked for hypotheses; some have a draft."""

    def write(self, piece: np.ndarray, at: int, last: bool) -> None:
        if not last and len(self.came) % 4 == 1:
            self.came.append(self.stream.submit_audio(piece))
            return
        done: list[Recognition] = [each.result() for each in self.came if each.done() and not each.exception()]
        draft = DraftTokens(done[-1].tokens) if done and hasattr(done[-1], "tokens") else DraftTokens(())
        wanted = HypothesisRequest(at + len(piece), GREEDY, draft, "live")
        self.came.append(self.stream.submit_hypothesis(piece, wanted, last=last))

    def said(self) -> list[Any]:
        found = [future.result(WAIT_S) for future in self.came]
        return [each.tokens if isinstance(each, Recognition) else None for each in found]


class Listens(Says):
    """Of a model that hears whole utterances: voice activity of the clip, and all of it at the end."""

    def open(self, pcm: np.ndarray) -> None:
        self.session = self.client.open_vad_session(live=True)
        self.pcm = pcm
        self.at = 0

    def write(self, piece: np.ndarray, at: int, last: bool) -> None:
        whole = (at + len(piece)) // WINDOW_SAMPLES * WINDOW_SAMPLES
        most = self.client.config.vad_windows * WINDOW_SAMPLES
        while self.at < whole:
            self.came.append(self.session.submit_windows(self.pcm[self.at : min(whole, self.at + most)]))
            self.at = min(whole, self.at + most)
        if last:
            self.came.append(self.client.submit(self.pcm, GREEDY, "live").future)

    def said(self) -> list[Any]:
        found = [future.result(WAIT_S) for future in self.came]
        self.session.close()
        heard = np.concatenate(found[:-1])
        return [np.round(heard, 4).tolist(), found[-1].tokens]


class Caller:
    """Speaks a clip in pieces, which `seed` decides."""

    def __init__(self, client: EngineClient, kind: str, index: int, seed: int) -> None:
        self.index, self.seed = index, seed
        self.pcm, self.at, self._roll = CLIPS[index], 0, random.Random(seed)
        self._says = answers(client, kind)
        self._says.open(self.pcm)
        self._said: list[Any] | None = None

    @property
    def over(self) -> bool:
        return self.at == len(self.pcm)

    def go_on(self, wait: bool = False) -> None:
        size = self._roll.choice([160, 1_601, 5_121, 20_000, *CHUNKS])
        if self._roll.random() < 0.3:  # to where a chunk ends
            size = -self.at % 1_280 or size
        piece = self.pcm[self.at : self.at + size]
        at, self.at = self.at, self.at + len(piece)
        self._says.write(piece, at, self.over)
        if wait and self._says.came:
            self._says.came[-1].result(WAIT_S)

    def finish(self) -> None:
        while not self.over:
            self.go_on()

    def expect(self, still: Callable[[str], EngineClient], kind: str) -> None:
        """The same, piece by piece, as where nothing moves."""
        other = Caller(still(kind), kind, self.index, self.seed)
        other.finish()
        assert self.said() == other.said(), (kind, self.index, self.seed)

    def said(self) -> list[Any]:
        """All answers; then nothing is held for it any more."""
        if self._said is None:
            self._said = self._says.said()
        return self._said

    def came(self) -> list[Future[Any]]:
        return self._says.came


def idle(client: EngineClient) -> bool:
    told = client.describe()
    held = ("requests", "sessions", "pages_used", "slots_used", "sessions_used")
    return link(client)._current.idle and not any(told.get(each, 0) for each in held)


def expect_empty(client: EngineClient) -> None:
    until(lambda: idle(client))
    assert link(client).ring_depth == 0
    assert link(client)._supervisor.handover is None


# --- at any moment ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_words_are_those_of_an_engine_that_stays(begin, still, kind):
    client, roll = begin(kind), random.Random(kind)
    on: list[Caller] = []
    gone: list[Caller] = []
    before, renewing = pid(client), Renewing(client)
    while not renewing.done.done() or len(gone) < 4:
        while len(on) < 5:
            on.append(Caller(client, kind, roll.randrange(len(CLIPS)), len(on) + len(gone)))
        for caller in list(on):
            if roll.random() < 0.3:
                caller.go_on(wait=roll.random() < 0.3)
            if caller.over:
                caller.said()
                on.remove(caller)
                gone.append(caller)
        time.sleep(roll.choice([0.001, 0.01, 0.05]))
    found = renewing.result()
    assert pid(client) != before
    assert not psutil.pid_exists(before)
    assert (found.replayed, found.repeated) == (0, 0), found
    assert (found.sessions if kind == "whole" else found.streams) > 0
    for caller in on:
        caller.finish()
    for caller in [*gone, *on]:
        caller.expect(still, kind)
    assert link(client).restarts == 0
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_an_answer(begin, still, kind, monkeypatch):
    """The old one has pieces, hypotheses and requests that it has not answered; more come while it is to go."""
    client = begin(kind)
    callers = [Caller(client, kind, index, index) for index in range(5)]
    for caller in callers:
        caller.go_on(wait=True)
    old = pid(client)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        for caller in callers:
            caller.go_on()

    with before_the_swap(monkeypatch, stop):
        renewing = Renewing(client)
        until(lambda: pid(client) != old)
    for caller in callers:
        caller.go_on()
    os.kill(old, signal.SIGCONT)
    found = renewing.result()
    assert (found.sessions, found.streams) == ((5, 0) if kind == "whole" else (0, 5))
    for caller in callers:
        caller.finish()
        caller.expect(still, kind)
    expect_empty(client)


def test_requests_under_way_are_finished_by_the_old_one(begin, still, monkeypatch):
    client = begin("whole")
    old, tickets = pid(client), []

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        tickets.extend(client.submit(pcm, GREEDY) for pcm in CLIPS[:2])

    with before_the_swap(monkeypatch, stop):
        renewing = Renewing(client)
        until(lambda: pid(client) != old)
    new = client.submit(CLIPS[2], GREEDY)
    assert new.future.result(WAIT_S).tokens  # the old one stands still
    assert not tickets[0].future.done()
    os.kill(old, signal.SIGCONT)
    assert renewing.result().repeated == 0
    for ticket, pcm in zip([*tickets, new], CLIPS, strict=False):
        assert (
            ticket.future.result(WAIT_S).tokens == still("whole").submit(pcm, GREEDY).future.result(WAIT_S).tokens
        )
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rnnt", "whole"])
def test_what_takes_too_long_is_begun_again_by_the_new_one(begin, still, kind, monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_TIMEOUT_S", 0.5)
    client = begin(kind)
    callers = [Caller(client, kind, index, index) for index in range(2)]
    for caller in callers:
        caller.go_on(wait=True)
    tickets, old = [], pid(client)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        tickets.append(client.submit(CLIPS[0], GREEDY))
        for caller in callers:
            caller.go_on()

    with before_the_swap(monkeypatch, stop):
        found = Renewing(client, timeout_s=0.1).result()
    assert not psutil.pid_exists(old)
    assert found.repeated == 1
    assert found.replayed == (0 if kind == "whole" else 2)
    assert (
        tickets[0].future.result(WAIT_S).tokens
        == still(kind).submit(CLIPS[0], GREEDY).future.result(WAIT_S).tokens
    )
    for caller in callers:
        caller.finish()
        caller.expect(still, kind)
    expect_empty(client)


@pytest.mark.slow
def test_while_nothing_runs(begin, still):
    client = begin("ctc")
    assert link(client).renew()[:4] == (0, 0, 0, 0)
    silent = client.open_stream(live=True)  # opened, and nothing was put
    assert link(client).renew()[:4] == (0, 1, 0, 0)
    assert said_of(silent.submit_audio(CLIPS[1], last=True)) == said_of(
        still("ctc").open_stream(live=True).submit_audio(CLIPS[1], last=True)
    )
    expect_empty(client)


def said_of(future: Future[SearchResult]) -> list[int]:
    return [token.id for token in future.result(WAIT_S).fixed_tokens]


def test_who_leaves_on_the_way_is_forgotten(begin, still, monkeypatch):
    client = begin("rnnt")
    callers = [Caller(client, "rnnt", index, index) for index in range(4)]
    for caller in callers:
        caller.go_on(wait=True)
    old = pid(client)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        for caller in callers:
            caller.go_on()

    with before_the_swap(monkeypatch, stop):
        renewing = Renewing(client)
        until(lambda: pid(client) != old)
    for caller in callers[:2]:
        caller._says.stream.close()
    os.kill(old, signal.SIGCONT)
    assert renewing.result().streams == 2
    for caller in callers[2:]:
        caller.finish()
        caller.expect(still, "rnnt")
    expect_empty(client)


def test_more_streams_than_may_move_at_once(begin, still, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.MAX_STREAMS_MOVING", 2)
    client = begin("ctc")
    callers = [Caller(client, "ctc", index % 5, index) for index in range(8)]
    for caller in callers:
        caller.go_on(wait=True)
    speaking = sum(not caller.over for caller in callers)
    assert speaking > 2 * 2
    assert link(client).renew().streams == speaking
    for caller in callers:
        caller.finish()
        caller.expect(still, "ctc")
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
def test_a_stream_whose_state_is_lost_is_heard_again(begin, still, kind, how, monkeypatch):
    client = begin(kind)
    callers = [Caller(client, kind, index, index) for index in range(3)]
    for caller in callers:
        caller.go_on(wait=True)
        caller.go_on(wait=True)
    passed = children.receive_buffer

    def spoilt(pipe: Any, label: SealedBufferLabel) -> SealedBuffer | None:
        parcel = passed(pipe, label)
        if how == "torn":
            parcel.label = msgspec.structs.replace(label, checksum=label.checksum ^ 1)
            return parcel
        parcel.close()
        return SealedBuffer.pack([b"\x93\x01\x02\x03", b"abc"]) if how == "of another model" else None

    monkeypatch.setattr(children, "receive_buffer", spoilt)
    found = link(client).renew()
    assert (found.streams, found.replayed) == (0, 3)
    for caller in callers:
        caller.finish()
        caller.expect(still, kind)
    expect_empty(client)


@pytest.mark.slow
def test_other_weights_of_the_same_shape_are_no_renewal(tmp_path):
    """Half a sentence by one and half by another would be neither's."""
    folder = tiny_moonshine.save(tmp_path)
    spec = EngineSpec(
        model="moonshine-tiny-en", device="cpu", dtype="fp32", weights=str(folder), turn_model="none", threads=1
    )
    client = EngineClient(config_of("whole"), process_backend(spec, RingSize(64, 16_384)))
    try:
        before = pid(client)
        tokens = client.submit(CLIPS[0], GREEDY).future.result(WAIT_S).tokens
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(NotAllowed, match="files are not those that were loaded"):
            link(client).renew()
        assert (pid(client), client.state) == (before, "ready")
        assert client.submit(CLIPS[0], GREEDY).future.result(WAIT_S).tokens == tokens
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)  # another file of the same content
        assert link(client).renew()
        expect_empty(client)
    finally:
        client.close()


def test_an_engine_that_encodes_for_others_is_not_renewed_and_goes_on(tmp_path):
    """Nothing is started: two cannot listen at one port."""
    spec = EngineSpec(
        model="moonshine-tiny-en",
        device="cpu",
        dtype="fp32",
        weights=str(tiny_moonshine.save(tmp_path)),
        turn_model="none",
        threads=1,
    )
    client = EngineClient(EngineConfig(role="encode", max_sessions=2), process_backend(spec, RingSize(64, 16_384)))
    try:
        before = pid(client)
        with pytest.raises(NotAllowed, match="encodes for others"):
            link(client).renew()
        assert link(client)._supervisor._replacement is None
        assert (pid(client), client.state) == (before, "ready")
    finally:
        client.close()


# --- deaths -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_old_one_dies_before_all_have_left_it(begin, still, kind, monkeypatch):
    client = begin(kind)
    callers = [Caller(client, kind, index, index) for index in range(4)]
    for caller in callers:
        caller.go_on(wait=True)
    old = pid(client)
    tickets = []

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        tickets.append(client.submit(CLIPS[3], GREEDY))
        for caller in callers:
            caller.go_on()

    with before_the_swap(monkeypatch, stop):
        renewing = Renewing(client)
        until(lambda: pid(client) != old)
    os.kill(old, signal.SIGKILL)
    found = renewing.result()
    assert found.repeated == 1 + (kind == "whole") * sum(caller.over for caller in callers)
    assert found.replayed == (0 if kind == "whole" else 4)
    assert (
        tickets[0].future.result(WAIT_S).tokens
        == still(kind).submit(CLIPS[3], GREEDY).future.result(WAIT_S).tokens
    )
    for caller in callers:
        caller.finish()
        caller.expect(still, kind)
    assert link(client).restarts == 0
    expect_empty(client)


def test_the_old_one_dies_before_the_new_one_is_there(begin, still, monkeypatch):
    """What is loading already is what comes next: no third process is loaded."""
    client = begin("rnnt")
    callers = [Caller(client, "rnnt", index, index) for index in range(3)]
    for caller in callers:
        caller.go_on(wait=True)
    old = pid(client)

    def kill() -> None:
        os.kill(old, signal.SIGKILL)
        until(lambda: client.state == "restarting")
        for caller in callers:
            caller.go_on()

    with before_the_swap(monkeypatch, kill):
        found = Renewing(client).result()
    assert found.replayed == 3
    assert link(client).restarts == 0
    for caller in callers:
        caller.finish()
        caller.expect(still, "rnnt")
    expect_empty(client)


def test_the_new_one_dies_while_it_loads(begin, still, monkeypatch):
    client = begin("rnnt")
    caller, old = Caller(client, "rnnt", 2, 2), pid(client)
    caller.go_on(wait=True)

    def killed(self: Any, others: Any) -> Any:
        self.kill()
        return ready(self, others)

    ready = children.EngineProcess.wait_ready
    with monkeypatch.context() as patch:
        patch.setattr(children.EngineProcess, "wait_ready", killed)
        with pytest.raises(EngineClosed, match="ended while it was loading"):
            link(client).renew()
    assert pid(client) == old
    assert client.state == "ready"
    assert link(client).renew().streams == 1
    caller.finish()
    caller.expect(still, "rnnt")
    expect_empty(client)


@pytest.mark.slow
def test_the_old_one_dies_while_the_new_one_hangs_in_loading(begin, still, monkeypatch):
    """Nobody waits as long as weights over a slow line may take: what hangs is killed, and another is started."""
    monkeypatch.setattr(supervisor, "HANG_TIMEOUT_S", 1.0)
    client = begin("rnnt", fresh=True)
    caller, old = Caller(client, "rnnt", 2, 2), pid(client)
    caller.go_on(wait=True)
    renewing = Renewing(client)
    until(
        lambda: (
            (coming := link(client)._supervisor._replacement) is not None and coming.current_process is not None
        )
    )
    os.kill(link(client)._supervisor._replacement.process.pid, signal.SIGSTOP)
    os.kill(old, signal.SIGKILL)
    with pytest.raises(EngineClosed, match="ended while it was loading"):
        renewing.result()
    caller.finish()
    caller.expect(still, "rnnt")
    assert link(client).restarts == 1
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ctc", "growing", "whole"])
def test_the_new_one_dies_while_streams_are_on_their_way(begin, still, kind, monkeypatch):
    client = begin(kind)
    callers = [Caller(client, kind, index, index) for index in range(4)]
    for caller in callers:
        caller.go_on(wait=True)
    old = pid(client)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        for caller in callers[:2]:
            caller.go_on()

    with before_the_swap(monkeypatch, stop):
        renewing = Renewing(client)
        until(lambda: pid(client) != old)
    os.kill(pid(client), signal.SIGKILL)
    until(lambda: client.state == "restarting")
    os.kill(old, signal.SIGCONT)  # what it says now waits for the next
    for caller in callers:
        caller.go_on()
    assert renewing.result().sessions == (4 if kind == "whole" else 0)
    until(lambda: link(client).restarts == 1)
    for caller in callers:
        caller.finish()
        caller.expect(still, kind)
    expect_empty(client)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["while it loads", "while streams are on their way"])
def test_closing_meanwhile(begin, when, monkeypatch):
    monkeypatch.setattr(supervisor, "EXIT_TIMEOUT_S", 0.5)
    client = begin("rnnt")
    caller, old = Caller(client, "rnnt", 2, 2), pid(client)
    caller.go_on(wait=True)
    closing = threading.Thread(target=client.close)

    def stop() -> None:
        os.kill(old, signal.SIGSTOP)
        caller.go_on()
        if when == "while it loads":
            closing.start()
            until(lambda: link(client)._supervisor._closing.is_set())

    with before_the_swap(monkeypatch, stop):
        renewing = Renewing(client)
        if when != "while it loads":
            until(lambda: pid(client) != old)
            closing.start()
        with pytest.raises(EngineClosed):
            renewing.result()
    closing.join(WAIT_S)
    assert client.state == "closed"
    with pytest.raises(EngineClosed):
        caller.came()[-1].result(WAIT_S)
    with pytest.raises(EngineClosed):
        link(client).renew()


@pytest.mark.slow
def test_a_second_one_after_one_that_took_too_long(begin, still, monkeypatch):
    """A stream is told of to a process that is to be replaced itself before it has answered."""
    client = begin("rnnt")
    caller = Caller(client, "rnnt", 2, 2)
    caller.go_on(wait=True)
    handed_over = threading.Event()
    go_over = Handover._on_exported

    def left(self: Handover, number: int, saved: Any) -> None:
        os.kill(self.new.process.pid, signal.SIGSTOP)
        go_over(self, number, saved)
        handed_over.set()

    with monkeypatch.context() as patch:
        patch.setattr(Handover, "_on_exported", left)
        assert Renewing(client, timeout_s=1.0).result()[:4] == (0, 0, 0, 0)
    assert handed_over.is_set()
    second = pid(client)
    caller.go_on()

    with before_the_swap(monkeypatch, lambda: None):
        renewing = Renewing(client)
        until(lambda: pid(client) != second)
    os.kill(second, signal.SIGCONT)
    assert renewing.result().streams == 1
    caller.finish()
    caller.expect(still, "rnnt")
    expect_empty(client)


def test_what_nobody_foresaw_ends_the_engine_and_nobody_waits(begin, monkeypatch):
    client = begin("ctc")
    caller, engine = Caller(client, "ctc", 2, 2), pid(client)
    caller.go_on(wait=True)

    def broken(self: InFlight, message: Any) -> Any:
        raise KeyError(1)

    with monkeypatch.context() as patch:
        patch.setattr(InFlight, "handle_message", broken)
        caller.go_on()
        with pytest.raises(EngineClosed):
            caller.came()[-1].result(WAIT_S)
    until(lambda: client.state == "closed")
    assert not psutil.pid_exists(engine)


def test_twice_at_once(begin, monkeypatch):
    client, errors = begin("whole"), list[Exception]()

    def again() -> None:
        try:
            link(client).renew()
        except AsrServeError as failure:
            errors.append(failure)

    with before_the_swap(monkeypatch, again):
        assert Renewing(client).result()
    assert [type(each) for each in errors] == [NotAllowed]
    expect_empty(client)


@pytest.mark.slow
def test_of_many_nothing_is_left(begin, still):
    """No process, descriptor, thread or memory: what each left behind would be counted after the first."""
    client, me = begin("rnnt"), psutil.Process()
    caller, went = Caller(client, "rnnt", 4, 4), 0
    caller.go_on(wait=True)
    link(client).renew()

    def held() -> tuple[int, ...]:
        maps = Path("/proc/self/maps")
        ours = maps.read_text().count("asr-serve") if maps.exists() else 0
        return me.num_fds(), len(me.children(recursive=True)), threading.active_count(), ours

    before = held()
    for _ in range(4):
        if not caller.over:
            caller.go_on()
        went += link(client).renew().streams
    until(lambda: held() == before)
    assert went >= 3
    caller.finish()
    caller.expect(still, "rnnt")
    expect_empty(client)
