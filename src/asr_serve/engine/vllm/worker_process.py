"""vLLM worker as the engine sees it: a process under another interpreter, its connection, its restarts."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from asr_serve.config import vllm_environment
from asr_serve.engine.vllm import worker_main
from asr_serve.engine.vllm.worker_main import Frame, receive_frame, send_frame
from asr_serve.errors import ProgramFailed, ProgramMissing

log = logging.getLogger(__name__)

START_TIMEOUT_S = 1_800.0
"""Time for vLLM to load: weights may come over a slow connection, and kernels may be compiled."""
EXIT_TIMEOUT_S = 10.0
"""Time for a worker to stop before it is killed."""
HANG_TIMEOUT_S = 120.0
"""Time without a message while requests run before a worker is killed. No step takes a tenth of it."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row before waiting requests are rejected and new ones refused, while starts are still tried."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
HEALTHY_S = 30.0
"""Lifetime after which a death counts as a new problem: the next worker starts without a pause."""


def restart_pause_s(troubles: int) -> float:
    """Pause before the next start, after `troubles` failed starts and short-lived workers in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(troubles - 1, 10)) if troubles > 1 else 0.0


class WorkerSettings(NamedTuple):
    """Settings of a worker."""

    python: str
    """Interpreter of the environment that has vLLM."""
    threads: int
    """Threads that it computes with on a CPU."""
    engine: Frame
    """Contents of the frame `start`: model, dtype, max_positions, max_rows, kv_bytes."""
    script: Path = Path(worker_main.__file__)
    """File that the interpreter runs."""


class WorkerProcess:
    """One process and its connection. Made by `start`. `receive` is for one thread at a time; `send` never blocks."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process, self._connection = process, connection
        self._outbox: queue.SimpleQueue[tuple[Frame, bytes] | None] = queue.SimpleQueue()
        """Frames to write; None ends the thread. Bounded by the executor's rows."""
        self._writer = threading.Thread(target=self._write, name=f"asr-serve to vLLM {process.pid}", daemon=True)
        self._writer.start()

    @classmethod
    def start(cls, settings: WorkerSettings) -> WorkerProcess:
        """Starts a process. Raises ProgramMissing where there is no such interpreter, ProgramFailed."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            try:
                process = subprocess.Popen(
                    [settings.python, "-I", str(settings.script), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output may be a protocol's
                    env=vllm_environment(settings.threads),
                    process_group=0,  # ctrl-C in a terminal is for the engine, which ends its worker
                )
            except FileNotFoundError as failure:
                raise ProgramMissing(
                    f"vllm_python={settings.python} is not there",
                    "the interpreter of an environment that has vLLM",
                    "see docs/vllm.md",
                ) from failure
            except OSError as failure:
                raise ProgramFailed(f"vllm_python={settings.python} cannot be run: {failure}") from failure
            unless_started.pop_all()
        worker = cls(process, ours)
        worker.send({"op": "start", **settings.engine})
        return worker

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> Frame:
        """Returns the contents of `ready`. Raises ProgramFailed, ProgramMissing where the interpreter has no vLLM."""
        self._connection.settimeout(START_TIMEOUT_S)
        try:
            frame = self.receive()
        except TimeoutError:
            frame = {"op": "start_failed", "error": f"not ready after {START_TIMEOUT_S:g} s"}
        self._connection.settimeout(None)
        if frame is not None and frame["op"] == "ready":
            return frame
        code = self.join_or_kill()
        what = f"it ended while it was loading ({code})" if frame is None else str(frame["error"])
        if what.startswith("ModuleNotFoundError"):
            raise ProgramMissing(
                f"the environment of vllm_python has no vLLM, or not all of it: {what}",
                "one that has",
                "see docs/vllm.md",
            )
        raise ProgramFailed(f"vLLM cannot be started: {what}", todo="see its log, and docs/vllm.md")

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        """Queues a frame; lost where the process is gone, which `receive` tells."""
        self._outbox.put((frame, payload))

    def receive(self) -> Frame | None:
        """Waits for a frame; None when the process is gone. Raises TimeoutError where there is a limit."""
        try:
            received = receive_frame(self._connection)
        except TimeoutError:
            raise
        except (OSError, ValueError) as failure:
            log.error("what the vLLM worker sent cannot be read: %s", failure)
            return None
        return None if received is None else received[0]

    def kill(self) -> None:
        """Kills the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def join_or_kill(self, timeout_s: float = EXIT_TIMEOUT_S) -> str:
        """Waits for the process's end, and kills it when it takes too long; returns how it ended. Closes the
        connection."""
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("the vLLM worker does not stop: it is killed")
        self.kill()  # in any case: it may have left processes of its own
        code = self.process.wait()
        self._writer.join()
        self._connection.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _write(self) -> None:
        try:
            while (letter := self._outbox.get()) is not None:
                send_frame(self._connection, *letter)
        except OSError:
            pass  # the process is gone: `receive` tells


