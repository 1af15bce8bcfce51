"""One engine process, seen from the server: its pipe, its ring, its end."""

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
"""A process that was told to stop and has not by then is killed."""


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0


def restart_pause_s(troubles: int) -> float:
    """Before the next start, after so many processes in a row that did not live long."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(troubles - 1, 10)) if troubles > 1 else 0.0


class RingSize(NamedTuple):
    """The shared memory PCM goes through: 16 MiB as it is, four minutes of audio."""

    slots: int = 1_024
    payload_bytes: int = 16_384


class ExportedStream(NamedTuple):
    """wire.Exported, and the parcel that came behind it: whoever takes this closes it."""

    session: int
    saved: SealedBuffer | None


def send_buffer(pipe: Connection, parcel: SealedBuffer) -> None:
    """Behind the message that has its label. Raises OSError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        parcel.send(line)


def receive_buffer(pipe: Connection, label: SealedBufferLabel) -> SealedBuffer:
    """The parcel behind a message. Raises EOFError, OSError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        return SealedBuffer.receive(line, label)


class EngineProcess:
    """Made by `start`. `receive` is for one thread at a time."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, writer: PcmWriter) -> None:
        self.process, self.writer = process, writer
        self._pipe = pipe
        # It waits for room in the ring and the pipe. Should that fail, whether the process died or only its pipe
        # broke, half a message is in there: it is of no more use.
        self._sender = MessageSender(f"asr-serve to {process.pid}", self._write, lost=self.kill)
        self.last_message_s = time.monotonic()
        """When it last gave a sign of life; `patience_s`: without one for so long, it is of no use."""
        self.hang_timeout_s = math.inf

    @property
    def unresponsive(self) -> bool:
        """It lives, and has given no sign of it for too long."""
        return self.process.returncode is None and time.monotonic() - self.last_message_s > self.hang_timeout_s

    @classmethod
    def start(cls, spec: messages.EngineSpec, size: RingSize) -> EngineProcess:
        """Raises EngineClosed where no process can be had."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                here, there = Pipe()
                ours.callback(here.close)
                theirs.callback(there.close)
                bell, their_bell = socket.socketpair()
                ours.callback(bell.close)
                theirs.callback(their_bell.close)
                memory, _ = ring.create(size.slots, size.payload_bytes)
                theirs.callback(os.close, memory)
                writer = PcmWriter(memory, bell)
                descriptors = (there.fileno(), their_bell.fileno(), memory)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "asr_serve.engine.process.main", *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env=engine_environment(spec.threads),
                    stdout=sys.stderr.fileno(),
                    process_group=0,  # a terminal's ctrl-C is for the server, which may still need the engine
                )
            except (OSError, ValueError) as failure:
                raise EngineClosed(f"no engine process could be started: {failure}") from failure
            ours.pop_all()
        child = cls(process, here, writer)
        child._sender.enqueue(OutgoingMessage(messages.encode(spec)))  # it may be dead already: `wait_ready` tells
        return child

    def wait_ready(self, others: Callable[[messages.ToServer | ExportedStream], None]) -> messages.EngineReady:
        """Until the model is loaded; other messages go to `others`. Raises what loading raised, EngineClosed."""
        while (message := self.receive()) is not None:
            match message:
                case messages.EngineReady():
                    return message
                case messages.EngineLoadFailed(failure=failure):
                    self.join_or_kill()
                    raise failure.to_error()
                case _:
                    others(message)
        raise EngineClosed(
            f"the engine process ended while it was loading ({self.join_or_kill()})", todo="see its log"
        )

    def send(
        self,
        message: messages.ToEngine,
        pcm: np.ndarray | None = None,
        number: int = 0,
        parcel: SealedBuffer | None = None,
        owner: int | None = None,
    ) -> None:
        """The message, and the samples or the parcel that it announces: written in the order of the calls, by a
        thread of its own. `number`: of the samples in the ring. `parcel`: becomes ours. `owner`: of what
        `withdraw` takes back."""
        # What waits here is bounded by whoever lets it in: an utterance is among EngineClient's requests until it
        # is answered or cancelled, a recording has two pieces under way and a live caller one, and there are
        # MAX_TURNS and MAX_VOICES questions. Given keeps the same arrays until they are answered, so that they
        # take no more memory here; what it gives up is withdrawn. The rest is some bytes for each.
        pcm = None if pcm is None else np.ascontiguousarray(pcm)
        self._sender.enqueue(OutgoingMessage(messages.encode(message), pcm, number, parcel, owner))

    def withdraw_owner(self, owner: int) -> None:
        """What of its messages has not been written."""
        self._sender.withdraw_owner(owner)

    def _write(self, letter: OutgoingMessage) -> None:
        # The samples first: then whoever reads the message finds them there and wakes up once. What is larger
        # than the ring would wait for a reader that nobody has told.
        pcm = letter.pcm
        first = pcm is not None and pcm.nbytes <= self.writer.capacity_bytes
        if pcm is not None and first:
            self.writer.write_message(letter.number, pcm)
        self._pipe.send_bytes(letter.message)
        if pcm is not None and not first:
            self.writer.write_message(letter.number, pcm)
        if letter.parcel is not None:
            send_buffer(self._pipe, letter.parcel)

    def receive(self) -> messages.ToServer | ExportedStream | None:
        """The next message; None when the process is gone."""
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
        """Wait for it, with force if need be, and tell how it went."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Give back the pipe and the ring, when it is gone: what was not written is for nobody."""
        self._sender.discard()
        self.writer.close()  # who waits for room wakes up
        self._sender.join()
        self._pipe.close()
