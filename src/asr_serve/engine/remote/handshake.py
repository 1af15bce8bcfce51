"""How two engines meet: each says who it is and proves that it knows the key, before anything is done for the
other.

The key never crosses. Both proofs are HMACs over both sides' nonces and what the prover says of itself, so none
can be used twice or turned round. What follows is not encrypted and not signed: the network between two engines is
one that its owner trusts, and keys keep out who only reaches the port.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asr_serve.engine.remote import messages
from asr_serve.engine.remote.messages import EncoderIdentity, Hello, PeerChannel, quoted
from asr_serve.errors import MalformedRequest, PeerRefused, RoadTimeout

HELLO_S = 5.0
"""For each message of a meeting."""
NONCE_BYTES = 32
CLIENT_ROLE, WORKER_ROLE = b"asks", b"encodes"
_facts = msgspec.msgpack.Encoder().encode

log = logging.getLogger(__name__)


class HandshakeSettings(NamedTuple):
    """What an engine brings to others beside its model: what its weights are, where it listens when it encodes,
    and the keys it knows."""

    weights: str
    listen_address: tuple[str, int] = ("127.0.0.1", 0)
    keys: tuple[str, ...] = ()


class PeerDescription(NamedTuple):
    """The other side, as it introduced itself."""

    identity: EncoderIdentity
    transports: tuple[str, ...]
    requests: int
    samples: int


def proof(key: str, side: bytes, nonces: bytes, identity: EncoderIdentity) -> bytes:
    """That `side` knows the key: of this meeting only, and with this identity only."""
    return hmac.digest(key.encode(), side + b"\0" + nonces + _facts(identity), "sha256")


def identity_difference(asker: EncoderIdentity, worker: EncoderIdentity) -> str:
    """What is not the same of the two, in words; empty where they may work together. The shape of keys and values
    is compared where these are carried."""
    found = []
    for name, word in (("model", "model"), ("weights", "weights"), ("dtype", "dtype"), ("quantize", "quantize")):
        asks, encodes = getattr(asker, name), getattr(worker, name)
        if asks != encodes:
            found.append(f"{word}: {quoted(asks)} asks, {quoted(encodes)} encodes")
    if not found and asker.hidden != worker.hidden:
        found.append(f"an encoded frame: {quoted(asker.hidden)} asks, {quoted(worker.hidden)} encodes")
    return "; ".join(found)


def handshake_as_client(line: PeerChannel, identity: EncoderIdentity, keys: Sequence[str]) -> PeerDescription:
    """The asking side. Raises PeerRefused, PeerGone, RoadTimeout, MalformedRequest."""
    ours = Hello(messages.VERSION, os.urandom(NONCE_BYTES), bool(keys))
    line.send(ours)
    theirs = line.receive(HELLO_S)
    if theirs is None:
        raise RoadTimeout(f"no Hello came in {HELLO_S:g} s")
    if isinstance(theirs, messages.HandshakeRefused):  # before it was asked anything: it has no room
        raise PeerRefused(f"it refuses this engine: {quoted(theirs.why)}")
    if not isinstance(theirs, Hello):
        raise MalformedRequest(f"a message {type(theirs).__name__}", "Hello was to come")
    _compare_hello(ours, theirs)
    nonces = ours.nonce + theirs.nonce
    line.send(messages.ClientTerms(identity, proof(keys[0], CLIENT_ROLE, nonces, identity) if keys else b""))
    answer = line.receive(HELLO_S)
    if isinstance(answer, messages.HandshakeRefused):
        raise PeerRefused(f"it refuses this engine: {quoted(answer.why)}")
    if not isinstance(answer, messages.WorkerWelcome):
        raise PeerRefused(f"it answered {type(answer).__name__} and no Welcome")
    if keys and not hmac.compare_digest(answer.proof, proof(keys[0], WORKER_ROLE, nonces, answer.identity)):
        raise PeerRefused("it does not know the key", "both sides need one of the same peer_keys")
    if what := identity_difference(identity, answer.identity):
        raise PeerRefused(what, "both sides need the same model, weights and dtype")
    if answer.requests < 1 or answer.samples < 1:
        raise PeerRefused(f"it takes {answer.requests} requests and {answer.samples} samples")
    return PeerDescription(answer.identity, answer.transports, answer.requests, answer.samples)


def handshake_as_worker(
    line: PeerChannel, identity: EncoderIdentity, keys: Sequence[str], bounds: PeerDescription
) -> EncoderIdentity:
    """The encoding side: who asks. `bounds`: what the other is told. Raises as `ask`; whoever is refused was
    told."""
    ours = Hello(messages.VERSION, os.urandom(NONCE_BYTES), bool(keys))
    theirs = line.expect(Hello, HELLO_S)
    line.send(ours)
    _compare_hello(theirs, ours)
    nonces = theirs.nonce + ours.nonce
    terms = line.expect(messages.ClientTerms, HELLO_S)
    known = [
        key for key in keys if hmac.compare_digest(terms.proof, proof(key, CLIENT_ROLE, nonces, terms.identity))
    ]
    if keys and not known:
        _refuse(line, "it does not know the key; both sides need one of the same peer_keys")
    if what := identity_difference(terms.identity, identity):
        _refuse(line, what)
    mine = proof(known[0], WORKER_ROLE, nonces, identity) if known else b""
    line.send(messages.WorkerWelcome(identity, bounds.transports, bounds.requests, bounds.samples, mine))
    return terms.identity


def reject_client(line: PeerChannel, why: str) -> None:
    """One for whom there is no room is told so. Raises as `ask`, never PeerRefused."""
    line.expect(Hello, HELLO_S)  # what is not read when a connection is closed takes along what was said to it
    line.send(messages.HandshakeRefused(why))


def _refuse(line: PeerChannel, why: str) -> None:
    line.send(messages.HandshakeRefused(why))
    raise PeerRefused(why)


def _compare_hello(asks: Hello, encodes: Hello) -> None:
    """What both can see before anything else is said."""
    if asks.version != encodes.version:
        raise PeerRefused(
            f"protocol version: {asks.version} asks, {encodes.version} encodes", "the same release on both sides"
        )
    if {len(asks.nonce), len(encodes.nonce)} != {NONCE_BYTES}:
        raise PeerRefused("a nonce of another length", f"{NONCE_BYTES} bytes")
    if asks.keyed != encodes.keyed:
        with_key, without = ("asks", "encodes") if asks.keyed else ("encodes", "asks")
        raise PeerRefused(
            f"the engine that {with_key} has peer_keys, the one that {without} has none", "the same on both sides"
        )
