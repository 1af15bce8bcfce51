"""Service of the edge: a thread that receives packets for all sessions, and an event loop that sends their audio on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from asr_serve.edge.edge_config import EdgeConfig, check_stream_options, stream_query
from asr_serve.edge.edge_events import EdgeEvent, PartialText, TokenTaken
from asr_serve.edge.edge_session import EdgeSession, EdgeSessionState, EndReason
from asr_serve.edge.event_log import EdgeEventLog
from asr_serve.edge.gate_worker import GateQueue, GateWorker
from asr_serve.edge.packet_driver import Datagram, PacketDriver, describe_source, parse_source
from asr_serve.edge.payload_format import PayloadFormat, describe_format, parse_payload_types
from asr_serve.edge.rtcp import read_source_names
from asr_serve.edge.rtp import DropReason
from asr_serve.edge.sdp import parse_sdp, parse_sdp_key
from asr_serve.edge.session_tokens import SessionTokens, has_token_form
from asr_serve.edge.speech_gate import GateOutput
from asr_serve.edge.srtp import SrtpKey, SrtpReceiver, checked_key
from asr_serve.edge.uplink import Uplink, encode_event
from asr_serve.edge.uplink_transport import UplinkTransport
from asr_serve.errors import AtCapacity, OptionError, SessionExpired, UnknownSession
from asr_serve.metrics import EdgeMetrics
from asr_serve.units import samples_to_s
from asr_serve.webhook import Webhook

RECEIVE_MS = 10
TICK_S = 0.02
"""Time between two looks at sessions that got no packet."""
MEASURE_S = 1.0
BURST_S = 15.0
"""Seconds of `packets_per_s` that may come at once, when a network was stalled: with 200 a minute of 20 ms packets,
after which a session without packets has ended anyway."""
RTCP_PER_S, RTCP_BURST = 20_000.0, 20_000.0
"""RTCP packets that are read, of all senders together: a bound of the time that a flood takes."""
RTCP_SOURCE_PER_S, RTCP_SOURCE_BURST = 100.0, 500.0
"""RTCP packets of one address: those of 500 streams behind it, each of which sends one in five seconds (RFC 3550), and
their first ones at once."""
TOKENS_PER_S, TOKENS_BURST = 500.0, 1_000.0
"""Names that are looked up as tokens, of all addresses that may try."""
RETRY_MS = 1_000
KEEP_S = 60.0
"""Time for which the events of a session that has ended can be read."""
MAX_GONE = 4_096
"""Sessions that are remembered after that by their id alone."""
KEPT = 2
"""Sessions in all, those that have ended too, for each that may be open."""
GATED_S = 10.0
"""Longest wait for voice activity at the end of a session."""
STOP_S = 20.0
"""Longest wait for the last words of all sessions."""

log = logging.getLogger(__name__)


class EdgeSessionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for a session. Without `ssrc` and `source` an SSRC is chosen."""

    ssrc: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] | None = None
    """SSRC of its packets."""
    source: str | None = None
    """Address, or address and port, that its packets come from."""
    payload_types: dict[str, str] | None = None
    sdp: str | None = None
    """Session description whose first audio section names the payload types."""
    srtp: SrtpKey | None = None
    """Key of its packets, which are encrypted; one is made where it has a suite alone. An `sdp` brings its own."""
    token: bool = False
    """Whether its sender is found by a token, in place of `ssrc` and `source`: the answer has it."""
    options: dict[str, str | int | float | bool] = {}
    """Parameters of /v1/stream."""


