"""Messages of one call that its conversation has not read yet: the track's audio, the data channel's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import MutableMapping
from typing import Any

from asr_serve.server.realtime.openai.conversation import TrackMessage
from asr_serve.units import RATE_HZ

MAX_AUDIO_SAMPLES = 30 * RATE_HZ
"""Samples that wait at most: a call cannot be told to send slower. Silence stands for what is more."""
MAX_EVENTS, MAX_EVENT_BYTES = 256, 1 << 20
"""Events that wait at most, and their length in all."""
STEP_SAMPLES = RATE_HZ
"""Most samples of one message."""
SAMPLE_BYTES = 2

Message = MutableMapping[str, Any]


class CallInbox:
    """Queue in order of arrival, whose audio keeps its length and not its bytes where there is too much of it. Belongs
    to the event loop's thread."""

    def __init__(self) -> None:
        self._queue: deque[list[bytes] | int | Message] = deque()
        """Audio in pieces, or a length of silence, or a message."""
        self._filled = asyncio.Event()
        self._waiting_samples = self._events = self._event_bytes = 0
        self._discarding_from: int | None = None
        self.position_samples = 0
        """End of all audio so far."""
        self.discarded_samples = 0

    def put_audio(self, pcm: bytes) -> None:
        """Appends s16le at 16 kHz."""
        samples = len(pcm) // SAMPLE_BYTES
        if self._waiting_samples + samples > MAX_AUDIO_SAMPLES:
            if self._discarding_from is None:
                self._discarding_from = self.position_samples
            self.discarded_samples += samples
            self.put_silence(samples)
            return
        self._tell_discarded()
        self._waiting_samples += samples
        self.position_samples += samples
        if self._queue and isinstance(last := self._queue[-1], list):
            last.append(pcm)
        else:
            self._queue.append([pcm])
        self._filled.set()

    def put_silence(self, samples: int) -> None:
        if samples <= 0:
            return
        self.position_samples += samples
        if self._queue and isinstance(last := self._queue[-1], int):
            self._queue[-1] = last + samples
        else:
            self._queue.append(samples)
        self._filled.set()

    def put_loss(self, start_samples: int, end_samples: int, packets: int) -> None:
        """Tells of packets that did not arrive; a hundred of them a second at most come in."""
        if self._events < MAX_EVENTS:
            self._put(
                {
                    "type": TrackMessage.LOSS,
                    "start_samples": start_samples,
                    "end_samples": end_samples,
                    "packets": packets,
                },
                0,
            )

    def put_event(self, event: str | bytes) -> bool:
        """Appends an event of the client; False: too many wait, and this one is dropped."""
        size = len(event)
        if self._events >= MAX_EVENTS or self._event_bytes + size > MAX_EVENT_BYTES:
            return False
        kind = "text" if isinstance(event, str) else "bytes"
        self._put({"type": "websocket.receive", kind: event}, size)
        return True

    def put_end(self, code: int, *, finish: bool) -> None:
        """Ends the call. `finish`: the text of the audio so far is sent before."""
        self._tell_discarded()
        if finish:
            self._put({"type": TrackMessage.ENDED}, 0)
        self._put({"type": "websocket.disconnect", "code": code}, 0)

    async def receive(self) -> Message:
        """Returns the next message, as an ASGI server does."""
        while not self._queue:
            self._filled.clear()
            await self._filled.wait()
        first = self._queue[0]
        if isinstance(first, int):
            step = min(first, STEP_SAMPLES)
            self._queue.popleft()
            if first > step:
                self._queue.appendleft(first - step)
            return {"type": TrackMessage.AUDIO, "audio": bytes(SAMPLE_BYTES * step)}
        self._queue.popleft()
        if isinstance(first, list):
            audio = b"".join(first)
            self._waiting_samples -= len(audio) // SAMPLE_BYTES
            return {"type": TrackMessage.AUDIO, "audio": audio}
        self._events -= 1
        self._event_bytes -= len(first.get("text") or first.get("bytes") or "")
        return first

    def _tell_discarded(self) -> None:
        if self._discarding_from is not None:
            start, self._discarding_from = self._discarding_from, None
            self.put_loss(start, self.position_samples, 0)

    def _put(self, message: Message, size: int) -> None:
        self._events += 1
        self._event_bytes += size
        self._queue.append(message)
        self._filled.set()
