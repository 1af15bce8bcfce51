"""Sessions in Redis, or in a Redis Cluster: a hash, a stream of audio and a stream of events for each.

`PREFIX:{ID}`         hash: client, header, position, checkpoint; `gone` for one that was ended; `epoch` of its
                      owner, the one `before` and the highest of all `claims`; `number` of the last write
`PREFIX:{ID}:audio`   stream of audio; the id of an entry is its first sample, plus 1
`PREFIX:{ID}:events`  stream of numbered events; the id is the number

The braces put the keys of a session in one slot, as a cluster wants it of the keys of one script. Every change of a
session is one script, which compares the owner's epoch and the number of the write: what a network held back and
delivers after its sender has given it up changes nothing. A claim has a time limit by the clock of Redis for the same
reason. All keys have time limits. Only commands that MemoryDB has are used.
"""

from __future__ import annotations

import asyncio
import logging
import re
import struct
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asr_serve.config import SessionsConfig
from asr_serve.errors import OptionError, StoreUnavailable, UnsupportedOption
from asr_serve.server.sessions.cipher import SessionCipher, Unreadable, session_cipher
from asr_serve.server.sessions.records import (
    SessionCheckpoint,
    SessionHeader,
    SessionPosition,
    SessionWrite,
    StoredAudio,
    StoredEvent,
    StoredSession,
    WriteOutcome,
)
from asr_serve.types import without_secrets

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_MS = 1_000
PING_TTL_MS = 1_000
AGE = struct.Struct(">QQ")
"""Epoch and last event of the write that a record is of."""
CLAIM_MS = 10_000
"""Time from the reading of a session, by the clock of Redis, after which a claim of it does nothing."""
MAX_READS = 32
"""Sessions that are read at a time; the client has 100 connections."""
WRONG_TYPE = "WRONGTYPE"
ERROR_CODE = re.compile(r"[A-Z]{3,}\b")
"""Start of the errors that concern Redis as a whole, like OOM, READONLY and MISCONF; that of a script has none."""
OUTCOMES = {1: WriteOutcome.WRITTEN, 0: WriteOutcome.REFUSED, -1: WriteOutcome.MISSING, -2: WriteOutcome.MISSING}

WRITE = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'number', 'claims', 'gone')
local epoch, number = tonumber(found[1] or '-1'), tonumber(found[2] or '-1')
local mine, this, whole = tonumber(ARGV[1]), tonumber(ARGV[10]), ARGV[2] ~= ''
if found[4] or epoch > mine then return 0 end
if epoch == mine and number >= this then return -2 end
if not whole and (epoch < mine or number ~= this - 1) then return -1 end
if whole then
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'header', ARGV[2], 'client', ARGV[4])
  redis.call('HSET', KEYS[1], 'claims', math.max(mine, tonumber(found[3] or '0')))
end
local at = 11
for stream = 2, 3 do
  local count = tonumber(ARGV[5 + stream])
  for _ = 1, count do
    redis.call('XADD', KEYS[stream], ARGV[at] .. '-0', 'd', ARGV[at + 1])
    redis.call('PEXPIRE', KEYS[stream], ARGV[3])
    at = at + 2
  end
