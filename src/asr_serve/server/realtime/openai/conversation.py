"""Conversation of one client in OpenAI's Realtime protocol: which event is valid in which state.

The first audio starts a listener. An invalid event is answered with an error event and changes nothing. Over a
WebSocket audio comes in events; a call over WebRTC has a track for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from enum import StrEnum
from typing import Any, Protocol

from starlette.types import Receive

from asr_serve.audio.stream_decoder import LiveAudioDecoder, create_live_decoder
from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    AudioTooLarge,
    Draining,
    EmptyAudio,
    MalformedRequest,
    ModelError,
    OptionError,
    UnsupportedOption,
)
from asr_serve.pipelines.live.events import LiveEvent, SessionFinished
from asr_serve.protocols.openai.events import Problem, TokenTexts
from asr_serve.protocols.openai.realtime_client_events import (
    REALTIME_FORMATS,
    AppendAudio,
    ClearAudio,
    ClientEvent,
    CommitAudio,
    RealtimeSettings,
    UpdateSession,
    apply_update,
    decode_client_event,
    parse_command,
)
from asr_serve.protocols.openai.realtime_server_events import ItemTracker, ServerEventEncoder
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import ConnectionLifecycle, SessionLimits
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.units import RATE_HZ, samples_to_ms

SLICES = 2
"""Slices per second of an event's audio; `full` is checked again before each."""
TRACK_FORMAT = ("s16le", RATE_HZ)
"""Encoding and rate of the audio of a track's messages."""


class TrackMessage(StrEnum):
    """Types of messages of a call's track, beside those of a WebSocket."""

    AUDIO = "track.audio"
    """`audio`: bytes in TRACK_FORMAT."""
    LOSS = "track.loss"
    """`start_samples`, `end_samples` and `packets` of what did not arrive, and was concealed."""
    ENDED = "track.ended"
    """No more audio: the rest of the text is due."""


class RealtimeSessionFactory(Protocol):
    """Factory of listeners."""

    def validate(self, settings: RealtimeSettings) -> str:
        """Name of the model for these settings. Raises OptionError, UnknownModel, ModelNotLoaded, EngineClosed if
        it cannot serve them."""

    def start(
        self, settings: RealtimeSettings, on_events: Callable[[list[LiveEvent]], None]
    ) -> tuple[AsyncListener, TokenTexts]:
        """Starts a listener. Raises AtCapacity and as `validate` does."""


class ErrorFormatter(Protocol):
    """Formats an error for the client, with the time in ms after which it may retry."""

    def __call__(self, error: Exception) -> tuple[Problem, int | None]: ...


