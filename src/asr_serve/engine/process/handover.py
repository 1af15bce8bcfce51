"""Handover of live sessions and streams from an engine's old process to its new one, while both run."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal, NamedTuple

from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import ExportedStream
from asr_serve.engine.process.in_flight import InFlight, InFlightRequests, InFlightSession, InFlightStream
from asr_serve.transfer.sealed_buffer import SealedBuffer

MAX_STREAMS_MOVING = 8
"""Maximum streams that move at once. Each takes some MB of memory meanwhile, and its audio waits; other streams
continue."""

HandoverMode = Literal["state", "replay"]
"""Whether a session continued from its state or was replayed from its start."""
HandoverKind = Literal["session", "stream"]


class HandoverResult(NamedTuple):
    """Summary of a renewal: what moved to the new process, and how long it took."""

    sessions: int
    """Voice-activity sessions that moved, all with their state."""
    streams: int
    """Streams that moved with their state."""
    replayed: int
    """Streams that were replayed from their start instead."""
    repeated: int
    """Requests that the old process did not finish in time: the new one starts them again."""
    load_s: float
    """Time until the new process was ready."""
    total_s: float
    """Time until the old process was gone."""


class Handover:
    """Moves sessions and streams from an old process to a new one.

    Sessions move at once, streams a few at a time: the old process gets no more chunks of a stream, answers the
    ones it has and exports the state; the new one continues from it, with the chunks that arrived meanwhile.
    Streams that cannot be exported are replayed. Requests stay in the old process. Protected by the lock of
    Supervisor.
    """

    def __init__(self, old: InFlight, new: InFlight, *, streams_stay: bool = False) -> None:
        """`streams_stay`: leave streams in the old process until they end, where the new one has other weights."""
        self.old, self.new, self._streams_stay = old, new, streams_stay
        self.moved: Counter[tuple[HandoverKind, HandoverMode]] = Counter()
        self.repeated_requests = 0
        self.waited_s = 0.0
        """Total time that the audio of moving streams waited."""
        self._moving_since_s: dict[int, float] = {}
        """Streams that are moving, with the time since when, on the monotonic clock."""

    @property
    def finished(self) -> bool:
        return self.old.idle and not self._moving_since_s

    def start(self) -> None:
        for number, session in list(self.old.sessions.items()):
            if not isinstance(session, InFlightStream):
                self.old.close(number)
                self._transfer_session(number, session)
        self._move_more()

    def on_message(self, in_flight: InFlight, message: messages.ToServer | ExportedStream) -> None:
        """Handles a message after `in_flight` did."""
        match message:
            case messages.StreamOutput(session=number) | messages.RequestFailed(id=number, chunk=int()) if (
                in_flight is self.old
            ):
                if number in self._moving_since_s:
                    self._request_export(number)
            case ExportedStream(session=number, saved=saved) if in_flight is self.old:
                self._on_exported(number, saved)
            case ExportedStream(saved=SealedBuffer() as unused):
                unused.close()
            case messages.StreamOpened(session=number, failure=failure) if in_flight is self.new:
                self._on_arrived(number, "replay" if failure else "state")
            case messages.StreamOpened(session=number) if (
                number in self._moving_since_s
            ):  # from an earlier renewal that timed out
                self._request_export(number)

    def on_closed(self, number: int) -> None:
        """Handles a stream that was closed while it moved."""
        if self._moving_since_s.pop(number, None) is not None:
            self._move_more()

    def on_new_process_restarted(self) -> None:
        """Handles a restart of the new process: its streams were replayed."""
        for number in list(self._moving_since_s):
            stream = self.new.sessions.get(number)
            if isinstance(stream, InFlightStream) and not stream.restoring:
                self._on_arrived(number, "replay" if stream.answered_chunks else "state")

    def transfer_remaining(self) -> None:
        """Transfers the remaining work when the old process is gone or must go."""
        sessions, self.old.sessions = self.old.sessions, type(self.old.sessions)()
        for number, session in sessions.items():
            self._transfer_session(number, session)
        work, self.old.requests = self.old.requests, InFlightRequests()
        for request in work.values():
            request.started = False
            self.new.submit(request)
            self.repeated_requests += 1

    def _move_more(self) -> None:
        """Starts moving more streams, up to MAX_STREAMS_MOVING."""
        if self._streams_stay:
            return
        for number, stream in self.old.sessions.items():
            if len(self._moving_since_s) >= MAX_STREAMS_MOVING:
                return
            if number not in self._moving_since_s and isinstance(stream, InFlightStream):
                self._moving_since_s[number] = time.monotonic()
                stream.leaving = True
                self._request_export(number)

    def _request_export(self, number: int) -> None:
        """Requests the export once the process has answered all chunks that it was sent."""
        stream = self.old.sessions.get(number)
        if not isinstance(stream, InFlightStream):  # it has ended or failed
            self.on_closed(number)
        elif not stream.unanswered_chunks and not stream.restoring:
            self.old.send(messages.ExportStream(number))

    def _on_exported(self, number: int, saved: SealedBuffer | None) -> None:
        stream = self.old.sessions.get(number)
        if not isinstance(stream, InFlightStream):  # closed meanwhile
            if saved is not None:
                saved.close()
            return
        self.old.close(number)
        stream.saved = saved
        self._transfer_session(number, stream)

    def _transfer_session(self, number: int, session: InFlightSession) -> None:
        if not isinstance(session, InFlightStream):
            self.moved["session", "state"] += 1
            self.new.open(number, session)
            return
        session.leaving = session.restoring = False
        self._moving_since_s.setdefault(number, time.monotonic())
        self.new.open(number, session)
        if session.saved is None and not session.restoring:
            self._on_arrived(number, "replay" if session.answered_chunks else "state")

    def _on_arrived(self, number: int, how: HandoverMode) -> None:
        if (since_s := self._moving_since_s.pop(number, None)) is not None:
            self.moved["stream", how] += 1
            self.waited_s += time.monotonic() - since_s
            self._move_more()
