"""The loop on a thread of this process: what the library uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asr_serve.config import EngineConfig
from asr_serve.engine.client import Connect
from asr_serve.engine.loop import Job, Loop, live
from asr_serve.engine.parts import Parts, assemble
from asr_serve.engine.session import Utterance, Windows
from asr_serve.errors import EngineClosed
from asr_serve.models.card import Card


class LocalLink:
    """Starts the loop's thread; what a caller wants becomes a job in the loop's inbox."""

    def __init__(
        self,
        card: Card,
        build: Callable[[], Parts],
        config: EngineConfig,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
    ) -> None:
        """`build` runs on the engine's thread and what it raises is raised here. torch gives every thread that
        computes a pool of its own; two pools, and both go to sleep between products."""
        self.card = card
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._ended = False
        ready: Future[Loop] = Future()

        def make() -> Loop:
            return assemble(build(), card, config, on_done, self._stopped)

        self._thread = threading.Thread(
            target=live, args=(make, ready), name=f"asr-serve {card.name}", daemon=True
        )
        self._thread.start()
        self.loop = ready.result()
        self.device = self.loop.encode_runner.device

    @property
    def state(self) -> str:
        return "closed" if self._ended else "ready"

    def submit(self, utterance: Utterance) -> None:
        self.call(lambda loop: loop.submit(utterance))

    def cancel(self, request_id: int) -> None:
        self.call(lambda loop: loop.cancel(request_id))

    def open(self, session: int, live: bool) -> None:
        self.call(lambda loop: loop.listeners.open(session, live, None))

    def put(self, windows: Windows) -> None:
        self.call(lambda loop: loop.listeners.put(windows))

    def close_session(self, session: int) -> None:
        self.call(lambda loop: loop.listeners.close(session))

    def describe(self) -> dict[str, Any]:
        return self.loop.describe()

    def close(self) -> None:
        with self._lock:
            if not self._ended:
                self.loop.inbox.put(Loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def call(self, job: Job) -> None:
        """Have the loop do it between two steps. Raises EngineClosed."""
        with self._lock:  # so that nothing comes into the inbox once the loop has emptied it for good
            if self._ended:
                raise EngineClosed("the engine is closed", todo="load the model again")
            self.loop.inbox.put(job)

    def _stopped(self) -> None:
        with self._lock:
            self._ended = True
        self._on_stop()


def local(card: Card, build: Callable[[], Parts]) -> Connect:
    """For EngineClient: an engine of these parts, on a thread."""
    return lambda config, on_done, on_stop: LocalLink(card, build, config, on_done, on_stop)
