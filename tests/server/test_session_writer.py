"""The writer of stored sessions and their journals, on a real Redis, with sessions that recognize nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from redis_server import RedisServer

from asr_serve.audio.stream_decoder import create_live_decoder
from asr_serve.errors import OptionError, StoreUnavailable
from asr_serve.metrics import ServerMetrics
from asr_serve.pipelines.live.session_state import LiveSessionState
from asr_serve.pipelines.options import ListenOptions
from asr_serve.protocols.stream.client_messages import NewSessionRequest
from asr_serve.protocols.stream.server_events import EncodedEvent
from asr_serve.server.realtime.stream import journal as stream_journal
from asr_serve.server.realtime.stream.journal import SessionJournal, Settled
from asr_serve.server.sessions import redis_store
from asr_serve.server.sessions import writer as writer_module
from asr_serve.server.sessions.cipher import AesGcmCipher, NoCipher, Unreadable
from asr_serve.server.sessions.records import (
    SessionCheckpoint,
    SessionHeader,
    SessionPosition,
    SessionWrite,
    StoredEvent,
    StoredSession,
    WriteOutcome,
)
from asr_serve.server.sessions.redis_store import RedisSessionStore, read_password
from asr_serve.server.sessions.writer import SessionWriter
from asr_serve.units import RATE_HZ

HEADER = SessionHeader("model", "en", NewSessionRequest("model", "s16le", RATE_HZ, ListenOptions()), 0.0)
TTL_MS = 20_000


class Source:
    """A session with audio and without words, which ends when it is told to. See JournalSource."""

    def __init__(self) -> None:
        self.received_samples = self.needed_from_samples = self.last_seq = 0
        self.released: list[tuple[int, int, bool]] = []
        self.broken = self.claimed = self.failed = self.busy = False
        self.exports = 0

    def export_checkpoint(self) -> SessionCheckpoint | None:
        """None while it is busy."""
        if self.broken:
            raise RuntimeError("it is broken")
        if self.busy:
            return None
        self.exports += 1
        fields = dict.fromkeys(LiveSessionState.__struct_fields__) | {"audio_from": self.needed_from_samples}
        return SessionCheckpoint(LiveSessionState(**fields), self.last_seq, "", 0, None, [], False, None)

    def export_position(self) -> SessionPosition:
        decoder = create_live_decoder("s16le", RATE_HZ)
        return SessionPosition(2 * self.received_samples, self.received_samples, decoder.export_state())

    def stored_audio(self, from_samples: int) -> tuple[int, np.ndarray]:
        start = max(from_samples, self.needed_from_samples)
        return start, np.zeros(max(0, self.received_samples - start), np.float32)

    def events_after(self, seq: int) -> Sequence[EncodedEvent]:
        return []

    def release(self, seq: int, received_bytes: int, received_samples: int, *, durable: bool) -> None:
        self.released.append((received_bytes, received_samples, durable))

    def on_claimed_elsewhere(self) -> None:
        self.claimed = True

    def on_journal_failed(self) -> None:
        self.failed = True


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@asynccontextmanager
async def writing(redis: RedisServer) -> AsyncIterator[SessionWriter]:
    redis.client.flushall()
    store = RedisSessionStore(redis.url, "test", 5.0, NoCipher())
    writer = SessionWriter(store, TTL_MS, ServerMetrics("0").session_store)
    await writer.start()
    try:
        assert writer.up
        yield writer
    finally:
        await writer.close()


def test_the_password_of_redis_comes_from_a_file(redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("not told\n")
    password = read_password(str(tmp_path / "password"))

    async def ping(given: str | None) -> None:
        store = RedisSessionStore(redis.url, "test", 5.0, NoCipher(), given)
        try:
            await store.ping()
        finally:
            await store.close()

    redis.client.config_set("requirepass", password)
    try:
        asyncio.run(ping(password))
        with pytest.raises(StoreUnavailable):
            asyncio.run(ping(None))
    finally:
        redis.client.config_set("requirepass", "")
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(OptionError, match=name) as refused:
            read_password(str(tmp_path / name))
        assert refused.value.param == "sessions.redis_password_file"


def journal_of(writer: SessionWriter, source: Source, name: str) -> SessionJournal:
    return SessionJournal(writer, source, name, "client", HEADER, 500, pcm16=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_audio_is_stored_in_short_entries_and_a_checkpoint_that_frees_nothing_is_not_repeated(redis):
    async with writing(redis) as writer:
        source = Source()
        source.received_samples = 20 * RATE_HZ + 7
        journal = journal_of(writer, source, "a")
        assert await journal.settle() is Settled.STORED
        assert redis.client.xlen("test:{a}:audio") == 21
        source.needed_from_samples = 9 * RATE_HZ + 100  # in the middle of an entry
        journal.on_change()
        await until(lambda: redis.client.xlen("test:{a}:audio") == 12)
        assert not journal.is_due
        exports = source.exports
        for _ in range(100):
            source.needed_from_samples += 10
            journal.on_change()
            await asyncio.sleep(0)
        assert await journal.settle() is Settled.STORED  # every write before it is done
        assert source.exports == exports + 1


async def test_a_redis_that_answers_but_refuses_writes_is_away(redis):
    async with writing(redis) as writer:
        source = Source()
        journal = journal_of(writer, source, "a")
        assert await journal.settle() is Settled.STORED
        assert journal.durable
        redis.client.config_set("maxmemory", 1)
        try:
            source.received_samples = 2 * RATE_HZ
            assert await journal.settle() is Settled.AWAY
            assert source.released[-1] == (4 * RATE_HZ, 2 * RATE_HZ, False)
            exports = source.exports
            await asyncio.sleep(0.5)
            assert not writer.up
            assert not journal.durable
            assert source.exports == exports  # nothing is made that would be refused
        finally:
            redis.client.config_set("maxmemory", 0)
        await until(lambda: journal.durable)
        assert redis.client.xlen("test:{a}:audio") == 2


async def test_a_silent_server_notices_that_redis_is_away(redis, monkeypatch):
    """No caller says anything, so that nothing is written."""
    monkeypatch.setattr(writer_module, "CHECK_S", 0.05)
    async with writing(redis) as writer:
        journal = journal_of(writer, Source(), "a")
        assert await journal.settle() is Settled.STORED
        redis.client.config_set("maxmemory", 1)
        try:
            await until(lambda: not writer.up)
            assert not journal.durable
        finally:
            redis.client.config_set("maxmemory", 0)
        await until(lambda: writer.up and journal.durable)


async def test_what_one_session_breaks_is_its_own(redis):
    """One whose keys are not its own in Redis, and one that raises."""
    async with writing(redis) as writer:
        sources = [Source() for _ in range(3)]
        good, refused, broken = journals = [journal_of(writer, s, n) for s, n in zip(sources, "abc", strict=True)]
        for journal in journals:
            assert await journal.settle() is Settled.STORED
        redis.client.delete("test:{b}:audio")
        redis.client.set("test:{b}:audio", "no stream")
        sources[2].broken = True
        for source in sources:
            source.received_samples = RATE_HZ // 2
        found = await asyncio.gather(*(journal.settle() for journal in journals))
        assert found == [Settled.STORED, Settled.AWAY, Settled.LOST]
        assert [source.failed for source in sources] == [False, False, True]
        assert writer.up
        assert good.durable
        assert not refused.durable
        assert not broken.durable
        await until(lambda: refused.durable)  # it was written whole
        assert redis.client.xlen("test:{b}:audio") == 1


async def test_a_writer_that_fails_lets_its_sessions_continue_in_memory_and_tries_again(redis):
    async with writing(redis) as writer:
        source = Source()
        journal = journal_of(writer, source, "a")
        assert await journal.settle() is Settled.STORED
        write, fails = writer.store.write, True

        async def fail(writes: Sequence[SessionWrite]) -> list[WriteOutcome]:
            if fails:
                raise RuntimeError("a defect")
            return await write(writes)

        writer.store.write = fail  # type: ignore[method-assign]
        source.received_samples = RATE_HZ
        assert await journal.settle() is Settled.AWAY
        assert source.released[-1] == (2 * RATE_HZ, RATE_HZ, False)
        fails = False
        await until(lambda: journal.durable)
        assert source.released[-1] == (2 * RATE_HZ, RATE_HZ, True)


async def test_events_of_a_stored_session_wait_for_its_state_and_it_continues_from_what_is_stored(redis, monkeypatch):
    monkeypatch.setattr(stream_journal, "BLOCKED_S", 0.2)
    monkeypatch.setattr(stream_journal, "UNEXPORTABLE_S", 1.0)
    async with writing(redis) as writer:
        stored, new = Source(), Source()
        journal = journal_of(writer, stored, "a")
        assert await journal.settle() is Settled.STORED
        told = len(stored.released)
        stored.busy = new.busy = True
        stored.last_seq = 1
        journal.on_change()
        journal_of(writer, new, "b")  # nobody has an older state of that one
        await until(lambda: bool(new.released))
        assert await journal.settle() is Settled.BLOCKED
        assert len(stored.released) == told
        assert not stored.failed
        await until(lambda: stored.failed)
        assert len(stored.released) == told
        assert not new.failed
        new.busy = False
        await until(lambda: new.released[-1][2])
        assert redis.client.exists("test:{a}")  # as it was: a server may continue it


def write_of(
    session_id: str, last_seq: int, *, whole: bool = False, number: int | None = None, samples: int = 0
) -> SessionWrite:
    """Write of one event, and of that number too unless told otherwise."""
    source = Source()
    source.last_seq, source.received_samples = last_seq, samples
    return SessionWrite(
        session_id=session_id,
        client="client of mine",
        epoch=1,
        number=last_seq if number is None else number,
        ttl_ms=TTL_MS,
        header=HEADER if whole else None,
        position=source.export_position(),
        checkpoint=SessionCheckpoint(None, last_seq, "", 0, None, [], False, None),
        events=[StoredEvent(last_seq, "segment", b"{}")],
        last_seq=last_seq,
    )


@asynccontextmanager
async def encrypted(redis: RedisServer) -> AsyncIterator[RedisSessionStore]:
    redis.client.flushall()
    store = RedisSessionStore(redis.url, "test", 5.0, AesGcmCipher([bytes(range(32))]))
    yield store
    await store.close()


async def test_records_are_of_their_session_and_their_time(redis):
    async with encrypted(redis) as store:
        await store.write([write_of(name, 1, whole=True) for name in "ab"])
        first, other = redis.client.hgetall("test:{a}"), redis.client.hgetall("test:{b}")
        await store.write([write_of("a", 2)])
        stored = await store.read("a", "client of mine")
        assert isinstance(stored, StoredSession)
        assert [event.seq for event in stored.events] == [1, 2]
        assert await store.read("a", "another client") is None
        newest = redis.client.hgetall("test:{a}")
        for field, value in ((b"checkpoint", first), (b"position", first), (b"header", other), (b"client", other)):
            redis.client.hset("test:{a}", field, value[field])
            with pytest.raises(Unreadable):
                await store.read("a", "client of mine")
            redis.client.hset("test:{a}", field, newest[field])
        again = await store.read("a", "client of mine")
        assert isinstance(again, StoredSession)
        assert again._replace(read_unix_ms=stored.read_unix_ms) == stored


async def test_a_session_that_ends_before_it_is_stored_stays_ended(redis):
    async with encrypted(redis) as store:
        await store.end("a", "client of mine", 1, "was ended by its client", TTL_MS)
        assert await store.write([write_of("a", 1, whole=True)]) == [WriteOutcome.REFUSED]
        assert await store.read("a", "client of mine") == "was ended by its client"
        contents = redis.contents("test:{*")
        assert b"client of mine" not in contents
        assert b"ended" not in contents
        assert 0 < redis.client.pttl("test:{a}") <= TTL_MS


async def test_a_claim_holds_for_the_epoch_that_was_read(redis):
    async with encrypted(redis) as store:
        await store.write([write_of("a", 1, whole=True)])
        read = await store.read("a", "client of mine")
        assert isinstance(read, StoredSession)
        assert await store.write([write_of("a", 2)]) == [WriteOutcome.WRITTEN]  # its owner still has it
        late = read._replace(read_unix_ms=read.read_unix_ms - redis_store.CLAIM_MS - 1)
        assert await store.claim(late, "client of mine", TTL_MS) is None  # a network has held it back
        claimed = await store.claim(read, "client of mine", TTL_MS)
        assert isinstance(claimed, StoredSession)
        assert (claimed.epoch, claimed.checkpoint.last_seq) == (2, 2)
        assert await store.claim(read, "client of mine", TTL_MS) is None
        assert await store.write([write_of("a", 3)]) == [WriteOutcome.REFUSED]


async def test_a_claim_that_is_given_back_leaves_its_owner_the_session(redis):
    async with encrypted(redis) as store:
        await store.write([write_of("a", 1, whole=True)])

        async def claim() -> StoredSession:
            read = await store.read("a", "client of mine")
            assert isinstance(read, StoredSession)
            claimed = await store.claim(read, "client of mine", TTL_MS)
            assert isinstance(claimed, StoredSession)
            return claimed

        given_back = await claim()
        await store.unclaim("a", given_back.epoch)
        assert await store.write([write_of("a", 2)]) == [WriteOutcome.WRITTEN]
        first, second = await claim(), await claim()
        assert (given_back.epoch, first.epoch, second.epoch) == (2, 3, 4)  # no epoch is used twice
        await store.unclaim("a", first.epoch)  # another server has it since
        assert await store.write([write_of("a", 3)]) == [WriteOutcome.REFUSED]


async def test_a_write_that_a_network_held_back_changes_nothing(redis):
    """Its sender has given it up, and has written the session whole since."""
    async with encrypted(redis) as store:
        await store.write([write_of("a", 1, whole=True)])
        late, lost = write_of("a", 2, samples=100), write_of("a", 3, number=4, samples=300)
        assert await store.write([write_of("a", 5, whole=True, number=3, samples=500)]) == [WriteOutcome.WRITTEN]
        before = redis.client.hgetall("test:{a}"), redis.client.xrange("test:{a}:events")
        assert await store.write([late]) == [WriteOutcome.MISSING]
        assert await store.write([write_of("a", 1, whole=True)]) == [WriteOutcome.MISSING]
        assert (redis.client.hgetall("test:{a}"), redis.client.xrange("test:{a}:events")) == before
        # Nor does one that adds to a write that never came.
        assert await store.write([msgspec.structs.replace(lost, number=5)]) == [WriteOutcome.MISSING]
        assert (redis.client.hgetall("test:{a}"), redis.client.xrange("test:{a}:events")) == before
        stored = await store.read("a", "client of mine")
        assert isinstance(stored, StoredSession)
        assert (stored.position.received_samples, stored.checkpoint.last_seq) == (500, 5)
        # A server that claims it goes on with the numbers.
        claimed = await store.claim(stored, "client of mine", TTL_MS)
        assert isinstance(claimed, StoredSession)
        assert claimed.number == 3


async def test_callers_who_resume_at_once_do_not_take_the_store_away(redis):
    """More than the client has connections."""
    async with writing(redis) as writer:
        source = Source()
        journal = journal_of(writer, source, "a")
        assert await journal.settle() is Settled.STORED
        await writer.store.write([write_of("b", 1, whole=True)])
        reads = [asyncio.create_task(writer.store.read("b", "client of mine")) for _ in range(300)]
        source.received_samples = RATE_HZ
        assert await journal.settle() is Settled.STORED
        assert all(isinstance(found, StoredSession) for found in await asyncio.gather(*reads))
        assert writer.up


async def test_where_the_store_is_stays_in_the_log(caplog):
    """Callers are told what they can do."""
    where = "redis://user:se@cret@127.0.0.1:1/0?password=hidden"
    store = RedisSessionStore(where, "test", 1.0, NoCipher())
    with pytest.raises(StoreUnavailable) as refused:
        await store.ping()
    assert "127.0.0.1" not in str(refused.value)
    assert "127.0.0.1:1" in str(refused.value.__cause__)
    for secret in ("user", "se@", "cret", "hidden"):
        assert secret not in f"{refused.value} {refused.value.__cause__}"
    await store.close()
