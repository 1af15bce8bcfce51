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
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import pytest
import tiny_moonshine
import tiny_whisper
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome, save

from asr_serve.config import EngineConfig
from asr_serve.decoding.seq2seq import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.remote import connection as peer
from asr_serve.engine.remote import encode_client, handshake, messages, peer_pool, roles
from asr_serve.engine.remote import encode_worker as worker_of_peers
from asr_serve.engine.remote.handshake import HandshakeSettings
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import OptionError, PeerRefused
from asr_serve.models.registry import asr_card
from asr_serve.transfer import transports
from asr_serve.transfer.transports import base

MODEL = "moonshine-tiny-en"
CONFIG = EngineConfig(max_decode_rows=8, kv_bytes=1 << 20, max_sessions=6, prefix_bytes=0)
ENCODE = EngineConfig(role="encode", max_sessions=2)
ONCE = SearchOptions(temperatures=(0.0,))
CLIPS = [clip(seed, 16_000 + 7_919 * seed) for seed in range(12)]
ROADS = [road for road in transports.available_transports() if road != "local"]
SECRET, ANOTHER = "a-key-that-peers-share", "another-key-of-peers"
Begin = Callable[..., EngineClient]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a peer to come back."""
    monkeypatch.setattr(peer_pool, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(peer_pool, "REFUSED_PAUSE_S", 0.3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Iterator[list[tuple[int, ...]]]:
    """What one engine by itself says of each clip."""
    found = AsrCheckpoint.find(MODEL, checkpoint)
    client = EngineClient(CONFIG, thread_backend(found.card, lambda: found.build("cpu", "fp32")))
    yield [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    client.close()


def encoder(folder: Path, port: int, keys: tuple[str, ...] = ()) -> EngineClient:
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
    return EngineClient(ENCODE, process_backend(spec, RingSize(64, 16_384)))


@pytest.fixture
def worker(checkpoint: Path) -> Iterator[Begin]:
    """Starts processes that encode; `worker(port)` is asked at that port."""
    started: list[EngineClient] = []

    def start(port: int, folder: Path = checkpoint) -> EngineClient:
        started.append(encoder(folder, port))
        return started[-1]

    yield start
    for client in started:
        client.close()


class Standing(NamedTuple):
    """Processes that encode, of several tests, and the ports at which they are asked."""

    clients: list[EngineClient]
    ports: list[int]

    def wake(self) -> None:
        """Whatever a test that failed has left of them."""
        for client in self.clients:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process(client), signal.SIGCONT)


@contextlib.contextmanager
def standing(checkpoint: Path, count: int, keys: tuple[str, ...] = ()) -> Iterator[Standing]:
    with contextlib.ExitStack() as undo:
        ports = [free_port() for _ in range(count)]
        found = Standing([], ports)
        for port in ports:
            found.clients.append(encoder(checkpoint, port, keys))
            undo.callback(found.clients[-1].close)
        undo.callback(found.wake)
        yield found


@pytest.fixture(scope="module")
def _one(checkpoint: Path) -> Iterator[Standing]:
    with standing(checkpoint, 1) as found:
        yield found


@pytest.fixture
def one(_one: Standing) -> Iterator[tuple[EngineClient, int]]:
    """A process that encodes, and its port. Starting one takes seconds: who kills none takes this one."""
    yield _one.clients[0], _one.ports[0]
    _one.wake()


@pytest.fixture(scope="module")
def _two(checkpoint: Path) -> Iterator[Standing]:
    with standing(checkpoint, 2) as found:
        yield found


@pytest.fixture
def two(_two: Standing) -> Iterator[Standing]:
    """Two, which may be killed: their own servers start them anew."""
    yield _two
    _two.wake()


@pytest.fixture(scope="module")
def keyed(checkpoint: Path) -> Iterator[tuple[EngineClient, int]]:
    with standing(checkpoint, 1, (ANOTHER, SECRET)) as found:
        yield found.clients[0], found.ports[0]


@pytest.fixture
def decoder(checkpoint: Path) -> Iterator[Begin]:
    """Starts engines of this process that ask those at `ports`. Nothing is left in them, nor of their memory."""
    started: list[EngineClient] = []

    def start(*ports: int, keys: tuple[str, ...] = (), **settings: Any) -> EngineClient:
        found = AsrCheckpoint.find(MODEL, checkpoint)
        peers = tuple(f"127.0.0.1:{port}" for port in ports)
        config = msgspec.structs.replace(
            CONFIG, **{"role": "decode", "peers": peers, "peer_road": "tcp", **settings}
        )
        met = found.peer_identity(config, ("127.0.0.1", 0), keys)
        started.append(
            EngineClient(config, thread_backend(found.card, lambda: found.build("cpu", "fp32"), meeting=met))
        )
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


def peers(client: EngineClient) -> peer_pool.PeerPool:
    found: peer_pool.PeerPool = client.backend.loop.executor.encoder_pool._peers
    return found


def ready(client: EngineClient, count: int = 1) -> None:
    until(lambda: sum(each.state == "ready" for each in peers(client).peers) == count, peers(client).describe)


def process(client: EngineClient) -> int:
    assert isinstance(client.backend, ProcessBackend)
    return psutil.Process(client.backend._current.process.pid).pid


def expect_nothing_left(client: EngineClient) -> None:
    expect_empty(client)
    assert not on_loop(client, lambda loop: list(loop.executor.encoder_pool.in_flight))
    for each in peers(client).peers:
        if (connection := each.connection) is not None:
            assert not connection._in_flight
            assert not connection._queue
            assert not connection._samples
            assert not connection.receiver._leased


def answers(client: EngineClient, clips: list[np.ndarray]) -> list[Any]:
    tickets = [client.submit(pcm, ONCE) for pcm in clips]
    return [ticket.future.result(WAIT_S).tokens for ticket in tickets]


def encoded_by(client: EngineClient) -> int:
    """Utterances that a worker has encoded."""
    return int(client.describe()["peer_requests"])


# --- the same tokens ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("carries", ["cross", "hidden"])
@pytest.mark.parametrize("road", ROADS)
def test_by_every_road_the_same_tokens_as_together(one, decoder, expected, road, carries) -> None:
    encodes, port = one
    before = encoded_by(encodes)
    client = decoder(port, peer_road=road, peer_carries=carries)
    ready(client)
    assert (peers(client).peers[0].connection.payload, peers(client).peers[0].connection.receiver.kind) == (
        carries,
        road,
    )
    assert answers(client, CLIPS) == expected
    assert encoded_by(encodes) == before + len(CLIPS)


@pytest.mark.slow
def test_two_workers_share_the_work(two, decoder, expected) -> None:
    client = decoder(*two.ports, encode_frames=64)
    ready(client, 2)
    assert answers(client, CLIPS) == expected
    assert sum(map(encoded_by, two.clients)) == len(CLIPS)
    assert all(map(encoded_by, two.clients))


# --- what becomes of the others -------------------------------------------------------------------------------


def test_killed_in_mid_batch_everything_is_encoded_by_another(two, decoder, expected) -> None:
    one, other = two.clients
    client = decoder(*two.ports, encode_frames=64)
    ready(client, 2)
    before = encoded_by(other)
    os.kill(process(one), signal.SIGSTOP)  # it has taken some when it dies
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    stopped = peers(client).peers[0]
    until(lambda: stopped.connection is not None and stopped.connection._in_flight)
    os.kill(process(one), signal.SIGKILL)
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    assert encoded_by(other) > before
    ready(client, 2)  # its own server starts it anew


def test_one_that_stands_still_is_given_up_after_the_timeout(one, decoder, expected) -> None:
    encodes, port = one
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


def test_an_idle_one_that_stands_still_is_noticed(one, decoder) -> None:
    encodes, port = one
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


def test_one_engine_of_both_roles_encodes_too(one, decoder, expected) -> None:
    encodes, port = one
    client = decoder(port, role="both", encode_frames=64)
    ready(client)
    before = encoded_by(encodes)
    os.kill(process(encodes), signal.SIGSTOP)  # what it was not given yet is not for it
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    until(lambda: sum(ticket.future.done() for ticket in tickets) >= 4)
    os.kill(process(encodes), signal.SIGCONT)
    assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
    assert 0 < encoded_by(encodes) - before < len(CLIPS)


def test_what_is_cancelled_leaves_nothing(one, decoder, expected) -> None:
    encodes, port = one
    client = decoder(port, encode_frames=64)
    ready(client)
    before = encoded_by(encodes)
    os.kill(process(encodes), signal.SIGSTOP)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    until(lambda: peers(client).peers[0].connection._in_flight)
    for ticket in tickets[::2]:
        client.cancel(ticket)
    os.kill(process(encodes), signal.SIGCONT)
    for index, ticket in enumerate(tickets):
        if index % 2:
            assert ticket.future.result(WAIT_S).tokens == expected[index]
        else:
            assert outcome(ticket).__name__ == "Cancelled"
    assert encoded_by(encodes) - before < len(CLIPS), "what was not sent yet when it was cancelled is not sent"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_when_every_request_finishes(two, decoder, expected, seed) -> None:
    chance = random.Random(seed)
    client = decoder(
        *two.ports, encode_frames=48, peer_timeout_s=1.0, peer_carries=chance.choice(["cross", "hidden"])
    )
    ready(client, 2)
    over = threading.Event()

    def harm() -> None:
        while not over.wait(chance.uniform(0.02, 0.4)):
            victim = chance.choice(two.clients)
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
                            connection.channel.shut_down()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue

    harming = threading.Thread(target=harm)
    harming.start()
    try:
        for _ in range(4):
            assert answers(client, CLIPS) == expected
    finally:
        over.set()
        harming.join(WAIT_S)


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
    ("asks", "who", "said_of_it"),
    [
        (("a-key-that-is-not-there",), "keyed", "does not know the key"),
        ((), "keyed", "the engine that encodes has peer_keys, the one that asks has none"),
        ((SECRET,), "one", "the engine that asks has peer_keys, the one that encodes has none"),
    ],
)
def test_other_keys_are_refused(request, decoder, expected, caplog, asks, who, said_of_it) -> None:
    _, port = request.getfixturevalue(who)
    client = decoder(port, keys=asks)
    assert said_of_it in refusal(client, caplog)
    secrets = (SECRET, ANOTHER, *asks)
    assert not any(key in record.getMessage() for record in caplog.records for key in secrets)
    assert answers(client, CLIPS[:2]) == expected[:2]


def test_one_of_the_keys_is_enough(keyed, decoder, expected) -> None:
    encodes, port = keyed
    client = decoder(port, keys=(SECRET, "one-that-is-not-asked-for"))
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
        struct.pack("<I", 100_015) + b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 100_000 + b"\xc0",
    ],
    ids=["http", "zeros", "long", "msgpack", "noise", "half", "deep"],
)
def test_garbage_at_the_port_hurts_nobody(one, decoder, expected, garbage) -> None:
    encodes, port = one
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


def test_what_the_other_side_says_is_quoted_and_short() -> None:
    """It goes into logs: no line of its own, nothing that a terminal obeys, no megabyte."""
    identity = messages.EncoderIdentity("m", "w", "fp32", "none", (1,), (1,))
    rude = msgspec.structs.replace(identity, model="\x1b[2J\nERROR all is lost" * 50_000, weights="\r" * 50_000)
    found = handshake.identity_difference(identity, rude)
    assert found.startswith("model: 'm' asks, '\\x1b[2J\\nERROR")
    assert found.isprintable()
    assert len(found) < 2_500
    assert handshake.identity_difference(
        identity, msgspec.structs.replace(identity, hidden=(7,) * 9_999)
    ).isprintable()


@pytest.mark.parametrize("message", ["Hello", "Terms"])
def test_a_refusal_is_quoted_and_short(message) -> None:
    here, there = tcp_pair()
    asks, encodes = (
        messages.PeerChannel(here, messages.decode_to_client),
        messages.PeerChannel(there, messages.decode_to_worker),
    )
    with contextlib.closing(asks), contextlib.closing(encodes):
        if message == "Terms":
            encodes.send(messages.Hello(messages.VERSION, bytes(handshake.NONCE_BYTES), False))
        encodes.send(messages.HandshakeRefused("\x1b[2J\nERROR all is lost" * 1_000))
        with pytest.raises(PeerRefused) as refused:
            handshake.handshake_as_client(asks, messages.EncoderIdentity("m", "w", "fp32", "none", (1,), (1,)), ())
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = socket.create_connection(door.getsockname())
        return here, door.accept()[0]


# --- in one process, where it can be looked at ---------------------------------------------------------------


class Pair:
    """A worker and an engine that asks it, both on threads of this process."""

    def __init__(self, of: Any, **settings: Any) -> None:
        config = {"max_decode_rows": 8, "kv_bytes": 2 << 20, "max_sessions": 2, "prefix_bytes": 0}
        met = HandshakeSettings("weights")
        self.encodes = EngineClient(
            EngineConfig(role="encode", **config),
            thread_backend(of.CARD, of.build, meeting=met._replace(listen_address=("127.0.0.1", 0))),
        )
        self.worker = self.encodes.backend.loop.executor
        self.address = f"127.0.0.1:{self.worker.port}"
        asks = EngineConfig(**{"role": "decode", "peers": (self.address,), **config, **settings})
        self.client = EngineClient(asks, thread_backend(of.CARD, of.build, meeting=met))
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
        self.line = messages.PeerChannel(
            socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S), messages.decode_to_client
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.line.close)
            self.met = handshake.handshake_as_client(self.line, identity, ())
            undo.pop_all()
        self.landing = transports.create_receiver("tcp", 1 << 20, self.line.local_host)
        self.line.send(messages.TransportOffer("tcp", self.landing.offer, carries))
        self.line.expect(messages.TransportAttached)
        self.frame_bytes = pair.worker._frame_bytes[carries]

    def submit(self, number: int, pcm: np.ndarray, **changed: Any) -> None:
        frames = self.pair.worker.runner.model.count_frames(len(pcm))
        spot = changed.get("region") or self.landing.lease(frames * self.frame_bytes)
        assert spot is not None
        fields = {"length": len(pcm), "whole": False, "priority": "interactive", "within_ms": None, "region": spot}
        self.line.send(messages.EncodeMessage(number, **{**fields, **changed}), pcm)

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
        {"region": transports.BufferRegion(0, 1)},
        {"region": transports.BufferRegion(1 << 35, 64)},
        {"whole": True},
        {"within_ms": -1},
        {"within_ms": 600_001},
    ],
    ids=["long", "short", "negative", "small", "far", "no window", "early", "late"],
)
def test_who_asks_for_what_it_may_not_is_hung_up_on(pair, changed, caplog) -> None:
    stranger = Stranger(pair)
    stranger.submit(1, CLIPS[0], **changed)
    assert stranger.gone()
    stranger.close()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    until(lambda: pair.encodes.describe()["askers"] == 1)
    assert not [record for record in caplog.records if record.exc_info], "that was foreseen"


def test_who_lends_the_same_memory_again_and_again_is_hung_up_on(pair) -> None:
    """What is encoded and not yet put is memory of the worker's."""
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        nbytes = pair.worker.runner.model.count_frames(len(CLIPS[0])) * stranger.frame_bytes
        fit = stranger.landing.nbytes // nbytes
        for number in range(fit + 1):
            stranger.submit(number, CLIPS[0], region=transports.BufferRegion(0, nbytes))
        assert stranger.gone()
    stranger.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)


