"""Registration at a registrar: refreshed before it ends, tried again when it fails. Pure; time is an argument.

Source: RFC 3261, section 10.
"""

from __future__ import annotations

import random
import secrets

import msgspec

from asr_serve.edge.sip.digest import answer_challenge, find_challenge
from asr_serve.edge.sip.message import SipAddress, SipRequest, SipResponse, SipUri, parse_params, split_list

EARLY_S = 30.0
"""Most time before the end of a registration at which it is refreshed."""
RETRY_S = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Times between attempts that fail."""
REFUSED_RETRY_S = 300.0
"""The same where the registrar knows us, and wants none of us."""
MAX_CHALLENGES = 2
"""Challenges of one attempt: the first, and one for a stale nonce."""
MIN_EXPIRES_S = 1
MAX_EXPIRES_S = 86_400


class SipAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Account at a registrar or a PBX."""

    registrar: SipUri
    """Address that REGISTER goes to; its host is the domain of the account."""
    address: str
    """IP address of that host."""
    user: str
    auth_user: str
    password: str = ""
    expires_s: int = 300


class SipRegistration:
    """Registration of one account.

    In      `build_request` when `due_s` has come; `receive`: the response; `fail`: that none came
    Out     `is_registered`, and `detail`: why not
    """

    def __init__(self, account: SipAccount, contact: str) -> None:
        self.account, self._contact = account, contact
        self._call_id, self._tag = f"{secrets.token_hex(12)}@{account.registrar.host}", secrets.token_hex(8)
        self._number = 0
        self._expires_s = account.expires_s
        self._failures = self._challenges = 0
        self._was_lengthened = False
        """Whether this attempt has had a 423."""
        self._ending = False
        self.is_registered = False
        self.detail = "no attempt yet"
        self.due_s: float | None = 0.0
        """Time of the next attempt; None while one is under way, or after the end."""
        self.ends_s = 0.0
        """End of what the registrar has granted."""

    def build_request(self, via: str) -> SipRequest:
        """Next REGISTER. A response, or `fail`, must follow."""
        self.due_s, self._challenges, self._was_lengthened = None, 0, False
        return self._build(via)

    def end(self) -> None:
        """Ends the registration: the next request removes it."""
        self._ending, self.due_s = True, 0.0 if self.is_registered else None

    def receive(self, response: SipResponse, request: SipRequest, via: str, now_s: float) -> SipRequest | None:
        """Takes the final response of a request; returns the request to send now, with credentials, or None."""
        if response.status in (401, 407):
            challenge = find_challenge(response)
            self._challenges += 1
            allowed = self._challenges == 1 or (self._challenges <= MAX_CHALLENGES and challenge and challenge.stale)
            if challenge is not None and self.account.password and allowed:
                again = self._build(via)
                answer_challenge(again, challenge, self.account.auth_user, self.account.password)
                return again
            self._refuse(f"{response.status} {response.reason}: its challenge cannot be answered", now_s)
        elif (
            response.status == 423
            and not self._was_lengthened
            and (least_s := _min_expires(response)) > self._expires_s
        ):
            self._expires_s, self._was_lengthened = least_s, True
            return self._build(via)
        elif 200 <= response.status < 300:
            self._accept(response, now_s)
        elif response.status in (403, 404, 405, 501):
            self._refuse(f"{response.status} {response.reason}", now_s)
        else:
            self.fail(f"{response.status} {response.reason}", now_s)
        return None

    def fail(self, detail: str, now_s: float) -> None:
        """Notes an attempt without a usable response."""
        wait_s = RETRY_S[min(self._failures, len(RETRY_S) - 1)] * random.uniform(0.8, 1.2)
        self._failures += 1
        self._note(detail, now_s, wait_s)

    def _refuse(self, detail: str, now_s: float) -> None:
        self._note(detail, now_s, REFUSED_RETRY_S)

    def _note(self, detail: str, now_s: float, wait_s: float) -> None:
        self.detail = detail
        self.is_registered = self.is_registered and now_s < self.ends_s
        self.due_s = None if self._ending else now_s + wait_s

    def _accept(self, response: SipResponse, now_s: float) -> None:
        self._failures = 0
        if self._ending:
            self.is_registered, self.detail, self.due_s = False, "ended", None
            return
        granted_s = max(self._granted(response), MIN_EXPIRES_S)
        self.is_registered, self.detail = True, f"for {granted_s} s"
        self.ends_s = now_s + granted_s
        self.due_s = self.ends_s - min(EARLY_S, granted_s / 5)

    def _granted(self, response: SipResponse) -> int:
        """Seconds that the registrar grants: by our Contact, or by Expires."""
        for value in [each for contact in response.get_all("contact") for each in split_list(contact)]:
            if self._contact in value:
                expires = dict(parse_params(value.rpartition(">")[2])).get("expires", "")
                if expires.isascii() and expires.isdigit():
                    return min(int(expires[:9]), MAX_EXPIRES_S)
        expires = response.get("expires")
        return min(int(expires[:9]), MAX_EXPIRES_S) if expires.isascii() and expires.isdigit() else self._expires_s

    def _build(self, via: str) -> SipRequest:
        self._number += 1
        uri = self.account.registrar
        own = SipAddress(str(SipUri(uri.host, uri.port, self.account.user)))
        expires = 0 if self._ending else self._expires_s
        headers = [("via", via), ("max-forwards", "70"), ("from", str(own.with_param("tag", self._tag)))]
        headers += [("to", str(own)), ("call-id", self._call_id), ("cseq", f"{self._number} REGISTER")]
        headers += [("contact", f"<{self._contact}>;expires={expires}"), ("expires", str(expires))]
        return SipRequest("REGISTER", str(uri._replace(user="")), headers)


def _min_expires(response: SipResponse) -> int:
    """Seconds that a 423 wants at least; 0 for none, and for more than a day."""
    text = response.get("min-expires")
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    return seconds if seconds <= MAX_EXPIRES_S else 0
