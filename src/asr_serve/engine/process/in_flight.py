"""What callers have given to an engine and is not answered: kept here, audio and all."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.engine.process import messages
from asr_serve.engine.process.process import EngineProcess, ExportedStream
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadChunk
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.errors import AsrServeError, EngineCrashed, StepFailed
from asr_serve.transfer.sealed_buffer import SealedBuffer
from asr_serve.types import SentenceAudio


class PendingAnswer(NamedTuple):
    """For somebody who waits. It is told where no lock is held: who hears it may call again at once."""

    future: Future[Any]
    value: Any
    """Or the error."""
    samples: int | None = None
    """Of an utterance or a sentence."""

    def deliver(self) -> None:
        """Unless nobody waits any more."""
        if self.future.running() or self.future.set_running_or_notify_cancel():
            if isinstance(self.value, AsrServeError):
                self.future.set_exception(self.value)
            else:
                self.future.set_result(self.value)


class SoundAnswer(NamedTuple):
    """For somebody who hears a sentence, in its place among the answers."""

    request: TtsRequest
    sound: SentenceAudio
    samples: None = None

    def deliver(self) -> None:
        self.request.on_sound(self.sound)


class PendingQueries:
    """Those that a process was asked. They are not for the next one."""

    def __init__(self) -> None:
        self._last_number = 0
        self._pending: dict[int, Future[Any]] = {}

    def add(self, answer: Future[Any]) -> int:
        self._last_number += 1
        self._pending[self._last_number] = answer
        return self._last_number

    def pop_answered(self, number: int) -> Future[Any]:
        return self._pending.pop(number)

    def fail_all(self, error: AsrServeError) -> list[PendingAnswer]:
        dropped, self._pending = list(self._pending.values()), {}
        return [PendingAnswer(each, error) for each in dropped]

    def __len__(self) -> int:
        return len(self._pending)


def unanswered_query(how: str) -> StepFailed:
    """To a question."""
    return StepFailed(f"the engine process {how}", todo="go on without this answer")


class InFlightUtterance(msgspec.Struct):
    """An utterance until it is answered."""

    utterance: RecognitionRequest
    started: bool = False
    """The process works on it."""
    deaths: int = 0
    """Processes that died while they worked on it."""

    @property
    def id(self) -> int:
        return self.utterance.id

    @property
    def pcm(self) -> np.ndarray | None:
        return self.utterance.pcm

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
    """A sentence until all of it was told. When its process dies, another makes all of it again, and what was told
    is not told twice."""

    request: TtsRequest
    started: bool = False
    deaths: int = 0
    """As above."""
    delivered_samples: int = 0
    """Samples."""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def pcm(self) -> None:
        return None

    def message(self) -> messages.SubmitSentence:
        each = self.request
        return messages.SubmitSentence(
            each.id, each.sentence, each.priority, each.within_ms, self.delivered_samples, each.submitted_ns
        )

    def add_sound(self, sound: SentenceAudio) -> list[PendingAnswer | SoundAnswer]:
        self.delivered_samples += len(sound.pcm) // 2
        told: list[PendingAnswer | SoundAnswer] = [SoundAnswer(self.request, sound)]
        return [*told, self.answer(self.delivered_samples)] if sound.is_last else told

    def answer(self, value: Any) -> PendingAnswer:
        return PendingAnswer(self.request.future, value, self.request.samples)


class InFlightSession:
    """A caller's voice activity: the state after the last answered piece, and the pieces under way."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.state: bytes | None = None
        self.next_chunk = 0
        self.pending_chunks: deque[tuple[int, VadChunk | StreamChunk]] = deque()
        """Not answered."""
        self.deaths = 0
        self.finished = False
        """Nothing more will come of it."""

    @property
    def in_transit(self) -> bool:
        """Its pieces are not for the process that has it now."""
        return False

    def discard_saved(self) -> None:
        """Where it stood in a process that it left, if that is kept."""

    def opening_message(self, number: int) -> messages.ToEngine:
        """Begins it in another process."""
        return messages.OpenVadSession(number, self.live, self.state)

    def replay_chunks(self) -> list[tuple[int, VadChunk | StreamChunk]]:
        """What another process has to hear, to go on."""
        return list(self.pending_chunks)

    def append_chunk(self, piece: VadChunk | StreamChunk) -> int:
        """The piece's number."""
        number = self.next_chunk
        self.pending_chunks.append((number, piece))
        self.next_chunk += 1
        return number

    def acknowledge(self, number: int, state: bytes | None) -> VadChunk | StreamChunk | None:
        """Pieces are answered in order; None for an answer that nobody waits for any more."""
        if not self.pending_chunks or self.pending_chunks[0][0] != number:
            return None
        self.state = state if state is not None else self.state
        self.deaths = 0
        return self.pending_chunks.popleft()[1]

    def fail_chunk(self, number: int) -> list[VadChunk | StreamChunk]:
        """The pieces that are lost with that one."""
        piece = self.acknowledge(number, None)
        return [] if piece is None else [piece]

    def fail_pending(self) -> list[VadChunk | StreamChunk]:
        """Give up what is under way."""
        dropped = [piece for _, piece in self.pending_chunks]
        self.pending_chunks.clear()
        return dropped


