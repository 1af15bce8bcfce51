"""One engine decodes, others encode for it: the same tokens, whatever becomes of the others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import tiny_moonshine
import tiny_whisper
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome, save

from asr_serve.config import EngineConfig
from asr_serve.decoding.attention import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.local import local
from asr_serve.engine.parts import Checkpoint
from asr_serve.engine.peers import askers, asking, meeting, peer, roles, said
from asr_serve.engine.peers import worker as worker_of_peers
from asr_serve.engine.peers.meeting import Meeting
from asr_serve.engine.process.child import RingSize
from asr_serve.engine.process.link import RemoteLink, remote
from asr_serve.engine.process.wire import EngineSpec
from asr_serve.errors import OptionError
from asr_serve.models.card import card
from asr_serve.transfer import roads

MODEL = "moonshine-tiny-en"
CONFIG = EngineConfig(max_decode_rows=8, kv_bytes=1 << 20, max_sessions=6, prefix_bytes=0)
ENCODE = EngineConfig(role="encode", max_sessions=2)
ONCE = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 16_000 + 7_919 * seed) for seed in range(12)]
ROADS = [road for road in roads.kinds() if road != "local"]
Begin = Callable[..., EngineClient]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a peer to come back."""
    monkeypatch.setattr(asking, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(asking, "REFUSED_PAUSE_S", 0.3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Iterator[list[tuple[int, ...]]]:
    """What one engine by itself says of each clip."""
    found = Checkpoint.find(MODEL, checkpoint)
    client = EngineClient(CONFIG, local(found.card, lambda: found.build("cpu", "fp32")))
    yield [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    client.close()


@pytest.fixture
def worker(checkpoint: Path) -> Iterator[Begin]:
    """Starts processes that encode; `worker(port)` is asked at that port."""
    started: list[EngineClient] = []

    def start(port: int, folder: Path = checkpoint, keys: tuple[str, ...] = ()) -> EngineClient:
        spec = EngineSpec(
            model=MODEL,
            device="cpu",
            dtype="fp32",
            weights=str(folder),
            turn_model="none",
            threads=1,
            listen=("127.0.0.1", port),
            peer_keys=keys,
        )
        started.append(EngineClient(ENCODE, remote(spec, RingSize(64, 16_384))))
        return started[-1]

    yield start
    for client in started:
        client.close()


@pytest.fixture
def decoder(checkpoint: Path) -> Iterator[Begin]:
    """Starts engines of this process that ask those at `ports`. Nothing is left in them, nor of their memory."""
    started: list[EngineClient] = []

    def start(*ports: int, keys: tuple[str, ...] = (), **settings: Any) -> EngineClient:
        found = Checkpoint.find(MODEL, checkpoint)
        peers = tuple(f"127.0.0.1:{port}" for port in ports)
        config = msgspec.structs.replace(
            CONFIG, **{"role": "decode", "peers": peers, "peer_road": "tcp", **settings}
        )
        met = found.meeting(config, ("127.0.0.1", 0), keys)
        started.append(EngineClient(config, local(found.card, lambda: found.build("cpu", "fp32"), meeting=met)))
        return started[-1]

    yield start
    for client in started:
        expect_nothing_left(client)
        client.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], object], what: Callable[[], object] = lambda: "it never was") -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, what()
        time.sleep(0.01)


def peers(client: EngineClient) -> asking.Peers:
    found: asking.Peers = client.link.loop.work.encoders._peers
    return found


def ready(client: EngineClient, count: int = 1) -> None:
    until(lambda: sum(each.state == "ready" for each in peers(client).peers) == count, peers(client).describe)


def process(client: EngineClient) -> int:
    assert isinstance(client.link, RemoteLink)
    return psutil.Process(client.link._current.process.pid).pid


def expect_nothing_left(client: EngineClient) -> None:
    expect_empty(client)
    assert not on_loop(client, lambda loop: list(loop.work.encoders.under_way))
    for each in peers(client).peers:
        if (connection := each.connection) is not None:
            assert not connection._sent
            assert not connection._queue
            assert not connection._samples
            assert not connection.landing._lent


