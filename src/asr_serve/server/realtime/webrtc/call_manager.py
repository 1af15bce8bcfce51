"""Calls of one server: created, found, hung up, released. Their UDP port is opened with the first."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from asr_serve.config import WebRtcConfig
from asr_serve.edge.event_log import EdgeEventLog
from asr_serve.edge.payload_decoder import create_payload_decoder
from asr_serve.errors import AtCapacity, ProgramMissing, UnknownCall, UnsupportedOption
from asr_serve.server.middleware.admission import SESSION_RETRY_MS
from asr_serve.server.middleware.request_context import ApiClient, RequestContext
from asr_serve.server.realtime.endpoint import LiveDependencies
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.webrtc.call import Call, CallConversation, StartSpeechLine
from asr_serve.server.realtime.webrtc.offer_answer import Answer, Candidate, parse_offer, write_answer
from asr_serve.server.telemetry import logs
from asr_serve.server.telemetry.tracing import RequestTrace

if TYPE_CHECKING:
    from asr_serve.server.realtime.webrtc.ice_lite import UdpPort

CALL_METHOD = "CALL"
"""Method of calls in log lines."""
CALL_STATUS = 201
MAX_ENDED = 256
"""Ended calls whose events can still be read, ..."""
ENDED_S = 60.0
"""... and for how long."""

StartConversation = Callable[[Call, RequestContext, contextlib.AsyncExitStack], Awaitable[CallConversation]]
"""Reserves, on the stack, what the call needs, and makes its conversation."""


class WebRtcPackages(NamedTuple):
    """Modules that need the extra `webrtc`."""

    ice_lite: ModuleType
    media_peer: ModuleType


class AnsweredCall(NamedTuple):
    call: Call
    sdp: str


def load_packages() -> WebRtcPackages:
    """Loads aiortc, which takes a moment. Raises ProgramMissing."""
    try:
        from asr_serve.server.realtime.webrtc import ice_lite, media_peer
    except ImportError as error:
        raise ProgramMissing(
            "aiortc is not installed", "calls over WebRTC need it", "pip install 'asr-serve[webrtc]'"
        ) from error
    return WebRtcPackages(ice_lite, media_peer)


class CallManager:
    """Calls of one server. Belongs to the event loop's thread."""

    def __init__(
        self,
        dependencies: LiveDependencies,
        start_speech: StartSpeechLine | None = None,
        speaks: Callable[[], bool] = lambda: False,
    ) -> None:
        """`start_speech`: makes what speaks over a call. `speaks`: whether a voice is loaded."""
        self._dependencies, self._start_speech, self._speaks = dependencies, start_speech, speaks
        config = dependencies.config
        self._config: WebRtcConfig = config.webrtc
        self.limits = SessionLimits(config.session_idle_s, config.max_session_s, config.max_frame_bytes)
        self._calls: dict[str, Call] = {}
        self._ended: dict[str, Call] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._port: UdpPort | None = None
        self._opening = asyncio.Lock()

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    @property
    def udp_port(self) -> UdpPort | None:
        """Port of all calls; None before the first."""
        return self._port

    async def create(
        self,
        request: RequestContext,
        route: str,
        offer_text: str,
        start_conversation: StartConversation,
        *,
        channel_label: str | None,
        needs_channel: bool,
        keeps_events: bool,
        error_path: str,
    ) -> AnsweredCall:
        """Answers an offer. `request`: of the HTTP request that brought it. `channel_label`: as of MediaPeer.
        `keeps_events`: events can be read over HTTP too. `error_path`: as of Call.

        Raises what `parse_offer` and `start_conversation` do; AtCapacity, RateLimited, Draining, ProgramMissing, and
        UnsupportedOption where calls are switched off.
        """
        if not self._config.max_calls:
            raise UnsupportedOption("WebRTC is switched off", "webrtc.max_calls is 0 here", "use the WebSocket")
        offer = parse_offer(offer_text)
        if needs_channel and offer.channel is None:
            raise UnsupportedOption(
                "the offer has no data channel", "events go over one", "create the data channel oai-events", param="sdp"
            )
        packages = await asyncio.to_thread(load_packages)
        await asyncio.to_thread(create_payload_decoder, offer.format)  # raises where its library is missing
        port = await self._open_port(packages)
        self._check_places()
        assert request.client is not None
        config, admission = self._dependencies.config, self._dependencies.admission
        candidates: tuple[Candidate, ...] = packages.ice_lite.local_candidates(
            config.host, port.port, self._config.addresses
        )
        async with contextlib.AsyncExitStack() as resources:
            transport = port.register()
            resources.callback(transport.close)
            transport.remote_ufrag = offer.ice_ufrag
            call = Call(
                f"rtc_{secrets.token_hex(16)}",
                request.client,
                offer,
                self.limits,
                self._dependencies.metrics.calls,
                EdgeEventLog() if keeps_events else None,
                error_path,
                self._start_speech if self._speaks() else None,
            )
            context = RequestContext(
                request_id=call.id, route=route, method=CALL_METHOD, trace=RequestTrace(), client=request.client
            )
            context.status = CALL_STATUS
            conversation = await start_conversation(call, context, resources)
            self._check_places()  # others may have come meanwhile
            peer = packages.media_peer.MediaPeer(
                transport,
                offer,
                channel_label,
                call.on_packet,
                call.on_message,
                call.on_speech_message if call.speaks else None,
                call.on_closed,
            )
            call.attach(conversation, peer, transport)
            answer = Answer(
                session_id=secrets.randbits(62),
                candidates=candidates,
                ice_ufrag=transport.ufrag,
                ice_pwd=transport.password,
                fingerprints=peer.fingerprints,
                ssrc=peer.ssrc,
                cname=call.id,
            )
            self._calls[call.id] = call
            opened = self._dependencies.metrics.live_open.labels(route)
            opened.inc()
            resources.callback(opened.dec)
            task = call.start(
                context,
                admission,
                self._config.connect_s,
                resources.pop_all(),
                lambda ended: self._on_ended(ended, context),
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return AnsweredCall(call, write_answer(offer, answer))

    def _check_places(self) -> None:
        taken = len(self._calls)
        if taken >= self._config.max_calls:
            raise AtCapacity(f"{taken} calls are open", f"up to {self._config.max_calls} at once", SESSION_RETRY_MS)

    def get(self, owner: ApiClient | None, call_id: str) -> Call:
        """Call of that id, if it is open. Raises UnknownCall, also if its owner is another."""
        call = self._calls.get(call_id)
        if call is None or call.owner != owner:
            raise UnknownCall(f"no call {call_id[:60]!r}", "it has ended, or is another client's")
        return call

    def events(self, owner: ApiClient | None, call_id: str) -> EdgeEventLog:
        """Log of a call that is open, or ended a short time ago. Raises UnknownCall."""
        call = self._calls.get(call_id) or self._ended.get(call_id)
        if call is None or call.owner != owner or call.events is None:
            raise UnknownCall(f"no call {call_id[:60]!r} with events", "it has ended, or is another client's")
        return call.events

    async def close(self) -> None:
        """Ends all calls and closes the port."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for expiry in self._expiries.values():
            expiry.cancel()
        self._ended.clear()
        if self._port is not None:
            self._port.close()
            self._port = None

    async def _open_port(self, packages: WebRtcPackages) -> UdpPort:
        config = self._dependencies.config
        async with self._opening:
            if self._port is None:
                number = config.port if self._config.udp_port is None else self._config.udp_port
                self._port = await packages.ice_lite.UdpPort.open(
                    config.host, number, self._dependencies.metrics.calls.dropped
                )
        assert self._port is not None
        return self._port

    def _on_ended(self, call: Call, context: RequestContext) -> None:
        del self._calls[call.id]
        self._dependencies.metrics.live_ended.labels(context.route, context.end_reason).inc()
        logs.log_access(
            method=context.method,
            route=context.route,
            status=context.status,
            duration_ms=1_000 * context.elapsed_s(),
            audio_ms=round(1_000 * context.audio_s) if context.audio_s else None,
            model=context.model,
            client=call.owner.name,
            ended=context.end_reason,
        )
        if call.events is not None:
            while len(self._ended) >= MAX_ENDED:
                self._expire(next(iter(self._ended)))
            self._ended[call.id] = call
            self._expiries[call.id] = asyncio.get_running_loop().call_later(ENDED_S, self._expire, call.id)

    def _expire(self, call_id: str) -> None:
        self._ended.pop(call_id, None)
        if (expiry := self._expiries.pop(call_id, None)) is not None:
            expiry.cancel()
