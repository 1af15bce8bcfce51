"""Uplink of one session: from its spool to a session of /v1/stream, whatever happens to the connection or the server.

Audio stays in the spool until the server has made final text of it. A lost connection is resumed; a server that does
not know the session any more is sent a new one, from the end of the last final segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from asr_serve.api.client.connection import ServerEvent, error_from_event
from asr_serve.api.client.stream import DUPLICATE_CODE, LOST_CODES, RETRY_S
from asr_serve.audio.pcm import SAMPLE_BYTES
from asr_serve.edge.audio_spool import AudioSpool
from asr_serve.edge.edge_events import (
    AudioDiscarded,
    EdgeEvent,
    LockedText,
    PartialText,
    SegmentText,
    ServerFound,
    ServerLost,
    SessionFailed,
    TurnTold,
)
from asr_serve.errors import Refused, Unreachable
from asr_serve.protocols.stream.client_messages import SILENCE
from asr_serve.protocols.stream.server_events import (
    AckEvent,
    EndEvent,
    LockedTextEvent,
    NumberedEvent,
    PartialEvent,
    SegmentEvent,
    SessionEvent,
    StreamErrorEvent,
    StreamTurnEvent,
)
from asr_serve.units import RATE_HZ, s_to_samples, samples_to_s

SEND_SAMPLES = 8_000
"""Most samples of a message."""
WINDOW_SAMPLES = 4 * RATE_HZ
"""Most samples sent and not acknowledged: no more has to be sent again after a resume."""
REPLAY_SAMPLES = 30 * RATE_HZ
"""Samples before the acknowledged position that are kept while no segment is final: longer than a segment can be."""
LEAD_SAMPLES = RATE_HZ // 2
"""Silence in front of the audio of a session that goes on for another: voice activity needs a beginning, and what was
there has its final text."""
END_TIMEOUT_S = 60.0
"""Longest wait, after the end of a call, for a server that is away."""
LOST_SESSION_CODES = {"session_expired", "events_expired", "taken_over", "out_of_step", "engine_crashed"}
"""Codes of refusals after which a new session goes on where text was final."""
CRASHED_CODE = "engine_crashed"
"""Code of the refusal of a session during which the engine died several times: its audio may be the cause."""
DRAINING_CODE = "draining"
"""Code of a server that goes down in order, and ends each session with what it has."""
END_TOLERANCE_SAMPLES = RATE_HZ // 100
"""Samples that may be missing of the duration that a server tells: it is rounded."""
END_MESSAGE = '{"type":"end"}'


class UplinkConnection(Protocol):
    """Connection to a session of /v1/stream, whatever carries it. One task may send while another receives. Its methods
    raise Unreachable, and `receive` Refused too."""

    @property
    def session(self) -> SessionEvent:
        """The first event."""

    async def send(self, message: bytes | str) -> None:
        """Sends audio, or a command; waits while the other side takes no more."""

    async def receive(self) -> ServerEvent:
        """Returns the next event."""

    async def close(self) -> None:
        """Closes the connection. Idempotent."""


OpenUplinkConnection = Callable[[Mapping[str, str]], Awaitable[UplinkConnection]]
"""Opens or resumes the session of a query. Raises Refused, Unreachable."""


class Uplink:
    """Uplink of one session. `run` it as a task; call `wake` when the spool has grown or ended.

    Out     `on_event`: events of the session, with times of the whole session
    """

    def __init__(
        self,
        open_connection: OpenUplinkConnection,
        query: Mapping[str, str],
        spool: AudioSpool,
        on_event: Callable[[EdgeEvent], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`query`: parameters of /v1/stream but for the encoding."""
        self._open_connection, self._spool, self._tell, self._clock = open_connection, spool, on_event, clock
        self._query = {**query, "encoding": "s16le", "rate": str(RATE_HZ)}
        self._more = asyncio.Event()
        self._session_id: str | None = None
        self._origin = 0
        """Position at which the server's session began."""
        self._first = 0
        """Position of the first audio of that session; silence leads up to it."""
        self._sent = self._arrived = self._durable = 0
        """Positions: sent, acknowledged, and acknowledged so that every server has the audio: that leaves the spool."""
        self._stored, self._epoch = False, 0
        """Whether the session was ever stored outside its server, and the newest claim of it."""
        self._final_end = 0
        """End of the last final segment."""
        self._last_seq = 0
        self._crash_end: int | None = None
        """End of the last final segment when the engine died over this session last."""
        self._resume_s = 0.0
        self._end_sent = False
        self.segments = 0
        self.connected = self._was_connected = False

    def wake(self) -> None:
        self._more.set()

    async def wait_for_audio(self) -> None:
        """Waits for the next `wake`."""
        await self._more.wait()
        self._more.clear()

    async def run(self) -> None:
        """Runs until the server has ended the session after the end of the audio, or refuses it for good."""
        try:
            while (connection := await self._connect()) is not None:
                self.connected = True
                try:
                    if await self._exchange(connection):
                        return
                finally:
                    self.connected = False
                    await connection.close()
        except Refused as refused:
            self._tell(SessionFailed(code=refused.code, message=str(refused)))

    # --- connections -----------------------------------------------------------------------------------

    async def _connect(self) -> UplinkConnection | None:
        """Opens or resumes a session; None where the call is over and the server stays away. Raises Refused."""
        lost_s = self._clock()
        told = False
        retry_after_s = 0.0
        for wait_s in itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1])):
            await asyncio.sleep(max(retry_after_s, wait_s * random.uniform(0.8, 1.2)))
            resuming = self._session_id is not None
            try:
                connection = await self._open()
            except Refused as refused:
                retry_after_s = (refused.retry_after_ms or 0) / 1_000
                if resuming and refused.code in LOST_SESSION_CODES:
                    self._forget_session(refused.code)
                    retry_after_s = 0.0
                    continue
                if not refused.is_retryable:
                    raise
                reason = str(refused)
            except Unreachable as error:
                retry_after_s, reason = 0.0, error.came
            else:
                if told or self._was_connected:
                    again = None if connection.session.resumed else samples_to_s(self._first)
                    if told or again is not None:
                        self._tell(ServerFound(position_s=samples_to_s(self._spool.end), again_from_s=again))
                self._was_connected = True
                return connection
            if not told:
                told = True
                self._tell(ServerLost(position_s=samples_to_s(self._spool.end), reason=reason))
            if self._spool.ended and self._clock() - lost_s > END_TIMEOUT_S:
                self._tell(
                    SessionFailed(code="unreachable", message=f"no server for {END_TIMEOUT_S:g} s after the end")
                )
                return None
        return None

    async def _open(self) -> UplinkConnection:
        if self._session_id is not None:
            query = {"session": self._session_id, "after": str(self._last_seq)}
            if self._stored:
                kept = max(0, self._spool.start - self._origin) * SAMPLE_BYTES
                query |= {"received": str(kept), "epoch": str(self._epoch)}
            connection = await self._open_connection(query)
        else:
            connection = await self._open_connection(self._query)
            # From the end of the last final segment; or where the spool begins, if it has given up more.
            self._first = max(self._final_end, self._spool.start)
            self._origin = self._first - min(LEAD_SAMPLES, self._first)
            self._last_seq = self._epoch = 0
            self._stored = False
        session = connection.session
        self._session_id, self._resume_s = session.session_id, session.resume_s
        self._arrived = self._sent = self._origin + session.received_bytes // SAMPLE_BYTES
        self._stored = self._stored or session.durable
        self._epoch = max(self._epoch, session.epoch)
        if session.durable or not self._stored:
            self._durable = self._arrived
        self._end_sent = False
        self._more.set()
        return connection

    def _forget_session(self, code: str | None = None) -> None:
        """Goes on with a new session, which is sent again what has no final text. Where the engine died over that
        twice, it is not sent a third time: it would kill the engine of all callers, again and again."""
        self._session_id, self._last_seq = None, 0
        if code != CRASHED_CODE:
            return
        if self._crash_end == self._final_end and self._sent > self._final_end:
            start, self._final_end = self._final_end, self._sent
            self._tell(AudioDiscarded(start_s=samples_to_s(start), end_s=samples_to_s(self._sent)))
        self._crash_end = self._final_end

    # --- one connection --------------------------------------------------------------------------------

    async def _exchange(self, connection: UplinkConnection) -> bool:
        """Sends and receives until the connection is lost or the server ends the session early, False, or the session
        has ended with its audio, True. Raises Refused."""
        sending = asyncio.create_task(self._send(connection))
        try:
            return await self._receive(connection)
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Unreachable):
                await sending

    async def _send(self, connection: UplinkConnection) -> None:
        while True:
            self._more.clear()
            if self._sent < self._first:
                lead, self._sent = self._first - self._sent, self._first
                await connection.send(_silence(lead))
            while self._sent < self._spool.end and self._sent - self._arrived < WINDOW_SAMPLES:
                audio = self._spool.read(self._sent, SEND_SAMPLES)
                if isinstance(audio, bytes):
                    self._sent += len(audio) // SAMPLE_BYTES
                    await connection.send(audio)
                else:
                    self._sent += audio.samples
                    await connection.send(_silence(audio.samples, noise=audio.noise))
            if self._spool.ended and self._sent == self._spool.end and not self._end_sent:
                self._end_sent = True
                await connection.send(END_MESSAGE)
            await self._more.wait()

    async def _receive(self, connection: UplinkConnection) -> bool:
        refused: Refused | None = None
        last_refused: Refused | None = None
        while True:
            try:
                event = await connection.receive()
            except Unreachable as lost:
                if refused is None:
                    return False
                if refused.code in LOST_SESSION_CODES:
                    self._forget_session(refused.code)
                    return False
                if refused.is_retryable or lost.close_code in LOST_CODES:
                    return False
                raise refused from None
            if isinstance(event, NumberedEvent):
                if event.seq <= self._last_seq:
                    continue
                self._last_seq = event.seq
            if isinstance(event, EndEvent):
                if self._has_all(event):
                    return True
                if last_refused is not None and not last_refused.is_retryable:
                    raise last_refused
                self._forget_session()
                return False
            refused = None
            if isinstance(event, StreamErrorEvent) and event.code != DUPLICATE_CODE:
                refused = last_refused = error_from_event(event)
                if event.code == DRAINING_CODE and not self._end_sent:
                    # What it would still make final is cut where the audio ended. The next server has all of it.
                    self._forget_session()
                    return False
            self._apply(event)

    def _has_all(self, event: EndEvent) -> bool:
        """Returns whether the end that a server tells is that of the audio."""
        return self._end_sent and s_to_samples(event.duration_s) >= self._sent - self._origin - END_TOLERANCE_SAMPLES

    def _apply(self, event: ServerEvent) -> None:
        origin_s = samples_to_s(self._origin)
        match event:
            case AckEvent(received_bytes=received, durable=durable):
                self._arrived = max(self._arrived, self._origin + received // SAMPLE_BYTES)
                if durable:
                    self._durable = self._arrived
                self._trim()
                self._more.set()
            case PartialEvent(start_s=start_s, end_s=end_s, text=text):
                self._tell(PartialText(start_s=origin_s + start_s, end_s=origin_s + end_s, text=text))
            case LockedTextEvent(start_s=start_s, end_s=end_s, text=text):
                self._tell(LockedText(start_s=origin_s + start_s, end_s=origin_s + end_s, text=text))
            case SegmentEvent():
                self._final_end = max(self._final_end, self._origin + s_to_samples(event.end_s))
                self._tell(
                    SegmentText(
                        index=self.segments,
                        start_s=origin_s + event.start_s,
                        end_s=origin_s + event.end_s,
                        text=event.text,
                        speaker=event.speaker,
                        spoken=event.spoken,
                        language=event.language,
                    )
                )
                self.segments += 1
                self._trim()
            case StreamTurnEvent(state=state, position_s=position_s, by=by):
                self._tell(TurnTold(state=state, position_s=origin_s + position_s, by=by))

    def _trim(self) -> None:
        self._spool.trim(min(self._durable, max(self._final_end, self._durable - REPLAY_SAMPLES)))


def _silence(samples: int, *, noise: bool = False) -> str:
    more = ',"noise":true' if noise else ""
    return f'{{"type":"{SILENCE}","samples":{samples}{more}}}'


def encode_event(session_id: str, event: EdgeEvent) -> bytes:
    """Encodes an event as JSON, with the session's id."""
    fields = msgspec.to_builtins(event)
    return msgspec.json.encode({"type": fields.pop("type"), "session": session_id, **fields})
