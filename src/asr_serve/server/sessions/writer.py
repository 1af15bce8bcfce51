"""Writes live sessions to their store, behind them: what many sessions have to write while a batch is in flight is the
next batch. While the store is away, sessions continue in memory; when it is back, each is written whole."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from asr_serve.errors import StoreUnavailable
from asr_serve.metrics import SessionStoreMetrics
from asr_serve.server.sessions.records import SessionStore, SessionWrite, WriteOutcome

log = logging.getLogger(__name__)

MAX_BATCH = 64
"""Sessions in one batch."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Delays before attempts to reach the store; the last one repeats."""
BUSY_RETRY_S = 0.02
"""Delay before a session that could not be written is asked again, unless it reports a change before."""


class JournaledSession(Protocol):
    """Session that is written to a store."""

    @property
    def lease(self) -> tuple[str, int]:
        """Id and epoch."""

    def next_write(self) -> SessionWrite | None:
        """Returns what is to be written now; None: nothing, or not now."""

    @property
    def is_due(self) -> bool:
        """Whether something is to be written."""

    def on_written(self, write: SessionWrite) -> None: ...

    def on_missing(self) -> None:
        """The store does not have the session: it must be written whole."""

    def on_refused(self) -> None:
        """Another server has claimed the session."""

    def on_store_lost(self) -> None:
        """The store is away: nothing waits for it, and the session must be written whole when it is back."""


class SessionWriter:
    """Writer of all sessions of a server. Belongs to the event loop's thread."""

    def __init__(self, store: SessionStore, ttl_ms: int, meter: SessionStoreMetrics) -> None:
        """`ttl_ms`: time limit of the keys of a session that nobody writes or renews."""
        self.store, self.ttl_ms, self._meter = store, ttl_ms, meter
        self.up = False
        """Whether the store answers."""
        self._sessions: set[JournaledSession] = set()
        self._dirty: dict[JournaledSession, None] = {}
        self._awake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        try:
            await self.store.ping()
        except StoreUnavailable as error:
            log.warning("%s; until it does, sessions are in memory", error)
        else:
            self._set_up(True)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._renew())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._lose()
        await self.store.close()

    def register(self, session: JournaledSession) -> None:
        self._sessions.add(session)

    def unregister(self, session: JournaledSession) -> None:
        self._sessions.discard(session)
        self._dirty.pop(session, None)

    def wake(self, session: JournaledSession) -> None:
        """Reports that a session has something to write."""
        if session in self._sessions and session not in self._dirty:
            self._dirty[session] = None
            self._awake.set()

    async def _run(self) -> None:
        while True:
            if not self.up:
                await self._find_store()
            await self._awake.wait()
            self._awake.clear()
            while self._dirty and self.up:
                await self._write_batch()

    async def _write_batch(self) -> None:
        batch = list(self._dirty)[:MAX_BATCH]
        for session in batch:
            del self._dirty[session]
        writes = [(session, write) for session in batch if (write := session.next_write()) is not None]
        for session in set(batch) - {session for session, _ in writes}:
            if session.is_due:
                asyncio.get_running_loop().call_later(BUSY_RETRY_S, self.wake, session)
        if not writes:
            return
        started_s = time.perf_counter()
        try:
            outcomes = await self.store.write([write for _, write in writes])
        except StoreUnavailable as error:
            log.warning("%s; sessions continue in memory", error)
            self._lose()
            return
        self._meter.write.observe(time.perf_counter() - started_s)
        for (session, write), outcome in zip(writes, outcomes, strict=True):
            if session in self._sessions:
                self._deliver(session, write, outcome)

    def _deliver(self, session: JournaledSession, write: SessionWrite, outcome: WriteOutcome) -> None:
        match outcome:
            case WriteOutcome.WRITTEN:
                session.on_written(write)
            case WriteOutcome.MISSING:
                session.on_missing()
                self._meter.rewritten.inc()
            case WriteOutcome.REFUSED:
                self._meter.refused.inc()
                session.on_refused()
        if session in self._sessions and session.is_due:
            self.wake(session)

    async def _renew(self) -> None:
        """Prolongs the time limits of all sessions, for those that write nothing."""
        while True:
            await asyncio.sleep(self.ttl_ms / 4_000)
            sessions = list(self._sessions)
            for at in range(0, len(sessions), MAX_BATCH):
                batch = [session for session in sessions[at : at + MAX_BATCH] if session in self._sessions]
                if not self.up or not batch:
                    break
                try:
                    outcomes = await self.store.renew([session.lease for session in batch], self.ttl_ms)
                except StoreUnavailable:
                    break  # the next write notices it
                for session, outcome in zip(batch, outcomes, strict=True):
                    if session not in self._sessions:
                        continue
                    if outcome is WriteOutcome.REFUSED:
                        self._meter.refused.inc()
                        session.on_refused()
                    elif outcome is WriteOutcome.MISSING:
                        session.on_missing()
                        self.wake(session)

    async def _find_store(self) -> None:
        attempt = 0
        while not self.up:
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
            try:
                await self.store.ping()
            except StoreUnavailable:
                continue
            log.warning("the store of sessions answers again; %d sessions are written whole", len(self._sessions))
            self._set_up(True)
            for session in self._sessions:
                self.wake(session)

    def _lose(self) -> None:
        self._set_up(False)
        for session in list(self._sessions):
            session.on_store_lost()
        self._awake.set()

    def _set_up(self, up: bool) -> None:
        self.up = up
        self._meter.up.set(up)