class WorkerSupervisor:
    """Runs a vLLM worker, with a thread that reads its frames and restarts it when it dies. The callbacks are called on
    that thread. The first start is the constructor's, and raises ProgramMissing, ProgramFailed."""

    def __init__(
        self,
        settings: WorkerSettings,
        on_frame: Callable[[Frame], None],
        on_death: Callable[[str], None],
        on_restart: Callable[[WorkerProcess, Frame], None],
        on_start_failed: Callable[[int, ProgramFailed | ProgramMissing], None],
    ) -> None:
        """`on_death`: given how the process ended, after its last frame; `on_restart`: given the new process and the
        contents of its `ready`; `on_start_failed`: given the number of failed starts in a row."""
        self._settings = settings
        self._on_frame, self._on_death = on_frame, on_death
        self._on_restart, self._on_start_failed = on_restart, on_start_failed
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.process = WorkerProcess.start(settings)
        self.last_message_s = time.monotonic()
        """Time of the worker's last message, on the monotonic clock."""
        self.facts = self.process.wait_ready()
        """Contents of the first `ready`."""
        self._ready = True
        self._thread = threading.Thread(target=self._run, name="asr-serve from vLLM", daemon=True)

    def begin(self) -> None:
        """Starts the thread. Called once."""
        self._thread.start()

    def close(self) -> None:
        """Stops the worker; returns when its process and the thread are gone."""
        with self._lock:
            self._closing.set()
            if self._ready:
                self.process.send({"op": "stop"})
            else:
                self.process.kill()
        if self._thread.ident is None:
            self.process.join_or_kill()
            return
        killer = threading.Timer(EXIT_TIMEOUT_S, self._kill_at_close)
        killer.daemon = True
        killer.start()
        self._thread.join()
        killer.cancel()

    def _kill_at_close(self) -> None:
        with self._lock:
            self.process.kill()

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        troubles, started_s = 0, time.monotonic()
        while True:
            self._read()
            self._ready = False
            code = self.process.join_or_kill()
            if self._closing.is_set():
                return
            log.error("the vLLM worker died (%s)", code)
            self._on_death(code)
            troubles = 0 if time.monotonic() - started_s > HEALTHY_S else troubles + 1
            started_s = time.monotonic()
            if not self._restart(troubles):
                return
            log.warning("the vLLM worker is back after %.1f s", time.monotonic() - started_s)

    def _read(self) -> None:
        while (frame := self.process.receive()) is not None:
            self.last_message_s = time.monotonic()
            self._on_frame(frame)

    def _restart(self, troubles: int) -> bool:
        """Starts workers until one is ready; returns False when none is needed any more."""
        failed = 0
        while not self._closing.wait(restart_pause_s(troubles)):
            try:
                with self._lock:
                    if self._closing.is_set():
                        return False
                    self.process = WorkerProcess.start(self._settings)
                facts = self.process.wait_ready()
            except (ProgramFailed, ProgramMissing) as failure:
                if self._closing.is_set():
                    return False
                troubles, failed = troubles + 1, failed + 1
                log.error("the vLLM worker could not be started again: %s", failure)
                self._on_start_failed(failed, failure)
                continue
            with self._lock:
                self._ready = True
            self.last_message_s = time.monotonic()
            self._on_restart(self.process, facts)
            return True
        return False