class EdgeSessionCreated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer: where to send, and where to listen."""

    id: str
    port: int
    ssrc: int | None
    source: str | None
    payload_types: dict[str, str]
    srtp: SrtpKey | None = None
    token: str | None = None
    events: str


class _Running(NamedTuple):
    session: EdgeSession
    uplink: Uplink
    log: EdgeEventLog
    on_finish: Callable[[EndReason], None] | None
    gate: GateQueue | None
    """Queue of its audio for voice activity; None: all of it is sent on."""


class EdgeService:
    """Service whose methods are called on its event loop. The receiving thread shares the table of sessions with it,
    under a lock that is held for one batch of packets at most."""

    def __init__(
        self,
        config: EdgeConfig,
        driver: PacketDriver,
        metrics: EdgeMetrics,
        transport: UplinkTransport,
        *,
        gates: GateWorker | None = None,
    ) -> None:
        """`transport` and `gates` are closed with the service. `gates`: with a place for each session; None: everything
        is sent on."""
        self.config, self.driver, self._metrics, self._transport = config, driver, metrics, transport
        self._gates = gates
        self._formats = parse_payload_types(config.payload_types)
        self._lock = threading.Lock()
        self._by_flow: dict[int, _Running] = {}
        self._by_id: dict[str, _Running] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Ids of sessions that have ended and are forgotten."""
        self._flows = itertools.count(1)
        self._tokens = SessionTokens()
        self._token_room, self._token_s = TOKENS_BURST, 0.0
        """Tokens that may be looked up, and when that was reckoned."""
        self._known: tuple[set[bytes], set[int | None]] | None = None
        """Addresses and SSRCs of the open sessions; None: they have changed."""
        self._token_flow = 0
        """Flow of RTCP while there are tokens; 0: none is read."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._driver_counts: dict[str, int] = {}
        self._measured_s = 0.0
        self._webhook = None if config.webhook is None else Webhook(config.webhook, config.webhook_secret)
        self._handed_over: deque[tuple[_Running, list[EdgeEvent]]] = deque()
        self._delivering = False
        self._thread = threading.Thread(target=self._receive_loop, name="edge-receive", daemon=True)
        self._thread.start()

    # --- sessions --------------------------------------------------------------------------------------

    def create(
        self, request: EdgeSessionRequest, on_finish: Callable[[EndReason], None] | None = None
    ) -> EdgeSessionCreated:
        """Creates a session. `on_finish`: called when its audio has ended. Raises OptionError, UnknownModel,
        AtCapacity."""
        if request.token and (request.ssrc is not None or request.source is not None):
            raise OptionError("token came, and ssrc or source", "one of them: a token finds its sender", param="token")
        formats = self._formats_for(request)
        key = self._key_for(request)
        srtp = None if key is None else SrtpReceiver(key)
        self.check_options(request.options)
        source = b"" if request.source is None else parse_source(request.source)
        query = stream_query(self.config.options, request.options)
        per_s = float(self.config.packets_per_s)
        with self._lock:
            if len(self._by_flow) >= self.config.max_sessions:
                raise AtCapacity(
                    f"a session beyond the {len(self._by_flow)} there are", "max_sessions of the edge", RETRY_MS
                )
            ssrc = self._choose_ssrc(request, source)
            flow = next(self._flows)
            session = EdgeSession(
                flow,
                formats,
                ssrc=ssrc,
                source=source,
                window_s=self.config.window_ms / 1_000,
                spool_s=self.config.spool_s,
                corrects_drift=self.config.drift,
                now_s=time.monotonic(),
                srtp=srtp,
            )
            events = EdgeEventLog()
            uplink = Uplink(self._transport.open, query, session.spool, lambda event: self._publish(running, [event]))
            gate = (
                None
                if self._gates is None
                else self._gates.open(
                    lambda audio, last, ungated: self._take_gated(running, audio, last, ungated_samples=ungated)
                )
            )
            running = _Running(session, uplink, events, on_finish, gate)
            self._by_flow[flow] = self._by_id[session.id] = running
            self._known = None
            token = None
            if request.token:
                token = self._issue_token(session)
            elif ssrc is None:
                self.driver.admit_source(flow, source, per_s, per_s * BURST_S)
            else:
                pinned = source if source[16:] != b"\0\0" else b""
                self.driver.admit_ssrc(flow, ssrc, pinned, per_s, per_s * BURST_S)
        while len(self._by_id) > KEPT * self.config.max_sessions:
            self._drop(next(id for id, each in self._by_id.items() if each.session.end_reason is not None))
        self._tasks[session.id] = self._loop.create_task(self._run_session(running))
        names = {str(kind): describe_format(form) for kind, form in formats.items()}
        return EdgeSessionCreated(
            id=session.id,
            port=self.driver.port,
            ssrc=ssrc,
            source=describe_source(source) if source else None,
            payload_types=names,
            srtp=key,
            token=token,
            events=f"/v1/edge/sessions/{session.id}/events",
        )

    def check_options(self, options: Mapping[str, str | int | float | bool]) -> None:
        """Raises OptionError or UnknownModel for options that the server refuses, as far as that is known here."""
        self._transport.check(check_stream_options(self.config.options, options))

    def end(self, session_id: str, reason: EndReason = "deleted") -> None:
        """Ends a session's audio; its last words follow as events. Raises SessionExpired."""
        running = self._find(session_id)
        with self._lock:
            self._finish(running, reason)

    def hold(self, session_id: str) -> None:
        """Takes no packets of a session until `redirect`: silence stands for its time. Raises SessionExpired."""
        running = self._find(session_id)
        with self._lock:
            if running.session.end_reason is None:
                self._forget_flow(running)
                running.session.is_held = True

    def change_key(self, session_id: str, key: SrtpKey | None) -> None:
        """Takes a session's packets with another key from now on; None: plain ones. Raises SessionExpired, OptionError,
        ProgramMissing."""
        if key is None and self.config.require_srtp:
            raise OptionError("a session without srtp", "require_srtp of the edge wants a key", param="srtp")
        srtp = None if key is None else SrtpReceiver(checked_key(key))
        running = self._find(session_id)
        with self._lock:
            running.session.change_key(srtp)

    def redirect(self, session_id: str, source: str, formats: Mapping[int, PayloadFormat]) -> None:
        """Takes a session's packets from this source from now on. Raises SessionExpired; OptionError for a source of
        another session."""
        running, key, per_s = self._find(session_id), parse_source(source), float(self.config.packets_per_s)
        session = running.session
        with self._lock:
            if session.end_reason is not None:
                return
            if any(each.session.source == key and each is not running for each in self._by_flow.values()):
                raise OptionError(f"source={source!r} is another session's", "one session for a source", param="source")
            self._forget_flow(self._by_id[session_id])
            self.driver.admit_source(session.flow, key, per_s, per_s * BURST_S)
            session.change_formats(formats)
            session.source, session.latched, session.is_held = key, False, False
            self._known = None
            session.last_packet_s = time.monotonic()

    def position_s(self, session_id: str) -> float:
        """End of a session's audio so far. Raises SessionExpired."""
        return samples_to_s(self._find(session_id).session.spool.end)

    def publish(self, session_id: str, event: EdgeEvent) -> None:
        """Adds an event to those of a session. Raises SessionExpired."""
        running = self._find(session_id)
        if not running.log.ended:
            self._publish(running, [event])

    def describe_all(self) -> list[EdgeSessionState]:
        with self._lock:
            return [self._describe(running) for running in self._by_id.values()]

    def describe(self, session_id: str) -> EdgeSessionState:
        """Raises SessionExpired."""
        running = self._find(session_id)
        with self._lock:
            return self._describe(running)

    def events(self, session_id: str) -> EdgeEventLog:
        """Raises SessionExpired."""
        return self._find(session_id).log

    def render_metrics(self) -> bytes:
        with self._lock:
            self._measure(time.monotonic())
        return self._metrics.render()

    async def close(self) -> None:
        """Ends all sessions, waits for their last words, and stops receiving."""
        with self._lock:
            for running in list(self._by_flow.values()):
                self._finish(running, "stopping")
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)
        if self._gates is not None:
            await asyncio.to_thread(self._gates.close)
        self.driver.close()
        if self._webhook is not None:
            await asyncio.to_thread(self._webhook.close, STOP_S)

    def _formats_for(self, request: EdgeSessionRequest) -> dict[int, PayloadFormat]:
        if request.sdp is not None and request.payload_types is not None:
            raise OptionError("sdp and payload_types came", "one of them", param="sdp")
        if request.sdp is not None:
            return parse_sdp(request.sdp)
        return self._formats if request.payload_types is None else parse_payload_types(request.payload_types)

    def _key_for(self, request: EdgeSessionRequest) -> SrtpKey | None:
        offered = None if request.sdp is None else parse_sdp_key(request.sdp)
        if offered is not None and request.srtp is not None:
            raise OptionError("srtp came, and an sdp with a key", "one of them", param="srtp")
        key = offered or request.srtp
        if key is None and self.config.require_srtp:
            raise OptionError(
                "a session without srtp", "require_srtp of the edge wants a key", 'like {"srtp": {}}', param="srtp"
            )
        return None if key is None else checked_key(key)

    def _choose_ssrc(self, request: EdgeSessionRequest, source: bytes) -> int | None:
        if request.token:
            return None
        sessions = [running.session for running in self._by_flow.values()]
        if request.ssrc is None and source:
            if any(session.source == source for session in sessions):
                raise OptionError(
                    f"source={request.source!r} is another session's", "one session for a source", param="source"
                )
            return None
        taken = {session.ssrc for session in sessions}
        if request.ssrc is not None:
            if request.ssrc in taken:
                raise OptionError(f"ssrc={request.ssrc} is another session's", "a free one", param="ssrc")
            return request.ssrc
        while (ssrc := secrets.randbits(32)) in taken:
            continue
        return ssrc

    def _find(self, session_id: str) -> _Running:
        running = self._by_id.get(session_id)
        if running is not None:
            return running
        create_one = "create one: POST /v1/edge/sessions"
        if session_id in self._gone:
            raise SessionExpired(
                f"the edge session {session_id[:60]!r} has ended", f"one is kept for {KEEP_S:g} s", create_one
            )
        raise UnknownSession(f"no edge session {session_id[:60]!r}", "one that was created here", create_one)

    def _drop(self, session_id: str) -> None:
        """Forgets a session that has ended, but for its id. Idempotent."""
        if self._by_id.pop(session_id, None) is not None:
            self._gone[session_id] = None
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)

    def _describe(self, running: _Running) -> EdgeSessionState:
        """State of a session, with the lock held."""
        if running.session.end_reason is None:
            self._note_over_rate(running)
        return running.session.describe(
            connected=running.uplink.connected, segments=running.uplink.segments, events=running.log.last_number
        )

    # --- the loop's side -------------------------------------------------------------------------------

    async def _run_session(self, running: _Running) -> None:
        """Sends a session's audio until it has ended, and forgets it some time later."""
        session = running.session
        try:
            while not session.spool.end and not session.spool.ended:
                await running.uplink.wait_for_audio()
            if session.spool.end:
                await running.uplink.run()
        finally:
            with self._lock:
                self._finish(running, "failed")
            with contextlib.suppress(TimeoutError):  # until voice activity has seen the rest: the account is of all
                async with asyncio.timeout(GATED_S):
                    while not session.spool.ended:
                        await running.uplink.wait_for_audio()
            session.spool.close()  # what the gate brings after the account is discarded
            self._deliver()  # what the receiving thread has told comes first
            self._publish(running, [session.ended_event(running.uplink.segments)])
            running.log.close()
            del self._tasks[session.id]
            self._loop.call_later(KEEP_S, self._drop, session.id)

    def _publish(self, running: _Running, events: list[EdgeEvent]) -> None:
        for event in events:
            logged = running.log.append(event.type, encode_event(running.session.id, event))
            if self._webhook is not None and not isinstance(event, PartialText):
                self._webhook.post(f"{running.session.id}-{logged.id}", logged.message.encode())

    def _finish(self, running: _Running, reason: EndReason) -> None:
        """Ends a session's audio, with the lock held. Idempotent."""
        if running.session.end_reason is None:
            self._forget_flow(running)
            del self._by_flow[running.session.flow]
            self._known = None
            audio: list[GateOutput] = []
            events: list[EdgeEvent] = []
            try:
                audio, events = running.session.finish(reason)
            except Exception:
                log.exception("the last audio of edge session %s failed", running.session.id)
            self._forward(running, audio, events, last=True)
            if running.gate is None:  # otherwise when the gate has brought the rest
                self._account(running.session)
            if running.on_finish is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(running.on_finish, reason)

    def _forget_flow(self, running: _Running) -> None:
        """Takes no packets of a session any more, with the lock held."""
        self._note_over_rate(running)
        self._withdraw_token(running.session)
        self.driver.forget(running.session.flow)
        running.session.readmit()

    def _issue_token(self, session: EdgeSession) -> str:
        """Makes a session's token, with the lock held, and takes RTCP from now on."""
        session.awaits_token = True
        if not self._token_flow:
            self._token_flow = next(self._flows)
            self.driver.admit_rtcp(self._token_flow, RTCP_PER_S, RTCP_BURST, RTCP_SOURCE_PER_S, RTCP_SOURCE_BURST)
        return self._tokens.issue(session.flow)

    def _withdraw_token(self, session: EdgeSession) -> None:
        """Takes back a session's token, with the lock held."""
        session.awaits_token = False
        self._tokens.withdraw(session.flow)
        self._stop_rtcp()

    def _stop_rtcp(self) -> None:
        """Takes no RTCP any more where no sender is awaited."""
        if self._token_flow and not self._tokens.are_awaited:
            self.driver.forget(self._token_flow)
            self._token_flow = 0

    def _take_rtcp(self, source: bytes, datagram: bytes, now_s: float) -> None:
        """Admits the sender of a token, with the lock held; all other RTCP is dropped. An address that no session comes
        from may be wrong some times, and then uses nothing of what all may look up."""
        reason, address = DropReason.RTCP, source[:16]
        if self._known is None:
            sessions = [each.session for each in self._by_flow.values()]
            self._known = {each.source[:16] for each in sessions}, {each.ssrc for each in sessions}
        addresses, ssrcs = self._known
        is_stranger = address not in addresses
        if is_stranger and not self._tokens.allows(address, now_s):
            self._metrics.count_drop(DropReason.UNKNOWN_TOKEN)
            return
        for ssrc, name in read_source_names(datagram):
            if not has_token_form(name):  # the name of any sender of RTCP
                continue
            if not self._take_token_room(now_s):
                break
            flow = self._tokens.find(name)
            if flow is None:
                if is_stranger:
                    self._tokens.note_wrong(address, now_s)
                reason = DropReason.UNKNOWN_TOKEN
            elif ssrc not in ssrcs and self._tokens.use(flow):
                self._admit_sender(self._by_flow[flow], ssrc, source)
                return
        self._metrics.count_drop(reason)

    def _take_token_room(self, now_s: float) -> bool:
        room = min(TOKENS_BURST, self._token_room + max(0.0, now_s - self._token_s) * TOKENS_PER_S)
        self._token_s = max(self._token_s, now_s)
        self._token_room = room - 1 if room >= 1 else room
        return room >= 1

    def _admit_sender(self, running: _Running, ssrc: int, source: bytes) -> None:
        """Takes packets with an SSRC from any port of the address that has told the session's token."""
        session, per_s = running.session, float(self.config.packets_per_s)
        session.awaits_token, session.ssrc, session.source = False, ssrc, source[:16] + b"\0\0"
        self._known = None
        session.last_packet_s = time.monotonic()
        self.driver.admit_ssrc(session.flow, ssrc, b"", per_s, per_s * BURST_S)
        self._stop_rtcp()
        address = describe_source(source).rpartition(":")[0].strip("[]")
        self._hand_over(running, [TokenTaken(ssrc=ssrc, address=address)])

    def _note_over_rate(self, running: _Running) -> None:
        if events := running.session.note_over_rate(self.driver.over_rate(running.session.flow)):
            self._hand_over(running, events)

    def _forward(
        self, running: _Running, audio: list[GateOutput], events: list[EdgeEvent], *, last: bool = False
    ) -> None:
        """Brings audio to the spool, by way of voice activity where there is any, and events to the loop."""
        if self._gates is None or running.gate is None:
            events = events + running.session.spool_in(audio, last=last)
        else:
            if audio:
                self._gates.append(running.gate, audio)
            if last:
                self._gates.finish(running.gate)
        if events or audio or last:
            self._hand_over(running, events)

    def _take_gated(self, running: _Running, audio: list[GateOutput], last: bool, *, ungated_samples: int) -> None:
        """Brings what a gate forwards to the spool, on the thread of the gates; at its end the session is accounted."""
        events = running.session.note_ungated(ungated_samples) + running.session.spool_in(audio, last=last)
        if last:
            with self._lock:
                self._account(running.session)
        self._hand_over(running, events)

    def _account(self, session: EdgeSession) -> None:
        """Counts a session's stream for the last time, with the lock held."""
        self._count_stream(session)
        self._metrics.forget_stream(session.flow)

    def _hand_over(self, running: _Running, events: list[EdgeEvent]) -> None:
        """Tells the loop, from any thread, that a session has more audio or events. The loop is woken once for all that
        a batch of packets has brought."""
        self._handed_over.append((running, events))
        if not self._delivering and not self._loop.is_closed():
            self._delivering = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._delivering = False  # first: what is handed over from now on calls again
        while self._handed_over:
            running, events = self._handed_over.popleft()
            if not running.log.ended:
                self._publish(running, events)
            running.uplink.wake()

    # --- the receiving thread --------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        next_tick_s = 0.0
        while not self._stopping.is_set():
            try:
                batch = self.driver.receive(RECEIVE_MS)
                now_s = time.monotonic()
                with self._lock:
                    touched = self._push_batch(batch)
                    if now_s >= next_tick_s:
                        next_tick_s = now_s + TICK_S
                        touched = set(self._by_flow)
                    for flow in touched & self._by_flow.keys():
                        self._advance(flow, now_s)
                    if now_s - self._measured_s >= MEASURE_S:
                        self._measure(now_s)
            except Exception:  # the thread is everybody's: it must not end for one
                log.exception("the edge failed on a batch of packets")
                self._stopping.wait(TICK_S)

    def _push_batch(self, datagrams: list[Datagram]) -> set[int]:
        touched = set()
        for flow, source, payload, arrival_s in datagrams:
            if flow == self._token_flow:
                self._take_rtcp(source, payload, arrival_s)
                continue
            running = self._by_flow.get(flow)
            if running is None:
                continue
            session = running.session
            if not session.expects(source):  # received before `redirect` or `hold`, or before another was latched
                self._metrics.count_drop(DropReason.UNKNOWN_SOURCE)
                continue
            try:
                packet = session.push(payload, arrival_s)
            except Exception:
                log.exception("edge session %s failed", session.id)
                self._finish(running, "failed")
                continue
            if isinstance(packet, str):
                self._metrics.count_drop(packet)
                continue
            if not session.latched or packet.ssrc != session.ssrc:
                session.latched, session.source, session.ssrc = True, source, packet.ssrc
                self._known = None
                self.driver.latch(flow, source, packet.ssrc)
            touched.add(flow)
        return touched

    def _advance(self, flow: int, now_s: float) -> None:
        running = self._by_flow[flow]
        session = running.session
        try:
            audio, events = session.advance(now_s)
            self._forward(running, audio, events)
            if not session.is_held and now_s - session.last_packet_s > self.config.idle_s:
                self._finish(running, "idle")
        except Exception:
            log.exception("edge session %s failed", session.id)
            self._finish(running, "failed")

    def _measure(self, now_s: float) -> None:
        self._measured_s = now_s
        counts = self.driver.counts()
        self._metrics.count_driver({name: n - self._driver_counts.get(name, 0) for name, n in counts.items()})
        self._driver_counts = counts
        for running in self._by_flow.values():
            self._note_over_rate(running)
        sessions = [running.session for running in self._by_flow.values()]
        for session in sessions:
            self._count_stream(session)
        self._metrics.note_sessions(
            [session.stream.jitter_s for session in sessions], [session.stream.drift_ppm for session in sessions]
        )
        connected = sum(running.uplink.connected for running in self._by_id.values())
        self._metrics.uplinks.set(connected)
        if self._gates is not None:
            self._metrics.note_ungated(samples_to_s(self._gates.ungated_samples))
        if self._webhook is not None:
            self._metrics.note_webhook(delivered=self._webhook.delivered, dropped=self._webhook.dropped)

    def _count_stream(self, session: EdgeSession) -> None:
        stream, discarded_s = session.stream, samples_to_s(session.spool.discarded_samples)
        audio_s = stream.received_s, stream.concealed_s, stream.silent_s, discarded_s
        self._metrics.count_stream(session.flow, audio_s, stream.lost_packets)
