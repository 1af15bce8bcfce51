"""Digest authentication of SIP: as who is asked, and as who asks. Source: RFC 7616, RFC 8760; RFC 2617 without qop."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from asr_serve.edge.sip.message import SipRequest, SipResponse, split_list, unquoted

DigestAlgorithm = Literal["SHA-256", "MD5"]
DIGEST_ALGORITHMS: tuple[DigestAlgorithm, ...] = get_args(DigestAlgorithm)
ALGORITHMS: dict[str, Callable[[bytes], str]] = {
    "SHA-256": lambda data: hashlib.sha256(data).hexdigest(),
    "MD5": lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest(),
}
"""Algorithms, the best first."""
NONCE_S = 120.0
"""Age beyond which a nonce of ours is stale."""
MAX_COUNTS = 10_000
"""Nonces whose use is remembered."""


class DigestChallenge(NamedTuple):
    """Challenge that came with a 401 or 407."""

    realm: str
    nonce: str
    algorithm: str
    qop: str
    """`auth`, or nothing."""
    opaque: str
    stale: bool
    header: str
    """Name of the header that answers it."""


def parse_digest(value: str) -> dict[str, str] | None:
    """Fields of `Digest realm="x", nonce="y"`; None for another scheme or for nonsense."""
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "digest":
        return None
    fields: dict[str, str] = {}
    for part in split_list(rest):
        name, found, content = part.partition("=")
        if not found or not re.fullmatch(r"[A-Za-z-]{1,32}", name.strip()):
            return None
        fields[name.strip().lower()] = unquoted(content.strip())
    return fields


def find_challenge(response: SipResponse) -> DigestChallenge | None:
    """The best challenge that can be answered here."""
    found = []
    for asked, answered in (("www-authenticate", "authorization"), ("proxy-authenticate", "proxy-authorization")):
        for value in response.get_all(asked):
            fields = parse_digest(value)
            if not fields or not fields.get("nonce"):
                continue
            algorithm = fields.get("algorithm", "MD5").upper()
            offered = [each.strip() for each in fields.get("qop", "").split(",") if each.strip()]
            if algorithm in ALGORITHMS and (not offered or "auth" in offered):
                stale = fields.get("stale", "").lower() == "true"
                realm, nonce, opaque = fields.get("realm", ""), fields["nonce"], fields.get("opaque", "")
                qop = "auth" if offered else ""
                found.append(DigestChallenge(realm, nonce, algorithm, qop, opaque, stale, answered))
    return min(found, key=lambda each: list(ALGORITHMS).index(each.algorithm), default=None)


def digest_response(
    user: str,
    password: str,
    method: str,
    uri: str,
    *,
    realm: str,
    nonce: str,
    algorithm: str,
    qop: str,
    cnonce: str,
    nc: str,
) -> str:
    """Digest of a request, in hexadecimal."""
    return _respond(ALGORITHMS[algorithm], f"{user}:{realm}:{password}", method, uri, nonce, qop, cnonce, nc)


def _respond(
    hashed: Callable[[bytes], str], secret: str, method: str, uri: str, nonce: str, qop: str, cnonce: str, nc: str
) -> str:
    first, second = hashed(secret.encode()), hashed(f"{method}:{uri}".encode())
    middle = f"{nonce}:{nc}:{cnonce}:{qop}" if qop else nonce
    return hashed(f"{first}:{middle}:{second}".encode())


def answer_challenge(request: SipRequest, challenge: DigestChallenge, user: str, password: str, count: int = 1) -> None:
    """Adds the credentials to a request. `count`: uses of the nonce, this one included."""
    cnonce, nc = secrets.token_hex(8), f"{count:08x}"
    proof = digest_response(
        user,
        password,
        request.method,
        request.uri,
        realm=challenge.realm,
        nonce=challenge.nonce,
        algorithm=challenge.algorithm,
        qop=challenge.qop,
        cnonce=cnonce,
        nc=nc,
    )
    fields = f'username="{user}", realm="{challenge.realm}", nonce="{challenge.nonce}", uri="{request.uri}"'
    fields += f', response="{proof}", algorithm={challenge.algorithm}'
    if challenge.qop:
        fields += f', qop=auth, cnonce="{cnonce}", nc={nc}'
    if challenge.opaque:
        fields += f', opaque="{challenge.opaque}"'
    request.set(challenge.header, f"Digest {fields}")


class DigestVerifier:
    """Verifier of callers' credentials. Nonces carry their time and a signature: none is stored before it is used."""

    def __init__(
        self, realm: str, passwords: Mapping[str, str], algorithms: Sequence[DigestAlgorithm] = DIGEST_ALGORITHMS
    ) -> None:
        """`passwords`: of users; `algorithms`: those that are taken, the preferred first."""
        self.realm, self._passwords, self._algorithms = realm, passwords, algorithms
        self._key = secrets.token_bytes(32)
        self._counts: dict[str, int] = {}

    def challenges(self, now_s: float, *, stale: bool = False) -> list[str]:
        """Values of WWW-Authenticate."""
        suffix = ", stale=true" if stale else ""
        return [
            f'Digest realm="{self.realm}", nonce="{self._nonce(now_s)}", algorithm={algorithm}, qop="auth"{suffix}'
            for algorithm in self._algorithms
        ]

    def verify(self, request: SipRequest, now_s: float) -> str | bool:
        """The user who signed the request; False for none, True for one whose nonce is stale."""
        for value in request.get_all("authorization"):
            fields = parse_digest(value)
            if not fields or fields.get("realm") != self.realm:
                continue
            algorithm = fields.get("algorithm", "MD5").upper()
            user, nonce, nc = fields.get("username", ""), fields.get("nonce", ""), fields.get("nc", "")
            if algorithm not in self._algorithms or user not in self._passwords or fields.get("qop") != "auth":
                continue
            if not re.fullmatch(r"[0-9a-fA-F]{8}", nc):
                continue
            proof = digest_response(
                user,
                self._passwords[user],
                request.method,
                fields.get("uri", ""),  # not the request's own, which proxies rewrite
                realm=self.realm,
                nonce=nonce,
                algorithm=algorithm,
                qop="auth",
                cnonce=fields.get("cnonce", ""),
                nc=nc,
            )
            if not hmac.compare_digest(proof, fields.get("response", "").lower().encode("ascii", "replace").decode()):
                continue
            if not self._is_fresh(nonce, now_s) or int(nc, 16) <= self._counts.get(nonce, 0):
                return True
            self._counts[nonce] = int(nc, 16)
            while len(self._counts) > MAX_COUNTS:
                del self._counts[next(iter(self._counts))]
            return user
        return False

    def _nonce(self, now_s: float) -> str:
        made = f"{int(now_s * 1_000):x}.{secrets.token_hex(6)}"
        return f"{made}.{self._sign(made)}"

    def _is_fresh(self, nonce: str, now_s: float) -> bool:
        made, _, signature = nonce.rpartition(".")
        if not hmac.compare_digest(self._sign(made), signature.encode("ascii", "replace").decode()):
            return False
        return now_s - int(made.partition(".")[0], 16) / 1_000 <= NONCE_S

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()[:24]