end
local first_samples, first_seq = ARGV[9], ARGV[at]
redis.call('XTRIM', KEYS[2], 'MINID', first_samples)
redis.call('XTRIM', KEYS[3], 'MINID', first_seq)
redis.call('HSET', KEYS[1], 'position', ARGV[5], 'number', ARGV[10])
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'checkpoint', ARGV[6]) end
for key = 1, 3 do redis.call('PEXPIRE', KEYS[key], ARGV[3]) end
return 1
"""
RENEW = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
if epoch < tonumber(ARGV[1]) then return -1 end
if epoch > tonumber(ARGV[1]) or redis.call('HEXISTS', KEYS[1], 'gone') == 1 then return 0 end
for key = 1, 3 do redis.call('PEXPIRE', KEYS[key], ARGV[2]) end
return 1
"""
READ = """
local found = redis.call('HMGET', KEYS[1], 'client', 'epoch', 'gone', 'checkpoint', 'claims', 'number')
if not found[1] or not found[2] then return {0} end
if found[3] then return {1, found[1], found[2], found[3]} end
if not found[4] then return {0} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[1] ~= '' then
  if found[2] ~= ARGV[1] or now_ms > tonumber(ARGV[3]) then return {0} end
  local claims = math.max(tonumber(found[2]), tonumber(found[5] or '0')) + 1
  redis.call('HSET', KEYS[1], 'before', found[2], 'epoch', claims, 'claims', claims)
  found[2] = tostring(claims)
  for key = 1, 3 do redis.call('PEXPIRE', KEYS[key], ARGV[2]) end
end
return {2, found[1], found[2], tonumber(found[6] or '0'), now_ms,
  redis.call('HMGET', KEYS[1], 'header', 'position', 'checkpoint'),
  redis.call('XRANGE', KEYS[2], '-', '+'), redis.call('XRANGE', KEYS[3], '-', '+')}
"""
UNCLAIM = """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'before')
if tonumber(found[1] or '-1') ~= tonumber(ARGV[1]) or not found[2] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', found[2])
redis.call('HDEL', KEYS[1], 'before')
return 1
"""
END = """
if tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1') > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'client', ARGV[4], 'gone', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


CLUSTER = "+cluster://"
"""Part of a URL that names a node of a Redis Cluster."""


def read_password(file: str) -> str:
    """Reads the password of Redis from a file. Raises OptionError, which never shows it."""
    try:
        password = Path(file).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why, password = error.strerror if isinstance(error, OSError) else "not UTF-8", ""
    else:
        why = "it is empty"
    if not password:
        came, param = f"sessions.redis_password_file={file!r}: {why}", "sessions.redis_password_file"
        raise OptionError(came, "a file with a password", param=param)
    return password


class RedisSessionStore:
    """SessionStore in one Redis, or in a Redis Cluster. A cluster counts as away as a whole while one of its masters
    does not answer."""

    def __init__(
        self, url: str, prefix: str, timeout_s: float, cipher: SessionCipher, password: str | None = None
    ) -> None:
        """`timeout_s`: time without an answer after which Redis counts as away. `password`: where the URL has none.
        Raises UnsupportedOption if the package
        redis is not installed."""
        try:
            import redis.asyncio as client
            from redis import exceptions
            from redis.asyncio.cluster import RedisCluster
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise UnsupportedOption(
                "sessions.redis_url, and the package redis is not installed",
                "it needs the extra redis",
                "pip install 'asr-serve[redis]'",
                param="sessions.redis_url",
            ) from None
        self._errors = (exceptions.RedisError, exceptions.RedisClusterException, OSError, TimeoutError)
        self._no_script, self._refused = exceptions.NoScriptError, exceptions.ResponseError
        self._moved = exceptions.MovedError
        self.timeout_s = timeout_s
        self._where, self._prefix, self._cipher = without_secrets(url), prefix, cipher
        # No retries: the client cannot know whether a write was made, and the writer writes the session whole.
        self._is_cluster = CLUSTER in url
        kind: Any = RedisCluster if self._is_cluster else client.Redis
        self._redis: Any = kind.from_url(
            url.replace(CLUSTER, "://"),
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._reading = asyncio.Semaphore(MAX_READS)
        self._hashes: dict[str, str] = {}
        """SHA-1 of each script that the server has."""
        self._failed = False
        """Whether the last call had no answer."""

    async def ping(self) -> None:
        await self._within(self._ping())

    async def _ping(self) -> None:
        if self._is_cluster:
            if self._failed:
                await self._redis.aclose()  # its masters may be others now: they are asked for again
            await self._redis.ping(target_nodes=self._redis.PRIMARIES)
        await self._redis.set(f"{self._prefix}:ping", b"", px=PING_TTL_MS)

    async def write(self, writes: Sequence[SessionWrite]) -> list[WriteOutcome]:
        answers = await self._run(WRITE, [(write.session_id, self._arguments(write)) for write in writes])
        outcomes = []
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(answer, Exception):
                log.error("Redis refuses to store the session %s: %s", write.session_id, answer)
            outcomes.append(WriteOutcome.FAILED if isinstance(answer, Exception) else OUTCOMES[answer])
        return outcomes

    def _arguments(self, write: SessionWrite) -> list[Any]:
        seal = _Sealer(self._cipher, write.session_id, write.epoch, write.last_seq)
        audio = [
            argument
            for each in write.audio
            for argument in (each.start_samples + 1, seal("audio", each, each.start_samples))
        ]
        events = [argument for each in write.events for argument in (each.seq, seal("event", each, each.seq))]
        return [
            write.epoch,
            b"" if write.header is None else seal("header", write.header),
            write.ttl_ms,
            b"" if write.header is None else seal("client", write.client),
            seal("position", write.position),
            b"" if write.checkpoint is None else seal("checkpoint", write.checkpoint),
            len(write.audio),
            len(write.events),
            write.first_samples + 1,
            write.number,
            *audio,
            *events,
            write.first_seq,
        ]

    async def renew(self, session_ids: Sequence[tuple[str, int]], ttl_ms: int) -> list[WriteOutcome]:
        answers = await self._run(RENEW, [(session_id, [epoch, ttl_ms]) for session_id, epoch in session_ids])
        return [WriteOutcome.FAILED if isinstance(answer, Exception) else OUTCOMES[answer] for answer in answers]

    async def read(self, session_id: str, client: str) -> StoredSession | str | None:
        return await self._read(session_id, client, [b"", 0, 0])

    async def claim(self, read: StoredSession, client: str, ttl_ms: int) -> StoredSession | str | None:
        until_ms = read.read_unix_ms + CLAIM_MS
        return await self._read(read.session_id, client, [read.epoch, ttl_ms, until_ms])

    async def _read(self, session_id: str, client: str, arguments: list[Any]) -> StoredSession | str | None:
        async with self._reading:  # more would take all connections, and the writer would find none
            [answer] = await self._run(READ, [(session_id, arguments)])
        if isinstance(answer, Exception):
            raise Unreadable(str(answer))
        found, *fields = answer
        if found == 0:
            return None
        owner, epoch, *content = fields
        opened = _Opener(self._cipher, session_id, int(epoch))
        if opened("client", owner, str) != client:
            return None
        if found == 1:
            return opened("gone", content[0], str)
        number, read_unix_ms, (header, position, checkpoint), audio, events = content
        stored = StoredSession(
            session_id,
            int(epoch),
            number,
            read_unix_ms,
            opened("header", header, SessionHeader),
            opened("position", position, SessionPosition),
            opened("checkpoint", checkpoint, SessionCheckpoint),
            [opened("event", fields[b"d"], StoredEvent, number) for number, fields in _entries(events)],
            [opened("audio", fields[b"d"], StoredAudio, number - 1) for number, fields in _entries(audio)],
        )
        opened.check_age()
        return stored

    async def unclaim(self, session_id: str, epoch: int) -> None:
        await self._run(UNCLAIM, [(session_id, [epoch])])

    async def end(self, session_id: str, client: str, epoch: int, reason: str, ttl_ms: int) -> None:
        seal = _Sealer(self._cipher, session_id, epoch, 0)
        await self._run(END, [(session_id, [epoch, seal("gone", reason), ttl_ms, seal("client", client)])])

    async def close(self) -> None:
        await self._redis.aclose()

    # --- scripts ---------------------------------------------------------------------------------------

    def _keys(self, session_id: str) -> list[str]:
        name = f"{self._prefix}:{{{session_id}}}"
        return [name, f"{name}:audio", f"{name}:events"]

    async def _run(self, script: str, calls: Sequence[tuple[str, list[Any]]]) -> list[Any]:
        """Runs a script for each session, in one round trip. Returns its answer, or its error if it concerns only that
        session. Raises StoreUnavailable."""
        return await self._within(self._pipeline(script, calls))

    async def _pipeline(self, script: str, calls: Sequence[tuple[str, list[Any]]], *, again: bool = True) -> list[Any]:
        if script not in self._hashes:
            self._hashes[script] = await self._redis.script_load(script)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for session_id, arguments in calls:
                # By this name a cluster's pipeline takes it too: it goes to the master of the keys' slot.
                pipeline.execute_command("EVALSHA", self._hashes[script], 3, *self._keys(session_id), *arguments)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        # Redis was restarted, or its scripts were flushed: those did not run.
        missed = [index for index, answer in enumerate(answers) if isinstance(answer, self._no_script)]
        if missed:
            self._hashes.pop(script, None)
            if not again:
                raise answers[missed[0]]
            more = await self._pipeline(script, [calls[index] for index in missed], again=False)
            for index, answer in zip(missed, more, strict=True):
                answers[index] = answer
        for answer in answers:
            if isinstance(answer, Exception) and not self._concerns_session(answer):
                raise answer
        return answers

    def _concerns_session(self, error: Exception) -> bool:
        if type(error) is not self._refused:  # its subclasses are for states of the whole server
            return False
        return str(error).startswith(WRONG_TYPE) or ERROR_CODE.match(str(error)) is None

    async def _within(self, work: Awaitable[T]) -> T:
        """Awaits an answer of Redis. Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await work
            self._failed = False
            return answer
        except self._errors as error:
            self._failed = True
            # Callers are told what it means to them; where Redis is, and what it says, is the operator's.
            if isinstance(error, self._moved) and not self._is_cluster:
                why = "it is a node of a cluster: set sessions.redis_url to redis+cluster://..."
            else:
                why = f"{type(error).__name__} {error}"
            raise StoreUnavailable(
                "the store of sessions does not answer",
                "sessions of /v1/stream continue at their own server only",
                RETRY_MS,
            ) from OSError(f"Redis at {self._where}: {why}")


