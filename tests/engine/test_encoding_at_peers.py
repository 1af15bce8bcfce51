"""Batches at a peer: of one that is over nothing is kept, and who hangs up does no harm to the others in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_moonshine
from engine_clients import wait_until
from test_remote_encoding import ONCE, Pair, expect_nothing_left, peers
from tiny_moonshine import WAIT_S, clip, held, on_loop, outcome

from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled

CLIPS = [clip(seed, 30_000 + 100 * seed) for seed in range(4)]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    client = tiny_moonshine.start()
    found = [client.submit(pcm, ONCE).future.result(WAIT_S).tokens for pcm in CLIPS]
    client.close()
    return found


@pytest.fixture
def begin() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def start(**settings: Any) -> Pair:
        made.append(Pair(tiny_moonshine, peer_transport="tcp", **settings))
        return made[-1]

    yield start
    for pair in made:
        expect_nothing_left(pair.client)
        assert kept(pair.client) == 0
        pair.close()


def kept(client: EngineClient) -> int:
    """Batches whose audio is held."""
    return int(on_loop(client, lambda loop: len(loop.executor.encoder_pool._remote)))


@pytest.mark.parametrize("carries", ["cross", "hidden"])
@pytest.mark.parametrize("gone", [[0], [1, 3], [0, 1, 2]])
def test_a_request_cancelled_at_a_peer_leaves_the_others_alone(begin, expected, gone, carries) -> None:
    pair = begin(peer_carries=carries)
    with held(pair.encodes):
        with held(pair.client):
            tickets = [pair.client.submit(pcm, ONCE) for pcm in CLIPS]
        connection = peers(pair.client).peers[0].connection
        wait_until(lambda: len(connection._in_flight) == len(CLIPS))
        assert [len(away.clips) for away in connection._batches] == [len(CLIPS)], "all in one batch"
        for index in gone:
            pair.client.cancel(tickets[index])
        wait_until(lambda: cancelled(pair) == len(gone))
    for index, ticket in enumerate(tickets):
        if index in gone:
            assert outcome(ticket) is Cancelled
        else:
            assert ticket.future.result(WAIT_S).tokens == expected[index]
    assert pair.worker.encoded == len(CLIPS) - len(gone), "and those by the peer"


def cancelled(pair: Pair) -> int:
    """Clips that the worker knows are not wanted any more."""
    waiting = [*pair.worker._waiting.values(), *(one for each in pair.worker._clients for one in each._held.values())]
    return len({id(each) for each in waiting if each.cancelled})


def test_when_only_files_come_nothing_of_what_peers_encoded_is_kept(begin, expected) -> None:
    pair = begin()
    for _ in range(3):
        tickets = [pair.client.submit(pcm, ONCE) for pcm in CLIPS]
        assert [ticket.future.result(WAIT_S).tokens for ticket in tickets] == expected
        assert kept(pair.client) == 0
    assert pair.worker.encoded == 3 * len(CLIPS)


def test_a_batch_that_is_over_and_kept_is_found(begin, expected) -> None:
    pair = begin()
    assert pair.client.submit(CLIPS[0], ONCE).future.result(WAIT_S).tokens == expected[0]

    def keep(loop: Any) -> None:
        encoders = loop.executor.encoder_pool
        encoders._remote.append((object(), None, None))
        with pytest.raises(AssertionError, match="is over"):
            loop.check()
        encoders._remote.clear()

    on_loop(pair.client, keep)
