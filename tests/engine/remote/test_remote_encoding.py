"""Remote encoding: one engine decodes, workers encode for it; the same tokens, whatever becomes of the workers."""

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
from engine_clients import backend_of, engine_pid, fail_calls, spy, start_engine, wait_until
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome, save

from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient, Ticket
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
TRANSPORTS = [transport for transport in transports.available_transports() if transport != "local"]
SECRET, ANOTHER = "a-key-that-peers-share", "another-key-of-peers"
Begin = Callable[..., EngineClient]


@pytest.fixture(autouse=True)
def reconnect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnect soon."""
    monkeypatch.setattr(peer_pool, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(peer_pool, "REFUSED_PAUSE_S", 0.3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """Tokens of each clip by one engine that does everything."""
    client = start_engine(MODEL, checkpoint, CONFIG)
    tokens = answers(client, CLIPS)
    client.close()
    return tokens


def start_worker(folder: Path, port: int, keys: tuple[str, ...] = ()) -> EngineClient:
    """An engine process that encodes for others, at a port."""
    listen = ("127.0.0.1", port)
    return start_engine(MODEL, folder, ENCODE, process=True, turn_model="none", listen=listen, peer_keys=keys)


@pytest.fixture
def worker(close_later: Any, checkpoint: Path) -> Callable[..., EngineClient]:
    """Starts processes that encode; `worker(port)` listens at that port."""
    return lambda port, folder=checkpoint: close_later(start_worker(folder, port))


class Workers(NamedTuple):
    """Encode workers of several tests, and their ports."""

    clients: list[EngineClient]
    ports: list[int]

    def wake(self) -> None:
        """Resume processes that a failed test has left stopped."""
        for client in self.clients:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(engine_pid(client), signal.SIGCONT)


@contextlib.contextmanager
def start_workers(checkpoint: Path, count: int, keys: tuple[str, ...] = ()) -> Iterator[Workers]:
    with contextlib.ExitStack() as undo:
        ports = [free_port() for _ in range(count)]
        found = Workers([], ports)
        for port in ports:
            found.clients.append(start_worker(checkpoint, port, keys))
            undo.callback(found.clients[-1].close)
        undo.callback(found.wake)
        yield found


@pytest.fixture(scope="module")
def _one_worker(checkpoint: Path) -> Iterator[Workers]:
    with start_workers(checkpoint, 1) as found:
        yield found


@pytest.fixture
def one_worker(_one_worker: Workers) -> Iterator[tuple[EngineClient, int]]:
    """An encode worker and its port, for tests that kill none: starting one takes seconds."""
    yield _one_worker.clients[0], _one_worker.ports[0]
    _one_worker.wake()


@pytest.fixture(scope="module")
def _two_workers(checkpoint: Path) -> Iterator[Workers]:
    with start_workers(checkpoint, 2) as found:
        yield found


@pytest.fixture
def two_workers(_two_workers: Workers) -> Iterator[Workers]:
    """Two encode workers, which may be killed: their supervisors restart them."""
    yield _two_workers
    _two_workers.wake()


@pytest.fixture(scope="module")
def keyed(checkpoint: Path) -> Iterator[tuple[EngineClient, int]]:
    with start_workers(checkpoint, 1, (ANOTHER, SECRET)) as found:
        yield found.clients[0], found.ports[0]


@pytest.fixture
def decoder(checkpoint: Path) -> Iterator[Begin]:
    """Starts decode engines of this process whose workers are at `ports`. Nothing may be left in them."""
    started: list[EngineClient] = []

    def start(*ports: int, keys: tuple[str, ...] = (), **settings: Any) -> EngineClient:
        found = AsrCheckpoint.find(MODEL, checkpoint)
        peers = tuple(f"127.0.0.1:{port}" for port in ports)
        config = msgspec.structs.replace(
            CONFIG, **{"role": "decode", "peers": peers, "peer_transport": "tcp", **settings}
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


def peers(client: EngineClient) -> peer_pool.PeerPool:
    found: peer_pool.PeerPool = client.backend.loop.executor.encoder_pool._peers
    return found


def ready(client: EngineClient, count: int = 1) -> None:
    wait_until(lambda: sum(each.state == "ready" for each in peers(client).peers) == count, peers(client).describe)


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
    return tokens_of([client.submit(pcm, ONCE) for pcm in clips])


def tokens_of(tickets: list[Ticket]) -> list[Any]:
    return [ticket.future.result(WAIT_S).tokens for ticket in tickets]


@contextlib.contextmanager
def stopped(client: EngineClient) -> Iterator[None]:
    """Its process stands still inside the block."""
    pid = engine_pid(client)
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


def encoded_by(client: EngineClient) -> int:
    """How many utterances a worker has encoded."""
    return int(client.describe()["peer_requests"])


# --- the same tokens ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("carries", ["cross", "hidden"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_gives_the_tokens_of_one_engine(one_worker, decoder, expected, transport, carries) -> None:
    encode_engine, port = one_worker
    before = encoded_by(encode_engine)
    client = decoder(port, peer_transport=transport, peer_carries=carries)
    ready(client)
    assert (peers(client).peers[0].connection.payload, peers(client).peers[0].connection.receiver.kind) == (
        carries,
        transport,
    )
    assert answers(client, CLIPS) == expected
    assert encoded_by(encode_engine) == before + len(CLIPS)


@pytest.mark.slow
def test_two_workers_share_the_clips(two_workers, decoder, expected) -> None:
    client = decoder(*two_workers.ports, encode_frames=64)
    ready(client, 2)
    assert answers(client, CLIPS) == expected
    assert sum(map(encoded_by, two_workers.clients)) == len(CLIPS)
    assert all(map(encoded_by, two_workers.clients))


# --- lost workers -------------------------------------------------------------------------------


def test_batches_of_a_killed_worker_are_encoded_by_another(two_workers, decoder, expected) -> None:
    one_worker, other = two_workers.clients
    client = decoder(*two_workers.ports, encode_frames=64)
    ready(client, 2)
    before = encoded_by(other)
    os.kill(engine_pid(one_worker), signal.SIGSTOP)  # it has taken some when it dies
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    stopped = peers(client).peers[0]
    wait_until(lambda: stopped.connection is not None and stopped.connection._in_flight)
    os.kill(engine_pid(one_worker), signal.SIGKILL)
    assert tokens_of(tickets) == expected
    assert encoded_by(other) > before
    ready(client, 2)  # its own server starts it anew


def test_a_hanging_worker_is_given_up_after_the_timeout_and_used_again_later(one_worker, decoder, expected) -> None:
    encode_engine, port = one_worker
    client = decoder(port, peer_timeout_s=1.0)
    ready(client)
    with stopped(encode_engine):
        assert answers(client, CLIPS) == expected
        assert peers(client).peers[0].state == "connecting"
    ready(client)
    before = encoded_by(encode_engine)
    for _ in range(2):
        assert answers(client, CLIPS) == expected
    # It may also have encoded what it had been sent before it hung: each clip once at most.
    assert encoded_by(encode_engine) >= before + 2 * len(CLIPS)


def test_an_idle_worker_that_hangs_is_noticed(one_worker, decoder) -> None:
    encode_engine, port = one_worker
    client = decoder(port, peer_timeout_s=0.5)
    ready(client)
    with stopped(encode_engine):
        wait_until(lambda: peers(client).peers[0].state == "connecting")
    ready(client)


def test_without_workers_an_engine_encodes_itself_until_one_comes(worker, decoder, expected) -> None:
    port = free_port()
    client = decoder(port)
    assert answers(client, CLIPS) == expected
    encode_engine = worker(port)
    ready(client)
    assert answers(client, CLIPS) == expected
    assert encoded_by(encode_engine) == len(CLIPS)


def test_an_engine_of_both_roles_encodes_too(one_worker, decoder, expected) -> None:
    encode_engine, port = one_worker
    client = decoder(port, role="both", encode_frames=64)
    ready(client)
    before = encoded_by(encode_engine)
    with stopped(encode_engine):  # it gets no more than what it was sent
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        wait_until(lambda: sum(ticket.future.done() for ticket in tickets) >= 4)
    assert tokens_of(tickets) == expected
    assert 0 < encoded_by(encode_engine) - before < len(CLIPS)


def test_cancelled_requests_leave_nothing(one_worker, decoder, expected) -> None:
    encode_engine, port = one_worker
    client = decoder(port, encode_frames=64)
    ready(client)
    before = encoded_by(encode_engine)
    with stopped(encode_engine):
        tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
        wait_until(lambda: peers(client).peers[0].connection._in_flight)
        for ticket in tickets[::2]:
            client.cancel(ticket)
    assert tokens_of(tickets[1::2]) == expected[1::2]
    assert [outcome(ticket).__name__ for ticket in tickets[::2]] == ["Cancelled"] * len(tickets[::2])
    assert encoded_by(encode_engine) - before < len(CLIPS), "requests cancelled before they were sent are not sent"


@pytest.mark.parametrize("seed", range(3))
def test_every_request_is_answered_whatever_dies(two_workers, decoder, expected, seed) -> None:
    chance = random.Random(seed)
    client = decoder(
        *two_workers.ports, encode_frames=48, peer_timeout_s=1.0, peer_carries=chance.choice(["cross", "hidden"])
    )
    ready(client, 2)
    over = threading.Event()

    def harm() -> None:
        while not over.wait(chance.uniform(0.02, 0.4)):
            victim = chance.choice(two_workers.clients)
            try:
                pid = engine_pid(victim)
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


# --- refused peers -------------------------------------------------------------------------------------------


def refusal(client: EngineClient, caplog: pytest.LogCaptureFixture) -> str:
    wait_until(lambda: peers(client).peers[0].state == "refused")
    return next(record.getMessage() for record in caplog.records if "is refused" in record.getMessage())


def test_other_weights_are_refused_with_the_difference(worker, decoder, expected, tmp_path, caplog) -> None:
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
    ("keys", "who", "message"),
    [
        (("a-key-that-is-not-there",), "keyed", "does not know the key"),
        ((), "keyed", "the engine that encodes has peer_keys, the one that asks has none"),
        ((SECRET,), "one_worker", "the engine that asks has peer_keys, the one that encodes has none"),
    ],
)
def test_other_keys_are_refused(request, decoder, expected, caplog, keys, who, message) -> None:
    _, port = request.getfixturevalue(who)
    client = decoder(port, keys=keys)
    assert message in refusal(client, caplog)
    secrets = (SECRET, ANOTHER, *keys)
    assert not any(key in record.getMessage() for record in caplog.records for key in secrets)
    assert answers(client, CLIPS[:2]) == expected[:2]


def test_one_shared_key_is_enough(keyed, decoder, expected) -> None:
    encode_engine, port = keyed
    client = decoder(port, keys=(SECRET, "one-that-is-not-asked-for"))
    ready(client)
    assert answers(client, CLIPS) == expected
    assert encoded_by(encode_engine) == len(CLIPS)


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
def test_garbage_at_the_port_disturbs_nobody(one_worker, decoder, expected, garbage) -> None:
    encode_engine, port = one_worker
    client = decoder(port)
    ready(client)
    tickets = [client.submit(pcm, ONCE) for pcm in CLIPS]
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.settimeout(WAIT_S)
        connection.sendall(garbage)
        if garbage == b"\x05":
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4_096):
                pass
    assert tokens_of(tickets) == expected
    assert peers(client).peers[0].state == "ready"
    wait_until(lambda: encode_engine.describe()["askers"] == 1)


def test_differences_are_quoted_and_short() -> None:
    """It goes into logs: no line break, no terminal escapes, no megabyte."""
    identity = messages.EncoderIdentity("m", "w", "fp32", "none", (1,), (1,))
    rude = msgspec.structs.replace(identity, model="\x1b[2J\nERROR all is lost" * 50_000, weights="\r" * 50_000)
    found = handshake.identity_difference(identity, rude)
    assert found.startswith("model: 'm' asks, '\\x1b[2J\\nERROR")
    assert found.isprintable()
    assert len(found) < 2_500
    assert handshake.identity_difference(identity, msgspec.structs.replace(identity, hidden=(7,) * 9_999)).isprintable()


@pytest.mark.parametrize("message", ["Hello", "Terms"])
def test_a_refusal_is_quoted_and_short(message) -> None:
    here, there = tcp_pair()
    client = messages.PeerChannel(here, messages.decode_to_client)
    worker = messages.PeerChannel(there, messages.decode_to_worker)
    with contextlib.closing(client), contextlib.closing(worker):
        if message == "Terms":
            worker.send(messages.Hello(messages.VERSION, bytes(handshake.NONCE_BYTES), False))
        worker.send(messages.HandshakeRefused("\x1b[2J\nERROR all is lost" * 1_000))
        with pytest.raises(PeerRefused) as refused:
            handshake.handshake_as_client(client, messages.EncoderIdentity("m", "w", "fp32", "none", (1,), (1,)), ())
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_a_refusal_names_what_differs_and_what_both_sides_need() -> None:
    here, there = tcp_pair()
    client = messages.PeerChannel(here, messages.decode_to_client)
    worker = messages.PeerChannel(there, messages.decode_to_worker)
    whole = messages.EncoderIdentity("m", "w", "fp32", "none", (1,), (1,))
    eighth = msgspec.structs.replace(whole, quantize="int8")
    told: list[str] = []

    def serve() -> None:
        with pytest.raises(PeerRefused) as refused:
            handshake.handshake_as_worker(worker, eighth, (), handshake.PeerDescription(eighth, ("tcp",), 1, 1))
        told.append(str(refused.value))

    with contextlib.closing(client), contextlib.closing(worker):
        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(PeerRefused) as refused:
            handshake.handshake_as_client(client, whole, ())
        serving.join(WAIT_S)
    for message in (str(refused.value), *told):
        assert "quantize: 'none' asks, 'int8' encodes" in message
        assert "both sides need the same model, weights, dtype and quantize" in message
    assert len(told) == 1


@pytest.mark.parametrize(
    ("settings", "quantize"),
    [
        ({"role": "encode"}, "none"),
        ({"role": "decode"}, "none"),
        ({"peers": ("here:1",)}, "none"),
        ({}, "auto"),
        ({"role": "encode", "quantize": "int8"}, "int8"),
        ({"role": "decode", "quantize": "none"}, "none"),
    ],
)
def test_engines_that_share_encoders_leave_no_arithmetic_to_the_machine(settings, quantize) -> None:
    assert roles.quantize_mode(EngineConfig(**settings)) == quantize


def test_an_engine_that_encodes_quantizes_nothing_by_default(close_later, checkpoint) -> None:
    """Its peers may have other processors, for which `auto` chooses otherwise."""
    listen = ("127.0.0.1", free_port())
    options: dict[str, Any] = {"turn_model": "none", "listen": listen, "dtype": "auto"}
    engine = close_later(start_engine(MODEL, checkpoint, ENCODE, process=True, **options))
    assert asr_card(MODEL).int8 is not None
    assert (ENCODE.quantize, backend_of(engine).ready.device["quantize"]) == ("auto", "none")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = socket.create_connection(door.getsockname())
        return here, door.accept()[0]


# --- in one process ---------------------------------------------------------------


class Pair:
    """An encode worker and a decode engine, both on threads of this process."""

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
def test_whisper_gives_the_same_tokens(carries, window) -> None:
    alone = tiny_whisper.start(window=window, prefix_bytes=0)
    reference_tokens = [alone.submit(pcm).future.result(WAIT_S).tokens for pcm in tiny_whisper.CLIPS]
    alone.close()
    pair = Pair(tiny_whisper, window=window, peer_transport="tcp", peer_carries=carries)
    tickets = [pair.client.submit(pcm) for pcm in tiny_whisper.CLIPS]
    assert tokens_of(tickets) == reference_tokens
    assert pair.worker.encoded >= len(tickets)
    expect_nothing_left(pair.client)
    pair.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(tiny_moonshine, peer_transport="tcp")
    yield made
    made.close()


class FakeDecodeEngine:
    """A decode engine that sends whatever a test wants."""

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

    def submit_until_held(self, count: int, pcm: np.ndarray, first: int = 0) -> None:
        """Submit clips, and wait until the worker holds them."""
        before = len(held_by(self.pair))
        for number in range(first, first + count):
            self.submit(number, pcm)
        wait_until(lambda: len(held_by(self.pair)) == before + count)

    def is_answered(self) -> bool:
        return isinstance(self.line.receive(WAIT_S), messages.EncodeDone)

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
def test_an_invalid_request_closes_its_connection(pair, changed, caplog) -> None:
    peer_engine = FakeDecodeEngine(pair)
    peer_engine.submit(1, CLIPS[0], **changed)
    assert peer_engine.gone()
    peer_engine.close()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)
    assert not [record for record in caplog.records if record.exc_info], "that was foreseen"


def test_leasing_the_same_memory_again_closes_the_connection(pair) -> None:
    """Encoded frames that are not yet written are memory of the worker."""
    peer_engine = FakeDecodeEngine(pair)
    with tiny_moonshine.held(pair.encodes):
        nbytes = pair.worker.runner.model.count_frames(len(CLIPS[0])) * peer_engine.frame_bytes
        fit = peer_engine.landing.nbytes // nbytes
        for number in range(fit + 1):
            peer_engine.submit(number, CLIPS[0], region=transports.BufferRegion(0, nbytes))
        assert peer_engine.gone()
    peer_engine.close()
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)


def test_duplicate_ids_and_too_many_requests_close_the_connection(pair, monkeypatch) -> None:
    duplicate, greedy = FakeDecodeEngine(pair), FakeDecodeEngine(pair)
    with tiny_moonshine.held(pair.encodes):
        duplicate.submit(1, CLIPS[0])
        duplicate.submit(1, CLIPS[0])
        assert duplicate.gone()
        for number in range(greedy.met.requests + 1):
            greedy.submit(number, CLIPS[0][:2_000])
        assert greedy.gone()
    duplicate.close()
    greedy.close()
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)
    on_loop(pair.encodes, lambda loop: loop.executor.check())


def test_a_small_client_does_not_wait_for_a_large_one(pair) -> None:
    much, little = FakeDecodeEngine(pair), FakeDecodeEngine(pair)
    order: list[tuple[str, int]] = []
    pair.worker.scheduler.encode_frames = 40  # batches of one or two
    on_loop(pair.encodes, lambda loop: setattr(loop.executor, "_frame_s", 0.01))
    spy(
        pair.worker,
        "_encode",
        lambda batch: order.extend(("much" if len(r.pcm) == len(CLIPS[1]) else "little", r.id) for r in batch),
    )
    with tiny_moonshine.held(pair.encodes):
        much.submit_until_held(20, CLIPS[1])
        little.submit_until_held(3, CLIPS[0])
    for number in range(20):
        assert much.is_answered(), number
    places = [place for place, (who, _) in enumerate(order) if who == "little"]
    assert len(places) == 3
    assert max(places) < 10, order
    much.close()
    little.close()


def held_by(pair: Pair) -> list[Any]:
    return [request for remote in list(pair.worker._clients) for request in list(remote._held.values())]


def test_requests_of_a_lost_client_are_dropped(pair) -> None:
    peer_engine = FakeDecodeEngine(pair)
    with tiny_moonshine.held(pair.encodes):
        peer_engine.submit_until_held(5, CLIPS[0])
        peer_engine.close()
        wait_until(lambda: len(pair.worker._clients) == 1)
    on_loop(pair.encodes, lambda loop: loop.executor.check())
    assert pair.worker.encoded == 0


def test_a_cancelled_request_is_not_encoded(pair) -> None:
    peer_engine = FakeDecodeEngine(pair)
    with tiny_moonshine.held(pair.encodes):
        peer_engine.submit_until_held(3, CLIPS[0])
        peer_engine.line.send(messages.CancelEncode(1))
        wait_until(lambda: any(request.cancelled for request in held_by(pair)))
    received = [peer_engine.line.receive(WAIT_S) for _ in range(3)]
    assert {message.id: type(message) for message in received} == {
        0: messages.EncodeDone,
        1: messages.EncodeFailed,
        2: messages.EncodeDone,
    }
    assert pair.worker.encoded == 2
    peer_engine.close()


def test_a_failed_remote_encoding_is_repeated_here_and_then_fails(pair, monkeypatch) -> None:
    right = pair.client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens

    def broken(*_: object) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(pair.worker, "_encode", broken)
    assert pair.client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens == right
    with monkeypatch.context() as patch:
        patch.setattr(pair.client.backend.loop.executor.encode_runner, "encode", broken)
        assert outcome(pair.client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    monkeypatch.undo()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens == right
    expect_nothing_left(pair.client)


def test_a_worker_that_always_fails_is_left_alone(pair, monkeypatch) -> None:
    """It fails faster than others encode: by room alone it would get all."""
    monkeypatch.setattr(peer_pool, "REFUSED_PAUSE_S", 600.0)
    other = Pair(tiny_moonshine, peer_transport="tcp")
    batches: list[int] = []
    fail_calls(pair.worker, "_encode", *range(1, 99))
    spy(pair.worker, "_encode", lambda batch: batches.append(len(batch)))
    before = other.worker.encoded
    client = decode_engine(pair, pair.address, other.address, encode_frames=64)
    ready(client, 2)
    expected = answers(other.client, CLIPS)
    for _ in range(3):
        assert answers(client, CLIPS) == expected
    assert other.worker.encoded > before + len(CLIPS)
    assert 1 <= len(batches) <= peer.MAX_FAILED_BATCHES + peer.MAX_BATCHES_IN_FLIGHT
    expect_nothing_left(client)
    client.close()
    # Alone with it the engine encodes by itself, and it is not asked again before somebody had time to mend it.
    client = decode_engine(pair, pair.address, encode_frames=64)
    ready(client)
    assert answers(client, CLIPS) == expected
    wait_until(lambda: peers(client).peers[0].state == "refused", peers(client).describe)
    client.close()
    other.close()


def decode_engine(pair: Pair, *addresses: str, **settings: Any) -> EngineClient:
    """One more decode engine, like that of a pair."""
    config = msgspec.structs.replace(pair.client.config, peers=addresses, **settings)
    return EngineClient(
        config, thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=HandshakeSettings("weights"))
    )


def test_receiver_memory_of_a_lost_worker_is_freed(pair) -> None:
    lent = weakref.ref(peers(pair.client).peers[0].connection.receiver)
    pair.encodes.close()
    wait_until(lambda: peers(pair.client).peers[0].connection is None)
    wait_until(lambda: lent() is None, lambda: "its landing memory is held while it is away")


# --- limits of a worker --------------------------------------------------------------------------


def test_a_client_does_not_choose_whom_the_worker_connects_to(pair) -> None:
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
    client = decode_engine(pair, pair.address)
    reason = refusal(client, caplog)
    assert "at 127.0.0.2, to a port that the system chooses: no NAT, container bridge or firewall" in reason
    assert outcome(client.submit(CLIPS[0], ONCE)).tokens
    client.close()


def test_sent_frames_keep_no_other_memory_alive(pair) -> None:
    encode, sizes = pair.worker._encode, list[tuple[int, int, int]]()

    def noted(batch: list[Any]) -> Any:
        found = encode(batch)
        sizes.extend((len(batch), each.nbytes, each.untyped_storage().nbytes()) for each in found)
        return found

    pair.worker._encode = noted
    peer_engine = FakeDecodeEngine(pair)
    with tiny_moonshine.held(pair.encodes):
        for number in range(8):
            peer_engine.submit(number, CLIPS[number % 2])
        wait_until(lambda: len(held_by(pair)) == 8)
    for _ in range(8):
        assert peer_engine.is_answered()
    assert max(together for together, _, _ in sizes) > 1
    assert all(own == whole for _, own, whole in sizes), sizes
    peer_engine.close()


def test_encoding_waits_until_clients_have_taken_their_frames(pair, monkeypatch) -> None:
    slow, other = FakeDecodeEngine(pair), FakeDecodeEngine(pair)
    monkeypatch.setattr(worker_of_peers, "MAX_UNSENT_BYTES_TOTAL", 1)
    with slow.landing._lock:  # nothing can be put there
        slow.submit(1, CLIPS[0], region=transports.BufferRegion(0, frames_of(pair, CLIPS[0]) * slow.frame_bytes))
        wait_until(lambda: pair.worker.encoded == 1)
        other.submit(1, CLIPS[1])
        wait_until(lambda: on_loop(pair.encodes, lambda loop: len(loop.executor._waiting)) == 1)
        assert not on_loop(pair.encodes, lambda loop: loop.executor.step())
        assert pair.worker.encoded == 1
        slow.line.shut_down()  # what was for it is nobody's: nobody has to wait for it
        assert other.is_answered()
    for number in range(2, 9):
        other.submit(number, CLIPS[0])
    for _ in range(2, 9):
        assert other.is_answered()
    wait_until(lambda: all(remote.unsent == 0 for remote in list(pair.worker._clients)))
    slow.close()
    other.close()


def frames_of(pair: Pair, pcm: np.ndarray) -> int:
    return int(pair.worker.runner.model.count_frames(len(pcm)))


def test_a_client_that_never_reads_is_disconnected(pair, monkeypatch) -> None:
    """It pings for ever: the thread that answers must not wait for ever."""
    monkeypatch.setattr(messages, "SEND_S", 1.0)
    silent_engine = FakeDecodeEngine(pair)
    ping = msgspec.msgpack.encode(messages.PeerPing())
    pings = (struct.pack("<I", len(ping)) + ping) * 10_000
    silent_engine.line._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    list(pair.worker._clients)[-1].channel._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # sooner full
    silent_engine.line._end.settimeout(0.1)
    end_s, at = time.monotonic() + WAIT_S, 0
    while len(pair.worker._clients) > 1:
        assert time.monotonic() < end_s, "it is still listened to"
        try:
            at = (at + silent_engine.line._end.send(memoryview(pings)[at:])) % len(pings)
        except TimeoutError:
            continue
        except OSError:
            break
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)
    silent_engine.close()


def test_one_client_too_many_is_refused_with_the_reason(pair, monkeypatch) -> None:
    monkeypatch.setattr(worker_of_peers, "MAX_CLIENTS", 2)
    welcome = FakeDecodeEngine(pair)
    for _ in range(20):  # every time: what it has sent itself must not take along what it is told
        with pytest.raises(PeerRefused, match="2 askers are here already"):
            FakeDecodeEngine(pair)
        wait_until(lambda: pair.worker._turning_away._value == worker_of_peers.MAX_REJECTING)
    welcome.submit(1, CLIPS[0])
    assert welcome.is_answered()
    welcome.close()
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)
    FakeDecodeEngine(pair).close()


def test_silent_clients_beyond_the_limit_are_disconnected(pair) -> None:
    strangers = [socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S) for _ in range(40)]
    wait_until(lambda: pair.encodes.describe()["askers"] <= 16)
    late = FakeDecodeEngine(pair)  # one that does say who it is finds a place
    late.submit(1, CLIPS[0])
    assert late.is_answered()
    late.close()
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    for peer_engine in strangers:
        peer_engine.close()
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)


class FakeWorker:
    """A worker that answers what a test wants: `lie(line, encode)` is called for each request."""

    def __init__(
        self, pair: Pair, respond: Callable[[messages.PeerChannel, messages.EncodeMessage, Any], None]
    ) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._identity, self._lie, self.asked = peers(pair.client).identity, respond, 0
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


def wrong_checksum(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    checksum = sender.write_region(wanted.region, np.ones(wanted.region.nbytes, np.uint8), WAIT_S)
    frames = wanted.region.nbytes // 128  # of 32 numbers
    line.send(messages.EncodeDone(wanted.id, frames, wanted.region.nbytes, checksum ^ 1, 0.0, 0.0, 0.0))


def wrong_id(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.send(messages.EncodeDone(wanted.id + 7, 1, wanted.region.nbytes, 0, 0.0, 0.0, 0.0))


def too_few_frames(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.send(messages.EncodeDone(wanted.id, 1, 1, 0, 0.0, 0.0, 0.0))


def no_answer(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    pass


def noise(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line._end.sendall(random.Random(1).randbytes(500))


def hang_up(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.shut_down()


def deep_message(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line._end.sendall(struct.pack("<I", 100_014) + b"\x82\xa4type\xa4Pong\xa1x" + b"\x91" * 100_000 + b"\xc0")


def cancel_request(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
    line.send(messages.EncodeFailed(wanted.id, "cancelled"))


@pytest.mark.slow
@pytest.mark.parametrize("respond", [wrong_checksum, wrong_id, too_few_frames, no_answer, noise, hang_up, deep_message])
def test_wrong_answers_lose_a_worker_and_no_request(pair, respond, monkeypatch) -> None:
    """Its requests go to the next worker; those over which two were lost are encoded here."""
    fake_worker = FakeWorker(pair, respond)
    client = decode_engine(pair, fake_worker.address, peer_timeout_s=0.5, encode_frames=64)
    ready(client)
    expected = answers(pair.client, CLIPS)
    assert answers(client, CLIPS) == expected
    assert fake_worker.asked
    expect_nothing_left(client)
    client.close()
    fake_worker.close()


def test_a_request_that_the_worker_cancels_is_encoded_elsewhere(pair) -> None:
    """A worker may not cancel a request by itself."""
    fake_worker = FakeWorker(pair, cancel_request)
    client = decode_engine(pair, fake_worker.address)
    ready(client)
    assert outcome(client.submit(CLIPS[0], ONCE)).tokens == outcome(pair.client.submit(CLIPS[0], ONCE)).tokens
    assert fake_worker.asked == 2, "and not again and again"
    expect_nothing_left(client)
    client.close()
    fake_worker.close()


def test_a_forgotten_clip_times_out(pair) -> None:
    """Others are answered all the time: by that alone the worker seems to be well."""

    def forget_one(line: messages.PeerChannel, wanted: messages.EncodeMessage, sender: Any) -> None:
        if wanted.length != len(CLIPS[3]):
            checksum = sender.write_region(wanted.region, np.zeros(wanted.region.nbytes, np.uint8), WAIT_S)
            frames = wanted.region.nbytes // 128
            line.send(messages.EncodeDone(wanted.id, frames, wanted.region.nbytes, checksum, 0.0, 0.0, 0.0))

    fake_worker = FakeWorker(pair, forget_one)
    client = decode_engine(pair, fake_worker.address, peer_timeout_s=0.3, peer_carries="hidden", encode_frames=64)
    ready(client)
    forgotten, end_s = client.submit(CLIPS[3], ONCE), time.monotonic() + WAIT_S
    while not forgotten.future.done():
        assert time.monotonic() < end_s, "it waits as long as others are answered"
        client.submit(CLIPS[2], ONCE).future.result(WAIT_S)
    assert outcome(forgotten).tokens == outcome(pair.client.submit(CLIPS[3], ONCE)).tokens
    expect_nothing_left(client)
    client.close()
    fake_worker.close()


# --- unexpected errors --------------------------------------------------------------------------------------


def fail_next_call(monkeypatch: pytest.MonkeyPatch, of: type, name: str, *, at_end: bool = False) -> list[str]:
    """Make the next call of a method fail unexpectedly."""
    before, failed = getattr(of, name), list[str]()

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = before(self, *args, **kwargs) if failed or at_end else None
        if not failed:
            failed.append(name)
            raise RuntimeError("unexpected")
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
def test_an_unexpected_error_loses_a_connection_and_no_request(pair, monkeypatch, of, name) -> None:
    expected = answers(pair.client, CLIPS)
    failed = fail_next_call(monkeypatch, of, name)
    assert answers(pair.client, CLIPS) == expected
    assert failed
    ready(pair.client)
    before = pair.worker.encoded
    assert answers(pair.client, CLIPS) == expected
    assert pair.worker.encoded == before + len(CLIPS)
    wait_until(lambda: pair.encodes.describe()["askers"] == 1)
    expect_nothing_left(pair.client)


@pytest.mark.parametrize(
    ("of", "name"), [(peer_pool.EncodePeer, "_negotiate_transport"), (transports.Receiver, "close")]
)
def test_an_unexpected_error_while_connecting_is_retried(pair, monkeypatch, of, name) -> None:
    failed = fail_next_call(monkeypatch, of, name, at_end=name == "close")
    peers(pair.client).peers[0].connection.channel.shut_down()
    tickets = [pair.client.submit(pcm, ONCE) for pcm in CLIPS]
    assert all(ticket.future.result(WAIT_S).tokens for ticket in tickets)
    wait_until(lambda: failed)
    ready(pair.client)


def test_a_failed_admission_keeps_the_port_open(pair, monkeypatch) -> None:
    failed = fail_next_call(monkeypatch, worker_of_peers.EncodeWorker, "_choose_evicted")
    turned_away = socket.create_connection(("127.0.0.1", pair.worker.port), WAIT_S)
    wait_until(lambda: failed)
    turned_away.close()
    late = FakeDecodeEngine(pair)
    late.submit(1, CLIPS[0])
    assert late.is_answered()
    late.close()


def test_a_batch_without_a_thread_fails(pair, monkeypatch) -> None:
    def none(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pair.client.backend.loop.executor.encoder_pool._threads, "submit", none)
    assert outcome(pair.client.submit(CLIPS[0], ONCE)).__name__ == "StepFailed"
    expect_nothing_left(pair.client)


def test_only_offline_models_have_roles() -> None:
    for name in ("fastconformer-streaming-medium-en", "moonshine-streaming-tiny-en"):
        for settings in ({"role": "encode"}, {"role": "decode"}, {"peers": ("here:1",)}):
            with pytest.raises(OptionError, match=r"is a streaming model.*whisper-tiny-en"):
                roles.validate_roles(asr_card(name), EngineConfig(**settings))


def test_a_library_has_no_roles() -> None:
    with pytest.raises(OptionError, match="asr-serve serve has them"):
        tiny_moonshine.start(role="decode")


def test_a_taken_port_is_an_error_at_start(pair) -> None:
    met = HandshakeSettings("weights", ("127.0.0.1", pair.worker.port))
    with pytest.raises(OptionError, match="cannot be listened at for peers"):
        EngineClient(
            EngineConfig(role="encode"), thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=met)
        )


def test_no_batch_is_sent_to_a_full_worker(pair) -> None:
    """The loop asks `has_room` before it schedules: two batches, and no more."""
    connection = peers(pair.client).peers[0].connection
    clips = [peer.EncodeClip(CLIPS[0], pair.worker.runner.model.count_frames(len(CLIPS[0])), False, "bulk", None)]
    came: list[Any] = []
    with tiny_moonshine.held(pair.encodes):
        assert [connection.submit_batch(clips, came.append) is not None for _ in range(3)] == [True, True, False]
        assert not peers(pair.client).has_room
    wait_until(lambda: len(came) == 2)
    assert peers(pair.client).has_room