class OpenAiConversation:
    """Transcription session over one WebSocket or call. Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        factory: RealtimeSessionFactory,
        limits: SessionLimits,
        format_error: ErrorFormatter,
        encoder: ServerEventEncoder,
        settings: RealtimeSettings,
        *,
        partials: bool,
        has_track: bool = False,
    ) -> None:
        """`has_track`: audio comes in messages of the track, and not in events."""
        self._has_track = has_track
        self._outbox, self._session_factory, self._limits = outbox, factory, limits
        self._format_error, self._encoder, self._settings = format_error, encoder, settings
        self._lifecycle = ConnectionLifecycle(receive, outbox, limits, self)
        self.drain, self.end = self._lifecycle.drain, self._lifecycle.end
        self._items = ItemTracker(encoder, turns=settings.turn_detection is not None, partials=partials)
        self._listener: AsyncListener | None = None
        self._spell: TokenTexts | None = None
        self._session: asyncio.Task[None] | None = None
        self._decoder: LiveAudioDecoder | None = None
        self._before_samples = 0
        """Samples of all closed listeners."""
        self.started_s = asyncio.get_running_loop().time()
        self.disconnected_in_session = False
        """Whether the client left before all its text was sent."""
        self.disconnect_code: int | None = None
        """Close code of the client; 1005 when it sent none."""
        self._expires_s = int(time.time() + limits.session_s)

    @property
    def received_samples(self) -> int:
        return self._before_samples + (self._listener.received_samples if self._listener is not None else 0)

    async def run(self) -> Draining | None:
        """Runs until the end, as `ConnectionLifecycle.run`. Raises as `RealtimeSessionFactory.validate`, too."""
        self._send_session("created", self._session_factory.validate(self._settings))
        return await self._lifecycle.run()

    # --- connection lifecycle -------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self._listener is not None

    async def on_message(self, message: MutableMapping[str, Any]) -> None:
        event: ClientEvent | None = None
        try:
            match message["type"]:
                case TrackMessage.AUDIO:
                    await self._append(message["audio"])
                    return
                case TrackMessage.LOSS:
                    self._send_loss(message)
                    return
                case TrackMessage.ENDED:
                    await self._finish_track()
                    return
            event = self._decode(message)
            await self._on_client_event(event)
        except (MalformedRequest, OptionError, AudioTooLarge, EmptyAudio, ModelError) as error:
            self.send_error(error, event)

    def send_error(self, error: AsrServeError, event: ClientEvent | None = None) -> None:
        problem, retry_ms = self._format_error(error)
        self._outbox.send(self._encoder.error(problem, retry_ms, None if event is None else event.event_id))

    def finish(self) -> None:
        if self._listener is None:
            self._commit_remaining()
            return
        assert self._decoder is not None, "it came with the caller"
        self._listener.write(self._decoder.finish())
        self._listener.finish()

    def on_disconnect(self, code: int | None) -> None:
        self.disconnect_code, self.disconnected_in_session = code, self._items.busy

    def fail(self, error: AsrServeError) -> None:
        self._send(self._items.fail(self._format_error(error)[0]))

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
            self._before_samples, self._listener = self.received_samples, None

    # --- client events --------------------------------------------------------------------------------

    def _decode(self, message: MutableMapping[str, Any]) -> ClientEvent:
        text = message.get("text")
        if text is None:
            raise MalformedRequest("a binary frame came", "events are JSON in text frames", "send audio in base64")
        if len(text) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"an event of {len(text)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller events, like 100 ms",
            )
        return decode_client_event(text)

    async def _on_client_event(self, event: ClientEvent) -> None:
        match command := parse_command(event):
            case AppendAudio(audio):
                if self._has_track:
                    raise UnsupportedOption(
                        "audio came in an event", "this call's audio comes by its track", "send none", param="type"
                    )
                await self._append(audio)
            case CommitAudio():
                self._commit(event)
            case ClearAudio():
                self._clear(event)
            case UpdateSession():
                await self._update(command)

    async def _append(self, audio: bytes) -> None:
        if self._lifecycle.end_reason is not None or not audio:
            return
        try:
            listener = self._listener or self._begin()
        except (OptionError, ModelError) as error:  # the settings were valid when they were set
            self._lifecycle.end(error)
            return
        assert self._decoder is not None, "it came with the caller"
        self._items.on_audio()
        step = self._decoder.rate_hz // SLICES
        for start in range(0, len(audio), step):
            while listener.full and not self._lifecycle.finishing:
                await self._lifecycle.pause_reading(listener.wait_writable())
            if self._lifecycle.finishing:
                return
            listener.write(self._decoder.decode(audio[start : start + step]))
        self._lifecycle.check_audio_limit(self.received_samples)

    def _commit(self, event: ClientEvent) -> None:
        if self.received_samples == self._items.accepted_samples:
            raise EmptyAudio(
                "a commit of nothing came", "audio must have come since the last one", "append audio first"
            )
        self._request(self._items.commit, event)

    def _clear(self, event: ClientEvent) -> None:
        if self.received_samples == self._items.accepted_samples:
            self._outbox.send(self._items.cleared())
        else:
            self._request(self._items.clear, event)

    def _request(self, action: Callable[[int], list[str]], event: ClientEvent) -> None:
        if self._listener is not None and self._decoder is not None and not self._lifecycle.finishing:
            self._listener.write(self._decoder.drain_resampler())
        received = self.received_samples
        if self._listener is None:  # none is running: all audio so far has been recognized
            self._send([*action(received), *self._items.on_event(SessionFinished(received))])
        elif not self._lifecycle.finishing:
            try:
                self._listener.flush("")
            except AtCapacity as error:
                self.send_error(error, event)
            else:
                self._send(action(received))

    async def _finish_track(self) -> None:
        """Ends the audio, and returns when its text has been sent."""
        self._lifecycle.finish()
        if self._listener is not None:
            assert self._session is not None, "it came with the caller"
            await self._lifecycle.pause_reading(asyncio.wait({self._session}))
        self._commit_remaining()

    def _send_loss(self, loss: MutableMapping[str, Any]) -> None:
        start_ms, end_ms = samples_to_ms(loss["start_samples"]), samples_to_ms(loss["end_samples"])
        self._outbox.send(self._encoder.audio_lost(start_ms, end_ms, loss["packets"]))

    async def _update(self, update: UpdateSession) -> None:
        settings = apply_update(self._settings, update)
        if self._has_track and settings.format != self._settings.format:
            raise UnsupportedOption(
                f"the format {settings.format} for a call",
                "its track has the one that the offer and the answer agree on",
                "leave the member out",
                param="session.audio.input.format",
            )
        model = self._session_factory.validate(settings)
        if (
            self._listener is not None
            and not self._lifecycle.finishing
            and not settings.same_recognition(self._settings)
        ):
            self._lifecycle.finish()
            assert self._session is not None, "it came with the caller"
            await self._lifecycle.pause_reading(asyncio.wait({self._session}))
        if self._listener is None and settings.turn_detection is not None:
            self._commit_remaining()
        self._settings = settings
        self._items.spell = self._spell if settings.logprobs else None
        self._encoder.beta |= update.beta
        self._send_session("updated", model)

    # --- listeners ------------------------------------------------------------------------------------

    def _begin(self) -> AsyncListener:
        settings = self._settings
        self._decoder = create_live_decoder(*(TRACK_FORMAT if self._has_track else REALTIME_FORMATS[settings.format]))
        self._items.start_listener(self._before_samples, turns=settings.turn_detection is not None)
        self._listener, self._spell = self._session_factory.start(settings, self._on_events)
        self._items.spell = self._spell if settings.logprobs else None
        self._session = self._lifecycle.start_session(self._until_finished(self._listener))
        return self._listener

    async def _until_finished(self, listener: AsyncListener) -> None:
        await listener.run()
        await self.close()
        self._lifecycle.session_done()

    def _on_events(self, events: list[LiveEvent]) -> None:
        for event in events:
            self._send(self._items.on_event(event))

    def _commit_remaining(self) -> None:
        """Commits the remaining audio, all of it recognized, as an item."""
        received = self.received_samples
        if self._settings.turn_detection is None and received > self._items.accepted_samples:
            self._send([*self._items.commit(received), *self._items.on_event(SessionFinished(received))])

    # --- server events --------------------------------------------------------------------------------

    def _send(self, events: list[str]) -> None:
        for event in events:
            self._outbox.send(event)

    def _send_session(self, kind: str, model: str) -> None:
        self._outbox.send(self._encoder.session(kind, self._settings, model, self._expires_s))