def create_store(sessions: SessionsConfig) -> RedisSessionStore:
    """Store of the settings; nothing is connected yet. Raises OptionError, UnsupportedOption."""
    assert sessions.redis_url is not None
    password = read_password(sessions.redis_password_file) if sessions.redis_password_file else None
    cipher = session_cipher(sessions.key_file)
    return RedisSessionStore(sessions.redis_url, sessions.prefix, sessions.timeout_ms / 1_000, cipher, password)


class _Sealer:
    """Seals records of one write. Its epoch and last event are before each record and in its associated data."""

    def __init__(self, cipher: SessionCipher, session_id: str, epoch: int, last_seq: int) -> None:
        self._cipher, self._age = cipher.of_session(session_id), AGE.pack(epoch, last_seq)

    def __call__(self, kind: str, record: msgspec.Struct | str, number: int = 0) -> bytes:
        place = self._age + f"{kind}/{number}".encode()
        return self._age + self._cipher.seal(msgspec.msgpack.encode(record), place)


class _Opener:
    """Opens records of one session."""

    def __init__(self, cipher: SessionCipher, session_id: str, epoch: int) -> None:
        """`epoch`: that of its owner."""
        self._cipher, self._epoch = cipher.of_session(session_id), epoch
        self._last_seqs: dict[str, int] = {}
        """Last event when the newest record of each kind was written."""

    def __call__(self, kind: str, data: bytes, type: type[T], number: int = 0) -> T:
        if len(data) < AGE.size:
            raise Unreadable("it is cut short")
        age = data[: AGE.size]
        epoch, self._last_seqs[kind] = AGE.unpack(age)
        if epoch > self._epoch:
            raise Unreadable("its owner is of a later epoch than the session's")
        opened = self._cipher.open(data[AGE.size :], age + f"{kind}/{number}".encode())
        return msgspec.msgpack.decode(opened, type=type)

    def check_age(self) -> None:
        """Raises Unreadable where state, position and events are not those of one time."""
        found = {self._last_seqs[kind] for kind in ("position", "checkpoint", "event") if kind in self._last_seqs}
        if len(found) > 1:
            raise Unreadable(f"its state, position and events are of different times: after the events {sorted(found)}")


def _entries(entries: Any) -> list[tuple[int, dict[bytes, bytes]]]:
    """Number and fields of each entry of a stream, as a script returns them."""
    return [
        (int(number.partition(b"-")[0]), dict(zip(fields[::2], fields[1::2], strict=True)))
        for number, fields in entries
    ]
