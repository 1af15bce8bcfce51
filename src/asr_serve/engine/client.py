"""The only door to the engine, the same whether its loop is a thread or a process."""

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
from asr_serve.decoding.seq2seq import NO_DRAFT, DraftTokens, Recognition, SearchOptions
from asr_serve.diarization.local_speakers import BUDGET_SAMPLES, WINDOW_SAMPLES, LocalSpeakers
from asr_serve.engine.partial_rate import PartialRateController
from asr_serve.engine.request import HypothesisRequest, RecognitionRequest, StreamChunk, VadChunk
from asr_serve.engine.tts.request import SoundCallback, SoundDelivery, TtsRequest, validate_sentence
from asr_serve.errors import (
    AtCapacity,
    AudioTooLong,
    EmptyAudio,
    EngineClosed,
    ModelNotLoaded,
    OptionError,
    UnsupportedAudio,
    WrongModel,
)
from asr_serve.models.registry import AnyCard, AsrCard, TtsCard, TurnCard
from asr_serve.types import Priority, SearchResult, Sentence


class Ticket(NamedTuple):
    """A request that was let in: its answer to come, and the name to cancel it by."""

    id: int
    future: Future[Any]


class AuxiliaryQueue:
    """What is asked beside the requests: so much of a kind may wait."""

    def __init__(self, room: threading.Condition, most: int, what: str, retry_ms: int, kept: int = 0) -> None:
        """`room`: where whoever waits for it is told that there is some. `what` waits, as an error says it.
        `kept`: so many of them can be live callers' only."""
        self._room, self._max_waiting, self._what, self._retry_ms, self._live_reserved = (
            room,
            most,
            what,
            retry_ms,
            kept,
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
        """Its answer, which cannot be cancelled: what is counted is what waits. `send` gives it to the engine.
        Full: raises AtCapacity; or waits when `wait`, until it is `closed` or `check` raises."""
        with self._room:
            most = self._max_waiting - (0 if live else self._live_reserved)
            while wait and not closed() and self.waiting >= most:
                check()  # here, where no nudge can come between it and the wait
                self._room.wait()
            if self.waiting >= most:
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
    """One caller's voice activity: pieces go in, speech probabilities come out, in order."""

    def __init__(self, client: EngineClient, session_id: int, live: bool) -> None:
        self._client, self._id, self._live, self._open = client, session_id, live, True

    def submit_windows(self, pcm: np.ndarray) -> Future[np.ndarray]:
        """`pcm` float32 at 16 kHz, whole windows of 512 samples, at most EngineConfig.vad_windows of them.

        The future holds one probability per window. Keep few in flight: what is put is held until computed.
        """
        windows, odd = divmod(len(pcm), VAD_WINDOW_SAMPLES)
        if odd or not 1 <= windows <= self._client.config.vad_windows:
            raise OptionError(
                f"{len(pcm)} samples",
                f"a multiple of {VAD_WINDOW_SAMPLES}, up to "
                f"{self._client.config.vad_windows * VAD_WINDOW_SAMPLES}",
            )
        piece = VadChunk(self._id, pcm, Future())
        self._client.backend.submit_vad_chunk(piece)
        return piece.future

    def close(self) -> None:
        if self._open:
            self._open = False
            self._client._close_session(self._id, self._live)


class RecognitionStream:
    """Audio that a model hears as it comes, what it remembers carried from piece to piece."""

    def __init__(self, client: EngineClient, number: int, live: bool) -> None:
        self._client, self._number, self._live, self._open = client, number, live, True

    def submit_audio(self, pcm: np.ndarray, *, last: bool = False, timed: bool = False) -> Future[SearchResult]:
        """`pcm` (n,) float32 at 16 kHz, any n. `last`: nothing follows, and the stream is closed. `timed`: the
        answer tells when its tokens were said, and those of the answers since the last one that did.

        The future holds what can be said of the audio so far that was not said before: some words, or none yet.
        Frames are the model's, from the stream's start. It may raise StepFailed: then the stream is lost, begin it
        again. Keep few in flight: what is put is held until it is heard. Raises EngineClosed.
        """
        return self._submit(pcm, last, None, timed)

    def submit_hypothesis(
        self, pcm: np.ndarray, wanted: HypothesisRequest, *, last: bool = False
    ) -> Future[Recognition]:
        """The same of a model whose decoder hears all of it each time: a hypothesis of what was put so far, this
        included."""
        return self._submit(pcm, last, wanted)

    def _submit(
        self, pcm: np.ndarray, last: bool, wanted: HypothesisRequest | None, timed: bool = False
    ) -> Future[Any]:
        validate_samples(pcm)
        assert self._open, "put after the last piece"
        self._open = not last
        piece = StreamChunk(self._number, pcm, last, Future(), wanted, timed)
        if self._live:
            piece.future.add_done_callback(partial(self._client._record_turnaround, time.monotonic()))
        self._client.backend.submit_stream_chunk(piece)
        return piece.future

    def close(self) -> None:
        """What is under way is dropped. Idempotent."""
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


INITIAL_SPEED = 50.0
"""Seconds of audio a second, until the engine has shown its own speed."""
SPEED_OVER_S = 10.0
"""Busy time over which that is measured; what lies further back counts half, then a quarter."""
MAX_TURN_REQUESTS = 24
"""Questions to a turn model that may wait: one core answers as many in a second, and later than that nobody wants
to know."""
TURN_RETRY_MS = 500
MAX_DIARIZATION_WINDOWS, LIVE_DIARIZATION_WINDOWS = 48, 16
"""Windows that may wait to be heard for speakers, a second or two of work, 30 MB; and how many of them can be live
callers' only, so that recordings, which fill whatever there is, never keep them out."""
DIARIZATION_RETRY_MS = 1_000


class EngineBackend(Protocol):
    """The road to one loop. Every method may be called from any thread; all but `close` raise EngineClosed."""

    card: AnyCard
    turn_card: TurnCard | None
    """Of the turn model, if there is one. `turn` is called only then."""
    speakers: bool
    """The models that hear who speaks are on this machine."""

    @property
    def state(self) -> str: ...
    def submit(self, utterance: RecognitionRequest) -> None: ...
    def synthesize(self, saying: TtsRequest) -> None:
        """Of a model that speaks only, and that one hears nothing."""

    def cancel(self, request_id: int) -> None: ...
    def open_vad_session(self, session: int, live: bool) -> None: ...
    def submit_vad_chunk(self, windows: VadChunk) -> None: ...
    def close_session(self, session: int) -> None: ...
    def open_stream(self, stream: int, live: bool, samples: int | None, words: bool, bias: str) -> None:
        """This and the next two: of a model that carries its state only."""

    def submit_stream_chunk(self, piece: StreamChunk) -> None: ...
    def close_stream(self, stream: int) -> None: ...
    def predict_turn_end(self, pcm: np.ndarray, answer: Future[float]) -> None: ...
    def diarize_window(
        self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]
    ) -> None: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


