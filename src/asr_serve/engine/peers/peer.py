"""One engine that encodes for this one: what it has under way, and the connection over which it is asked.

Whatever has gone wrong ends the connection, and with it the memory that was lent: what comes late finds nothing.
The batches that were under way are told of it, and are encoded elsewhere.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve.engine.peers import said
from asr_serve.engine.peers.meeting import Met
from asr_serve.engine.peers.said import Line, quoted
from asr_serve.errors import AsrServeError, MalformedRequest, PeerGone, PeerRefused, RoadFailed, RoadTimeout
from asr_serve.metrics import EngineMetrics
from asr_serve.transfer.roads import Landing, Spot
from asr_serve.types import Priority

AT_ONCE = 2
"""Batches that one peer has: one that is encoded, and one that waits there or is on its way."""
MOST_FAILED = 3
"""Batches in a row that a peer may fail to encode: something is wrong with it, and it fails faster than others
encode."""
OLDEST = 4
"""A clip is answered within so many times `peer_timeout_s`, whatever comes of others meanwhile."""
LONGEST_TICK_S = 1.0
"""How often a connection over which nothing comes is looked after."""
NOTHING = np.empty(0, np.uint8)

log = logging.getLogger(__name__)


class Clip(NamedTuple):
    """An utterance to encode. `pcm` (n,) float32, 16 kHz."""

    pcm: np.ndarray
    frames: int
    whole: bool
    priority: Priority
    within_ms: int | None


class Parcel(NamedTuple):
    """What became of a batch: of each clip its bytes, `cross` or `hidden` as `carries` says, none of one that was
    cancelled. `seconds`: what its encoding took over there."""

    carries: str
    data: list[np.ndarray]
    seconds: float


Done = Callable[[Parcel | AsrServeError], None]
"""Called once, on a thread of the peer's."""


class Away(msgspec.Struct, eq=False):
    """A batch at a peer."""

    clips: Sequence[Clip]
    done: Done
    data: list[np.ndarray]
    left: int
    """Clips that are not answered."""
    unwanted: set[int]
    """Those that were cancelled."""
    seconds: float = 0.0
    error: AsrServeError | None = None


class Sent(NamedTuple):
    """A clip that the peer was asked for."""

    away: Away
    place: int
    spot: Spot
    at_s: float


