"""The processes of one engine: the one that works, kept alive; and another in its place.

A process that dies, killed or crashed, is started again, and what it was given goes to the next. One that lives
can be renewed: another takes its place while it finishes what it has, and whoever speaks goes over in the middle
of a sentence.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from asr_serve.engine.process import wire
from asr_serve.engine.process.child import END_TIMEOUT_S, Child, Left, RingSize, pause_s
from asr_serve.engine.process.given import Given
from asr_serve.engine.process.pending import Answer, Told, unanswered
from asr_serve.engine.process.renewal import Renewal, Renewed
from asr_serve.errors import AsrServeError, EngineClosed, NotAllowed

log = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Starts in a row that fail; then waiting requests are rejected, new ones refused, and it is tried on."""
HEALTHY_S = 30.0
"""A process that lived this long died of something new: the next one starts without a pause."""
HUNG_S = 60.0
"""A process that gives no sign of life for so long is killed. No step takes a tenth of it."""
LOAD_S = 1_800.0
"""The same while it loads: weights may come over a slow line."""


class Processes:
    """Each has a thread here that listens to it. Raises what loading raises."""

    def __init__(
        self,
        spec: wire.EngineSpec,
        ring: RingSize,
        tell: Callable[[Sequence[Answer | Told]], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._spec, self._ring = spec, ring
        self._tell, self._on_stop = tell, on_stop
        self.lock = threading.Lock()
        """Of what follows, and of the order of messages. The server's event loop takes it, so that whoever has it
        waits for no process."""
        self.changed = threading.Condition(self.lock)
        """To be notified when somebody's work has ended."""
        self.current = Given()
        """Of the process that takes what is new, or of the next."""
        self.renewal: Renewal | None = None
        """While there is one before that still."""
        self.state = "loading"
        self.restarts = 0
        self.moved: Counter[tuple[str, str]] = Counter()
        """Sessions and streams that went from one process to another, by what they are and how they went."""
        self.moved_s = 0.0
        """How long streams' audio waited meanwhile."""
        self._coming: Given | None = None
        """A renewal is under way: of the process that it has started."""
        self._closing = threading.Event()
        self._starting = threading.Lock()  # one process loads at a time, and it may be what another waits for
        self._keepers: dict[Given, threading.Thread] = {}
        first: Future[wire.Ready] = Future()
        self._keep(self.current, first)
        threading.Thread(target=self._watch, name=f"asr-serve {spec.model} watch", daemon=True).start()
        self.ready = first.result()

    @property
    def all(self) -> list[Given]:
        """That there are at the moment."""
        renewal = self.renewal
        old = renewal.old if renewal else None
        return list(dict.fromkeys(each for each in (self.current, old, self._coming) if each is not None))

    def expect_open(self) -> None:
        if self._closing.is_set():
            raise EngineClosed("the engine is closed", todo="load the model again")
        if self.state == "failed":
            raise EngineClosed("the engine cannot be started at the moment", todo="try again later")

    # --- another process in the place of one that lives ---------------------------------------------------

    def renew(self, timeout_s: float) -> Renewed:
        """Start another process and have it take over; blocks until the old one is gone.

        What is new goes to the new one as soon as it is there. The old one finishes the requests that it has, for
        `timeout_s` at most; what is left then is done by the new one. Should one of the two die meanwhile, what it
        had goes to the other, or to the next. Until the new one is there nothing changes: what loading raises is
        raised, and the old one stays. Raises NotAllowed while another renewal is under way, or of an engine that
        encodes for others; EngineClosed.
        """
        if self._spec.config.role == "encode":
            raise NotAllowed(
                "a renewal of an engine that encodes for others",
                "it has a port, which two cannot have",
                "start it again: who asks it has others, or encodes itself meanwhile",
            )
        started_s = time.monotonic()
        with self.lock:
            self.expect_open()
            if self.state != "ready":
                raise EngineClosed(f"the engine is {self.state}", todo="try again when it is ready")
            if self._coming is not None:
                raise NotAllowed("the engine is being renewed", "one renewal at a time", "wait for that one")
            coming = self._coming = Given()
        try:
            renewal, load_s = self._replace(coming), time.monotonic() - started_s
            self._move(renewal, timeout_s)
        finally:
            with self.lock:
                self._coming = None
                self.changed.notify_all()
        found = Renewed(
            renewal.moved["session", "state"],
            renewal.moved["stream", "state"],
            renewal.moved["stream", "replay"],
            renewal.repeated,
            round(load_s, 3),
            round(time.monotonic() - started_s, 3),
        )
        log.info("the engine was renewed: %s", found)
        return found

    def _replace(self, coming: Given) -> Renewal:
        with self._starting:
            ready = self._start(coming)
            with self.lock:
                same = _facts(ready) == _facts(self.ready)
                if same and not self._closing.is_set():
                    renewal = self.renewal = Renewal(self.current, coming)
                    assert coming.child is not None
                    coming.child.patience_s = HUNG_S
                    self.current, self.state = coming, "ready"
                    coming.begin()
                    self._keep(coming)
                    renewal.begin()
                    self.changed.notify_all()
                    return renewal
        assert coming.child is not None
        _end(coming.child)
        if same:
            raise EngineClosed("the engine was closed")
        raise NotAllowed(
            "the model's files are not those that were loaded",
            "a renewal of the same model",
            "unload it and load it",
        )

    def _move(self, renewal: Renewal, timeout_s: float) -> None:
        try:
            with self.changed:
                self.changed.wait_for(lambda: renewal.finished or self._closing.is_set(), timeout_s)
        finally:  # also where whoever asked is interrupted
            self._part(renewal)
        if self._closing.is_set():
            raise EngineClosed("the engine was closed")

    def _part(self, renewal: Renewal) -> None:
        """From the old one."""
        last = threading.Timer(END_TIMEOUT_S, renewal.old.process.kill)  # see `close`
        last.daemon = True
        last.start()
        with self.lock:
            if not self._closing.is_set():
                renewal.inherit()
            renewal.old.stop()
            keeper = self._keepers[renewal.old]
        keeper.join()
        last.cancel()
        with self.lock:
            del self._keepers[renewal.old]
            self.renewal = None
            self.moved += renewal.moved
            self.moved_s += renewal.waited_s

    # --- a process's life, on a thread of its own -------------------------------------------------------

    def _keep(self, given: Given, first: Future[wire.Ready] | None = None) -> None:
        """A thread for it. `first`: where it is to be started, too."""
        thread = self._keepers[given] = threading.Thread(
            target=self._live, args=(given, first), name=f"asr-serve {self._spec.model} link", daemon=True
        )
        thread.start()

    def _live(self, given: Given, first: Future[wire.Ready] | None) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            if first is not None:
                ready = self._start(given)
                self._revive(given)
                first.set_result(ready)
            self._keep_alive(given)
        except AsrServeError as failure:
            error = failure
        except Exception as failure:
            log.exception("what the engine process said cannot be taken: it is given up")
            error = EngineClosed(f"the engine was given up: {type(failure).__name__}", todo="load the model again")
            if given.child is not None:
                _end(given.child)
        finally:  # whatever happens, nobody waits for ever
            if first is not None and not first.done():
                first.set_exception(error)
            self._finish(given, error)

    def _keep_alive(self, given: Given) -> None:
        """Until closed, or until another has taken its place."""
        troubles, started_s = 0, time.monotonic()
        while True:
            code = self._listen(given)
            if self._closing.is_set() or given.stopped:
                return
            log.error("the engine process died (%s)", code)
            with self.lock:
                answers = given.strike(code)
                self._hurry()
            self._tell(answers)
            troubles = 0 if time.monotonic() - started_s > HEALTHY_S else troubles + 1
            started_s = time.monotonic()
            if not self._start_again(given, troubles):
                return
            self.restarts += 1
            log.warning("the engine is back after %.1f s", time.monotonic() - started_s)

    def _listen(self, given: Given) -> str:
        """Until the process is gone; how it went."""
        child = given.child
        assert child is not None
        while (message := child.receive()) is not None:
            self._take(given, message)
        with self.lock:
            given.up = False
            if given is self.current and not self._closing.is_set():
                self.state = "restarting"
        code = child.end()
        child.close()
        return code

    def _start(self, given: Given) -> wire.Ready:
        """A process whose model is loaded. Raises what loading raises, EngineClosed."""
        child = given.child = Child.start(self._spec, self._ring)
        with self.lock:
            child.patience_s = LOAD_S
            self._hurry()
        if self._closing.is_set():  # `close` may have looked before there was one
            child.kill()
        with contextlib.ExitStack() as undo:
            undo.callback(_end, child)
            ready = child.wait_ready(self._forward)
            undo.pop_all()
        return ready

    def _hurry(self) -> None:
        """The current one is gone, and what a renewal loads in its place is what callers wait for. Its files are
        here, since the first one loaded them: if it hangs it is killed, and another is started as after any death.
        """
        coming = self._coming
        if self.state == "ready" or coming is None or coming is self.current:
            return
        if coming.child is not None:
            patience_s = HUNG_S + 2 * self.ready.load_s
            coming.child.patience_s = min(coming.child.patience_s, patience_s)

    def _start_again(self, given: Given, troubles: int) -> bool:
        """False: there is no need any more."""
        failed = 0
        while self._wanted(given, pause_s(troubles)):
            with self._starting:
                if not self._wanted(given):
                    return False
                try:
                    self._start(given)
                except AsrServeError as failure:
                    troubles, failed = troubles + 1, failed + 1
                    log.error("the engine could not be started again: %s", failure)
                    if failed >= GIVE_UP_AFTER:
                        self._give_up()
                    continue
            self._revive(given)
            return True
        return False

    def _wanted(self, given: Given, after_s: float = 0.0) -> bool:
        """Whether there must be another process for it. What a renewal has loaded meanwhile will do."""
        with self.changed:
            return not self.changed.wait_for(lambda: self._closing.is_set() or given is not self.current, after_s)

    def _revive(self, given: Given) -> None:
        with self.lock:
            assert given.child is not None
            given.child.patience_s = HUNG_S
            given.begin()
            if self.renewal is not None:
                self.renewal.began()
                self.changed.notify_all()
            self.state = "ready"

    def _watch(self) -> None:
        """Kill a process that gives no sign of life: it is asked for one again and again. Keeps hold of none: the
        memory of a dead one would stay."""
        while not self._closing.wait(HUNG_S / 10):
            self._ping()
            self._kill_the_silent()

    def _ping(self) -> None:
        """Those whose pipe is full too: what is sent waits for room on another thread (Child.send)."""
        with self.lock:
            for given in self.all:
                given.send(wire.Ping())

    def _kill_the_silent(self) -> None:
        for child in [each.child for each in self.all]:
            if child is not None and child.silent:
                log.error("the engine gave no sign of life for %.0f s: it is killed", child.patience_s)
                child.kill()

    def _kill(self) -> None:
        for given in self.all:
            if given.child is not None:
                given.child.kill()

    def _take(self, given: Given, message: wire.ToServer | Left) -> None:
        if isinstance(message, wire.Log):
            self._forward(message)
            return
        with self.lock:
            answers = given.take(message)
            if self.renewal is not None:
                self.renewal.heard(given, message)
                self.changed.notify_all()
        self._tell(answers)

    def _forward(self, message: wire.ToServer | Left) -> None:
        if isinstance(message, wire.Log):
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    # --- endings ------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing.set()
        # A process that hangs may hold us up; killed, it does not.
        last = threading.Timer(END_TIMEOUT_S, self._kill)
        last.daemon = True
        last.start()
        with self.lock:
            for given in self.all:
                given.stop()
            self.changed.notify_all()
            keepers = list(self._keepers.values())
        if threading.current_thread() not in keepers:
            for keeper in keepers:
                keeper.join()
            with self.lock:
                self.changed.wait_for(lambda: self._coming is None)
        last.cancel()

    def _give_up(self) -> None:
        """Nobody may wait for an engine that will not start. Why is in the log: it is not for clients."""
        with self.lock:
            self.state = "failed"
            answers = self.current.drop(
                EngineClosed("the engine cannot be started at the moment", todo="try again later")
            )
        self._tell(answers)

    def _finish(self, given: Given, error: AsrServeError) -> None:
        """Its process is gone, and no other will be started for it."""
        with self.lock:
            last = given is self.current
            if last:  # whoever comes after us sees that it is closed, whoever came before is rejected
                self._closing.set()
                self.state = "closed"
            if self.renewal is not None and self.renewal.old is given and not self._closing.is_set():
                self.renewal.inherit()
                error = unanswered("was replaced")
            answers = given.drop(error)
            self.changed.notify_all()
        if last:
            self._on_stop()
        self._tell(answers)


def _facts(ready: wire.Ready) -> tuple[object, ...]:
    """Of a process, that another in its place must share."""
    return ready.card, ready.turn_card, ready.fingerprint


def _end(child: Child) -> None:
    """One that nobody has given anything."""
    child.kill()
    child.end()
    child.close()
