"""Turns of a speaker: when one has begun, may be over, and is over.

The silence rule is the schedule of `audio/endpointing`: a pause that ends the last open segment ends the turn. A
turn model is queried once in each pause, and may end the turn sooner. No further window is processed until it
answers, so that its decision depends on the audio alone, never on how fast the answer came.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.endpointing import NEVER, WINDOW_SAMPLES, Endpointer
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AtCapacity, EngineCrashed, ModelNotLoaded, StepFailed
from asr_serve.pipelines.live.events import TurnEvent
from asr_serve.pipelines.options import TurnOptions
from asr_serve.types import Span

MODEL_PAUSE_SAMPLES = 7 * WINDOW_SAMPLES
"""Length of a pause before the model is queried: it is trained on speech that ends in some 200 ms of silence."""
MODEL_INPUT_SAMPLES = units.s_to_samples(8)


class TurnState(msgspec.Struct, frozen=True):
    """State of a TurnDetector whose model has nothing to answer. The fields are those of TurnDetector."""

    open: bool
    eager: bool
    submitted_pause: int | None
    probability: float | None
    decided: bool


class TurnDetector:
    """Turn detection of one session. Call from one thread at a time."""

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
        """Start of the pause in which the model was queried."""
        self._answer: Future[float] | None = None
        self._probability: float | None = None
        """Probability from the model in this pause."""
        self._decided = False

    def export_state(self) -> TurnState | None:
        """Returns the state; None while an answer of the model has not been processed."""
        if self._answer is not None:
            return None
        return TurnState(self._open, self._eager, self._submitted_pause, self._probability, self._decided)

    def import_state(self, state: TurnState) -> None:
        self._open, self._eager, self._decided = state.open, state.eager, state.decided
        self._submitted_pause, self._probability = state.submitted_pause, state.probability

    @property
    def waiting(self) -> bool:
        """Returns whether the model has yet to answer; no further window may be processed until then."""
        return self._answer is not None and not self._answer.done()

    def update(self, endpointer: Endpointer, now: int, closed: list[Span]) -> list[TurnEvent]:
        """Returns the turn events after a window, or after anything else that opened or closed a segment."""
        events: list[TurnEvent] = []
        if self._open and endpointer.open_from_samples is None:
            end = closed[-1].end_samples if closed else now
            model = self._options.model
            by = model if self._decided and model is not None else "silence"
            probability = self._probability if model is not None else 1.0
            events += [TurnEvent("stopped", end, probability, by), TurnEvent("ended", end, probability, by)]
            self._open = self._eager = False
        if not self._open and endpointer.is_certain:
            assert endpointer.open_from_samples is not None
            self._open = True
            events.append(TurnEvent("started", endpointer.open_from_samples))
        if endpointer.pause_from_samples is None:
            if self._eager:
                events.append(TurnEvent("resumed", now, by=self._options.model or "silence"))
            self._eager = self._decided = False
            self._submitted_pause = self._answer = self._probability = None
        return events

    def eager_end(self, endpointer: Endpointer, now: int, known: int) -> list[TurnEvent]:
        """Returns an `eager_end` event, once in a pause, when the text is complete. `known`: end of the audio
        that has text."""
        pause, end = endpointer.pause_from_samples, endpointer.closes_at_samples
        threshold = self._options.eager_threshold
        if threshold is None or self._eager or not self._open or pause is None or end is None or known <= pause:
            return []
        probability = (now - pause) / (end - pause) if self._options.model is None else self._probability
        if probability is None or probability < threshold:
            return []
        self._eager = True
        return [TurnEvent("eager_end", pause, probability, self._options.model or "silence")]

    # --- turn model -----------------------------------------------------------------------------------

    def model_input(self, endpointer: Endpointer, now: int) -> Span | None:
        """Returns the audio to query the model with now; None: do not query."""
        pause, start = endpointer.pause_from_samples, endpointer.open_from_samples
        if self._options.model is None or not self._open or pause is None or start is None:
            return None
        if self._submitted_pause == pause or now - pause < MODEL_PAUSE_SAMPLES:
            return None
        return Span(max(start, now - MODEL_INPUT_SAMPLES), now)

    def earliest_end_samples(self, endpointer: Endpointer, now: int) -> int:
        """Position before which the model cannot end the turn. `now`: end of the scored audio."""
        pause = endpointer.pause_from_samples
        if self._options.model is None:
            return NEVER
        if pause is None:
            return now + MODEL_PAUSE_SAMPLES
        if pause != self._submitted_pause:
            return max(now, pause + MODEL_PAUSE_SAMPLES)
        # Queried once in a pause; speech that resumes leads to another one.
        return now if self._answer is not None else now + MODEL_PAUSE_SAMPLES

    def submit_to_model(self, endpointer: Endpointer, pcm: np.ndarray) -> None:
        self._submitted_pause = endpointer.pause_from_samples
        try:
            self._answer = self._client.predict_turn_end(pcm)
        except AtCapacity:
            return  # the pause decides
        self._answer.add_done_callback(lambda _: self._wake())

    def turn_ended(self) -> bool:
        """Returns whether the model's answer, which has just arrived, ends the turn."""
        answer, self._answer = self._answer, None
        if answer is None:
            return False
        try:
            self._probability = answer.result()
        except (StepFailed, AtCapacity, EngineCrashed):
            return False  # the pause decides
        self._decided = self._probability >= self._options.threshold
        return self._decided
