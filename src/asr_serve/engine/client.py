"""Client of an engine, the same whether its loop runs in a thread or in a process."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from asr_serve import units
from asr_serve.audio.endpointing import WINDOW_SAMPLES as VAD_WINDOW_SAMPLES
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.diarization.local_speakers import BUDGET_SAMPLES, WINDOW_SAMPLES, LocalSpeakers
from asr_serve.diarization.overlapped_speech import MAX_MIXTURE_SAMPLES, SpeakerRanges
from asr_serve.engine.partial_rate import LiveAdmission, PartialRateController
from asr_serve.engine.request import HypothesisRequest, RecognitionRequest, StreamChunk, VadAnswer, VadChunk
from asr_serve.engine.tts.request import SoundCallback, SoundDelivery, TtsRequest, validate_sentence
from asr_serve.errors import (
    AtCapacity,
    AudioTooLong,
    EmptyAudio,
    EngineClosed,
    ModelNotLoaded,
    OptionError,
    UnsupportedAudio,
)
from asr_serve.models.registry import AnyCard, AsrCard, TtsCard, TurnCard, wrong_model
from asr_serve.types import LanguageModelChoice, Priority, SearchResult, Sentence


class Ticket(NamedTuple):
    """Handle of an admitted request: its id, for cancelling, and the future of its result."""

    id: int
    future: Future[Any]


class AuxiliaryQueue:
    """Admission of queries that are not requests, such as turn and diarization queries, with a limit of its
    own."""

    def __init__(
        self, room: threading.Condition, max_waiting: int, what: str, retry_ms: int, live_reserved: int = 0
    ) -> None:
        """`room`: notified when a place is free. `what`: name of the queries in error messages. `live_reserved`: places
        reserved for live callers."""
        self._room, self._max_waiting, self._what, self._retry_ms, self._live_reserved = (
            room,
            max_waiting,
            what,
            retry_ms,
            live_reserved,
        )
        self.waiting = 0

    def submit(
        self,
        send: Callable[[Future[Any]], None],
        *,
        live: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
        closed: Callable[[], bool] = lambda: False,
    ) -> Future[Any]:
        """Admits a query and hands its future to `send`.

        The future is already running and cannot be cancelled, so the count matches the queries that are waiting.
        Full: raises AtCapacity; with `wait`, waits until there is room, it is `closed` or `check` raises.
        """
        with self._room:
            most = self._max_waiting - (0 if live else self._live_reserved)
            while wait and not closed() and self.waiting >= most:
                check()  # under the lock, so that no notification is missed
                self._room.wait()
            if self.waiting >= most and not closed():
                raise AtCapacity(f"{self.waiting} {self._what} wait", f"up to {most}", self._retry_ms)
            self.waiting += 1
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        answer.add_done_callback(self._answered)
        try:
            send(answer)
        except EngineClosed:
            self._answered(answer)
            raise
        return answer

    def _answered(self, _: Future[Any]) -> None:
        with self._room:
            self.waiting -= 1
            self._room.notify_all()


class VadSession:
    """Voice activity of one session: audio windows go in, speech probabilities come out, in order."""

    def __init__(self, client: EngineClient, session_id: int, live: bool) -> None:
        self._client, self._id, self._live, self._open = client, session_id, live, True
        self._last_answer: VadAnswer | None = None

    @property
    def state(self) -> bytes | None:
        """State after the last chunk, once it is answered, from which another engine continues; None where the
        engine does not report states, and before the first chunk."""
        return None if self._last_answer is None else self._last_answer.state

    def submit_windows(self, pcm: np.ndarray) -> Future[np.ndarray]:
        """Submits `pcm` float32 at 16 kHz, whole windows of 512 samples, at most EngineConfig.vad_windows of them.

        The future holds one probability per window. Keep few in flight: submitted audio is held until it is
        computed. Raises OptionError, EngineClosed.
        """
        windows, remainder = divmod(len(pcm), VAD_WINDOW_SAMPLES)
        if remainder or not 1 <= windows <= self._client.config.vad_windows:
            raise OptionError(
                f"{len(pcm)} samples",
                f"a multiple of {VAD_WINDOW_SAMPLES}, up to {self._client.config.vad_windows * VAD_WINDOW_SAMPLES}",
            )
        chunk = VadChunk(self._id, pcm, VadAnswer())
        submitted_s = self._client.clock()
        self._last_answer = chunk.future
        self._client.backend.submit_vad_chunk(chunk)
        if self._live:
            self._client._measure_vad(chunk.future, self._id, submitted_s)
        return chunk.future

    def close(self) -> None:
        if self._open:
            self._open = False
            self._client._close_session(self._id, self._live)


class RecognitionStream:
    """Audio stream through a model that carries its state from chunk to chunk."""

    def __init__(self, client: EngineClient, number: int, live: bool) -> None:
        self._client, self._number, self._live, self._open = client, number, live, True

    def submit_audio(self, pcm: np.ndarray, *, last: bool = False, timed: bool = False) -> Future[SearchResult]:
        """Submits `pcm` (n,) float32 at 16 kHz, any n. `last`: nothing follows, and the stream is closed. `timed`:
        the result includes the times of its tokens, and of those of the results since the last timed one.

        The future holds the tokens that are new since the previous result, possibly none. Frames are the model's,
        from the stream's start. It may raise StepFailed: the stream is lost then, and a new one must be opened.
        Keep few in flight: submitted audio is held until it is processed. Raises UnsupportedAudio, EngineClosed.
        """
        return self._submit(pcm, last, None, timed)

    def submit_hypothesis(
        self, pcm: np.ndarray, wanted: HypothesisRequest, *, last: bool = False
    ) -> Future[Recognition]:
        """Submits audio to a model whose decoder reads the whole utterance each time. The future holds a
        hypothesis of all audio so far, this chunk included."""
        return self._submit(pcm, last, wanted)

    def _submit(
        self, pcm: np.ndarray, last: bool, wanted: HypothesisRequest | None, timed: bool = False
    ) -> Future[Any]:
        validate_samples(pcm)
        assert self._open, "put after the last piece"
        self._open = not last
        chunk = StreamChunk(self._number, pcm, last, Future(), wanted, timed)
        submitted_s = self._client.clock()
        self._client.backend.submit_stream_chunk(chunk)
        if self._live:
            self._client._measure(chunk.future, submitted_s)
        return chunk.future

    def close(self) -> None:
        """Drops chunks in flight. Idempotent."""
        self._open = False
        with contextlib.suppress(EngineClosed):
            self._client.backend.close_stream(self._number)


def validate_samples(pcm: np.ndarray) -> None:
    if pcm.ndim != 1 or pcm.dtype != np.float32 or not np.isfinite(pcm.sum()):
        raise UnsupportedAudio(
            f"an array of {pcm.dtype}, shape {pcm.shape}",
            "one row of finite float32 samples",
            "open_audio turns anything into that",
        )


SPEECH_PROBABILITY = 0.5
"""Voice-activity probability from which a window counts as speech for admission."""
INITIAL_SPEED = 50.0
"""Assumed speed in seconds of audio per second, until the engine's own speed is measured."""
SPEED_OVER_S = 10.0
"""Busy time over which the speed is measured; older measurements are halved each time it has passed."""
MAX_TURN_REQUESTS = 24
"""Turn queries that may wait: one core answers as many in a second, and a later answer is useless."""
TURN_RETRY_MS = 500
MAX_DIARIZATION_WINDOWS, LIVE_DIARIZATION_WINDOWS = 48, 16
"""Windows that may wait for diarization, one or two seconds of work, 30 MB; and how many of these places are
reserved for live callers, so that recordings, which fill every other place, never block them."""
DIARIZATION_RETRY_MS = 1_000


