"""Peers that come, move and go while an engine decodes: the same tokens, and a peer that leaves answers what it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import tiny_moonshine
from engine_clients import backend_of, engine_pid, start_engine, wait_until
from test_remote_encoding import CONFIG, MODEL, ONCE, expect_nothing_left, peers, ready, tokens_of
from tiny_moonshine import WAIT_S, clip, held, on_loop, save

from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.messages import EncoderAddress
from asr_serve.engine.remote import peer_pool
from asr_serve.engine.remote.handshake import HandshakeSettings
from asr_serve.engine.thread_backend import thread_backend

CLIPS = [clip(seed, 20_000 + 3_000 * seed) for seed in range(8)]
MEETING = HandshakeSettings("weights", keys=("the-key-of-a-cluster",))


@pytest.fixture(autouse=True)
def reconnect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pool, "LONGEST_PAUSE_S", 0.3)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    client = tiny_moonshine.start()
    found = tokens_of([client.submit(pcm, ONCE) for pcm in CLIPS])
    client.close()
    return found


class Encoder:
    """An engine of this process that encodes for others."""

    def __init__(self) -> None:
        config = EngineConfig(role="encode", max_sessions=2)
        meeting = MEETING._replace(listen_address=("127.0.0.1", 0))
        self.client = EngineClient(config, thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=meeting))
        self.worker = self.client.backend.loop.executor

    @property
    def address(self) -> str:
        return EncoderAddress("127.0.0.1", self.worker.port).peer


@pytest.fixture
def encoder() -> Iterator[Callable[[], Encoder]]:
    started: list[Encoder] = []

    def start() -> Encoder:
        started.append(Encoder())
        return started[-1]

    yield start
    for each in started:
        each.client.close()


@pytest.fixture
def decoder() -> Iterator[EngineClient]:
    """An engine with the role decode that is told its peers later."""
    config = msgspec.structs.replace(CONFIG, role="decode", encode_frames=128)
    client = EngineClient(config, thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=MEETING))
    yield client
    expect_nothing_left(client)
    client.close()


def tell(client: EngineClient, *encoders: Encoder) -> Future[None]:
    """Sets the peers; the future is done when those that are none any more have answered all."""
    left: Future[None] = Future()
    addresses = [each.address for each in encoders]
    on_loop(client, lambda loop: loop.peers.set_addresses(addresses, lambda: left.set_result(None)))
    return left


def test_peers_come_move_and_go(encoder, decoder, expected) -> None:
    first, second = encoder(), encoder()

    def answered() -> bool:
        return tokens_of([decoder.submit(pcm, ONCE) for pcm in CLIPS]) == expected

    assert peers(decoder).describe() == {}
    assert answered()
    assert first.worker.encoded == second.worker.encoded == 0

    tell(decoder, first).result(WAIT_S)
    ready(decoder)
    assert answered()
    assert first.worker.encoded == len(CLIPS)

    tell(decoder, first, second).result(WAIT_S)
    ready(decoder, 2)
    kept = peers(decoder).peers[0].connection
    tell(decoder, second, first).result(WAIT_S)
    assert kept in [each.connection for each in peers(decoder).peers], "a peer that stays is connected anew"
    assert answered()

    tell(decoder, second).result(WAIT_S)  # the first one moved away
    before, of_first = second.worker.encoded, first.worker.encoded
    assert answered()
    assert (second.worker.encoded - before, first.worker.encoded - of_first) == (len(CLIPS), 0)
    assert list(peers(decoder).describe()) == [second.address]

    tell(decoder).result(WAIT_S)
    assert answered()
    assert not peers(decoder).alive
    wait_until(lambda: not first.worker._clients and not second.worker._clients)


def test_a_peer_that_leaves_answers_what_it_has(encoder, decoder, expected) -> None:
    first, second = encoder(), encoder()
    tell(decoder, first).result(WAIT_S)
    ready(decoder)
    with held(first.client):
        tickets = [decoder.submit(pcm, ONCE) for pcm in CLIPS[:3]]
        connection = peers(decoder).peers[0].connection
        wait_until(lambda: connection._in_flight)
        left = tell(decoder, second)
        given = sum(len(batch.clips) for batch in connection._batches)
        assert given
        ready(decoder)
        assert tokens_of([decoder.submit(pcm, ONCE) for pcm in CLIPS[3:]]) == expected[3:]
        assert not left.done(), "it has batches of this engine"
    assert tokens_of(tickets) == expected[:3]
    left.result(WAIT_S)
    assert first.worker.encoded == given
    # What came while the first was leaving and the second not connected yet, the decoder has encoded itself.
    assert len(CLIPS[3:]) <= second.worker.encoded <= len(CLIPS) - given


def test_an_engine_is_closed_while_a_peer_leaves(encoder, expected) -> None:
    first = encoder()
    config = msgspec.structs.replace(CONFIG, role="decode")
    client = EngineClient(config, thread_backend(tiny_moonshine.CARD, tiny_moonshine.build, meeting=MEETING))
    tell(client, first).result(WAIT_S)
    ready(client)
    with held(first.client):
        client.submit(CLIPS[0], ONCE)
        wait_until(lambda: peers(client).peers[0].connection._in_flight)
        left = tell(client)
        client.close()
        left.result(WAIT_S)
    assert not [each for each in threading.enumerate() if each.name.startswith(f"peer {first.address}")]


@pytest.mark.slow
def test_a_process_is_told_its_peers_again_after_a_restart(encoder, tmp_path: Path, expected: list[Any]) -> None:
    """Over messages to an engine process. Its weights are those of the encoder, and have a digest of their own."""
    folder = save(tmp_path)
    spec = {"process": True, "turn_model": "none", "peer_keys": MEETING.keys}
    encodes = start_engine(MODEL, folder, EngineConfig(role="encode", max_sessions=2), **spec)
    decodes = start_engine(MODEL, folder, msgspec.structs.replace(CONFIG, role="decode"), **spec)
    try:
        address = backend_of(encodes).address
        assert isinstance(address, EncoderAddress)

        def connected() -> bool:
            return decodes.describe().get("peers") == {address.peer: "ready"}

        backend_of(decodes).set_peers([address.peer]).result(WAIT_S)
        wait_until(connected, decodes.describe)
        assert tokens_of([decodes.submit(pcm, ONCE) for pcm in CLIPS]) == expected
        assert encodes.describe()["peer_requests"] == len(CLIPS)

        tickets = [decodes.submit(pcm, ONCE) for pcm in CLIPS]
        psutil.Process(engine_pid(decodes)).kill()
        assert tokens_of(tickets) == expected
        wait_until(connected, decodes.describe)
        before = encodes.describe()["peer_requests"]
        assert tokens_of([decodes.submit(pcm, ONCE) for pcm in CLIPS]) == expected
        assert encodes.describe()["peer_requests"] == before + len(CLIPS)

        old = engine_pid(encodes)
        psutil.Process(old).kill()
        moved = backend_of(encodes).wait_address(address, WAIT_S)
        assert isinstance(moved, EncoderAddress)
        assert moved != address
        backend_of(decodes).set_peers([moved.peer]).result(WAIT_S)
        wait_until(lambda: decodes.describe().get("peers") == {moved.peer: "ready"}, decodes.describe)
        assert tokens_of([decodes.submit(pcm, ONCE) for pcm in CLIPS]) == expected
    finally:
        decodes.close()
        encodes.close()


@pytest.mark.parametrize(("host", "peer"), [("10.0.0.1", "10.0.0.1:81"), ("fd00::1", "[fd00::1]:81")])
def test_an_address_is_written_as_settings_have_it(host: str, peer: str) -> None:
    assert EncoderAddress(host, 81).peer == peer
