"""The loop in a process of its own, kept alive: what the server uses.

A process that dies, killed or crashed, is started again. What was in it is kept here until it is answered,
audio and all, and goes to the next process: utterances from their start, sessions from the state that came with
their last probabilities. So callers notice a pause and nothing else. What three processes died over is given up:
it may be what kills them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve.engine.client import Connect
from asr_serve.engine.process import wire
from asr_serve.engine.process.child import END_TIMEOUT_S, Child, RingSize, pause_s
from asr_serve.engine.process.pending import Session, Work
from asr_serve.engine.session import Utterance, Windows, reject, resolve
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed, EngineCrashed, EngineError, PeerGone

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Processes that may die while they work on one request."""
GIVE_UP_AFTER = 3
"""Starts in a row that fail; then waiting requests are rejected, new ones refused, and it is tried on."""
HEALTHY_S = 30.0
"""A process that lived this long died of something new: the next one starts without a pause."""
REPORT_TIMEOUT_S = 5.0
HUNG_S = 60.0
"""A process that gives no sign of life for so long is killed. No step takes a tenth of it."""
LOAD_S = 1_800.0
"""The same while it loads: weights may come over a slow line."""


class RemoteLink:
    """Speaks with the engine's process and starts another when it dies. Raises what loading raises."""

    def __init__(
        self,
        spec: wire.EngineSpec,
        ring: RingSize,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
    ) -> None:
        self.spec, self.ring = spec, ring
        self._on_done, self._on_stop = on_done, on_stop
        self._lock = threading.Lock()  # of what follows, and of the order of messages
        self._child: Child | None = None
        self._work: dict[int, Work] = {}
        self._sessions: dict[int, Session] = {}
        self._questions: dict[int, Future[wire.Report]] = {}
        self._asked = 0
        self._state = "loading"
        self._closing = threading.Event()
        self._current: Child | None = None
        self._sign_at, self._sign_within_s = time.monotonic(), LOAD_S
        self.restarts = 0
        first: Future[wire.Ready] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(first,), name=f"asr-serve {spec.model} link", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._watch, name=f"asr-serve {spec.model} watch", daemon=True).start()
        self.ready = first.result()
        self.card = self.ready.card

    @property
    def state(self) -> str:
        return self._state

    @property
    def ring_depth(self) -> int:
        return child.writer.depth if (child := self._child) else 0

    @property
    def ring_full_waits(self) -> int:
        return child.writer.full_waits if (child := self._child) else 0

    # --- what callers want ----------------------------------------------------------------------------

    def submit(self, utterance: Utterance) -> None:
        with self._lock:
            self._expect_open()
            work = self._work[utterance.id] = Work(utterance)
            self._send_work(work)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            work = self._work.pop(request_id, None)
            if work is None:
                return
            self._send(wire.Cancel(request_id))
        self._reject(work, Cancelled("the request was cancelled"))

    def open(self, session: int, live: bool) -> None:
        with self._lock:
            self._expect_open()
            self._sessions[session] = Session(live)
            self._send(wire.OpenSession(session, live, None))

    def put(self, windows: Windows) -> None:
        with self._lock:
            self._expect_open()
            session = self._sessions.get(windows.session)
            if session is not None:
                self._send_piece(session.put(windows), windows)
        if session is None:
            reject(windows.future, Cancelled("the session was closed"))

    def close_session(self, session: int) -> None:
        with self._lock:
            ended = self._sessions.pop(session, None)
            if ended is not None:
                self._send(wire.CloseSession(session))
        for windows in ended.drop() if ended else ():
            reject(windows.future, Cancelled("the session was closed"))

    def report(self, timeout_s: float = REPORT_TIMEOUT_S) -> wire.Report | None:
        """What the engine says of itself; None while there is none, or when it does not answer in time."""
        answer: Future[wire.Report] = Future()
        with self._lock:
            if self._child is None:
                return None
            self._asked += 1
            number = self._asked
            self._questions[number] = answer
            self._send(wire.Ask(number))
        try:
            return answer.result(timeout_s)
        except (TimeoutError, EngineError):
            return None
        finally:
            with self._lock:
                self._questions.pop(number, None)

    def describe(self) -> dict[str, Any]:
        report = self.report()
        return {"state": self._state, "restarts": self.restarts, **(report.describe if report else {})}

    def close(self) -> None:
        self._closing.set()
        current = self._current
        if current is not None:
            # A process that hangs may hold up us, and somebody who has the lock; killed, it does not.
            last = threading.Timer(END_TIMEOUT_S, current.kill)
            last.daemon = True
            last.start()
            with self._lock:
                self._send(wire.Stop())
            current.end()
            last.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- messages, under the lock -----------------------------------------------------------------------

    def _expect_open(self) -> None:
        if self._closing.is_set():
            raise EngineClosed("the engine is closed", todo="load the model again")
        if self._state == "failed":
            raise EngineClosed("the engine cannot be started at the moment", todo="try again later")

    def _send(self, message: wire.ToEngine, pcm: np.ndarray | None = None, session: int = 0) -> None:
        """Nothing is lost while there is no process: whatever is pending goes to the next."""
        if self._child is None:
            return
        try:
            self._child.send(message, pcm, session)
        except (OSError, PeerGone):
            # Whether it died or only its pipe broke: half a message is in there, it is of no more use.
            self._child.kill()
            self._child = None

    def _send_work(self, work: Work) -> None:
        utterance = work.utterance
        assert utterance.pcm is not None
        self._send(
            wire.Submit(
                utterance.id,
                len(utterance.pcm),
                utterance.samples,
                utterance.options,
                utterance.priority,
                utterance.draft,
                utterance.within_ms,
                utterance.submitted_ns,
            ),
            utterance.pcm,
            utterance.id,
        )

    def _send_piece(self, piece: int, windows: Windows) -> None:
        self._send(wire.Put(windows.session, piece, len(windows.pcm)), windows.pcm, windows.session)

    # --- the process's life, on the link's own thread ---------------------------------------------------

    def _live(self, first: Future[wire.Ready]) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            self._keep_one_alive(first)
        except AsrServeError as failure:
            error = failure
        finally:  # whatever happens, nobody waits for ever
            if not first.done():
                first.set_exception(error)
            self._finish(error)

    def _keep_one_alive(self, first: Future[wire.Ready]) -> None:
        """Until closed. Raises what the first start raises; later ones are tried again."""
        troubles = failed_starts = 0
        while not self._closing.wait(pause_s(troubles)):
            started = time.monotonic()
            try:
                child, ready = self._start()
            except AsrServeError as failure:
                if not first.done():
                    raise
                troubles, failed_starts = troubles + 1, failed_starts + 1
                log.error("the engine could not be started again: %s", failure)
                if failed_starts >= GIVE_UP_AFTER:
                    self._give_up()
                continue
            failed_starts = 0
            self._revive(child)
            if not first.done():
                first.set_result(ready)
            else:
                self.restarts += 1
                log.warning("the engine is back after %.1f s", time.monotonic() - started)
            self._listen(child)
            with self._lock:
                self._child = None
                if not self._closing.is_set():
                    self._state = "restarting"
            code = child.end()
            child.close()
            if not self._closing.is_set():
                log.error("the engine process died (%s); starting another", code)
                self._strike(code)
                troubles = 0 if time.monotonic() - started > HEALTHY_S else troubles + 1

    def _start(self) -> tuple[Child, wire.Ready]:
        """A process whose model is loaded. Raises what loading raises, EngineClosed."""
        self._sign_at, self._sign_within_s = time.monotonic(), LOAD_S
        child = self._current = Child.start(self.spec, self.ring)
        if self._closing.is_set():  # `close` may have looked before there was one
            child.kill()
        try:
            return child, child.wait_ready(self._forward)
        except AsrServeError:
            child.end()
            child.close()
            raise

    def _revive(self, child: Child) -> None:
        """Everything that waits goes to the new process, in the order in which it came."""
        self._sign_at, self._sign_within_s = time.monotonic(), HUNG_S
        with self._lock:
            self._child = child
            for number, session in self._sessions.items():
                self._send(wire.OpenSession(number, session.live, session.state))
                for piece, windows in session.pieces:
                    self._send_piece(piece, windows)
            for work in self._work.values():
                self._send_work(work)
            self._state = "ready"

    def _listen(self, child: Child) -> None:
        """Until the process is gone."""
        while (message := child.receive()) is not None:
            self._sign_at = time.monotonic()
            self._take(message)

    def _watch(self) -> None:
        """Kill a process that gives no sign of life: it is asked for one again and again.

        Waits for no lock: whoever holds it may wait for that process.
        """
        while not self._closing.wait(HUNG_S / 10):
            if self._lock.acquire(timeout=1):
                try:
                    self._send(wire.Ping())
                finally:
                    self._lock.release()
            if time.monotonic() - self._sign_at > self._sign_within_s and (current := self._current) is not None:
                log.error("the engine gave no sign of life for %.0f s: it is killed", self._sign_within_s)
                self._sign_at = time.monotonic()
                current.kill()

    def _take(self, message: wire.ToServer) -> None:
        match message:
            case wire.Done(id=request_id, recognition=recognition):
                with self._lock:
                    work = self._work.pop(request_id, None)
                if work is not None:
                    self._on_done(work.utterance.samples)
                    resolve(work.utterance.future, recognition)
            case wire.Heard(session=number, piece=piece, probabilities=data, state=state):
                if (windows := self._heard(number, piece, state)) is not None:
                    resolve(windows.future, np.frombuffer(data, np.float32))
            case wire.Failed(id=number, failure=failure, piece=None):
                with self._lock:
                    work = self._work.pop(number, None)
                if work is not None:
                    self._reject(work, failure.error())
            case wire.Failed(id=number, failure=failure, piece=int(piece)):
                if (windows := self._heard(number, piece, None)) is not None:
                    reject(windows.future, failure.error())
            case wire.Started(ids=ids):
                with self._lock:
                    for request_id in ids:
                        if (work := self._work.get(request_id)) is not None:
                            work.started = True
            case wire.Report(number=number):
                with self._lock:
                    answer = self._questions.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                self._forward(message)

    def _heard(self, number: int, piece: int, state: bytes | None) -> Windows | None:
        """The piece that is answered, unless its session was closed meanwhile."""
        with self._lock:
            session = self._sessions.get(number)
            return session.answered(piece, state) if session is not None else None

    def _forward(self, message: wire.ToServer) -> None:
        if isinstance(message, wire.Log):
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    # --- endings ------------------------------------------------------------------------------------

    def _strike(self, code: str) -> None:
        """Give up what too many processes were working on when they died."""
        error = EngineCrashed(
            f"the engine process died {MAX_DEATHS} times while it worked on this request ({code})",
            todo="do not send it again",
        )
        with self._lock:
            for question in self._questions.values():
                reject(question, error)
            for work in self._work.values():
                work.deaths += work.started
                work.started = False
            for session in self._sessions.values():
                session.deaths += bool(session.pieces)
            lost = [work for work in self._work.values() if work.deaths >= MAX_DEATHS]
            for work in lost:
                del self._work[work.utterance.id]
            pieces = [w for s in self._sessions.values() if s.deaths >= MAX_DEATHS for w in s.drop()]
        for work in lost:
            self._reject(work, error)
        for windows in pieces:
            reject(windows.future, error)

    def _give_up(self) -> None:
        """Nobody may wait for an engine that will not start. Why is in the log: it is not for clients."""
        with self._lock:
            self._state = "failed"
        self._reject_all(EngineClosed("the engine cannot be started at the moment", todo="try again later"))

    def _finish(self, error: AsrServeError) -> None:
        self._closing.set()
        with self._lock:  # whoever comes after us sees that it is closed, whoever came before is rejected
            self._state = "closed"
        self._on_stop()
        self._reject_all(error)

    def _reject_all(self, error: AsrServeError) -> None:
        with self._lock:
            self._child = None
            work, self._work = list(self._work.values()), {}
            pieces = [windows for session in self._sessions.values() for windows in session.drop()]
        for each in work:
            self._reject(each, error)
        for windows in pieces:
            reject(windows.future, error)

    def _reject(self, work: Work, error: Exception) -> None:
        self._on_done(work.utterance.samples)
        reject(work.utterance.future, error)


def remote(spec: wire.EngineSpec, ring: RingSize) -> Connect:
    """For EngineClient: an engine in a process of its own."""

    return lambda config, on_done, on_stop: RemoteLink(
        msgspec.structs.replace(spec, config=config), ring, on_done, on_stop
    )
