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
from typing import Literal, NamedTuple

from asr_serve.engine.process import messages
from asr_serve.engine.process.in_flight import (
    InFlight,
    InFlightSession,
    InFlightStream,
    PendingAnswer,
    SoundAnswer,
    unanswered_query,
)
from asr_serve.engine.process.process import (
    EXIT_TIMEOUT_S,
    EngineProcess,
    ExportedStream,
    RingSize,
    restart_pause_s,
)
from asr_serve.errors import AsrServeError, EngineClosed, NotAllowed
from asr_serve.transfer.sealed_buffer import SealedBuffer

MAX_STREAMS_MOVING = 8
"""Streams on their way at once. Each is some MB of memory meanwhile, and its audio waits; the others go on."""

HandoverMode = Literal["state", "replay"]
"""From where it stood; or heard again from its start."""
HandoverKind = Literal["session", "stream"]


class HandoverResult(NamedTuple):
    """What has become of an engine process that another took the place of."""

    sessions: int
    """Callers whose voice activity is followed, that went over; all of them from where they stood."""
    streams: int
    """Streams that went over from where they stood."""
    replayed: int
    """Those that were heard again from their start instead."""
    repeated: int
    """Requests that the old process did not finish in time: the new one begins them again."""
    load_s: float
    """Until the new process was there."""
    total_s: float
    """Until the old one was gone."""


class Handover:
    """Sessions go over at once. Streams do a few at a time: no more of one is sent to the old process; when that
    has answered what it has, it says where the stream stands; the new one goes on from there, with what has come
    meanwhile. What can't go that way is heard again. Requests stay where they are. Under the lock of Processes."""

    def __init__(self, old: InFlight, new: InFlight) -> None:
        self.old, self.new = old, new
        self.moved: Counter[tuple[HandoverKind, HandoverMode]] = Counter()
        self.repeated_requests = 0
        self.waited_s = 0.0
        """How long the audio of all streams together waited on their way."""
        self._moving_since_s: dict[int, float] = {}
        """Those on their way: since when, on the monotonic clock."""

    @property
    def finished(self) -> bool:
        return self.old.idle and not self._moving_since_s

    def start(self) -> None:
        for number, session in list(self.old.sessions.items()):
            if not isinstance(session, InFlightStream):
                self.old.close(number)
                self._transfer_session(number, session)
        self._move_more()

    def on_message(self, given: InFlight, message: messages.ToServer | ExportedStream) -> None:
        """After `given` took it."""
        match message:
            case messages.StreamOutput(session=number) | messages.RequestFailed(id=number, chunk=int()) if (
                given is self.old
            ):
                if number in self._moving_since_s:
                    self._request_export(number)
            case ExportedStream(session=number, saved=saved) if given is self.old:
                self._on_exported(number, saved)
            case ExportedStream(saved=SealedBuffer() as nobodys):
                nobodys.close()
            case messages.StreamOpened(session=number, failure=failure) if given is self.new:
                self._on_arrived(number, "replay" if failure else "state")
            case messages.StreamOpened(session=number) if (
                number in self._moving_since_s
            ):  # of a renewal before, that took too long
                self._request_export(number)

    def on_closed(self, number: int) -> None:
        """Its caller went away."""
        if self._moving_since_s.pop(number, None) is not None:
            self._move_more()

    def on_new_process_restarted(self) -> None:
        """The new process died, and another has begun in its place."""
        for number in list(self._moving_since_s):
            stream = self.new.sessions.get(number)
            if isinstance(stream, InFlightStream) and not stream.restoring:
                self._on_arrived(number, "replay" if stream.answered_chunks else "state")

    def transfer_remaining(self) -> None:
        """The old process is gone, or is to go: what it has not done is done by the new one."""
        sessions, self.old.sessions = self.old.sessions, type(self.old.sessions)()
        for number, session in sessions.items():
            self._transfer_session(number, session)
        work, self.old.requests = self.old.requests, {}
        for each in work.values():
            each.started = False
            self.new.submit(each)
            self.repeated_requests += 1

    def _move_more(self) -> None:
        """Let some more streams go."""
        for number, stream in self.old.sessions.items():
            if len(self._moving_since_s) >= MAX_STREAMS_MOVING:
                return
            if number not in self._moving_since_s and isinstance(stream, InFlightStream):
                self._moving_since_s[number] = time.monotonic()
                stream.leaving = True
                self._request_export(number)

    def _request_export(self, number: int) -> None:
        """Where it stands, once the process has answered all that it was sent."""
        stream = self.old.sessions.get(number)
        if not isinstance(stream, InFlightStream):  # it has ended, or was lost
            self.on_closed(number)
        elif not stream.unanswered_chunks and not stream.restoring:
            self.old.send(messages.ExportStream(number))

    def _on_exported(self, number: int, saved: SealedBuffer | None) -> None:
        stream = self.old.sessions.get(number)
        if not isinstance(stream, InFlightStream):  # closed meanwhile
            if saved is not None:
                saved.close()
            return
        self.old.close(number)
        stream.saved = saved
        self._transfer_session(number, stream)

    def _transfer_session(self, number: int, session: InFlightSession) -> None:
        if not isinstance(session, InFlightStream):
            self.moved["session", "state"] += 1
            self.new.open(number, session)
            return
        session.leaving = session.restoring = False
        self._moving_since_s.setdefault(number, time.monotonic())
        self.new.open(number, session)
        if session.saved is None and not session.restoring:
            self._on_arrived(number, "replay" if session.answered_chunks else "state")

    def _on_arrived(self, number: int, how: HandoverMode) -> None:
        if (since_s := self._moving_since_s.pop(number, None)) is not None:
            self.moved["stream", how] += 1
            self.waited_s += time.monotonic() - since_s
            self._move_more()


