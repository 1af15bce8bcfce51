"""Records of what the engine is asked for: recognition, voice activity, audio of streams, hypotheses. Only the loop's
thread changes them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.types import PeerTimings, Priority

if TYPE_CHECKING:
    from asr_serve.decoding.biasing_list import CompiledBiasingList


URGENT_WITHIN_MS = 100
"""Requests to be encoded within this time are urgent in every later stage."""


class RecognitionRequest(msgspec.Struct):
    """Request to recognize a segment. `pcm` (n,) float32, 16 kHz, n >= samples; the loop drops it once it will not
    be encoded again."""

    id: int
    pcm: np.ndarray | None
    samples: int
    """Length without the padding of short segments to the model's minimum."""
    options: SearchOptions
    priority: Priority
    future: Future[Recognition]
    draft: DraftTokens = NO_DRAFT
    within_ms: int | None = None
    """Time within which it should be encoded; None: decided by its priority."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    encode_start_ns: int = 0
    encode_end_ns: int = 0
    arrived_s: float = 0.0
    """Arrival on the monotonic clock of the engine's process."""
    full_window: bool = False
    """Whether all the silence that fills the model's window is encoded, for models with a window."""
    audio_digest: bytes = b""
    """Digest of the audio, where results are cached (engine/cache/digest)."""
    answer_digest: bytes = b""
    """Digest of everything that determines the result."""
    encoded: bool = False
    """Whether the audio was encoded for this request, because no cached result could be used."""
    peer_timings: PeerTimings | None = None
    """Times of that encoding, if a peer did it."""
    hotwords: CompiledBiasingList | None = None
    """Compiled `options.bias`, once it is ready."""

    @property
    def urgent(self) -> bool:
        """Returns whether a caller waits for this request now."""
        return self.within_ms is not None and self.within_ms <= URGENT_WITHIN_MS

    @property
    def encoder_key(self) -> bytes:
        """Cache key of the encoder frames; empty where the audio has no digest."""
        return self.audio_digest and self.audio_digest + b"whole" * self.full_window


class VadAnswer(Future[np.ndarray]):
    """Future of the speech probabilities of a chunk, one per window."""

    state: bytes | None = None
    """The session's state after the chunk, set before the result where the loop keeps states: another engine continues
    from it. It is here and not in the chunk, which callbacks of the future would keep, and its audio with it."""


class VadChunk(msgspec.Struct):
    """Audio of one voice-activity session. `pcm` (n,) float32, 16 kHz, a whole number of windows."""

    session: int
    pcm: np.ndarray
    future: VadAnswer
    audio_digest: bytes = b""
    """Digest of the chunk, where voice activity is cached (engine/cache/digest)."""
    history_digest: bytes = b""
    """Digest of all chunks up to this one."""

    @property
    def window_count(self) -> int:
        return len(self.pcm) // WINDOW_SAMPLES


class HypothesisRequest(msgspec.Struct, frozen=True):
    """Request for a hypothesis of a stream, from a decoder that reads the whole utterance each time."""

    samples: int
    """Samples from the start of the stream that the hypothesis covers. Frames that need later audio, because of
    the encoder's look-ahead, are left out unless the stream has ended."""
    options: SearchOptions
    draft: DraftTokens
    priority: Priority


class StreamChunk(msgspec.Struct):
    """Audio of one stream; `last`: the stream ends with it. The future holds the result that is new with this
    chunk, or the requested `hypothesis`."""

    session: int
    pcm: np.ndarray
    last: bool
    future: Future[Any]
    hypothesis: HypothesisRequest | None = None
    with_times: bool = False
    """Whether the result includes the times of all tokens whose times were not returned before; only for streams
    with words."""


def resolve(future: Future[Any], value: Any) -> None:
    """Sets the result, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def reject(future: Future[Any], error: Exception) -> None:
    """Sets the error, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