class EngineBackend(Protocol):
    """Connection to one loop. Every method may be called from any thread; all but `close` raise EngineClosed."""

    card: AnyCard
    turn_card: TurnCard | None
    """Card of the turn model, if there is one. `predict_turn_end` is called only then."""
    speakers: bool
    """Whether the diarization models are on this machine."""

    @property
    def new_live_callers(self) -> float:
        """Live callers of this server who may be new at the same time, as configured or measured."""

    @property
    def state(self) -> str: ...
    def submit(self, utterance: RecognitionRequest) -> None: ...
    def synthesize(self, saying: TtsRequest) -> None:
        """Submits a sentence; only for speech synthesis models."""

    def cancel(self, request_id: int) -> None: ...
    def expedite(self, request_id: int, within_ms: int) -> None:
        """Sets the time since its arrival within which a request should be encoded, where it is still open."""

    def open_vad_session(self, session: int, live: bool, state: bytes | None = None) -> None:
        """Opens a voice-activity session. `state`: its state from another engine."""

    def submit_vad_chunk(self, chunk: VadChunk) -> None: ...
    def close_session(self, session: int) -> None: ...
    def open_stream(
        self,
        stream: int,
        live: bool,
        samples: int | None,
        words: bool,
        bias: str,
        language_model: LanguageModelChoice | None,
    ) -> None:
        """Opens a stream. This method and the next two are only for models that carry their state."""

    def submit_stream_chunk(self, piece: StreamChunk) -> None: ...
    def close_stream(self, stream: int) -> None: ...
    def predict_turn_end(self, pcm: np.ndarray, answer: Future[float]) -> None: ...
    def diarize_window(
        self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]
    ) -> None: ...
    def separate_speakers(self, pcm: np.ndarray, speaker_ranges: SpeakerRanges, answer: Future[np.ndarray]) -> None: ...
    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        """Withdraws a separation that has not begun; its answer raises Cancelled."""

    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


