"""Conversation of one StreamingRecognize: options, then audio, until the client half-closes.

An error ends the call, with its status: gRPC has no other place for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

from starlette.types import Receive

from asr_serve.audio.container_stream import ContainerStreamDecoder
from asr_serve.audio.stream_decoder import LiveAudioDecoder, create_live_decoder
from asr_serve.errors import AsrServeError, AudioTooLarge, MissingOption, OutOfTurn
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone
from asr_serve.protocols.riva import recognition
from asr_serve.protocols.riva.recognition import RivaRecognitionOptions
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits
from asr_serve.server.realtime.outbox import Outbox

OpenListener = Callable[[RivaRecognitionOptions, Callable[[list[LiveEvent]], None]], AsyncListener]
"""Opens a live session with these options. Raises what prevents it."""
MAGIC_BYTES = 4
"""Bytes by which a header is told from samples."""
SLICES = 2
"""Slices per second of a large message; `full` is checked again before each."""


class RivaConversation:
    """Live recognition in one call. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        limits: SessionLimits,
        open_listener: OpenListener,
        meter: LiveRouteMetrics,
        request_id: str,
    ) -> None:
        """`request_id`: what responses have where the client sends no id of its own."""
        self._outbox, self._limits, self._open_listener, self._meter = outbox, limits, open_listener, meter
        self._id = request_id
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.run, self.drain = self._lifecycle.run, self._lifecycle.drain
        self._options: RivaRecognitionOptions | None = None
        self._listener: AsyncListener | None = None
        self._decoder: LiveAudioDecoder | ContainerStreamDecoder | None = None
        self._head = b""
        """First bytes, until they tell whether the audio has a header."""
        self._closed_samples = 0
        """Samples of the closed session."""
        self.started_s: float | None = asyncio.get_running_loop().time()
        self.disconnected_in_session = False
        self.disconnect_code: int | None = None

    @property
    def completed(self) -> bool:
        """Returns whether all was said, and the call is open."""
        return self._lifecycle.completed

    @property
    def received_samples(self) -> int:
        return self._closed_samples if self._listener is None else self._listener.received_samples

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._listener is not None

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        if (data := message.get("bytes")) is None:
            self._on_half_close()
            return
        request = recognition.parse_streaming(data)
        self._id = request.id or self._id
        if request.options is not None:
            self._start(request.options)
        else:
            await self._on_audio(request.audio)

    def send_error(self, error: AsrServeError) -> None:
        """Sends nothing: the error ends the call, and is its status."""

    def finish(self) -> None:
        if self._listener is None:
            return
        if self._head:
            self._listener.write(self._open_decoder().decode(self._head))
            self._head = b""
        if self._decoder is not None:
            self._listener.write(self._decoder.finish())
        self._listener.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self.active

    def fail(self, error: AsrServeError) -> None:
        """Sends nothing: no result is pending but the error itself."""

    async def close(self) -> None:
        if (listener := self._listener) is not None:
            await listener.close()
            self._closed_samples, self._listener = listener.received_samples, None

    # --- messages -------------------------------------------------------------------------------------

    def _start(self, options: RivaRecognitionOptions) -> None:
        if self._options is not None:
            raise OutOfTurn("streaming_config came again", "once, before the audio", "start another call")
        self._options = options
        self._listener = self._open_listener(options, partial(self._on_events, options))
        self._lifecycle.start_session(self._run_session(self._listener))

    def _on_half_close(self) -> None:
        if self._options is None:
            raise MissingOption(
                "the call ended without a streaming_config",
                "streaming_config first, then audio_content",
                "send it in the first message",
                param="streaming_config",
            )
        self._lifecycle.finish()

    async def _on_audio(self, audio: bytes) -> None:
        if self._options is None:
            raise OutOfTurn(
                "audio_content came first", "streaming_config first, then audio_content", "send it before the audio"
            )
        if len(audio) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"audio_content of {len(audio)} bytes came",
                f"up to {self._limits.frame_bytes}",
                "send audio in smaller messages, like 100 ms",
            )
        if self._decoder is None:
            self._head += audio
            if len(self._head) < MAGIC_BYTES:
                return
            self._decoder, audio, self._head = self._open_decoder(), self._head, b""
        step, rest = self._decoder.rate_hz // SLICES, memoryview(audio)
        while rest and (listener := self._listener) is not None and not self._lifecycle.finishing:
            if listener.full:
                await self._lifecycle.pause_reading(listener.wait_writable())
            else:
                listener.write(self._decoder.decode(rest[:step]))
                rest = rest[step:]
        self._lifecycle.check_audio_limit(self.received_samples)

    def _open_decoder(self) -> LiveAudioDecoder | ContainerStreamDecoder:
        """Raises MissingOption, OptionError."""
        assert self._options is not None
        encoding = self._options.raw_encoding(self._head)
        return ContainerStreamDecoder() if encoding is None else create_live_decoder(encoding, self._options.rate_hz)

    # --- session --------------------------------------------------------------------------------------

    async def _run_session(self, listener: AsyncListener) -> None:
        await listener.run()
        await self.close()
        if self._lifecycle.end_reason is None:
            self._lifecycle.complete()
        self._lifecycle.session_done()

    def _on_events(self, options: RivaRecognitionOptions, events: list[LiveEvent]) -> None:
        partial_text: LivePartial | None = None
        for event in events:
            match event:
                case LiveSegmentDone():
                    partial_text = None
                    if (final := recognition.encode_final(event, options, self._id)) is not None:
                        self._outbox.send_replacing_state(final)  # an interim result that waits would come too late
                case LivePartial():
                    partial_text = event
        if partial_text is None or not partial_text.text or not options.interim_results:
            return
        interim = partial(recognition.encode_interim, partial_text, options, self._id)
        if not self._outbox.send_state(interim):
            self._meter.dropped.inc()