class Connection:
    """An open one. `run` is its life, on the peer's thread; `start` and `cancel` are for the loop's."""

    def __init__(
        self,
        line: Line,
        landing: Landing,
        carries: str,
        frame_bytes: int,
        met: Met,
        timeout_s: float,
        metrics: EngineMetrics | None,
    ) -> None:
        self.line, self.landing, self.carries = line, landing, carries
        self._frame_bytes, self._met, self._timeout_s, self._metrics = frame_bytes, met, timeout_s, metrics
        self._news = threading.Condition()  # its lock is that of all that follows, and of the landing's spots
        self._batches: list[Away] = []
        self._queue: deque[tuple[Away, int]] = deque()
        """Clips that wait for memory, or for room over there."""
        self._notes: deque[said.ToWorker] = deque()
        self._sent: dict[int, Sent] = {}
        self._samples = 0
        self.failing, self._why = 0, ""
        """Batches in a row that it could not encode, and what it said of the last."""
        self._numbers = itertools.count()
        self._over: AsrServeError | None = None
        self._sign_s = self._progress_s = self._pinged_s = time.monotonic()

    @property
    def load(self) -> int:
        """Batches under way."""
        return len(self._batches)

    @property
    def room(self) -> bool:
        return self._over is None and len(self._batches) < AT_ONCE and self.failing < MOST_FAILED

    def start(self, clips: Sequence[Clip], done: Done) -> Away | None:
        """Have the batch encoded; None where there is no room any more."""
        with self._news:
            if not self.room:
                return None
            away = Away(clips, done, [NOTHING] * len(clips), len(clips), set())
            if not self._batches:
                self._progress_s = time.monotonic()
            self._batches.append(away)
            self._queue.extend((away, index) for index in range(len(clips)))
            self._news.notify_all()
        return away

    def cancel(self, away: Away, index: int) -> None:
        """Nobody wants that clip any more."""
        over = False
        with self._news:
            away.unwanted.add(index)
            if (away, index) in self._queue:
                self._queue.remove((away, index))
                over = self._answered(away)
            else:
                numbers = [n for n, sent in self._sent.items() if sent.away is away and sent.place == index]
                self._notes.extend(said.Cancel(number) for number in numbers)
                self._news.notify_all()
        if over:
            self._tell(away)

    # --- its life -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it breaks. Raises PeerGone, PeerRefused, RoadFailed, MalformedRequest; and what nobody foresaw."""
        writer = threading.Thread(target=self._write, name="peer writer", daemon=True)
        writer.start()
        try:
            while True:
                message = self.line.receive(min(LONGEST_TICK_S, self._timeout_s / 4))
                self._look_after(message)
                match message:
                    case said.Encoded():
                        self._arrived(message)
                    case said.Failed(id=number, why=why):
                        self._failed(number, why)
                        self._expect_encoder()
                    case said.Pong() | None:
                        pass
                    case other:
                        raise MalformedRequest(f"a message {type(other).__name__}", "it is not for this moment")
        finally:
            with self._news:
                self._over = self._over or PeerGone("the connection has ended")
                self._news.notify_all()
            self.line.hang_up()
            writer.join()

    def end(self, error: AsrServeError) -> list[Away]:
        """When `run` is over. What was under way: it is for the caller to tell, after `close`."""
        with self._news:
            self._over = error
            lost, self._batches = self._batches, []
            self._queue.clear()
            self._sent.clear()
        return lost

    def close(self) -> None:
        """What comes late finds nothing."""
        try:
            self.landing.close()
        finally:
            self.line.close()

    def _look_after(self, message: said.ToAsker | None) -> None:
        """Raises RoadTimeout for a peer that gives no sign of life, does nothing for what it has, or leaves one
        clip of it out; what the writer broke off with."""
        now_s = time.monotonic()
        with self._news:
            if self._over is not None:
                raise self._over
            if message is not None:
                self._sign_s = now_s
            quiet_s, stands_s = now_s - self._sign_s, now_s - self._progress_s
            if quiet_s > self._timeout_s:
                raise RoadTimeout(
                    f"it gave no sign of life for {quiet_s:.1f} s", f"peer_timeout_s={self._timeout_s:g}"
                )
            if self._batches and stands_s > self._timeout_s:
                raise RoadTimeout(
                    f"nothing came of {len(self._batches)} batches for {stands_s:.1f} s",
                    f"peer_timeout_s={self._timeout_s:g}",
                )
            oldest_s = now_s - next((sent.at_s for sent in self._sent.values()), now_s)
            if oldest_s > OLDEST * self._timeout_s:
                raise RoadTimeout(
                    f"one of {len(self._sent)} clips was not answered for {oldest_s:.1f} s",
                    f"{OLDEST} x peer_timeout_s={self._timeout_s:g}",
                )
            if min(quiet_s, now_s - self._pinged_s) > self._timeout_s / 4:
                self._pinged_s = now_s
                self._notes.append(said.Ping())
                self._news.notify_all()

    # --- what it is asked, on the writer's thread -------------------------------------------------------------

    def _write(self) -> None:
        try:
            while (what := self._next()) is not None:
                self.line.send(*what)
        except Exception as failure:
            if not isinstance(failure, AsrServeError):
                log.exception("a peer cannot be asked")
                failure = PeerGone(f"it could not be asked: {failure}")
            with self._news:
                self._over = self._over or failure
            self.line.hang_up()

    def _next(self) -> tuple[said.ToWorker, np.ndarray | None] | None:
        """What to send, once there is anything; None at the end."""
        with self._news:
            while self._over is None:
                if self._notes:
                    return self._notes.popleft(), None
                if self._queue and (wanted := self._lend(*self._queue[0])) is not None:
                    self._queue.popleft()
                    return wanted
                self._news.wait()
        return None

    def _lend(self, away: Away, index: int) -> tuple[said.Encode, np.ndarray] | None:
        """The clip, with memory for what comes of it; None where it must wait for some. Raises RoadFailed."""
        clip = away.clips[index]
        full = len(self._sent) >= self._met.requests or self._samples + len(clip.pcm) > self._met.samples
        spot = None if full else self.landing.lend(clip.frames * self._frame_bytes)
        if spot is None:
            if not self._sent:  # then nothing will come that could make room
                raise RoadFailed(f"there is no memory for {clip.frames} frames", "the landing holds the longest")
            return None
        number = next(self._numbers)
        self._sent[number] = Sent(away, index, spot, time.monotonic())
        self._samples += len(clip.pcm)
        within_ms = None if clip.within_ms is None else min(max(0, clip.within_ms), said.MOST_WITHIN_MS)
        message = said.Encode(number, len(clip.pcm), clip.whole, clip.priority, within_ms, spot)
        return message, clip.pcm

    # --- what comes back ----------------------------------------------------------------------------------------

    def _arrived(self, message: said.Encoded) -> None:
        """Raises Torn, MalformedRequest."""
        with self._news:
            sent = self._sent.get(message.id)
        if sent is None:
            raise MalformedRequest(
                f"request {message.id} was answered", "it was not asked, or was answered before"
            )
        clip = sent.away.clips[sent.place]
        if message.nbytes != sent.spot.nbytes or message.frames != clip.frames:
            raise MalformedRequest(
                f"{message.nbytes} bytes of {message.frames} frames", f"{sent.spot.nbytes} bytes of {clip.frames}"
            )
        # Out of the landing at once: its memory is the credit to send more.
        data = self.landing.arrived(sent.spot, message.nbytes, message.checksum).copy()
        if self._metrics is not None:
            self._metrics.peer_bytes.inc(message.nbytes)
            seconds, whole_s = self._metrics.peer_seconds, time.monotonic() - sent.at_s
            for phase, spent_s in (
                ("waiting", message.waited_s),
                ("encoding", message.encoded_s),
                ("road", message.road_s),
                ("whole", whole_s),
            ):
                seconds[phase].observe(_within(spent_s, whole_s))
        with self._news:
            sent.away.data[sent.place] = data
            spent_s = _within(message.encoded_s, time.monotonic() - sent.at_s)
            sent.away.seconds = max(sent.away.seconds, spent_s)
            over = self._returned(message.id, sent)
        if over:
            self._tell(sent.away)

    def _failed(self, number: int, why: str) -> None:
        """Its batch is as lost as if the peer were: another one may be able to encode it, or this engine."""
        with self._news:
            sent = self._sent.get(number)
            if sent is None:
                raise MalformedRequest(f"request {number} has failed", "it was not asked, or was answered before")
            if sent.place not in sent.away.unwanted:
                self._why = quoted(why)
                sent.away.error = PeerGone(f"a peer could not encode it: {self._why}")
            self.landing.answered(sent.spot)
            over = self._returned(number, sent)
        if over:
            self._tell(sent.away)

    def _expect_encoder(self) -> None:
        """Raises PeerRefused where it fails batch after batch."""
        if self.failing >= MOST_FAILED:
            raise PeerRefused(
                f"it failed {self.failing} batches in a row: {self._why}",
                todo="see its own log; it is asked again later",
            )

    def _returned(self, number: int, sent: Sent) -> bool:
        """Its memory is free. Whether that was the last of its batch."""
        del self._sent[number]
        self._samples -= len(sent.away.clips[sent.place].pcm)
        self.landing.give(sent.spot)
        self._progress_s = time.monotonic()
        self._news.notify_all()
        return self._answered(sent.away)

    def _answered(self, away: Away) -> bool:
        away.left -= 1
        if not away.left:
            self._batches.remove(away)
            if away.error is not None:
                self.failing += 1
            elif len(away.unwanted) < len(away.clips):
                self.failing = 0
        return not away.left

    def _tell(self, away: Away) -> None:
        if self._metrics is not None:
            self._metrics.peer_batches.inc()
        away.done(away.error or Parcel(self.carries, away.data, away.seconds))


def _within(told_s: float, most_s: float) -> float:
    """What a peer told, who may tell anything."""
    return min(max(0.0, told_s), most_s)