def test_one_number_twice_and_more_than_may_be_are_refused(pair, monkeypatch) -> None:
    twice, many = Stranger(pair), Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        twice.submit(1, CLIPS[0])
        twice.submit(1, CLIPS[0])
        assert twice.gone()
        for number in range(many.met.requests + 1):
            many.submit(number, CLIPS[0][:2_000])
        assert many.gone()
    twice.close()
    many.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)
    on_loop(pair.encodes, lambda loop: loop.executor.check())


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much(pair) -> None:
    much, little = Stranger(pair), Stranger(pair)
    order: list[tuple[str, int]] = []
    pair.worker.scheduler.encode_frames = 40  # batches of one or two
    on_loop(pair.encodes, lambda loop: setattr(loop.executor, "_frame_s", 0.01))
    answer = pair.worker._encode

    def noted(batch: list[Any]) -> Any:
        order.extend(("much" if len(r.pcm) == len(CLIPS[1]) else "little", r.id) for r in batch)
        return answer(batch)

    pair.worker._encode = noted
    with tiny_moonshine.held(pair.encodes):
        for number in range(20):
            much.submit(number, CLIPS[1])
        until(lambda: len(held_by(pair)) == 20)
        for number in range(3):
            little.submit(number, CLIPS[0])
        until(lambda: len(held_by(pair)) == 23)
    for number in range(20):
        assert isinstance(much.line.receive(WAIT_S), messages.EncodeDone), number
    places = [place for place, (who, _) in enumerate(order) if who == "little"]
    assert len(places) == 3
    assert max(places) < 10, order
    much.close()
    little.close()


