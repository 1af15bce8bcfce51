"""Conversation of one socket with a client of sherpa-onnx's servers: one live session, or recordings one by one.

Samples that cannot be read end the connection: these clients know no errors, and wait for text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Protocol

from starlette.types import Receive

from asr_serve import units
from asr_serve.errors import AsrServeError, AudioTooLarge, MalformedRequest, UnknownCommand
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.sherpa_onnx.messages import (
    DONE,
    DONE_ANSWER,
    HEADER_BYTES,
    SAMPLE_BYTES,
    OnlineAnswers,
    RecordingHeader,
    decode_samples,
    offline_answer,
    parse_header,
)
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.server.realtime.recording_session import RecordingSession

SLICE_BYTES = units.RATE_HZ * SAMPLE_BYTES
"""Bytes of a large frame that are written before `full` is checked again."""


class SherpaSessionFactory(Protocol):
    """Factory of sessions."""

    max_duration_s: float
    """Longest recording."""
    max_bytes: int
    """Most bytes of a recording."""

    def start_live(self, on_events: Callable[[list[LiveEvent]], None]) -> AsyncListener:
        """Starts a live session. Raises AtCapacity, ModelNotLoaded, EngineClosed."""

    def start_recording(self, header: RecordingHeader) -> RecordingSession:
        """Starts the session of a recording. Raises as `start_live` does."""


class SherpaConversation:
    """Sessions over one WebSocket. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        factory: SherpaSessionFactory,
        limits: SessionLimits,
        format_error: Callable[[Exception], str],
        *,
        live: bool,
    ) -> None:
        """`live`: streaming samples come, otherwise recordings with their headers."""
        self._outbox, self._factory, self._limits, self._format_error = outbox, factory, limits, format_error
        self._live, self._loop = live, asyncio.get_running_loop()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._session: AsyncListener | RecordingSession | None = None
        self._answers = OnlineAnswers()
        self._header, self._missing_bytes = bytearray(), 0
        """Header so far, and bytes of its recording that have not come."""
        self._began_s = 0.0
        self._closed_samples = 0
        self.disconnected_in_session = False
        """Whether the client left before all its text was sent."""
        self.disconnect_code: int | None = None
        """Close code of the client; 1005 when it sent none."""

    @property
    def completed(self) -> bool:
        """Returns whether the conversation has ended as the client asked, and its socket is open."""
        return self._lifecycle.completed

    @property
    def received_samples(self) -> int:
        return self._closed_samples + (0 if self._session is None else self._session.received_samples)

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._session is not None

    @property
    def started_s(self) -> float | None:
        return None if self._session is None or self._lifecycle.finishing else self._began_s

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        if (frame := message.get("bytes")) is None:
            await self._on_text(message.get("text") or "")
            return
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed",
                "send audio in smaller frames, like 100 ms",
            )
        await (self._on_samples(frame) if self._live else self._on_recording(memoryview(frame)))

    def send_error(self, error: AsrServeError) -> None:
        self._outbox.send(self._format_error(error))

    def finish(self) -> None:
        if self._session is not None:
            self._session.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """Sends nothing: the error itself is the last message."""

    async def close(self) -> None:
        if (session := self._session) is not None:
            await session.close()
            self._closed_samples += session.received_samples
            self._session = None

    # --- messages -------------------------------------------------------------------------------------

    async def _on_text(self, text: str) -> None:
        if text != DONE:
            raise UnknownCommand(f"the text {quote_for_message(text)} came", f"the text {DONE}, behind the samples")
        if not self._live:
            await self._lifecycle.wait_finished()
            if self._session is not None or self._header:
                raise MalformedRequest(
                    f"{DONE} came, and {self._missing_bytes} bytes of a recording had not",
                    "as many as its header announces",
                )
            self._lifecycle.complete()
        elif self._session is None:
            self._complete_live()
        else:
            self._lifecycle.finish()

    async def _on_samples(self, frame: bytes) -> None:
        if self._lifecycle.finishing:
            return
        session = self._session
        if session is None:
            session = self._session = self._factory.start_live(self._on_events)
            self._start(self._run_live(session))
        assert isinstance(session, AsyncListener)
        rest = memoryview(frame)
        while rest and not self._lifecycle.finishing:
            if session.full:
                await self._lifecycle.pause_reading(session.wait_writable())
            else:
                session.write(decode_samples(rest[:SLICE_BYTES]))
                rest = rest[SLICE_BYTES:]
        self._lifecycle.check_audio_limit(session.received_samples)

    async def _on_recording(self, rest: memoryview) -> None:
        while rest:
            await self._lifecycle.wait_finished()
            if self._lifecycle.end_reason is not None:
                return
            if self._session is None:
                rest = self._read_header(rest)
                continue
            assert isinstance(self._session, RecordingSession)
            part, rest = rest[: self._missing_bytes], rest[self._missing_bytes :]
            self._session.write(part)
            self._missing_bytes -= len(part)
            if not self._missing_bytes:
                self._lifecycle.finish()

    def _read_header(self, rest: memoryview) -> memoryview:
        """Reads the header of the next recording; returns what is behind it."""
        missing = HEADER_BYTES - len(self._header)
        self._header += rest[:missing]
        if len(self._header) == HEADER_BYTES:
            header = parse_header(bytes(self._header), self._factory.max_duration_s, self._factory.max_bytes)
            self._header.clear()
            self._missing_bytes = header.size_bytes
            session = self._session = self._factory.start_recording(header)
            self._start(self._run_recording(session))
            if not header.size_bytes:
                self._lifecycle.finish()
        return rest[missing:]

    # --- sessions -------------------------------------------------------------------------------------

    def _start(self, work: Any) -> None:
        self._began_s = self._loop.time()
        self._lifecycle.start_session(work)

    async def _run_live(self, session: AsyncListener) -> None:
        await session.run()
        await self.close()
        self._complete_live()
        self._lifecycle.session_done()

    def _complete_live(self) -> None:
        """Sends the last answers, and ends the conversation unless an error does."""
        self._outbox.send_replacing_state(self._answers.end())
        self._outbox.send(DONE_ANSWER)
        if self._lifecycle.end_reason is None:
            self._lifecycle.complete()

    async def _run_recording(self, session: RecordingSession) -> None:
        transcript = await session.transcribe()
        await self.close()
        self._outbox.send(offline_answer(transcript))
        self._lifecycle.session_done()

    def _on_events(self, events: list[LiveEvent]) -> None:
        for event in events:
            match event:
                case LiveSegmentDone(segment):
                    self._outbox.send_replacing_state(self._answers.segment(segment))
                case LivePartial():
                    start_s = round(units.samples_to_s(event.start_samples), 2)
                    self._outbox.send_state(partial(self._answers.partial, event.text, start_s))
