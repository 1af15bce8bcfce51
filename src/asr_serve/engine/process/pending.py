"""What callers have given to an engine and is not answered: kept here, audio and all."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asr_serve.engine.process import wire
from asr_serve.engine.session import Piece, Utterance, Windows
from asr_serve.engine.speaking.saying import Saying
from asr_serve.errors import AsrServeError, StepFailed
from asr_serve.transfer.parcel import Parcel
from asr_serve.types import Sound


class Answer(NamedTuple):
    """For somebody who waits. It is told where no lock is held: who hears it may call again at once."""

    future: Future[Any]
    value: Any
    """Or the error."""
    samples: int | None = None
    """Of an utterance or a sentence."""

    def tell(self) -> None:
        """Unless nobody waits any more."""
        if self.future.running() or self.future.set_running_or_notify_cancel():
            if isinstance(self.value, AsrServeError):
                self.future.set_exception(self.value)
            else:
                self.future.set_result(self.value)


class Told(NamedTuple):
    """For somebody who hears a sentence, in its place among the answers."""

    saying: Saying
    sound: Sound
    samples: None = None

    def tell(self) -> None:
        self.saying.hear(self.sound)


class Questions:
    """Those that a process was asked. They are not for the next one."""

    def __init__(self) -> None:
        self._asked = 0
        self._open: dict[int, Future[Any]] = {}

    def ask(self, answer: Future[Any]) -> int:
        self._asked += 1
        self._open[self._asked] = answer
        return self._asked

    def answered(self, number: int) -> Future[Any]:
        return self._open.pop(number)

    def drop(self, error: AsrServeError) -> list[Answer]:
        dropped, self._open = list(self._open.values()), {}
        return [Answer(each, error) for each in dropped]

    def __len__(self) -> int:
        return len(self._open)


def unanswered(how: str) -> StepFailed:
    """To a question."""
    return StepFailed(f"the engine process {how}", todo="go on without this answer")


class Work(msgspec.Struct):
    """An utterance until it is answered."""

    utterance: Utterance
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

    def message(self) -> wire.Submit:
        utterance = self.utterance
        assert utterance.pcm is not None
        return wire.Submit(
            utterance.id,
            len(utterance.pcm),
            utterance.samples,
            utterance.options,
            utterance.priority,
            utterance.draft,
            utterance.within_ms,
            utterance.submitted_ns,
        )

    def answer(self, value: Any) -> Answer:
        return Answer(self.utterance.future, value, self.utterance.samples)


class Speech(msgspec.Struct):
    """A sentence until all of it was told. When its process dies, another makes all of it again, and what was told
    is not told twice."""

    saying: Saying
    started: bool = False
    deaths: int = 0
    """As above."""
    told: int = 0
    """Samples."""

    @property
    def id(self) -> int:
        return self.saying.id

    @property
    def pcm(self) -> None:
        return None

    def message(self) -> wire.Say:
        each = self.saying
        return wire.Say(each.id, each.sentence, each.priority, each.within_ms, self.told, each.submitted_ns)

    def sounds(self, sound: Sound) -> list[Answer | Told]:
        self.told += len(sound.pcm) // 2
        told: list[Answer | Told] = [Told(self.saying, sound)]
        return [*told, self.answer(self.told)] if sound.last else told

    def answer(self, value: Any) -> Answer:
        return Answer(self.saying.future, value, self.saying.samples)


class Session:
    """A caller's voice activity: the state after the last answered piece, and the pieces under way."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.state: bytes | None = None
        self.next_piece = 0
        self.pieces: deque[tuple[int, Windows | Piece]] = deque()
        """Not answered."""
        self.deaths = 0
        self.over = False
        """Nothing more will come of it."""

    @property
    def waits(self) -> bool:
        """Its pieces are not for the process that has it now."""
        return False

    def forget(self) -> None:
        """Where it stood in a process that it left, if that is kept."""

    def opening(self, number: int) -> wire.ToEngine:
        """Begins it in another process."""
        return wire.OpenSession(number, self.live, self.state)

    def again(self) -> list[tuple[int, Windows | Piece]]:
        """What another process has to hear, to go on."""
        return list(self.pieces)

    def put(self, piece: Windows | Piece) -> int:
        """The piece's number."""
        number = self.next_piece
        self.pieces.append((number, piece))
        self.next_piece += 1
        return number

    def answered(self, number: int, state: bytes | None) -> Windows | Piece | None:
        """Pieces are answered in order; None for an answer that nobody waits for any more."""
        if not self.pieces or self.pieces[0][0] != number:
            return None
        self.state = state if state is not None else self.state
        self.deaths = 0
        return self.pieces.popleft()[1]

    def failed(self, number: int) -> list[Windows | Piece]:
        """The pieces that are lost with that one."""
        piece = self.answered(number, None)
        return [] if piece is None else [piece]

    def drop(self) -> list[Windows | Piece]:
        """Give up what is under way."""
        dropped = [piece for _, piece in self.pieces]
        self.pieces.clear()
        return dropped


