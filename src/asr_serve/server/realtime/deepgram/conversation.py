"""Conversation of one socket in Deepgram's `/v1/listen`: one session, from the first audio to CloseStream.

An invalid message is answered with an Error and changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
from starlette.types import Receive

from asr_serve.audio.container_stream import ContainerStreamDecoder
from asr_serve.audio.stream_decoder import create_live_decoder
from asr_serve.errors import AsrServeError, AtCapacity, AudioTooLarge, MalformedRequest
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import FlushDone, LiveEvent, LivePartial
from asr_serve.protocols.deepgram.listen_query import ENCODINGS, RAW_ENCODINGS, ListenQuery
from asr_serve.protocols.deepgram.listen_response import timestamp
from asr_serve.protocols.deepgram.live_messages import ListenResultsEncoder, parse_listen_command
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits
from asr_serve.server.realtime.outbox import Outbox

SLICES = 2
"""Slices per second of a large frame; `full` is checked again before each."""


class LiveDecoder(Protocol):
    """Decoder of a caller's bytes: LiveAudioDecoder, ContainerStreamDecoder."""

    @property
    def rate_hz(self) -> int: ...
    def decode(self, data: bytes | memoryview) -> np.ndarray: ...
    def drain_resampler(self) -> np.ndarray: ...
    def finish(self) -> np.ndarray: ...


class ListenSessionFactory(Protocol):
    """Factory of the session of one socket."""

    def start(self, on_events: Callable[[list[LiveEvent]], None]) -> AsyncListener:
        """Starts the session. Raises AtCapacity, ModelNotLoaded, EngineClosed."""


class DeepgramListenConversation:
    """Live transcription over one WebSocket. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        factory: ListenSessionFactory,
        limits: SessionLimits,
        format_error: Callable[[Exception], str],
        query: ListenQuery,
        encoder: ListenResultsEncoder,
        meter: LiveRouteMetrics,
        ignored: tuple[str, ...],
    ) -> None:
        """`ignored`: fields that had no effect. Raises OptionError for audio that cannot be decoded."""
        self._outbox, self._factory, self._limits, self._format_error = outbox, factory, limits, format_error
        self._query, self._encoder, self._meter, self._ignored = query, encoder, meter, ignored
        self._decoder = _create_decoder(query)
        self._created, self._digest = datetime.now(UTC), hashlib.sha256()
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._listener: AsyncListener | None = None
        self._closed_samples = 0
        """Samples of the closed session."""
        self.started_s: float | None = asyncio.get_running_loop().time()
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
        return self._closed_samples if self._listener is None else self._listener.received_samples

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._listener is not None

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        try:
            if (frame := message.get("bytes")) is None:
                self._on_command(parse_listen_command(message.get("text") or ""))
            elif frame:
                await self._on_audio(frame)
            else:
                self._close_stream()  # as older clients end it
        except (MalformedRequest, AudioTooLarge) as error:
            self.send_error(error)

    def send_error(self, error: AsrServeError) -> None:
        self._outbox.send(self._format_error(error))

    def finish(self) -> None:
        if self._listener is not None:
            self._listener.write(self._decoder.finish())
            self._listener.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active and self._encoder.busy

    def fail(self, error: AsrServeError) -> None:
        """Sends nothing: the error itself is the last message."""

    async def close(self) -> None:
        if (listener := self._listener) is not None:
            await listener.close()
            self._closed_samples, self._listener = listener.received_samples, None

    # --- messages -------------------------------------------------------------------------------------

    def _on_command(self, command: str) -> None:
        match command:
            case "Finalize":
                self._finalize()
            case "CloseStream":
                self._close_stream()
            case "Configure":
                self._outbox.send(self._encoder.configure_failure())
            # KeepAlive: it came, which is all that it is for

    async def _on_audio(self, frame: bytes) -> None:
        if self._lifecycle.finishing or self._lifecycle.end_reason is not None:
            return
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller frames, like 100 ms",
            )
        listener = self._listener or self._begin()
        self._digest.update(frame)
        # A packet of Opus is whole, other encodings may be cut anywhere.
        step = len(frame) if self._query.encoding == "opus" else self._decoder.rate_hz // SLICES
        rest = memoryview(frame)
        while rest and not self._lifecycle.finishing:
            if listener.full:
                await self._lifecycle.pause_reading(listener.wait_writable())
            else:
                listener.write(self._decoder.decode(rest[:step]))
                rest = rest[step:]
        self._lifecycle.check_audio_limit(listener.received_samples)

    def _finalize(self) -> None:
        if self._lifecycle.finishing:
            return
        if self._listener is None:
            self._send(self._encoder.on_events([FlushDone("", 0)]))
            return
        self._listener.write(self._decoder.drain_resampler())
        try:
            self._listener.flush("")
        except AtCapacity as error:
            self.send_error(error)

    def _close_stream(self) -> None:
        if self._listener is None:
            self._send_metadata()
        self._lifecycle.finish()

    # --- session --------------------------------------------------------------------------------------

    def _begin(self) -> AsyncListener:
        listener = self._listener = self._factory.start(self._on_events)
        listener.after_advance = self._on_advance
        self._lifecycle.start_session(self._run_session(listener))
        return listener

    async def _run_session(self, listener: AsyncListener) -> None:
        await listener.run()
        await self.close()
        self._send_metadata()
        self._lifecycle.session_done()

    def _send_metadata(self) -> None:
        """Sends the last message, and ends the conversation unless an error does."""
        sha256, created = self._digest.hexdigest(), timestamp(self._created)
        self._send([self._encoder.metadata(self.received_samples, sha256, created, self._ignored)])
        if self._lifecycle.end_reason is None:
            self._lifecycle.complete()

    def _on_events(self, events: list[LiveEvent]) -> None:
        self._send(self._encoder.on_events(events))
        partial = next((event for event in reversed(events) if isinstance(event, LivePartial)), None)
        if partial is None or not partial.text or not self._query.interim_results:
            return
        if not self._outbox.send_state(lambda: self._encoder.interim(partial)):
            self._meter.dropped.inc()

    def _on_advance(self) -> None:
        if self._listener is not None and (message := self._encoder.on_silence(self._listener.scored_samples)):
            self._send([message])

    def _send(self, messages: list[str]) -> None:
        """Sends messages; an interim result that waits would come too late."""
        for message in messages:
            self._outbox.send_replacing_state(message)


def _create_decoder(query: ListenQuery) -> LiveDecoder:
    if query.encoding is None:
        return ContainerStreamDecoder()
    rate_hz = query.sample_rate_hz if query.encoding in RAW_ENCODINGS else None
    return create_live_decoder(ENCODINGS[query.encoding], rate_hz)
