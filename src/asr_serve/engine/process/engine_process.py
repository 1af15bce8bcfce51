"""Engine process as the server sees it: its pipe, its ring, its exit."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from asr_serve.config import engine_environment
from asr_serve.engine.process import messages
from asr_serve.engine.process.message_sender import MessageSender, OutgoingMessage
from asr_serve.errors import EngineClosed
from asr_serve.transfer import ring
from asr_serve.transfer.ring import PcmWriter
from asr_serve.transfer.sealed_buffer import SealedBuffer, SealedBufferLabel

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


class ExportedStream(NamedTuple):
    """Received messages.StreamExported with its sealed buffer, which the receiver closes."""

    session: int
    saved: SealedBuffer | None


def send_buffer(pipe: Connection, parcel: SealedBuffer) -> None:
    """Sends a sealed buffer, after the message with its label. Raises OSError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        parcel.send(line)


def receive_buffer(pipe: Connection, label: SealedBufferLabel) -> SealedBuffer:
    """Receives the sealed buffer that follows a message. Raises EOFError, OSError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        return SealedBuffer.receive(line, label)


class EngineProcess:
    """Engine process and its connection. Made by `start`. `receive` is for one thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, writer: PcmWriter) -> None:
        self.process, self.writer = process, writer
        self._pipe = pipe
        # Writing waits for room in the ring and the pipe. If it fails, because the process died or only its pipe
        # broke, the pipe contains half a message: the process is unusable.
        self._sender = MessageSender(f"asr-serve to {process.pid}", self._write, lost=self.kill)
        self.last_message_s = time.monotonic()
        """Time of its last message. After `hang_timeout_s` without one it counts as unresponsive."""
        self.hang_timeout_s = math.inf

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def unresponsive(self) -> bool:
        """Whether it runs, and has sent nothing for longer than `hang_timeout_s`."""
        return self.process.returncode is None and time.monotonic() - self.last_message_s > self.hang_timeout_s

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

    def send(
        self,
        message: messages.ToEngine,
        pcm: np.ndarray | None = None,
        number: int = 0,
        parcel: SealedBuffer | None = None,
        owner: int | None = None,
    ) -> None:
        """Queues a message, with the samples or the sealed buffer that it announces; a thread writes them in the
        order of calls. `number`: of the samples in the ring. `parcel`: closed here. `owner`: for
        `withdraw_owner`."""
        # Admission limits this queue: an utterance counts in EngineClient until it is answered or cancelled, a
        # recording has two chunks in flight and a live caller one, and queries are limited by MAX_TURN_REQUESTS
        # and MAX_DIARIZATION_WINDOWS. InFlight holds the same arrays until they are answered, so they take no
        # more memory here; what it drops is withdrawn. The rest is some bytes for each message.
        pcm = None if pcm is None else np.ascontiguousarray(pcm)
        self._sender.enqueue(OutgoingMessage(messages.encode(message), pcm, number, parcel, owner))

    def withdraw_owner(self, owner: int) -> None:
        """Removes the owner's messages that are not written yet."""
        self._sender.withdraw_owner(owner)

    def _write(self, letter: OutgoingMessage) -> None:
        # The samples first, so that the reader of the message finds them and wakes up once. Samples larger than
        # the ring would wait for a reader that has no message yet.
        pcm = letter.pcm
        pcm_first = pcm is not None and pcm.nbytes <= self.writer.capacity_bytes
        if pcm is not None and pcm_first:
            self.writer.write_message(letter.number, pcm)
        self._pipe.send_bytes(letter.message)
        if pcm is not None and not pcm_first:
            self.writer.write_message(letter.number, pcm)
        if letter.parcel is not None:
            send_buffer(self._pipe, letter.parcel)

    def receive(self) -> messages.ToServer | ExportedStream | None:
        """Receives the next message; None when the process is gone."""
        try:
            message: messages.ToServer = messages.decode_to_server(self._pipe.recv_bytes())
            self.last_message_s = time.monotonic()
            if isinstance(message, messages.StreamExported):
                return ExportedStream(
                    message.session, receive_buffer(self._pipe, message.saved) if message.saved else None
                )
        except (EOFError, OSError):
            return None
        return message

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

    def close(self) -> None:
        """Closes the pipe and the ring after the exit; unwritten messages are dropped."""
        self._sender.discard()
        self.writer.close()  # wakes a thread that waits for room
        self._sender.join()
        self._pipe.close()