class Stream(Session):
    """One through a streaming model. What it remembers is large, and a stream is short: when its process dies,
    another hears all of it again, and what was told is not told twice. One that lives can say where it stands."""

    def __init__(self, live: bool, samples: int | None, words: bool, bias: str = "") -> None:
        super().__init__(live)
        self._samples, self._words, self._bias = samples, words, bias
        self.heard: list[tuple[int, Windows | Piece]] = []
        """What was answered."""
        self.under_way = 0
        """Pieces that its process has been sent and has not answered; those it hears again are among them."""
        self.going = False
        """It is to leave its process."""
        self.coming = False
        """Its process was told where it stood in another, and has not said that it can go on from there."""
        self.saved: Parcel | None = None
        """Where it stood in the process that it left, until another is told."""

    @property
    def waits(self) -> bool:
        return self.going or self.coming

    def opening(self, number: int) -> wire.ToEngine:
        self.under_way, self.coming = 0, self.saved is not None
        label = self.saved.label if self.saved else None
        return wire.OpenStream(number, self.live, self._samples, label, self._words, self._bias)

    def again(self) -> list[tuple[int, Windows | Piece]]:
        return [*self.heard, *self.pieces]

    def forget(self) -> None:
        if self.saved is not None:
            self.saved.close()
            self.saved = None

    def hand_over(self) -> Parcel | None:
        """Where it stood, for whoever takes it: it is closed there."""
        saved, self.saved = self.saved, None
        return saved

    def answered(self, number: int, state: bytes | None) -> Windows | Piece | None:
        self.under_way -= 1
        first = self.pieces[0] if self.pieces else None
        piece = super().answered(number, state)
        if first is not None and piece is not None:
            assert isinstance(piece, Piece)
            # Another process need not make the hypothesis again.
            self.heard.append((number, msgspec.structs.replace(piece, wanted=None)))
            self.over = piece.last
        return piece

    def failed(self, number: int) -> list[Windows | Piece]:
        """All of them: the process has dropped the stream. It may be a piece that was heard again."""
        self.over = True
        return super().drop()

    def drop(self) -> list[Windows | Piece]:
        self.over = self.over or bool(self.pieces)  # what follows would follow a gap
        return super().drop()


class Sessions(dict[int, Session]):
    """Those that are open, by number. One that is over is forgotten."""

    def answered(self, number: int, piece: int, state: bytes | None) -> Windows | Piece | None:
        """The piece that is answered, unless its session was closed meanwhile."""
        if (session := self.get(number)) is None:
            return None
        found = session.answered(piece, state)
        self._forget(number, session)
        return found

    def failed(self, number: int, piece: int) -> list[Windows | Piece]:
        """The pieces that are lost with that one."""
        if (session := self.get(number)) is None:
            return []
        lost = session.failed(piece)
        self._forget(number, session)
        return lost

    def drop(self, deaths: int = 0) -> list[Windows | Piece]:
        """Give up what is under way of those over which so many processes died."""
        lost: list[Windows | Piece] = []
        for number, session in [item for item in self.items() if item[1].deaths >= deaths]:
            lost += session.drop()
            self._forget(number, session)
        return lost

    def _forget(self, number: int, session: Session) -> None:
        if session.over:
            del self[number]
            session.forget()


def message(number: int, piece: Windows | Piece) -> wire.ToEngine:
    if isinstance(piece, Piece):
        return wire.PutPiece(piece.session, number, len(piece.pcm), piece.last, piece.wanted, piece.timed)
    return wire.Put(piece.session, number, len(piece.pcm))