Connect = Callable[[EngineConfig, Callable[[int], None], Callable[[], None]], EngineBackend]
"""Opens a backend. The backend calls the second argument with the samples of each utterance or sentence that has
ended, and the third when it accepts no more work."""


def _whole_callers(callers: float) -> int:
    """Rounded down, so that all servers together admit no more than their engines take; but one at least."""
    return max(1, int(callers + 1e-6))


class EngineClient:
    """Admits requests up to the limits of its configuration. Every method may be called from any thread."""

    def __init__(self, config: EngineConfig, connect: Connect, clock: Callable[[], float] = time.monotonic) -> None:
        """`connect`: `thread_backend(...)` or `process_backend(...)`; its errors are raised here. `clock`: of all
        measurements, in seconds."""
        self.config, self.clock = config, clock
        self._ids = itertools.count()
        self._room = threading.Condition()
        self._turns = AuxiliaryQueue(self._room, MAX_TURN_REQUESTS, "questions to the turn model", TURN_RETRY_MS)
        queries = "windows of diarization"
        self._voices = AuxiliaryQueue(
            self._room, MAX_DIARIZATION_WINDOWS, queries, DIARIZATION_RETRY_MS, LIVE_DIARIZATION_WINDOWS
        )
        self._requests = self._samples = self._sessions = self._live = 0
        self._done_samples, self._busy_s, self._busy_since = 0, 0.0, 0.0
        self._closed = False
        self.partial_rate = PartialRateController()
        self.max_sessions = config.max_sessions
        """Voice-activity sessions that may be open."""
        self.backend = connect(config, self._done, self._stopped)
        self._admission = LiveAdmission(_whole_callers(self.backend.new_live_callers))
        card = self.backend.card if isinstance(self.backend.card, AsrCard) else None
        self.max_samples = units.ms_to_samples(card.max_segment_ms) if card else 0
        self.min_samples = units.ms_to_samples(card.min_segment_ms) if card else 0

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.backend.card.name

    @property
    def card(self) -> AsrCard:
        """Card of the recognition model. Raises WrongModel for a speech synthesis model."""
        if isinstance(card := self.backend.card, AsrCard):
            return card
        raise wrong_model(card.name, AsrCard)

    @property
    def voice_card(self) -> TtsCard:
        """Card of the speech synthesis model. Raises WrongModel for a recognition model."""
        if isinstance(card := self.backend.card, TtsCard):
            return card
        raise wrong_model(card.name, TtsCard)

    @property
    def state(self) -> str:
        """State of the engine: ready, restarting, failed (it will be tried again) or closed."""
        return self.backend.state

    def submit(
        self,
        pcm: np.ndarray,
        options: SearchOptions | None = None,
        priority: Priority = "interactive",
        *,
        draft: DraftTokens = NO_DRAFT,
        within_ms: int | None = None,
        admitted: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Ticket:
        """Submits one utterance: `pcm` (samples,) float32, 16 kHz, not longer than the model's limit. `draft`: its
        probable tokens. `within_ms`: how soon it should be encoded, if its priority should not decide.

        Full: raises AtCapacity, or waits for room with `wait`; `check` is called each time the wait is notified,
        and may raise to end it. `admitted` requests skip the limit: they come from a session, which is limited
        itself. Raises AudioTooLong, UnsupportedAudio, WrongModel, EngineClosed.
        """
        card = self.card
        validate_samples(pcm)
        if len(pcm) > self.max_samples:
            raise AudioTooLong(
                f"an utterance of {units.samples_to_s(len(pcm)):.1f} s",
                f"{card.name} takes up to {card.max_segment_ms / 1_000:.0f} s at once",
                "cut it into segments",
            )
        samples = len(pcm)
        if samples < self.min_samples:
            pcm = np.pad(pcm, (0, self.min_samples - samples))
        future: Future[Recognition] = Future()
        utterance = RecognitionRequest(
            next(self._ids), pcm, samples, options or SearchOptions(), priority, future, draft, within_ms
        )
        submitted_s = self.clock()
        self._admit(samples, admitted, wait, check)
        utterance.submitted_ns = time.time_ns()
        self._send(samples, lambda: self.backend.submit(utterance))
        if priority == "live":
            self._measure(future, submitted_s)
        return Ticket(utterance.id, future)

    def synthesize(
        self,
        sentence: Sentence,
        on_sound: SoundCallback,
        *,
        priority: Priority = "interactive",
        slack_ms: int | None = None,
        admitted: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Ticket:
        """Submits one sentence for synthesis. `on_sound` receives its audio chunk by chunk, in order, on a thread of
        the engine, and must not block. The future holds the number of samples after the last chunk. `slack_ms`:
        how much later its first audio may come than its priority asks.

        Full: as in `submit`; `admitted` is a later sentence of a speech that was admitted. Errors that only the
        model can detect are raised by the future: OptionError for unknown phonemes, UnknownVoice. Raises
        OptionError, AtCapacity, WrongModel, EngineClosed.
        """
        validate_sentence(sentence, self.voice_card)
        delivery = SoundDelivery(on_sound, lambda: self.cancel(ticket))
        request = TtsRequest(next(self._ids), sentence, delivery, priority, Future(), slack_ms)
        ticket = Ticket(request.id, delivery.resolve(request.future))
        self._admit(request.samples, admitted, wait, check)
        request.submitted_ns = time.time_ns()
        self._send(request.samples, lambda: self.backend.synthesize(request))
        return ticket

    def _admit(self, samples: int, admitted: bool, wait: bool, check: Callable[[], None]) -> None:
        """Admits a request or raises AtCapacity, as described in `submit`."""
        with self._room:
            while not admitted and not self._closed and self._at_limit(samples):
                if not wait:
                    raise AtCapacity(
                        f"{self._requests} requests with {units.samples_to_s(self._samples):.0f} s of audio wait",
                        f"up to {self.config.max_requests} requests and {self.config.max_audio_s:.0f} s",
                        self.retry_after_ms(),
                    )
                check()  # under the lock, so that no notification is missed
                self._room.wait()
            if not self._requests:
                self._busy_since = self.clock()
            self._requests += 1
            self._samples += samples

    def _send(self, samples: int, send: Callable[[], None]) -> None:
        try:
            send()
        except EngineClosed:
            self._done(samples, counted=False)
            raise

    def cancel(self, ticket: Ticket) -> None:
        """Stops the request at its next step and frees its resources; its future raises Cancelled."""
        with contextlib.suppress(EngineClosed):
            self.backend.cancel(ticket.id)

    def expedite(self, ticket: Ticket, within_ms: int) -> None:
        """Sets the time since its arrival within which the request should be encoded: somebody waits for it now. It
        keeps what has been computed of it."""
        with contextlib.suppress(EngineClosed):
            self.backend.expedite(ticket.id, within_ms)

    def open_vad_session(
        self,
        *,
        live: bool = False,
        api_client: str | None = None,
        state: bytes | None = None,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> VadSession:
        """Opens a voice-activity session. Full: raises AtCapacity, or waits for a place with `wait`, as `submit`.
        `live` and overloaded, or one of more new callers than are known to fit (`LiveAdmission`): raises
        AtCapacity. `api_client`: whose live session it is, where that is known. `state`: the session's state in another
        engine. Raises WrongModel, EngineClosed."""
        _ = self.card  # raises WrongModel
        session_id = next(self._ids)
        with self._room:
            if live and self._live and not self._closed:  # without live callers no live request is waiting
                self.partial_rate.check_overload(1_000 * self.clock())
            while wait and not self._closed and self._sessions >= self.max_sessions:
                check()
                self._room.wait()
            if self._sessions >= self.max_sessions and not self._closed:
                raise AtCapacity(
                    f"{self._sessions} sessions are open", f"up to {self.max_sessions}", self.retry_after_ms()
                )
            if live and not self._closed:
                now_ms = 1_000 * self.clock()
                wait_ms = self.partial_rate.wait_ms(now_ms) if self._live else 0.0
                self._admission.admit(session_id, now_ms, api_client, wait_ms)
            self._sessions += 1
            self._live += live
        try:
            self.backend.open_vad_session(session_id, live, state)
        except EngineClosed:
            self._session_ended(session_id, live)
            raise
        return VadSession(self, session_id, live)

    def open_stream(
        self,
        *,
        live: bool,
        samples: int | None = None,
        words: bool = False,
        bias: str = "",
        language_model: LanguageModelChoice | None = None,
    ) -> RecognitionStream:
        """Opens a stream through a model that carries its state. There is no admission here: the session that
        opens it was admitted. `samples`: the most that will be submitted, if known; a hypothesis reads no more.
        `words`: chunks may be `timed`. `bias`: hotwords. `language_model`: that of the search, for streaming models.

        Raises WrongModel, EngineClosed.
        """
        assert self.card.streaming or self.card.incremental_encoder, f"{self.card.name} hears whole utterances"
        number = next(self._ids)
        self.backend.open_stream(number, live, samples, words, bias, language_model)
        return RecognitionStream(self, number, live)

    @property
    def turn_model(self) -> str | None:
        """Name of the turn model; None where there is none."""
        return self.backend.turn_card.name if self.backend.turn_card else None

    @property
    def has_diarization(self) -> bool:
        """Returns whether the models of `diarize_window` are on this machine."""
        return self.backend.speakers

    def predict_turn_end(self, pcm: np.ndarray) -> Future[float]:
        """Predicts the probability, 0..1, that the speaker has finished. `pcm` (samples,) float32, 16 kHz: the
        turn so far; of audio longer than the model's input, 8 s, the end is used.

        The future cannot be cancelled. It may raise EngineClosed, or StepFailed, also when the engine dies:
        continue without an answer, because another would come too late. Raises ModelNotLoaded, AtCapacity,
        EmptyAudio, UnsupportedAudio, EngineClosed.
        """
        card = self.backend.turn_card
        if card is None:
            raise ModelNotLoaded(
                "this engine has no turn model",
                todo="load it with turn_model='smart-turn': if it is not on this machine, that says how to get it",
            )
        validate_samples(pcm)
        if not len(pcm):
            raise EmptyAudio("no samples came", "one sample or more is needed")
        tail = pcm[-units.ms_to_samples(card.hears_ms) :]
        return self._turns.submit(lambda answer: self.backend.predict_turn_end(tail, answer))

    def diarize_window(
        self,
        pcm: np.ndarray,
        *,
        budget_samples: int = BUDGET_SAMPLES,
        live: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Future[LocalSpeakers]:
        """Finds which of a few local speakers speaks when, and their embeddings. `pcm` (samples,) float32, 16 kHz,
        up to 10 s. `budget_samples`: audio used for the embeddings of all speakers together; 0: no embeddings.
        `live`: before all windows that are not.

        Full: raises AtCapacity, or waits for room with `wait`, as in `submit`. The future cannot be cancelled. It
        may raise WeightsMissing and WeightsCorrupt, because the models are loaded with the first window;
        EngineClosed; and StepFailed, also when the engine dies. Raises AudioTooLong, UnsupportedAudio, WrongModel,
        EngineClosed.
        """
        _ = self.card  # raises WrongModel
        validate_samples(pcm)
        if len(pcm) > WINDOW_SAMPLES:
            raise AudioTooLong(
                f"{units.samples_to_s(len(pcm)):.1f} s of audio for diarization at once",
                f"up to {units.samples_to_s(WINDOW_SAMPLES):.0f} s",
                "cut it into windows",
            )
        return self._voices.submit(
            lambda answer: self.backend.diarize_window(pcm, budget_samples, live, answer),
            live=live,
            wait=wait,
            check=check,
            closed=lambda: self._closed,
        )

    def separate_speakers(
        self,
        pcm: np.ndarray,
        speaker_ranges: SpeakerRanges,
        *,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Future[np.ndarray]:
        """Separates two speakers: the future holds what each says, (2, samples) float32. `pcm` (samples,) float32,
        16 kHz, up to 30 s; `speaker_ranges`: the turns of each, in samples.

        Full, and errors: as in `diarize_window`, whose queue this shares; and Cancelled after `cancel_separation`.
        """
        _ = self.card  # raises WrongModel
        validate_samples(pcm)
        if len(pcm) > MAX_MIXTURE_SAMPLES:
            raise AudioTooLong(
                f"{units.samples_to_s(len(pcm)):.1f} s of audio for separation at once",
                f"up to {units.samples_to_s(MAX_MIXTURE_SAMPLES):.0f} s",
                "cut it into parts",
            )
        return self._voices.submit(
            lambda answer: self.backend.separate_speakers(pcm, speaker_ranges, answer),
            wait=wait,
            check=check,
            closed=lambda: self._closed,
        )

    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        """Withdraws a separation whose answer nobody waits for any more, unless it has begun."""
        with contextlib.suppress(EngineClosed):
            self.backend.cancel_separation(answer)

    def set_room(self, sessions: int, new_live_callers: float) -> None:
        """Sets how many voice-activity sessions may be open, and how many live callers may be new: several engines have
        room for more than one, and one that other servers use too for less."""
        with self._room:
            more, self.max_sessions = sessions > self.max_sessions, sessions
            self._admission.min_reservations = _whole_callers(new_live_callers)
            if more:
                self._room.notify_all()

    def wake_waiters(self) -> None:
        """Notifies all threads that wait for room, so that they call their `check`."""
        with self._room:
            self._room.notify_all()

    def retry_after_ms(self) -> int:
        """Estimated time until a tenth of the waiting audio is done, at least 100 ms."""
        speed = INITIAL_SPEED
        with self._room:
            waiting_s = units.samples_to_s(self._samples)
            busy_s = self._busy_s + (self.clock() - self._busy_since if self._requests else 0.0)
            if busy_s > 1 and self._done_samples:
                speed = units.samples_to_s(self._done_samples) / busy_s
        return max(100, int(100 * waiting_s / speed))

    def describe(self) -> dict[str, Any]:
        """Counters of the engine and of this client."""
        counts = {"requests": self._requests, "sessions": self._sessions}
        return {**counts, "new_live_callers": self._admission.min_reservations, **self.backend.describe()}

    def close(self) -> None:
        """Stops the loop; requests still in it raise EngineClosed."""
        self.backend.close()

    def _close_session(self, session_id: int, live: bool) -> None:
        # The backend keeps the order of calls: a session admitted after this opens when this one is closed.
        with contextlib.suppress(EngineClosed):
            self.backend.close_session(session_id)
        self._session_ended(session_id, live)

    def _session_ended(self, session_id: int, live: bool) -> None:
        with self._room:
            self._admission.release(session_id)
            self._sessions -= 1
            self._live -= live
            self._room.notify_all()

    def partial_interval_ms(self, partial_ms: float) -> float:
        """Minimum time between two partials of a caller who requests one every `partial_ms`."""
        return self.partial_rate.interval_ms(partial_ms, 1_000 * self.clock())

    def _measure(self, future: Future[Any], submitted_s: float) -> None:
        """Measures the turnaround of a live request that was submitted; its future is always resolved."""
        request = next(self._ids)
        with self._room:
            self.partial_rate.record_request(request, 1_000 * submitted_s)
        future.add_done_callback(partial(self._record_turnaround, request, submitted_s))

    def _record_turnaround(self, request: int, submitted_s: float, future: Future[Any]) -> None:
        with self._room:
            self.partial_rate.record_end(request)
            if not future.cancelled() and future.exception() is None:
                now_s = self.clock()
                self.partial_rate.record_turnaround(1_000 * (now_s - submitted_s), 1_000 * now_s)

    def _measure_vad(self, future: Future[np.ndarray], session_id: int, submitted_s: float) -> None:
        """Measures how long live voice activity is unanswered. Its turnaround is none of words, and not part of
        their mean."""
        request = next(self._ids)
        with self._room:
            self.partial_rate.record_request(request, 1_000 * submitted_s)
        future.add_done_callback(partial(self._record_vad, request, session_id, submitted_s))

    def _record_vad(self, request: int, session_id: int, submitted_s: float, future: Future[np.ndarray]) -> None:
        answered = not future.cancelled() and future.exception() is None
        windows = int(np.count_nonzero(future.result() >= SPEECH_PROBABILITY)) if answered else 0
        speech_samples, now_s = VAD_WINDOW_SAMPLES * windows, self.clock()
        with self._room:
            self.partial_rate.record_end(request)
            if not answered:
                return
            wait_ms = max(1_000 * (now_s - submitted_s), self.partial_rate.wait_ms(1_000 * now_s))
            self._admission.record_answer(session_id, units.samples_to_ms(speech_samples), wait_ms, 1_000 * now_s)

    def _at_limit(self, samples: int) -> bool:
        too_long = self._samples + samples > units.s_to_samples(self.config.max_audio_s)
        # An empty engine accepts any single utterance, whatever the limit.
        return self._requests >= self.config.max_requests or (too_long and self._requests > 0)

    def _done(self, samples: int, counted: bool = True) -> None:
        with self._room:
            self._requests -= 1
            self._samples -= samples
            if counted:
                self._done_samples += samples
                now = self.clock()
                self._busy_s += now - self._busy_since
                self._busy_since = now
                if self._busy_s > SPEED_OVER_S:
                    self._busy_s /= 2
                    self._done_samples //= 2
            self._room.notify_all()

    def _stopped(self) -> None:
        with self._room:
            self._closed = True
            self._room.notify_all()
