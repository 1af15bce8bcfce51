"""Supervisor of an engine's processes: restarts the current one, and replaces it on request.

A process that dies, killed or crashed, is restarted, and its work goes to the next one. One that lives can be
renewed: another takes its place while it finishes its requests, and live streams move over in the middle of a
sentence.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import EngineConnection, ExportedStream
from asr_serve.engine.process.engine_process import EXIT_TIMEOUT_S, EngineProcess, RingSize, restart_pause_s
from asr_serve.engine.process.handover import Handover, HandoverResult
from asr_serve.engine.process.in_flight import InFlight, PendingAnswer, SoundAnswer, unanswered_query
from asr_serve.errors import AsrServeError, EngineClosed, NotAllowed

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
"""Failed starts in a row before waiting requests are rejected and new ones refused, while starts are still
tried."""
HEALTHY_S = 30.0
"""Lifetime after which a death counts as a new problem: the next process starts without a pause."""
HANG_TIMEOUT_S = 60.0
"""Time without a message before a process is killed. No step takes a tenth of it."""
LOAD_TIMEOUT_S = 1_800.0
"""Time without a message while a process loads: weights may come over a slow connection."""


class Supervisor:
    """Runs the processes of an engine, each with a thread that reads its messages. Raises the errors of
    loading."""

    def __init__(
        self,
        spec: messages.EngineSpec,
        ring: RingSize,
        deliver: Callable[[Sequence[PendingAnswer | SoundAnswer]], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._spec, self._ring = spec, ring
        self._deliver, self._on_stop = deliver, on_stop
        self.lock = threading.Lock()
        """Lock of the fields below and of the order of messages. The server's event loop takes it, so that no
        thread may wait for a process while it holds it."""
        self.changed = threading.Condition(self.lock)
        """Notified when work has ended or the state has changed."""
        self.current = InFlight()
        """Work of the process that accepts new requests, or of the next one."""
        self.handover: Handover | None = None
        """Set while an earlier process is still running."""
        self.state = "loading"
        self.restarts = 0
        self.address: messages.EngineAddress | messages.EncoderAddress | None = None
        """Address for others of the process that was started last."""
        self.peers: tuple[str, ...] | None = None
        """Addresses of engines that encode for this one; None: those of its specification."""
        self.moved: Counter[tuple[str, str]] = Counter()
        """Number of sessions and streams that moved between processes, by kind and mode."""
        self.moved_s = 0.0
        """Total time that audio of moving streams waited."""
        self._replacement: InFlight | None = None
        """Work of the process that a running renewal has started."""
        self._closing = threading.Event()
        self._starting = threading.Lock()  # one process loads at a time, and another may wait for it
        self._threads: dict[InFlight, threading.Thread] = {}
        first: Future[messages.EngineReady] = Future()
        self._start_thread(self.current, first)
        threading.Thread(target=self._watch, name=f"asr-serve {spec.model} watch", daemon=True).start()
        self.ready = first.result()

    @property
    def in_flights(self) -> list[InFlight]:
        """All current InFlight objects: current, old and replacement."""
        handover = self.handover
        old = handover.old if handover else None
        return list(dict.fromkeys(each for each in (self.current, old, self._replacement) if each is not None))

    def expect_open(self) -> None:
        if self._closing.is_set():
            raise EngineClosed("the engine is closed", todo="load the model again")
        if self.state == "failed":
            raise EngineClosed("the engine cannot be started at the moment", todo="try again later")

    # --- replacing a running process -----------------------------------------------------------------------

    def renew(self, timeout_s: float) -> HandoverResult:
        """Starts another process and moves the work to it; blocks until the old one is gone.

        New work goes to the new process as soon as it is ready. The old one finishes its requests, for `timeout_s`
        at most; the new one does the rest. If one of the two dies meanwhile, its work goes to the other, or to the
        next. Until the new process is ready nothing changes: errors of loading are raised, and the old one stays.
        Raises NotAllowed during another renewal, for an engine that encodes for others, and where the model's
        files have changed; EngineClosed.
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
            replacement = self._replacement = InFlight()
        try:
            handover, load_s = self._replace_process(replacement), time.monotonic() - started_s
            self._hand_over(handover, timeout_s)
        finally:
            with self.lock:
                self._replacement = None
                self.changed.notify_all()
        result = HandoverResult(
            handover.moved["session", "state"],
            handover.moved["stream", "state"],
            handover.moved["stream", "replay"],
            handover.repeated_requests,
            round(load_s, 3),
            round(time.monotonic() - started_s, 3),
        )
        log.info(
            "the engine was renewed in %g s: %d sessions and %d streams moved, "
            "%d streams replayed, %d requests repeated",
            result.total_s,
            result.sessions,
            result.streams,
            result.replayed,
            result.repeated,
        )
        return result

    def _replace_process(self, replacement: InFlight) -> Handover:
        with self._starting:
            ready = self._start(replacement)
            with self.lock:
                same = _comparable_facts(ready) == _comparable_facts(self.ready)
                if same and not self._closing.is_set():
                    handover = self.handover = Handover(self.current, replacement)
                    assert replacement.process is not None
                    replacement.process.hang_timeout_s = HANG_TIMEOUT_S
                    self.current, self.state = replacement, "ready"
                    self._replay(replacement)
                    self._start_thread(replacement)
                    handover.start()
                    self.changed.notify_all()
                    return handover
        assert replacement.process is not None
        _end_unused(replacement.process)
        if same:
            raise EngineClosed("the engine was closed")
        raise NotAllowed(
            "the model's files are not those that were loaded", "a renewal of the same model", "unload it and load it"
        )

    def _hand_over(self, handover: Handover, timeout_s: float) -> None:
        try:
            with self.changed:
                self.changed.wait_for(lambda: handover.finished or self._closing.is_set(), timeout_s)
        finally:  # also when the caller is interrupted
            self._retire_old(handover)
        if self._closing.is_set():
            raise EngineClosed("the engine was closed")

    def _retire_old(self, handover: Handover) -> None:
        """Transfers the remaining work of the old process and stops it."""
        assert handover.old.process is not None
        kill_timer = threading.Timer(EXIT_TIMEOUT_S, handover.old.process.kill)  # see `close`
        kill_timer.daemon = True
        kill_timer.start()
        with self.lock:
            if not self._closing.is_set():
                handover.transfer_remaining()
            handover.old.request_stop()
            thread = self._threads[handover.old]
        thread.join()
        kill_timer.cancel()
        kill_timer.join()  # its thread ends a moment after it is cancelled
        with self.lock:
            del self._threads[handover.old]
            self.handover = None
            self.moved += handover.moved
            self.moved_s += handover.waited_s

    # --- a process's life, on a thread of its own -------------------------------------------------------

    def _start_thread(self, in_flight: InFlight, first: Future[messages.EngineReady] | None = None) -> None:
        """Starts the thread of a process. `first`: resolved with its first start, which the thread does too."""
        thread = self._threads[in_flight] = threading.Thread(
            target=self._run_process, args=(in_flight, first), name=f"asr-serve {self._spec.model} link", daemon=True
        )
        thread.start()

    def _run_process(self, in_flight: InFlight, first: Future[messages.EngineReady] | None) -> None:
        error: AsrServeError = EngineClosed("the engine was closed")
        try:
            if first is not None:
                ready = self._start(in_flight)
                self._resume_process(in_flight)
                first.set_result(ready)
            self._receive_and_restart(in_flight)
        except AsrServeError as failure:
            error = failure
        except Exception as failure:
            log.exception("what the engine process said cannot be taken: it is given up")
            error = EngineClosed(f"the engine was given up: {type(failure).__name__}", todo="load the model again")
            if in_flight.process is not None:
                _end_unused(in_flight.process)
        finally:  # in any case, so that no caller waits forever
            if first is not None and not first.done():
                first.set_exception(error)
            self._fail_remaining(in_flight, error)

    def _receive_and_restart(self, in_flight: InFlight) -> None:
        """Reads messages and restarts the process, until closed or replaced."""
        troubles, started_s = 0, time.monotonic()
        while True:
            code = self._receive_until_exit(in_flight)
            if self._closing.is_set() or in_flight.stopped:
                return
            log.error("the engine process died (%s)", code)
            with self.lock:
                answers = in_flight.record_death(code)
                self._speed_up_replacement()
            self._deliver(answers)
            troubles = 0 if time.monotonic() - started_s > HEALTHY_S else troubles + 1
            started_s = time.monotonic()
            if not self._restart(in_flight, troubles):
                return
            self.restarts += 1
            log.warning("the engine is back after %.1f s", time.monotonic() - started_s)

    def _receive_until_exit(self, in_flight: InFlight) -> str:
        """Reads messages until the process is gone; returns how it ended."""
        process = in_flight.process
        assert process is not None
        while (message := process.receive()) is not None:
            self._handle_message(in_flight, message)
        with self.lock:
            in_flight.process_ready = False
            if in_flight is self.current and not self._closing.is_set():
                self.state = "restarting"
        code = process.join_or_kill()
        process.close()
        return code

    def _start(self, in_flight: InFlight) -> messages.EngineReady:
        """Starts a process and waits until its model is loaded. Raises the errors of loading, EngineClosed."""
        process = in_flight.process = EngineProcess.start(self._spec, self._ring)
        with self.lock:
            process.hang_timeout_s = LOAD_TIMEOUT_S
            self._speed_up_replacement()
        if self._closing.is_set():  # `close` may have run before there was a process
            process.kill()
        with contextlib.ExitStack() as undo:
            undo.callback(_end_unused, process)
            ready = process.wait_ready(self._forward)
            undo.pop_all()
        self.address = ready.address
        return ready

    def _speed_up_replacement(self) -> None:
        """Shortens the load timeout of a replacement when the current process is gone, because callers wait for
        it. Its files are local, since the first process loaded them; if it hangs it is killed and restarted like
        any other."""
        replacement = self._replacement
        if self.state == "ready" or replacement is None or replacement is self.current:
            return
        if replacement.process is not None:
            timeout_s = HANG_TIMEOUT_S + 2 * self.ready.load_s
            replacement.process.hang_timeout_s = min(replacement.process.hang_timeout_s, timeout_s)

    def _restart(self, in_flight: InFlight, troubles: int) -> bool:
        """Restarts a process; returns False when none is needed any more."""
        failed = 0
        while self._restart_needed(in_flight, restart_pause_s(troubles)):
            with self._starting:
                if not self._restart_needed(in_flight):
                    return False
                try:
                    self._start(in_flight)
                except AsrServeError as failure:
                    troubles, failed = troubles + 1, failed + 1
                    log.error("the engine could not be started again: %s", failure)
                    if failed >= MAX_FAILED_STARTS:
                        self._give_up()
                    continue
            self._resume_process(in_flight)
            return True
        return False

    def _restart_needed(self, in_flight: InFlight, after_s: float = 0.0) -> bool:
        """Returns whether the process has to be restarted, after a wait of up to `after_s`. A replacement that was
        loaded meanwhile is used instead."""
        with self.changed:
            return not self.changed.wait_for(lambda: self._closing.is_set() or in_flight is not self.current, after_s)

    def _resume_process(self, in_flight: InFlight) -> None:
        with self.lock:
            assert in_flight.process is not None
            in_flight.process.hang_timeout_s = HANG_TIMEOUT_S
            self._replay(in_flight)
            if self.handover is not None:
                self.handover.on_new_process_restarted()
            self.state = "ready"
            self.changed.notify_all()

    def _replay(self, in_flight: InFlight) -> None:
        """Sends a new process its peers, and all work."""
        in_flight.process_ready = True
        if self.peers is not None:
            in_flight.set_peers(self.peers, Future())
        in_flight.replay_all()

    def _watch(self) -> None:
        """Pings all processes regularly and kills unresponsive ones. Keeps no reference to a process, so that the
        memory of a dead one is freed."""
        while not self._closing.wait(HANG_TIMEOUT_S / 10):
            self._ping()
            self._kill_unresponsive()

    def _ping(self) -> None:
        """Pings all processes, also those with a full pipe: messages wait on another thread
        (EngineProcess.send)."""
        with self.lock:
            for in_flight in self.in_flights:
                in_flight.send(messages.EnginePing())

    def _kill_unresponsive(self) -> None:
        for process in [in_flight.process for in_flight in self.in_flights]:
            if process is not None and process.unresponsive:
                log.error("the engine gave no sign of life for %.0f s: it is killed", process.hang_timeout_s)
                process.kill()

    def _kill(self) -> None:
        for in_flight in self.in_flights:
            if in_flight.process is not None:
                in_flight.process.kill()

    def _handle_message(self, in_flight: InFlight, message: messages.ToServer | ExportedStream) -> None:
        if isinstance(message, messages.EngineLog):
            self._forward(message)
            return
        with self.lock:
            answers = in_flight.handle_message(message)
            if self.handover is not None:
                self.handover.on_message(in_flight, message)
                self.changed.notify_all()
        self._deliver(answers)

    def _forward(self, message: messages.ToServer | ExportedStream) -> None:
        if isinstance(message, messages.EngineLog):
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    # --- endings ------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing.set()
        # A process that hangs would block this; it is killed after EXIT_TIMEOUT_S.
        kill_timer = threading.Timer(EXIT_TIMEOUT_S, self._kill)
        kill_timer.daemon = True
        kill_timer.start()
        with self.lock:
            for in_flight in self.in_flights:
                in_flight.request_stop()
            self.changed.notify_all()
            threads = list(self._threads.values())
        if threading.current_thread() not in threads:
            for thread in threads:
                thread.join()
            with self.lock:
                self.changed.wait_for(lambda: self._replacement is None)
        kill_timer.cancel()

    def _give_up(self) -> None:
        """Rejects all work of an engine that does not start. The reason is only in the log: it is not for
        clients."""
        with self.lock:
            self.state = "failed"
            answers = self.current.fail_all(
                EngineClosed("the engine cannot be started at the moment", todo="try again later")
            )
        self._deliver(answers)

    def _fail_remaining(self, in_flight: InFlight, error: AsrServeError) -> None:
        """Rejects or hands over the work of a process that has ended and will not be restarted."""
        with self.lock:
            is_current = in_flight is self.current
            if is_current:  # later callers see that it is closed, earlier ones are rejected
                self._closing.set()
                self.state = "closed"
            if self.handover is not None and self.handover.old is in_flight and not self._closing.is_set():
                self.handover.transfer_remaining()
                error = unanswered_query("was replaced")
            answers = in_flight.fail_all(error)
            self.changed.notify_all()
        if is_current:
            self._on_stop()
        self._deliver(answers)


def _comparable_facts(ready: messages.EngineReady) -> tuple[object, ...]:
    """Facts that a replacement must share with the process."""
    return ready.card, ready.turn_card, ready.fingerprint


def _end_unused(process: EngineConnection) -> None:
    """Kills and closes a process without work."""
    process.kill()
    process.join_or_kill()
    process.close()
