"""What a caller holds of an engine: a ticket for a request, a session, a stream."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asr_serve.decoding.attention import Recognition
from asr_serve.engine.session import Piece, Wanted, Windows
from asr_serve.errors import AtCapacity, EngineClosed, OptionError, UnsupportedAudio
from asr_serve.types import Found
from asr_serve.vad.endpoint import WINDOW_SAMPLES

if TYPE_CHECKING:
    from asr_serve.engine.client import EngineClient


class Ticket(NamedTuple):
    """A request that was let in: its answer to come, and the name to cancel it by."""

    id: int
    future: Future[Any]


class Questions:
    """What is asked beside the requests: so much of a kind may wait."""

    def __init__(self, room: threading.Condition, most: int, what: str, retry_ms: int, kept: int = 0) -> None:
        """`room`: where whoever waits for it is told that there is some. `what` waits, as an error says it.
        `kept`: so many of them can be live callers' only."""
        self._room, self._most, self._what, self._retry_ms, self._kept = room, most, what, retry_ms, kept
        self.waiting = 0

    def ask(
        self,
        send: Callable[[Future[Any]], None],
        *,
        live: bool = False,
        wait: bool = False,
        check: Callable[[], None] = lambda: None,
        closed: Callable[[], bool] = lambda: False,
    ) -> Future[Any]:
        """Its answer, which cannot be cancelled: what is counted is what waits. `send` gives it to the engine.
        Full: raises AtCapacity; or waits when `wait`, until it is `closed` or `check` raises."""
        with self._room:
            most = self._most - (0 if live else self._kept)
            while wait and not closed() and self.waiting >= most:
                check()  # here, where no nudge can come between it and the wait
                self._room.wait()
            if self.waiting >= most:
                raise AtCapacity(f"{self.waiting} {self._what} wait", f"up to {most}", self._retry_ms)
            self.waiting += 1
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        answer.add_done_callback(self._answered)
        try:
            send(answer)
        except EngineClosed:
            self._answered(answer)
            raise
        return answer

    def _answered(self, _: Future[Any]) -> None:
        with self._room:
            self.waiting -= 1
            self._room.notify_all()


class VadSession:
    """One caller's voice activity: pieces go in, speech probabilities come out, in order."""

    def __init__(self, client: EngineClient, session_id: int, live: bool) -> None:
        self._client, self._id, self._live, self._open = client, session_id, live, True

    def put(self, pcm: np.ndarray) -> Future[np.ndarray]:
        """`pcm` float32 at 16 kHz, whole windows of 512 samples, at most EngineConfig.vad_windows of them.

        The future holds one probability per window. Keep few in flight: what is put is held until computed.
        """
        windows, odd = divmod(len(pcm), WINDOW_SAMPLES)
        if odd or not 1 <= windows <= self._client.config.vad_windows:
            raise OptionError(
                f"{len(pcm)} samples",
                f"a multiple of {WINDOW_SAMPLES}, up to {self._client.config.vad_windows * WINDOW_SAMPLES}",
            )
        piece = Windows(self._id, pcm, Future())
        self._client.link.put(piece)
        return piece.future

    def close(self) -> None:
        if self._open:
            self._open = False
            self._client._close_session(self._id, self._live)


class Stream:
    """Audio that a model hears as it comes, what it remembers carried from piece to piece."""

    def __init__(self, client: EngineClient, number: int, live: bool) -> None:
        self._client, self._number, self._live, self._open = client, number, live, True

    def put(self, pcm: np.ndarray, *, last: bool = False, timed: bool = False) -> Future[Found]:
        """`pcm` (n,) float32 at 16 kHz, any n. `last`: nothing follows, and the stream is closed. `timed`: the
        answer tells when its tokens were said, and those of the answers since the last one that did.

        The future holds what can be said of the audio so far that was not said before: some words, or none yet.
        Frames are the model's, from the stream's start. It may raise StepFailed: then the stream is lost, begin it
        again. Keep few in flight: what is put is held until it is heard. Raises EngineClosed.
        """
        return self._put(pcm, last, None, timed)

    def hear(self, pcm: np.ndarray, wanted: Wanted, *, last: bool = False) -> Future[Recognition]:
        """The same of a model whose decoder hears all of it each time: a hypothesis of what was put so far, this
        included."""
        return self._put(pcm, last, wanted)

    def _put(self, pcm: np.ndarray, last: bool, wanted: Wanted | None, timed: bool = False) -> Future[Any]:
        expect_samples(pcm)
        assert self._open, "put after the last piece"
        self._open = not last
        piece = Piece(self._number, pcm, last, Future(), wanted, timed)
        if self._live:
            piece.future.add_done_callback(partial(self._client._answered, time.monotonic()))
        self._client.link.put_piece(piece)
        return piece.future

    def close(self) -> None:
        """What is under way is dropped. Idempotent."""
        self._open = False
        with contextlib.suppress(EngineClosed):
            self._client.link.close_stream(self._number)


def expect_samples(pcm: np.ndarray) -> None:
    if pcm.ndim != 1 or pcm.dtype != np.float32 or not np.isfinite(pcm.sum()):
        raise UnsupportedAudio(
            f"an array of {pcm.dtype}, shape {pcm.shape}",
            "one row of finite float32 samples",
            "open_audio turns anything into that",
        )
