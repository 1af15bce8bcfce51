"""Reads text that is still being written, on a thread of its own, so that playback does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol


class TextSink(Protocol):
    """Receiver of the text: a speech session."""

    @property
    def full(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def append_text(self, text: str) -> None: ...
    def end(self) -> None: ...


class TextFeeder:
    """Feeds pieces of text to a session, on a thread. A thread that waits for text when `close` is called ends
    when the next piece arrives."""

    def __init__(self, taker: TextSink, texts: Iterable[str], wake: Callable[[], None]) -> None:
        self._sink, self._texts, self._wake = taker, texts, wake
        self._moved = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        threading.Thread(target=self._feed, name="text", daemon=True).start()

    def raise_failure(self) -> None:
        """Lets the thread check whether the session has room; call it after audio was taken. Raises the error
        that reading the text raised, once all text before it has been synthesized."""
        with self._moved:
            self._moved.notify_all()
        if self._failure is not None and self._sink.idle:
            raise self._failure

    def close(self) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _feed(self) -> None:
        with self:
            for text in self._texts:
                with self._moved:
                    self._moved.wait_for(lambda: self._closed or not self._sink.full)
                if self._closed:
                    return
                self._sink.append_text(text)
            self._sink.end()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keeps any error for `raise_failure` and wakes the session's client."""
        self._failure = failure
        self._wake()
        return True