def answers(client: EngineClient, clips: list[np.ndarray]) -> list[Any]:
    tickets = [client.submit(pcm, ONCE) for pcm in clips]
    return [ticket.future.result(WAIT_S).tokens for ticket in tickets]


def encoded_by(client: EngineClient) -> int:
    """Utterances that a worker has encoded."""
    return int(client.describe()["peer_requests"])


# --- the same tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("carries", ["cross", "hidden"])
@pytest.mark.parametrize("road", ROADS)
def test_by_every_road_the_same_tokens_as_together(worker, decoder, expected, road, carries) -> None:
    port = free_port()
    encodes = worker(port)
    client = decoder(port, peer_road=road, peer_carries=carries)
    ready(client)
    assert (peers(client).peers[0].connection.carries, peers(client).peers[0].connection.landing.kind) == (
        carries,
        road,
    )
    assert answers(client, CLIPS) == expected
    assert encoded_by(encodes) == len(CLIPS)


def test_two_workers_share_the_work(worker, decoder, expected) -> None:
    ports = [free_port(), free_port()]
    both = [worker(port) for port in ports]
    client = decoder(*ports, encode_frames=64)
    ready(client, 2)
    assert answers(client, CLIPS) == expected
    assert sum(map(encoded_by, both)) == len(CLIPS)
    assert all(map(encoded_by, both))


# --- what becomes of the others -------------------------------------------------------------------------------


def test_killed_in_mid_batch_everything_is_encoded_by_another(worker, decoder, expected) -> None:
    ports = [free_port(), free_port()]
    one, other = (worker(port) for port in ports)
    client = decoder(*ports, encode_frames=64)
    ready(client, 2)
    os.kill(process(one), signal.SIGSTOP)  # it has taken some when it dies
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    stopped = peers(client).peers[0]
    until(lambda: stopped.connection is not None and stopped.connection._sent)
    os.kill(process(one), signal.SIGKILL)
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    assert encoded_by(other)
    ready(client, 2)  # its own server starts it anew


def test_one_that_stands_still_is_given_up_after_the_timeout(worker, decoder, expected) -> None:
    port = free_port()
    encodes = worker(port)
    client = decoder(port, peer_timeout_s=1.0)
    ready(client)
    os.kill(process(encodes), signal.SIGSTOP)
    assert answers(client, CLIPS) == expected
    assert peers(client).peers[0].state == "connecting"
    os.kill(process(encodes), signal.SIGCONT)
    ready(client)
    before = encoded_by(encodes)
    assert answers(client, CLIPS) == expected
    assert encoded_by(encodes) == before + len(CLIPS)


def test_an_idle_one_that_stands_still_is_noticed(worker, decoder) -> None:
    port = free_port()
    encodes = worker(port)
    client = decoder(port, peer_timeout_s=0.5)
    ready(client)
    os.kill(process(encodes), signal.SIGSTOP)
    until(lambda: peers(client).peers[0].state == "connecting")
    os.kill(process(encodes), signal.SIGCONT)
    ready(client)


def test_without_any_it_encodes_itself_and_peers_that_come_are_used(worker, decoder, expected) -> None:
    port = free_port()
    client = decoder(port)
    assert answers(client, CLIPS) == expected
    encodes = worker(port)
    ready(client)
    assert answers(client, CLIPS) == expected
    assert encoded_by(encodes) == len(CLIPS)


def test_one_engine_of_both_roles_encodes_too(worker, decoder, expected) -> None:
    port = free_port()
    encodes = worker(port)
    client = decoder(port, role="both", encode_frames=64)
    ready(client)
    os.kill(process(encodes), signal.SIGSTOP)  # what it was not given yet is not for it
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    until(lambda: sum(ticket.future.done() for ticket in tickets) >= 4)
    os.kill(process(encodes), signal.SIGCONT)
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    assert 0 < encoded_by(encodes) < len(CLIPS)