class InFlightStream(InFlightSession):
    """One through a streaming model. What it remembers is large, and a stream is short: when its process dies,
    another hears all of it again, and what was told is not told twice. One that lives can say where it stands."""

    def __init__(self, live: bool, samples: int | None, words: bool, bias: str = "") -> None:
        super().__init__(live)
        self._samples, self._words, self._bias = samples, words, bias
        self.answered_chunks: list[tuple[int, VadChunk | StreamChunk]] = []
        """What was answered."""
        self.unanswered_chunks = 0
        """Pieces that its process has been sent and has not answered; those it hears again are among them."""
        self.leaving = False
        """It is to leave its process."""
        self.restoring = False
        """Its process was told where it stood in another, and has not said that it can go on from there."""
        self.saved: SealedBuffer | None = None
        """Where it stood in the process that it left, until another is told."""

    @property
    def in_transit(self) -> bool:
        return self.leaving or self.restoring

    def opening_message(self, number: int) -> messages.ToEngine:
        self.unanswered_chunks, self.restoring = 0, self.saved is not None
        label = self.saved.label if self.saved else None
        return messages.OpenStream(number, self.live, self._samples, label, self._words, self._bias)

    def replay_chunks(self) -> list[tuple[int, VadChunk | StreamChunk]]:
        return [*self.answered_chunks, *self.pending_chunks]

    def discard_saved(self) -> None:
        if self.saved is not None:
            self.saved.close()
            self.saved = None

    def take_saved(self) -> SealedBuffer | None:
        """Where it stood, for whoever takes it: it is closed there."""
        saved, self.saved = self.saved, None
        return saved

    def acknowledge(self, number: int, state: bytes | None) -> VadChunk | StreamChunk | None:
        self.unanswered_chunks -= 1
        first = self.pending_chunks[0] if self.pending_chunks else None
        piece = super().acknowledge(number, state)
        if first is not None and piece is not None:
            assert isinstance(piece, StreamChunk)
            # Another process need not make the hypothesis again.
            self.answered_chunks.append((number, msgspec.structs.replace(piece, hypothesis=None)))
            self.finished = piece.last
        return piece

    def fail_chunk(self, number: int) -> list[VadChunk | StreamChunk]:
        """All of them: the process has dropped the stream. It may be a piece that was heard again."""
        self.finished = True
        return super().fail_pending()

    def fail_pending(self) -> list[VadChunk | StreamChunk]:
        self.finished = self.finished or bool(self.pending_chunks)  # what follows would follow a gap
        return super().fail_pending()


class InFlightSessions(dict[int, InFlightSession]):
    """Those that are open, by number. One that is over is forgotten."""

    def acknowledge(self, number: int, piece: int, state: bytes | None) -> VadChunk | StreamChunk | None:
        """The piece that is answered, unless its session was closed meanwhile."""
        if (session := self.get(number)) is None:
            return None
        found = session.acknowledge(piece, state)
        self._remove_finished(number, session)
        return found

    def fail_chunk(self, number: int, piece: int) -> list[VadChunk | StreamChunk]:
        """The pieces that are lost with that one."""
        if (session := self.get(number)) is None:
            return []
        lost = session.fail_chunk(piece)
        self._remove_finished(number, session)
        return lost

    def fail_after_deaths(self, deaths: int = 0) -> list[VadChunk | StreamChunk]:
        """Give up what is under way of those over which so many processes died."""
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