def held_by(pair: Pair) -> list[Any]:
    return [request for asker in list(pair.worker._clients) for request in list(asker._held.values())]


def test_an_asker_that_dies_takes_its_requests_along(pair) -> None:
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        for number in range(5):
            stranger.submit(number, CLIPS[0])
        until(lambda: len(held_by(pair)) == 5)
        stranger.close()
        until(lambda: len(pair.worker._clients) == 1)
    on_loop(pair.encodes, lambda loop: loop.executor.check())
    assert pair.worker.encoded == 0


def test_a_cancelled_request_is_not_encoded(pair) -> None:
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        for number in range(3):
            stranger.submit(number, CLIPS[0])
        until(lambda: len(held_by(pair)) == 3)
        stranger.line.send(messages.CancelEncode(1))
        until(lambda: any(request.cancelled for request in held_by(pair)))
    told = {}
    for _ in range(3):
        message = stranger.line.receive(WAIT_S)
        told[message.id] = type(message)
    assert told == {0: messages.EncodeDone, 1: messages.EncodeFailed, 2: messages.EncodeDone}
    assert pair.worker.encoded == 2
    stranger.close()


def broken(*_: object) -> Any:
    raise RuntimeError("no")


def test_what_a_peer_cannot_encode_is_encoded_elsewhere_and_what_nobody_can_fails(pair, monkeypatch) -> None:
    right = pair.client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens
    monkeypatch.setattr(pair.worker, "_encode", broken)
    assert pair.client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens == right
    ours = pair.client.backend.loop.executor.encode_runner
    with monkeypatch.context() as here_too:
        here_too.setattr(ours, "encode", broken)
        assert outcome(pair.client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    monkeypatch.undo()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens == right
    expect_nothing_left(pair.client)


def test_one_that_fails_whatever_it_is_given_is_left_alone(pair, monkeypatch) -> None:
    """It fails faster than others encode: by room alone it would be given all."""
    monkeypatch.setattr(peer_pool, "REFUSED_PAUSE_S", 600.0)
    other = Pair(tiny_moonshine, peer_road="tcp")
    batches: list[int] = []

    def counted(batch: list[Any]) -> Any:
        batches.append(len(batch))
        raise RuntimeError("no")

    monkeypatch.setattr(pair.worker, "_encode", counted)
    before = other.worker.encoded
    client = asking_of(pair, pair.address, other.address, encode_frames=64)
    ready(client, 2)
    expected = [other.client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    for _ in range(3):
        assert answers(client, CLIPS) == expected
    assert other.worker.encoded > before + len(CLIPS)
    assert 1 <= len(batches) <= peer.MAX_FAILED_BATCHES + peer.MAX_BATCHES_IN_FLIGHT
    expect_nothing_left(client)
    client.close()
    # Alone with it the engine encodes by itself, and it is not asked again before somebody had time to mend it.
    client = asking_of(pair, pair.address, encode_frames=64)
    ready(client)
    assert answers(client, CLIPS) == expected
    until(lambda: peers(client).peers[0].state == "refused", peers(client).describe)
    client.close()
    other.close()


def asking_of(pair: Pair, *addresses: str, **settings: Any) -> EngineClient:
    """One more engine that asks, like a pair's."""
    config = msgspec.structs.replace(pair.client.config, peers=addresses, **settings)
    return EngineClient(
        config, thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=HandshakeSettings("weights"))
    )


def test_the_memory_of_a_peer_that_is_gone_is_given_back(pair) -> None:
    lent = weakref.ref(peers(pair.client).peers[0].connection.receiver)
    pair.encodes.close()
    until(lambda: peers(pair.client).peers[0].connection is None)
    until(lambda: lent() is None, lambda: "its landing memory is held while it is away")


# --- what askers may take of a worker --------------------------------------------------------------------------


def test_an_asker_does_not_choose_whom_the_worker_connects_to(pair) -> None:
    with socket.create_server(("127.0.0.2", 0)) as victim:
        line = messages.PeerChannel(
            socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S), messages.decode_to_client
        )
        handshake.handshake_as_client(line, peers(pair.client).identity, ())
        where = msgspec.msgpack.encode(victim.getsockname()[:2])
        offer = msgspec.msgpack.encode(base.ReceiverOffer("tcp", 1 << 20, bytes(32), where))
        line.send(messages.TransportOffer("tcp", offer, "hidden"))
        answer = line.receive(WAIT_S)
        assert isinstance(answer, messages.TransportUnreachable)
        assert "'127.0.0.2' is offered from 127.0.0.1" in answer.why
        victim.setblocking(False)
        with pytest.raises(BlockingIOError):
            victim.accept()
        line.close()


