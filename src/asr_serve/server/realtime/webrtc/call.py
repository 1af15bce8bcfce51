"""Call over WebRTC: its packets become audio, a conversation of a live protocol hears it, events go back.

packets -> RtpStream (order, losses, the clock) -> CallInbox -> CallConversation -> data channel, event log
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.types import Message, Receive, Send

from asr_serve.edge.edge_events import LossTold
from asr_serve.edge.event_log import EdgeEventLog
from asr_serve.edge.rtp import RtpPacket
from asr_serve.edge.rtp_stream import RtpStream
from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech
from asr_serve.errors import AsrServeError, AtCapacity, ClientGone, IdleTimeout, RequestTimeout
from asr_serve.metrics import CallMetrics
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.middleware.error_handlers import error_code, live_error_event
from asr_serve.server.middleware.request_context import ApiClient, RequestContext
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.webrtc.call_inbox import CallInbox
from asr_serve.server.realtime.webrtc.offer_answer import Offer
from asr_serve.units import RATE_HZ, samples_to_s

if TYPE_CHECKING:
    from asr_serve.server.realtime.webrtc.ice_lite import IceLiteTransport
    from asr_serve.server.realtime.webrtc.media_peer import MediaPeer

TICK_S = 0.1
"""Interval at which lost packets are given up, silence is told and time limits are checked."""
LOST_S = 30.0
"""Time without a packet or a check after which the peer is gone: browsers check every 2.5 s (RFC 7675: 30 s)."""
HANG_UP_S = 15.0
"""Longest time for the rest of the text of a call that was hung up."""
CHANNEL_CLOSE_S = 2.0
"""Longest time for the last events to arrive."""
EVENT_RETRY_MS = 1_000
NORMAL_CLOSURE, NO_CLOSE_CODE = 1_000, 1_005

log = logging.getLogger(__name__)


class _Typed(msgspec.Struct):
    type: str


def _is_cancel(message: str | bytes) -> bool:
    """Returns whether a client interrupts what is spoken."""
    try:
        return isinstance(message, str) and msgspec.json.decode(message, type=_Typed).type == "cancel"
    except msgspec.DecodeError:
        return False


class CallConversation(Protocol):
    """Conversation of a call, in one of the live protocols. It reads the call's inbox, and sends by its `send`."""

    disconnected_in_session: bool
    """Whether the client left before all its text was sent."""

    @property
    def received_samples(self) -> int: ...

    def drain(self) -> None:
        """Ends it because the server goes down."""

    def end(self, reason: AsrServeError) -> None:
        """Ends it because of an error, once the text so far is sent."""

    def send_error(self, error: AsrServeError) -> None: ...

    async def run(self) -> AsrServeError | None:
        """Runs until the end. Raises what ends it at once."""

    async def close(self) -> None:
        """Releases everything. Idempotent."""


class SpeechLine(Protocol):
    """Conversation that speaks texts: that of `/v1/audio/speech/stream`. It reads texts, and sends events and sound."""

    async def run(self) -> AsrServeError | None:
        """Runs until the end. Raises what ends it at once."""

    def drain(self) -> None:
        """Ends it because the server goes down."""

    def send_error(self, error: AsrServeError) -> None: ...


StartSpeechLine = Callable[[Receive, Send, RequestContext], SpeechLine]
"""Makes the conversation that speaks over a call."""


