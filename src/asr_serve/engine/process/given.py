"""One engine process, and what it was given and has not answered."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np

from asr_serve.engine.process import wire
from asr_serve.engine.process.child import Child, Left
from asr_serve.engine.process.pending import (
    Answer,
    Questions,
    Session,
    Sessions,
    Speech,
    Stream,
    Told,
    Work,
    message,
    unanswered,
)
from asr_serve.engine.session import Piece, Windows
from asr_serve.errors import AsrServeError, EngineCrashed
from asr_serve.speaker.local import LocalVoices
from asr_serve.transfer.parcel import Parcel
from asr_serve.types import Sound

MAX_DEATHS = 3
"""Processes that may die while they work on one request."""


class Given:
    """Nothing of it is lost while there is no process: it is for the next. Under the lock of Processes; answers to
    callers are returned, to be told without it."""

    def __init__(self) -> None:
        self.child: Child | None = None
        """Also while it loads, and when it is gone."""
        self.up = False
        """It may be sent messages."""
        self.stopped = False
        """It was told to end."""
        self.work: dict[int, Work | Speech] = {}
        self.sessions = Sessions()
        self.questions = Questions()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.child is not None
        return self.child.process

    @property
    def idle(self) -> bool:
        """Nobody waits for it."""
        return not (self.work or self.sessions or self.questions)

    # --- to the process ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A process is there: everything that waits goes to it, in the order in which it came."""
        self.up = True
        for number, session in self.sessions.items():
            self._begin(number, session)
        for work in self.work.values():
            self._send_work(work)

    def submit(self, work: Work | Speech) -> None:
        self.work[work.id] = work
        self._send_work(work)

    def cancel(self, request_id: int) -> Work | Speech | None:
        """None: it is not here."""
        if (work := self.work.pop(request_id, None)) is not None:
            self._withdraw(request_id, wire.Cancel(request_id))
        return work

    def open(self, number: int, session: Session) -> None:
        self.sessions[number] = session
        self._begin(number, session)

    def put(self, piece: Windows | Piece) -> None:
        session = self.sessions[piece.session]
        number = session.put(piece)
        if not session.waits:
            self._send_piece(session, number, piece)

    def close(self, number: int) -> Session | None:
        """None: it is not here."""
        if (session := self.sessions.pop(number, None)) is not None:
            session.forget()
            self._withdraw(number, wire.CloseSession(number))
        return session

    def ask_turn(self, pcm: np.ndarray, answer: Future[float]) -> None:
        number = self.questions.ask(answer)
        self.send(wire.AskTurn(number, len(pcm)), pcm, number)

    def ask_voices(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalVoices]) -> None:
        number = self.questions.ask(answer)
        self.send(wire.AskVoices(number, len(pcm), budget_samples, live), pcm, number)

    def ask(self, answer: Future[wire.Report]) -> None:
        self.send(wire.Ask(self.questions.ask(answer)))

    def stop(self) -> None:
        """What it has not answered is given up, unless it was taken from here before."""
        self.stopped = True
        if self.up:
            self.send(wire.Stop())
        elif self.child is not None:
            self.child.kill()

    def send(
        self,
        message: wire.ToEngine,
        pcm: np.ndarray | None = None,
        number: int = 0,
        parcel: Parcel | None = None,
        owner: int | None = None,
    ) -> None:
        """See Child.send: nobody waits here. What a process that dies has not been written is lost with it, and
        goes to the next one with everything else that is kept here."""
        if self.up:
            assert self.child is not None
            self.child.send(message, pcm, number, parcel, owner)
        elif parcel is not None:
            parcel.close()

    def _withdraw(self, number: int, ending: wire.ToEngine) -> None:
        """What is given up: samples that wait for room in the ring would be held for nobody. `ending`: for what
        the process has heard of it, if it has."""
        if self.up:
            assert self.child is not None
            self.child.withdraw(number)
            self.child.send(ending)

    def _send_work(self, work: Work | Speech) -> None:
        self.send(work.message(), work.pcm, work.id, owner=work.id)

    def _send_piece(self, session: Session, number: int, piece: Windows | Piece) -> None:
        if isinstance(session, Stream):
            session.under_way += 1
        self.send(message(number, piece), piece.pcm, piece.session, owner=piece.session)

    def _begin(self, number: int, session: Session) -> None:
        if not self.up:
            return
        opening = session.opening(number)
        if isinstance(session, Stream) and session.coming:
            # Should this process die, the next hears it from its start.
            self.send(opening, parcel=session.hand_over(), owner=number)
            return  # its pieces follow when it has been said that it can go on from there
        self.send(opening, owner=number)
        for piece, audio in session.again():
            self._send_piece(session, piece, audio)

    # --- from the process -------------------------------------------------------------------------------

    def take(self, message: wire.ToServer | Left) -> Sequence[Answer | Told]:
        match message:
            case wire.Done(id=request_id, recognition=recognition):
                return [work.answer(recognition)] if (work := self.work.pop(request_id, None)) else []
            case wire.Sounded(id=request_id, sound=sound):
                return self._sounded(request_id, sound)
            case wire.Heard(session=number, piece=piece, probabilities=data, state=state):
                windows = self.sessions.answered(number, piece, state)
                return [Answer(windows.future, np.frombuffer(data, np.float32))] if windows else []
            case wire.Said(session=number, piece=piece, found=found):
                said = self.sessions.answered(number, piece, None)
                return [Answer(said.future, found)] if said else []
            case wire.Failed(id=number, failure=failure, piece=None):
                return [work.answer(failure.error())] if (work := self.work.pop(number, None)) else []
            case wire.Failed(id=number, failure=failure, piece=int(piece)):
                return rejected(self.sessions.failed(number, piece), failure.error())
            case wire.Started(ids=ids):
                for request_id in ids:
                    if (work := self.work.get(request_id)) is not None:
                        work.started = True
            case wire.Opened(session=number, failure=failure):
                self._opened(number, failure)
            case wire.Report(number=number):
                return [Answer(self.questions.answered(number), message)]
            case wire.Turn(number=number, probability=probability):
                return [Answer(self.questions.answered(number), probability)]
            case wire.VoicesHeard(number=number, voices=voices):
                return [Answer(self.questions.answered(number), voices)]
            case wire.Unanswered(number=number, failure=failure):
                return [Answer(self.questions.answered(number), failure.error())]
        return []

    def _sounded(self, number: int, sound: Sound) -> Sequence[Answer | Told]:
        speech = self.work.get(number)
        if not isinstance(speech, Speech):  # cancelled
            return []
        if sound.last:
            del self.work[number]
        return speech.sounds(sound)

    def _opened(self, number: int, failure: wire.Failure | None) -> None:
        stream = self.sessions.get(number)
        if not isinstance(stream, Stream) or not stream.coming:
            return
        stream.coming = False
        if failure is not None:
            self.send(wire.CloseSession(number))
            self._begin(number, stream)
        elif not stream.going:
            for piece, audio in stream.pieces:
                self._send_piece(stream, piece, audio)

    # --- endings ----------------------------------------------------------------------------------------

    def strike(self, code: str) -> list[Answer]:
        """The process died: give up what too many were working on when they did, and the questions."""
        for work in self.work.values():
            work.deaths += work.started
            work.started = False
        for session in self.sessions.values():
            session.deaths += bool(session.pieces)
        return [
            *self.questions.drop(unanswered(f"died ({code})")),
            *self._reject(MAX_DEATHS, crashed(code)),
        ]

    def drop(self, error: AsrServeError) -> list[Answer]:
        """Give up everything."""
        for session in self.sessions.values():
            session.forget()
        return [*self.questions.drop(error), *self._reject(0, error)]

    def _reject(self, deaths: int, error: AsrServeError) -> list[Answer]:
        """What so many processes died over."""
        lost = [work for work in self.work.values() if work.deaths >= deaths]
        for work in lost:
            del self.work[work.id]
        return [*(work.answer(error) for work in lost), *rejected(self.sessions.drop(deaths), error)]


def crashed(code: str) -> AsrServeError:
    return EngineCrashed(
        f"the engine process died {MAX_DEATHS} times while it worked on this request ({code})",
        todo="do not send it again",
    )


def rejected(pieces: Iterable[Windows | Piece], error: AsrServeError) -> list[Answer]:
    return [Answer(piece.future, error) for piece in pieces]