def test_no_road_back_is_told_with_what_may_be_in_its_way(pair, monkeypatch, caplog) -> None:
    """As behind an address translation: here it has another address than the peer sees."""
    monkeypatch.setattr(messages.PeerChannel, "local_host", "127.0.0.2")
    client = asking_of(pair, pair.address)
    told = refusal(client, caplog)
    assert "at 127.0.0.2, to a port that the system chooses: no NAT, container bridge or firewall" in told
    assert outcome(client.submit(CLIPS[0], ONCE)).tokens
    client.close()


def test_what_an_asker_is_sent_keeps_nothing_else_alive(pair) -> None:
    encode, sizes = pair.worker._encode, list[tuple[int, int, int]]()

    def noted(batch: list[Any]) -> Any:
        found = encode(batch)
        sizes.extend((len(batch), each.nbytes, each.untyped_storage().nbytes()) for each in found)
        return found

    pair.worker._encode = noted
    stranger = Stranger(pair)
    with tiny_moonshine.held(pair.encodes):
        for number in range(8):
            stranger.submit(number, CLIPS[number % 2])
        until(lambda: len(held_by(pair)) == 8)
    for _ in range(8):
        assert isinstance(stranger.line.receive(WAIT_S), messages.EncodeDone)
    assert max(together for together, _, _ in sizes) > 1
    assert all(own == whole for _, own, whole in sizes), sizes
    stranger.close()


