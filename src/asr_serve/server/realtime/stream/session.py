"""Live session of /v1/stream, with one connection at a time or none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from asr_serve.audio.stream_decoder import MAX_SILENT_SAMPLES, LiveAudioDecoder
from asr_serve.engine.process.messages import ErrorMessage
from asr_serve.errors import (
    AsrServeError,
    AudioError,
    AudioTooLong,
    IdleTimeout,
    MalformedRequest,
    OptionError,
    OutOfTurn,
    StoreUnavailable,
    TakenOver,
    UnsupportedOption,
)
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.live.live_session import MAX_PENDING_FLUSHES
from asr_serve.pipelines.live.session_state import SavedLiveSession
from asr_serve.protocols.stream.client_messages import MAX_SILENCE_S, PACKETS
from asr_serve.protocols.stream.server_events import (
    AckEvent,
    EncodedEvent,
    EndEvent,
    PartialEvent,
    SegmentEvent,
    SessionEvent,
    StreamEventEncoder,
)
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.lifecycle import SessionLimits
from asr_serve.server.realtime.stream.connection import FormatStreamError, StreamConnection
from asr_serve.server.realtime.stream.event_log import EventLog
from asr_serve.server.realtime.stream.journal import SessionJournal, Settled
from asr_serve.server.sessions.records import SessionCheckpoint, SessionPosition, StoredSession
from asr_serve.units import RATE_HZ, samples_to_s

log = logging.getLogger(__name__)

SLICE_BYTES = 4_096
"""Bytes of audio, up to some seconds of it, that are decoded before `full` is checked again."""

RESUME_RETRY_MS = 200
"""Retry time for the client of a session that goes on elsewhere, or here from what is stored."""

StartListener = Callable[[Callable[[list[LiveEvent]], None], SavedLiveSession | None], AsyncListener]
"""Creates a listener that passes its events to that callback; with a saved session, one that continues it."""
OpenJournal = Callable[["StreamSession", str], SessionJournal]
"""Opens the journal of a session whose language is known."""


class StreamSessionInfo(msgspec.Struct, frozen=True):
    """Constant properties of a session."""

    session_id: str
    model: str
    """Name of its first model."""
    encoding: str
    resume_s: float
    words: bool = False
    """Whether segments have words."""


class StreamSession:
    """Audio in, numbered events into a log. It continues with the audio it has while it has no connection.

    Belongs to the event loop's thread.
    """

    def __init__(
        self,
        info: StreamSessionInfo,
        decoder: LiveAudioDecoder,
        limits: SessionLimits,
        meter: LiveRouteMetrics,
        begin: StartListener | None,
        on_closed: Callable[[StreamSession], None],
        on_claimed: Callable[[StreamSession], None] = lambda _: None,
        on_failed: Callable[[StreamSession], None] = lambda _: None,
        open_journal: OpenJournal | None = None,
        stored: StoredSession | None = None,
    ) -> None:
        """`on_closed` is called once the session is closed, `on_claimed` once another server has claimed it, and
        `on_failed` once it has failed and can be continued from what is stored. `open_journal`: for a session that is
        stored; `stored`: the session to continue; one that has ended needs no `begin`. Raises as that does, and
        ValueError for a stored session that is incomplete."""
        self.info, self.log = info, EventLog(holds=open_journal is not None)
        self._decoder, self._limits, self._meter, self._on_closed = decoder, limits, meter, on_closed
        self._on_claimed, self._on_failed = on_claimed, on_failed
        self._encoder = StreamEventEncoder(words=info.words)
        self._partial: EncodedEvent | None = None
        self.received_bytes = self._acked_samples = self._acked_bytes = 0
        self.finishing = self.closed = False
        """No more audio is accepted; no more events come."""
        self.ending: AsrServeError | None = None
        """Error for which the server ended the session before its client did."""
        self.failure: BaseException | None = None
        self._stopped_listening = False
        self._flushes: deque[tuple[str, int]] = deque(maxlen=MAX_PENDING_FLUSHES)
        """Last flushes: name, position in bytes."""
        self.connection: StreamConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._leaving = False
        """Whether the session is handed over: no more audio is accepted here."""
        self._language = ""
        self._ended_samples = 0
        saved, started_s = None, 0.0
        if stored is not None:
            saved, started_s = self._import(stored), max(0.0, time.time() - stored.header.started_unix_s)
        self._listener: AsyncListener | None = None
        """None: all was reported before the session was stored, and it continues here as a log only."""
        if stored is None or saved is not None:
            assert begin is not None
            self._listener = begin(self._on_events, saved)
            self._language = self._listener.language
            self._listener.after_advance = self._on_change
        self.journal = None if open_journal is None else open_journal(self, self._language)
        self._length = self._loop.call_later(max(0.0, limits.session_s - started_s), lambda: self.end(self._too_long()))
        self._work = self._loop.create_task(self._run())
        self._work.add_done_callback(self._on_task_done)

    @property
    def model(self) -> str:
        """Name of its model, by now."""
        return self.info.model if self._listener is None else self._listener.model

    @property
    def received_samples(self) -> int:
        return self._ended_samples if self._listener is None else self._listener.received_samples

    # --- journal ---------------------------------------------------------------------------------------

    def _import(self, stored: StoredSession) -> SavedLiveSession | None:
        """Continues a stored session. Returns the live session in it; None: it has ended."""
        checkpoint = stored.checkpoint
        for event in stored.events:
            if event.seq <= checkpoint.last_seq:
                self.log.append_encoded(EncodedEvent(event.type, event.seq, event.json))
        self.log.release(checkpoint.last_seq)
        self._encoder.import_state(checkpoint.locked, checkpoint.segments)
        self._partial = None if checkpoint.partial is None else EncodedEvent("partial", None, checkpoint.partial)
        self._flushes.extend(checkpoint.flushes)
        self.ending = None if checkpoint.ending is None else checkpoint.ending.to_error()
        self.received_bytes, self._acked_samples = stored.position.received_bytes, stored.position.received_samples
        self.finishing, self._language = checkpoint.finishing, stored.header.language
        self._ended_samples = stored.position.received_samples
        self._decoder.import_state(stored.position.decoder)
        if checkpoint.live is None:
            return None
        return SavedLiveSession(checkpoint.live, stored.audio_from(checkpoint.live.audio_from))

    def export_checkpoint(self) -> SessionCheckpoint | None:
        if self.failure is not None:
            return None  # the last state that is stored is still good, for another server too
        live = None
        if not self.closed:
            live = None if self._listener is None else self._listener.export_state()
            if live is None:
                return None
        locked, segments = self._encoder.export_state()
        return SessionCheckpoint(
            live,
            self.log.last_seq,
            locked,
            segments,
            None if self._partial is None else self._partial.json,
            list(self._flushes),
            self.finishing,
            None if self.ending is None else ErrorMessage.from_error(self.ending),
        )

    def export_position(self) -> SessionPosition:
        return SessionPosition(self.received_bytes, self.received_samples, self._decoder.export_state())

    def stored_audio(self, from_samples: int) -> tuple[int, np.ndarray]:
        if self._listener is None or self.closed:
            return max(from_samples, self.received_samples), np.zeros(0, np.float32)
        return self._listener.received_audio(from_samples)

    @property
    def last_seq(self) -> int:
        return self.log.last_seq

    @property
    def needed_from_samples(self) -> int:
        if self._listener is None or self.closed:
            return self.received_samples
        return self._listener.needed_from_samples

    def events_after(self, seq: int) -> list[EncodedEvent]:
        return self.log.after(seq)

    def release(self, seq: int, received_bytes: int, received_samples: int, *, durable: bool) -> None:
        released_seq = self.log.released_seq
        self.log.release(seq)
        connection = self.connection
        if connection is None:
            return
        if self.log.released_seq > released_seq:
            connection.notify()
        if received_samples - self._acked_samples >= RATE_HZ or (self.finishing and received_bytes > self._acked_bytes):
            self._acked_samples, self._acked_bytes = received_samples, received_bytes
            received_s = samples_to_s(received_samples)
            connection.acknowledge(AckEvent(received_bytes=received_bytes, received_s=received_s, durable=durable))

    def on_claimed_elsewhere(self) -> None:
        self._on_claimed(self)

    def on_journal_failed(self) -> None:
        if self.connection is not None:
            self.connection.stop(
                StoreUnavailable("the session cannot be stored any more", "resume it", RESUME_RETRY_MS)
            )
        self._on_failed(self)

    def _on_change(self) -> None:
        if self.journal is not None:
            self.journal.on_change()

    async def leave(self, reason: AsrServeError) -> Settled:
        """Hands the session over: nothing more is accepted, and its client is told to continue elsewhere. Does nothing
        but wait if the session could not be stored."""
        assert self.journal is not None
        self._leaving = True
        outcome = await self.journal.settle()
        self._leaving = outcome is Settled.STORED
        if self._leaving and self.connection is not None:
            self.connection.stop(reason)
        return outcome

    # --- connections -----------------------------------------------------------------------------------

    def attach(self, after: int, format_error: FormatStreamError, *, resumed: bool) -> StreamConnection:
        """Attaches a new connection, in place of any other. Raises EventsExpired, OptionError."""
        self.log.check_available(after)
        if self.connection is not None:
            self.connection.stop(
                TakenOver(
                    "another connection goes on with this session",
                    "one at a time",
                    "go on there, or begin a new session",
                )
            )
        self.connection = connection = StreamConnection(self.log, after, format_error)
        connection.send(self._opened(resumed))
        connection.show_partial(self._partial)
        if resumed and self.ending is not None:
            connection.send_error(self.ending)  # it may not have arrived before
        if self.closed:
            connection.finish(self.failure)
        else:
            self._watch_idle()
        return connection

    def detach(self, connection: StreamConnection) -> bool:
        """Detaches a connection that is closed. False: another one has replaced it."""
        connection.stop()
        if connection is not self.connection:
            return False
        self.connection = None
        return True

    def _opened(self, resumed: bool) -> SessionEvent:
        return SessionEvent(
            session_id=self.info.session_id,
            resumed=resumed,
            model=self.model,
            language=self._language if self._listener is None else self._listener.language,
            encoding=self.info.encoding,
            rate_hz=self._decoder.rate_hz,
            received_bytes=self.received_bytes,
            last_seq=self.log.released_seq,
            resume_s=self.info.resume_s,
            durable=self.journal is not None and self.journal.durable,
            epoch=0 if self.journal is None else self.journal.epoch,
        )

    # --- audio and commands ----------------------------------------------------------------------------

    async def write(self, connection: StreamConnection, audio: bytes) -> None:
        """Decodes audio as there is room. Audio of a connection that was replaced meanwhile is dropped."""
        self._note_audio(connection, any_audio=bool(audio))
        remaining = memoryview(audio)
        size = len(remaining) if self.info.encoding == PACKETS else SLICE_BYTES
        while remaining and await self._wait_room(connection):
            self._decode(remaining[:size])
            remaining = remaining[size:]

    async def write_silence(self, connection: StreamConnection, samples: int, *, noise: bool = False) -> None:
        """Writes silence in place of audio, as there is room: positions count the bytes that it stands for. `noise`:
        that of the audio before it goes on. Raises UnsupportedOption, OptionError, MalformedRequest."""
        sample_bytes, rate_hz = self._decoder.sample_bytes, self._decoder.rate_hz
        if sample_bytes is None:
            raise UnsupportedOption(
                f"a silence with encoding={self.info.encoding}",
                "Opus has its own, DTX",
                "send the packets that the encoder makes",
                param="type",
            )
        if samples > MAX_SILENCE_S * rate_hz:
            raise OptionError(
                f"a silence of {samples} samples at {rate_hz} Hz",
                f"up to {MAX_SILENCE_S} s, {MAX_SILENCE_S * rate_hz} samples",
                "send a longer one in parts",
                param="samples",
            )
        if self._decoder.has_pending_bytes:
            raise MalformedRequest("a silence came in the middle of a sample", "send the rest of the sample before it")
        self._note_audio(connection, any_audio=True)
        while samples and await self._wait_room(connection):
            count = min(samples, MAX_SILENT_SAMPLES)
            samples -= count
            self.received_bytes += count * sample_bytes
            self._accept(self._decoder.decode_silence(count, noise=noise))

    def _note_audio(self, connection: StreamConnection, *, any_audio: bool) -> None:
        connection.last_received_s = self._loop.time()
        if self.finishing and any_audio and self.ending is None and not self._stopped_listening:
            self._stopped_listening = True
            connection.send_error(OutOfTurn("audio came after the end", "it is dropped; this is said once"))

    async def _wait_room(self, connection: StreamConnection) -> bool:
        """Waits until audio of this connection may be taken. False: no more of it is."""
        while not (self.finishing or self._leaving) and connection is self.connection:
            assert self._listener is not None, "a session that is not ended has one"
            if self._listener.full:
                await connection.pause_reading(self._listener.wait_writable())
            elif connection.congested:
                await connection.pause_reading(connection.wait_caught_up())
            else:
                return True
        return False

    def _decode(self, audio: memoryview) -> None:
        self.received_bytes += len(audio)
        try:
            pcm = self._decoder.decode(audio)
        except AudioError as error:
            self._close(error)
            return
        self._accept(pcm)

    def _accept(self, pcm: np.ndarray) -> None:
        """Passes decoded audio on, and acknowledges it when that is due."""
        if not self._write_pcm(pcm):
            return
        if self.journal is not None:
            self.journal.on_change()
        elif self.received_samples - self._acked_samples >= RATE_HZ:
            self._acknowledge()
        if samples_to_s(self.received_samples) > self._limits.session_s:
            self.end(self._too_long())

    def flush(self, name: str) -> None:
        """Finalizes all audio so far. The same name at the same position is one flush: a client that reconnects
        cannot know whether it arrived. Raises AtCapacity, OutOfTurn."""
        flush = name, self.received_bytes
        if flush in self._flushes:
            return
        if self.finishing:
            raise OutOfTurn("a flush came after the end", "everything will be final")
        if self._leaving:
            return  # it comes again elsewhere
        if self._write_pcm(self._decoder.drain_resampler()):
            assert self._listener is not None
            self._listener.flush(name)
            self._flushes.append(flush)
            if self.journal is not None:
                self.journal.write_now()

    def end(self, reason: AsrServeError | None = None) -> None:
        """Ends the audio: the rest of the text follows, and the end. `reason`: the reason if not the client's."""
        if self.finishing or self._leaving:
            return
        if self._decoder.has_pending_bytes and self.connection is not None:
            warning = MalformedRequest("the audio ends in the middle of a sample or page", "that piece is dropped")
            self.connection.send_error(warning)
        try:
            pcm = self._decoder.finish()
        except AudioError as error:
            self._close(reason or error)
            return
        if self._write_pcm(pcm):
            self._close(reason)

    def _write_pcm(self, pcm: np.ndarray) -> bool:
        """Passes samples to the listener. False: it failed, and the session ends."""
        assert self._listener is not None
        try:
            self._listener.write(pcm)
        except AsrServeError as error:
            self.finishing, self.failure = True, error
            self._work.cancel()
            return False
        return True

    def _close(self, reason: AsrServeError | None) -> None:
        self.finishing, self.ending = True, reason
        if reason is not None and self.connection is not None:
            self.connection.send_error(reason)
        if self.journal is None:
            self._acknowledge()
        self._length.cancel()
        assert self._listener is not None
        self._listener.finish()
        if self.journal is not None:
            self.journal.write_now()

    def _acknowledge(self) -> None:
        self._acked_samples = self.received_samples
        if self.connection is not None:
            received_s = samples_to_s(self._acked_samples)
            self.connection.acknowledge(AckEvent(received_bytes=self.received_bytes, received_s=received_s))

    def _watch_idle(self) -> None:
        """Ends the session if its client is idle for too long, or schedules the next check."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        connection, now_s = self.connection, self._loop.time()
        if connection is None or self.finishing:
            return
        if connection.blocked:
            connection.last_received_s = now_s  # the client waits for the server
        due_s = connection.last_received_s + self._limits.idle_s
        if now_s >= due_s:
            self.end(IdleTimeout(f"nothing came for {self._limits.idle_s:g} s", "a silent microphone sends, too"))
        else:
            self._watch = self._loop.call_at(max(due_s, now_s + 1e-3), self._watch_idle)

    def _too_long(self) -> AudioTooLong:
        return AudioTooLong(
            "the session has become too long",
            f"up to {self._limits.session_s:g} s, of audio and of time",
            "begin another",
        )

    # --- events ----------------------------------------------------------------------------------------

    def _on_events(self, events: list[LiveEvent]) -> None:
        previous, last_seq = self._partial, self.log.last_seq
        for event in events:
            for message in self._encoder.encode_events(event):
                if isinstance(message, PartialEvent):
                    self._show(message)
                else:
                    self.log.append(message)
                    self._partial = None if isinstance(message, SegmentEvent | EndEvent) else self._partial
        self._on_change()
        connection = self.connection
        if connection is None:
            return
        if self._partial is not previous and not connection.show_partial(self._partial):
            self._meter.dropped.inc()
        if self.log.last_seq > last_seq:
            connection.notify()

    def _show(self, partial: PartialEvent) -> None:
        encoded = partial.encode()
        if encoded != self._partial and (partial.text or self._partial is not None):
            self._partial = encoded

    async def _run(self) -> None:
        if self._listener is None:
            return
        try:
            await self._listener.run()
        finally:
            await self._listener.close()

    def _on_task_done(self, work: asyncio.Task[None]) -> None:
        self.closed = self.finishing = True
        self._length.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self._partial = None
        if not work.cancelled():
            self.failure = work.exception()
        if self.journal is not None and self.failure is not None:
            if self.journal.durable:
                self._fail_stored(self.journal, self.failure)
                return
            self.journal.release_all()
        elif self.journal is not None and not work.cancelled():
            self.journal.write_now()
        if self.connection is not None:
            self.connection.finish(self.failure)
        elif self.failure is not None:
            log.error("a session failed while no client was there", exc_info=self.failure)
        self._on_closed(self)

    def _fail_stored(self, journal: SessionJournal, failure: BaseException) -> None:
        """Ends here, and leaves the last stored state for the server that the client resumes at, this one too."""
        journal.close()
        log.error("a session failed; its last state is stored", exc_info=failure)
        if self.connection is not None:
            self.connection.stop(failure)
        self._on_failed(self)

    def abort(self) -> None:
        """Cancels the session: no client will resume it."""
        self._work.cancel()

    async def wait_aborted(self) -> None:
        self._work.cancel()
        await asyncio.wait({self._work})
