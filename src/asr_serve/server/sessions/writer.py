"""Writes live sessions to their store, behind them: what many sessions have to write while a batch is in flight is the
next batch. While the store is away, sessions continue in memory; when it is back, each is written whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from asr_serve.errors import StoreUnavailable
from asr_serve.metrics import SessionStoreMetrics
from asr_serve.server.sessions.records import SessionStore, SessionWrite, WriteOutcome

log = logging.getLogger(__name__)

MAX_BATCH = 64
"""Sessions in one batch."""
MAX_BATCH_BYTES = 1 << 20
"""Audio and events in one batch, up to the last session in it."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Delays before attempts to write to the store; the last one repeats. The first is next once a session was written."""
FAILED_RETRY_S = 1.0
"""Delay before a session whose write the store refused is written whole."""
CHECK_S = 2.0
"""Time without a write after which the store is asked whether it is there: else nobody would know it of a server whose
callers are silent."""
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
        """Returns whether something is to be written."""

    def on_written(self, write: SessionWrite) -> None: ...

    def on_missing(self) -> None:
        """The store does not have the session: it must be written whole."""

    def on_refused(self) -> None:
        """Another server has claimed the session."""

    def on_store_lost(self) -> None:
        """The store is away, or refuses this session: nothing waits for it, and the session must be written whole
        later."""

    def on_failed(self) -> None:
        """The session raised an error: it is written no more, and ends here."""


class SessionWriter:
    """Writer of all sessions of a server. Belongs to the event loop's thread."""

    def __init__(self, store: SessionStore, ttl_ms: int, meter: SessionStoreMetrics) -> None:
        """`ttl_ms`: time limit of the keys of a session that nobody writes or renews."""
        self.store, self.ttl_ms, self._meter = store, ttl_ms, meter
        self.up = False
        """Whether the store accepts writes."""
        self._sessions: set[JournaledSession] = set()
        self._dirty: dict[JournaledSession, None] = {}
        self._resting: set[JournaledSession] = set()
        """Sessions that the store has refused, for now."""
        self._failures = 0
        """Attempts to write since the last one that succeeded."""
        self._awake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        try:
            await self.store.ping()
        except StoreUnavailable as error:
            log.warning("%s (%s); until it does, sessions are in memory", error, error.__cause__)
        else:
            self._set_up(True)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._renew())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

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
        self._resting.discard(session)

    def serves(self, session: JournaledSession) -> bool:
        """Returns whether the session is written."""
        return self.up and session in self._sessions and session not in self._resting

    def wake(self, session: JournaledSession) -> None:
        """Reports that a session has something to write."""
        if session in self._sessions and session not in self._dirty and session not in self._resting:
            self._dirty[session] = None
            self._awake.set()

    async def _run(self) -> None:
        while True:
            if not self.up:
                await self._find_store()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._awake.wait()
            if not self._awake.is_set():
                await self._check_store()
            self._awake.clear()
            while self._dirty and self.up:
                await self._write_batch()

    async def _check_store(self) -> None:
        try:
            await self.store.ping()
        except StoreUnavailable as error:
            self._lose(error)
        else:
            self._failures = 0

    async def _write_batch(self) -> None:
        writes: list[tuple[JournaledSession, SessionWrite]] = []
        for session in list(self._dirty)[:MAX_BATCH]:
            self._dirty.pop(session, None)
            self._guard(session, self._collect, session, writes)
            if sum(write.payload_bytes for _, write in writes) >= MAX_BATCH_BYTES:
                break
        if not writes:
            return
        started_s = time.perf_counter()
        try:
            outcomes = await self.store.write([write for _, write in writes])
        except StoreUnavailable as error:
            self._lose(error)
            return
        except Exception:
            log.exception("a batch of writes failed")
            self._lose()
            return
        self._failures = 0
        self._meter.write.observe(time.perf_counter() - started_s)
        for (session, write), outcome in zip(writes, outcomes, strict=True):
            if session in self._sessions:
                self._guard(session, self._deliver, session, write, outcome)

    def _collect(self, session: JournaledSession, writes: list[tuple[JournaledSession, SessionWrite]]) -> None:
        """Appends what a session has to write."""
        if (write := session.next_write()) is not None:
            writes.append((session, write))
        elif session.is_due:
            asyncio.get_running_loop().call_later(BUSY_RETRY_S, self.wake, session)

    def _guard(self, session: JournaledSession, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a method of a session. An error ends that session, and no other."""
        try:
            call(*arguments)
        except Exception:
            log.exception("the session %s cannot be stored", session.lease[0])
            self.unregister(session)
            try:
                session.on_failed()
            except Exception:
                log.exception("the session %s cannot be ended", session.lease[0])

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
            case WriteOutcome.FAILED:
                self._resting.add(session)
                session.on_store_lost()
                asyncio.get_running_loop().call_later(FAILED_RETRY_S, self._end_rest, session)
        if session in self._sessions and session.is_due:
            self.wake(session)

    def _end_rest(self, session: JournaledSession) -> None:
        self._resting.discard(session)
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
                except StoreUnavailable as error:
                    self._lose(error)
                    break
                for session, outcome in zip(batch, outcomes, strict=True):
                    if session not in self._sessions:
                        continue
                    if outcome is WriteOutcome.REFUSED:
                        self._meter.refused.inc()
                        self._guard(session, session.on_refused)
                    elif outcome is WriteOutcome.MISSING:
                        self._guard(session, session.on_missing)
                        self.wake(session)

    async def _find_store(self) -> None:
        while not self.up:
            await asyncio.sleep(RETRY_S[min(self._failures, len(RETRY_S) - 1)])
            self._failures += 1
            try:
                await self.store.ping()
            except StoreUnavailable:
                continue
            log.warning("the store of sessions accepts writes; %d sessions are written whole", len(self._sessions))
            self._set_up(True)
            for session in self._sessions:
                self.wake(session)

    def _lose(self, why: StoreUnavailable | None = None) -> None:
        """Continues all sessions in memory. `why`: where the store is away."""
        if why is not None and not self._failures:
            log.warning("%s (%s); sessions continue in memory", why, why.__cause__)
        self._set_up(False)
        for session in list(self._sessions):
            self._guard(session, session.on_store_lost)
        self._awake.set()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """A task that ended by an error takes the other one along: sessions continue in memory."""
        if task.cancelled() or (failure := task.exception()) is None:
            return
        log.error("sessions are stored no more, for their writer failed", exc_info=failure)
        for other in self._tasks:
            other.cancel()
        self._lose()

    def _set_up(self, up: bool) -> None:
        self.up = up
        self._meter.up.set(up)