def test_what_is_cancelled_leaves_nothing(worker, decoder, expected) -> None:
    port = free_port()
    encodes = worker(port)
    client = decoder(port, encode_frames=64)
    ready(client)
    os.kill(process(encodes), signal.SIGSTOP)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    until(lambda: peers(client).peers[0].connection._sent)
    for ticket in tickets[::2]:
        client.cancel(ticket)
    os.kill(process(encodes), signal.SIGCONT)
    for index, ticket in enumerate(tickets):
        if index % 2:
            assert ticket.future.result(WAIT_S).tokens == expected[index]
        else:
            assert outcome(ticket).__name__ == "Cancelled"
    assert encoded_by(encodes) < len(CLIPS), "what was not sent yet when it was cancelled is not sent"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_when_every_request_finishes(worker, decoder, expected, seed) -> None:
    chance = random.Random(seed)
    ports = [free_port(), free_port()]
    workers = [worker(port) for port in ports]
    client = decoder(*ports, encode_frames=48, peer_timeout_s=1.0, peer_carries=chance.choice(["cross", "hidden"]))
    ready(client, 2)
    over = threading.Event()

    def harm() -> None:
        while not over.wait(chance.uniform(0.02, 0.4)):
            victim = chance.choice(workers)
            try:
                pid = process(victim)
                match chance.randrange(3):
                    case 0:
                        os.kill(pid, signal.SIGKILL)
                    case 1:
                        os.kill(pid, signal.SIGSTOP)
                        over.wait(chance.uniform(0.1, 1.5))
                        os.kill(pid, signal.SIGCONT)
                    case _:
                        if (connection := chance.choice(peers(client).peers).connection) is not None:
                            connection.line.hang_up()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue

    harming = threading.Thread(target=harm)
    harming.start()
    try:
        for _ in range(4):
            assert answers(client, CLIPS) == expected
    finally:
        over.set()
        harming.join()


# --- who does not fit -------------------------------------------------------------------------------------------


def refusal(client: EngineClient, caplog: pytest.LogCaptureFixture) -> str:
    until(lambda: peers(client).peers[0].state == "refused")
    return next(record.getMessage() for record in caplog.records if "is refused" in record.getMessage())


def test_other_weights_are_refused_and_what_differs_is_said(worker, decoder, expected, tmp_path, caplog) -> None:
    folder = save(tmp_path)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\1")
    port = free_port()
    worker(port, folder)
    client = decoder(port)
    assert "weights: " in refusal(client, caplog)
    assert answers(client, CLIPS) == expected


@pytest.mark.parametrize(
    ("asks", "encodes", "said_of_it"),
    [
        (("secret",), ("other",), "does not know the key"),
        ((), ("other",), "the engine that encodes has peer_keys, the one that asks has none"),
        (("secret",), (), "the engine that asks has peer_keys, the one that encodes has none"),
    ],
)
def test_other_keys_are_refused(worker, decoder, expected, caplog, asks, encodes, said_of_it) -> None:
    port = free_port()
    worker(port, keys=encodes)
    client = decoder(port, keys=asks)
    assert said_of_it in refusal(client, caplog)
    assert not any("secret" in record.getMessage() for record in caplog.records)
    assert answers(client, CLIPS[:2]) == expected[:2]


def test_one_of_the_keys_is_enough(worker, decoder, expected) -> None:
    port = free_port()
    encodes = worker(port, keys=("another", "secret"))
    client = decoder(port, keys=("secret", "not-asked"))
    ready(client)
    assert answers(client, CLIPS) == expected
    assert encoded_by(encodes) == len(CLIPS)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        bytes(64),
        b"\xff\xff\xff\x7f" + bytes(100),
        b"\x04\0\0\0\x81\xa4type",
        random.Random(0).randbytes(10_000),
        b"\x05",
        struct.pack("<I", 100_016) + b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=["http", "zeros", "long", "msgpack", "noise", "half", "deep"],
)
def test_garbage_at_the_port_hurts_nobody(worker, decoder, expected, garbage) -> None:
    port = free_port()
    encodes = worker(port)
    client = decoder(port)
    ready(client)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(garbage)
        if garbage == b"\x05":
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4_096):
                pass
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    assert peers(client).peers[0].state == "ready"
    until(lambda: encodes.describe()["askers"] == 1)


