"""Encode replicas of a cluster, as the engine of a decode replica is told of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import pytest
from engine_clients import wait_until

from asr_serve.cluster.encode_peers import MAX_ENCODERS, EncodePeers, choose_encoders, peer_key
from asr_serve.config import ServeConfig
from asr_serve.engine.process.messages import EncoderAddress, PeersSet
from asr_serve.errors import StepFailed


class Engine:
    """What the engine was told, and the answers that it owes."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.answers: list[Future[PeersSet]] = []

    def set_peers(self, addresses: Sequence[str]) -> Future[PeersSet]:
        self.told.append(sorted(addresses))
        self.answers.append(Future())
        return self.answers[-1]


def address(port: int) -> bytes:
    return msgspec.msgpack.encode(EncoderAddress("10.0.0.1", port))


def test_replicas_come_move_and_go():
    engine = Engine()
    peers = EncodePeers(engine, "own")
    peers.on_address("a", "node", address(1))
    peers.on_address("b", "node", address(2))
    peers.on_address("a", "node", address(3))  # its engine was restarted
    assert engine.told == [["10.0.0.1:1"], ["10.0.0.1:1", "10.0.0.1:2"], ["10.0.0.1:2", "10.0.0.1:3"]]


@pytest.mark.parametrize("answer", [PeersSet(1), StepFailed("the engine died")])
def test_a_replica_that_goes_is_left_when_the_engine_has_its_batches(answer):
    engine = Engine()
    peers = EncodePeers(engine, "own")
    peers.on_address("a", "node", address(1))
    leaving = threading.Thread(target=peers.on_gone, args=("a",))
    leaving.start()
    wait_until(lambda: len(engine.told) == 2)
    assert engine.told[-1] == []
    peers.on_address("b", "node", address(2))  # nobody waits for those who leave
    assert engine.told[-1] == ["10.0.0.1:2"]
    assert leaving.is_alive()
    if isinstance(answer, Exception):
        engine.answers[1].set_exception(answer)
    else:
        engine.answers[1].set_result(answer)
    leaving.join(60)
    assert not leaving.is_alive()


def test_encoders_are_spread_over_decoders_and_few_change():
    encoders = [f"encoder {number}" for number in range(3 * MAX_ENCODERS)]
    chosen = {f"decoder {number}": set(choose_encoders(f"decoder {number}", encoders)) for number in range(60)}
    assert {len(each) for each in chosen.values()} == {MAX_ENCODERS}
    used = [sum(encoder in each for each in chosen.values()) for encoder in encoders]
    assert min(used) > 0
    assert max(used) < 2 * 60 / 3, "one encoder has twice its share"
    for decoder, before in chosen.items():
        assert len(before - set(choose_encoders(decoder, encoders[1:]))) <= 1
    assert choose_encoders("decoder", encoders[:3]) == choose_encoders("decoder", encoders[2::-1])
    assert sorted(choose_encoders("decoder", encoders[:3])) == encoders[:3]


def test_the_key_of_peers_is_one_that_settings_take_and_not_the_clusters_own():
    key = bytes(range(32))
    assert peer_key(key) == peer_key(key) != peer_key(key[::-1])
    assert key.hex() not in peer_key(key)
    assert msgspec.convert({"peer_keys": [peer_key(key)]}, ServeConfig).peer_keys == (peer_key(key),)
