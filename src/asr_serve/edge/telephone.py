"""Telephone: calls of a SIP user agent whose audio is sessions of the edge, and audio that is played to callers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from asr_serve.edge.edge_events import AudioPlayed, CallBegun, CallHeld, CallResumed
from asr_serve.edge.edge_service import EdgeService, EdgeSessionRequest
from asr_serve.edge.edge_session import EndReason
from asr_serve.edge.event_log import EdgeEventLog
from asr_serve.edge.packet_driver import parse_source
from asr_serve.edge.payload_format import describe_format
from asr_serve.edge.rtp_playout import CallPlayout, PlayoutResult, RtpSendStream
from asr_serve.edge.sip.digest import DigestVerifier
from asr_serve.edge.sip.message import DEFAULT_PORT, MalformedSip, SipUri, bracketed, parse_uri
from asr_serve.edge.sip.registration import SipAccount
from asr_serve.edge.sip.session_description import (
    AudioDescription,
    ChosenFormat,
    UnusableSdp,
    build_answer,
    build_offer,
    choose_format,
    offered_formats,
)
from asr_serve.edge.sip.user_agent import (
    AgentEvent,
    CallChanged,
    CallConfirmed,
    CallEnded,
    CallOffered,
    RegistrationChanged,
    SipCall,
    UserAgent,
)
from asr_serve.edge.sip_config import SipConfig
from asr_serve.edge.sip_endpoint import SipEndpoint
from asr_serve.edge.srtp import SrtpKey, SrtpSender, checked_key
from asr_serve.errors import (
    AtCapacity,
    Draining,
    OptionError,
    ProgramMissing,
    SessionExpired,
    UnknownSession,
    UnsupportedOption,
)
from asr_serve.metrics import EdgeMetrics
from asr_serve.types import is_address, is_loopback

RETRY_S = 5
RESOLVE_S = 5.0
CLOSE_S = 2.0
"""Longest wait for the farewells of calls and of the registration."""
ENDED_OUTCOMES = {"cancelled": "cancelled", "rejected": "rejected", "failed": "failed"}

log = logging.getLogger(__name__)


class CallRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to call somebody."""

    to: Annotated[str, Meta(max_length=256)]
    """SIP URI, or a number or name at the registrar."""
    options: dict[str, str | int | float | bool] = {}
    """Parameters of /v1/stream."""


class CallPlaced(msgspec.Struct, frozen=True, kw_only=True):
    """Answer: a call that rings. Events of calls tell its session, or its end."""

    call_id: str
    to: str


class CallNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Event of calls."""

    type: Literal["call", "call_end", "registration"]
    session: str | None = None
    call_id: str | None = None
    caller: str | None = None
    called: str | None = None
    direction: Literal["in", "out"] | None = None
    cause: str | None = None
    """Why a call has ended: hangup, local, cancelled, rejected, failed."""
    status: int | None = None
    registered: bool | None = None
    detail: str | None = None


class _Media:
    """Audio of one call."""

    def __init__(
        self,
        session_id: str,
        audio: AudioDescription,
        chosen: ChosenFormat,
        playout: CallPlayout,
        sender: SrtpSender | None,
        source: str,
    ) -> None:
        self.session_id, self.audio, self.chosen, self.playout = session_id, audio, chosen, playout
        self.sender = sender
        self.destination = parse_source(source)
        self.held: asyncio.TimerHandle | None = None

    def protect(self, packet: bytes) -> bytes:
        """Encrypts a packet of ours, where the call is encrypted."""
        return packet if self.sender is None else self.sender.protect(packet)


class Telephone:
    """Telephone of one edge. All methods are called on the edge's loop."""

    def __init__(self, service: EdgeService, config: SipConfig, metrics: EdgeMetrics) -> None:
        self.config, self._service, self._metrics = config, service, metrics
        self._endpoint = SipEndpoint(config.host, config.port, tcp=config.tcp, on_events=self._apply_events)
        self._media: dict[str, _Media] = {}
        """Audio of each call, by our tag: a Call-ID is the other side's choice."""
        self._calls: dict[str, SipCall] = {}
        """Calls by session."""
        self._options: dict[str, dict[str, str | int | float | bool]] = {}
        """Options of calls of ours that ring, by our tag."""
        self._keys: dict[str, SrtpKey] = {}
        """Keys of what we send, by our tag."""
        self._versions: dict[str, tuple[int, int]] = {}
        """Session and version of our descriptions, by our tag."""
        self._rings: set[asyncio.TimerHandle] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._networks = [ipaddress.ip_network(network) for network in config.allow]
        self._registrar_host = ""
        self._is_closing = False
        self._loop = asyncio.get_running_loop()
        self.events = EdgeEventLog()
        """Events of all calls, and of the registration."""

    @property
    def port(self) -> int:
        return self._endpoint.port

    async def start(self) -> None:
        """Opens the port, and registers. Raises OptionError."""
        config = self.config
        account: SipAccount | None = None
        await self._endpoint.start()
        if config.registrar is not None:
            uri = config.registrar_uri()
            try:
                places = await self._loop.getaddrinfo(uri.host, uri.port or 5_060, type=socket.SOCK_DGRAM)
            except OSError as error:
                await self._endpoint.close()
                raise OptionError(
                    f"sip.registrar={config.registrar!r} has no address: {error.strerror or error}",
                    "a host that can be resolved",
                    param="registrar",
                ) from error
            self._registrar_host = str(places[0][4][0])
            account = SipAccount(
                registrar=uri,
                address=self._registrar_host,
                user=config.user,
                auth_user=config.auth_user or config.user,
                password=config.password,
                expires_s=config.expires_s,
            )
        self._endpoint.agent = self._agent = UserAgent(
            user=config.user,
            port=lambda _: self._endpoint.port,
            local_host=self._local_host,
            is_allowed=self._is_allowed,
            is_trusted=lambda host: host == self._registrar_host,
            max_calls=config.max_calls,
            verifier=DigestVerifier(config.user, config.callers, config.digests) if config.callers else None,
            account=account,
        )
        self._endpoint.pump()

    async def close(self) -> None:
        """Hangs up, removes the registration, and closes the port."""
        self._is_closing = True
        for ring in list(self._rings):
            ring.cancel()
        for call in self._agent.calls:
            self._agent.hang_up(call, self._loop.time())
        self._agent.end_registration()
        self._endpoint.pump()
        self._agent.advance(self._loop.time())
        self._endpoint.pump()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._agent.waits_for_responses:
                    await asyncio.sleep(0.02)
        await self._endpoint.close()
        for tag in list(self._media):
            self._end_media(tag, "stopping")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.events.close()

    # --- what a client asks for ------------------------------------------------------------------------

    async def place_call(self, request: CallRequest) -> CallPlaced:
        """Calls somebody. Raises OptionError, for a host whose answers would not be read too, and AtCapacity."""
        uri = request.to
        if not uri.lower().startswith("sip:"):
            if self.config.registrar is None:
                raise OptionError(f"to={uri[:80]!r}", "a SIP URI, or with a registrar a number", param="to")
            registrar = self.config.registrar_uri()
            uri = f"sip:{uri}@{bracketed(registrar.host)}"
        self._service.check_options(request.options)
        try:
            address = self._registrar_host or await self._find_callee(parse_uri(uri))
            if self._is_closing:
                raise Draining("a call while the edge stops", "a call of a running edge", RETRY_S * 1_000)
            local = self._media_host(address)
            key = checked_key(SrtpKey()) if self._service.config.require_srtp else None
            port = self._service.driver.port
            sdp = build_offer(local, port, self.config.encodings, **self._version(), key=key)
            call = self._agent.place_call(uri, sdp, self._loop.time(), address=address)
        except MalformedSip as malformed:
            raise OptionError(f"to={request.to[:80]!r}: {malformed}", "like sip:7001@10.0.0.7", param="to") from None
        self._options[call.tag] = request.options
        if key is not None:
            self._keys[call.tag] = key
        self._endpoint.pump()
        return CallPlaced(call_id=call.id, to=call.called)

    async def _find_callee(self, uri: SipUri) -> str:
        """IP address of a host that is called without a registrar. Raises OptionError."""
        try:
            async with asyncio.timeout(RESOLVE_S):
                places = await self._loop.getaddrinfo(uri.host, uri.port or DEFAULT_PORT, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError) as error:
            raise OptionError(
                f"to={str(uri)[:80]!r} has no address", "a host that can be resolved", param="to"
            ) from error
        address = str(places[0][4][0])
        if not self._is_allowed(address):
            raise OptionError(
                f"to={str(uri)[:80]!r}: messages of {address}, its answers too, are not read",
                "hosts within sip.allow, or the registrar",
                f'add it: allow = ["{address}"]',
                param="to",
            )
        return address

    async def play(self, session_id: str, pcm: AsyncIterator[bytes], rate_hz: int) -> PlayoutResult:
        """Plays samples to a caller, and waits for their end. Raises SessionExpired, UnsupportedAudio."""

        def tell(result: PlayoutResult) -> None:
            with contextlib.suppress(SessionExpired):
                self._service.publish(session_id, AudioPlayed(played_s=result.played_s, interrupted=result.interrupted))

        return await self._find(session_id).playout.play(pcm, rate_hz, tell)

    def stop_playing(self, session_id: str) -> None:
        """Interrupts what is played, and drops what waits. Raises SessionExpired."""
        self._find(session_id).playout.stop()

    def note_metrics(self) -> None:
        """Brings the metrics up to date."""
        self._metrics.note_sip(self._agent.counts)
        self._metrics.open_calls.set(len(self._agent.calls))
        registration = self._agent.registration
        self._metrics.registered.set(registration is not None and registration.is_registered)

    def _find(self, session_id: str) -> _Media:
        call = self._calls.get(session_id)
        media = None if call is None else self._media.get(call.tag)
        if media is None:
            known = self._service.describe(session_id)
            problem = SessionExpired if known.ended else UnknownSession
            raise problem(f"no call has the session {session_id[:60]!r}", "a session of a call that has not ended")
        return media

    # --- events of the user agent ----------------------------------------------------------------------

    def _apply_events(self) -> None:
        while events := self._agent.take_events():
            for event in events:
                try:
                    self._apply_event(event)
                except Exception:  # one call that fails must not keep the events of others
                    log.exception("an event of the telephone failed: %s", type(event).__name__)
                    if isinstance(event, CallOffered | CallConfirmed | CallChanged):
                        self._agent.hang_up(event.call, self._loop.time())

    def _apply_event(self, event: AgentEvent) -> None:
        match event:
            case CallOffered(call=call):
                self._take_offer(call)
            case CallConfirmed(call=call, answer=answer):
                self._confirm(call, answer)
            case CallChanged(call=call):
                self._change(call)
            case CallEnded(call=call):
                self._note_end(event, call)
            case RegistrationChanged():
                self._note_registration(event)

    def _take_offer(self, call: SipCall) -> None:
        now_s = self._loop.time()
        if self._is_closing:
            self._refuse(call, 503, "unavailable")
            return
        if call.offer is not None:
            try:
                self._begin_media(call, call.offer, choose_format(call.offer, self.config.encodings))
            except AtCapacity:
                self._refuse(call, 503, "unavailable")
                return
            except (UnusableSdp, OptionError) as error:
                self._refuse(call, 488, "not_acceptable", str(error))
                return
        if not self.config.ring_s:
            self._answer(call)
            return
        self._agent.ring(call, now_s)

        def answer() -> None:
            self._rings.discard(ringing)
            self._answer(call)
            self._endpoint.pump()

        ringing = self._loop.call_later(self.config.ring_s, answer)
        self._rings.add(ringing)

    def _refuse(self, call: SipCall, status: int, outcome: str, warning: str = "") -> None:
        self._metrics.count_call(outcome)
        retry_s = RETRY_S if status == 503 else 0
        self._agent.reject(call, status, self._loop.time(), warning=warning, retry_after_s=retry_s)

    def _answer(self, call: SipCall) -> None:
        if call.tag in self._media:
            self._announce(call)
        self._agent.accept(call, self._describe(call), self._loop.time())

    def _describe(self, call: SipCall) -> str:
        """Our description: the answer to the call's offer, or an offer."""
        port = self._service.driver.port
        media = self._media.get(call.tag)
        if call.offer is None or media is None:
            local = self._media_host(call.peer.host)
            if self._service.config.require_srtp:
                self._keys.setdefault(call.tag, checked_key(SrtpKey()))
            key = self._keys.get(call.tag)
            return build_offer(local, port, self.config.encodings, **self._version(call.tag), key=key)
        local = self._media_host(call.peer.host if call.offer.is_unspecified else call.offer.host)
        key = self._keys.get(call.tag)
        return build_answer(call.offer, media.chosen, local, port, **self._version(call.tag), key=key)

    def _version(self, tag: str = "") -> dict[str, int]:
        session, version = self._versions.get(tag, (secrets.randbits(31), 0))
        if tag:
            self._versions[tag] = session, version + 1
        return {"session": session, "version": version + 1}

    def _confirm(self, call: SipCall, answer: AudioDescription | None) -> None:
        if answer is None or call.hangs_up:
            return
        media = self._media.get(call.tag)
        try:
            chosen = choose_format(answer, self.config.encodings)
            if media is None:
                self._begin_media(call, answer, chosen)
                self._announce(call)
            else:
                self._apply_audio(media, answer, chosen)
        except (UnusableSdp, OptionError, AtCapacity, SessionExpired) as error:
            log.warning("call %s ends: %s", call.id, error)
            self._agent.hang_up(call, self._loop.time())

    def _begin_media(self, call: SipCall, audio: AudioDescription, chosen: ChosenFormat) -> None:
        """Creates the session of a call, which may begin on hold. Raises OptionError, AtCapacity, UnusableSdp."""
        source = self._source_of(call, audio)
        formats = audio.formats if call.offer is not None else {**offered_formats(), **audio.formats}
        types = {str(kind): describe_format(form) for kind, form in formats.items()}
        request = EdgeSessionRequest(
            source=source, payload_types=types, srtp=audio.key, options=self._options.pop(call.tag, {})
        )
        try:
            driver = self._service.driver
            sender = self._create_sender(call, audio)
            playout = CallPlayout(
                chosen.payload_type, chosen.form, lambda packet: driver.send(media.destination, media.protect(packet))
            )
        except UnsupportedOption as error:
            raise UnusableSdp(str(error)) from error
        try:
            created = self._service.create(request, lambda reason: self._finish(call, reason))
        except (OptionError, AtCapacity):
            self._run(playout.close())
            raise
        media = self._media[call.tag] = _Media(created.id, audio, chosen, playout, sender, source)
        self._calls[created.id] = call
        # `sendonly` from the beginning is no hold: a recorder sends so what it wants to be heard.
        if audio.direction == "inactive" or audio.is_unspecified:
            self._hold(media)

    def _create_sender(self, call: SipCall, audio: AudioDescription) -> SrtpSender | None:
        """Sender of what the other side gets encrypted; None for plain RTP. Raises UnusableSdp."""
        if audio.key is None:
            return None
        own = self._keys.setdefault(call.tag, checked_key(SrtpKey(suite=audio.key.suite)))
        if own.suite != audio.key.suite:
            raise UnusableSdp(f"an answer of {audio.key.suite}", f"the suite that was offered, {own.suite}")
        try:
            return SrtpSender(own)
        except ProgramMissing as missing:
            raise UnusableSdp(str(missing)) from missing

    def _announce(self, call: SipCall) -> None:
        """Tells of a call that both sides have taken."""
        media = self._media[call.tag]
        direction: Literal["in", "out"] = "in" if call.is_incoming else "out"
        told = CallBegun(
            call_id=call.id,
            caller=call.caller,
            called=call.called,
            direction=direction,
            encoding=describe_format(media.chosen.form),
        )
        self._service.publish(media.session_id, told)
        if media.held is not None:
            self._tell_hold(media)
        self._metrics.count_call("answered")
        self._tell(
            CallNote(
                type="call",
                session=media.session_id,
                call_id=call.id,
                caller=call.caller,
                called=call.called,
                direction=direction,
            )
        )

    def _change(self, call: SipCall) -> None:
        """Answers a re-INVITE: on hold, back from it, another address or format."""
        media = self._media.get(call.tag)
        if media is None:
            self._agent.reject(call, 488, self._loop.time())
            return
        if call.offer is not None:
            try:
                self._apply_audio(media, call.offer, choose_format(call.offer, self.config.encodings))
            except (UnusableSdp, OptionError) as error:
                self._agent.reject(call, 488, self._loop.time(), warning=str(error))
                return
            except SessionExpired:
                self._agent.reject(call, 480, self._loop.time())
                return
        self._agent.accept(call, self._describe(call), self._loop.time())

    def _apply_audio(self, media: _Media, audio: AudioDescription, chosen: ChosenFormat) -> None:
        """Follows a description that changes a call. Raises OptionError, SessionExpired, UnusableSdp."""
        call, stream, sender = self._calls[media.session_id], None, media.sender
        source = self._source_of(call, audio)  # whatever may fail comes first: a refusal leaves the call as it was
        if chosen != media.chosen:
            try:
                stream = RtpSendStream(chosen.payload_type, chosen.form)
            except UnsupportedOption as error:
                raise UnusableSdp(str(error)) from error
        if audio.key != media.audio.key:
            if audio.key is None and self._service.config.require_srtp:
                raise UnusableSdp("a change to plain RTP", "RTP/SAVP with a key, since require_srtp is set")
            sender = self._create_sender(call, audio)
        if not audio.is_held:
            self._service.redirect(media.session_id, source, audio.formats)
            media.destination = parse_source(source)
        if audio.key != media.audio.key:
            self._service.change_key(media.session_id, audio.key)
            media.sender = sender
        if stream is not None:
            media.playout.change_stream(stream)
        if audio.is_held and media.held is None:
            self._hold(media)
            self._tell_hold(media)
        media.audio, media.chosen = audio, chosen
        if not audio.is_held:
            self._resume(media)

    def _hold(self, media: _Media) -> None:
        self._service.hold(media.session_id)
        media.playout.is_paused = True
        call = self._calls[media.session_id]
        media.held = self._loop.call_later(self.config.hold_s, self._hang_up, call)

    def _tell_hold(self, media: _Media) -> None:
        self._service.publish(media.session_id, CallHeld(position_s=self._service.position_s(media.session_id)))

    def _resume(self, media: _Media) -> None:
        media.playout.resume()
        if media.held is not None:
            media.held.cancel()
            media.held = None
            self._service.publish(media.session_id, CallResumed(position_s=self._service.position_s(media.session_id)))

    def _hang_up(self, call: SipCall) -> None:
        self._agent.hang_up(call, self._loop.time())
        self._endpoint.pump()

    def _note_end(self, event: CallEnded, call: SipCall) -> None:
        media = self._media.get(call.tag)
        if media is None and event.cause in ENDED_OUTCOMES and not call.is_incoming:
            self._metrics.count_call(ENDED_OUTCOMES[event.cause])
        elif event.cause == "cancelled":
            self._metrics.count_call("cancelled")
        session = None if media is None else media.session_id
        self._options.pop(call.tag, None)
        self._versions.pop(call.tag, None)
        self._keys.pop(call.tag, None)
        reason: EndReason = "hangup" if event.cause in ("hangup", "cancelled") else "deleted"
        self._end_media(call.tag, "stopping" if self._is_closing else reason)
        self._tell(
            CallNote(type="call_end", session=session, call_id=call.id, cause=event.cause, status=event.status or None)
        )

    def _note_registration(self, event: RegistrationChanged) -> None:
        level = logging.INFO if event.is_registered or self._is_closing else logging.WARNING
        log.log(level, "registration at %s: %s", self.config.registrar, event.detail)
        self._tell(CallNote(type="registration", registered=event.is_registered, detail=event.detail))

    def _finish(self, call: SipCall, reason: EndReason) -> None:
        """Ends the call of a session whose audio has ended."""
        if call.tag in self._media:
            self._end_media(call.tag, reason)
            self._hang_up(call)

    def _end_media(self, tag: str, reason: EndReason) -> None:
        media = self._media.pop(tag, None)
        if media is None:
            return
        del self._calls[media.session_id]
        if media.held is not None:
            media.held.cancel()
        self._run(media.playout.close())
        with contextlib.suppress(SessionExpired):
            self._service.end(media.session_id, reason)

    def _run(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell(self, note: CallNote) -> None:
        self.events.append(note.type, msgspec.json.encode(note))

    # --- addresses -------------------------------------------------------------------------------------

    def _is_allowed(self, host: str) -> bool:
        if host == self._registrar_host:
            return True
        if self._networks:
            try:
                address = ipaddress.ip_address(host.partition("%")[0])
            except ValueError:
                return False
            return any(address in network for network in self._networks)
        return is_loopback(self.config.host) or bool(self.config.callers)

    def _source_of(self, call: SipCall, audio: AudioDescription) -> str:
        """Address that the audio of a call comes from and goes to. Raises UnusableSdp for one of this machine: what is
        played would go to its own services, or come back as speech."""
        host, port = call.peer.host if audio.is_unspecified else audio.host, audio.port
        loops = port == self._service.driver.port and (host == self.config.public_host or _is_own(host))
        if loops or (_is_own(host) and not _is_own(call.peer.host)):
            raise UnusableSdp(f"audio at {bracketed(host)}:{port}, of this machine", "an address of the telephone")
        return f"{bracketed(host)}:{port}"

    def _local_host(self, host: str) -> str:
        """Address of this machine for SIP, as another host sees it."""
        return self.config.public_host or _address_towards(host, self.config.host)

    def _media_host(self, host: str) -> str:
        """The same for RTP."""
        return self.config.public_host or _address_towards(host, self._service.config.host)


def _is_own(host: str) -> bool:
    """Returns whether an address is this machine's: one that is reached from itself."""
    if is_loopback(host):
        return True
    return is_address(host) and _address_towards(host, "::" if ":" in host else "0.0.0.0") == host


def _address_towards(host: str, own: str) -> str:
    """Returns `own`, an address of this machine; where that is every one, or a name, the one that a host sees."""
    try:
        if not ipaddress.ip_address(own).is_unspecified:
            return own
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host or own, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
