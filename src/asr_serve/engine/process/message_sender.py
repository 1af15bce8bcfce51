"""Messages on their way into a pipe: who sends waits for nobody, a thread of its own writes.

Both sides hear each other on one thread, and that thread answers. Were it to wait for room in the pipe, or for
somebody who does, neither side would read, and both would wait for ever. Order is kept: what is sent first is
written first.
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
    """One message, and what it announces."""

    message: bytes
    pcm: np.ndarray | None = None
    number: int = 0
    """That the samples have in the ring."""
    parcel: SealedBuffer | None = None
    """Whoever has the letter closes it."""
    owner: int | None = None
    """The request or session that it is of; it may be withdrawn with it."""

    def close(self) -> None:
        if self.parcel is not None:
            self.parcel.close()


class MessageSender:
    """Every method may be called from any thread; none but `join` waits for the other side."""

    def __init__(
        self, name: str, write: Callable[[OutgoingMessage], None], lost: Callable[[], None] = lambda: None
    ) -> None:
        """`write` may raise OSError and PeerGone: then `lost` is called, and nothing more is written."""
        self._changed = threading.Condition()
        self._queue: deque[OutgoingMessage] = deque()
        self._ended = False
        # What is called is the thread's alone: when that ends, its owner and the memory of it can go.
        self._thread = threading.Thread(target=self._run, args=(write, lost), name=name, daemon=True)
        self._thread.start()

    def enqueue(self, letter: OutgoingMessage) -> None:
        """After the end it is dropped."""
        with self._changed:
            if not self._ended:
                self._queue.append(letter)
                self._changed.notify()
                return
        letter.close()

    def withdraw_owner(self, owner: int) -> None:
        """What of it is not written, nor begun to be."""
        with self._changed:
            withdrawn = [letter for letter in self._queue if letter.owner == owner]
            if withdrawn:
                self._queue = deque(letter for letter in self._queue if letter.owner != owner)
        for letter in withdrawn:
            letter.close()

    def finish(self) -> None:
        """Take nothing more; what was taken is written."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def discard(self) -> None:
        """Take nothing more, and write nothing more."""
        with self._changed:
            self._ended = True
            dropped, self._queue = self._queue, deque()
            self._changed.notify()
        for letter in dropped:
            letter.close()

    def join(self) -> None:
        """After `end` or `drop`: until the last is written."""
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
        """The next one; False at the end. Nothing of it is kept hold of."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended)
            if not self._queue:
                return False
            letter = self._queue.popleft()
        with contextlib.closing(letter):
            write(letter)
        return True