def test_nothing_more_is_encoded_until_askers_have_taken_what_is(pair, monkeypatch) -> None:
    slow, other = Stranger(pair), Stranger(pair)
    monkeypatch.setattr(worker_of_peers, "MAX_UNSENT_BYTES_TOTAL", 1)
    with slow.landing._lock:  # nothing can be put there
        slow.submit(1, CLIPS[0], region=transports.BufferRegion(0, frames_of(pair, CLIPS[0]) * slow.frame_bytes))
        until(lambda: pair.worker.encoded == 1)
        other.submit(1, CLIPS[1])
        until(lambda: on_loop(pair.encodes, lambda loop: len(loop.executor._waiting)) == 1)
        assert not on_loop(pair.encodes, lambda loop: loop.executor.step())
        assert pair.worker.encoded == 1
        slow.line.shut_down()  # what was for it is nobody's: nobody has to wait for it
        assert isinstance(other.line.receive(WAIT_S), messages.EncodeDone)
    for number in range(2, 9):
        other.submit(number, CLIPS[0])
    for _ in range(2, 9):
        assert isinstance(other.line.receive(WAIT_S), messages.EncodeDone)
    until(lambda: all(asker.unsent == 0 for asker in list(pair.worker._clients)))
    slow.close()
    other.close()


