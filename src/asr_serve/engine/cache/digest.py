"""Digests of audio: the same samples have the same digest within this process."""

from __future__ import annotations

import hmac
import secrets

import msgspec
import numpy as np

from asr_serve.engine.request import RecognitionRequest, VadChunk

DIGEST_BYTES = 16

AudioMac = hmac.HMAC


def keyed(key: bytes) -> AudioMac:
    """Beginning of all digests under a key."""
    return hmac.new(key, digestmod="sha256")


_own = keyed(secrets.token_bytes(32))


def use_key(key: bytes) -> None:
    """Sets the key of this process's digests, before the first: processes with one key have the same digests."""
    global _own
    _own = keyed(key)


_encode_facts = msgspec.msgpack.Encoder().encode


def audio_digest(pcm: np.ndarray, *facts: object, mac: AudioMac | None = None) -> bytes:
    """Returns 16 bytes that identify samples and whatever else decides their result, such as whether a model's
    whole window is encoded. `facts`: numbers, text, bytes, None or tuples of these. `mac`: of another key than this
    process's.

    HMAC with SHA-256, cut to 128 bits, because requests with equal digests get equal answers: two recordings made
    to collide would give one client another's text. Every process draws its own key, or the replicas of a cluster
    have one that nobody else knows, so that nobody can search for such a pair elsewhere. Of Python's cryptographic
    hashes, SHA-256 is the fastest on processors with instructions for it, as servers have. Python's lock is released
    while it runs.

    Source  RFC 2104 (HMAC), FIPS 180-4 (SHA-256)
    """
    samples = np.ascontiguousarray(pcm)
    mac = (mac or _own).copy()
    head = _encode_facts((samples.dtype.str, samples.shape, facts))
    mac.update(len(head).to_bytes(8, "little") + head)
    mac.update(samples.data.cast("B") if samples.size else b"")
    return mac.digest()[:DIGEST_BYTES]


NOTHING = np.empty(0, np.float32)
_options = msgspec.msgpack.Encoder().encode


def set_request_digests(utterance: RecognitionRequest) -> RecognitionRequest:
    """Sets the digests of the request's audio and of the answer that it asks for: requests with the same answer
    digest get the same answer. Of a draft, only the accepted tokens can change an answer."""
    assert utterance.pcm is not None
    utterance.audio_digest = audio_digest(utterance.pcm)
    fixed = utterance.draft.tokens[: utterance.draft.accepted_tokens]
    utterance.answer_digest = audio_digest(
        NOTHING, utterance.audio_digest, utterance.samples, _options(utterance.options), fixed
    )
    return utterance


def set_chunk_digest(chunk: VadChunk) -> VadChunk:
    """Sets the digest of the chunk's audio."""
    chunk.audio_digest = audio_digest(chunk.pcm)
    return chunk


def state_digest(state: bytes) -> bytes:
    """Digest of a voice-activity state with which a session begins."""
    return audio_digest(np.frombuffer(state, np.uint8))


def chain_digest(before: bytes, block: bytes) -> bytes:
    """Digest of all chunks up to this one, on which a session's voice activity depends."""
    return audio_digest(NOTHING, before, block)
