"""Requests in flight in an engine process, retained with their audio until they are answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import EngineConnection, ExportedStream
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadChunk
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.errors import AsrServeError, EngineCrashed, StepFailed
from asr_serve.transfer.sealed_buffer import SealedBuffer
from asr_serve.types import LanguageModelChoice, SentenceAudio


class PendingAnswer(NamedTuple):
    """Result for a caller, delivered without the lock: its callbacks may call the engine again at once."""

    future: Future[Any]
    value: Any
    """Result or error."""
    samples: int | None = None
    """Samples of an utterance or a sentence, for admission."""

    def deliver(self) -> None:
        """Sets the result or the error, unless the future was cancelled."""
        if self.future.running() or self.future.set_running_or_notify_cancel():
            if isinstance(self.value, AsrServeError):
                self.future.set_exception(self.value)
            else:
                self.future.set_result(self.value)


class SoundAnswer(NamedTuple):
    """Audio of a sentence for its caller, in order with other results."""

    request: TtsRequest
    sound: SentenceAudio
    samples: None = None

    def deliver(self) -> None:
        self.request.on_sound(self.sound)


class PendingQueries:
    """Queries to one process. They are not resubmitted to the next."""

    def __init__(self) -> None:
        self._last_number = 0
        self._pending: dict[int, Future[Any]] = {}

    def add(self, answer: Future[Any]) -> int:
        self._last_number += 1
        self._pending[self._last_number] = answer
        return self._last_number

    def number_of(self, answer: Future[Any]) -> int | None:
        """Returns the number of a query; None where it is not pending here."""
        return next((number for number, pending in self._pending.items() if pending is answer), None)

    def pop_answered(self, number: int) -> Future[Any]:
        return self._pending.pop(number)

    def fail_all(self, error: AsrServeError) -> list[PendingAnswer]:
        dropped, self._pending = list(self._pending.values()), {}
        return [PendingAnswer(answer, error) for answer in dropped]

    def __len__(self) -> int:
        return len(self._pending)


def unanswered_query(how: str) -> StepFailed:
    """Error of a query that its process did not answer."""
    return StepFailed(f"the engine process {how}", todo="go on without this answer")


class InFlightUtterance(msgspec.Struct):
    """Utterance that is not answered yet."""

    utterance: RecognitionRequest
    started: bool = False
    """Whether the process has begun its work."""
    deaths: int = 0
    """Processes that died while they worked on it."""

    @property
    def id(self) -> int:
        return self.utterance.id

    @property
    def pcm(self) -> np.ndarray | None:
        return self.utterance.pcm

    @property
    def samples(self) -> int:
        return self.utterance.samples

    def message(self) -> messages.SubmitUtterance:
        utterance = self.utterance
        assert utterance.pcm is not None
        return messages.SubmitUtterance(
            utterance.id,
            len(utterance.pcm),
            utterance.samples,
            utterance.options,
            utterance.priority,
            utterance.draft,
            utterance.within_ms,
            utterance.submitted_ns,
        )

    def answer(self, value: Any) -> PendingAnswer:
        return PendingAnswer(self.utterance.future, value, self.utterance.samples)


class InFlightSpeech(msgspec.Struct):
    """Sentence whose audio is not complete. If its process dies, the next one synthesizes all of it again, and
    delivered samples are skipped."""

    request: TtsRequest
    started: bool = False
    deaths: int = 0
    """Processes that died while they worked on it."""
    delivered_samples: int = 0
    """Samples that were delivered."""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def pcm(self) -> None:
        return None

    @property
    def samples(self) -> int:
        return self.request.samples

    def message(self) -> messages.SubmitSentence:
        request = self.request
        return messages.SubmitSentence(
            request.id,
            request.sentence,
            request.priority,
            request.slack_ms,
            self.delivered_samples,
            request.submitted_ns,
        )

    def add_sound(self, sound: SentenceAudio) -> list[PendingAnswer | SoundAnswer]:
        self.delivered_samples += len(sound.pcm) // 2
        answers: list[PendingAnswer | SoundAnswer] = [SoundAnswer(self.request, sound)]
        return [*answers, self.answer(self.delivered_samples)] if sound.is_last else answers

    def answer(self, value: Any) -> PendingAnswer:
        return PendingAnswer(self.request.future, value, self.request.samples)


class InFlightRequests(dict[int, InFlightUtterance | InFlightSpeech]):
    """Requests by number, and the samples of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0
        """Samples of all requests."""

    def __setitem__(self, number: int, work: InFlightUtterance | InFlightSpeech) -> None:
        self.samples += work.samples
        super().__setitem__(number, work)

    def __delitem__(self, number: int) -> None:
        self.samples -= self[number].samples
        super().__delitem__(number)

    def remove(self, number: int) -> InFlightUtterance | InFlightSpeech | None:
        """Removes and returns a request; None if it is not here."""
        if (work := self.get(number)) is not None:
            del self[number]
        return work


