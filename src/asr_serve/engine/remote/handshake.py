"""Handshake of two engines: each states its identity and proves that it knows the key, before either works for the
other.

The key is never sent. Both proofs are HMACs over both sides' nonces and the prover's identity, so none can be
replayed or reflected. The rest of the connection is neither encrypted nor signed: the network between two engines
must be trusted, and keys keep out those who merely reach the port.
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
from asr_serve.errors import MalformedRequest, PeerRefused, TransportTimeout

HELLO_S = 5.0
"""Time limit of each message of a handshake."""
MAX_CLIENTS = 64
"""Engines that one which encodes works for at once; each has three threads there."""
NONCE_BYTES = 32
BOTH_NEED = "both sides need the same model, weights, dtype and quantize"
CLIENT_ROLE, WORKER_ROLE = b"asks", b"encodes"
_facts = msgspec.msgpack.Encoder().encode

log = logging.getLogger(__name__)


class HandshakeSettings(NamedTuple):
    """Settings for peers besides the model: digest of the weights, address that a worker listens at, and known
    keys."""

    weights: str
    listen_address: tuple[str, int] = ("127.0.0.1", 0)
    keys: tuple[str, ...] = ()


class PeerDescription(NamedTuple):
    """Description of the other side: its identity, transports, and limits."""

    identity: EncoderIdentity
    transports: tuple[str, ...]
    requests: int
    samples: int


def proof(key: str, side: bytes, nonces: bytes, identity: EncoderIdentity) -> bytes:
    """Returns the proof that `side` knows the key; valid for these nonces and this identity only."""
    return hmac.digest(key.encode(), side + b"\0" + nonces + _facts(identity), "sha256")


def identity_difference(client: EncoderIdentity, worker: EncoderIdentity) -> str:
    """Describes how two identities differ; empty where they may work together. The shape of keys and values is
    compared only where these are sent."""
    differences = []
    for name, label in (("model", "model"), ("weights", "weights"), ("dtype", "dtype"), ("quantize", "quantize")):
        client_value, worker_value = getattr(client, name), getattr(worker, name)
        if client_value != worker_value:
            differences.append(f"{label}: {quoted(client_value)} asks, {quoted(worker_value)} encodes")
    if not differences and client.hidden != worker.hidden:
        differences.append(f"an encoded frame: {quoted(client.hidden)} asks, {quoted(worker.hidden)} encodes")
    return "; ".join(differences)


def handshake_as_client(line: PeerChannel, identity: EncoderIdentity, keys: Sequence[str]) -> PeerDescription:
    """Client side of the handshake. Raises PeerRefused, PeerGone, TransportTimeout, MalformedRequest."""
    hello = Hello(messages.VERSION, os.urandom(NONCE_BYTES), bool(keys))
    line.send(hello)
    reply = line.receive(HELLO_S)
    if reply is None:
        raise TransportTimeout(f"no Hello came in {HELLO_S:g} s")
    if isinstance(reply, messages.HandshakeRefused):  # before any request: it has no room
        raise PeerRefused(f"it refuses this engine: {quoted(reply.why)}")
    if not isinstance(reply, Hello):
        raise MalformedRequest(f"a message {type(reply).__name__}", "Hello was to come")
    _compare_hello(hello, reply)
    nonces = hello.nonce + reply.nonce
    line.send(messages.ClientTerms(identity, proof(keys[0], CLIENT_ROLE, nonces, identity) if keys else b""))
    answer = line.receive(HELLO_S)
    if isinstance(answer, messages.HandshakeRefused):
        raise PeerRefused(f"it refuses this engine: {quoted(answer.why)}")
    if not isinstance(answer, messages.WorkerWelcome):
        raise PeerRefused(f"it answered {type(answer).__name__} and no Welcome")
    if keys and not hmac.compare_digest(answer.proof, proof(keys[0], WORKER_ROLE, nonces, answer.identity)):
        raise PeerRefused("it does not know the key", "both sides need one of the same peer_keys")
    if difference := identity_difference(identity, answer.identity):
        raise PeerRefused(difference, BOTH_NEED)
    if answer.requests < 1 or answer.samples < 1:
        raise PeerRefused(f"it takes {answer.requests} requests and {answer.samples} samples")
    return PeerDescription(answer.identity, answer.transports, answer.requests, answer.samples)


def handshake_as_worker(
    line: PeerChannel, identity: EncoderIdentity, keys: Sequence[str], bounds: PeerDescription
) -> EncoderIdentity:
    """Worker side of the handshake; returns the client's identity. `bounds`: sent to the client. Raises as
    `handshake_as_client`; a refused client is told why."""
    hello = Hello(messages.VERSION, os.urandom(NONCE_BYTES), bool(keys))
    client_hello = line.expect(Hello, HELLO_S)
    line.send(hello)
    _compare_hello(client_hello, hello)
    nonces = client_hello.nonce + hello.nonce
    terms = line.expect(messages.ClientTerms, HELLO_S)
    known = [key for key in keys if hmac.compare_digest(terms.proof, proof(key, CLIENT_ROLE, nonces, terms.identity))]
    if keys and not known:
        _refuse(line, "it does not know the key; both sides need one of the same peer_keys")
    if difference := identity_difference(terms.identity, identity):
        _refuse(line, f"{difference}; {BOTH_NEED}")
    own_proof = proof(known[0], WORKER_ROLE, nonces, identity) if known else b""
    line.send(messages.WorkerWelcome(identity, bounds.transports, bounds.requests, bounds.samples, own_proof))
    return terms.identity


def reject_client(line: PeerChannel, why: str) -> None:
    """Refuses a client for which there is no room. Raises as `handshake_as_client`, never PeerRefused."""
    line.expect(Hello, HELLO_S)  # closing a connection with unread data would discard the refusal
    line.send(messages.HandshakeRefused(why))


def _refuse(line: PeerChannel, why: str) -> None:
    line.send(messages.HandshakeRefused(why))
    raise PeerRefused(why)


def _compare_hello(client: Hello, worker: Hello) -> None:
    """Compares the first messages of both sides. Raises PeerRefused."""
    if client.version != worker.version:
        raise PeerRefused(
            f"protocol version: {client.version} asks, {worker.version} encodes", "the same release on both sides"
        )
    if {len(client.nonce), len(worker.nonce)} != {NONCE_BYTES}:
        raise PeerRefused("a nonce of another length", f"{NONCE_BYTES} bytes")
    if client.keyed != worker.keyed:
        with_key, without = ("asks", "encodes") if client.keyed else ("encodes", "asks")
        raise PeerRefused(
            f"the engine that {with_key} has peer_keys, the one that {without} has none", "the same on both sides"
        )