MAX_DEATHS = 3
"""Processes that may die while they work on one request."""


class InFlight:
    """Nothing of it is lost while there is no process: it is for the next. Under the lock of Processes; answers to
    callers are returned, to be told without it."""

    def __init__(self) -> None:
        self.current_process: EngineProcess | None = None
        """Also while it loads, and when it is gone."""
        self.process_ready = False
        """It may be sent messages."""
        self.stopped = False
        """It was told to end."""
        self.requests: dict[int, InFlightUtterance | InFlightSpeech] = {}
        self.sessions = InFlightSessions()
        self.queries = PendingQueries()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.current_process is not None
        return self.current_process.process

    @property
    def idle(self) -> bool:
        """Nobody waits for it."""
        return not (self.requests or self.sessions or self.queries)

    # --- to the process ---------------------------------------------------------------------------------

    def replay_all(self) -> None:
        """A process is there: everything that waits goes to it, in the order in which it came."""
        self.process_ready = True
        for number, session in self.sessions.items():
            self._reopen_session(number, session)
        for work in self.requests.values():
            self._send_work(work)

    def submit(self, work: InFlightUtterance | InFlightSpeech) -> None:
        self.requests[work.id] = work
        self._send_work(work)

    def cancel(self, request_id: int) -> InFlightUtterance | InFlightSpeech | None:
        """None: it is not here."""
        if (work := self.requests.pop(request_id, None)) is not None:
            self._withdraw(request_id, messages.CancelRequest(request_id))
        return work

    def open(self, number: int, session: InFlightSession) -> None:
        self.sessions[number] = session
        self._reopen_session(number, session)

    def append_audio(self, piece: VadChunk | StreamChunk) -> None:
        session = self.sessions[piece.session]
        number = session.append_chunk(piece)
        if not session.in_transit:
            self._send_chunk(session, number, piece)

    def close(self, number: int) -> InFlightSession | None:
        """None: it is not here."""
        if (session := self.sessions.pop(number, None)) is not None:
            session.discard_saved()
            self._withdraw(number, messages.CloseSession(number))
        return session

    def request_turn(self, pcm: np.ndarray, answer: Future[float]) -> None:
        number = self.queries.add(answer)
        self.send(messages.TurnQuery(number, len(pcm)), pcm, number)

    def request_speakers(
        self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]
    ) -> None:
        number = self.queries.add(answer)
        self.send(messages.SpeakersQuery(number, len(pcm), budget_samples, live), pcm, number)

    def request_report(self, answer: Future[messages.EngineReport]) -> None:
        self.send(messages.ReportQuery(self.queries.add(answer)))

    def request_stop(self) -> None:
        """What it has not answered is given up, unless it was taken from here before."""
        self.stopped = True
        if self.process_ready:
            self.send(messages.StopEngine())
        elif self.current_process is not None:
            self.current_process.kill()

    def send(
        self,
        message: messages.ToEngine,
        pcm: np.ndarray | None = None,
        number: int = 0,
        parcel: SealedBuffer | None = None,
        owner: int | None = None,
    ) -> None:
        """See Child.send: nobody waits here. What a process that dies has not been written is lost with it, and
        goes to the next one with everything else that is kept here."""
        if self.process_ready:
            assert self.current_process is not None
            self.current_process.send(message, pcm, number, parcel, owner)
        elif parcel is not None:
            parcel.close()

    def _withdraw(self, number: int, ending: messages.ToEngine) -> None:
        """What is given up: samples that wait for room in the ring would be held for nobody. `ending`: for what
        the process has heard of it, if it has."""
        if self.process_ready:
            assert self.current_process is not None
            self.current_process.withdraw_owner(number)
            self.current_process.send(ending)

    def _send_work(self, work: InFlightUtterance | InFlightSpeech) -> None:
        self.send(work.message(), work.pcm, work.id, owner=work.id)

    def _send_chunk(self, session: InFlightSession, number: int, piece: VadChunk | StreamChunk) -> None:
        if isinstance(session, InFlightStream):
            session.unanswered_chunks += 1
        self.send(chunk_message(number, piece), piece.pcm, piece.session, owner=piece.session)

    def _reopen_session(self, number: int, session: InFlightSession) -> None:
        if not self.process_ready:
            return
        opening = session.opening_message(number)
        if isinstance(session, InFlightStream) and session.restoring:
            # Should this process die, the next hears it from its start.
            self.send(opening, parcel=session.take_saved(), owner=number)
            return  # its pieces follow when it has been said that it can go on from there
        self.send(opening, owner=number)
        for piece, audio in session.replay_chunks():
            self._send_chunk(session, piece, audio)

    # --- from the process -------------------------------------------------------------------------------

    def handle_message(self, message: messages.ToServer | ExportedStream) -> Sequence[PendingAnswer | SoundAnswer]:
        match message:
            case messages.UtteranceDone(id=request_id, recognition=recognition):
                return [work.answer(recognition)] if (work := self.requests.pop(request_id, None)) else []
            case messages.SentenceSound(id=request_id, sound=sound):
                return self._on_sound(request_id, sound)
            case messages.VadResult(session=number, chunk=piece, probabilities=data, state=state):
                windows = self.sessions.acknowledge(number, piece, state)
                return [PendingAnswer(windows.future, np.frombuffer(data, np.float32))] if windows else []
            case messages.StreamOutput(session=number, chunk=piece, found=found):
                said = self.sessions.acknowledge(number, piece, None)
                return [PendingAnswer(said.future, found)] if said else []
            case messages.RequestFailed(id=number, failure=failure, chunk=None):
                return [work.answer(failure.to_error())] if (work := self.requests.pop(number, None)) else []
            case messages.RequestFailed(id=number, failure=failure, chunk=int(piece)):
                return reject_chunks(self.sessions.fail_chunk(number, piece), failure.to_error())
            case messages.RequestsStarted(ids=ids):
                for request_id in ids:
                    if (work := self.requests.get(request_id)) is not None:
                        work.started = True
            case messages.StreamOpened(session=number, failure=failure):
                self._on_opened(number, failure)
            case messages.EngineReport(number=number):
                return [PendingAnswer(self.queries.pop_answered(number), message)]
            case messages.TurnAnswer(number=number, probability=probability):
                return [PendingAnswer(self.queries.pop_answered(number), probability)]
            case messages.SpeakersAnswer(number=number, voices=voices):
                return [PendingAnswer(self.queries.pop_answered(number), voices)]
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
            for piece, audio in stream.pending_chunks:
                self._send_chunk(stream, piece, audio)

    # --- endings ----------------------------------------------------------------------------------------

    def record_death(self, code: str) -> list[PendingAnswer]:
        """The process died: give up what too many were working on when they did, and the questions."""
        for work in self.requests.values():
            work.deaths += work.started
            work.started = False
        for session in self.sessions.values():
            session.deaths += bool(session.pending_chunks)
        return [
            *self.queries.fail_all(unanswered_query(f"died ({code})")),
            *self._reject_repeated(MAX_DEATHS, crash_error(code)),
        ]

    def fail_all(self, error: AsrServeError) -> list[PendingAnswer]:
        """Give up everything."""
        for session in self.sessions.values():
            session.discard_saved()
        return [*self.queries.fail_all(error), *self._reject_repeated(0, error)]

    def _reject_repeated(self, deaths: int, error: AsrServeError) -> list[PendingAnswer]:
        """What so many processes died over."""
        lost = [work for work in self.requests.values() if work.deaths >= deaths]
        for work in lost:
            del self.requests[work.id]
        return [
            *(work.answer(error) for work in lost),
            *reject_chunks(self.sessions.fail_after_deaths(deaths), error),
        ]


def crash_error(code: str) -> AsrServeError:
    return EngineCrashed(
        f"the engine process died {MAX_DEATHS} times while it worked on this request ({code})",
        todo="do not send it again",
    )


def reject_chunks(pieces: Iterable[VadChunk | StreamChunk], error: AsrServeError) -> list[PendingAnswer]:
    return [PendingAnswer(piece.future, error) for piece in pieces]