class InFlightSession:
    """Voice-activity session: the state after the last answered chunk, and the chunks in flight."""

    def __init__(self, live: bool, state: bytes | None = None) -> None:
        """`state`: its state from another engine."""
        self.live = live
        self.state = state
        self.next_chunk = 0
        self.pending_chunks: deque[tuple[int, VadChunk | StreamChunk]] = deque()
        """Numbered chunks that are not answered."""
        self.deaths = 0
        self.finished = False
        """Whether the session has ended."""
        self.refused_by: set[str] = set()
        """Replicas that had no room for it, since a chunk was answered last."""

    @property
    def in_transit(self) -> bool:
        """Returns whether chunks must not be sent to its current process."""
        return False

    def discard_saved(self) -> None:
        """Closes the snapshot from an earlier process, if there is one."""

    def opening_message(self, number: int) -> messages.ToEngine:
        """Message that opens it in a process."""
        return messages.OpenVadSession(number, self.live, self.state)

    def replay_chunks(self) -> list[tuple[int, VadChunk | StreamChunk]]:
        """Chunks that a new process must process to continue."""
        return list(self.pending_chunks)

    def append_chunk(self, piece: VadChunk | StreamChunk) -> int:
        """Appends a chunk and returns its number."""
        number = self.next_chunk
        self.pending_chunks.append((number, piece))
        self.next_chunk += 1
        return number

    def acknowledge(self, number: int, state: bytes | None) -> VadChunk | StreamChunk | None:
        """Removes the answered chunk and returns it; None for a result that is no longer awaited. Chunks are
        answered in order."""
        if not self.pending_chunks or self.pending_chunks[0][0] != number:
            return None
        self.state = state if state is not None else self.state
        self.deaths = 0
        self.refused_by.clear()
        return self.pending_chunks.popleft()[1]

    def fail_chunk(self, number: int) -> list[VadChunk | StreamChunk]:
        """Removes a failed chunk and returns all chunks that fail with it."""
        chunk = self.acknowledge(number, None)
        return [] if chunk is None else [chunk]

    def fail_pending(self) -> list[VadChunk | StreamChunk]:
        """Removes and returns all chunks in flight."""
        dropped = [chunk for _, chunk in self.pending_chunks]
        self.pending_chunks.clear()
        return dropped


