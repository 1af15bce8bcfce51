"""Whose turn it is: when a speaker has begun, may have finished, and has.

The silence rule is `audio/endpointing`'s schedule: a pause that ends the last open segment ends the turn. A turn
model is asked once in each pause, and may end it sooner. While it answers no further window is looked at: what
it decides depends on the audio alone, never on how fast the answer came.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from asr_serve import units
from asr_serve.audio.endpointing import WINDOW_SAMPLES, Endpointer
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AtCapacity, EngineCrashed, ModelNotLoaded, StepFailed
from asr_serve.pipelines.live.events import TurnEvent, TurnOptions
from asr_serve.types import Span

MODEL_PAUSE_SAMPLES = 7 * WINDOW_SAMPLES
"""Of a pause before the model is asked: it is trained on speech that ends in some 200 ms of silence."""
MODEL_INPUT_SAMPLES = units.s_to_samples(8)


class TurnDetector:
    """One caller's. Call from one thread at a time."""

    def __init__(self, options: TurnOptions, client: EngineClient, wake: Callable[[], None]) -> None:
        """Raises ModelNotLoaded."""
        if options.model is not None and options.model != client.turn_model:
            raise ModelNotLoaded(
                f"turn model {options.model[:50]!r}",
                f"loaded here: {client.turn_model or 'none'}; without one the length of a pause decides",
                "leave it out, or have the server load it with the setting turn_model",
            )
        self._options, self._client, self._wake = options, client, wake
        self._open = self._eager = False
        self._submitted_pause: int | None = None
        """The pause in which the model was asked."""
        self._answer: Future[float] | None = None
        self._probability: float | None = None
        """The model's, in this pause."""
        self._decided = False

    @property
    def waiting(self) -> bool:
        """The model has yet to answer: look at no further window."""
        return self._answer is not None and not self._answer.done()

    def update(self, endpointer: Endpointer, now: int, closed: list[Span]) -> list[TurnEvent]:
        """After each window, and whatever else opened or closed a segment."""
        told: list[TurnEvent] = []
        if self._open and endpointer.open_from_samples is None:
            end = closed[-1].end_samples if closed else now
            model = self._options.model
            by = model if self._decided and model is not None else "silence"
            probability = self._probability if model is not None else 1.0
            told += [TurnEvent("stopped", end, probability, by), TurnEvent("ended", end, probability, by)]
            self._open = self._eager = False
        if not self._open and endpointer.is_certain:
            assert endpointer.open_from_samples is not None
            self._open = True
            told.append(TurnEvent("started", endpointer.open_from_samples))
        if endpointer.pause_from_samples is None:
            if self._eager:
                told.append(TurnEvent("resumed", now, by=self._options.model or "silence"))
            self._eager = self._decided = False
            self._submitted_pause = self._answer = self._probability = None
        return told

    def eager_end(self, endpointer: Endpointer, now: int, known: int) -> list[TurnEvent]:
        """`known`: there is text for audio up to here. Told once in a pause, when the text is complete."""
        pause, enough = endpointer.pause_from_samples, endpointer.closes_at_samples
        wanted = self._options.eager_threshold
        if wanted is None or self._eager or not self._open or pause is None or enough is None or known <= pause:
            return []
        probability = (now - pause) / (enough - pause) if self._options.model is None else self._probability
        if probability is None or probability < wanted:
            return []
        self._eager = True
        return [TurnEvent("eager_end", pause, probability, self._options.model or "silence")]

    # --- the model ------------------------------------------------------------------------------------

    def model_input(self, endpointer: Endpointer, now: int) -> Span | None:
        """The audio that the model is to be asked about now."""
        pause, start = endpointer.pause_from_samples, endpointer.open_from_samples
        if self._options.model is None or not self._open or pause is None or start is None:
            return None
        if self._submitted_pause == pause or now - pause < MODEL_PAUSE_SAMPLES:
            return None
        return Span(max(start, now - MODEL_INPUT_SAMPLES), now)

    def submit_to_model(self, endpointer: Endpointer, pcm: np.ndarray) -> None:
        self._submitted_pause = endpointer.pause_from_samples
        try:
            self._answer = self._client.predict_turn_end(pcm)
        except AtCapacity:
            return  # the pause decides
        self._answer.add_done_callback(lambda _: self._wake())

    def turn_ended(self) -> bool:
        """Whether the model's answer, which has come just now, ends the turn."""
        answer, self._answer = self._answer, None
        if answer is None:
            return False
        try:
            self._probability = answer.result()
        except (StepFailed, AtCapacity, EngineCrashed):
            return False  # the pause decides
        self._decided = self._probability >= self._options.threshold
        return self._decided
