"""Dialogs of SIP: what two sides know of each other in a call. Source: RFC 3261, section 12."""

from __future__ import annotations

import secrets

from asr_serve.edge.sip.message import (
    DEFAULT_PORT,
    MalformedSip,
    SipAddress,
    SipMessage,
    SipRequest,
    SipResponse,
    parse_address,
    parse_uri,
)
from asr_serve.edge.sip.transactions import SipPeer

MAX_ROUTES = 16


def new_tag() -> str:
    return secrets.token_hex(8)


class SipDialog:
    """Dialog of one call, whose requests have rising numbers on each side."""

    def __init__(
        self, *, call_id: str, local: SipAddress, remote: SipAddress, target: str, routes: list[str], peer: SipPeer
    ) -> None:
        """`local`, `remote`: with tags; `target`: URI that requests go to; `routes`: in the order of our requests."""
        self.call_id, self.local, self.remote, self.target, self.routes, self.peer = (
            *(call_id, local, remote, target),
            *(routes, peer),
        )
        self.local_number = secrets.randbelow(1 << 16)
        self.remote_number: int | None = None
        self.is_disconnected = False
        """Whether the connection that it began on is lost."""

    @classmethod
    def of_request(cls, request: SipRequest, tag: str, peer: SipPeer) -> SipDialog:
        """Dialog of an INVITE of somebody, which we answer with `tag`. Raises MalformedSip."""
        dialog = cls(
            call_id=request.call_id,
            local=request.recipient.with_param("tag", tag),
            remote=request.sender,
            target=contact_of(request),
            routes=request.get_all("record-route")[:MAX_ROUTES],
            peer=peer,
        )
        dialog.remote_number = request.cseq[0]
        return dialog

    @classmethod
    def of_response(cls, request: SipRequest, response: SipResponse, peer: SipPeer) -> SipDialog:
        """Dialog of an INVITE of ours, by its response. Raises MalformedSip."""
        dialog = cls(
            call_id=request.call_id,
            local=request.sender,
            remote=response.recipient,
            target=contact_of(response),
            routes=response.get_all("record-route")[:MAX_ROUTES][::-1],
            peer=peer,
        )
        dialog.local_number = request.cseq[0]
        return dialog

    @property
    def key(self) -> tuple[str, str, str]:
        """Call-ID, our tag, theirs."""
        return self.call_id, self.local.tag, self.remote.tag

    def accepts(self, request: SipRequest) -> bool:
        """Notes the number of a request; False for one that is out of order."""
        number = request.cseq[0]
        if self.remote_number is not None and number <= self.remote_number:
            return False
        self.remote_number = number
        return True

    def build_request(self, method: str, via: str, *, number: int | None = None) -> SipRequest:
        """Request within the dialog. `number`: that of the INVITE, for an ACK."""
        if number is None:
            self.local_number += 1
            number = self.local_number
        headers = [("via", via), ("max-forwards", "70"), *(("route", route) for route in self.routes)]
        headers += [("from", str(self.local)), ("to", str(self.remote)), ("call-id", self.call_id)]
        headers.append(("cseq", f"{number} {method}"))
        return SipRequest(method, self.target, headers)

    @property
    def next_peer(self) -> SipPeer:
        """Peer that requests go to: the first route, or the target; over TCP, the connection that there is."""
        if self.peer.is_reliable and not self.is_disconnected:
            return self.peer
        try:
            uri = parse_uri(parse_address(self.routes[0]).uri if self.routes else self.target)
        except MalformedSip:
            return self.peer
        return SipPeer(uri.transport if uri.transport in ("udp", "tcp") else "udp", uri.host, uri.port or DEFAULT_PORT)


def contact_of(message: SipMessage) -> str:
    """URI of Contact. Raises MalformedSip for none, or for one of another scheme."""
    value = message.get("contact")
    if not value:
        raise MalformedSip("no Contact")
    uri = parse_address(value).uri
    parse_uri(uri)
    return uri