# --- in one process, where it can be looked at ---------------------------------------------------------------


class Pair:
    """A worker and an engine that asks it, both on threads of this process."""

    def __init__(self, of: Any, **settings: Any) -> None:
        config = {"max_decode_rows": 8, "kv_bytes": 2 << 20, "max_sessions": 2, "prefix_bytes": 0}
        met = Meeting("weights")
        self.encodes = EngineClient(
            EngineConfig(role="encode", **config),
            local(of.CARD, of.build, meeting=met._replace(listen=("127.0.0.1", 0))),
        )
        self.worker = self.encodes.link.loop.work
        self.address = f"127.0.0.1:{self.worker.port}"
        asks = EngineConfig(**{"role": "decode", "peers": (self.address,), **config, **settings})
        self.client = EngineClient(asks, local(of.CARD, of.build, meeting=met))
        ready(self.client)

    def close(self) -> None:
        self.client.close()
        self.encodes.close()


@pytest.mark.parametrize("window", ["packed", "checked", "whole"])
@pytest.mark.parametrize("carries", ["cross", "hidden"])
def test_a_whisper_says_the_same_tokens(carries, window) -> None:
    alone = tiny_whisper.start(window=window, prefix_bytes=0)
    said_alone = [alone.submit(pcm).future.result(WAIT_S).tokens for pcm in tiny_whisper.CLIPS]
    alone.close()
    pair = Pair(tiny_whisper, window=window, peer_road="tcp", peer_carries=carries)
    tickets = [pair.client.submit(pcm) for pcm in tiny_whisper.CLIPS]
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == said_alone
    assert pair.worker.encoded >= len(tickets)
    expect_nothing_left(pair.client)
    pair.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(tiny_moonshine, peer_road="tcp")
    yield made
    made.close()


class Stranger:
    """An asker that says whatever a test wants."""

    def __init__(self, pair: Pair, carries: str = "hidden") -> None:
        self.pair = pair
        identity = peers(pair.client).identity
        self.line = said.Line(socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S), said.to_asker)
        self.met = meeting.ask(self.line, identity, ())
        self.landing = roads.land("tcp", 1 << 20, self.line.here)
        self.line.send(said.Offer("tcp", self.landing.offer, carries))
        self.line.expect(said.Attached)
        self.frame_bytes = pair.worker._frame_bytes[carries]

    def ask(self, number: int, pcm: np.ndarray, **changed: Any) -> None:
        frames = self.pair.worker.runner.model.frames(len(pcm))
        spot = changed.get("spot") or self.landing.lend(frames * self.frame_bytes)
        assert spot is not None
        fields = {"length": len(pcm), "whole": False, "priority": "interactive", "within_ms": None, "spot": spot}
        self.line.send(said.Encode(number, **{**fields, **changed}), pcm)

    def gone(self) -> bool:
        try:
            while self.line.receive(WAIT_S) is not None:
                pass
        except Exception as end:
            return type(end).__name__ == "PeerGone"
        return False

    def close(self) -> None:
        self.line.close()
        self.landing.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"length": 1 << 30},
        {"length": 1},
        {"length": -5},
        {"spot": roads.Spot(0, 1)},
        {"spot": roads.Spot(1 << 35, 64)},
        {"whole": True},
        {"within_ms": -1},
    ],
    ids=["long", "short", "negative", "small", "far", "no window", "early"],
)
def test_who_asks_for_what_it_may_not_is_hung_up_on(pair, changed, caplog) -> None:
    stranger = Stranger(pair)
    stranger.ask(1, CLIPS[0], **changed)
    if changed == {"within_ms": -1}:  # whatever it wants, it is only late with the rest
        assert isinstance(stranger.line.receive(WAIT_S), said.Encoded)
    else:
        assert stranger.gone()
    stranger.close()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    until(lambda: pair.encodes.describe()["askers"] == 1)
    assert not [record for record in caplog.records if record.exc_info], "that was foreseen"