class InFlightStream(InFlightSession):
    """Stream through a streaming model. Its state is large and a stream is short: if its process dies, the next
    one replays it, and returned results are not returned again. A process that lives can export the state."""

    def __init__(
        self,
        live: bool,
        samples: int | None,
        words: bool,
        bias: str = "",
        language_model: LanguageModelChoice | None = None,
    ) -> None:
        super().__init__(live)
        self._samples, self._words, self._bias, self._language_model = samples, words, bias, language_model
        self.answered_chunks: list[tuple[int, VadChunk | StreamChunk]] = []
        """Answered chunks, retained for replay."""
        self.unanswered_chunks = 0
        """Chunks sent to its process and not answered, replayed ones included."""
        self.leaving = False
        """Whether it is being exported from its process."""
        self.restoring = False
        """Whether its process received a snapshot and has not confirmed it yet."""
        self.saved: SealedBuffer | None = None
        """Snapshot from its previous process, until another process receives it."""
        self.weights: int | None = None
        """Checksum of the weights of the process that it was opened in last."""

    @property
    def in_transit(self) -> bool:
        return self.leaving or self.restoring

    def opening_message(self, number: int) -> messages.ToEngine:
        self.unanswered_chunks, self.restoring = 0, self.saved is not None
        label = self.saved.label if self.saved else None
        return messages.OpenStream(
            number, self.live, self._samples, label, self._words, self._bias, self._language_model
        )

    def replay_chunks(self) -> list[tuple[int, VadChunk | StreamChunk]]:
        return [*self.answered_chunks, *self.pending_chunks]

    def discard_saved(self) -> None:
        if self.saved is not None:
            self.saved.close()
            self.saved = None

    def take_saved(self) -> SealedBuffer | None:
        """Returns the snapshot and gives up its ownership: the receiver closes it."""
        saved, self.saved = self.saved, None
        return saved

    def acknowledge(self, number: int, state: bytes | None) -> VadChunk | StreamChunk | None:
        self.unanswered_chunks -= 1
        first = self.pending_chunks[0] if self.pending_chunks else None
        chunk = super().acknowledge(number, state)
        if first is not None and chunk is not None:
            assert isinstance(chunk, StreamChunk)
            # A replay needs no hypothesis again.
            self.answered_chunks.append((number, msgspec.structs.replace(chunk, hypothesis=None)))
            self.finished = chunk.last
        return chunk

    def fail_chunk(self, number: int) -> list[VadChunk | StreamChunk]:
        """Removes all chunks: the process has dropped the stream. The failed chunk may be a replayed one."""
        self.finished = True
        return super().fail_pending()

    def fail_pending(self) -> list[VadChunk | StreamChunk]:
        self.finished = self.finished or bool(self.pending_chunks)  # later chunks would follow a gap
        return super().fail_pending()


class InFlightSessions(dict[int, InFlightSession]):
    """Open sessions by number; finished ones are removed."""

    def acknowledge(self, number: int, piece: int, state: bytes | None) -> VadChunk | StreamChunk | None:
        """Removes the answered chunk and returns it; None if its session was closed meanwhile."""
        if (session := self.get(number)) is None:
            return None
        chunk = session.acknowledge(piece, state)
        self._remove_finished(number, session)
        return chunk

    def fail_chunk(self, number: int, piece: int) -> list[VadChunk | StreamChunk]:
        """Removes a failed chunk and returns all chunks that fail with it."""
        if (session := self.get(number)) is None:
            return []
        lost = session.fail_chunk(piece)
        self._remove_finished(number, session)
        return lost

    def fail_after_deaths(self, deaths: int = 0) -> list[VadChunk | StreamChunk]:
        """Removes and returns the chunks in flight of sessions with at least `deaths` deaths."""
        lost: list[VadChunk | StreamChunk] = []
        for number, session in [item for item in self.items() if item[1].deaths >= deaths]:
            lost += session.fail_pending()
            self._remove_finished(number, session)
        return lost

    def _remove_finished(self, number: int, session: InFlightSession) -> None:
        if session.finished:
            del self[number]
            session.discard_saved()


def chunk_message(number: int, piece: VadChunk | StreamChunk) -> messages.ToEngine:
    if isinstance(piece, StreamChunk):
        return messages.AppendStreamAudio(
            piece.session, number, len(piece.pcm), piece.last, piece.hypothesis, piece.with_times
        )
    return messages.AppendVadAudio(piece.session, number, len(piece.pcm))


class QueueState(NamedTuple):
    """Work that is not answered."""

    waiting: int
    """Requests that no engine has begun."""
    waiting_samples: int
    """Audio of these."""
    backlog_samples: int
    """Audio of all requests and of the chunks of streams."""

    def fill(self, max_requests: int, max_samples: int) -> float:
        """Used share, 0..1, of a queue of that many requests and that much audio."""
        return min(1.0, max(self.waiting / max_requests, self.waiting_samples / max_samples))