class Call:
    """Call of one client, from its offer to its end. Belongs to the event loop's thread.

    `inbox` and `send` are there first, for its conversation, which `attach` brings with the peer.
    """

    def __init__(
        self,
        call_id: str,
        owner: ApiClient,
        offer: Offer,
        limits: SessionLimits,
        meter: CallMetrics,
        events: EdgeEventLog | None,
        error_path: str,
        start_speech: StartSpeechLine | None,
    ) -> None:
        """`events`: log for server-sent events; None: the data channel alone has them. `error_path`: route of the live
        protocol in whose format errors are. `start_speech`: None: nothing is spoken here."""
        self._error_path, self._start_speech = error_path, start_speech
        self._speech_inbox = CallInbox()
        self._speech: asyncio.Task[None] | None = None
        self._line: SpeechLine | None = None
        self._context: RequestContext | None = None
        self.id, self.owner, self.offer, self.events = call_id, owner, offer, events
        self.inbox = CallInbox()
        self._limits, self._meter = limits, meter
        self._stream = RtpStream({offer.payload_type: offer.format})
        self._counted_loss = 0
        self._loop = asyncio.get_running_loop()
        self._last_heard_s = self._loop.time()
        """Time of the last packet or event of the client."""
        self._ending = self._idle = False
        self._ticker: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._admission: AdmissionController | None = None
        self._conversation: CallConversation | None = None
        self._peer: MediaPeer | None = None
        self._transport: IceLiteTransport | None = None

    def attach(self, conversation: CallConversation, peer: MediaPeer, transport: IceLiteTransport) -> None:
        self._conversation, self._peer, self._transport = conversation, peer, transport

    def start(
        self,
        context: RequestContext,
        admission: AdmissionController,
        connect_s: float,
        resources: contextlib.AsyncExitStack,
        on_ended: Callable[[Call], None],
    ) -> asyncio.Task[None]:
        """Starts the task of the call, which releases `resources` at its end."""
        self._context, self._admission = context, admission
        self._task = self._loop.create_task(self._run(context, admission, connect_s, resources, on_ended))
        return self._task

    @property
    def speaks(self) -> bool:
        return self._start_speech is not None

    # --- commands --------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Ends the audio; the rest of the text follows, and the end. Idempotent."""
        self._end(NORMAL_CLOSURE, finish=True)

    def on_packet(self, packet: RtpPacket) -> None:
        now_s = self._loop.time()
        if self._ending:
            return
        self._last_heard_s = now_s
        self._meter.packets.inc()
        if (reason := self._stream.push(packet, now_s)) is not None:
            self._meter.dropped(reason)
        self._advance(now_s)

    def on_message(self, message: str | bytes) -> None:
        self._last_heard_s = self._loop.time()
        if not self._ending and not self.inbox.put_event(message) and self._conversation is not None:
            self._conversation.send_error(
                AtCapacity("too many events wait to be read", "this one is dropped", EVENT_RETRY_MS)
            )

    def on_speech_message(self, message: str | bytes) -> None:
        """Takes a message of the channel of speech, whose conversation begins with the first."""
        assert self._start_speech is not None
        assert self._context is not None
        assert self._peer is not None
        assert self._peer.speech_track is not None
        self._last_heard_s = self._loop.time()
        if self._ending:
            return
        if self._speech is None or self._speech.done():  # it ends by itself when nothing comes for long
            self._line = self._start_speech(self._speech_inbox.receive, self._send_speech, self._context)
            self._speech = self._loop.create_task(self._run_speech(self._line))
        if _is_cancel(message):
            self._peer.speech_track.discard()  # at once: what waits to be sent would be heard for a while
        if not self._speech_inbox.put_event(message) and self._line is not None:
            self._line.send_error(AtCapacity("too many texts wait to be read", "this one is dropped", EVENT_RETRY_MS))

    async def _run_speech(self, line: SpeechLine) -> None:
        assert self._admission is not None
        with contextlib.suppress(AsrServeError), self._admission.on_drain(line.drain):
            await line.run()

    async def _send_speech(self, message: Message) -> None:
        """Sends an event or sound of what is spoken, as an ASGI server does. Raises ClientGone."""
        assert self._peer is not None
        assert self._peer.speech_track is not None
        if (sound := message.get("bytes")) is not None:
            await self._peer.speech_track.write(sound)
            return
        if msgspec.json.decode(message["text"], type=_Typed).type == "done":
            self._peer.speech_track.resume()
        await self._peer.send_speech_event(message["text"])

    def on_closed(self) -> None:
        """Ends the call because the other side has: the text is finished where somebody else may read it."""
        self._end(NO_CLOSE_CODE, finish=self.events is not None)

    def _end(self, code: int, *, finish: bool) -> None:
        if self._ending:
            return
        self._take(self._stream.finish())
        self._ending = True
        self.inbox.put_end(code, finish=finish)
        if self._task is not None:
            self._deadline = self._loop.call_later(HANG_UP_S, self._task.cancel)

    # --- audio -----------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        self._take(self._stream.advance(now_s))

    def _take(self, outputs: list[GatedSpeech | GatedSilence]) -> None:
        for output in outputs:
            match output:
                case GatedSpeech(samples):
                    self.inbox.put_audio(samples.tobytes())
                case GatedSilence(count):
                    self.inbox.put_silence(count)
        for event in self._stream.take_events():
            if isinstance(event, LossTold):
                self.inbox.put_loss(round(event.start_s * RATE_HZ), round(event.end_s * RATE_HZ), event.packets)
        self._meter.lost.inc(self._stream.lost_packets - self._counted_loss)
        self._counted_loss = self._stream.lost_packets

    def _tick(self) -> None:
        assert self._transport is not None
        assert self._conversation is not None
        now_s = self._loop.time()
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        if self._ending:
            return
        self._advance(now_s)
        if now_s - max(self._last_heard_s, self._transport.last_check_s or 0.0) > LOST_S:
            self.on_closed()
        elif now_s - self._last_heard_s > self._limits.idle_s and not self._idle:
            self._idle = True
            self._conversation.end(
                IdleTimeout(f"nothing came for {self._limits.idle_s:g} s", "a silent microphone sends, too")
            )

    # --- events ----------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Sends an event, as an ASGI server does. Raises ClientGone where nobody takes it."""
        event: str = message["text"]
        if self.events is not None:
            self.events.append(msgspec.json.decode(event, type=_Typed).type, event.encode())
        if self.offer.channel is None:
            return
        assert self._peer is not None
        try:
            await self._peer.send(event)
        except ClientGone:
            if self.events is None:
                raise

    # --- the task --------------------------------------------------------------------------------------

    async def _run(
        self,
        context: RequestContext,
        admission: AdmissionController,
        connect_s: float,
        resources: contextlib.AsyncExitStack,
        on_ended: Callable[[Call], None],
    ) -> None:
        assert self._peer is not None
        assert self._conversation is not None
        peer, conversation = self._peer, self._conversation
        error: Exception | None = None
        try:
            with admission.cancellable(), admission.on_drain(conversation.drain):
                try:
                    await self._connect(peer, connect_s)
                    self._tick()
                    error = await conversation.run()
                finally:
                    if self._ticker is not None:
                        self._ticker.cancel()
                    if self._speech is not None:
                        self._speech.cancel()
                        await asyncio.wait({self._speech})
                    await conversation.close()
        except AsrServeError as failure:
            error = failure
            await self._tell(peer, context, failure)
        except Exception as failure:  # one call fails alone
            log.error("a call failed inside", exc_info=failure)
            error = failure
            await self._tell(peer, context, failure)
        finally:
            try:  # the session is over, and its place is given up below, once nothing of the call is left
                context.audio_s = samples_to_s(conversation.received_samples)
                context.end_reason = self._end_reason(error, conversation)
                with contextlib.suppress(TimeoutError, ClientGone):
                    async with asyncio.timeout(CHANNEL_CLOSE_S):
                        await peer.close_channel()
            finally:
                if self._deadline is not None:
                    self._deadline.cancel()
                self._take(self._stream.finish() if not self._ending else [])
                self._ending = True
                await peer.close()
                await resources.aclose()
                if self.events is not None:
                    self.events.close()
                on_ended(self)

    async def _connect(self, peer: MediaPeer, connect_s: float) -> None:
        try:
            async with asyncio.timeout(connect_s):
                await peer.connect()
        except TimeoutError:
            raise RequestTimeout(
                f"the call was not connected within {connect_s:g} s",
                "its packets must reach this server's UDP port, and its data channel must open",
                "see docs/webrtc.md for firewalls and addresses",
            ) from None
        self._last_heard_s = self._loop.time()

    async def _tell(self, peer: MediaPeer, context: RequestContext, error: Exception) -> None:
        """Sends the error that ends the call, where it can be sent."""
        event = live_error_event(error, context.request_id, self._error_path)
        if self.events is not None:
            self.events.append("error", event.encode())
        with contextlib.suppress(ClientGone, TimeoutError):
            async with asyncio.timeout(CHANNEL_CLOSE_S):
                await peer.send(event)

    @staticmethod
    def _end_reason(error: Exception | None, conversation: CallConversation) -> str:
        if isinstance(error, AsrServeError):
            return error_code(error)
        if error is not None:
            return "internal_error"
        return "client_gone" if conversation.disconnected_in_session else "done"
