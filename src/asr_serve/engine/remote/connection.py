"""Connection to one worker engine: its batches in flight, and the requests sent over it.

Any failure ends the connection and closes its receive buffer, so that late data is not written anywhere. Its
batches in flight fail, and are encoded elsewhere.
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
from asr_serve.errors import AsrServeError, MalformedRequest, PeerGone, PeerRefused, TransportFailed, TransportTimeout
from asr_serve.metrics import EngineMetrics
from asr_serve.transfer.transports import BufferRegion, Receiver
from asr_serve.types import PeerTimings, Priority

MAX_BATCHES_IN_FLIGHT = 2
"""Batches of one peer: one being encoded, and one waiting there or in transfer."""
MAX_FAILED_BATCHES = 3
"""Batches in a row that a peer may fail to encode: it has a fault, and fails faster than others encode."""
MAX_AGE_FACTOR = 4
"""Most age of an unanswered clip, in units of `peer_timeout_s`, whatever progress others make."""
LONGEST_TICK_S = 1.0
"""Longest interval between two checks of a silent connection."""
NOTHING = np.empty(0, np.uint8)

log = logging.getLogger(__name__)


class EncodeClip(NamedTuple):
    """Utterance to encode. `pcm` (n,) float32, 16 kHz."""

    pcm: np.ndarray
    frames: int
    whole: bool
    priority: Priority
    within_ms: int | None


class EncodedBatch(NamedTuple):
    """Output of a batch: bytes of each clip, `cross` or `hidden` by `payload`; none for a cancelled clip.
    `seconds`: encoding time at the peer. `timings`: those of each clip; None for a cancelled one."""

    payload: str
    data: list[np.ndarray]
    seconds: float
    timings: list[PeerTimings | None]


Done = Callable[[EncodedBatch | AsrServeError], None]
"""Callback of a batch: called once, on a thread of the peer."""


class RemoteBatch(msgspec.Struct, eq=False):
    """Batch in flight at a peer."""

    clips: Sequence[EncodeClip]
    on_done: Done
    data: list[np.ndarray]
    remaining: int
    """Clips not answered yet."""
    timings: list[PeerTimings | None]
    cancelled: set[int]
    """Indices of cancelled clips."""
    seconds: float = 0.0
    error: AsrServeError | None = None


class InFlightClip(NamedTuple):
    """Clip that was requested from the peer."""

    batch: RemoteBatch
    clip_index: int
    region: BufferRegion
    sent_s: float
    """Time of sending, on the monotonic clock."""
    sent_ns: int
    """The same, by `time.time_ns`."""


class PeerConnection:
    """Open connection to a peer. `run` serves it on the peer's thread; `submit_batch` and `cancel_clip` are for
    the loop's thread."""

    def __init__(
        self,
        line: PeerChannel,
        landing: Receiver,
        carries: str,
        frame_bytes: int,
        met: PeerDescription,
        timeout_s: float,
        metrics: EngineMetrics | None,
        address: str,
    ) -> None:
        self.channel, self.receiver, self.payload, self._address = line, landing, carries, address
        self._frame_bytes, self._met, self._timeout_s, self._metrics = frame_bytes, met, timeout_s, metrics
        self._condition = threading.Condition()  # its lock guards all that follows, and the receiver's regions
        self._batches: list[RemoteBatch] = []
        self._queue: deque[tuple[RemoteBatch, int]] = deque()
        """Clips that wait for receive memory, or for capacity at the peer."""
        self._control_messages: deque[messages.ToWorker] = deque()
        self._in_flight: dict[int, InFlightClip] = {}
        self._samples = 0
        self.failing, self._why = 0, ""
        """Batches in a row that the peer could not encode, and its last reason."""
        self._numbers = itertools.count()
        self._over: AsrServeError | None = None
        self._finishing = False
        self._last_message_s = self._progress_s = self._last_ping_s = time.monotonic()

    @property
    def batches_in_flight(self) -> int:
        """Number of batches in flight."""
        return len(self._batches)

    @property
    def has_room(self) -> bool:
        return (
            self._over is None
            and not self._finishing
            and len(self._batches) < MAX_BATCHES_IN_FLIGHT
            and self.failing < MAX_FAILED_BATCHES
        )

    def finish(self) -> None:
        """Takes no more batches, and ends `run` once those in flight are answered."""
        with self._condition:
            self._finishing = True
            finished = self._finished
        if finished:
            self.channel.shut_down()

    @property
    def _finished(self) -> bool:
        return self._finishing and not self._batches

    def submit_batch(self, clips: Sequence[EncodeClip], done: Done) -> RemoteBatch | None:
        """Submits a batch; returns None where there is no room."""
        with self._condition:
            if not self.has_room:
                return None
            batch = RemoteBatch(clips, done, [NOTHING] * len(clips), len(clips), [None] * len(clips), set())
            if not self._batches:
                self._progress_s = time.monotonic()
            self._batches.append(batch)
            self._queue.extend((batch, index) for index in range(len(clips)))
            self._condition.notify_all()
        return batch

    def cancel_clip(self, away: RemoteBatch, index: int) -> None:
        """Cancels one clip of a batch."""
        finished = False
        with self._condition:
            away.cancelled.add(index)
            if (away, index) in self._queue:
                self._queue.remove((away, index))
                finished = self._finish_batch(away)
            else:
                numbers = [n for n, clip in self._in_flight.items() if clip.batch is away and clip.clip_index == index]
                self._control_messages.extend(messages.CancelEncode(number) for number in numbers)
                self._condition.notify_all()
        if finished:
            self._notify(away)

    # --- the peer's thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves the connection until it breaks. Raises PeerGone, PeerRefused, TransportFailed, MalformedRequest, or
        any unexpected exception."""
        writer = threading.Thread(target=self._send_loop, name="peer writer", daemon=True)
        writer.start()
        try:
            while not self._finished:
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
        """Removes and returns the batches in flight, after `run` has ended. The caller reports the error to them
        after `close`."""
        with self._condition:
            self._over = error
            lost, self._batches = self._batches, []
            self._queue.clear()
            self._in_flight.clear()
        return lost

    def close(self) -> None:
        """Closes the receive buffer and the channel: late data is not written anywhere."""
        try:
            self.receiver.close()
        finally:
            self.channel.close()

    def _check_health(self, message: messages.ToClient | None) -> None:
        """Raises TransportTimeout for a peer that is silent, makes no progress with its batches, or leaves a clip
        unanswered; and the error that ended the writer."""
        now_s = time.monotonic()
        with self._condition:
            if self._over is not None:
                raise self._over
            if message is not None:
                self._last_message_s = now_s
            quiet_s, stalled_s = now_s - self._last_message_s, now_s - self._progress_s
            if quiet_s > self._timeout_s:
                raise TransportTimeout(
                    f"it gave no sign of life for {quiet_s:.1f} s", f"peer_timeout_s={self._timeout_s:g}"
                )
            if self._batches and stalled_s > self._timeout_s:
                raise TransportTimeout(
                    f"nothing came of {len(self._batches)} batches for {stalled_s:.1f} s",
                    f"peer_timeout_s={self._timeout_s:g}",
                )
            oldest_s = now_s - next((clip.sent_s for clip in self._in_flight.values()), now_s)
            if oldest_s > MAX_AGE_FACTOR * self._timeout_s:
                raise TransportTimeout(
                    f"one of {len(self._in_flight)} clips was not answered for {oldest_s:.1f} s",
                    f"{MAX_AGE_FACTOR} x peer_timeout_s={self._timeout_s:g}",
                )
            if min(quiet_s, now_s - self._last_ping_s) > self._timeout_s / 4:
                self._last_ping_s = now_s
                self._control_messages.append(messages.PeerPing())
                self._condition.notify_all()

    # --- requests, on the writer's thread ---------------------------------------------------------------------

    def _send_loop(self) -> None:
        try:
            while (message := self._next_message()) is not None:
                self.channel.send(*message)
        except Exception as failure:
            if not isinstance(failure, AsrServeError):
                log.exception("a peer cannot be asked")
                failure = PeerGone(f"it could not be asked: {failure}")
            with self._condition:
                self._over = self._over or failure
            self.channel.shut_down()

    def _next_message(self) -> tuple[messages.ToWorker, np.ndarray | None] | None:
        """Waits for and returns the next message to send; None at the end."""
        with self._condition:
            while self._over is None:
                if self._control_messages:
                    return self._control_messages.popleft(), None
                if self._queue and (request := self._allocate_region(*self._queue[0])) is not None:
                    self._queue.popleft()
                    return request
                self._condition.wait()
        return None

    def _allocate_region(self, away: RemoteBatch, index: int) -> tuple[messages.EncodeMessage, np.ndarray] | None:
        """Returns the request for a clip, with a region for its output; None where it must wait for memory. Raises
        TransportFailed."""
        clip = away.clips[index]
        full = len(self._in_flight) >= self._met.requests or self._samples + len(clip.pcm) > self._met.samples
        region = None if full else self.receiver.lease(clip.frames * self._frame_bytes)
        if region is None:
            if not self._in_flight:  # no memory will become free
                raise TransportFailed(f"there is no memory for {clip.frames} frames", "the landing holds the longest")
            return None
        number = next(self._numbers)
        self._in_flight[number] = InFlightClip(away, index, region, time.monotonic(), time.time_ns())
        self._samples += len(clip.pcm)
        within_ms = None if clip.within_ms is None else min(max(0, clip.within_ms), messages.MAX_WITHIN_MS)
        message = messages.EncodeMessage(number, len(clip.pcm), clip.whole, clip.priority, within_ms, region)
        return message, clip.pcm

    # --- replies ------------------------------------------------------------------------------------------------

    def _on_encoded(self, message: messages.EncodeDone) -> None:
        """Stores the output of a clip. Raises ChecksumMismatch, MalformedRequest."""
        with self._condition:
            request = self._in_flight.get(message.id)
        if request is None:
            raise MalformedRequest(f"request {message.id} was answered", "it was not asked, or was answered before")
        clip = request.batch.clips[request.clip_index]
        if message.nbytes != request.region.nbytes or message.frames != clip.frames:
            raise MalformedRequest(
                f"{message.nbytes} bytes of {message.frames} frames", f"{request.region.nbytes} bytes of {clip.frames}"
            )
        # Copied at once: free receive memory is the credit to send more.
        data = self.receiver.received(request.region, message.nbytes, message.checksum).copy()
        whole_s = time.monotonic() - request.sent_s
        waited_s, encoded_s, transfer_s = (
            _clamp(reported_s, whole_s) for reported_s in (message.waited_s, message.encoded_s, message.transfer_s)
        )
        if self._metrics is not None:
            self._metrics.peer_bytes.inc(message.nbytes)
            seconds = self._metrics.peer_seconds
            for phase, spent_s in (
                ("waiting", waited_s),
                ("encoding", encoded_s),
                ("transfer", transfer_s),
                ("whole", whole_s),
            ):
                seconds[phase].observe(spent_s)
        received_ns = request.sent_ns + round(whole_s * 1e9)
        timings = PeerTimings(self._address, request.sent_ns, received_ns, waited_s, encoded_s, transfer_s)
        with self._condition:
            request.batch.data[request.clip_index], request.batch.timings[request.clip_index] = data, timings
            request.batch.seconds = max(request.batch.seconds, encoded_s)
            finished = self._release_region(message.id, request)
        if finished:
            self._notify(request.batch)

    def _on_failed(self, number: int, why: str) -> None:
        """Fails the batch, as if the peer were gone: another peer may be able to encode it, or this engine."""
        with self._condition:
            request = self._in_flight.get(number)
            if request is None:
                raise MalformedRequest(f"request {number} has failed", "it was not asked, or was answered before")
            if request.clip_index not in request.batch.cancelled:
                self._why = quoted(why)
                request.batch.error = PeerGone(f"a peer could not encode it: {self._why}")
            self.receiver.sender_done(request.region)
            finished = self._release_region(number, request)
        if finished:
            self._notify(request.batch)

    def _expect_working_encoder(self) -> None:
        """Raises PeerRefused where the peer fails batch after batch."""
        if self.failing >= MAX_FAILED_BATCHES:
            raise PeerRefused(
                f"it failed {self.failing} batches in a row: {self._why}",
                todo="see its own log; it is asked again later",
            )

    def _release_region(self, number: int, sent: InFlightClip) -> bool:
        """Frees the memory of a clip; returns whether it was the last of its batch."""
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
        away.on_done(away.error or EncodedBatch(self.payload, away.data, away.seconds, away.timings))


def _clamp(reported_s: float, most_s: float) -> float:
    """Limits a duration reported by a peer to what is possible."""
    return min(max(0.0, reported_s), most_s)
