"""SRTP: keys as SDP names them, and packets that are authenticated, decrypted, and taken once.

libsrtp computes. Source: RFC 3711 (SRTP), RFC 7714 (AES-GCM), RFC 4568 (keys in SDP).
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from typing import Any

import msgspec

from asr_serve.edge.rtp import DropReason
from asr_serve.errors import OptionError, ProgramMissing, UnsupportedOption
from asr_serve.types import suggest_name

SUITES = {
    "AES_CM_128_HMAC_SHA1_80": 16 + 14,
    "AES_CM_128_HMAC_SHA1_32": 16 + 14,
    "AEAD_AES_128_GCM": 16 + 12,
    "AEAD_AES_256_GCM": 32 + 12,
}
"""Crypto suites by their names in SDP, and the bytes of master key and salt."""
DEFAULT_SUITE = "AES_CM_128_HMAC_SHA1_80"
REPLAY_PACKETS = 1_024
"""Packets over which a repeated one is recognized; older ones are dropped. More than the jitter buffer holds."""
MAX_SSRCS = 16
"""SSRCs that one sender may use with its key, each with a state of its own."""
RTCP_TYPES = range(64, 96)
REPLAYED = ("replay", "packet index is too old")
"""Beginnings of libsrtp's words for a packet that came before, or is too old to know."""


class SrtpKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Crypto suite, and master key and salt in base64 as SDP has them after `inline:`. Without a key one is made."""

    suite: str = DEFAULT_SUITE
    key: str = ""

    def __repr__(self) -> str:
        return f"SrtpKey(suite={self.suite!r})"  # no key in logs


def checked_key(key: SrtpKey) -> SrtpKey:
    """Returns the key, one that is made where there is none. Raises OptionError, UnsupportedOption."""
    if key.suite not in SUITES:
        raise UnsupportedOption(
            f"srtp.suite={key.suite[:60]!r}", f"one of: {', '.join(SUITES)}", suggest_name(key.suite[:60], SUITES)
        )
    size = SUITES[key.suite]
    if not key.key:
        return SrtpKey(suite=key.suite, key=base64.b64encode(secrets.token_bytes(size)).decode())
    try:
        length = len(base64.b64decode(key.key, validate=True))
    except binascii.Error:
        length = -1
    if length != size:
        came = "that is no base64" if length < 0 else f"of {length} bytes"
        raise OptionError(f"srtp.key {came}", f"{key.suite} has {size} bytes of key and salt", param="srtp")
    return key


def parse_crypto(line: str) -> SrtpKey | None:
    """Key of an SDP's line `a=crypto:1 SUITE inline:KEY`; None for one that is not supported here: another suite, a
    key of several, parameters that change the session."""
    match = re.fullmatch(r"a=crypto:\d{1,9} (\w+) inline:([A-Za-z0-9+/=]{1,128})(?:\|[^|: ]{1,16})?\s*", line, re.ASCII)
    if match is None or match[1] not in SUITES:
        return None
    try:
        return checked_key(SrtpKey(suite=match[1], key=match[2]))
    except OptionError:
        return None


def _create_session(key: SrtpKey, *, outbound: bool) -> tuple[Any, type[Exception]]:
    """Session of libsrtp, and its error. Raises ProgramMissing without pylibsrtp."""
    try:
        import pylibsrtp
    except ImportError as error:
        raise ProgramMissing(
            "pylibsrtp is not installed", "it computes SRTP at the edge", "pip install 'asr-serve[edge]'"
        ) from error
    names = pylibsrtp.Policy
    profiles = {
        "AES_CM_128_HMAC_SHA1_80": names.SRTP_PROFILE_AES128_CM_SHA1_80,
        "AES_CM_128_HMAC_SHA1_32": names.SRTP_PROFILE_AES128_CM_SHA1_32,
        "AEAD_AES_128_GCM": names.SRTP_PROFILE_AEAD_AES_128_GCM,
        "AEAD_AES_256_GCM": names.SRTP_PROFILE_AEAD_AES_256_GCM,
    }
    kind = names.SSRC_ANY_OUTBOUND if outbound else names.SSRC_ANY_INBOUND
    policy = pylibsrtp.Policy(base64.b64decode(key.key), kind, 0, profiles[key.suite])
    policy.window_size = REPLAY_PACKETS
    return pylibsrtp.Session(policy), pylibsrtp.Error


class SrtpSender:
    """Sender of packets that are encrypted with one key."""

    def __init__(self, key: SrtpKey) -> None:
        """Raises ProgramMissing without pylibsrtp."""
        self._session, _ = _create_session(key, outbound=True)

    def protect(self, packet: bytes) -> bytes:
        """Encrypts an RTP packet of ours."""
        protected: bytes = self._session.protect(packet)
        return protected


class SrtpReceiver:
    """Receiver of one session's packets. It holds the state of MAX_SSRCS senders at most."""

    def __init__(self, key: SrtpKey) -> None:
        """Raises ProgramMissing without pylibsrtp."""
        self._session, self._error = _create_session(key, outbound=False)
        self._ssrcs: set[bytes] = set()

    def unprotect(self, datagram: bytes) -> bytes | DropReason:
        """Returns the RTP packet of a datagram that is authentic and new; else the reason to drop it. Never raises."""
        if len(datagram) < 12 or datagram[0] >> 6 != 2:
            return DropReason.NOT_RTP
        if datagram[1] & 0x7F in RTCP_TYPES:
            return DropReason.RTCP
        ssrc = datagram[8:12]
        if ssrc not in self._ssrcs and len(self._ssrcs) >= MAX_SSRCS:
            return DropReason.JUMP
        try:
            packet: bytes = self._session.unprotect(datagram)
        except self._error as error:
            return DropReason.SRTP_REPLAY if str(error).startswith(REPLAYED) else DropReason.SRTP_AUTH
        except ValueError:  # longer than libsrtp's buffer
            return DropReason.MALFORMED
        self._ssrcs.add(ssrc)  # authentic: strangers take no place
        return packet
