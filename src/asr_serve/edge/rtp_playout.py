"""Playout of a call: audio that is sent to the caller as RTP, at the pace of speech, with its own SSRC and clock."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asr_serve.audio.pcm import Pcm16Assembler, clipped, decode_pcm16, to_int16
from asr_serve.audio.resample import Resampler
from asr_serve.edge.payload_encoder import PACKET_MS, PayloadEncoder, create_payload_encoder
from asr_serve.edge.payload_format import PayloadFormat
from asr_serve.edge.rtp import RtpPacket, build_rtp
from asr_serve.errors import AtCapacity, SessionExpired
from asr_serve.units import ms_to_samples, samples_to_s

PACKET_S = PACKET_MS / 1_000
KEEPALIVE_S = 2.0
"""Time after which a packet of silence tells a quiet call's gateways that somebody is there."""
MAX_QUEUED_S = 10
"""Audio that waits to be sent; more of it is not read yet."""
MAX_WAITING_PLAYS = 16
"""Audios that wait until earlier ones have been played."""
RETRY_MS = 1_000
MAX_LATE_S = 0.2
"""Delay after which the pace begins anew, instead of a burst of packets."""

log = logging.getLogger(__name__)


class RtpSendStream:
    """RTP stream of ours: sequence numbers, timestamps. Pure.

    Each packet, and each pause, is as long as its time; the first packet after a pause has the marker.
    """

    def __init__(self, payload_type: int, form: PayloadFormat) -> None:
        self._encoder: PayloadEncoder = create_payload_encoder(form)
        self._payload_type, self._clock_hz = payload_type, form.clock_hz
        self.ssrc = secrets.randbits(32)
        self._sequence, self._timestamp = secrets.randbits(15), secrets.randbits(32)
        self._marker = True
        self.rate_hz = self._encoder.rate_hz
        self.packet_samples = ms_to_samples(PACKET_MS, self.rate_hz)

    def build_packet(self, pcm: NDArray[np.int16]) -> bytes:
        """Packet of up to `packet_samples`; silence fills it up."""
        if len(pcm) < self.packet_samples:
            pcm = np.concatenate([pcm, np.zeros(self.packet_samples - len(pcm), np.int16)])
        payload = self._encoder.encode(pcm)
        packet = RtpPacket(
            self._payload_type, self._marker, self._sequence, self._timestamp % (1 << 32), self.ssrc, payload
        )
        self._sequence = (self._sequence + 1) % (1 << 16)
        self._timestamp += ms_to_samples(PACKET_MS, self._clock_hz)
        self._marker = False
        return build_rtp(packet)

    def skip(self, packets: int) -> None:
        """Passes over the time of so many packets."""
        if packets > 0:
            self._timestamp += packets * ms_to_samples(PACKET_MS, self._clock_hz)
            self._marker = True


class PlayoutResult(msgspec.Struct, frozen=True):
    """Part of some audio that was sent."""

    played_s: float
    interrupted: bool


