"""One request's life inside the engine. Only the loop touches these records."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asr_serve.decoding.attention import NO_DRAFT, Draft, Recognition, SearchOptions
from asr_serve.types import Priority

if TYPE_CHECKING:
    from asr_serve.engine.states import Slot


URGENT_MS = 100


class Utterance(msgspec.Struct):
    """A segment to recognise. `pcm` (n,) float32, 16 kHz, n >= samples; the loop drops it once encoded."""

    id: int
    pcm: np.ndarray | None
    samples: int
    """Without what pads a short one to the model's least."""
    options: SearchOptions
    priority: Priority
    future: Future[Recognition]
    draft: Draft = NO_DRAFT
    within_ms: int | None = None
    """How soon it should be encoded; None: as its priority asks."""
    submitted_ns: int = msgspec.field(default_factory=time.time_ns)
    encode_start_ns: int = 0
    encode_end_ns: int = 0

    @property
    def urgent(self) -> bool:
        """Somebody waits for just this, now."""
        return self.within_ms is not None and self.within_ms <= URGENT_MS


class Windows(msgspec.Struct):
    """Audio of one caller whose voice activity is wanted. `pcm` a whole number of windows long."""

    session: int
    pcm: np.ndarray
    future: Future[np.ndarray]
    state: bytes | None = None
    """The caller's row after these windows, where the loop was told to keep it: what another engine needs to
    go on from here."""


class Listener:
    """A caller's voice-activity row, and what it has put that is not yet computed."""

    def __init__(self, listener_id: int, slot: Slot, live: bool) -> None:
        self.id, self.slot, self.live = listener_id, slot, live
        self.waiting: deque[Windows] = deque()


def resolve(future: Future[Any], value: Any) -> None:
    """Answer, unless nobody waits any more."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def reject(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
