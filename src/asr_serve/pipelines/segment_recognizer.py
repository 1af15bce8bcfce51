"""Recognizers of the segments of files: one engine, or a pipeline of stages over several."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.models.registry import AsrCard
from asr_serve.types import Priority


class AnsweringModel(NamedTuple):
    """Model that gave an answer."""

    card: AsrCard
    text: Callable[[list[int]], str]
    """Text of its tokens."""


class SegmentRecognizer(Protocol):
    """Recognizer of segments. Futures of its tickets hold a Recognition."""

    name: str
    """Name in transcripts."""
    clients: tuple[EngineClient, ...]
    """Engines. The first one is given every segment, and computes voice activity."""

    def submit(self, pcm: np.ndarray, search: SearchOptions, priority: Priority, check: Callable[[], None]) -> Ticket:
        """Submits a segment; waits for room, see EngineClient.submit. `search`: for the first engine."""

    def cancel(self, ticket: Ticket) -> None:
        """Stops the segment; its future raises Cancelled."""

    def model_of(self, answer: Recognition) -> AnsweringModel:
        """Returns the model that gave an answer."""

    def wake_waiters(self) -> None:
        """Notifies all threads that wait for room, so that they call their `check`."""


class EngineRecognizer:
    """SegmentRecognizer of one engine."""

    def __init__(self, client: EngineClient, text: Callable[[list[int]], str]) -> None:
        self.name = client.card.name
        self.clients: tuple[EngineClient, ...] = (client,)
        self._client, self._model = client, AnsweringModel(client.card, text)

    def submit(self, pcm: np.ndarray, search: SearchOptions, priority: Priority, check: Callable[[], None]) -> Ticket:
        return self._client.submit(pcm, search, priority, wait=True, check=check)

    def cancel(self, ticket: Ticket) -> None:
        self._client.cancel(ticket)

    def model_of(self, answer: Recognition) -> AnsweringModel:
        return self._model

    def wake_waiters(self) -> None:
        self._client.wake_waiters()