def test_who_lends_the_same_memory_again_and_again_is_hung_up_on(pair) -> None:
    """What is encoded and not yet put is memory of the worker's."""
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        nbytes = pair.worker.runner.model.frames(len(CLIPS[0])) * stranger.frame_bytes
        fit = stranger.landing.nbytes // nbytes
        for number in range(fit + 1):
            stranger.ask(number, CLIPS[0], spot=roads.Spot(0, nbytes))
        assert stranger.gone()
    stranger.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)


def test_one_number_twice_and_more_than_may_be_are_refused(pair, monkeypatch) -> None:
    twice, many = Stranger(pair), Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        twice.ask(1, CLIPS[0])
        twice.ask(1, CLIPS[0])
        assert twice.gone()
        for number in range(many.met.requests + 1):
            many.ask(number, CLIPS[0][:2_000])
        assert many.gone()
    twice.close()
    many.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)
    on_loop(pair.encodes, lambda loop: loop.work.check())


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much(pair) -> None:
    much, little = Stranger(pair), Stranger(pair)
    order: list[tuple[str, int]] = []
    pair.worker.planner.encode_frames = 40  # batches of one or two
    on_loop(pair.encodes, lambda loop: setattr(loop.work, "_frame_s", 0.01))
    answer = pair.worker._encode

    def noted(batch: list[Any]) -> Any:
        order.extend(("much" if len(r.pcm) == len(CLIPS[1]) else "little", r.id) for r in batch)
        return answer(batch)

    pair.worker._encode = noted
    with tiny_moonshine.held(pair.encodes):
        for number in range(20):
            much.ask(number, CLIPS[1])
        until(lambda: len(held_by(pair)) == 20)
        for number in range(3):
            little.ask(number, CLIPS[0])
        until(lambda: len(held_by(pair)) == 23)
    for number in range(20):
        assert isinstance(much.line.receive(WAIT_S), said.Encoded), number
    places = [place for place, (who, _) in enumerate(order) if who == "little"]
    assert len(places) == 3
    assert max(places) < 10, order
    much.close()
    little.close()


def held_by(pair: Pair) -> list[Any]:
    return [request for asker in list(pair.worker._askers) for request in list(asker._held.values())]


def test_an_asker_that_dies_takes_its_requests_along(pair) -> None:
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        for number in range(5):
            stranger.ask(number, CLIPS[0])
        until(lambda: len(held_by(pair)) == 5)
        stranger.close()
        until(lambda: len(pair.worker._askers) == 1)
    on_loop(pair.encodes, lambda loop: loop.work.check())
    assert pair.worker.encoded == 0


def test_a_cancelled_request_is_not_encoded(pair) -> None:
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        for number in range(3):
            stranger.ask(number, CLIPS[0])
        until(lambda: len(held_by(pair)) == 3)
        stranger.line.send(said.Cancel(1))
        until(lambda: any(request.cancelled for request in held_by(pair)))
    told = {}
    for _ in range(3):
        message = stranger.line.receive(WAIT_S)
        told[message.id] = type(message)
    assert told == {0: said.Encoded, 1: said.Failed, 2: said.Encoded}
    assert pair.worker.encoded == 2
    stranger.close()


def test_a_step_that_fails_fails_its_requests_and_nothing_else(pair) -> None:
    encode = pair.worker._encode

    def broken(batch: list[Any]) -> Any:
        raise RuntimeError("no")

    pair.worker._encode = broken
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    pair.worker._encode = encode
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    expect_nothing_left(pair.client)


def test_more_askers_than_may_be_are_hung_up_on(pair) -> None:
    strangers = [socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S) for _ in range(40)]
    until(lambda: pair.encodes.describe()["askers"] <= 16)
    late = Stranger(pair)  # one that does say who it is finds a place
    late.ask(1, CLIPS[0])
    assert isinstance(late.line.receive(WAIT_S), said.Encoded)
    late.close()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    for stranger in strangers:
        stranger.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)


