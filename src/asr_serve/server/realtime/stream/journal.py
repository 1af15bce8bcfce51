"""Journal of a session: which part of it is stored, and what is still to be written.

A numbered event is stored with the state of the session after it, in one write, and is sent once that is stored: so
no event that a client has received can be told again, or otherwise, by a server that takes the session over. Audio
is acknowledged once it is stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from asr_serve.protocols.stream.server_events import EncodedEvent
from asr_serve.server.sessions.records import (
    SessionCheckpoint,
    SessionHeader,
    SessionPosition,
    SessionWrite,
    StoredAudio,
    StoredEvent,
    StoredSession,
)
from asr_serve.server.sessions.writer import SessionWriter
from asr_serve.units import RATE_HZ, ms_to_samples

MAX_ENTRY_SAMPLES = RATE_HZ
"""Audio in one entry, which is dropped as a whole."""
BLOCKED_S = 2.0
"""Longest wait of a command until the state of the session can be exported; and time after which the events of a
session that is not stored yet are sent though its state could not be exported: no other server has an older state."""
UNEXPORTABLE_S = 10.0
"""Time for which the events of a stored session wait for its state. After it, the session ends here and continues from
what is stored: events that are sent and not stored could be told otherwise by the server that continues it."""


class Settled(Enum):
    """Outcome of waiting until a session is stored."""

    STORED = "stored"
    AWAY = "away"
    """The store is away: the session is in memory only."""
    BLOCKED = "blocked"
    """The state could not be exported in time: what is stored is an older one."""
    LOST = "lost"
    """Another server has the session, or it was closed."""


class JournalSource(Protocol):
    """Session, as its journal sees it."""

    @property
    def received_samples(self) -> int: ...

    @property
    def last_seq(self) -> int:
        """Number of the last event."""

    @property
    def needed_from_samples(self) -> int:
        """Start of the audio that may still be needed."""

    def export_checkpoint(self) -> SessionCheckpoint | None:
        """Returns the state after all events; None: not now."""

    def export_position(self) -> SessionPosition: ...

    def stored_audio(self, from_samples: int) -> tuple[int, np.ndarray]:
        """Returns the audio from there on that is still needed, and its first position."""

    def events_after(self, seq: int) -> Sequence[EncodedEvent]:
        """Returns the numbered events after `seq` that the log has."""

    def release(self, seq: int, received_bytes: int, received_samples: int, *, durable: bool) -> None:
        """Events up to `seq` may be sent, and audio may be acknowledged. `durable`: whether it is stored."""

    def on_claimed_elsewhere(self) -> None: ...

    def on_journal_failed(self) -> None:
        """The session cannot be stored any more, by an error of its own."""


class SessionJournal:
    """Journal of one session. See JournaledSession."""

    def __init__(
        self,
        writer: SessionWriter,
        source: JournalSource,
        session_id: str,
        client: str,
        header: SessionHeader,
        checkpoint_ms: int,
        *,
        pcm16: bool,
        stored: StoredSession | None = None,
    ) -> None:
        """`pcm16`: whether the audio is of 16-bit integers. `stored`: what the store has of it."""
        self._writer, self._source, self._pcm16 = writer, source, pcm16
        self._id, self._client, self._header = session_id, client, header
        self._checkpoint_samples = ms_to_samples(checkpoint_ms)
        self._epoch, self._number = (1, 0) if stored is None else (stored.epoch, stored.number)
        """Epoch of this owner, and number of the last write."""
        self._whole = stored is None
        """Whether it must be written whole."""
        self._command = stored is None
        """Whether the state must be written though there are no events."""
        self._seq = 0 if stored is None else stored.checkpoint.last_seq
        self._samples = 0 if stored is None else stored.position.received_samples
        self._checkpoint_at = self._samples
        self._entries = deque(() if stored is None else ((a.start_samples, a.samples) for a in stored.audio))
        """First sample and length of each entry of audio in the store."""
        self._trimmed_at = 0
        """Start of the needed audio when the state was written last."""
        self._stored_at = (0, 0) if stored is None else (stored.position.received_bytes, self._samples)
        """Bytes and samples of audio that are stored."""
        self.stored = stored is not None
        """Whether the store has the session."""
        self._waiters: list[asyncio.Future[Settled]] = []
        self._served: list[asyncio.Future[Settled]] = []
        """Waiters whose write is in flight."""
        self._blocked_since_s: float | None = None
        self._closed = False
        writer.register(self)
        writer.wake(self)

    @property
    def lease(self) -> tuple[str, int]:
        return self._id, self._epoch

    @property
    def epoch(self) -> int:
        """Epoch of this owner."""
        return self._epoch

    @property
    def client(self) -> str:
        """Identifies the session's owner to all servers."""
        return self._client

    @property
    def up(self) -> bool:
        """Returns whether the store accepts what is written."""
        return self._writer.serves(self)

    @property
    def durable(self) -> bool:
        """Returns whether another server can continue the session now."""
        return self.stored and self.up

    @property
    def is_due(self) -> bool:
        source = self._source
        return (
            self._whole
            or self._command
            or bool(self._waiters)
            or source.last_seq > self._seq
            or source.received_samples - self._samples >= RATE_HZ
            or self._holds_too_much
        )

    @property
    def _holds_too_much(self) -> bool:
        """Returns whether a checkpoint would free much of the stored audio."""
        needed_from, much = self._source.needed_from_samples, max(RATE_HZ, self._checkpoint_samples)
        if needed_from - self._trimmed_at < much:  # what the last checkpoint could not free, the next one cannot
            return False
        return sum(samples for start, samples in self._entries if start + samples <= needed_from) >= much

    def on_change(self) -> None:
        """Looks whether something is to be written. Without a store, releases it."""
        if not self.up:
            self.release_all()
        elif self.is_due:
            self._writer.wake(self)

    def write_now(self) -> None:
        """Writes the state, though it has reported nothing: a command was accepted."""
        self._command = True
        self.on_change()

    async def settle(self) -> Settled:
        """Waits until everything up to now is stored, or cannot be."""
        if self._closed:
            return Settled.LOST
        if not self.up:
            return Settled.AWAY
        done: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        self._waiters.append(done)
        self.write_now()
        await asyncio.wait([done], timeout=BLOCKED_S)
        if not done.done() and self._blocked_since_s is None:
            # The store is slow, and not the engine: one batch may be in flight, and this session's be the next.
            await asyncio.wait([done], timeout=2 * self._writer.store.timeout_s)
        return done.result() if done.done() else Settled.BLOCKED

    def close(self) -> None:
        """Writes nothing more. Idempotent."""
        self._closed = True
        self._writer.unregister(self)
        self._answer(Settled.LOST)

    # --- from the writer -------------------------------------------------------------------------------

    def next_write(self) -> SessionWrite | None:
        if not self.is_due:
            return None
        source = self._source
        events = source.events_after(0 if self._whole else self._seq)
        unsent = source.last_seq > self._seq
        start, pcm = source.stored_audio(self._samples)
        stale = source.received_samples - self._checkpoint_at >= self._checkpoint_samples
        # Audio that is not stored yet and is needed no more: the stored state would need it.
        required = self._whole or self._command or unsent or start > self._samples
        checkpoint = source.export_checkpoint() if required or stale or self._holds_too_much else None
        if checkpoint is None and (required or not len(pcm)):
            if required:
                self._count_blocked()
            return None
        self._blocked_since_s = None
        if checkpoint is not None:
            first = source.received_samples if checkpoint.live is None else checkpoint.live.audio_from
            if self._whole:
                self._entries.clear()
                start, pcm = source.stored_audio(first)
            while self._entries and sum(self._entries[0]) <= first:
                self._entries.popleft()
            self._checkpoint_at, self._trimmed_at = source.received_samples, source.needed_from_samples
        audio = [
            StoredAudio.of(start + at, pcm[at : at + MAX_ENTRY_SAMPLES], pcm16=self._pcm16)
            for at in range(0, len(pcm), MAX_ENTRY_SAMPLES)
        ]
        self._entries.extend((each.start_samples, each.samples) for each in audio)
        first_seq = source.events_after(0)[:1]
        self._number += 1
        write = SessionWrite(
            session_id=self._id,
            client=self._client,
            epoch=self._epoch,
            number=self._number,
            ttl_ms=self._writer.ttl_ms,
            header=self._header if self._whole else None,
            position=source.export_position(),
            checkpoint=checkpoint,
            events=[StoredEvent(event.seq or 0, event.type, event.json) for event in events],
            audio=audio,
            last_seq=source.last_seq,
            first_seq=first_seq[0].seq or 1 if first_seq else 1,
            first_samples=self._entries[0][0] if self._entries else source.received_samples,
        )
        self._seq = events[-1].seq or 0 if events else self._seq
        self._samples = source.received_samples
        self._whole = self._command = False
        self._served, self._waiters = [*self._served, *self._waiters], []
        return write

    def on_written(self, write: SessionWrite) -> None:
        position = write.position
        last_seq = write.events[-1].seq if write.events else 0
        self.stored, self._stored_at = True, (position.received_bytes, position.received_samples)
        self._source.release(last_seq, *self._stored_at, durable=self.up)
        self._answer(Settled.STORED, waiting=False)

    def on_missing(self) -> None:
        self._whole, self.stored = True, False

    def on_refused(self) -> None:
        self.close()
        self._source.on_claimed_elsewhere()

    def on_store_lost(self) -> None:
        self._whole, self.stored = True, False
        self.release_all()
        self._answer(Settled.AWAY)

    def on_failed(self) -> None:
        self.close()
        self._source.on_journal_failed()

    def release_all(self) -> None:
        """Continues in memory only."""
        source = self._source
        position = source.export_position()
        source.release(source.last_seq, position.received_bytes, position.received_samples, durable=False)

    def _count_blocked(self) -> None:
        now_s = time.monotonic()
        if self._blocked_since_s is None:
            self._blocked_since_s = now_s
        elif not self.stored and now_s - self._blocked_since_s > BLOCKED_S:
            # Words wait no longer; audio is acknowledged as it is stored.
            self._source.release(self._source.last_seq, *self._stored_at, durable=False)
        elif self.stored and now_s - self._blocked_since_s > UNEXPORTABLE_S:
            raise RuntimeError(f"the state of the session could not be exported for {UNEXPORTABLE_S:g} s")

    def _answer(self, outcome: Settled, *, waiting: bool = True) -> None:
        """Answers those whose write is in flight and, with `waiting`, those whose write is not."""
        waiters, self._served = self._served, []
        if waiting:
            waiters, self._waiters = [*waiters, *self._waiters], []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(outcome)
