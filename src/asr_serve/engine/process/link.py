"""The loop in a process of its own, kept alive: what the server uses.

What callers give to a process is kept here until it is answered, audio and all. Should the process die, it goes to
the next: utterances from their start, sessions from the state that came with their last probabilities, sentences
from where they were last heard. So callers notice a pause and nothing else. What three processes died over is
given up: it may be what kills them. Questions are not kept: a second later nobody wants to know whose turn it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve.engine.client import Connect
from asr_serve.engine.process import wire
from asr_serve.engine.process.child import Child, RingSize
from asr_serve.engine.process.given import Given
from asr_serve.engine.process.pending import Answer, Session, Speech, Stream, Told, Work, unanswered
from asr_serve.engine.process.processes import Processes
from asr_serve.engine.process.renewal import Renewed
from asr_serve.engine.session import Piece, Utterance, Windows, reject
from asr_serve.engine.speaking.saying import Saying
from asr_serve.errors import AsrServeError, Cancelled
from asr_serve.speaker.local import LocalVoices

REPORT_TIMEOUT_S = 5.0
RENEW_S = 30.0
"""How long a process that another took the place of may take over what it has."""


class RemoteLink:
    """Speaks with the engine's process, whichever that is. Raises what loading raises."""

    def __init__(
        self,
        spec: wire.EngineSpec,
        ring: RingSize,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
    ) -> None:
        self.ring = ring
        self._on_done = on_done
        self._processes = Processes(spec, ring, self._tell, on_stop)
        self._lock = self._processes.lock
        self.ready = self._processes.ready
        self.card, self.turn_card = self.ready.card, self.ready.turn_card
        self.speakers = self.ready.speakers

    @property
    def state(self) -> str:
        return self._processes.state

    @property
    def restarts(self) -> int:
        return self._processes.restarts

    @property
    def moved(self) -> Counter[tuple[str, str]]:
        """Sessions and streams that went from one process to another, by what they are and how they went."""
        return self._processes.moved

    @property
    def moved_s(self) -> float:
        """How long streams' audio waited meanwhile."""
        return self._processes.moved_s

    @property
    def ring_depth(self) -> int:
        return child.writer.depth if (child := self._up) else 0

    @property
    def ring_full_waits(self) -> int:
        return child.writer.full_waits if (child := self._up) else 0

    @property
    def _current(self) -> Given:
        return self._processes.current

    @property
    def _up(self) -> Child | None:
        current = self._current
        return current.child if current.up else None

    # --- what callers want ----------------------------------------------------------------------------

    def submit(self, utterance: Utterance) -> None:
        with self._lock:
            self._processes.expect_open()
            self._current.submit(Work(utterance))

    def say(self, saying: Saying) -> None:
        with self._lock:
            self._processes.expect_open()
            self._current.submit(Speech(saying))

    def cancel(self, request_id: int) -> None:
        with self._lock:
            work = next((work for each in self._processes.all if (work := each.cancel(request_id))), None)
            self._processes.changed.notify_all()
        if work is not None:
            self._tell([work.answer(Cancelled("the request was cancelled"))])

    def open(self, session: int, live: bool) -> None:
        self._open(session, Session(live))

    def open_stream(self, stream: int, live: bool, samples: int | None, words: bool, bias: str) -> None:
        self._open(stream, Stream(live, samples, words, bias))

    def _open(self, number: int, session: Session) -> None:
        with self._lock:
            self._processes.expect_open()
            self._current.open(number, session)

    def put(self, windows: Windows | Piece) -> None:
        with self._lock:
            self._processes.expect_open()
            having = next((each for each in self._processes.all if windows.session in each.sessions), None)
            if having is not None:
                having.put(windows)
        if having is None:
            reject(windows.future, Cancelled("the session was closed"))

    put_piece = put

    def close_session(self, session: int) -> None:
        with self._lock:
            ended = next((ended for each in self._processes.all if (ended := each.close(session))), None)
            if self._processes.renewal is not None:
                self._processes.renewal.closed(session)
            self._processes.changed.notify_all()
        for windows in ended.drop() if ended else ():
            reject(windows.future, Cancelled("the session was closed"))

    close_stream = close_session

    def turn(self, pcm: np.ndarray, answer: Future[float]) -> None:
        with self._lock:
            self._processes.expect_open()
            if up := self._current.up:
                self._current.ask_turn(pcm, answer)
        if not up:
            answer.set_exception(unanswered("is being started again"))

    def voices(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalVoices]) -> None:
        with self._lock:
            self._processes.expect_open()
            if up := self._current.up:
                self._current.ask_voices(pcm, budget_samples, live, answer)
        if not up:
            answer.set_exception(unanswered("is being started again"))

    def report(self, timeout_s: float = REPORT_TIMEOUT_S) -> wire.Report | None:
        """What the engine says of itself; None while there is none, or when it does not answer in time."""
        answer: Future[wire.Report] = Future()
        with self._lock:
            if not self._current.up:
                return None
            self._current.ask(answer)
        try:
            return answer.result(timeout_s)
        except (TimeoutError, AsrServeError):
            return None

    def describe(self) -> dict[str, Any]:
        report = self.report()
        return {"state": self.state, "restarts": self.restarts, **(report.describe if report else {})}

    def renew(self, timeout_s: float = RENEW_S) -> Renewed:
        """Have another process take the place of this one, while people speak. See Processes.renew."""
        return self._processes.renew(timeout_s)

    def close(self) -> None:
        self._processes.close()

    def _tell(self, answers: Iterable[Answer | Told]) -> None:
        for answer in answers:
            if answer.samples is not None:
                self._on_done(answer.samples)
            answer.tell()


def remote(spec: wire.EngineSpec, ring: RingSize) -> Connect:
    """For EngineClient: an engine in a process of its own."""
    return lambda config, on_done, on_stop: RemoteLink(
        msgspec.structs.replace(spec, config=config), ring, on_done, on_stop
    )
