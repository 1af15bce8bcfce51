"""Queue of messages to a pipe: senders never block, and a thread writes.

Each side reads with one thread, which also sends answers. If it waited for room in the pipe, or for a thread that
does, neither side would read, and both would deadlock. Messages are written in the order in which they were sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from asr_serve.errors import PeerGone
from asr_serve.transfer.sealed_buffer import SealedBuffer


class OutgoingMessage(NamedTuple):
    """Message with the samples or the buffer that it announces."""

    message: bytes
    pcm: np.ndarray | None = None
    number: int = 0
    """Number of the samples in the ring."""
    parcel: SealedBuffer | None = None
    """Sealed buffer, closed with the message."""
    owner: int | None = None
    """Request or session of the message, for `withdraw_owner`."""

    def close(self) -> None:
        if self.parcel is not None:
            self.parcel.close()


class MessageSender:
    """Sends messages from a queue. Every method may be called from any thread; none but `join` waits for the other
    side."""

    def __init__(
        self,
        name: str,
        write: Callable[[OutgoingMessage], None],
        lost: Callable[[], None] = lambda: None,
        max_messages: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """`write` may raise OSError and PeerGone: then `lost` is called, and nothing more is written. `max_messages`
        and `max_bytes`, without samples and buffers: of the queue; None: whoever sends limits it."""
        self._changed = threading.Condition()
        self._max_messages, self._max_bytes, self._bytes = max_messages, max_bytes, 0
        self._queue: deque[OutgoingMessage] = deque()
        self._ended = False
        # Only the thread references the callbacks, so that their owner can be freed when it ends.
        self._thread = threading.Thread(target=self._run, args=(write, lost), name=name, daemon=True)
        self._thread.start()

    def enqueue(self, letter: OutgoingMessage) -> bool:
        """Queues a message; dropped after `finish` or `discard`. Returns False where the queue is full: then all of it
        is dropped, and nothing more is written."""
        with self._changed:
            full = not self._ended and self._full(letter)
            if not self._ended and not full:
                self._queue.append(letter)
                self._bytes += len(letter.message)
                self._changed.notify()
                return True
        letter.close()
        if full:
            self.discard()
        return not full

    def _full(self, letter: OutgoingMessage) -> bool:
        too_many = self._max_messages is not None and len(self._queue) >= self._max_messages
        return too_many or (
            self._max_bytes is not None and bool(self._queue) and self._bytes + len(letter.message) > self._max_bytes
        )

    def withdraw_owner(self, owner: int) -> None:
        """Removes the owner's messages whose writing has not begun."""
        with self._changed:
            withdrawn = [letter for letter in self._queue if letter.owner == owner]
            if withdrawn:
                self._queue = deque(letter for letter in self._queue if letter.owner != owner)
                self._bytes -= sum(len(letter.message) for letter in withdrawn)
        for letter in withdrawn:
            letter.close()

    def finish(self) -> None:
        """Accepts no more messages; queued ones are written."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def discard(self) -> None:
        """Accepts no more messages and drops the queue."""
        with self._changed:
            self._ended = True
            dropped, self._queue, self._bytes = self._queue, deque(), 0
            self._changed.notify()
        for letter in dropped:
            letter.close()

    def join(self) -> None:
        """Waits for the thread, after `finish` or `discard`."""
        self._thread.join()

    def _run(self, write: Callable[[OutgoingMessage], None], lost: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(OSError, PeerGone):
                while self._write_next(write):
                    pass
        finally:
            self.discard()
            lost()

    def _write_next(self, write: Callable[[OutgoingMessage], None]) -> bool:
        """Writes the next message; returns False at the end. Keeps no reference to it."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended)
            if not self._queue:
                return False
            letter = self._queue.popleft()
            self._bytes -= len(letter.message)
        with contextlib.closing(letter):
            write(letter)
        return True