def frames_of(pair: Pair, pcm: np.ndarray) -> int:
    return int(pair.worker.runner.model.count_frames(len(pcm)))


def test_an_asker_that_never_reads_is_hung_up_on(pair, monkeypatch) -> None:
    """It pings for ever: the thread that answers must not wait for ever."""
    monkeypatch.setattr(messages, "SEND_S", 1.0)
    deaf = Stranger(pair)
    ping = msgspec.msgpack.encode(messages.PeerPing())
    pings = (struct.pack("<I", len(ping)) + ping) * 10_000
    deaf.line._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    list(pair.worker._clients)[-1].channel._end.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096
    )  # sooner full
    deaf.line._end.settimeout(0.1)
    end_s, at = time.monotonic() + WAIT_S, 0
    while len(pair.worker._clients) > 1:
        assert time.monotonic() < end_s, "it is still listened to"
        try:
            at = (at + deaf.line._end.send(memoryview(pings)[at:])) % len(pings)
        except TimeoutError:
            continue
        except OSError:
            break
    until(lambda: pair.encodes.describe()["askers"] == 1)
    deaf.close()


def test_who_is_one_too_many_is_told_so(pair, monkeypatch) -> None:
    monkeypatch.setattr(worker_of_peers, "MAX_CLIENTS", 2)
    welcome = Stranger(pair)
    for _ in range(20):  # every time: what it has sent itself must not take along what it is told
        with pytest.raises(PeerRefused, match="2 askers are here already"):
            Stranger(pair)
        until(lambda: pair.worker._turning_away._value == worker_of_peers.MAX_REJECTING)
    welcome.submit(1, CLIPS[0])
    assert isinstance(welcome.line.receive(WAIT_S), messages.EncodeDone)
    welcome.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)
    Stranger(pair).close()


