"""Sessions in a real Redis Cluster of three masters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis_cluster import RedisCluster
from test_session_writer import TTL_MS, Source, journal_of, until, write_of

from asr_serve.errors import StoreUnavailable
from asr_serve.metrics import ServerMetrics
from asr_serve.server.realtime.stream.journal import Settled
from asr_serve.server.sessions.cipher import NoCipher
from asr_serve.server.sessions.records import StoredSession, WriteOutcome
from asr_serve.server.sessions.redis_store import RedisSessionStore
from asr_serve.server.sessions.writer import SessionWriter
from asr_serve.units import RATE_HZ

CLIENT = "client of mine"
NAMES = [f"session-{number}" for number in range(24)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    started = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.close()


async def test_sessions_are_spread_over_the_masters_and_each_is_in_one_slot(cluster: RedisCluster):
    store = RedisSessionStore(cluster.url, "test", 5.0, NoCipher())
    try:
        await store.ping()
        assert await store.write([write_of(name, 1, whole=True) for name in NAMES]) == [WriteOutcome.WRITTEN] * 24
        assert await store.write([write_of(name, 2) for name in NAMES]) == [WriteOutcome.WRITTEN] * 24
        for client in cluster.clients:
            keys = [key for key in client.scan_iter("test:{*") if key.endswith(b"}")]
            assert 0 < len(keys) < 24
            client.script_flush()  # as a master that has taken over from another has none
        for name in NAMES:
            read = await store.read(name, CLIENT)
            assert isinstance(read, StoredSession)
            assert [event.seq for event in read.events] == [1, 2]
            claimed = await store.claim(read, CLIENT, TTL_MS)
            assert isinstance(claimed, StoredSession)
            assert claimed.epoch == 2
        assert await store.write([write_of(name, 3) for name in NAMES]) == [WriteOutcome.REFUSED] * 24
        assert await store.renew([(name, 2) for name in NAMES], TTL_MS) == [WriteOutcome.WRITTEN] * 24
        for name in NAMES:
            await store.end(name, CLIENT, 2, "was ended", TTL_MS)
            assert await store.read(name, CLIENT) == "was ended"
    finally:
        await store.close()


async def test_a_master_that_dies_takes_the_cluster_away_until_it_is_back(cluster: RedisCluster):
    store = RedisSessionStore(cluster.url, "test", 5.0, NoCipher())
    writer = SessionWriter(store, TTL_MS, ServerMetrics("0").session_store)
    await writer.start()
    try:
        assert writer.up
        sources = [Source() for _ in NAMES]
        journals = [journal_of(writer, source, f"j-{name}") for source, name in zip(sources, NAMES, strict=True)]
        assert await asyncio.gather(*(journal.settle() for journal in journals)) == [Settled.STORED] * 24
        cluster.kill(2)
        for source in sources:
            source.received_samples = RATE_HZ
        assert set(await asyncio.gather(*(journal.settle() for journal in journals))) == {Settled.AWAY}
        assert not any(journal.durable for journal in journals)
        assert all(source.released[-1] == (2 * RATE_HZ, RATE_HZ, False) for source in sources)
        await asyncio.to_thread(cluster.start, 2)
        await until(lambda: all(journal.durable for journal in journals))
        # Each was written whole: its audio too, with what came while the master was away.
        assert sum(client.xlen(key) for client in cluster.clients for key in client.scan_iter("test:{j-*:audio")) == 24
    finally:
        await writer.close()


async def test_a_node_of_a_cluster_is_no_redis_by_itself(cluster: RedisCluster):
    await asyncio.to_thread(cluster.wait, True)
    store = RedisSessionStore(cluster.url.replace("+cluster", ""), "test", 5.0, NoCipher())
    try:
        with pytest.raises(StoreUnavailable) as refused:
            await store.write([write_of(name, 1, whole=True) for name in NAMES])
        assert "a node of a cluster: set sessions.redis_url to redis+cluster://" in str(refused.value.__cause__)
    finally:
        await store.close()
