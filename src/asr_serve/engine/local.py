"""The loop on a thread of this process: what the library uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asr_serve.config import EngineConfig
from asr_serve.engine.client import Connect
from asr_serve.engine.loop import Job, Loop, live
from asr_serve.engine.parts import Parts, as_built, assemble
from asr_serve.engine.peers.meeting import Meeting
from asr_serve.engine.prefix.names import name, name_windows
from asr_serve.engine.session import Piece, Utterance, Windows
from asr_serve.engine.speakers.hearing import on_this_machine
from asr_serve.engine.speakers.runner import Question
from asr_serve.engine.speaking.saying import Saying
from asr_serve.engine.turns.runner import TurnModel, TurnRunner
from asr_serve.errors import EngineClosed
from asr_serve.models.card import AnyCard
from asr_serve.speaker.local import LocalVoices


class LocalLink:
    """Starts the loop's thread; what a caller wants becomes a job in the loop's inbox."""

    def __init__(
        self,
        card: AnyCard,
        build: Callable[[], Parts],
        config: EngineConfig,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
        turns: TurnModel | None,
        meeting: Meeting | None = None,
    ) -> None:
        """`build` runs on the engine's thread and what it raises is raised here. torch gives every thread that
        computes a pool of its own; two pools, and both go to sleep between products."""
        self.turn_card, self.speakers = turns.card if turns else None, on_this_machine()
        self._turns: TurnRunner | None = None
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._ended = False
        self.card: AnyCard = card
        ready: Future[Loop] = Future()

        def make() -> Loop:
            parts = build()
            self.card = as_built(card, parts.model)
            loop = assemble(parts, card, config, on_done, self._stopped, meeting=meeting)
            if turns:
                self._turns = TurnRunner(turns, loop.work.device, loop.stats)
            return loop

        self._thread = threading.Thread(
            target=live, args=(make, ready), name=f"asr-serve {card.name}", daemon=True
        )
        self._thread.start()
        self.loop = ready.result()
        self.device = self.loop.work.device

    @property
    def state(self) -> str:
        return "closed" if self._ended else "ready"

    def submit(self, utterance: Utterance) -> None:
        if self.loop.names:
            name(utterance)
        self.call(lambda loop: loop.work.submit(utterance))

    def say(self, saying: Saying) -> None:
        self.call(lambda loop: loop.speaking.say(saying))

    def cancel(self, request_id: int) -> None:
        self.call(lambda loop: loop.work.cancel(request_id))

    def open(self, session: int, live: bool) -> None:
        self.call(lambda loop: loop.listeners.open(session, live, None))

    def put(self, windows: Windows) -> None:
        if self.loop.names:
            name_windows(windows)
        self.call(lambda loop: loop.listeners.put(windows))

    def close_session(self, session: int) -> None:
        self.call(lambda loop: loop.listeners.close(session))

    def open_stream(self, stream: int, live: bool, samples: int | None, words: bool, bias: str) -> None:
        self.call(lambda loop: loop.streams.open(stream, live, samples, words=words, bias=bias))

    def put_piece(self, piece: Piece) -> None:
        self.call(lambda loop: loop.streams.put(piece))

    def close_stream(self, stream: int) -> None:
        self.call(lambda loop: loop.streams.close(stream))

    def turn(self, pcm: np.ndarray, answer: Future[float]) -> None:
        assert self._turns is not None
        with self._lock:
            self._expect_open()
        self._turns.ask(pcm, answer)

    def voices(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalVoices]) -> None:
        self.call(lambda loop: loop.voices.ask(Question(pcm, budget_samples, live, answer)))

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
            self._expect_open()
            self.loop.inbox.put(job)

    def _expect_open(self) -> None:
        if self._ended:
            raise EngineClosed("the engine is closed", todo="load the model again")

    def _stopped(self) -> None:
        with self._lock:
            self._ended = True
        if self._turns is not None:
            self._turns.close()
        self._on_stop()


def local(
    card: AnyCard, build: Callable[[], Parts], turns: TurnModel | None = None, meeting: Meeting | None = None
) -> Connect:
    """For EngineClient: an engine of these parts, on a thread, and a turn model beside it. `meeting`: with what it
    meets other engines, where it has to do with any."""
    return lambda config, on_done, on_stop: LocalLink(card, build, config, on_done, on_stop, turns, meeting)