Connect = Callable[[EngineConfig, Callable[[int], None], Callable[[], None]], EngineBackend]
"""Opens a link. It calls the second argument with the samples of each utterance or sentence that has ended, and
the third when it will take no more."""


class EngineClient:
    """Lets work in, up to the bounds of its configuration. Every method may be called from any thread."""

    def __init__(self, config: EngineConfig, connect: Connect) -> None:
        """`connect`: `thread_backend(...)` or `process_backend(...)`. What it raises is raised here."""
        self.config = config
        self._ids = itertools.count()
        self._room = threading.Condition()
        self._turns = AuxiliaryQueue(self._room, MAX_TURN_REQUESTS, "questions to the turn model", TURN_RETRY_MS)
        what = "windows to be heard for speakers"
        self._voices = AuxiliaryQueue(
            self._room, MAX_DIARIZATION_WINDOWS, what, DIARIZATION_RETRY_MS, LIVE_DIARIZATION_WINDOWS
        )
        self._requests = self._samples = self._sessions = self._live = 0
        self._done_samples, self._busy_s, self._busy_since = 0, 0.0, 0.0
        self._closed = False
        self.partial_rate = PartialRateController()
        self.backend = connect(config, self._done, self._stopped)
        hears = self.backend.card if isinstance(self.backend.card, AsrCard) else None
        self.max_samples = units.ms_to_samples(hears.max_segment_ms) if hears else 0
        self.min_samples = units.ms_to_samples(hears.min_segment_ms) if hears else 0

    @property
    def name(self) -> str:
        """Of the model."""
        return self.backend.card.name

    @property
    def card(self) -> AsrCard:
        """Raises WrongModel where the model speaks."""
        if isinstance(found := self.backend.card, AsrCard):
            return found
        raise WrongModel(f"the model {found.name} speaks, and hears nothing", "a model that hears")

    @property
    def voice_card(self) -> TtsCard:
        """Raises WrongModel where the model hears."""
        if isinstance(found := self.backend.card, TtsCard):
            return found
        raise WrongModel(f"the model {found.name} hears, and has no voice", "a model that speaks")

    @property
    def state(self) -> str:
        """ready, restarting, failed (it will be tried again) or closed."""
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
        """Recognise one utterance: `pcm` (samples,) float32, 16 kHz, not longer than the model's limit. `draft`:
        what it probably says. `within_ms`: how soon it should be encoded, if not as its priority asks.

        Full: raises AtCapacity, or waits for room when `wait`; `check` is called whenever somebody nudges, and may
        raise to wait no longer. Not what is `admitted`: it comes from a session, which bounds it.
        Raises AudioTooLong, UnsupportedAudio, WrongModel, EngineClosed.
        """
        card = self.card
        validate_samples(pcm)
        if len(pcm) > self.max_samples:
            raise AudioTooLong(
                f"an utterance of {units.samples_to_s(len(pcm)):.1f} s",
                f"{card.name} hears up to {card.max_segment_ms / 1_000:.0f} s at once",
                "cut it into segments",
            )
        samples = len(pcm)
        if samples < self.min_samples:
            pcm = np.pad(pcm, (0, self.min_samples - samples))
        future: Future[Recognition] = Future()
        utterance = RecognitionRequest(
            next(self._ids), pcm, samples, options or SearchOptions(), priority, future, draft, within_ms
        )
        if priority == "live":
            future.add_done_callback(partial(self._record_turnaround, time.monotonic()))
        self._admit(samples, admitted, wait, check)
        utterance.submitted_ns = time.time_ns()
        self._send(samples, lambda: self.backend.submit(utterance))
        return Ticket(utterance.id, future)

    def synthesize(
        self,
        sentence: Sentence,
        hear: SoundCallback,
        *,
        priority: Priority = "interactive",
        within_ms: int | None = None,
        admitted: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Ticket:
        """Say one sentence. `hear` gets its sound piece by piece, in order, on a thread of the engine's: it must
        not wait. The future has the number of samples once the last piece was told. `within_ms`: how soon its
        first sound is wanted, where others are to be heard before it.

        Full: as in `submit`; `admitted` is a later sentence of a speech that was let in. What only the model can
        tell is the future's: OptionError for phonemes that it does not know, UnknownVoice. Raises OptionError,
        AtCapacity, WrongModel, EngineClosed.
        """
        validate_sentence(sentence, self.voice_card)
        ear = SoundDelivery(hear, lambda: self.cancel(ticket))
        saying = TtsRequest(next(self._ids), sentence, ear, priority, Future(), within_ms)
        ticket = Ticket(saying.id, ear.resolve(saying.future))
        self._admit(saying.samples, admitted, wait, check)
        saying.submitted_ns = time.time_ns()
        self._send(saying.samples, lambda: self.backend.synthesize(saying))
        return ticket

    def _admit(self, samples: int, admitted: bool, wait: bool, check: Callable[[], None]) -> None:
        """See `submit`."""
        with self._room:
            while not admitted and not self._closed and self._at_limit(samples):
                if not wait:
                    raise AtCapacity(
                        f"{self._requests} requests with {units.samples_to_s(self._samples):.0f} s of audio wait",
                        f"up to {self.config.max_requests} requests and {self.config.max_audio_s:.0f} s",
                        self.retry_after_ms(),
                    )
                check()  # here, where no nudge can come between it and the wait
                self._room.wait()
            if not self._requests:
                self._busy_since = time.monotonic()
            self._requests += 1
            self._samples += samples

    def _send(self, samples: int, send: Callable[[], None]) -> None:
        try:
            send()
        except EngineClosed:
            self._done(samples, counted=False)
            raise

    def cancel(self, ticket: Ticket) -> None:
        """Stop the work at its next step and free what it holds; its future raises Cancelled."""
        with contextlib.suppress(EngineClosed):
            self.backend.cancel(ticket.id)

    def open_vad_session(
        self, *, live: bool = False, wait: bool = False, check: Callable[[], None] = lambda: None
    ) -> VadSession:
        """A caller's voice-activity state. Full, or `live` and overloaded: raises AtCapacity; or waits for one
        when `wait`, as in `submit`. Raises WrongModel, EngineClosed."""
        _ = self.card  # of a model that hears
        if live and self._live:  # where nobody is on line, nobody waits any more
            self.partial_rate.check_overload(1_000 * time.monotonic())
        session_id = next(self._ids)
        with self._room:
            while wait and not self._closed and self._sessions >= self.config.max_sessions:
                check()
                self._room.wait()
            if self._sessions >= self.config.max_sessions:
                raise AtCapacity(
                    f"{self._sessions} sessions are open",
                    f"up to {self.config.max_sessions}",
                    self.retry_after_ms(),
                )
            self._sessions += 1
            self._live += live
        try:
            self.backend.open_vad_session(session_id, live)
        except EngineClosed:
            self._session_ended(live)
            raise
        return VadSession(self, session_id, live)

    def open_stream(
        self, *, live: bool, samples: int | None = None, words: bool = False, bias: str = ""
    ) -> RecognitionStream:
        """Of a model that carries its state: audio in, words out. It is let in as it is; whoever opens it has
        been. `samples`: the most that will be put, if that is known: a hypothesis hears no more. `words`: pieces
        may be `timed`.

        Raises EngineClosed.
        """
        assert self.card.streaming or self.card.incremental_encoder, f"{self.card.name} hears whole utterances"
        number = next(self._ids)
        self.backend.open_stream(number, live, samples, words, bias)
        return RecognitionStream(self, number, live)

    @property
    def turn_model(self) -> str | None:
        """Name of the model that `turn` asks; None where there is none."""
        return self.backend.turn_card.name if self.backend.turn_card else None

    @property
    def has_diarization(self) -> bool:
        """Whether `voices` has its models on this machine."""
        return self.backend.speakers

    def predict_turn_end(self, pcm: np.ndarray) -> Future[float]:
        """How likely it is that whoever speaks has finished, 0..1. `pcm` (samples,) float32, 16 kHz: what they
        have said in this turn, up to now. Of more than the model hears, 8 s, the end is used.

        The future cannot be cancelled. It may raise EngineClosed, or StepFailed, also when the engine dies: then
        do without, for the answer would come too late.
        Raises ModelNotLoaded, AtCapacity, EmptyAudio, UnsupportedAudio, EngineClosed.
        """
        card = self.backend.turn_card
        if card is None:
            raise ModelNotLoaded(
                "this engine has no turn model",
                todo="load it with turn_model='smart-turn': if it is not on this machine, that says how to get it",
            )
        validate_samples(pcm)
        if not len(pcm):
            raise EmptyAudio("no samples", "what somebody has said, one sample at least")
        heard = pcm[-units.ms_to_samples(card.hears_ms) :]
        return self._turns.submit(lambda answer: self.backend.predict_turn_end(heard, answer))

    def diarize_window(
        self,
        pcm: np.ndarray,
        *,
        budget_samples: int = BUDGET_SAMPLES,
        live: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Future[LocalSpeakers]:
        """Who of a few speaks when, and what each sounds like. `pcm` (samples,) float32, 16 kHz, up to 10 s. Of
        that `budget_samples` are listened to for what they sound like, all together; 0: who speaks when is enough.
        `live`: before all that is not.

        Full: raises AtCapacity, or waits for room when `wait`, as in `submit`. The future cannot be cancelled. It
        may raise WeightsMissing and WeightsCorrupt, for the models are loaded when they are first asked;
        EngineClosed; and StepFailed, also when the engine dies.
        Raises AudioTooLong, UnsupportedAudio, WrongModel, EngineClosed.
        """
        _ = self.card  # of a model that hears
        validate_samples(pcm)
        if len(pcm) > WINDOW_SAMPLES:
            raise AudioTooLong(
                f"{units.samples_to_s(len(pcm)):.1f} s to be heard for speakers at once",
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

    def wake_waiters(self) -> None:
        """Have whoever waits for room look again whether to wait."""
        with self._room:
            self._room.notify_all()

    def retry_after_ms(self) -> int:
        """When about a tenth of what is waiting will be done."""
        speed = INITIAL_SPEED
        with self._room:
            waiting_s = units.samples_to_s(self._samples)
            busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._requests else 0.0)
            if busy_s > 1 and self._done_samples:
                speed = units.samples_to_s(self._done_samples) / busy_s
        return max(100, int(100 * waiting_s / speed))

    def describe(self) -> dict[str, Any]:
        """What the engine has done so far."""
        return {"requests": self._requests, "sessions": self._sessions, **self.backend.describe()}

    def close(self) -> None:
        """Stop the loop; requests still in it raise EngineClosed."""
        self.backend.close()

    def _close_session(self, session_id: int, live: bool) -> None:
        # The link keeps its order: whoever is let in from here on opens after this one is gone.
        with contextlib.suppress(EngineClosed):
            self.backend.close_session(session_id)
        self._session_ended(live)

    def _session_ended(self, live: bool) -> None:
        with self._room:
            self._sessions -= 1
            self._live -= live
            self._room.notify_all()

    def partial_interval_ms(self, partial_ms: float) -> float:
        """The least time between two partials of a caller who would like one every `partial_ms`."""
        return self.partial_rate.interval_ms(partial_ms, 1_000 * time.monotonic())

    def _record_turnaround(self, asked_s: float, future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            now_s = time.monotonic()
            self.partial_rate.record_turnaround(1_000 * (now_s - asked_s), 1_000 * now_s)

    def _at_limit(self, samples: int) -> bool:
        over = self._samples + samples > units.s_to_samples(self.config.max_audio_s)
        # One utterance always fits an empty engine, whatever the bound says.
        return self._requests >= self.config.max_requests or (over and self._requests > 0)

    def _done(self, samples: int, counted: bool = True) -> None:
        with self._room:
            self._requests -= 1
            self._samples -= samples
            if counted:
                self._done_samples += samples
                now = time.monotonic()
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
