"""Reads text that somebody is still writing, so that nobody who listens waits with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol


class TextSink(Protocol):
    """Who is fed: a speech."""

    @property
    def full(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def append_text(self, text: str) -> None: ...
    def end(self) -> None: ...


class TextFeeder:
    """Pieces of text to a speech, on a thread. One that waits for text when `close` comes ends with the next
    piece."""

    def __init__(self, taker: TextSink, texts: Iterable[str], wake: Callable[[], None]) -> None:
        self._sink, self._texts, self._wake = taker, texts, wake
        self._moved = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        threading.Thread(target=self._feed, name="text", daemon=True).start()

    def raise_failure(self) -> None:
        """To be called when something was taken. Raises what reading the text did, once all before it was said."""
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
        """Whatever it is, whoever listens is told."""
        self._failure = failure
        self._wake()
        return True
