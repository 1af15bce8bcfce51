"""One request's life inside the engine. Only the loop touches these records."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import msgspec
import numpy as np

from asr_serve.decoding.attention import Recognition, SearchOptions
from asr_serve.engine.states import Slot
from asr_serve.types import Priority


class Utterance(msgspec.Struct):
    """A segment to recognise. `pcm` (samples,) float32, 16 kHz; dropped once encoded."""

    id: int
    pcm: np.ndarray | None
    samples: int
    options: SearchOptions
    priority: Priority
    future: Future[Recognition]


class Windows(msgspec.Struct):
    """Audio of one caller whose voice activity is wanted. `pcm` a whole number of windows long."""

    session: int
    pcm: np.ndarray
    future: Future[np.ndarray]


class Listener:
    """A caller's voice-activity row, and what it has put that is not yet computed."""

    def __init__(self, listener_id: int, slot: Slot) -> None:
        self.id, self.slot = listener_id, slot
        self.waiting: deque[Windows] = deque()