def queue_state(in_flights: Iterable[InFlight]) -> QueueState:
    """Work of these processes that is not answered. Call it with their lock."""
    waiting = waiting_samples = backlog_samples = 0
    for in_flight in in_flights:
        backlog_samples += in_flight.backlog_samples
        for work in in_flight.requests.values():
            if not work.started:
                waiting += 1
                waiting_samples += work.samples
    return QueueState(waiting, waiting_samples, backlog_samples)


MAX_DEATHS = 3
"""Deaths of processes that worked on a request after which it is rejected."""


class InFlight:
    """Requests, sessions and queries of one process. Without a process they wait for the next. Protected by the
    lock of Supervisor; results for callers are returned and delivered without it."""

    def __init__(self) -> None:
        self.process: EngineConnection | None = None
        """The process, also while it loads and after its exit."""
        self.process_ready = False
        """Whether it accepts messages."""
        self.stopped = False
        """Whether it was asked to stop."""
        self.weights: int | None = None
        """Checksum of the process's weights, where its replicas may have others."""
        self.requests = InFlightRequests()
        self.sessions = InFlightSessions()
        self.queries = PendingQueries()

    @property
    def idle(self) -> bool:
        """Returns whether nothing is in flight."""
        return not (self.requests or self.sessions or self.queries)

    @property
    def backlog_samples(self) -> int:
        """Audio of requests, and of chunks of streams, that is not answered."""
        streams = [session for session in self.sessions.values() if isinstance(session, InFlightStream)]
        chunks = sum(len(chunk.pcm) for stream in streams for _, chunk in stream.pending_chunks)
        return self.requests.samples + chunks

    # --- to the process ---------------------------------------------------------------------------------

    def replay_all(self) -> None:
        """Sends everything in flight to a new process, in the original order."""
        self.process_ready = True
        for number, session in self.sessions.items():
            self._reopen_session(number, session)
        for work in self.requests.values():
            self._send_work(work)

    def submit(self, work: InFlightUtterance | InFlightSpeech) -> None:
        self.requests[work.id] = work
        self._send_work(work)

    def cancel(self, request_id: int) -> InFlightUtterance | InFlightSpeech | None:
        """Removes and returns a request; None if it is not here."""
        if (work := self.requests.remove(request_id)) is not None:
            self._withdraw(request_id, messages.CancelRequest(request_id))
        return work

    def expedite(self, request_id: int, within_ms: int) -> None:
        """Shortens the time of an utterance, for the next process too; nothing happens where it is not here."""
        if isinstance(work := self.requests.get(request_id), InFlightUtterance):
            work.utterance.within_ms = within_ms
            self.send(messages.ExpediteRequest(request_id, within_ms), owner=request_id)

    def open(self, number: int, session: InFlightSession) -> None:
        self.sessions[number] = session
        self._reopen_session(number, session)

    def append_audio(self, piece: VadChunk | StreamChunk) -> None:
        session = self.sessions[piece.session]
        number = session.append_chunk(piece)
        if not session.in_transit:
            self._send_chunk(session, number, piece)

    def close(self, number: int) -> InFlightSession | None:
        """Removes and returns a session; None if it is not here."""
        if (session := self.sessions.pop(number, None)) is not None:
            session.discard_saved()
            self._withdraw(number, messages.CloseSession(number))
        return session

    def request_turn(self, pcm: np.ndarray, answer: Future[float]) -> None:
        number = self.queries.add(answer)
        self.send(messages.TurnQuery(number, len(pcm)), pcm, number)

    def request_speakers(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]) -> None:
        number = self.queries.add(answer)
        self.send(messages.SpeakersQuery(number, len(pcm), budget_samples, live), pcm, number)

    def request_separation(self, pcm: np.ndarray, speaker_ranges: SpeakerRanges, answer: Future[np.ndarray]) -> None:
        number = self.queries.add(answer)
        self.send(messages.SeparationQuery(number, len(pcm), speaker_ranges), pcm, number)

    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        """Withdraws a separation; nothing happens where it is not pending here."""
        if (number := self.queries.number_of(answer)) is not None:
            self.send(messages.CancelSeparation(number))

    def request_report(self, answer: Future[messages.EngineReport]) -> None:
        self.send(messages.ReportQuery(self.queries.add(answer)))

    def set_peers(self, addresses: Sequence[str], answer: Future[messages.PeersSet]) -> None:
        self.send(messages.SetPeers(self.queries.add(answer), tuple(addresses)))

    def request_stop(self) -> None:
        """Asks the process to stop; kills one that is loading. Unanswered work fails unless it was transferred
        before."""
        self.stopped = True
        if self.process_ready:
            self.send(messages.StopEngine())
        elif self.process is not None:
            self.process.kill()

    def send(
        self,
        message: messages.ToEngine,
        pcm: np.ndarray | None = None,
        number: int = 0,
        parcel: SealedBuffer | None = None,
        owner: int | None = None,
    ) -> None:
        """Sends a message without blocking, see EngineProcess.send. Messages that a dying process has not received
        are lost, and their requests go to the next one."""
        if self.process_ready:
            assert self.process is not None
            self.process.send(message, pcm, number, parcel, owner)
        elif parcel is not None:
            parcel.close()

    def _withdraw(self, number: int, ending: messages.ToEngine) -> None:
        """Withdraws unsent messages of an ended request or session, whose samples would otherwise wait for room in
        the ring. `ending`: message for what was sent already."""
        if self.process_ready:
            assert self.process is not None
            self.process.withdraw_owner(number)
            self.process.send(ending)

    def _send_work(self, work: InFlightUtterance | InFlightSpeech) -> None:
        self.send(work.message(), work.pcm, work.id, owner=work.id)

    def _send_chunk(self, session: InFlightSession, number: int, piece: VadChunk | StreamChunk) -> None:
        if isinstance(session, InFlightStream):
            session.unanswered_chunks += 1
        self.send(chunk_message(number, piece), piece.pcm, piece.session, owner=piece.session)

    def _reopen_session(self, number: int, session: InFlightSession) -> None:
        if not self.process_ready:
            return
        if isinstance(session, InFlightStream):
            if session.weights != self.weights:
                session.discard_saved()  # other weights computed that state: it is replayed
            session.weights = self.weights
        opening = session.opening_message(number)
        if isinstance(session, InFlightStream) and session.restoring:
            # The snapshot is used once: if this process dies, the next one replays the stream.
            self.send(opening, parcel=session.take_saved(), owner=number)
            return  # its chunks follow once StreamOpened confirms the snapshot
        self.send(opening, owner=number)
        for chunk_number, chunk in session.replay_chunks():
            self._send_chunk(session, chunk_number, chunk)

    # --- from the process -------------------------------------------------------------------------------

    def handle_message(self, message: messages.ToServer | ExportedStream) -> Sequence[PendingAnswer | SoundAnswer]:
        match message:
            case messages.UtteranceDone(id=request_id, recognition=recognition):
                return [work.answer(recognition)] if (work := self.requests.remove(request_id)) else []
            case messages.SentenceSound(id=request_id, sound=sound):
                return self._on_sound(request_id, sound)
            case messages.VadResult(session=number, chunk=chunk_number, probabilities=data, state=state):
                chunk = self.sessions.acknowledge(number, chunk_number, state)
                if chunk is None:
                    return []
                assert isinstance(chunk, VadChunk)
                chunk.future.state = state  # before the answer, whose callbacks may export the session
                return [PendingAnswer(chunk.future, np.frombuffer(data, np.float32))]
            case messages.StreamOutput(session=number, chunk=chunk_number, found=result):
                chunk = self.sessions.acknowledge(number, chunk_number, None)
                return [PendingAnswer(chunk.future, result)] if chunk else []
            case messages.SessionRefused(session=number, failure=failure):
                refused = self.close(number)
                return reject_chunks(refused.fail_pending() if refused else (), failure.to_error())
            case messages.RequestFailed(id=number, failure=failure, chunk=None):
                return [work.answer(failure.to_error())] if (work := self.requests.remove(number)) else []
            case messages.RequestFailed(id=number, failure=failure, chunk=int(chunk_number)):
                return reject_chunks(self.sessions.fail_chunk(number, chunk_number), failure.to_error())
            case messages.RequestsStarted(ids=ids):
                for request_id in ids:
                    if (work := self.requests.get(request_id)) is not None:
                        work.started = True
            case messages.StreamOpened(session=number, failure=failure):
                self._on_opened(number, failure)
            case messages.EngineReport(number=number) | messages.PeersSet(number=number):
                return [PendingAnswer(self.queries.pop_answered(number), message)]
            case messages.TurnAnswer(number=number, probability=probability):
                return [PendingAnswer(self.queries.pop_answered(number), probability)]
            case messages.SpeakersAnswer(number=number, voices=voices):
                return [PendingAnswer(self.queries.pop_answered(number), voices)]
            case messages.SeparatedSpeech(number=number, tracks=data):
                tracks = np.frombuffer(data, np.float32).reshape(2, -1)
                return [PendingAnswer(self.queries.pop_answered(number), tracks)]
            case messages.QueryFailed(number=number, failure=failure):
                return [PendingAnswer(self.queries.pop_answered(number), failure.to_error())]
        return []

    def _on_sound(self, number: int, sound: SentenceAudio) -> Sequence[PendingAnswer | SoundAnswer]:
        speech = self.requests.get(number)
        if not isinstance(speech, InFlightSpeech):  # cancelled
            return []
        if sound.is_last:
            del self.requests[number]
        return speech.add_sound(sound)

    def _on_opened(self, number: int, failure: messages.ErrorMessage | None) -> None:
        stream = self.sessions.get(number)
        if not isinstance(stream, InFlightStream) or not stream.restoring:
            return
        stream.restoring = False
        if failure is not None:
            self.send(messages.CloseSession(number))
            self._reopen_session(number, stream)
        elif not stream.leaving:
            for chunk_number, chunk in stream.pending_chunks:
                self._send_chunk(stream, chunk_number, chunk)

    # --- endings ----------------------------------------------------------------------------------------

    def record_death(self, code: str) -> list[PendingAnswer]:
        """Rejects queries, and work during which too many processes died."""
        suspects, answers = self.record_loss(f"died ({code})")
        for work in suspects:
            work.deaths += 1
        return [*answers, *self.reject_repeated(code)]

    def record_loss(
        self, how: str
    ) -> tuple[list[InFlightUtterance | InFlightSpeech | InFlightSession], list[PendingAnswer]]:
        """Rejects queries, and returns the work in progress too: where the process died, that may be the cause."""
        started = [work for work in self.requests.values() if work.started]
        for work in started:
            work.started = False
        sessions = [session for session in self.sessions.values() if session.pending_chunks]
        return [*started, *sessions], self.queries.fail_all(unanswered_query(how))

    def reject_repeated(self, code: str) -> list[PendingAnswer]:
        """Rejects work during which too many processes died."""
        return self._reject_repeated(MAX_DEATHS, crash_error(code))

    def fail_all(self, error: AsrServeError) -> list[PendingAnswer]:
        """Rejects everything."""
        for session in self.sessions.values():
            session.discard_saved()
        return [*self.queries.fail_all(error), *self._reject_repeated(0, error)]

    def _reject_repeated(self, deaths: int, error: AsrServeError) -> list[PendingAnswer]:
        """Rejects requests and sessions with at least `deaths` deaths."""
        lost = [work for work in self.requests.values() if work.deaths >= deaths]
        for work in lost:
            del self.requests[work.id]
        return [*(work.answer(error) for work in lost), *reject_chunks(self.sessions.fail_after_deaths(deaths), error)]


def crash_error(code: str) -> AsrServeError:
    return EngineCrashed(
        f"the engine process died {MAX_DEATHS} times while it worked on this request ({code})",
        todo="do not send it again",
    )


def reject_chunks(pieces: Iterable[VadChunk | StreamChunk], error: AsrServeError) -> list[PendingAnswer]:
    return [PendingAnswer(chunk.future, error) for chunk in pieces]
