"""All sessions of /v1/stream: begun, waiting for a connection, gone on with, expired."""

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
"""Sessions that are gone and of which it is still known why."""

SessionOwner = Hashable
"""Whose a session is: nobody else may go on with it."""


class StreamSessionManager:
    """Belongs to the event loop's thread. A session holds a live seat from its beginning until its text is out,
    with a connection or without; the log of one that is over is kept a while, of so many as there are seats."""

    def __init__(
        self,
        limits: SessionLimits,
        resume_s: float,
        most: int,
        metrics: ServerMetrics,
        begin: Callable[[SessionOwner, NewSessionRequest], tuple[str, StartListener]],
    ) -> None:
        """`resume_s`: how long one waits for a connection. `most` that are over are kept. `begin`: a name,
        the model's, and what begins to hear with it; it raises UnknownModel, ModelNotLoaded, EngineClosed."""
        self._limits, self._resume_s, self._most, self._start_session = limits, resume_s, most, begin
        self._meter, self._resumes = metrics.live_route(PATH), metrics.resumes
        self._waiting = metrics.live_waiting
        self._sessions: dict[str, StreamSession] = {}
        self._owners: dict[str, SessionOwner] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._closed: dict[str, StreamSession] = {}
        self._tombstones: dict[str, tuple[SessionOwner, str]] = {}

    @contextmanager
    def connect(
        self, owner: SessionOwner, asked: NewSessionRequest | StreamResume, tell: FormatStreamError
    ) -> Iterator[tuple[StreamSession, StreamConnection]]:
        """For one connection: a new session, or the one that it goes on with. Without it, the session waits.

        Raises SessionExpired, EventsExpired, OptionError, UnknownModel, ModelNotLoaded, AtCapacity, EngineClosed.
        """
        if isinstance(asked, NewSessionRequest):
            session = self._create(owner, asked)
            connection = session.attach(0, tell, resumed=False)
        else:
            session = self.get(owner, asked.session_id)
            connection = self._resume(session, asked.after, tell)
        try:
            yield session, connection
        finally:
            if session.detach(connection) and session.info.session_id in self._sessions:
                if session.closed and session.info.session_id not in self._closed:
                    self.abort(session, "has ended")  # enough have ended since
                else:
                    self._await_reconnect(session)

    def get(self, owner: SessionOwner, session_id: str) -> StreamSession:
        """Raises SessionExpired: for somebody else's, too."""
        session = self._sessions.get(session_id)
        if session is None or self._owners[session_id] != owner:
            whose, why = self._tombstones.get(session_id, (None, ""))
            if whose != owner:
                why = "is none of this server's, or ended long ago"
            self._resumes.labels("session_expired").inc()
            kept_s = self._resume_s
            raise SessionExpired(
                f"the session {session_id[:64]!r} {why}",
                f"a session waits {kept_s:g} s for its client, and is kept so long once it has ended",
                "begin a new one",
            )
        return session

    def abort(self, session: StreamSession, why: str) -> None:
        """Now. `why`: it ..."""
        session_id = session.info.session_id
        if self._sessions.pop(session_id, None) is None:
            return
        self._cancel_expiry(session)
        self._closed.pop(session_id, None)
        self._tombstones[session_id] = self._owners.pop(session_id), why
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        session.abort()

    def drain(self) -> None:
        """The server goes down: finish what somebody listens to."""
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

    def _create(self, owner: SessionOwner, asked: NewSessionRequest) -> StreamSession:
        heard = create_live_decoder(asked.encoding, asked.rate_hz)
        model, begin = self._start_session(owner, asked)
        facts = StreamSessionInfo(
            secrets.token_hex(16), model, asked.encoding, self._resume_s, asked.options.words
        )
        session = StreamSession(facts, heard, self._limits, self._meter, begin, self._ended)
        self._sessions[facts.session_id], self._owners[facts.session_id] = session, owner
        return session

    def _resume(self, session: StreamSession, after: int, tell: FormatStreamError) -> StreamConnection:
        try:
            connection = session.attach(after, tell, resumed=True)
        except AsrServeError as error:
            self._resumes.labels(error.code).inc()
            raise
        self._cancel_expiry(session)
        self._resumes.labels("resumed").inc()
        return connection

    def _await_reconnect(self, session: StreamSession) -> None:
        """For another connection."""
        later = asyncio.get_running_loop().call_later
        self._expiries[session.info.session_id] = later(self._resume_s, self._expire, session)
        self._count()

    def _expire(self, session: StreamSession) -> None:
        self.abort(session, "has ended" if session.closed else f"waited {self._resume_s:g} s for its client")

    def _cancel_expiry(self, session: StreamSession) -> None:
        """It waits no longer."""
        if (expiry := self._expiries.pop(session.info.session_id, None)) is not None:
            expiry.cancel()
            self._count()

    def _count(self) -> None:
        """Those that wait, and hold a seat."""
        self._waiting.set(sum(not self._sessions[each].closed for each in self._expiries))

    def _ended(self, session: StreamSession) -> None:
        """Its text is out; its log stays for a while."""
        if session.info.session_id not in self._sessions:
            return
        self._count()
        self._closed[session.info.session_id] = session
        while len(self._closed) > self._most:
            oldest = self._closed.pop(next(iter(self._closed)))
            if oldest.connection is None:
                self.abort(oldest, "has ended")
