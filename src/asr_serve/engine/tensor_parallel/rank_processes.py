"""Processes of the ranks of a tensor-parallel engine other than 0, as rank 0 sees them: start, commands, death."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from asr_serve.config import engine_environment
from asr_serve.devices.interface import Device
from asr_serve.engine.tensor_parallel import commands
from asr_serve.engine.tensor_parallel.commands import MessageSocket
from asr_serve.engine.tensor_parallel.communicator import ProcessGroupCommunicator
from asr_serve.errors import EngineClosed, OptionError, RankLost

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1_800.0
"""Limit of the loading of a rank's weights."""
STDERR_FD = 2
"""Standard error of this process, which `sys.stderr` is not in a notebook."""
EXIT_TIMEOUT_S = 5.0
"""Time for the ranks to end before they are killed."""


class RankProcess(NamedTuple):
    """One other rank."""

    rank: int
    process: subprocess.Popen[bytes]
    line: MessageSocket


class RankProcesses:
    """Ranks 1 and up of a tensor-parallel engine. All methods but `close` are for one thread, that of the engine's
    loop; the ranks end when this object is closed or its process dies, whatever they are doing."""

    def __init__(self, ranks: Sequence[RankProcess], store_fd: int, timeout_s: float) -> None:
        """`ranks`: processes of ranks 1 and up; `store_fd`: file in memory through which they find each other."""
        self._ranks, self._store_fd, self._timeout_s = ranks, store_fd, timeout_s
        self._communicator: ProcessGroupCommunicator | None = None
        self._lost = self._reported = False
        self._on_lost: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._wake, self._watched = socket.socketpair()
        self._resources = contextlib.ExitStack()
        for end in (self._wake, self._watched):
            self._resources.callback(end.close)
        self._resources.callback(os.close, store_fd)
        self._resources.callback(_end, ranks)
        self.close = weakref.finalize(self, self._resources.close)
        """Ends the ranks and waits until they are gone. Idempotent; called at exit too."""

    @classmethod
    def start(cls, spec: commands.RankSpec) -> RankProcesses:
        """Starts the ranks, which load their parts of the weights meanwhile. `spec`: as for rank 1. Raises
        EngineClosed where no process can be started."""
        with contextlib.ExitStack() as undo:
            try:
                store_fd = os.memfd_create("asr-serve-ranks")
                undo.callback(os.close, store_fd)
                ranks: list[RankProcess] = []
                for rank in range(1, spec.size):
                    ranks.append(_start_rank(rank, store_fd, spec.timeout_s))
                    undo.callback(_kill, ranks[-1])
                for each in ranks:
                    each.line.send(commands.encode(msgspec.structs.replace(spec, rank=each.rank)))
            except (OSError, AttributeError) as failure:
                raise EngineClosed(f"no process for another rank could be started: {failure}") from failure
            undo.pop_all()
        return cls(ranks, store_fd, spec.timeout_s)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, rank 1 first."""
        return [each.process.pid for each in self._ranks]

    @property
    def collectives_s(self) -> float:
        """Total time of collectives as rank 0 sees them, waiting for other ranks included. Any thread may read it."""
        return 0.0 if self._communicator is None else self._communicator.spent_s

    def connect(self, device: Device) -> None:
        """Waits until all ranks have loaded their weights, and connects the device's group. Raises RankLost."""
        deadline_s = time.monotonic() + LOAD_TIMEOUT_S
        for each in self._ranks:
            each.line.end.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                message = each.line.receive()
            except OSError:
                message = None
            report = None if message is None else commands.decode_report(message)
            if not isinstance(report, commands.RankReady):
                reason = report.reason if report is not None else "its process ended, or loaded for too long"
                raise RankLost(f"rank {each.rank} did not load: {reason}", todo="see its log")
            each.line.end.settimeout(self._timeout_s)
        try:
            communicator = ProcessGroupCommunicator(self._store_fd, device, self._timeout_s)
        except RuntimeError as failure:
            raise RankLost(f"the ranks could not be connected: {failure}", todo="see their logs") from failure
        self._communicator = communicator
        self._resources.callback(communicator.close)
        device.group.connect(communicator)
        watcher = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._ranks, self._watched), name="asr-serve ranks", daemon=True
        )
        watcher.start()
        self._resources.callback(_stop_watching, watcher, self._wake)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Sets the function that is called, on another thread, when a rank has died; at once if one has."""
        with self._lock:
            self._on_lost = on_lost
            lost = self._lost
        if lost:
            on_lost()

    @contextlib.contextmanager
    def running(self, command: commands.Command) -> Iterator[None]:
        """Context of a command: all other ranks are sent it, and this one runs it in the block. Raises RankLost, for
        an error of a collective in the block too. After any error the ranks no longer do the same: the next command
        raises RankLost, and only `close` is left."""
        self.raise_if_lost()
        message, done = commands.encode(command), False
        try:
            for each in self._ranks:
                each.line.send(message)
            yield
            done = True
        except (OSError, RuntimeError) as failure:
            raise _rank_lost(f"{type(failure).__name__}: {failure}") from failure
        finally:
            if not done:
                with self._lock:
                    self._lost = self._reported = True

    def raise_if_lost(self) -> None:
        """Raises RankLost if a rank is gone."""
        with self._lock:
            lost, self._reported = self._lost, self._reported or self._lost
        if lost:
            raise _rank_lost("it ended")

    def report_lost(self) -> None:
        """Raises RankLost if a rank is gone and no command has raised it."""
        with self._lock:
            reported = self._reported
        if not reported:
            self.raise_if_lost()

    def _mark_lost(self, rank: int) -> None:
        log.error("rank %d of a tensor-parallel engine is gone", rank)
        with self._lock:
            self._lost, on_lost = True, self._on_lost
        if self._communicator is not None:
            self._communicator.abort()
        on_lost()


def _rank_lost(reason: str) -> RankLost:
    return RankLost(f"a rank of a tensor-parallel engine was lost ({reason})", todo="try again when it is back")


def _start_rank(rank: int, store_fd: int, timeout_s: float) -> RankProcess:
    with contextlib.ExitStack() as undo:
        own, other = socket.socketpair()
        undo.callback(own.close)
        with other:
            arguments = [sys.executable, "-P", "-m", "asr_serve.engine.tensor_parallel.worker"]
            process = subprocess.Popen(
                [*arguments, str(other.fileno()), str(store_fd)],
                pass_fds=(other.fileno(), store_fd),
                stdin=subprocess.DEVNULL,
                stdout=STDERR_FD,
                env=engine_environment(None),
                process_group=0,  # ctrl-C in a terminal is for rank 0
            )
        own.settimeout(timeout_s)
        undo.pop_all()
    return RankProcess(rank, process, MessageSocket(own))


def _watch(owner: weakref.ref[RankProcesses], ranks: Sequence[RankProcess], watched: socket.socket) -> None:
    """Waits until a rank is gone, or the owner closes. The ranks send nothing after their start."""
    poll, closing_fd = select.poll(), watched.fileno()
    by_fd = {each.line.end.fileno(): each.rank for each in ranks}
    for fd in (*by_fd, closing_fd):
        poll.register(fd, select.POLLIN)
    ready = [fd for fd, _ in poll.poll()]
    if closing_fd not in ready and (processes := owner()) is not None:
        processes._mark_lost(by_fd[ready[0]])


def _stop_watching(watcher: threading.Thread, wake: socket.socket) -> None:
    wake.shutdown(socket.SHUT_RDWR)
    if watcher is not threading.current_thread():
        watcher.join()


def _end(ranks: Sequence[RankProcess]) -> None:
    for each in ranks:
        each.line.end.close()
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    for each in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(max(0.0, deadline_s - time.monotonic()))
        each.process.kill()
        each.process.wait()


def _kill(rank: RankProcess) -> None:
    rank.process.kill()
    rank.process.wait()
    rank.line.end.close()


def not_split(model: str, size: int) -> OptionError:
    """Returns the error for a model without a decoder that can be split."""
    return OptionError(
        f"tensor_parallel_size={size}: the network of {model} cannot be split over processes",
        "a Whisper, or a speech LLM",
        "serve this one with tensor_parallel_size=1",
        param="tensor_parallel_size",
    )
