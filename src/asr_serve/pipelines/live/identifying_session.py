"""Live session whose language is identified from its first seconds of speech, and that goes to the model of that
language.

The session of the default model recognizes from the start, so that its callers wait for nothing but the answer. From
where speech begins until the answer is there, its results are held back: then they are passed on, or dropped for those
of another model's session, which continues from the state before that speech with all audio since. Nothing that was
passed on is ever withdrawn. Where the answer is unsure, the results are passed on, and the next speech is asked about,
up to MAX_UNSURE times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.errors import AsrServeError
from asr_serve.pipelines.language_identification import (
    EARLY_PIECE_SAMPLES,
    MIN_PIECE_SAMPLES,
    PIECE_SAMPLES,
    LanguageIdentification,
    Outcome,
    believed_language,
    submit_piece,
)
from asr_serve.pipelines.live.events import LiveEvent, LiveSegmentDone, SessionFinished, TurnEvent
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.live.session_state import LiveSessionState, SavedLiveSession
from asr_serve.types import Span

MAX_UNSURE = 3
"""Unsure answers after which a session stays with the default model."""
ANSWER_TIMEOUT_S = 5.0
"""Longest wait for an answer, in which results are held back."""
CHECKPOINT_SAMPLES = units.s_to_samples(1)
"""Interval of the states that are kept while nobody speaks."""

OpenInLanguage = Callable[[SavedLiveSession], LiveSession]
"""Opens the session that continues a saved one in the identified language. Raises as LiveSession does."""
ChooseModel = Callable[[str], tuple[str, OpenInLanguage | None]]
"""Name of the model for a language, and how its session is opened; None: the session stays with its own."""


class _Checkpoint(msgspec.Struct):
    """State of a session in which nobody speaks, and what its client did since."""

    state: LiveSessionState
    received_samples: int
    commands: list[tuple[int, str | None]] = []
    """Positions of flushes, with their names, and of the end of the audio, with None."""


class IdentifyingSession:
    """LiveSession that identifies its language. The methods are those of LiveSession."""

    def __init__(
        self,
        session: LiveSession,
        model: str,
        identifier: EngineClient,
        choose: ChooseModel,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`session`: of `model`, the default one, without audio so far. `identifier`: client of the identifying model.
        `clock`: that of `session`, in seconds."""
        self._session, self._model, self._identifier = session, model, identifier
        self._choose, self._wake, self._clock = choose, wake, clock
        self.identification: LanguageIdentification | None = None
        """Result, once the session's model is fixed."""
        self._audio = AudioHistory()
        """Audio since the checkpoint, as far as its session may need it."""
        self._held: list[LiveEvent] = []
        self._speech: tuple[Span, bool] | None = None
        """Speech that is asked about, and whether it has ended; None: nobody speaks, or there is no checkpoint."""
        self._ticket: Ticket | None = None
        self._asked_samples = 0
        """Length of the last piece of this speech."""
        self._deadline_s = 0.0
        self._unsure = 0
        self._speech_found = False
        """Whether words were passed on."""
        self._started_samples = -1
        """Start of the last turn that was reported."""
        state = session.export_state()
        self._checkpoint = None if state is None else _Checkpoint(state, 0)

    # --- client ----------------------------------------------------------------------------------------

    @property
    def received_samples(self) -> int:
        return self._session.received_samples

    @property
    def scored_samples(self) -> int:
        return self._session.scored_samples

    @property
    def needed_from_samples(self) -> int:
        return self._session.needed_from_samples

    @property
    def full(self) -> bool:
        return self._session.full

    @property
    def due_s(self) -> float | None:
        """Time on `clock` as that of LiveSession; also that at which an answer is given up."""
        due_s = self._session.due_s
        if self._ticket is None:
            return due_s
        return self._deadline_s if due_s is None else min(due_s, self._deadline_s)

    def received_audio(self, from_samples: int) -> tuple[int, np.ndarray]:
        return self._session.received_audio(from_samples)

    def export_state(self) -> LiveSessionState | None:
        """Returns the state as LiveSession does; None until the session's model is fixed."""
        return None if self.identification is None else self._session.export_state()

    def append_audio(self, pcm: np.ndarray) -> None:
        self._session.append_audio(pcm)
        if self.identification is None and len(pcm):
            self._audio.append(pcm)

    def flush(self, name: str) -> None:
        self._session.flush(name)
        self._record_command(name)

    def finish(self) -> None:
        self._session.finish()
        self._record_command(None)

    def _record_command(self, name: str | None) -> None:
        if self._checkpoint is not None and self.identification is None:
            self._checkpoint.commands.append((self._session.received_samples, name))

    def close(self) -> None:
        if self._ticket is not None:
            self._identifier.cancel(self._ticket)
            self._ticket = None
        self._session.close()

    # --- identification ----------------------------------------------------------------------------------

    def advance(self) -> list[LiveEvent]:
        events = self._session.advance()
        if self.identification is not None:
            return self._with_language(events)
        self._follow_speech()
        if self._speech is None:
            return self._pass_on(events)
        self._held += events
        released = self._turns_started()
        if self._ticket is not None and (self._ticket.future.done() or self._clock() >= self._deadline_s):
            released += self._take_answer()
        if self._speech is not None and self._ticket is None:
            released += self._ask()
        return released

    def _follow_speech(self) -> None:
        """Updates the speech that is asked about: the first segment after the checkpoint."""
        if self._checkpoint is None:
            return
        found = self._session.open_speech
        speech = self._speech
        same = speech is None or (found is not None and found[0].start_samples == speech[0].start_samples)
        self._speech = found if same or speech is None else (speech[0], True)

    def _pass_on(self, events: list[LiveEvent]) -> list[LiveEvent]:
        """Passes on events while no speech is asked about, and keeps the state behind them."""
        self._speech_found |= any(isinstance(event, LiveSegmentDone) for event in events)
        if events and isinstance(events[-1], SessionFinished):
            # Words may have been too short to ask about, or the session had no state to continue from.
            outcome: Outcome = "unsure" if self._unsure or self._speech_found else "no_speech"
            return [*events[:-1], *self._stay(outcome), events[-1]]
        age = self.received_samples - (0 if self._checkpoint is None else self._checkpoint.received_samples)
        if events or self._checkpoint is None or age >= CHECKPOINT_SAMPLES:
            self._renew_checkpoint()
        return events

    def _renew_checkpoint(self) -> None:
        session, self._checkpoint = self._session, None
        state = session.export_state() if session.open_speech is None else None
        if state is not None:
            self._checkpoint = _Checkpoint(state, session.received_samples)
        self._audio.drop_before(session.needed_from_samples if state is None else state.audio_from)

    def _turns_started(self) -> list[LiveEvent]:
        """Takes the starts of turns out of what is held: they are the same whatever the model, and clients stop their
        own speech by them."""
        started: list[LiveEvent] = []
        while self._held and isinstance(first := self._held[0], TurnEvent) and first.state == "started":
            self._started_samples = first.position_samples
            started.append(self._held.pop(0))
        return started

    def _ask(self) -> list[LiveEvent]:
        """Submits a piece of the speech when there is enough of it, or no more comes."""
        assert self._speech is not None
        span, ended = self._speech
        wanted = EARLY_PIECE_SAMPLES if not self._asked_samples else PIECE_SAMPLES
        if not ended and span.samples < wanted:
            return []
        samples = min(span.samples, PIECE_SAMPLES)
        if samples < MIN_PIECE_SAMPLES:
            return self._release()
        piece = self._audio.slice(Span(span.start_samples, span.start_samples + samples))
        if self._identifier.state != "ready":
            return self._stay("unavailable")
        try:
            self._ticket = submit_piece(self._identifier, piece, "live")
        except AsrServeError:
            return self._stay("unavailable")
        self._asked_samples, self._deadline_s = samples, self._clock() + ANSWER_TIMEOUT_S
        self._ticket.future.add_done_callback(lambda _: self._wake())
        return []

    def _take_answer(self) -> list[LiveEvent]:
        assert self._ticket is not None
        assert self._speech is not None
        ticket, self._ticket = self._ticket, None
        if not ticket.future.done():
            self._identifier.cancel(ticket)
            return self._stay("timeout")
        try:
            answer = ticket.future.result()
        except (AsrServeError, CancelledError):
            return self._stay("unavailable")
        if (language := believed_language(answer, self._asked_samples)) is not None:
            return self._go_on_in(language, answer.language_prob)
        span, ended = self._speech
        if self._asked_samples < PIECE_SAMPLES and not (ended and self._asked_samples == span.samples):
            return []  # more of it is asked about
        self._unsure += 1
        return self._stay("unsure") if self._unsure >= MAX_UNSURE else self._release()

    # --- outcomes ------------------------------------------------------------------------------------------

    def _release(self) -> list[LiveEvent]:
        """Passes on what was held; the next speech is asked about."""
        held, self._held = self._held, []
        self._speech, self._asked_samples = None, 0
        return self._pass_on(held)

    def _stay(self, outcome: Outcome, language: str = "", probability: float = 0.0) -> list[LiveEvent]:
        """Fixes the default model."""
        return self._fix(LanguageIdentification(outcome, self._model, language, probability))

    def _go_on_in(self, language: str, probability: float) -> list[LiveEvent]:
        """Fixes the model of a language: the default one, or another that continues from the checkpoint."""
        model, open_session = self._choose(language)
        if open_session is None:
            return self._fix(LanguageIdentification("identified", model, language, probability))
        assert self._checkpoint is not None
        checkpoint, previous = self._checkpoint, self._session
        ends = [position for position, _ in checkpoint.commands]
        start = checkpoint.state.audio_from
        at = min([self._audio.end, *ends])
        try:
            session = open_session(SavedLiveSession(checkpoint.state, self._audio_between(start, at)))
        except (AsrServeError, ValueError):  # other options do not suit it, or it has no room
            return self._stay("refused", language, probability)
        for position, name in checkpoint.commands:
            session.append_audio(self._audio_between(at, position))
            at = position
            if name is None:
                session.finish()
            else:
                session.flush(name)
        if at < self._audio.end:
            session.append_audio(self._audio_between(at, self._audio.end))
        self._session, self._held = session, []
        previous.close()
        fixed = self._fix(LanguageIdentification("identified", model, language, probability))
        return fixed + self._with_language(session.advance())

    def _audio_between(self, start: int, end: int) -> np.ndarray:
        return self._audio.slice(Span(start, end)) if start < end else np.zeros(0, np.float32)

    def _fix(self, identification: LanguageIdentification) -> list[LiveEvent]:
        self.identification, self._checkpoint, self._speech = identification, None, None
        self._audio = AudioHistory()
        held, self._held = self._held, []
        return [identification, *self._with_language(held)]

    def _with_language(self, events: list[LiveEvent]) -> list[LiveEvent]:
        """Adds the language to segments whose model does not tell it; leaves out a turn's start that was reported."""
        told = self.identification
        assert told is not None
        result: list[LiveEvent] = []
        for event in events:
            match event:
                case TurnEvent("started", position) if position <= self._started_samples:
                    continue
                case LiveSegmentDone() if told.outcome == "identified" and not event.language_prob:
                    event = msgspec.structs.replace(event, language=told.language, language_prob=told.probability)
            result.append(event)
        return result