class Liar:
    """A worker that answers whatever a test wants: `lie(line, encode)` is called for each request."""

    def __init__(self, pair: Pair, lie: Callable[[said.Line, said.Encode, Any], None]) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._identity, self._lie, self.asked = peers(pair.client).identity, lie, 0
        self._lines: list[said.Line] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                end, _ = self._door.accept()
                line = said.Line(end, said.to_worker)
                self._lines.append(line)
                try:
                    self._talk(line)
                except Exception:
                    line.close()
        except OSError:
            return

    def _talk(self, line: said.Line) -> None:
        met = meeting.Met(self._identity, ("tcp",), 256, 16 << 20)
        meeting.welcome(line, self._identity, (), met)
        with contextlib.closing(roads.attach(line.expect(said.Offer).landing)) as sender:
            line.send(said.Attached())
            while True:
                message = line.receive(WAIT_S)
                if isinstance(message, said.Encode):
                    line.samples(message.length)
                    self.asked += 1
                    self._lie(line, message, sender)
                elif isinstance(message, said.Ping):
                    line.send(said.Pong())

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for line in self._lines:
            line.hang_up()


def torn(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    checksum = sender.put(wanted.spot, np.ones(wanted.spot.nbytes, np.uint8), WAIT_S)
    frames = wanted.spot.nbytes // 128  # of 32 numbers
    line.send(said.Encoded(wanted.id, frames, wanted.spot.nbytes, checksum ^ 1, 0.0, 0.0, 0.0))


def of_another(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    line.send(said.Encoded(wanted.id + 7, 1, wanted.spot.nbytes, 0, 0.0, 0.0, 0.0))


def smaller(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    line.send(said.Encoded(wanted.id, 1, 1, 0, 0.0, 0.0, 0.0))


def nothing(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    pass


def noise(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    line._end.sendall(random.Random(1).randbytes(500))


def hung_up(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    line.hang_up()


def deep(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    line._end.sendall(struct.pack("<I", 100_015) + b"\x82\xa4type\xa4Pong\xa1x" + b"\x91" * 100_000 + b"\xc0")


def taken_back(line: said.Line, wanted: said.Encode, sender: Any) -> None:
    line.send(said.Failed(wanted.id, "cancelled"))


@pytest.mark.parametrize("lie", [torn, of_another, smaller, nothing, noise, hung_up, deep])
def test_one_that_lies_loses_its_batches_and_two_lost_is_enough(pair, lie, monkeypatch) -> None:
    """Its requests go to the next, and after two peers lost over them are encoded here."""
    liar = Liar(pair, lie)
    met = Meeting("weights")
    config = EngineConfig(
        role="decode",
        peers=(liar.address,),
        peer_road="tcp",
        peer_timeout_s=0.5,
        max_decode_rows=8,
        kv_bytes=2 << 20,
        max_sessions=2,
        prefix_bytes=0,
        encode_frames=64,
    )
    client = EngineClient(config, local(tiny_moonshine.CARD, tiny_moonshine.build, meeting=met))
    ready(client)
    expected = [pair.client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    assert answers(client, CLIPS) == expected
    assert liar.asked
    expect_nothing_left(client)
    client.close()
    liar.close()


def test_what_nobody_cancelled_has_failed(pair) -> None:
    """A peer may not take a request back by itself."""
    liar = Liar(pair, taken_back)
    config = msgspec.structs.replace(pair.client.config, peers=(liar.address,))
    client = EngineClient(config, local(tiny_moonshine.CARD, tiny_moonshine.build, meeting=Meeting("weights")))
    ready(client)
    assert outcome(client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    expect_nothing_left(client)
    client.close()
    liar.close()


# --- what nobody foresaw --------------------------------------------------------------------------------------


def once(monkeypatch: pytest.MonkeyPatch, of: type, name: str, *, at_end: bool = False) -> list[str]:
    """The next call of a method of ours fails as none should."""
    before, failed = getattr(of, name), list[str]()

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = before(self, *args, **kwargs) if failed or at_end else None
        if not failed:
            failed.append(name)
            raise RuntimeError("nobody foresaw that")
        return found

    monkeypatch.setattr(of, name, broken)
    return failed


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (peer.Connection, "_arrived"),
        (peer.Connection, "_lend"),
        (askers.Asker, "_send"),
        (askers.Asker, "_take"),
        (roads.Landing, "arrived"),
    ],
)
def test_a_failure_of_ours_loses_a_connection_and_no_request(pair, monkeypatch, of, name) -> None:
    expected = [pair.client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    failed = once(monkeypatch, of, name)
    assert answers(pair.client, CLIPS) == expected
    assert failed
    ready(pair.client)
    before = pair.worker.encoded
    assert answers(pair.client, CLIPS) == expected
    assert pair.worker.encoded == before + len(CLIPS)
    until(lambda: pair.encodes.describe()["askers"] == 1)
    expect_nothing_left(pair.client)


@pytest.mark.parametrize(("of", "name"), [(asking.Peer, "_agree"), (roads.Landing, "close")])
def test_a_failure_of_ours_while_it_comes_or_goes_is_not_its_end(pair, monkeypatch, of, name) -> None:
    peers(pair.client).peers[0].connection.line.hang_up()
    failed = once(monkeypatch, of, name, at_end=name == "close")
    tickets = [pair.client.submit(pcm, ONCE) for pcm in CLIPS]
    assert all(ticket.future.result(WAIT_S).tokens for ticket in tickets)
    until(lambda: failed)
    ready(pair.client)


def test_the_door_stays_open_whoever_cannot_be_let_in(pair, monkeypatch) -> None:
    failed = once(monkeypatch, worker_of_peers.Encoding, "_who_leaves")
    turned_away = socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S)
    until(lambda: failed)
    turned_away.close()
    late = Stranger(pair)
    late.ask(1, CLIPS[0])
    assert isinstance(late.line.receive(WAIT_S), said.Encoded)
    late.close()


def test_without_a_thread_for_it_a_batch_fails_and_nobody_waits(pair, monkeypatch) -> None:
    def none(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pair.client.link.loop.work.encoders._threads, "submit", none)
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    expect_nothing_left(pair.client)


def test_only_models_that_hear_whole_utterances_have_roles() -> None:
    for name in ("fastconformer-streaming-medium-en", "moonshine-streaming-tiny-en"):
        for settings in ({"role": "encode"}, {"role": "decode"}, {"peers": ("here:1",)}):
            with pytest.raises(OptionError, match=r"hears while somebody speaks.*whisper-tiny-en"):
                roles.expect(card(name), EngineConfig(**settings))


def test_a_library_has_no_roles() -> None:
    with pytest.raises(OptionError, match="asr-serve serve has them"):
        tiny_moonshine.start(role="decode")


def test_a_port_that_is_taken_is_said_at_start(pair) -> None:
    met = Meeting("weights", ("127.0.0.1", pair.worker.port))
    with pytest.raises(OptionError, match="cannot be listened at for peers"):
        EngineClient(EngineConfig(role="encode"), local(tiny_moonshine.CARD, tiny_moonshine.build, meeting=met))


def test_a_clip_that_was_sent_is_not_sent_to_a_full_peer(pair) -> None:
    """`room` is what the loop asks before it plans: two batches, and no more."""
    connection = peers(pair.client).peers[0].connection
    clips = [peer.Clip(CLIPS[0], pair.worker.runner.model.frames(len(CLIPS[0])), False, "bulk", None)]
    came: list[Any] = []
    with tiny_moonshine.held(pair.encodes):
        assert [connection.start(clips, came.append) is not None for _ in range(3)] == [True, True, False]
        assert not peers(pair.client).room
    until(lambda: len(came) == 2)
    assert peers(pair.client).room
