"""Backend with the loop in a supervised process of its own, as the server uses it.

Requests and audio are retained here until they are answered. If the process dies, they go to the next one:
utterances from their start, sessions from the state that came with their last probabilities, sentences from the
audio that was delivered last. Callers notice only a pause. Work during which three processes died is given up,
because it may be the cause. Queries are not retained: an answer a second later would be useless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine.client import Connect
from asr_serve.engine.process import messages
from asr_serve.engine.process.engine_process import EngineProcess, RingSize
from asr_serve.engine.process.handover import HandoverResult
from asr_serve.engine.process.in_flight import (
    InFlight,
    InFlightSession,
    InFlightSpeech,
    InFlightStream,
    InFlightUtterance,
    PendingAnswer,
    QueueState,
    SoundAnswer,
    queue_state,
    unanswered_query,
)
from asr_serve.engine.process.supervisor import Supervisor
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadChunk, reject
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.errors import AsrServeError, Cancelled
from asr_serve.transfer.ring import PcmWriter
from asr_serve.types import LanguageModelChoice

REPORT_TIMEOUT_S = 5.0
RENEW_S = 30.0
"""Time for a replaced process to finish its requests."""


class ProcessBackend:
    """Connection to the current engine process. Raises the errors of loading."""

    def __init__(
        self, spec: messages.EngineSpec, ring: RingSize, on_done: Callable[[int], None], on_stop: Callable[[], None]
    ) -> None:
        self.ring = ring
        self._on_done = on_done
        self._supervisor = Supervisor(spec, ring, self._deliver, on_stop)
        self._lock = self._supervisor.lock
        self.ready = self._supervisor.ready
        self.card, self.turn_card = self.ready.card, self.ready.turn_card
        self.speakers = self.ready.speakers
        self.new_live_callers: float = self.ready.new_live_callers

    @property
    def state(self) -> str:
        return self._supervisor.state

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def address(self) -> messages.EngineAddress | messages.EncoderAddress | None:
        """Address at which the current process listens for others."""
        return self._supervisor.address

    def wait_address(
        self, known: messages.EngineAddress | messages.EncoderAddress | None, timeout_s: float
    ) -> messages.EngineAddress | messages.EncoderAddress | None:
        """Address where the current process listens for others, once it is another than `known`, or after
        `timeout_s`."""
        supervisor = self._supervisor
        with supervisor.changed:
            supervisor.changed.wait_for(lambda: supervisor.state == "ready" and supervisor.address != known, timeout_s)
            return supervisor.address

    def set_peers(self, addresses: Sequence[str]) -> Future[messages.PeersSet]:
        """Sets the engines that encode for this one, also for processes that are started later. The future is done once
        those that are no longer peers have nothing in flight; it fails where the process ends before. For an engine
        with the role decode."""
        done: Future[messages.PeersSet] = Future()
        with self._lock:
            self._supervisor.peers = tuple(addresses)
            if running := self._current.process_ready:
                self._current.set_peers(addresses, done)
        if not running:
            done.set_exception(unanswered_query("is being started again"))
        return done

    @property
    def pid(self) -> int | None:
        """Number of the current process."""
        process = self._current.process
        return process.pid if isinstance(process, EngineProcess) else None

    @property
    def moved(self) -> Counter[tuple[str, str]]:
        """Number of sessions and streams that moved between processes, by kind and mode."""
        return self._supervisor.moved

    @property
    def moved_s(self) -> float:
        """Total time that audio of moving streams waited."""
        return self._supervisor.moved_s

    @property
    def ring_depth(self) -> int:
        return writer.depth if (writer := self._ring_writer) else 0

    @property
    def ring_full_waits(self) -> int:
        return writer.full_waits if (writer := self._ring_writer) else 0

    @property
    def queue_state(self) -> QueueState:
        """Work that is not answered."""
        with self._lock:
            return queue_state(self._supervisor.in_flights)

    @property
    def _current(self) -> InFlight:
        return self._supervisor.current

    @property
    def _ring_writer(self) -> PcmWriter | None:
        current = self._current
        return current.process.ring_writer if current.process_ready and current.process is not None else None

    # --- requests -------------------------------------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        with self._lock:
            self._supervisor.expect_open()
            self._current.submit(InFlightUtterance(utterance))

    def synthesize(self, saying: TtsRequest) -> None:
        with self._lock:
            self._supervisor.expect_open()
            self._current.submit(InFlightSpeech(saying))

    def cancel(self, request_id: int) -> None:
        with self._lock:
            work = next(
                (work for in_flight in self._supervisor.in_flights if (work := in_flight.cancel(request_id))), None
            )
            self._supervisor.changed.notify_all()
        if work is not None:
            self._deliver([work.answer(Cancelled("the request was cancelled"))])

    def expedite(self, request_id: int, within_ms: int) -> None:
        with self._lock:
            for in_flight in self._supervisor.in_flights:
                in_flight.expedite(request_id, within_ms)

    def open_vad_session(self, session: int, live: bool, state: bytes | None = None) -> None:
        self._open(session, InFlightSession(live, state))

    def open_stream(
        self,
        stream: int,
        live: bool,
        samples: int | None,
        words: bool,
        bias: str,
        language_model: LanguageModelChoice | None,
    ) -> None:
        self._open(stream, InFlightStream(live, samples, words, bias, language_model))

    def _open(self, number: int, session: InFlightSession) -> None:
        with self._lock:
            self._supervisor.expect_open()
            self._current.open(number, session)

    def submit_vad_chunk(self, chunk: VadChunk | StreamChunk) -> None:
        with self._lock:
            self._supervisor.expect_open()
            owner = next(
                (in_flight for in_flight in self._supervisor.in_flights if chunk.session in in_flight.sessions), None
            )
            if owner is not None:
                owner.append_audio(chunk)
        if owner is None:
            reject(chunk.future, Cancelled("the session was closed"))

    submit_stream_chunk = submit_vad_chunk

    def close_session(self, session: int) -> None:
        with self._lock:
            closed = next(
                (closed for in_flight in self._supervisor.in_flights if (closed := in_flight.close(session))), None
            )
            if self._supervisor.handover is not None:
                self._supervisor.handover.on_closed(session)
            self._supervisor.changed.notify_all()
        for chunk in closed.fail_pending() if closed else ():
            reject(chunk.future, Cancelled("the session was closed"))

    close_stream = close_session

    def predict_turn_end(self, pcm: np.ndarray, answer: Future[float]) -> None:
        with self._lock:
            self._supervisor.expect_open()
            if ready := self._current.process_ready:
                self._current.request_turn(pcm, answer)
        if not ready:
            answer.set_exception(unanswered_query("is being started again"))

    def diarize_window(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]) -> None:
        with self._lock:
            self._supervisor.expect_open()
            if ready := self._current.process_ready:
                self._current.request_speakers(pcm, budget_samples, live, answer)
        if not ready:
            answer.set_exception(unanswered_query("is being started again"))

    def separate_speakers(self, pcm: np.ndarray, speaker_ranges: SpeakerRanges, answer: Future[np.ndarray]) -> None:
        with self._lock:
            self._supervisor.expect_open()
            if ready := self._current.process_ready:
                self._current.request_separation(pcm, speaker_ranges, answer)
        if not ready:
            answer.set_exception(unanswered_query("is being started again"))

    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        with self._lock:
            self._supervisor.expect_open()
            for in_flight in self._supervisor.in_flights:
                in_flight.cancel_separation(answer)

    def report(self, timeout_s: float = REPORT_TIMEOUT_S) -> messages.EngineReport | None:
        """Report of the engine; None while there is no process, or when it does not answer in time."""
        answer: Future[messages.EngineReport] = Future()
        with self._lock:
            if not self._current.process_ready:
                return None
            self._current.request_report(answer)
        try:
            return answer.result(timeout_s)
        except (TimeoutError, AsrServeError):
            return None

    def describe(self) -> dict[str, Any]:
        report = self.report()
        return {"state": self.state, "restarts": self.restarts, **(report.describe if report else {})}

    def renew(self, timeout_s: float = RENEW_S) -> HandoverResult:
        """Replaces the process by a new one without ending sessions. See Supervisor.renew."""
        return self._supervisor.renew(timeout_s)

    def close(self) -> None:
        self._supervisor.close()

    def _deliver(self, answers: Iterable[PendingAnswer | SoundAnswer]) -> None:
        for answer in answers:
            if answer.samples is not None:
                self._on_done(answer.samples)
            answer.deliver()


def process_backend(spec: messages.EngineSpec, ring: RingSize) -> Connect:
    """`Connect` of EngineClient: an engine in a process of its own."""
    return lambda config, on_done, on_stop: ProcessBackend(
        msgspec.structs.replace(spec, config=config), ring, on_done, on_stop
    )
