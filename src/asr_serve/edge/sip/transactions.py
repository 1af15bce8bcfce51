"""Transactions of SIP: retransmissions and timeouts. Pure; time is an argument.

Source: RFC 3261, section 17, with the state `accepted` of RFC 6026: 2xx responses to an INVITE are sent again here,
until their ACK has come. Over TCP nothing is sent again, but waits end all the same.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import secrets
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from asr_serve.edge.sip.message import DEFAULT_PORT, MAGIC_COOKIE, SipRequest, SipResponse, respond_to

T1_S = 0.5
"""Estimate of a round trip."""
T2_S = 4.0
"""Longest time between two retransmissions."""
T4_S = 5.0
"""Time for which the network may hold a message."""
TIMEOUT_S = 64 * T1_S
MAX_TRANSACTIONS = 4_096
RESERVED_TRANSACTIONS = 1_024
"""Transactions, of all, that only dialogs and trusted hosts may begin."""
MAX_TRANSACTIONS_PER_SOURCE = 1_024
"""Requests of one host outside dialogs; one that is trusted has no such bound."""
RETRY_AFTER_S = 5


class SipPeer(NamedTuple):
    """Address that messages go to or come from. Over TCP it names a connection."""

    transport: str
    """udp or tcp."""
    host: str
    port: int

    @property
    def is_reliable(self) -> bool:
        return self.transport != "udp"


class RequestReceived(NamedTuple):
    """New request. `key`: its transaction, to respond to."""

    key: str
    request: SipRequest
    peer: SipPeer


class AckReceived(NamedTuple):
    """ACK of a 2xx, which is no transaction."""

    request: SipRequest


class ResponseReceived(NamedTuple):
    """Response to a request of ours; a repeated 2xx to an INVITE too. `key`: what `send_request` returned."""

    key: str
    response: SipResponse
    peer: SipPeer


class RequestTimedOut(NamedTuple):
    """A request of ours got no final response."""

    key: str


class InviteEnded(NamedTuple):
    """Repeated answers to an INVITE of ours cannot come any more."""

    key: str


class AckTimedOut(NamedTuple):
    """A 2xx of ours to an INVITE was never acknowledged."""

    key: str


TransactionEvent = RequestReceived | AckReceived | ResponseReceived | RequestTimedOut | InviteEnded | AckTimedOut


class _State(StrEnum):
    TRYING = "trying"
    """Request sent, or received; no response yet."""
    PROCEEDING = "proceeding"
    COMPLETED = "completed"
    ACCEPTED = "accepted"
    CONFIRMED = "confirmed"


class _Transaction:
    """One of either side. `resend_s`, `end_s`: when the last message goes out again, and when the state ends."""

    def __init__(self, key: str, request: SipRequest, peer: SipPeer, *, is_server: bool) -> None:
        self.key, self.request, self.peer, self.is_server = key, request, peer, is_server
        self.state = _State.TRYING
        self.message = b""
        """Message that is sent again."""
        self.interval_s = T1_S
        self.resend_s: float | None = None
        self.end_s: float | None = None

    @property
    def is_invite(self) -> bool:
        return self.request.method == "INVITE"

    @property
    def due_s(self) -> float | None:
        times = [time_s for time_s in (self.resend_s, self.end_s) if time_s is not None]
        return min(times, default=None)


class TransactionLayer:
    """All transactions of one endpoint.

    In      `receive`: parsed messages; `send_request`, `respond`; `advance`: the time
    Out     `take_output`: bytes and where they go; events, returned by `receive` and `advance`
    State   at most MAX_TRANSACTIONS; a request beyond them, or beyond its source's share, is answered 503 and forgotten
    """

    def __init__(self) -> None:
        self._transactions: dict[str, _Transaction] = {}
        self._timers: list[tuple[float, int, str]] = []
        self._serial = itertools.count()
        self._output: list[tuple[SipPeer, bytes]] = []
        self._per_source: Counter[str] = Counter()
        """Requests of others that are held, by host."""
        self._tag_key = secrets.token_bytes(16)
        self.retransmissions = self.refused = 0

    def __len__(self) -> int:
        return len(self._transactions)

    @property
    def due_s(self) -> float | None:
        """Time at which `advance` has something to do."""
        while self._timers:
            due_s, _, key = self._timers[0]
            transaction = self._transactions.get(key)
            if transaction is not None and transaction.due_s == due_s:
                return due_s
            heapq.heappop(self._timers)
        return None

    def take_output(self) -> list[tuple[SipPeer, bytes]]:
        output, self._output = self._output, []
        return output

    # --- requests of ours ------------------------------------------------------------------------------

    def send_request(self, request: SipRequest, peer: SipPeer, now_s: float) -> str:
        """Sends a request whose first Via has a branch of `new_branch`; returns its key."""
        key = _client_key(request.via.branch, request.method)
        transaction = self._transactions[key] = _Transaction(key, request, peer, is_server=False)
        transaction.message = request.encode()
        self._send(transaction)
        transaction.resend_s = None if peer.is_reliable else now_s + T1_S
        transaction.end_s = now_s + TIMEOUT_S
        self._arm(transaction)
        return key

    def expire(self, key: str, end_s: float) -> None:
        """Ends an INVITE of ours then, if nothing final has come: after a CANCEL."""
        transaction = self._transactions.get(key)
        if transaction is not None and transaction.state is _State.PROCEEDING:
            transaction.end_s = end_s
            self._arm(transaction)

    def is_proceeding(self, key: str) -> bool:
        """Returns whether a request of ours has a provisional response, and no final one."""
        transaction = self._transactions.get(key)
        return transaction is not None and transaction.state is _State.PROCEEDING

    def send_ack(self, request: SipRequest, peer: SipPeer) -> None:
        """Sends the ACK of a 2xx, which is no transaction."""
        self._output.append((peer, request.encode()))

    # --- requests of others ----------------------------------------------------------------------------

    def request_of(self, key: str) -> SipRequest | None:
        """Request of a transaction that has not ended."""
        transaction = self._transactions.get(key)
        return None if transaction is None else transaction.request

    def respond(self, key: str, response: SipResponse, now_s: float) -> None:
        """Sends a response; one behind a final response, or after the end of the transaction, is left out."""
        transaction = self._transactions.get(key)
        if transaction is None or transaction.state not in (_State.TRYING, _State.PROCEEDING):
            return
        transaction.message = response.encode()
        self._send(transaction)
        reliable = transaction.peer.is_reliable
        if response.status < 200:
            transaction.state = _State.PROCEEDING
            return
        transaction.interval_s = T1_S
        if not transaction.is_invite:
            transaction.state = _State.COMPLETED
            transaction.end_s = now_s if reliable else now_s + TIMEOUT_S
        else:
            accepted = response.status < 300
            transaction.state = _State.ACCEPTED if accepted else _State.COMPLETED
            # A 2xx goes out again over TCP too: it may have crossed several hops (RFC 3261, section 13.3.1.4).
            transaction.resend_s = None if reliable and not accepted else now_s + T1_S
            transaction.end_s = now_s + TIMEOUT_S
        self._arm(transaction)

    def respond_statelessly(self, key: str, status: int, *headers: tuple[str, str]) -> None:
        """Answers a request once and forgets it: who sends it again gets the same answer (RFC 3261, section 8.2.7).

        Nothing is held or sent again for a sender whose address may be forged (section 26.3.2.4).
        """
        transaction = self._transactions.get(key)
        if transaction is None or transaction.state is not _State.TRYING:
            return
        self._remove(key)
        tag = hashlib.blake2b(key.encode(), key=self._tag_key, digest_size=8).hexdigest()
        response = respond_to(transaction.request, status, tag)
        response.headers += headers
        self._output.append((transaction.peer, response.encode()))

    def find_invite(self, cancel: SipRequest) -> str | None:
        """Transaction that a CANCEL means."""
        key = _server_key(cancel, "INVITE")
        return key if key in self._transactions else None

    def acknowledge(self, key: str) -> None:
        """Notes that the ACK of a 2xx has come."""
        transaction = self._transactions.get(key)
        if transaction is not None and transaction.state is _State.ACCEPTED:
            transaction.state, transaction.resend_s = _State.CONFIRMED, None
            self._arm(transaction)

    # --- messages --------------------------------------------------------------------------------------

    def receive(
        self, message: SipRequest | SipResponse, peer: SipPeer, now_s: float, *, is_trusted: bool = False
    ) -> list[TransactionEvent]:
        """`is_trusted`: whether a request is of a dialog, or of a host that is known."""
        if isinstance(message, SipResponse):
            return self._receive_response(message, peer, now_s)
        return self._receive_request(message, peer, now_s, is_trusted)

    def _receive_request(
        self, request: SipRequest, peer: SipPeer, now_s: float, is_trusted: bool
    ) -> list[TransactionEvent]:
        key = _server_key(request, "INVITE" if request.method == "ACK" else request.method)
        transaction = self._transactions.get(key)
        if request.method == "ACK":
            if transaction is None or transaction.state is _State.ACCEPTED:  # the ACK of a 2xx is the dialog's
                return [AckReceived(request)]
            if transaction.state is _State.COMPLETED:
                transaction.state, transaction.resend_s = _State.CONFIRMED, None
                transaction.end_s = now_s if peer.is_reliable else now_s + T4_S
                self._arm(transaction)
            return []
        if transaction is not None:
            self.retransmissions += 1
            if transaction.message and transaction.state is not _State.CONFIRMED:
                self._send(transaction)
            return []
        peer = reply_peer(request, peer)
        if not self._has_room(request, peer, is_trusted):
            self.refused += 1
            response = respond_to(request, 503, secrets.token_hex(6)).add("retry-after", str(RETRY_AFTER_S))
            self._output.append((peer, response.encode()))
            return []
        self._transactions[key] = _Transaction(key, request, peer, is_server=True)
        self._per_source[peer.host] += 1
        return [RequestReceived(key, request, peer)]

    def _has_room(self, request: SipRequest, peer: SipPeer, is_trusted: bool) -> bool:
        if is_trusted or (request.method == "CANCEL" and self.find_invite(request) is not None):
            return len(self._transactions) < MAX_TRANSACTIONS
        if self._per_source[peer.host] >= MAX_TRANSACTIONS_PER_SOURCE:
            return False
        return len(self._transactions) < MAX_TRANSACTIONS - RESERVED_TRANSACTIONS

    def _remove(self, key: str) -> None:
        transaction = self._transactions.pop(key)
        if transaction.is_server:
            host = transaction.peer.host
            self._per_source[host] -= 1
            if not self._per_source[host]:
                del self._per_source[host]

    def _receive_response(self, response: SipResponse, peer: SipPeer, now_s: float) -> list[TransactionEvent]:
        key = _client_key(response.via.branch, response.cseq[1])
        transaction = self._transactions.get(key)
        if transaction is None:
            return []
        event = ResponseReceived(key, response, peer)
        state, invite = transaction.state, transaction.is_invite
        if state is _State.COMPLETED:
            if invite and response.status >= 300:
                self._send(transaction)  # the ACK
            return []
        if state is _State.ACCEPTED:
            return [event] if 200 <= response.status < 300 else []
        if response.status < 200:
            transaction.state = _State.PROCEEDING
            if invite:
                transaction.resend_s = None
                transaction.end_s = None  # it may ring for as long as its caller lets it
            else:
                transaction.interval_s = T2_S
            self._arm(transaction)
            return [event]
        transaction.resend_s = None
        reliable = transaction.peer.is_reliable
        if not invite:
            transaction.state = _State.COMPLETED
            transaction.end_s = now_s if reliable else now_s + T4_S
        elif response.status < 300:
            transaction.state = _State.ACCEPTED
            transaction.end_s = now_s + TIMEOUT_S
        else:
            transaction.state = _State.COMPLETED
            transaction.end_s = now_s if reliable else now_s + TIMEOUT_S
            transaction.message = _build_ack(transaction.request, response).encode()
            self._send(transaction)
        self._arm(transaction)
        return [event]

    # --- time ------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[TransactionEvent]:
        """Sends again what is due, and ends what has waited long enough."""
        events: list[TransactionEvent] = []
        while (due_s := self.due_s) is not None and due_s <= now_s:
            _, _, key = heapq.heappop(self._timers)
            transaction = self._transactions[key]
            if transaction.end_s is not None and transaction.end_s <= now_s:
                self._remove(key)
                if not transaction.is_server and transaction.state in (_State.TRYING, _State.PROCEEDING):
                    events.append(RequestTimedOut(key))
                elif transaction.state is _State.ACCEPTED:
                    events.append(AckTimedOut(key) if transaction.is_server else InviteEnded(key))
                continue
            self._send(transaction)
            self.retransmissions += 1
            transaction.interval_s *= 2
            if not (transaction.is_invite and not transaction.is_server):  # an INVITE's interval has no bound
                transaction.interval_s = min(transaction.interval_s, T2_S)
            transaction.resend_s = now_s + transaction.interval_s
            self._arm(transaction)
        return events

    def _arm(self, transaction: _Transaction) -> None:
        if transaction.due_s is not None:
            heapq.heappush(self._timers, (transaction.due_s, next(self._serial), transaction.key))

    def _send(self, transaction: _Transaction) -> None:
        self._output.append((transaction.peer, transaction.message))


def new_branch() -> str:
    return MAGIC_COOKIE + secrets.token_hex(10)


def reply_peer(request: SipRequest, peer: SipPeer) -> SipPeer:
    """Peer that a response goes to: the address that the request came from, never one that it only names, so that
    nobody sends our answers to others; its port, or that of Via (RFC 3581)."""
    via = request.via
    if peer.is_reliable or "rport" in dict(via.params):
        return peer
    return peer._replace(port=via.port or DEFAULT_PORT)


def _client_key(branch: str, method: str) -> str:
    return f"c {branch} {method}"


def _server_key(request: SipRequest, method: str) -> str:
    via = request.via
    if via.branch.startswith(MAGIC_COOKIE):
        return f"s {via.branch} {via.host}:{via.port} {method}"
    number, _ = request.cseq  # a sender of RFC 2543
    return f"s {request.call_id} {number} {request.get('from')} {request.get('via')} {method}"


def _build_ack(request: SipRequest, response: SipResponse) -> SipRequest:
    """ACK of a response that is no 2xx: it belongs to the INVITE's transaction (RFC 3261, section 17.1.1.3)."""
    headers = [(name, value) for name, value in request.headers if name in ("from", "call-id", "route")]
    headers = [("via", request.get("via")), *headers, ("to", response.get("to"))]
    headers += [("cseq", f"{request.cseq[0]} ACK"), ("max-forwards", "70")]
    return SipRequest("ACK", request.uri, headers)
