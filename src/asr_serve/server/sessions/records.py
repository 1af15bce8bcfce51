"""Records of a stored session, and the contract of a store."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from asr_serve.audio.pcm import to_float32, to_int16
from asr_serve.audio.stream_decoder import LiveDecoderState
from asr_serve.engine.process.messages import ErrorMessage
from asr_serve.pipelines.live.session_state import LiveSessionState
from asr_serve.protocols.stream.client_messages import NewSessionRequest


class SessionHeader(msgspec.Struct, frozen=True):
    """Constant properties of a stored session."""

    model: str
    language: str
    request: NewSessionRequest
    started_unix_s: float


class SessionPosition(msgspec.Struct, frozen=True):
    """Audio that a session has accepted: the client continues with the next byte."""

    received_bytes: int
    received_samples: int
    decoder: LiveDecoderState


class SessionCheckpoint(msgspec.Struct, frozen=True):
    """State of a session after its last numbered event."""

    live: LiveSessionState | None
    """None once everything has been reported."""
    last_seq: int
    locked: str
    """Text of the open segment that was reported as locked."""
    segments: int
    """Segments that were reported."""
    partial: bytes | None
    """Newest partial event, as JSON."""
    flushes: list[tuple[str, int]]
    """Last flush commands: name, position in bytes."""
    finishing: bool
    ending: ErrorMessage | None
    """Error for which the server ended the audio."""


class StoredEvent(msgspec.Struct, frozen=True):
    """Numbered event as it is sent."""

    seq: int
    type: str
    json: bytes


class StoredAudio(msgspec.Struct, frozen=True):
    """Audio from `start_samples` on, at 16 kHz, mono."""

    start_samples: int
    samples: int
    pcm16: bool
    """Whether `data` is int16, else float32."""
    data: bytes

    @classmethod
    def of(cls, start_samples: int, pcm: np.ndarray, *, pcm16: bool) -> StoredAudio:
        data = to_int16(pcm).tobytes() if pcm16 else np.ascontiguousarray(pcm, np.float32).tobytes()
        return cls(start_samples, len(pcm), pcm16, data)

    def pcm(self) -> np.ndarray:
        """Samples (n,) float32."""
        return to_float32(np.frombuffer(self.data, np.int16 if self.pcm16 else np.float32))


class SessionWrite(msgspec.Struct, frozen=True, kw_only=True):
    """Addition to a stored session, made as a whole or not at all."""

    session_id: str
    client: str
    epoch: int
    """Fencing token: the store refuses the write of an owner before the last one."""
    number: int
    """Number of the write, one more than that of the last one: a late one changes nothing."""
    ttl_ms: int
    header: SessionHeader | None
    """Header of a session that is written whole, in place of all that is stored of it; None: an addition."""
    position: SessionPosition
    checkpoint: SessionCheckpoint | None
    events: Sequence[StoredEvent] = ()
    audio: Sequence[StoredAudio] = ()
    last_seq: int = 0
    """Number of the last event, stored with this write or before."""
    first_seq: int = 1
    """Events before this one are dropped."""
    first_samples: int = 0
    """Audio that starts before this is dropped."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of audio and events."""
        return sum(len(each.data) for each in self.audio) + sum(len(each.json) for each in self.events)


class StoredSession(NamedTuple):
    """A session as it is stored."""

    session_id: str
    epoch: int
    """Epoch of its owner: the last one who claimed it."""
    number: int
    """Number of the last write."""
    read_unix_ms: int
    """Time of the reading, by the store's clock."""
    header: SessionHeader
    position: SessionPosition
    checkpoint: SessionCheckpoint
    events: list[StoredEvent]
    audio: list[StoredAudio]

    def audio_from(self, start_samples: int) -> np.ndarray:
        """Samples (n,) float32 from there to the last one received. Raises ValueError where some are missing."""
        parts, at = [], start_samples
        for each in self.audio:
            if each.start_samples <= at < each.start_samples + each.samples:
                parts.append(each.pcm()[at - each.start_samples :])
                at = each.start_samples + each.samples
        if at != self.position.received_samples and parts:
            raise ValueError(f"audio up to {at} of {self.position.received_samples} samples is stored")
        if not parts and start_samples < self.position.received_samples:
            raise ValueError(f"no audio from {start_samples} on is stored")
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


class WriteOutcome(Enum):
    WRITTEN = "written"
    REFUSED = "refused"
    """Another server has claimed the session, or it was ended."""
    MISSING = "missing"
    """The store does not have the session, or not the state that the write adds to: it must be written whole."""
    FAILED = "failed"
    """The store refuses this write, and not those of other sessions."""


class SessionStore(Protocol):
    """Storage of sessions outside the server. Every method raises StoreUnavailable, whose cause is for the log. Belongs
    to the event loop's thread."""

    timeout_s: float
    """Longest time of a call."""

    async def ping(self) -> None:
        """Checks that the store accepts writes."""

    async def write(self, writes: Sequence[SessionWrite]) -> list[WriteOutcome]:
        """Writes a batch; each write is atomic."""

    async def renew(self, session_ids: Sequence[tuple[str, int]], ttl_ms: int) -> list[WriteOutcome]:
        """Prolongs the time limits of sessions, given by id and epoch."""

    async def read(self, session_id: str, client: str) -> StoredSession | str | None:
        """Returns a session, whose owner keeps it. None: there is none, or it is another client's. A text: it was
        ended, and that is why. Raises Unreadable, and ValueError for records of another shape."""

    async def claim(self, read: StoredSession, client: str, ttl_ms: int) -> StoredSession | str | None:
        """Makes the caller the owner of a session that was read, if its epoch is still that one. Returns as `read`
        does, and None also for another epoch, and where it comes too late."""

    async def unclaim(self, session_id: str, epoch: int) -> None:
        """Gives a session that was claimed, and not written since, back to its owner before. `epoch`: that of the
        claim. Does nothing if another server has claimed it since."""

    async def end(self, session_id: str, client: str, epoch: int, reason: str, ttl_ms: int) -> None:
        """Replaces a session by the reason of its end, unless another server has claimed it. One that is not stored
        yet will not be."""

    async def close(self) -> None: ...
