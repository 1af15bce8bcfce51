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

from asr_serve.engine.remote import messages
from asr_serve.engine.remote.handshake import PeerDescription
from asr_serve.engine.remote.messages import PeerChannel, quoted
from asr_serve.errors import AsrServeError, MalformedRequest, PeerGone, PeerRefused, RoadFailed, RoadTimeout
from asr_serve.metrics import EngineMetrics
from asr_serve.transfer.transports import BufferRegion, Receiver
from asr_serve.types import Priority

MAX_BATCHES_IN_FLIGHT = 2
"""Batches that one peer has: one that is encoded, and one that waits there or is on its way."""
MAX_FAILED_BATCHES = 3
"""Batches in a row that a peer may fail to encode: something is wrong with it, and it fails faster than others
encode."""
MAX_AGE_FACTOR = 4
"""A clip is answered within so many times `peer_timeout_s`, whatever comes of others meanwhile."""
LONGEST_TICK_S = 1.0
"""How often a connection over which nothing comes is looked after."""
NOTHING = np.empty(0, np.uint8)

log = logging.getLogger(__name__)


class EncodeClip(NamedTuple):
    """An utterance to encode. `pcm` (n,) float32, 16 kHz."""

    pcm: np.ndarray
    frames: int
    whole: bool
    priority: Priority
    within_ms: int | None


class EncodedBatch(NamedTuple):
    """What became of a batch: of each clip its bytes, `cross` or `hidden` as `carries` says, none of one that was
    cancelled. `seconds`: what its encoding took over there."""

    payload: str
    data: list[np.ndarray]
    seconds: float


Done = Callable[[EncodedBatch | AsrServeError], None]
"""Called once, on a thread of the peer's."""


class RemoteBatch(msgspec.Struct, eq=False):
    """A batch at a peer."""

    clips: Sequence[EncodeClip]
    on_done: Done
    data: list[np.ndarray]
    remaining: int
    """Clips that are not answered."""
    cancelled: set[int]
    """Those that were cancelled."""
    seconds: float = 0.0
    error: AsrServeError | None = None


class InFlightClip(NamedTuple):
    """A clip that the peer was asked for."""

    batch: RemoteBatch
    clip_index: int
    region: BufferRegion
    sent_s: float


