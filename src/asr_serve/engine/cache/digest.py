"""The name of what was heard: audio with the same samples has the same, in this process."""

from __future__ import annotations

import hmac
import secrets

import msgspec
import numpy as np

from asr_serve.engine.request import RecognitionRequest, VadChunk

DIGEST_BYTES = 16

_KEYED = hmac.new(secrets.token_bytes(32), digestmod="sha256")
_encode_facts = msgspec.msgpack.Encoder().encode


def audio_digest(pcm: np.ndarray, *facts: object) -> bytes:
    """16 bytes for samples and whatever else decides what is made of them, such as whether a model's whole window
    is encoded. `facts`: numbers, text, bytes, None or tuples of these.

    It is HMAC with SHA-256, cut to 128 bits, because what has the same name gets the same words: two recordings
    made to collide would give one caller another's. Every process draws its own key, so that nobody can look for
    such a pair elsewhere; names mean nothing to another process. Of the cryptographic hashes that Python has,
    SHA-256 is the fastest where the processor has instructions for it, as servers' do. Python's lock is free while
    it runs.

    Source  RFC 2104 (HMAC), FIPS 180-4 (SHA-256)
    """
    samples = np.ascontiguousarray(pcm)
    named = _KEYED.copy()
    head = _encode_facts((samples.dtype.str, samples.shape, facts))
    named.update(len(head).to_bytes(8, "little") + head)
    named.update(samples.data.cast("B") if samples.size else b"")
    return named.digest()[:DIGEST_BYTES]


NOTHING = np.empty(0, np.float32)
_options = msgspec.msgpack.Encoder().encode


def set_request_digests(utterance: RecognitionRequest) -> RecognitionRequest:
    """By its audio, and by the answer that it wants: what the two are named alike by is answered alike. Of a draft
    only what is fixed can change an answer."""
    assert utterance.pcm is not None
    utterance.audio_digest = audio_digest(utterance.pcm)
    fixed = utterance.draft.tokens[: utterance.draft.accepted_tokens]
    utterance.answer_digest = audio_digest(
        NOTHING, utterance.audio_digest, utterance.samples, _options(utterance.options), fixed
    )
    return utterance


def set_window_digest(windows: VadChunk) -> VadChunk:
    windows.audio_digest = audio_digest(windows.pcm)
    return windows


def state_digest(state: bytes) -> bytes:
    """A row that somebody brings."""
    return audio_digest(np.frombuffer(state, np.uint8))


def chain_digest(before: bytes, heard: bytes) -> bytes:
    """What a caller's voice activity depends on: all pieces up to this one."""
    return audio_digest(NOTHING, before, heard)
