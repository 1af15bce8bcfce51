"""Tokens of sessions whose senders are not known before they send: a sender tells its own by RTCP, as its name."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict

TOKEN_BYTES = 24
TOKEN = re.compile(rb"[A-Za-z0-9_-]{32}")
"""Form of a token: other names, like those that every sender of RTCP has, are no attempts."""
"""Random bytes of a token: nobody guesses one, so the bounds here save time alone."""
MAX_WRONG = 60
WRONG_S = 60.0
"""Names of an address that are no token, within this time, after which it is not listened to until the time is over."""
MAX_ADDRESSES = 1_024
"""Addresses whose wrong names are counted; the longest known give way."""


def has_token_form(name: bytes) -> bool:
    """Returns whether a name looks like a token."""
    return TOKEN.fullmatch(name) is not None


class SessionTokens:
    """Tokens of open sessions, each good for one sender. They are looked up by keyed hashes: time tells nothing of one.

    A token that was used stays known while its session is open: senders repeat it, and are not wrong.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._flows: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._unused: set[int] = set()
        self._wrong: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """Wrong names of an address, and when the first of them came."""

    @property
    def are_awaited(self) -> bool:
        """Returns whether there is one that nobody has used."""
        return bool(self._unused)

    def issue(self, flow: int) -> str:
        """Makes the token of a flow."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        hashed = self._hashes[flow] = self._hash(token.encode())
        self._flows[hashed] = flow
        self._unused.add(flow)
        return token

    def use(self, flow: int) -> bool:
        """Uses the token of a flow; returns whether it was unused."""
        was_unused = flow in self._unused
        self._unused.discard(flow)
        return was_unused

    def withdraw(self, flow: int) -> None:
        """Forgets the token of a flow, used or not. Idempotent."""
        self._unused.discard(flow)
        if (hashed := self._hashes.pop(flow, None)) is not None:
            del self._flows[hashed]

    def find(self, name: bytes) -> int | None:
        """Flow whose token a name is."""
        return self._flows.get(self._hash(name))

    def allows(self, address: bytes, now_s: float) -> bool:
        """Returns whether an address may try."""
        count, since_s = self._wrong.get(address, (0, now_s))
        return count < MAX_WRONG or now_s - since_s >= WRONG_S

    def note_wrong(self, address: bytes, now_s: float) -> None:
        """Notes a name that is no token."""
        count, since_s = self._wrong.get(address, (0, now_s))
        if now_s - since_s >= WRONG_S:
            count, since_s = 0, now_s
        self._wrong[address] = count + 1, since_s
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def _hash(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, key=self._key, digest_size=16).digest()