log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Starts in a row that fail; then waiting requests are rejected, new ones refused, and it is tried on."""
HEALTHY_S = 30.0
"""A process that lived this long died of something new: the next one starts without a pause."""
HANG_TIMEOUT_S = 60.0
"""A process that gives no sign of life for so long is killed. No step takes a tenth of it."""
LOAD_TIMEOUT_S = 1_800.0
"""The same while it loads: weights may come over a slow line."""


class Supervisor:
    """Each has a thread here that listens to it. Raises what loading raises."""

    def __init__(
        self,
        spec: messages.EngineSpec,
        ring: RingSize,
        tell: Callable[[Sequence[PendingAnswer | SoundAnswer]], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._spec, self._ring = spec, ring
        self._tell, self._on_stop = tell, on_stop
        self.lock = threading.Lock()
        """Of what follows, and of the order of messages. The server's event loop takes it, so that whoever has it
        waits for no process."""
        self.changed = threading.Condition(self.lock)
        """To be notified when somebody's work has ended."""
        self.current = InFlight()
        """Of the process that takes what is new, or of the next."""
        self.handover: Handover | None = None
        """While there is one before that still."""
        self.state = "loading"
        self.restarts = 0
        self.moved: Counter[tuple[str, str]] = Counter()
        """Sessions and streams that went from one process to another, by what they are and how they went."""
        self.moved_s = 0.0
        """How long streams' audio waited meanwhile."""
        self._replacement: InFlight | None = None
        """A renewal is under way: of the process that it has started."""
        self._closing = threading.Event()
        self._starting = threading.Lock()  # one process loads at a time, and it may be what another waits for
        self._keepers: dict[InFlight, threading.Thread] = {}
        first: Future[messages.EngineReady] = Future()
        self._start_keeper(self.current, first)
        threading.Thread(target=self._watch, name=f"asr-serve {spec.model} watch", daemon=True).start()
        self.ready = first.result()

    @property
    def in_flights(self) -> list[InFlight]:
        """That there are at the moment."""
        renewal = self.handover
        old = renewal.old if renewal else None
        return list(dict.fromkeys(each for each in (self.current, old, self._replacement) if each is not None))

    def expect_open(self) -> None:
        if self._closing.is_set():
            raise EngineClosed("the engine is closed", todo="load the model again")
        if self.state == "failed":
            raise EngineClosed("the engine cannot be started at the moment", todo="try again later")

    # --- another process in the place of one that lives ---------------------------------------------------

    def renew(self, timeout_s: float) -> HandoverResult:
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
            if self._replacement is not None:
                raise NotAllowed("the engine is being renewed", "one renewal at a time", "wait for that one")
            coming = self._replacement = InFlight()
        try:
            renewal, load_s = self._replace_process(coming), time.monotonic() - started_s
            self._hand_over(renewal, timeout_s)
        finally:
            with self.lock:
                self._replacement = None
                self.changed.notify_all()
        found = HandoverResult(
            renewal.moved["session", "state"],
            renewal.moved["stream", "state"],
            renewal.moved["stream", "replay"],
            renewal.repeated_requests,
            round(load_s, 3),
            round(time.monotonic() - started_s, 3),
        )
        log.info("the engine was renewed: %s", found)
        return found

    def _replace_process(self, coming: InFlight) -> Handover:
        with self._starting:
            ready = self._start(coming)
            with self.lock:
                same = _comparable_facts(ready) == _comparable_facts(self.ready)
                if same and not self._closing.is_set():
                    renewal = self.handover = Handover(self.current, coming)
                    assert coming.current_process is not None
                    coming.current_process.hang_timeout_s = HANG_TIMEOUT_S
                    self.current, self.state = coming, "ready"
                    coming.replay_all()
                    self._start_keeper(coming)
                    renewal.start()
                    self.changed.notify_all()
                    return renewal
        assert coming.current_process is not None
        _end_unused(coming.current_process)
        if same:
            raise EngineClosed("the engine was closed")
        raise NotAllowed(
            "the model's files are not those that were loaded",
            "a renewal of the same model",
            "unload it and load it",
        )

    def _hand_over(self, renewal: Handover, timeout_s: float) -> None:
        try:
            with self.changed:
                self.changed.wait_for(lambda: renewal.finished or self._closing.is_set(), timeout_s)
        finally:  # also where whoever asked is interrupted
            self._retire_old(renewal)
        if self._closing.is_set():
            raise EngineClosed("the engine was closed")

    def _retire_old(self, renewal: Handover) -> None:
        """From the old one."""
        last = threading.Timer(EXIT_TIMEOUT_S, renewal.old.process.kill)  # see `close`
        last.daemon = True
        last.start()
        with self.lock:
            if not self._closing.is_set():
                renewal.transfer_remaining()
            renewal.old.request_stop()
            keeper = self._keepers[renewal.old]
        keeper.join()
        last.cancel()
        with self.lock:
            del self._keepers[renewal.old]
            self.handover = None
            self.moved += renewal.moved
            self.moved_s += renewal.waited_s

    # --- a process's life, on a thread of its own -------------------------------------------------------

    def _start_keeper(self, given: InFlight, first: Future[messages.EngineReady] | None = None) -> None:
        """A thread for it. `first`: where it is to be started, too."""
        thread = self._keepers[given] = threading.Thread(
            target=self._run_keeper, args=(given, first), name=f"asr-serve {self._spec.model} link", daemon=True
        )
        thread.start()

    def _run_keeper(self, given: InFlight, first: Future[messages.EngineReady] | None) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            if first is not None:
                ready = self._start(given)
                self._resume_process(given)
                first.set_result(ready)
            self._keep_alive(given)
        except AsrServeError as failure:
            error = failure
        except Exception as failure:
            log.exception("what the engine process said cannot be taken: it is given up")
            error = EngineClosed(f"the engine was given up: {type(failure).__name__}", todo="load the model again")
            if given.current_process is not None:
                _end_unused(given.current_process)
        finally:  # whatever happens, nobody waits for ever
            if first is not None and not first.done():
                first.set_exception(error)
            self._fail_remaining(given, error)

    def _keep_alive(self, given: InFlight) -> None:
        """Until closed, or until another has taken its place."""
        troubles, started_s = 0, time.monotonic()
        while True:
            code = self._receive_until_exit(given)
            if self._closing.is_set() or given.stopped:
                return
            log.error("the engine process died (%s)", code)
            with self.lock:
                answers = given.record_death(code)
                self._speed_up_replacement()
            self._tell(answers)
            troubles = 0 if time.monotonic() - started_s > HEALTHY_S else troubles + 1
            started_s = time.monotonic()
            if not self._restart(given, troubles):
                return
            self.restarts += 1
            log.warning("the engine is back after %.1f s", time.monotonic() - started_s)

    def _receive_until_exit(self, given: InFlight) -> str:
        """Until the process is gone; how it went."""
        child = given.current_process
        assert child is not None
        while (message := child.receive()) is not None:
            self._handle_message(given, message)
        with self.lock:
            given.process_ready = False
            if given is self.current and not self._closing.is_set():
                self.state = "restarting"
        code = child.join_or_kill()
        child.close()
        return code

    def _start(self, given: InFlight) -> messages.EngineReady:
        """A process whose model is loaded. Raises what loading raises, EngineClosed."""
        child = given.current_process = EngineProcess.start(self._spec, self._ring)
        with self.lock:
            child.hang_timeout_s = LOAD_TIMEOUT_S
            self._speed_up_replacement()
        if self._closing.is_set():  # `close` may have looked before there was one
            child.kill()
        with contextlib.ExitStack() as undo:
            undo.callback(_end_unused, child)
            ready = child.wait_ready(self._forward)
            undo.pop_all()
        return ready

    def _speed_up_replacement(self) -> None:
        """The current one is gone, and what a renewal loads in its place is what callers wait for. Its files are
        here, since the first one loaded them: if it hangs it is killed, and another is started as after any death.
        """
        coming = self._replacement
        if self.state == "ready" or coming is None or coming is self.current:
            return
        if coming.current_process is not None:
            patience_s = HANG_TIMEOUT_S + 2 * self.ready.load_s
            coming.current_process.hang_timeout_s = min(coming.current_process.hang_timeout_s, patience_s)

    def _restart(self, given: InFlight, troubles: int) -> bool:
        """False: there is no need any more."""
        failed = 0
        while self._restart_needed(given, restart_pause_s(troubles)):
            with self._starting:
                if not self._restart_needed(given):
                    return False
                try:
                    self._start(given)
                except AsrServeError as failure:
                    troubles, failed = troubles + 1, failed + 1
                    log.error("the engine could not be started again: %s", failure)
                    if failed >= MAX_FAILED_STARTS:
                        self._give_up()
                    continue
            self._resume_process(given)
            return True
        return False

    def _restart_needed(self, given: InFlight, after_s: float = 0.0) -> bool:
        """Whether there must be another process for it. What a renewal has loaded meanwhile will do."""
        with self.changed:
            return not self.changed.wait_for(lambda: self._closing.is_set() or given is not self.current, after_s)

    def _resume_process(self, given: InFlight) -> None:
        with self.lock:
            assert given.current_process is not None
            given.current_process.hang_timeout_s = HANG_TIMEOUT_S
            given.replay_all()
            if self.handover is not None:
                self.handover.on_new_process_restarted()
                self.changed.notify_all()
            self.state = "ready"

    def _watch(self) -> None:
        """Kill a process that gives no sign of life: it is asked for one again and again. Keeps hold of none: the
        memory of a dead one would stay."""
        while not self._closing.wait(HANG_TIMEOUT_S / 10):
            self._ping()
            self._kill_unresponsive()

    def _ping(self) -> None:
        """Those whose pipe is full too: what is sent waits for room on another thread (Child.send)."""
        with self.lock:
            for given in self.in_flights:
                given.send(messages.EnginePing())

    def _kill_unresponsive(self) -> None:
        for child in [each.current_process for each in self.in_flights]:
            if child is not None and child.unresponsive:
                log.error("the engine gave no sign of life for %.0f s: it is killed", child.hang_timeout_s)
                child.kill()

    def _kill(self) -> None:
        for given in self.in_flights:
            if given.current_process is not None:
                given.current_process.kill()

    def _handle_message(self, given: InFlight, message: messages.ToServer | ExportedStream) -> None:
        if isinstance(message, messages.EngineLog):
            self._forward(message)
            return
        with self.lock:
            answers = given.handle_message(message)
            if self.handover is not None:
                self.handover.on_message(given, message)
                self.changed.notify_all()
        self._tell(answers)

    def _forward(self, message: messages.ToServer | ExportedStream) -> None:
        if isinstance(message, messages.EngineLog):
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    # --- endings ------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing.set()
        # A process that hangs may hold us up; killed, it does not.
        last = threading.Timer(EXIT_TIMEOUT_S, self._kill)
        last.daemon = True
        last.start()
        with self.lock:
            for given in self.in_flights:
                given.request_stop()
            self.changed.notify_all()
            keepers = list(self._keepers.values())
        if threading.current_thread() not in keepers:
            for keeper in keepers:
                keeper.join()
            with self.lock:
                self.changed.wait_for(lambda: self._replacement is None)
        last.cancel()

    def _give_up(self) -> None:
        """Nobody may wait for an engine that will not start. Why is in the log: it is not for clients."""
        with self.lock:
            self.state = "failed"
            answers = self.current.fail_all(
                EngineClosed("the engine cannot be started at the moment", todo="try again later")
            )
        self._tell(answers)

    def _fail_remaining(self, given: InFlight, error: AsrServeError) -> None:
        """Its process is gone, and no other will be started for it."""
        with self.lock:
            last = given is self.current
            if last:  # whoever comes after us sees that it is closed, whoever came before is rejected
                self._closing.set()
                self.state = "closed"
            if self.handover is not None and self.handover.old is given and not self._closing.is_set():
                self.handover.transfer_remaining()
                error = unanswered_query("was replaced")
            answers = given.fail_all(error)
            self.changed.notify_all()
        if last:
            self._on_stop()
        self._tell(answers)


def _comparable_facts(ready: messages.EngineReady) -> tuple[object, ...]:
    """Of a process, that another in its place must share."""
    return ready.card, ready.turn_card, ready.fingerprint


def _end_unused(child: EngineProcess) -> None:
    """One that nobody has given anything."""
    child.kill()
    child.join_or_kill()
    child.close()