def test_more_askers_than_may_be_are_hung_up_on(pair) -> None:
    strangers = [socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S) for _ in range(40)]
    until(lambda: pair.encodes.describe()["askers"] <= 16)
    late = Stranger(pair)  # one that does say who it is finds a place
    late.submit(1, CLIPS[0])
    assert isinstance(late.line.receive(WAIT_S), messages.EncodeDone)
    late.close()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    for stranger in strangers:
        stranger.close()
    until(lambda: pair.encodes.describe()["askers"] == 1)


class Liar:
    """A worker that answers whatever a test wants: `lie(line, encode)` is called for each request."""

    def __init__(
        self, pair: Pair, lie: Callable[[messages.PeerChannel, messages.EncodeMessage, Any], None]
    ) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._identity, self._lie, self.asked = peers(pair.client).identity, lie, 0
        self._lines: list[messages.PeerChannel] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                end, _ = self._door.accept()
                line = messages.PeerChannel(end, messages.decode_to_worker)
                self._lines.append(line)
                try:
                    self._talk(line)
                except Exception:
                    line.close()
        except OSError:
            return

    def _talk(self, line: messages.PeerChannel) -> None:
        met = handshake.PeerDescription(self._identity, ("tcp",), 256, 16 << 20)
        handshake.handshake_as_worker(line, self._identity, (), met)
        with contextlib.closing(
            transports.attach_sender(line.expect(messages.TransportOffer).receiver_offer)
        ) as sender:
            line.send(messages.TransportAttached())
            while True:
                message = line.receive(WAIT_S)
                if isinstance(message, messages.EncodeMessage):
                    line.receive_samples(message.length)
                    self.asked += 1
                    self._lie(line, message, sender)
                elif isinstance(message, messages.PeerPing):
                    line.send(messages.PeerPong())

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for line in self._lines:
            line.shut_down()


