"""Connection between a server and an engine process, at both ends: messages, samples and sealed buffers.

Within a machine, samples go through a ring in shared memory, and a sealed buffer is a descriptor. Between machines both
follow their message on the same TCP connection.
"""

from __future__ import annotations

import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import numpy as np

from asr_serve.engine.process import messages
from asr_serve.engine.process.message_sender import MessageSender, OutgoingMessage
from asr_serve.errors import OutOfStep
from asr_serve.transfer.ring import PcmWriter
from asr_serve.transfer.sealed_buffer import SealedBuffer, SealedBufferLabel


class PcmSource(Protocol):
    """Source of announced samples. `transfer.ring.PcmReader` is one."""

    def read_message(self, session: int, samples: int) -> np.ndarray:
        """Reads the samples of a message. Raises PeerGone, OutOfStep, EOFError, OSError."""

    def close(self) -> None: ...


class PipePcmReader:
    """Source of samples that follow their message on its connection."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def read_message(self, session: int, samples: int) -> np.ndarray:
        """Reads the samples of a message. Raises OutOfStep, EOFError, OSError."""
        data = self._pipe.recv_bytes(4 * samples) if samples else b""
        if len(data) != 4 * samples:
            raise OutOfStep(f"{len(data)} bytes came for {session}", f"{4 * samples} were announced")
        return np.frombuffer(bytearray(data), np.float32)

    def close(self) -> None:
        """Does nothing: the connection has another owner."""


def send_buffer(pipe: Connection, parcel: SealedBuffer) -> None:
    """Sends a sealed buffer, after the message with its label. Raises OSError, ChecksumMismatch."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        if line.family == socket.AF_UNIX:
            parcel.send(line)
            return
    pipe.send_bytes(b"".join(parcel.read()))


def receive_buffer(pipe: Connection, label: SealedBufferLabel) -> SealedBuffer:
    """Receives the sealed buffer that follows a message. Raises EOFError, OSError."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        if line.family == socket.AF_UNIX:
            return SealedBuffer.receive(line, label)
    return SealedBuffer.copy(pipe.recv_bytes(max(1, label.nbytes)), label)


class ExportedStream(NamedTuple):
    """Received messages.StreamExported with its sealed buffer, which the receiver closes."""

    session: int
    saved: SealedBuffer | None


class EngineConnection(ABC):
    """Server's end of a connection to an engine process. `receive` is for one thread at a time."""

    def __init__(self, pipe: Connection, writer: PcmWriter | None, name: str, lost: Callable[[], None]) -> None:
        """`writer`: of the ring; None: samples follow their message. `name`: of the sending thread. `lost`: called when
        nothing more can be sent."""
        self._pipe, self.ring_writer = pipe, writer
        # Writing waits for room in the ring and the pipe. If it fails, because the process died or only its pipe
        # broke, the pipe contains half a message: the process is unusable.
        self._sender = MessageSender(name, self._write, lost=lost)
        self.last_message_s = time.monotonic()
        """Time of its last message. After `hang_timeout_s` without one it counts as unresponsive."""
        self.hang_timeout_s = math.inf

    @property
    @abstractmethod
    def unresponsive(self) -> bool:
        """Returns whether the process runs, and has sent nothing for longer than `hang_timeout_s`."""

    @property
    def silent_s(self) -> float:
        """Time since its last message."""
        return time.monotonic() - self.last_message_s

    @abstractmethod
    def kill(self) -> None:
        """Ends the connection: `receive` returns None."""

    @abstractmethod
    def join_or_kill(self) -> str:
        """Waits for the end, forces it after a while, and returns how it ended."""

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
        pcm, writer = letter.pcm, self.ring_writer
        if pcm is not None and not pcm.nbytes:
            pcm = None
        pcm_first = pcm is not None and writer is not None and pcm.nbytes <= writer.capacity_bytes
        if pcm is not None and writer is not None and pcm_first:
            writer.write_message(letter.number, pcm)
        self._pipe.send_bytes(letter.message)
        if pcm is not None and not pcm_first:
            if writer is not None:
                writer.write_message(letter.number, pcm)
            else:
                self._pipe.send_bytes(pcm.data.cast("B"))
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

    def close(self) -> None:
        """Closes the pipe and the ring after the exit; unwritten messages are dropped."""
        self._sender.discard()
        if self.ring_writer is not None:
            self.ring_writer.close()  # wakes a thread that waits for room
        self._sender.join()
        self._pipe.close()
