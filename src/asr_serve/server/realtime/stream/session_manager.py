"""Sessions of /v1/stream: created, waiting for a connection, resumed, expired."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from asr_serve.audio.stream_decoder import LiveAudioDecoder, create_live_decoder
from asr_serve.errors import AsrServeError, Draining, SessionExpired, StoreUnavailable, TakenOver, UnsupportedOption
from asr_serve.metrics import ServerMetrics
from asr_serve.protocols.stream.client_messages import PATH, NewSessionRequest, StreamResume
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.realtime.lifecycle import DRAIN_RETRY_MS, SessionLimits
from asr_serve.server.realtime.stream.connection import FormatStreamError, StreamConnection
from asr_serve.server.realtime.stream.journal import SessionJournal, Settled
from asr_serve.server.realtime.stream.session import RESUME_RETRY_MS, StartListener, StreamSession, StreamSessionInfo
from asr_serve.server.sessions.cipher import Unreadable
from asr_serve.server.sessions.records import SessionHeader, StoredSession
from asr_serve.server.sessions.writer import SessionWriter

log = logging.getLogger(__name__)

MAX_CLAIMS = 3
"""Attempts to claim a session that others claim at the same time."""
STORE_RETRY_MS = 1_000
MAX_TOMBSTONES = 4_096
"""Removed sessions whose reason for removal is kept."""

SessionOwner = Hashable
"""Owner of a session: nobody else may resume it."""


BeginSession = Callable[
    [SessionOwner, NewSessionRequest, contextlib.ExitStack, RequestContext | None], tuple[str, StartListener]
]
"""Reserves what a session needs, and returns its model's name and how its listener is started."""


class SessionStorage(NamedTuple):
    """Storage of sessions outside the server, and its settings."""

    writer: SessionWriter
    client_id: Callable[[SessionOwner], str]
    """Returns what identifies a session's owner to all servers."""
    checkpoint_ms: int


def is_storable(request: NewSessionRequest) -> bool:
    """Returns whether a session can be stored: the state of its recognition can be exported."""
    return not request.options.speakers