def torn(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    checksum = sender.write_region(wanted.region, np.ones(wanted.region.nbytes, np.uint8), WAIT_S)
    frames = wanted.region.nbytes // 128  # of 32 numbers
    line.send(messages.EncodeDone(wanted.id, frames, wanted.region.nbytes, checksum ^ 1, 0.0, 0.0, 0.0))


def of_another(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.send(messages.EncodeDone(wanted.id + 7, 1, wanted.region.nbytes, 0, 0.0, 0.0, 0.0))


def smaller(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.send(messages.EncodeDone(wanted.id, 1, 1, 0, 0.0, 0.0, 0.0))


def nothing(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    pass


def noise(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line._end.sendall(random.Random(1).randbytes(500))


def hung_up(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.shut_down()


def deep(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line._end.sendall(struct.pack("<I", 100_014) + b"\x82\xa4type\xa4Pong\xa1x" + b"\x91" * 100_000 + b"\xc0")


def taken_back(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.send(messages.EncodeFailed(wanted.id, "cancelled"))


@pytest.mark.slow
@pytest.mark.parametrize("lie", [torn, of_another, smaller, nothing, noise, hung_up, deep])
def test_one_that_lies_loses_its_batches_and_two_lost_is_enough(pair, lie, monkeypatch) -> None:
    """Its requests go to the next, and after two peers lost over them are encoded here."""
    liar = Liar(pair, lie)
    client = asking_of(pair, liar.address, peer_timeout_s=0.5, encode_frames=64)
    ready(client)
    expected = [pair.client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    assert answers(client, CLIPS) == expected
    assert liar.asked
    expect_nothing_left(client)
    client.close()
    liar.close()


def test_what_nobody_cancelled_is_encoded_elsewhere(pair) -> None:
    """A peer may not take a request back by itself."""
    liar = Liar(pair, taken_back)
    client = asking_of(pair, liar.address)
    ready(client)
    assert outcome(client.submit(CLIPS[0], ONCE)).tokens == outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    assert liar.asked == 2, "and not again and again"
    expect_nothing_left(client)
    client.close()
    liar.close()


def test_a_clip_that_is_forgotten_is_not_waited_for_for_ever(pair) -> None:
    """Others are answered all the time: by that alone the peer seems to be well."""

    def forgets(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
        if wanted.length != len(CLIPS[3]):
            checksum = sender.write_region(wanted.region, np.zeros(wanted.region.nbytes, np.uint8), WAIT_S)
            frames = wanted.region.nbytes // 128
            line.send(messages.EncodeDone(wanted.id, frames, wanted.region.nbytes, checksum, 0.0, 0.0, 0.0))

    liar = Liar(pair, forgets)
    client = asking_of(pair, liar.address, peer_timeout_s=0.3, peer_carries="hidden", encode_frames=64)
    ready(client)
    forgotten, end_s = client.submit(CLIPS[3], ONCE), time.monotonic() + WAIT_S
    while not forgotten.future.done():
        assert time.monotonic() < end_s, "it waits as long as others are answered"
        client.submit(CLIPS[2], ONCE).future.result(WAIT_S)
    assert outcome(forgotten).tokens == outcome(pair.client.submit(CLIPS[3], ONCE)).tokens
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "name"),
    [
        (peer.PeerConnection, "_on_encoded"),
        (peer.PeerConnection, "_allocate_region"),
        (encode_client.EncodeClient, "_send"),
        (encode_client.EncodeClient, "_accept_request"),
        (transports.Receiver, "received"),
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


@pytest.mark.parametrize(
    ("of", "name"), [(peer_pool.EncodePeer, "_negotiate_transport"), (transports.Receiver, "close")]
)
def test_a_failure_of_ours_while_it_comes_or_goes_is_not_its_end(pair, monkeypatch, of, name) -> None:
    failed = once(monkeypatch, of, name, at_end=name == "close")
    peers(pair.client).peers[0].connection.channel.shut_down()
    tickets = [pair.client.submit(pcm, ONCE) for pcm in CLIPS]
    assert all(ticket.future.result(WAIT_S).tokens for ticket in tickets)
    until(lambda: failed)
    ready(pair.client)


def test_the_door_stays_open_whoever_cannot_be_let_in(pair, monkeypatch) -> None:
    failed = once(monkeypatch, worker_of_peers.EncodeWorker, "_choose_evicted")
    turned_away = socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S)
    until(lambda: failed)
    turned_away.close()
    late = Stranger(pair)
    late.submit(1, CLIPS[0])
    assert isinstance(late.line.receive(WAIT_S), messages.EncodeDone)
    late.close()


def test_without_a_thread_for_it_a_batch_fails_and_nobody_waits(pair, monkeypatch) -> None:
    def none(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pair.client.backend.loop.executor.encoder_pool._threads, "submit", none)
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    expect_nothing_left(pair.client)


def test_only_models_that_hear_whole_utterances_have_roles() -> None:
    for name in ("fastconformer-streaming-medium-en", "moonshine-streaming-tiny-en"):
        for settings in ({"role": "encode"}, {"role": "decode"}, {"peers": ("here:1",)}):
            with pytest.raises(OptionError, match=r"hears while somebody speaks.*whisper-tiny-en"):
                roles.validate_roles(asr_card(name), EngineConfig(**settings))


def test_a_library_has_no_roles() -> None:
    with pytest.raises(OptionError, match="asr-serve serve has them"):
        tiny_moonshine.start(role="decode")


def test_a_port_that_is_taken_is_said_at_start(pair) -> None:
    met = HandshakeSettings("weights", ("127.0.0.1", pair.worker.port))
    with pytest.raises(OptionError, match="cannot be listened at for peers"):
        EngineClient(
            EngineConfig(role="encode"), thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=met)
        )


def test_a_clip_that_was_sent_is_not_sent_to_a_full_peer(pair) -> None:
    """`room` is what the loop asks before it plans: two batches, and no more."""
    connection = peers(pair.client).peers[0].connection
    clips = [peer.EncodeClip(CLIPS[0], pair.worker.runner.model.count_frames(len(CLIPS[0])), False, "bulk", None)]
    came: list[Any] = []
    with tiny_moonshine.held(pair.encodes):
        assert [connection.submit_batch(clips, came.append) is not None for _ in range(3)] == [True, True, False]
        assert not peers(pair.client).has_room
    until(lambda: len(came) == 2)
    assert peers(pair.client).has_room
