"""Sessions of /v1/stream: created, waiting for a connection, resumed, expired."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from asr_serve.audio.stream_decoder import create_live_decoder
from asr_serve.errors import AsrServeError, Draining, SessionExpired
from asr_serve.metrics import ServerMetrics
from asr_serve.protocols.stream.client_messages import PATH, NewSessionRequest, StreamResume
from asr_serve.server.realtime.lifecycle import DRAIN_RETRY_MS, SessionLimits
from asr_serve.server.realtime.stream.connection import FormatStreamError, StreamConnection
from asr_serve.server.realtime.stream.session import StartListener, StreamSession, StreamSessionInfo

MAX_TOMBSTONES = 4_096
"""Removed sessions whose reason for removal is kept."""

SessionOwner = Hashable
"""Owner of a session: nobody else may resume it."""


class StreamSessionManager:
    """Sessions of one server. A session counts as live from its start until its text is complete, with or without
    a connection; the logs of the last ended sessions are kept. Belongs to the event loop's thread."""

    def __init__(
        self,
        limits: SessionLimits,
        resume_s: float,
        max_ended: int,
        metrics: ServerMetrics,
        begin: Callable[[SessionOwner, NewSessionRequest], tuple[str, StartListener]],
    ) -> None:
        """`resume_s`: how long a session waits for a connection. `max_ended`: ended sessions to keep. `begin`
        returns a model's name and how to start its listener; raises UnknownModel, ModelNotLoaded, EngineClosed."""
        self._limits, self._resume_s, self._most, self._start_session = limits, resume_s, max_ended, begin
        self._meter, self._resumes = metrics.live_route(PATH), metrics.resumes
        self._waiting = metrics.live_waiting
        self._sessions: dict[str, StreamSession] = {}
        self._owners: dict[str, SessionOwner] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._closed: dict[str, StreamSession] = {}
        self._tombstones: dict[str, tuple[SessionOwner, str]] = {}

    @contextmanager
    def connect(
        self, owner: SessionOwner, request: NewSessionRequest | StreamResume, format_error: FormatStreamError
    ) -> Iterator[tuple[StreamSession, StreamConnection]]:
        """Opens or resumes a session for one connection. When that closes, the session waits for another.

        Raises SessionExpired, EventsExpired, OptionError, UnknownModel, ModelNotLoaded, AtCapacity, EngineClosed.
        """
        if isinstance(request, NewSessionRequest):
            session = self._create(owner, request)
            connection = session.attach(0, format_error, resumed=False)
        else:
            session = self.get(owner, request.session_id)
            connection = self._resume(session, request.after, format_error)
        try:
            yield session, connection
        finally:
            if session.detach(connection) and session.info.session_id in self._sessions:
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

    def abort(self, session: StreamSession, reason: str) -> None:
        """Removes and cancels a session. `reason` is the predicate of a later error message."""
        session_id = session.info.session_id
        if self._sessions.pop(session_id, None) is None:
            return
        self._cancel_expiry(session)
        self._closed.pop(session_id, None)
        self._tombstones[session_id] = self._owners.pop(session_id), reason
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        session.abort()

    def drain(self) -> None:
        """Ends sessions that have a connection and drops the others, for the server goes down."""
        for session in list(self._sessions.values()):
            if session.connection is None:
                self.abort(session, "was dropped, for the server goes down")
            else:
                session.end(Draining("the server is going down", "it ends every session", DRAIN_RETRY_MS))

    async def close(self) -> None:
        sessions = list(self._sessions.values())
        for session in sessions:
            self.abort(session, "was dropped, for the server goes down")
        for session in sessions:
            await session.wait_aborted()

    def _create(self, owner: SessionOwner, request: NewSessionRequest) -> StreamSession:
        decoder = create_live_decoder(request.encoding, request.rate_hz)
        model, start = self._start_session(owner, request)
        info = StreamSessionInfo(
            secrets.token_hex(16), model, request.encoding, self._resume_s, request.options.words is not False
        )
        session = StreamSession(info, decoder, self._limits, self._meter, start, self._ended)
        self._sessions[info.session_id], self._owners[info.session_id] = session, owner
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
        if session.info.session_id not in self._sessions:
            return
        self._count()
        self._closed[session.info.session_id] = session
        while len(self._closed) > self._most:
            oldest = self._closed.pop(next(iter(self._closed)))
            if oldest.connection is None:
                self.abort(oldest, "has ended")
