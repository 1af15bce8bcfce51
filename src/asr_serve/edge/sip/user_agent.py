"""SIP user agent without input and output: bytes and time in, bytes and events of calls out.

It answers and places calls of one audio stream, registers, and leaves to its user what a call is for: an event says
what has come, a method says what to do. Source: RFC 3261; RFC 3264 for offers and answers.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Literal, NamedTuple

from asr_serve.edge.sip.dialog import SipDialog, contact_of, new_tag
from asr_serve.edge.sip.digest import DigestVerifier, answer_challenge, find_challenge
from asr_serve.edge.sip.message import (
    DEFAULT_PORT,
    MalformedSip,
    SipAddress,
    SipRequest,
    SipResponse,
    SipUri,
    bracketed,
    parse_sip,
    parse_uri,
    respond_to,
)
from asr_serve.edge.sip.registration import SipAccount, SipRegistration
from asr_serve.edge.sip.session_description import AudioDescription, UnusableSdp, parse_audio
from asr_serve.edge.sip.transactions import (
    RETRY_AFTER_S,
    TIMEOUT_S,
    AckReceived,
    AckTimedOut,
    InviteEnded,
    RequestReceived,
    RequestTimedOut,
    ResponseReceived,
    SipPeer,
    TransactionEvent,
    TransactionLayer,
    new_branch,
)
from asr_serve.errors import AtCapacity

METHODS = ("INVITE", "ACK", "BYE", "CANCEL", "OPTIONS")
SDP_TYPE = "application/sdp"
MAX_RING_S = 180.0
"""Longest time for which a call of ours rings."""
MAX_CHALLENGES = 2

EndCause = Literal["hangup", "cancelled", "rejected", "failed", "local"]
"""Cause of a call's end: the other side hung up, or gave up before the answer; it, or we, did not take the call; the
network or the protocol failed; we hung up."""


class CallState(StrEnum):
    OFFERED = "offered"
    """Call for us that has no final response."""
    CALLING = "calling"
    """Call of ours that has none."""
    ANSWERED = "answered"
    """Call for us that we have taken, and that waits for its ACK."""
    CONFIRMED = "confirmed"
    ENDED = "ended"


class SipCall:
    """Call of one dialog."""

    def __init__(self, state: CallState, peer: SipPeer, request: SipRequest, *, tag: str) -> None:
        self.state, self.peer, self.tag = state, peer, tag
        self.is_incoming = state is CallState.OFFERED
        self.request = request
        """INVITE that began it."""
        self.invite_key = ""
        """Transaction of the last INVITE."""
        self.dialog: SipDialog | None = None
        self.offer: AudioDescription | None = None
        """Offer that came with the last INVITE; None: it wants one of ours."""
        self.caller: str = str(request.sender.uri)
        self.called: str = str(request.recipient.uri)
        self.hangs_up = False
        """Whether it is to end as soon as it may."""

    @property
    def id(self) -> str:
        return self.request.call_id


class CallOffered(NamedTuple):
    """Call for us: `ring`, `accept` or `reject` it."""

    call: SipCall


class CallRinging(NamedTuple):
    """Call of ours that rings."""

    call: SipCall


class CallConfirmed(NamedTuple):
    """Call, or change of one, that both sides know of. `answer`: that to an offer of ours."""

    call: SipCall
    answer: AudioDescription | None


class CallChanged(NamedTuple):
    """Re-INVITE, whose offer is `call.offer`: `accept` or `reject` it."""

    call: SipCall


class CallEnded(NamedTuple):
    call: SipCall
    cause: EndCause
    status: int
    """Status of a response; 0 for none."""


class RegistrationChanged(NamedTuple):
    is_registered: bool
    detail: str


AgentEvent = CallOffered | CallRinging | CallConfirmed | CallChanged | CallEnded | RegistrationChanged


class _Sent(NamedTuple):
    """Request of ours that waits for its response."""

    request: SipRequest
    peer: SipPeer
    call: SipCall | None
    challenges: int


class UserAgent:
    """User agent of one address.

    In      `receive`: a message and its origin; `advance` at `due_s`; what to do with calls
    Out     `take_output`: bytes and where they go; `take_events`
    State   at most `max_calls` calls; what the transaction layer holds
    """

    def __init__(
        self,
        *,
        user: str,
        port: Callable[[str], int],
        local_host: Callable[[str], str],
        is_allowed: Callable[[str], bool],
        is_trusted: Callable[[str], bool] = lambda _: False,
        max_calls: int,
        verifier: DigestVerifier | None = None,
        account: SipAccount | None = None,
        product: str = "asr-serve",
    ) -> None:
        """`port`: ours, of a transport; `local_host`: our address as a peer sees it; `is_allowed`: whether messages of
        an address are read, and `is_trusted` whether its calls need no credentials; `verifier`: of those; `account`:
        where we are registered."""
        self._user, self._port, self._local_host = user, port, local_host
        self._is_allowed, self._is_trusted = is_allowed, is_trusted
        self._verifier, self._max_calls, self._account, self._product = verifier, max_calls, account, product
        self.transactions = TransactionLayer()
        self._calls: dict[tuple[str, str], SipCall] = {}
        """Calls by Call-ID and our tag."""
        self._by_invite: dict[str, SipCall] = {}
        self._sent: dict[str, _Sent] = {}
        self._events: list[AgentEvent] = []
        self._ring_ends_s: dict[str, float] = {}
        """Calls of ours that ring, by transaction."""
        self.registration: SipRegistration | None = None
        self._registrar: SipPeer | None = None
        if account is not None:
            uri = account.registrar
            self._registrar = SipPeer(uri.transport, account.address, uri.port or DEFAULT_PORT)
            self.registration = SipRegistration(account, self._contact_uri(self._registrar))
        self.counts: Counter[str] = Counter()
        """Messages: received, malformed, not_allowed, out_of_dialog, and requests refused: busy, unauthorized."""

    @property
    def calls(self) -> list[SipCall]:
        return list(self._calls.values())

    @property
    def due_s(self) -> float | None:
        """Time at which `advance` has something to do."""
        times = [self.transactions.due_s, *self._ring_ends_s.values()]
        times.append(None if self.registration is None else self.registration.due_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def waits_for_responses(self) -> bool:
        """Returns whether a BYE, CANCEL or REGISTER of ours has no response yet."""
        return any(sent.request.method != "INVITE" for sent in self._sent.values())

    def take_output(self) -> list[tuple[SipPeer, bytes]]:
        return self.transactions.take_output()

    def take_events(self) -> list[AgentEvent]:
        events, self._events = self._events, []
        return events

    # --- input -----------------------------------------------------------------------------------------

    def is_trusted(self, host: str) -> bool:
        """Returns whether calls of a host need no credentials."""
        return self._is_trusted(host)

    def allows_connection(self, host: str) -> bool:
        """Returns whether messages of a host that connects would be read; counts one that may not."""
        if not self._is_allowed(host):
            self.counts["not_allowed"] += 1
            return False
        return True

    def receive(self, data: bytes, peer: SipPeer, now_s: float) -> None:
        """Takes a datagram, or a message of a connection. What is no SIP is dropped and counted."""
        self.counts["received"] += 1
        if not self._is_allowed(peer.host):
            self.counts["not_allowed"] += 1
            return
        if not data.strip(b"\r\n\0"):
            return  # a ping
        try:
            message = _with_origin(parse_sip(data), peer)
            in_dialog = isinstance(message, SipRequest) and (message.call_id, message.recipient.tag) in self._calls
            is_trusted = in_dialog or self._is_trusted(peer.host)
            for event in self.transactions.receive(message, peer, now_s, is_trusted=is_trusted):
                self._apply(event, now_s)
        except MalformedSip:
            self.counts["malformed"] += 1

    def advance(self, now_s: float) -> None:
        for event in self.transactions.advance(now_s):
            self._apply(event, now_s)
        for key in [key for key, end_s in self._ring_ends_s.items() if end_s <= now_s]:
            self._cancel(key, now_s)
        registration = self.registration
        if registration is not None and registration.due_s is not None and registration.due_s <= now_s:
            assert self._registrar is not None
            request = registration.build_request(self._via(self._registrar))
            self._send(request, self._registrar, None, now_s)

    def forget_connection(self, peer: SipPeer) -> None:
        """Notes that a connection is lost: requests of its calls go to where their Contact says."""
        for call in self._calls.values():
            if call.dialog is not None and call.dialog.peer == peer:
                call.dialog.is_disconnected = True

    def end_registration(self) -> None:
        if self.registration is not None:
            self.registration.end()

    # --- calls for us ----------------------------------------------------------------------------------

    def ring(self, call: SipCall, now_s: float) -> None:
        if call.state is CallState.OFFERED:
            response = respond_to(call.request, 180, call.tag).add("contact", f"<{self._contact_uri(call.peer)}>")
            self.transactions.respond(call.invite_key, response, now_s)

    def accept(self, call: SipCall, sdp: str, now_s: float) -> None:
        """Takes a call that was offered, or a change of one. `sdp`: the answer to its offer, or an offer."""
        request = self.transactions.request_of(call.invite_key)
        if request is None or call.state not in (CallState.OFFERED, CallState.CONFIRMED):
            return
        response = respond_to(request, 200, call.tag)
        response.add("contact", f"<{self._contact_uri(call.peer)}>").add("allow", ", ".join(METHODS))
        response.add("supported", "").add("server", self._product)
        if call.state is CallState.OFFERED:
            call.state = CallState.ANSWERED
        self._respond_with_sdp(call, response, sdp, now_s)

    def reject(self, call: SipCall, status: int, now_s: float, *, warning: str = "", retry_after_s: int = 0) -> None:
        """Refuses a call that was offered, which ends it, or a change, which leaves it as it was."""
        request = self.transactions.request_of(call.invite_key)
        if request is None or call.state not in (CallState.OFFERED, CallState.CONFIRMED):
            return
        response = respond_to(request, status, call.tag)
        if warning:
            response.add("warning", f'399 {self._product} "{_one_line(warning)}"')
        if retry_after_s:
            response.add("retry-after", str(retry_after_s))
        self.transactions.respond(call.invite_key, response, now_s)
        self._by_invite.pop(call.invite_key, None)
        if call.state is CallState.OFFERED:
            self._end(call, "rejected", status)

    def hang_up(self, call: SipCall, now_s: float) -> None:
        """Ends a call in any state. Idempotent."""
        match call.state:
            case CallState.OFFERED:
                self.reject(call, 480, now_s)
            case CallState.ANSWERED:  # no BYE before the ACK (RFC 3261, section 15)
                call.hangs_up = True
            case CallState.CALLING:
                self._cancel(call.invite_key, now_s)
            case CallState.CONFIRMED:
                self._bye(call, now_s)
                self._end(call, "local", 0)

    # --- calls of ours ---------------------------------------------------------------------------------

    def place_call(self, uri: str, sdp: str, now_s: float, *, address: str = "") -> SipCall:
        """Calls somebody, through the account's PBX if there is one. `address`: of the URI's host, where that is a name
        and there is no PBX. Raises MalformedSip for a wrong URI, and
        AtCapacity."""
        if len(self._calls) >= self._max_calls:
            raise AtCapacity(f"a call beyond the {len(self._calls)} there are", "max_calls", RETRY_AFTER_S * 1_000)
        target = parse_uri(uri)
        if target.transport not in ("udp", "tcp"):
            raise MalformedSip("a transport that is neither udp nor tcp")
        uri = str(target)  # what was checked is what is sent
        peer = self._registrar or SipPeer(target.transport, address or target.host, target.port or DEFAULT_PORT)
        tag = new_tag()
        domain = self._account.registrar.host if self._account is not None else self._local_host(peer.host)
        user = self._account.user if self._account is not None else self._user
        own = SipAddress(str(SipUri(domain, None, user))).with_param("tag", tag)
        headers = [("via", self._via(peer)), ("max-forwards", "70"), ("from", str(own)), ("to", f"<{uri}>")]
        headers += [("call-id", f"{secrets.token_hex(12)}@{domain}"), ("cseq", "1 INVITE")]
        headers += [("contact", f"<{self._contact_uri(peer)}>"), ("allow", ", ".join(METHODS))]
        headers += [("user-agent", self._product), ("content-type", SDP_TYPE)]
        call = SipCall(CallState.CALLING, peer, SipRequest("INVITE", uri, headers, sdp.encode()), tag=tag)
        self._calls[call.id, tag] = call
        call.invite_key = self._send(call.request, peer, call, now_s)
        self._ring_ends_s[call.invite_key] = now_s + MAX_RING_S
        return call

    # --- events of transactions ------------------------------------------------------------------------

    def _apply(self, event: TransactionEvent, now_s: float) -> None:
        match event:
            case AckReceived():
                self._receive_ack(event.request, now_s)
            case InviteEnded():
                self._sent.pop(event.key, None)
            case RequestReceived():
                self._receive_request(event.key, event.request, event.peer, now_s)
            case ResponseReceived():
                self._receive_response(event.key, event.response, now_s)
            case RequestTimedOut():
                self._time_out(event.key, now_s)
            case AckTimedOut():
                call = self._by_invite.pop(event.key, None)
                if call is not None and call.state is not CallState.ENDED:
                    self._bye(call, now_s)
                    self._end(call, "failed", 0)

    def _receive_request(self, key: str, request: SipRequest, peer: SipPeer, now_s: float) -> None:
        def answer(status: int, *headers: tuple[str, str]) -> None:
            response = respond_to(request, status, new_tag())
            response.headers += headers
            self.transactions.respond(key, response, now_s)

        def answer_once(status: int, *headers: tuple[str, str]) -> None:
            self.transactions.respond_statelessly(key, status, *headers)

        # Whatever needs no credentials is answered without a state: its sender may be anybody, and not where it says.
        tag = request.recipient.tag
        if request.method == "CANCEL":
            self._receive_cancel(key, request, answer, now_s)
        elif request.method not in METHODS:
            self.counts["method_not_allowed"] += 1
            answer_once(405, ("allow", ", ".join(METHODS)))
        elif request.get_all("require"):
            answer_once(420, *(("unsupported", each) for each in request.get_all("require")))
        elif tag:
            call = self._calls.get((request.call_id, tag))
            if call is None or call.dialog is None or call.dialog.remote.tag != request.sender.tag:
                self.counts["out_of_dialog"] += 1
                answer_once(481)
            else:
                self._receive_in_dialog(key, call, request, answer, now_s)
        elif request.method == "OPTIONS":
            headers = [("allow", ", ".join(METHODS)), ("accept", SDP_TYPE), ("server", self._product)]
            answer_once(200, *headers)
        elif request.method == "INVITE":
            self._receive_invite(key, request, peer, answer, answer_once, now_s)
        else:
            self.counts["out_of_dialog"] += 1
            answer_once(481)

    def _receive_invite(
        self,
        key: str,
        request: SipRequest,
        peer: SipPeer,
        answer: Callable[..., None],
        answer_once: Callable[..., None],
        now_s: float,
    ) -> None:
        """`answer_once`: answers without a state, which is not for what has used up a nonce."""
        if request.uri.partition(":")[0].lower() not in ("sip", "sips"):
            answer_once(416)
            return
        if self._verifier is not None and not self._is_trusted(peer.host):
            user = self._verifier.verify(request, now_s)
            if not isinstance(user, str):
                self.counts["unauthorized"] += 1
                values = self._verifier.challenges(now_s, stale=user)
                answer_once(401, *(("www-authenticate", value) for value in values))
                return
        if any(call.id == request.call_id and call.request.sender == request.sender for call in self._calls.values()):
            answer(482)  # the same call by two ways (RFC 3261, section 8.2.2.2)
            return
        if len(self._calls) >= self._max_calls:
            self.counts["busy"] += 1
            answer(486, ("retry-after", str(RETRY_AFTER_S)))
            return
        call = SipCall(CallState.OFFERED, peer, request, tag=new_tag())
        call.invite_key = key
        try:
            call.dialog = SipDialog.of_request(request, call.tag, peer)
        except MalformedSip:
            answer(400)
            return
        if (refusal := self._read_offer(call, request)) is not None:
            answer(*refusal)
            return
        self._calls[call.id, call.tag] = self._by_invite[key] = call
        self._events.append(CallOffered(call))

    def _read_offer(self, call: SipCall, request: SipRequest) -> tuple[int, tuple[str, str]] | None:
        """Reads the offer of an INVITE; returns a refusal, or None."""
        if not request.body:
            call.offer = None
            return None
        if request.get("content-type").partition(";")[0].strip().lower() != SDP_TYPE:
            return 415, ("accept", SDP_TYPE)
        try:
            call.offer = parse_audio(request.body.decode("utf-8", "replace"))
        except UnusableSdp as unusable:
            self.counts["not_acceptable"] += 1
            return 488, ("warning", f'305 {self._product} "{_one_line(str(unusable))}"')
        return None

    def _receive_in_dialog(
        self, key: str, call: SipCall, request: SipRequest, answer: Callable[..., None], now_s: float
    ) -> None:
        assert call.dialog is not None
        if not call.dialog.accepts(request):
            answer(500)
            return
        if request.method == "OPTIONS":
            answer(200, ("allow", ", ".join(METHODS)), ("accept", SDP_TYPE))
        elif request.method == "BYE":
            answer(200)
            if call.state is CallState.OFFERED:
                self.transactions.respond(call.invite_key, respond_to(call.request, 487, call.tag), now_s)
            self._end(call, "hangup", 0)
        elif call.state not in (CallState.CONFIRMED, CallState.ANSWERED):
            answer(500, ("retry-after", "1"))
        else:
            call.state = CallState.CONFIRMED  # a new INVITE says that the old one is over, whatever its ACK does
            self.transactions.acknowledge(call.invite_key)
            self._by_invite.pop(call.invite_key, None)
            before = call.offer
            if (refusal := self._read_offer(call, request)) is not None:
                call.offer = before
                answer(*refusal)
                return
            with contextlib.suppress(MalformedSip):
                call.dialog.target = contact_of(request)
            call.invite_key = key
            self._by_invite[key] = call
            self._events.append(CallChanged(call))

    def _receive_cancel(self, key: str, request: SipRequest, answer: Callable[..., None], now_s: float) -> None:
        invite_key = self.transactions.find_invite(request)
        if invite_key is None:
            self.transactions.respond_statelessly(key, 481)
            return
        answer(200)
        call = self._by_invite.get(invite_key)
        if call is not None and call.state is CallState.OFFERED:
            self.transactions.respond(invite_key, respond_to(call.request, 487, call.tag), now_s)
            self._end(call, "cancelled", 487)

    def _receive_ack(self, request: SipRequest, now_s: float) -> None:
        call = self._calls.get((request.call_id, request.recipient.tag))
        if call is None:
            return
        invite = self.transactions.request_of(call.invite_key)
        if invite is None or invite.cseq[0] != request.cseq[0] or self._by_invite.pop(call.invite_key, None) is None:
            return  # of an earlier INVITE, or once more
        self.transactions.acknowledge(call.invite_key)
        if call.state is CallState.ANSWERED:
            call.state = CallState.CONFIRMED
        answer: AudioDescription | None = None
        if call.offer is None and not call.hangs_up:
            try:
                answer = parse_audio(request.body.decode("utf-8", "replace"))
            except UnusableSdp:
                call.hangs_up = True
        self._events.append(CallConfirmed(call, answer))
        if call.hangs_up:
            self.hang_up(call, now_s)

    def _receive_response(self, key: str, response: SipResponse, now_s: float) -> None:
        sent = self._sent.get(key)
        if sent is None:
            return
        if sent.request.method == "INVITE" and sent.call is not None:
            self._receive_invite_response(key, sent, response, now_s)
            return
        if response.status < 200:
            return
        del self._sent[key]
        if sent.request.method == "REGISTER":
            assert self.registration is not None
            before = self.registration.is_registered, self.registration.detail
            again = self.registration.receive(response, sent.request, self._via(sent.peer), now_s)
            if again is not None:
                self._send(again, sent.peer, None, now_s)
            elif before != (self.registration.is_registered, self.registration.detail):
                self._events.append(RegistrationChanged(self.registration.is_registered, self.registration.detail))
        elif response.status in (401, 407):
            self._answer_challenge(sent, response, now_s)

    def _receive_invite_response(self, key: str, sent: _Sent, response: SipResponse, now_s: float) -> None:
        call = sent.call
        assert call is not None
        if response.status < 200:
            if call.hangs_up:
                self._cancel(key, now_s)
            elif response.status > 100:
                self._events.append(CallRinging(call))
            return
        self._ring_ends_s.pop(key, None)
        if response.status < 300:
            self._accept_response(call, sent, response, now_s)
            return
        del self._sent[key]
        if response.status in (401, 407) and not call.hangs_up:
            again = self._answer_challenge(sent, response, now_s)
            if again is not None:
                call.invite_key = again
                self._ring_ends_s[again] = now_s + MAX_RING_S
                return
        self._end(call, "cancelled" if response.status == 487 else "rejected", response.status)

    def _accept_response(self, call: SipCall, sent: _Sent, response: SipResponse, now_s: float) -> None:
        try:
            dialog = SipDialog.of_response(sent.request, response, sent.peer)
        except MalformedSip:
            self._end(call, "failed", response.status)
            return
        ack = dialog.build_request("ACK", self._via(dialog.next_peer), number=sent.request.cseq[0])
        self.transactions.send_ack(ack, dialog.next_peer)
        if call.dialog is not None and call.dialog.key == dialog.key:
            return  # its ACK was lost
        if call.state is not CallState.CALLING:  # two have answered, or nobody wants it any more
            bye = dialog.build_request("BYE", self._via(dialog.next_peer))
            self._send(bye, dialog.next_peer, None, now_s)
            return
        call.dialog, call.state = dialog, CallState.CONFIRMED
        try:
            answer = parse_audio(response.body.decode("utf-8", "replace"))
        except UnusableSdp:
            self._bye(call, now_s)
            self._end(call, "failed", 488)
            return
        self._events.append(CallConfirmed(call, answer))
        if call.hangs_up:
            self.hang_up(call, now_s)

    def _answer_challenge(self, sent: _Sent, response: SipResponse, now_s: float) -> str | None:
        """Sends a request of ours again, with credentials; None where that is of no use."""
        challenge, account = find_challenge(response), self._account
        if challenge is None or account is None or not account.password:
            return None
        if sent.challenges >= MAX_CHALLENGES or (sent.challenges and not challenge.stale):
            return None
        number, method = sent.request.cseq
        again = SipRequest(method, sent.request.uri, sent.request.headers, sent.request.body)
        again.set("via", self._via(sent.peer)).set("cseq", f"{number + 1} {method}")
        answer_challenge(again, challenge, account.auth_user, account.password)
        if sent.call is not None and sent.call.dialog is not None:
            sent.call.dialog.local_number = number + 1
        return self._send(again, sent.peer, sent.call, now_s, challenges=sent.challenges + 1)

    def _time_out(self, key: str, now_s: float) -> None:
        self._ring_ends_s.pop(key, None)
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        if sent.request.method == "REGISTER":
            assert self.registration is not None
            self.registration.fail("no response", now_s)
            self._events.append(RegistrationChanged(self.registration.is_registered, self.registration.detail))
        elif sent.request.method == "INVITE" and sent.call is not None:
            self._end(sent.call, "failed", 408)

    # --- what is sent ----------------------------------------------------------------------------------

    def _send(
        self, request: SipRequest, peer: SipPeer, call: SipCall | None, now_s: float, *, challenges: int = 0
    ) -> str:
        key = self.transactions.send_request(request, peer, now_s)
        self._sent[key] = _Sent(request, peer, call, challenges)
        return key

    def _respond_with_sdp(self, call: SipCall, response: SipResponse, sdp: str, now_s: float) -> None:
        response.add("content-type", SDP_TYPE)
        response.body = sdp.encode()
        self.transactions.respond(call.invite_key, response, now_s)

    def _bye(self, call: SipCall, now_s: float) -> None:
        if call.dialog is not None:
            peer = call.dialog.next_peer
            self._send(call.dialog.build_request("BYE", self._via(peer)), peer, call, now_s)

    def _cancel(self, key: str, now_s: float) -> None:
        """Gives up a call of ours; before anything has come from the other side, nothing may be sent."""
        self._ring_ends_s.pop(key, None)
        sent = self._sent.get(key)
        if sent is None or sent.call is None:
            return
        sent.call.hangs_up = True
        if not self.transactions.is_proceeding(key):
            return
        request = sent.request
        headers = [(name, request.get(name)) for name in ("via", "max-forwards", "from", "to", "call-id")]
        headers.append(("cseq", f"{request.cseq[0]} CANCEL"))
        self._send(SipRequest("CANCEL", request.uri, headers), sent.peer, None, now_s)
        self.transactions.expire(key, now_s + TIMEOUT_S)

    def _end(self, call: SipCall, cause: EndCause, status: int) -> None:
        if call.state is CallState.ENDED:
            return
        call.state = CallState.ENDED
        self._calls.pop((call.id, call.tag), None)
        self._by_invite.pop(call.invite_key, None)
        self._events.append(CallEnded(call, cause, status))

    def _via(self, peer: SipPeer) -> str:
        host = bracketed(self._local_host(peer.host))
        return f"SIP/2.0/{peer.transport.upper()} {host}:{self._port(peer.transport)};rport;branch={new_branch()}"

    def _contact_uri(self, peer: SipPeer) -> str:
        params = (("transport", peer.transport),) if peer.is_reliable else ()
        return str(SipUri(self._local_host(peer.host), self._port(peer.transport), self._user, params))


def _with_origin(message: SipRequest | SipResponse, peer: SipPeer) -> SipRequest | SipResponse:
    """Notes in the first Via of a request where it came from (RFC 3261, section 18.2.1; RFC 3581)."""
    if isinstance(message, SipRequest):
        via = message.via
        names = dict(via.params)
        params = tuple((name, str(peer.port) if name == "rport" else value) for name, value in via.params)
        if "rport" in names or via.host != peer.host:
            params = (*(each for each in params if each[0] != "received"), ("received", peer.host))
        at = next(number for number, (name, _) in enumerate(message.headers) if name == "via")
        message.headers[at] = ("via", str(via._replace(params=params)))
    return message


def _one_line(text: str) -> str:
    return text.replace("\\", "").replace('"', "'")[:200]