class CallPlayout:
    """Playout of one call, by a task of its own. One audio is played after another.

    In      `play`: samples as they come; `stop`: drops what was not sent yet
    Out     `send`: packets, one each 20 ms while there is audio, and a silent one each KEEPALIVE_S
    """

    def __init__(self, payload_type: int, form: PayloadFormat, send: Callable[[bytes], object]) -> None:
        self._stream, self._send = RtpSendStream(payload_type, form), send
        self._queue: deque[NDArray[np.int16]] = deque()
        self._queued_samples = 0
        self._sent_samples = 0
        """Samples of the current audio that were sent."""
        self._is_complete = False
        """Whether the current audio has come to its end: its last packet need not be full."""
        self._generation = 0
        """Number of stops so far: audio of an earlier one is not played."""
        self._turn = asyncio.Lock()
        self._plays = 0
        """Audios that are played or wait."""
        self._has_ended = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        """Done at the next stop."""
        self.is_paused = False
        """Whether the other side does not listen."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._note_end)

    def change_stream(self, stream: RtpSendStream) -> None:
        """Goes on in another format. What waits at another rate is dropped."""
        before, self._stream = self._stream, stream
        if before.rate_hz != self._stream.rate_hz:
            self.stop()

    async def play(
        self, pcm: AsyncIterator[bytes], rate_hz: int, on_end: Callable[[PlayoutResult], None] = lambda _: None
    ) -> PlayoutResult:
        """Plays 16-bit little-endian samples, once earlier ones have been played, and waits for their end. `on_end`:
        told of that, however it comes. Raises what `pcm` does, UnsupportedAudio for the rate, AtCapacity where too many
        wait, SessionExpired after the end."""
        if self._has_ended:
            raise SessionExpired("audio for a call whose playout has ended", "a call that has not ended")
        if self._plays > MAX_WAITING_PLAYS:
            raise AtCapacity(f"audio behind {self._plays} others", f"{MAX_WAITING_PLAYS} that wait", RETRY_MS)
        self._plays += 1
        try:
            return await self._play(pcm, rate_hz, on_end)
        finally:
            self._plays -= 1

    async def _play(
        self, pcm: AsyncIterator[bytes], rate_hz: int, on_end: Callable[[PlayoutResult], None]
    ) -> PlayoutResult:
        generation, stopped = self._generation, self._stopped
        async with self._turn:
            self._sent_samples, self._is_complete, rate_out_hz = 0, False, self._stream.rate_hz
            resampler, whole = Resampler(rate_hz, rate_out_hz), Pcm16Assembler()
            result = PlayoutResult(0.0, True)
            try:
                while generation == self._generation and (data := await _next_or_stop(pcm, stopped)) is not None:
                    await self._append(resampler.resample(decode_pcm16(whole.take_whole_samples(data))), generation)
                if generation == self._generation:
                    await self._append(resampler.finish(), generation)
                    self._is_complete = True
                    self._wake()
                while self._queue and generation == self._generation:
                    await self._wait()
                result = PlayoutResult(0.0, generation != self._generation)
            finally:
                if result.interrupted and generation == self._generation:
                    self._clear()
                played_s = samples_to_s(self._sent_samples, rate_out_hz)
                result = PlayoutResult(round(played_s, 3), result.interrupted)
                on_end(result)
            return result

    def stop(self) -> None:
        """Drops all audio that was not sent: that which is played, and that which waits."""
        self._generation += 1
        if not self._stopped.done():
            self._stopped.set_result(None)
        self._stopped = self._loop.create_future()
        self._clear()

    def resume(self) -> None:
        """Goes on after a pause."""
        self.is_paused = False
        self._wake()

    @property
    def is_playing(self) -> bool:
        return self._turn.locked()

    async def close(self) -> None:
        self.stop()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Ends what is played, and what waits, when nothing is sent any more."""
        self._has_ended = True
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("playout of a call failed", exc_info=error)
        self.stop()

    async def _append(self, pcm: np.ndarray, generation: int) -> None:
        """Queues samples, as soon as there is room, if they are still wanted."""
        while generation == self._generation and self._queued_samples > MAX_QUEUED_S * self._stream.rate_hz:
            await self._wait()
        if generation == self._generation and len(pcm):
            self._queue.append(to_int16(clipped(pcm)))
            self._queued_samples += len(pcm)
            self._wake()

    def _clear(self) -> None:
        self._queue.clear()
        self._queued_samples = 0
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        await self._changed.wait()

    def _take(self, samples: int) -> NDArray[np.int16]:
        parts: list[NDArray[np.int16]] = []
        while samples and self._queue:
            first = self._queue.popleft()
            if len(first) > samples:
                self._queue.appendleft(first[samples:])
                first = first[:samples]
            parts.append(first)
            samples -= len(first)
        pcm = np.concatenate(parts) if parts else np.zeros(0, np.int16)
        self._queued_samples -= len(pcm)
        self._sent_samples += len(pcm)
        return pcm

    async def _run(self) -> None:
        next_s, was_idle = self._loop.time(), True
        while True:
            enough = 1 if self._is_complete else self._stream.packet_samples
            if self._queued_samples >= enough and not self.is_paused:
                pcm = self._take(self._stream.packet_samples)
                self._wake()
            else:
                was_idle = True
                changed = self._changed
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await changed.wait()
                    continue
                except TimeoutError:
                    if self.is_paused:
                        continue
                    pcm = np.zeros(0, np.int16)
            late_s = self._loop.time() - next_s
            if was_idle or late_s > MAX_LATE_S:  # after a pause, or in a process that stood still
                self._stream.skip(round(late_s / PACKET_S))
                next_s += round(late_s / PACKET_S) * PACKET_S
                was_idle = False
            self._send(self._stream.build_packet(pcm))
            next_s += PACKET_S
            await asyncio.sleep(max(0.0, next_s - self._loop.time()))


async def _next_or_stop(pcm: AsyncIterator[bytes], stopped: asyncio.Future[None]) -> bytes | None:
    """Next part of a body; None at its end, or at the stop, which a body that is quiet does not delay."""

    async def read() -> bytes | None:
        return await anext(pcm, None)

    reading = asyncio.ensure_future(read())
    either: set[asyncio.Future[Any]] = {reading, stopped}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