class PeerConnection:
    """An open one. `run` is its life, on the peer's thread; `start` and `cancel` are for the loop's."""

    def __init__(
        self,
        line: PeerChannel,
        landing: Receiver,
        carries: str,
        frame_bytes: int,
        met: PeerDescription,
        timeout_s: float,
        metrics: EngineMetrics | None,
    ) -> None:
        self.channel, self.receiver, self.payload = line, landing, carries
        self._frame_bytes, self._met, self._timeout_s, self._metrics = frame_bytes, met, timeout_s, metrics
        self._condition = threading.Condition()  # its lock is that of all that follows, and of the landing's spots
        self._batches: list[RemoteBatch] = []
        self._queue: deque[tuple[RemoteBatch, int]] = deque()
        """Clips that wait for memory, or for room over there."""
        self._control_messages: deque[messages.ToWorker] = deque()
        self._in_flight: dict[int, InFlightClip] = {}
        self._samples = 0
        self.failing, self._why = 0, ""
        """Batches in a row that it could not encode, and what it said of the last."""
        self._numbers = itertools.count()
        self._over: AsrServeError | None = None
        self._last_message_s = self._progress_s = self._last_ping_s = time.monotonic()

    @property
    def batches_in_flight(self) -> int:
        """Batches under way."""
        return len(self._batches)

    @property
    def has_room(self) -> bool:
        return (
            self._over is None and len(self._batches) < MAX_BATCHES_IN_FLIGHT and self.failing < MAX_FAILED_BATCHES
        )

    def submit_batch(self, clips: Sequence[EncodeClip], done: Done) -> RemoteBatch | None:
        """Have the batch encoded; None where there is no room any more."""
        with self._condition:
            if not self.has_room:
                return None
            away = RemoteBatch(clips, done, [NOTHING] * len(clips), len(clips), set())
            if not self._batches:
                self._progress_s = time.monotonic()
            self._batches.append(away)
            self._queue.extend((away, index) for index in range(len(clips)))
            self._condition.notify_all()
        return away

    def cancel_clip(self, away: RemoteBatch, index: int) -> None:
        """Nobody wants that clip any more."""
        over = False
        with self._condition:
            away.cancelled.add(index)
            if (away, index) in self._queue:
                self._queue.remove((away, index))
                over = self._finish_batch(away)
            else:
                numbers = [
                    n for n, sent in self._in_flight.items() if sent.batch is away and sent.clip_index == index
                ]
                self._control_messages.extend(messages.CancelEncode(number) for number in numbers)
                self._condition.notify_all()
        if over:
            self._notify(away)

    # --- its life -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it breaks. Raises PeerGone, PeerRefused, RoadFailed, MalformedRequest; and what nobody foresaw."""
        writer = threading.Thread(target=self._send_loop, name="peer writer", daemon=True)
        writer.start()
        try:
            while True:
                message = self.channel.receive(min(LONGEST_TICK_S, self._timeout_s / 4))
                self._check_health(message)
                match message:
                    case messages.EncodeDone():
                        self._on_encoded(message)
                    case messages.EncodeFailed(id=number, why=why):
                        self._on_failed(number, why)
                        self._expect_working_encoder()
                    case messages.PeerPong() | None:
                        pass
                    case other:
                        raise MalformedRequest(f"a message {type(other).__name__}", "it is not for this moment")
        finally:
            with self._condition:
                self._over = self._over or PeerGone("the connection has ended")
                self._condition.notify_all()
            self.channel.shut_down()
            writer.join()

    def fail_pending(self, error: AsrServeError) -> list[RemoteBatch]:
        """When `run` is over. What was under way: it is for the caller to tell, after `close`."""
        with self._condition:
            self._over = error
            lost, self._batches = self._batches, []
            self._queue.clear()
            self._in_flight.clear()
        return lost

    def close(self) -> None:
        """What comes late finds nothing."""
        try:
            self.receiver.close()
        finally:
            self.channel.close()

    def _check_health(self, message: messages.ToClient | None) -> None:
        """Raises RoadTimeout for a peer that gives no sign of life, does nothing for what it has, or leaves one
        clip of it out; what the writer broke off with."""
        now_s = time.monotonic()
        with self._condition:
            if self._over is not None:
                raise self._over
            if message is not None:
                self._last_message_s = now_s
            quiet_s, stands_s = now_s - self._last_message_s, now_s - self._progress_s
            if quiet_s > self._timeout_s:
                raise RoadTimeout(
                    f"it gave no sign of life for {quiet_s:.1f} s", f"peer_timeout_s={self._timeout_s:g}"
                )
            if self._batches and stands_s > self._timeout_s:
                raise RoadTimeout(
                    f"nothing came of {len(self._batches)} batches for {stands_s:.1f} s",
                    f"peer_timeout_s={self._timeout_s:g}",
                )
            oldest_s = now_s - next((sent.sent_s for sent in self._in_flight.values()), now_s)
            if oldest_s > MAX_AGE_FACTOR * self._timeout_s:
                raise RoadTimeout(
                    f"one of {len(self._in_flight)} clips was not answered for {oldest_s:.1f} s",
                    f"{MAX_AGE_FACTOR} x peer_timeout_s={self._timeout_s:g}",
                )
            if min(quiet_s, now_s - self._last_ping_s) > self._timeout_s / 4:
                self._last_ping_s = now_s
                self._control_messages.append(messages.PeerPing())
                self._condition.notify_all()

    # --- what it is asked, on the writer's thread -------------------------------------------------------------

    def _send_loop(self) -> None:
        try:
            while (what := self._next_message()) is not None:
                self.channel.send(*what)
        except Exception as failure:
            if not isinstance(failure, AsrServeError):
                log.exception("a peer cannot be asked")
                failure = PeerGone(f"it could not be asked: {failure}")
            with self._condition:
                self._over = self._over or failure
            self.channel.shut_down()

    def _next_message(self) -> tuple[messages.ToWorker, np.ndarray | None] | None:
        """What to send, once there is anything; None at the end."""
        with self._condition:
            while self._over is None:
                if self._control_messages:
                    return self._control_messages.popleft(), None
                if self._queue and (wanted := self._allocate_region(*self._queue[0])) is not None:
                    self._queue.popleft()
                    return wanted
                self._condition.wait()
        return None

    def _allocate_region(self, away: RemoteBatch, index: int) -> tuple[messages.EncodeMessage, np.ndarray] | None:
        """The clip, with memory for what comes of it; None where it must wait for some. Raises RoadFailed."""
        clip = away.clips[index]
        full = len(self._in_flight) >= self._met.requests or self._samples + len(clip.pcm) > self._met.samples
        spot = None if full else self.receiver.lease(clip.frames * self._frame_bytes)
        if spot is None:
            if not self._in_flight:  # then nothing will come that could make room
                raise RoadFailed(f"there is no memory for {clip.frames} frames", "the landing holds the longest")
            return None
        number = next(self._numbers)
        self._in_flight[number] = InFlightClip(away, index, spot, time.monotonic())
        self._samples += len(clip.pcm)
        within_ms = None if clip.within_ms is None else min(max(0, clip.within_ms), messages.MAX_WITHIN_MS)
        message = messages.EncodeMessage(number, len(clip.pcm), clip.whole, clip.priority, within_ms, spot)
        return message, clip.pcm

    # --- what comes back ----------------------------------------------------------------------------------------

    def _on_encoded(self, message: messages.EncodeDone) -> None:
        """Raises Torn, MalformedRequest."""
        with self._condition:
            sent = self._in_flight.get(message.id)
        if sent is None:
            raise MalformedRequest(
                f"request {message.id} was answered", "it was not asked, or was answered before"
            )
        clip = sent.batch.clips[sent.clip_index]
        if message.nbytes != sent.region.nbytes or message.frames != clip.frames:
            raise MalformedRequest(
                f"{message.nbytes} bytes of {message.frames} frames",
                f"{sent.region.nbytes} bytes of {clip.frames}",
            )
        # Out of the landing at once: its memory is the credit to send more.
        data = self.receiver.received(sent.region, message.nbytes, message.checksum).copy()
        if self._metrics is not None:
            self._metrics.peer_bytes.inc(message.nbytes)
            seconds, whole_s = self._metrics.peer_seconds, time.monotonic() - sent.sent_s
            for phase, spent_s in (
                ("waiting", message.waited_s),
                ("encoding", message.encoded_s),
                ("road", message.transfer_s),
                ("whole", whole_s),
            ):
                seconds[phase].observe(_clamp(spent_s, whole_s))
        with self._condition:
            sent.batch.data[sent.clip_index] = data
            spent_s = _clamp(message.encoded_s, time.monotonic() - sent.sent_s)
            sent.batch.seconds = max(sent.batch.seconds, spent_s)
            over = self._release_region(message.id, sent)
        if over:
            self._notify(sent.batch)

    def _on_failed(self, number: int, why: str) -> None:
        """Its batch is as lost as if the peer were: another one may be able to encode it, or this engine."""
        with self._condition:
            sent = self._in_flight.get(number)
            if sent is None:
                raise MalformedRequest(f"request {number} has failed", "it was not asked, or was answered before")
            if sent.clip_index not in sent.batch.cancelled:
                self._why = quoted(why)
                sent.batch.error = PeerGone(f"a peer could not encode it: {self._why}")
            self.receiver.sender_done(sent.region)
            over = self._release_region(number, sent)
        if over:
            self._notify(sent.batch)

    def _expect_working_encoder(self) -> None:
        """Raises PeerRefused where it fails batch after batch."""
        if self.failing >= MAX_FAILED_BATCHES:
            raise PeerRefused(
                f"it failed {self.failing} batches in a row: {self._why}",
                todo="see its own log; it is asked again later",
            )

    def _release_region(self, number: int, sent: InFlightClip) -> bool:
        """Its memory is free. Whether that was the last of its batch."""
        del self._in_flight[number]
        self._samples -= len(sent.batch.clips[sent.clip_index].pcm)
        self.receiver.release(sent.region)
        self._progress_s = time.monotonic()
        self._condition.notify_all()
        return self._finish_batch(sent.batch)

    def _finish_batch(self, away: RemoteBatch) -> bool:
        away.remaining -= 1
        if not away.remaining:
            self._batches.remove(away)
            if away.error is not None:
                self.failing += 1
            elif len(away.cancelled) < len(away.clips):
                self.failing = 0
        return not away.remaining

    def _notify(self, away: RemoteBatch) -> None:
        if self._metrics is not None:
            self._metrics.peer_batches.inc()
        away.on_done(away.error or EncodedBatch(self.payload, away.data, away.seconds))


def _clamp(told_s: float, most_s: float) -> float:
    """What a peer told, who may tell anything."""
    return min(max(0.0, told_s), most_s)