class StreamSessionManager:
    """Sessions of one server. A session counts as live from its start until its text is complete, with or without
    a connection; the logs of the last ended sessions are kept. Belongs to the event loop's thread."""

    def __init__(
        self,
        limits: SessionLimits,
        resume_s: float,
        max_ended: int,
        metrics: ServerMetrics,
        begin: BeginSession,
        storage: SessionStorage | None = None,
    ) -> None:
        """`resume_s`: how long a session waits for a connection. `max_ended`: ended sessions to keep. `begin`
        reserves, on a stack, what a session needs, and returns a model's name and how to start its listener, which
        takes the reservation over; raises UnknownModel, ModelNotLoaded, AtCapacity, EngineClosed, NotAllowed.
        `storage`: where sessions are stored outside the server."""
        self._limits, self._resume_s, self._most, self._start_session = limits, resume_s, max_ended, begin
        self._meter, self._resumes = metrics.live_route(PATH), metrics.resumes
        self._waiting = metrics.live_waiting
        self._sessions: dict[str, StreamSession] = {}
        self._owners: dict[str, SessionOwner] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._closed: dict[str, StreamSession] = {}
        self._tombstones: dict[str, tuple[SessionOwner, str]] = {}
        self._storage = storage
        self._claims: dict[str, tuple[asyncio.Lock, int]] = {}
        """Locks of sessions that are being found for a connection, and how many hold or await each."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if self._storage is not None:
            await self._storage.writer.start()

    @property
    def store_state(self) -> str | None:
        """State of the store: connected, or away; None: there is none."""
        return None if self._storage is None else "connected" if self._storage.writer.up else "away"

    @asynccontextmanager
    async def connect(
        self,
        owner: SessionOwner,
        request: NewSessionRequest | StreamResume,
        format_error: FormatStreamError,
        context: RequestContext | None = None,
    ) -> AsyncIterator[tuple[StreamSession, StreamConnection]]:
        """Opens or resumes a session for one connection. When that closes, the session waits for another.

        `context`: of the connection, by which a policy chooses the model. Raises SessionExpired, EventsExpired,
        OptionError, UnknownModel, ModelNotLoaded, AtCapacity, EngineClosed, NotAllowed, StoreUnavailable.
        """
        if isinstance(request, NewSessionRequest):
            session = await self._create_stored(owner, request, context)
            connection = session.attach(0, format_error, resumed=False)
        else:
            session = await self._find(owner, request)
            connection = self._resume(session, request.after, format_error)
        try:
            yield session, connection
        finally:
            if session.detach(connection) and self._has(session):
                if session.closed and session.info.session_id not in self._closed:
                    self.abort(session, "has ended")  # enough have ended since
                else:
                    self._await_reconnect(session)

    def get(self, owner: SessionOwner, session_id: str) -> StreamSession:
        """Session of that id. Raises SessionExpired, also if its owner is another."""
        session = self._sessions.get(session_id)
        if session is None or self._owners[session_id] != owner:
            former_owner, reason = self._tombstones.get(session_id, (None, ""))
            if former_owner != owner:
                reason = "is none of this server's, or ended long ago"
            self._resumes.labels("session_expired").inc()
            resume_s = self._resume_s
            raise SessionExpired(
                f"the session {session_id[:64]!r} {reason}",
                f"a session waits {resume_s:g} s for its client, and is kept so long once it has ended",
                "begin a new one",
            )
        return session

    async def _find(self, owner: SessionOwner, request: StreamResume) -> StreamSession:
        """Session of a request, from the store if it is not here, or not here any more. Where the store answers,
        everything that its client has sent is stored when this returns. Raises as `connect` does."""
        session_id = request.session_id
        if self._storage is None:
            return self.get(owner, session_id)
        async with self._claiming(session_id):
            session = self._sessions.get(session_id)
            own = session is not None and self._owners[session_id] == owner
            journal = session.journal if session is not None and own else None
            if session is not None and journal is not None:
                settled = await journal.settle()
                if settled is Settled.LOST or request.epoch > journal.epoch:
                    self.abort(session, "was continued by another server", keep_stored=True)
                elif settled is not Settled.STORED:
                    # Perhaps another server has claimed it since this one lost the store.
                    self._check_position(request, session.log.last_seq, session.received_bytes)
            if session_id not in self._sessions:
                await self._take_over(owner, request, self._storage)
            return self.get(owner, session_id)

    def _check_position(self, request: StreamResume, last_seq: int, received_bytes: int) -> None:
        """Raises StoreUnavailable where the client has more of a session than that: another server has the rest."""
        if request.after > last_seq or request.received > received_bytes:
            raise StoreUnavailable(
                f"after={request.after} and received={request.received}, and of this session events up to {last_seq} "
                f"and {received_bytes} bytes of audio are here",
                "another server has the rest, and stores it when it can",
                RESUME_RETRY_MS,
            )

    @asynccontextmanager
    async def _claiming(self, session_id: str) -> AsyncIterator[None]:
        """Holds the lock of a session that is being found, one at a time."""
        lock, users = self._claims.get(session_id) or (asyncio.Lock(), 0)
        self._claims[session_id] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            users = self._claims[session_id][1] - 1
            self._claims[session_id] = lock, users
            if not users:
                del self._claims[session_id]

    def _has(self, session: StreamSession) -> bool:
        """Returns whether that session, and no later one of the same id, is live here."""
        return self._sessions.get(session.info.session_id) is session

    async def _take_over(self, owner: SessionOwner, request: StreamResume, storage: SessionStorage) -> None:
        """Claims a session that is in the store and continues it here, unless its client has more of it than is stored:
        its server continues it in memory, cut off from the store, and would lose it. Raises StoreUnavailable."""
        session_id = request.session_id
        try:
            for _ in range(MAX_CLAIMS):
                stored = await storage.writer.store.read(session_id, storage.client_id(owner))
                if stored is None:
                    return
                if isinstance(stored, str):
                    self._add_tombstone(session_id, owner, stored)
                    return
                self._check_position(request, stored.checkpoint.last_seq, stored.position.received_bytes)
                if await self._claim(owner, stored, storage):
                    break
            else:
                raise StoreUnavailable("other servers claim this session", "one connection at a time", RESUME_RETRY_MS)
        except (Unreadable, ValueError, msgspec.MsgspecError) as failure:
            log.error("the stored session %s cannot be continued: %s", session_id, failure)
            self._resumes.labels(StoreUnavailable.code).inc()
            # Not its end: its owner may be there, or a server that has its key.
            raise StoreUnavailable(
                "this session is stored in a way that this server cannot read",
                "its own server continues it",
                STORE_RETRY_MS,
            ) from failure
        except AsrServeError as error:
            self._resumes.labels(error.code).inc()
            raise
        self._resumes.labels("taken_over").inc()

    async def _claim(self, owner: SessionOwner, read: StoredSession, storage: SessionStorage) -> bool:
        """Claims a session and continues it, once it is certain that this server can: until then its owner keeps it.
        False: it was claimed or ended meanwhile."""
        header, start = read.header, None
        request = msgspec.structs.replace(header.request, model=header.model)
        decoder, model = create_live_decoder(request.encoding, request.rate_hz), header.model
        with contextlib.ExitStack() as reserved:
            if read.checkpoint.live is not None:
                read.audio_from(read.checkpoint.live.audio_from)
                # Without a context: a session that goes on stays with its model, whatever the policy says by now.
                model, start = self._start_session(owner, request, reserved, None)
            claiming = asyncio.ensure_future(
                storage.writer.store.claim(read, storage.client_id(owner), storage.writer.ttl_ms)
            )
            try:
                stored = await asyncio.shield(claiming)
            except asyncio.CancelledError:  # the client left: its owner, if it is still there, keeps the session
                self._start(self._unclaim(claiming, storage))
                raise
            if not isinstance(stored, StoredSession):
                return False
            try:
                self._add(owner, read.session_id, model, request, decoder, start, stored)
            except BaseException:
                # The engine has no room after all, say: its owner, if it is still there, has not been refused yet.
                await self._unclaim(claiming, storage)
                raise
        return True

    async def _unclaim(self, claiming: asyncio.Future[StoredSession | str | None], storage: SessionStorage) -> None:
        """Gives back what a claim brings."""
        with contextlib.suppress(StoreUnavailable, Unreadable, ValueError, msgspec.MsgspecError):
            if isinstance(stored := await claiming, StoredSession):
                await storage.writer.store.unclaim(stored.session_id, stored.epoch)

    def abort(self, session: StreamSession, reason: str, *, keep_stored: bool = False) -> None:
        """Removes and cancels a session. `reason` is the predicate of a later error message. `keep_stored`: another
        server may continue it."""
        session_id = session.info.session_id
        if not self._has(session):
            return
        del self._sessions[session_id]
        if session.journal is not None and self._storage is not None:
            session.journal.close()
            if not keep_stored:
                self._start(self._end_stored(session.journal, reason, self._storage))
        self._cancel_expiry(session)
        self._closed.pop(session_id, None)
        self._add_tombstone(session_id, self._owners.pop(session_id), reason)
        session.abort()

    def _add_tombstone(self, session_id: str, owner: SessionOwner, reason: str) -> None:
        self._tombstones[session_id] = owner, reason
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    async def _end_stored(self, journal: SessionJournal, reason: str, storage: SessionStorage) -> None:
        with contextlib.suppress(StoreUnavailable):  # its keys have time limits
            session_id, epoch = journal.lease
            await storage.writer.store.end(session_id, journal.client, epoch, reason, storage.writer.ttl_ms)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _claimed_elsewhere(self, session: StreamSession) -> None:
        if session.connection is not None:
            session.connection.stop(
                TakenOver(
                    "another server goes on with this session", "one at a time", "go on there, or begin a new session"
                )
            )
        self.abort(session, "was continued by another server", keep_stored=True)

    def _failed(self, session: StreamSession) -> None:
        self.abort(session, "has failed here", keep_stored=True)

    async def _hand_over(self, session: StreamSession) -> None:
        reason = Draining("the server is going down", "another one continues the session", RESUME_RETRY_MS)
        if await session.leave(reason) is Settled.STORED:
            self.abort(session, "was handed over, for the server goes down", keep_stored=True)
        elif self._has(session):
            self._end_drained(session)

    def _end_drained(self, session: StreamSession) -> None:
        if session.connection is None:
            self.abort(session, "was dropped, for the server goes down")
        else:
            session.end(Draining("the server is going down", "it ends every session", DRAIN_RETRY_MS))

    def drain(self) -> None:
        """Hands over what is stored outside the server. Ends other sessions that have a connection and drops the
        rest, for the server goes down."""
        for session in list(self._sessions.values()):
            if session.journal is not None and session.journal.up:
                self._start(self._hand_over(session))
            else:
                self._end_drained(session)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)
        sessions = list(self._sessions.values())
        for session in sessions:
            self.abort(session, "was dropped, for the server goes down", keep_stored=True)
        for session in sessions:
            await session.wait_aborted()
        if self._storage is not None:
            await self._storage.writer.close()

    async def _create_stored(
        self, owner: SessionOwner, request: NewSessionRequest, context: RequestContext | None
    ) -> StreamSession:
        """Creates a session and stores it, if it can be. Raises as `connect` does."""
        if request.durable:
            self._expect_store()
        session = self._create(owner, request, context)
        if session.journal is None:
            return session
        settled = None
        try:
            settled = await session.journal.settle()
        finally:
            if settled is None:  # the client left
                self.abort(session, "was ended by its client")
        if not self._has(session):
            raise Draining("the server is going down", "no session was begun", RESUME_RETRY_MS)
        if request.durable and settled is not Settled.STORED:
            self.abort(session, "could not be stored")
            self._expect_store()
            raise self._store_away()
        return session

    def _expect_store(self) -> None:
        """Raises UnsupportedOption where sessions are not stored, StoreUnavailable where the store is away."""
        if self._storage is None:
            raise UnsupportedOption(
                "durable=true, and this server stores no sessions",
                "it is for servers with sessions.redis_url",
                "leave it out",
                param="durable",
            )
        if not self._storage.writer.up:
            raise self._store_away()

    def _store_away(self) -> StoreUnavailable:
        return StoreUnavailable(
            "durable=true, and the store of sessions is away", "without it, a session is in memory", STORE_RETRY_MS
        )

    def _create(self, owner: SessionOwner, request: NewSessionRequest, context: RequestContext | None) -> StreamSession:
        decoder = create_live_decoder(request.encoding, request.rate_hz)
        with contextlib.ExitStack() as reserved:
            model, start = self._start_session(owner, request, reserved, context)
            return self._add(owner, secrets.token_hex(16), model, request, decoder, start, None)

    def _add(
        self,
        owner: SessionOwner,
        session_id: str,
        model: str,
        request: NewSessionRequest,
        decoder: LiveAudioDecoder,
        start: StartListener | None,
        stored: StoredSession | None,
    ) -> StreamSession:
        info = StreamSessionInfo(
            session_id, model, request.encoding, self._resume_s, request.options.words is not False
        )
        storage = self._storage if is_storable(request) else None

        def open_journal(session: StreamSession, language: str) -> SessionJournal:
            assert storage is not None
            header = SessionHeader(model, language, request, time.time()) if stored is None else stored.header
            return SessionJournal(
                storage.writer,
                session,
                session_id,
                storage.client_id(owner),
                header,
                storage.checkpoint_ms,
                pcm16=decoder.is_pcm16,
                stored=stored,
            )

        session = StreamSession(
            info,
            decoder,
            self._limits,
            self._meter,
            start,
            self._ended,
            self._claimed_elsewhere,
            self._failed,
            None if storage is None else open_journal,
            stored,
        )
        self._sessions[session_id], self._owners[session_id] = session, owner
        return session

    def _resume(self, session: StreamSession, after: int, format_error: FormatStreamError) -> StreamConnection:
        try:
            connection = session.attach(after, format_error, resumed=True)
        except AsrServeError as error:
            self._resumes.labels(error.code).inc()
            raise
        self._cancel_expiry(session)
        self._resumes.labels("resumed").inc()
        return connection

    def _await_reconnect(self, session: StreamSession) -> None:
        """Keeps a session for `resume_s`, so that another connection can resume it."""
        call_later = asyncio.get_running_loop().call_later
        self._expiries[session.info.session_id] = call_later(self._resume_s, self._expire, session)
        self._count()

    def _expire(self, session: StreamSession) -> None:
        self.abort(session, "has ended" if session.closed else f"waited {self._resume_s:g} s for its client")

    def _cancel_expiry(self, session: StreamSession) -> None:
        """Ends the wait of a session for a connection."""
        if (expiry := self._expiries.pop(session.info.session_id, None)) is not None:
            expiry.cancel()
            self._count()

    def _count(self) -> None:
        """Updates the metric of live sessions that wait for a connection."""
        self._waiting.set(sum(not self._sessions[session_id].closed for session_id in self._expiries))

    def _ended(self, session: StreamSession) -> None:
        """Keeps an ended session, and drops the oldest ones beyond the limit."""
        if not self._has(session):
            return
        self._count()
        self._closed[session.info.session_id] = session
        while len(self._closed) > self._most:
            oldest = self._closed.pop(next(iter(self._closed)))
            if oldest.connection is None:
                self.abort(oldest, "has ended")
