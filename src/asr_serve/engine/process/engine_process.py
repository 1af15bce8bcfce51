"""Engine process as the server sees it: its pipe, its ring, its exit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from asr_serve.config import engine_environment
from asr_serve.engine.process import messages
from asr_serve.engine.process.connection import EngineConnection, ExportedStream
from asr_serve.engine.process.message_sender import OutgoingMessage
from asr_serve.errors import EngineClosed
from asr_serve.transfer import ring
from asr_serve.transfer.ring import PcmWriter

EXIT_TIMEOUT_S = 10.0
"""Time for a process to stop before it is killed."""


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0


def restart_pause_s(troubles: int) -> float:
    """Pause before the next start, after `troubles` short-lived processes in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(troubles - 1, 10)) if troubles > 1 else 0.0


class RingSize(NamedTuple):
    """Size of the shared-memory ring for PCM: by default 16 MiB, four minutes of audio."""

    slots: int = 1_024
    payload_bytes: int = 16_384


class EngineProcess(EngineConnection):
    """Engine process of this server's own, and its connection. Made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, writer: PcmWriter) -> None:
        self.process = process
        super().__init__(pipe, writer, f"asr-serve to {process.pid}", lost=self.kill)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def unresponsive(self) -> bool:
        return self.process.returncode is None and self.silent_s > self.hang_timeout_s

    @classmethod
    def start(cls, spec: messages.EngineSpec, size: RingSize) -> EngineProcess:
        """Starts a process. Raises EngineClosed if that fails."""
        with contextlib.ExitStack() as parent_ends, contextlib.ExitStack() as child_ends:
            try:
                pipe, child_pipe = Pipe()
                parent_ends.callback(pipe.close)
                child_ends.callback(child_pipe.close)
                bell, child_bell = socket.socketpair()
                parent_ends.callback(bell.close)
                child_ends.callback(child_bell.close)
                memory, _ = ring.create(size.slots, size.payload_bytes)
                child_ends.callback(os.close, memory)
                writer = PcmWriter(memory, bell)
                descriptors = (child_pipe.fileno(), child_bell.fileno(), memory)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "asr_serve.engine.process.main", *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env=engine_environment(spec.threads),
                    stdout=sys.stderr.fileno(),
                    process_group=0,  # ctrl-C in a terminal is for the server, which may still need the engine
                )
            except (OSError, ValueError) as failure:
                raise EngineClosed(f"no engine process could be started: {failure}") from failure
            parent_ends.pop_all()
        child = cls(process, pipe, writer)
        child._sender.enqueue(OutgoingMessage(messages.encode(spec)))  # `wait_ready` notices if it is already dead
        return child

    def wait_ready(self, others: Callable[[messages.ToServer | ExportedStream], None]) -> messages.EngineReady:
        """Waits until the model is loaded; other messages go to `others`. Raises the errors of loading,
        EngineClosed."""
        while (message := self.receive()) is not None:
            match message:
                case messages.EngineReady():
                    return message
                case messages.EngineLoadFailed(failure=failure):
                    self.join_or_kill()
                    raise failure.to_error()
                case _:
                    others(message)
        raise EngineClosed(f"the engine process ended while it was loading ({self.join_or_kill()})", todo="see its log")

    def kill(self) -> None:
        self.process.kill()

    def join_or_kill(self, timeout_s: float = EXIT_TIMEOUT_S) -> str:
        """Waits for the exit, kills the process after `timeout_s`, and returns how it ended."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
