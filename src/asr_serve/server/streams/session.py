"""One live session of /v1/stream, whichever connection it has at the moment, or none."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from asr_serve.audio.stream_decoder import LiveAudioDecoder
from asr_serve.errors import (
    AsrServeError,
    AudioError,
    AudioTooLong,
    IdleTimeout,
    MalformedRequest,
    OutOfTurn,
    TakenOver,
)
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent
from asr_serve.pipelines.live.listen import MAX_PENDING_FLUSHES
from asr_serve.protocols.stream import PACKETS
from asr_serve.protocols.stream_events import Ack, Ended, Partial, Script, Segment, Session, Told
from asr_serve.server.live.caller import Caller
from asr_serve.server.live.life import Limits
from asr_serve.server.streams.connection import Connection, Tell
from asr_serve.server.streams.log import EventLog
from asr_serve.units import RATE_HZ, samples_to_s

log = logging.getLogger(__name__)

SLICE_BYTES = 4_096
"""How much audio is decoded before looking whether there is room for more: up to some seconds of it."""

Begin = Callable[[Callable[[list[LiveEvent]], None]], Caller]
"""Makes the caller that tells its events there."""


class Facts(msgspec.Struct, frozen=True):
    """What a session is, from its beginning."""

    session_id: str
    model: str
    encoding: str
    resume_s: float
    words: bool = False
    """Whether segments tell theirs."""


class StreamSession:
    """Audio in, numbered events into its log. It goes on with what it has while no connection is there.

    Belongs to the event loop's thread.
    """

    def __init__(
        self,
        facts: Facts,
        decoder: LiveAudioDecoder,
        limits: Limits,
        meter: LiveRouteMetrics,
        begin: Begin,
        over: Callable[[StreamSession], None],
    ) -> None:
        """`over` is called when nothing more will be heard. Raises what `begin` does."""
        self.facts, self.log = facts, EventLog()
        self._decoder, self._limits, self._meter, self._over_now = decoder, limits, meter, over
        self._script = Script(words=facts.words)
        self._partial: Told | None = None
        self.received_bytes = self._acked_samples = 0
        self.finishing = self.over = False
        """No more audio is taken; nothing more is heard."""
        self.ending: AsrServeError | None = None
        """Why it was ended before its client did."""
        self.failure: BaseException | None = None
        self._deaf = False
        self._flushes: deque[tuple[str, int]] = deque(maxlen=MAX_PENDING_FLUSHES)
        """The last ones: name, and place in bytes."""
        self.connection: Connection | None = None
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._caller = begin(self._hear)
        self._length = self._loop.call_later(limits.session_s, lambda: self.end(self._too_long()))
        self._work = self._loop.create_task(self._run())
        self._work.add_done_callback(self._worked)

    @property
    def received_samples(self) -> int:
        return self._caller.received_samples

    # --- connections -----------------------------------------------------------------------------------

    def attach(self, after: int, tell: Tell, *, resumed: bool) -> Connection:
        """A new connection, instead of the one there may be. Raises EventsExpired, OptionError."""
        self.log.expect(after)
        if self.connection is not None:
            self.connection.stop(
                TakenOver(
                    "another connection goes on with this session",
                    "one at a time",
                    "go on there, or begin a new session",
                )
            )
        self.connection = connection = Connection(self.log, after, tell)
        connection.say(self._opened(resumed))
        connection.show(self._partial)
        if resumed and self.ending is not None:
            connection.refuse(self.ending)  # it may not have arrived before
        if self.over:
            connection.finish(self.failure)
        else:
            self._watch_idle()
        return connection

    def detach(self, connection: Connection) -> bool:
        """It is gone. False: another one goes on already."""
        connection.stop()
        if connection is not self.connection:
            return False
        self.connection = None
        return True

    def _opened(self, resumed: bool) -> Session:
        return Session(
            session_id=self.facts.session_id,
            resumed=resumed,
            model=self.facts.model,
            language=self._caller.language,
            encoding=self.facts.encoding,
            rate_hz=self._decoder.rate_hz,
            received_bytes=self.received_bytes,
            last_seq=self.log.last_seq,
            resume_s=self.facts.resume_s,
        )

    # --- what comes ------------------------------------------------------------------------------------

    async def write(self, connection: Connection, audio: bytes) -> None:
        """Take it, as there is room. What comes of a connection that was replaced meanwhile is dropped."""
        connection.heard_s = self._loop.time()
        if self.finishing and audio and self.ending is None and not self._deaf:
            self._deaf = True
            connection.refuse(OutOfTurn("audio came after the end", "it is dropped; this is said once"))
        left = memoryview(audio)
        size = len(left) if self.facts.encoding == PACKETS else SLICE_BYTES
        while left and not self.finishing and connection is self.connection:
            if self._caller.full:
                await connection.wait(self._caller.room())
            elif connection.crowded:
                await connection.wait(connection.caught_up())
            else:
                self._take(left[:size])
                left = left[size:]

    def _take(self, audio: memoryview) -> None:
        self.received_bytes += len(audio)
        try:
            pcm = self._decoder.decode(audio)
        except AudioError as error:
            self._close(error)
            return
        if not self._put(pcm):
            return
        if self.received_samples - self._acked_samples >= RATE_HZ:
            self._acknowledge()
        if samples_to_s(self.received_samples) > self._limits.session_s:
            self.end(self._too_long())

    def flush(self, name: str) -> None:
        """What was taken is to be final. The same name at the same place is one flush: a client that comes back
        cannot know whether it arrived. Raises AtCapacity, OutOfTurn."""
        flush = name, self.received_bytes
        if flush in self._flushes:
            return
        if self.finishing:
            raise OutOfTurn("a flush came after the end", "everything will be final")
        if self._put(self._decoder.drain_resampler()):
            self._caller.flush(name)
            self._flushes.append(flush)

    def end(self, why: AsrServeError | None = None) -> None:
        """No more audio: the rest of the text follows, and the end. `why`: the client did not ask for it."""
        if self.finishing:
            return
        if self._decoder.has_pending_bytes and self.connection is not None:
            left = MalformedRequest("the audio ends in the middle of a sample or page", "that piece is dropped")
            self.connection.refuse(left)
        try:
            pcm = self._decoder.finish()
        except AudioError as error:
            self._close(why or error)
            return
        if self._put(pcm):
            self._close(why)

    def _put(self, pcm: np.ndarray) -> bool:
        """False: that was the end of it."""
        try:
            self._caller.write(pcm)
        except AsrServeError as error:
            self.finishing, self.failure = True, error
            self._work.cancel()
            return False
        return True

    def _close(self, why: AsrServeError | None) -> None:
        self.finishing, self.ending = True, why
        if why is not None and self.connection is not None:
            self.connection.refuse(why)
        self._acknowledge()
        self._length.cancel()
        self._caller.finish()

    def _acknowledge(self) -> None:
        self._acked_samples = self.received_samples
        if self.connection is not None:
            taken_s = samples_to_s(self._acked_samples)
            self.connection.acknowledge(Ack(received_bytes=self.received_bytes, received_s=taken_s))

    def _watch_idle(self) -> None:
        """Look whether something came of the client, and when to look again."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        connection, now_s = self.connection, self._loop.time()
        if connection is None or self.finishing:
            return
        if connection.blocked:
            connection.heard_s = now_s  # it waits for us
        due_s = connection.heard_s + self._limits.idle_s
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

    # --- what comes of it ------------------------------------------------------------------------------

    def _hear(self, events: list[LiveEvent]) -> None:
        shown, last_seq = self._partial, self.log.last_seq
        for event in events:
            for line in self._script.lines(event):
                if isinstance(line, Partial):
                    self._show(line)
                else:
                    self.log.add(line)
                    self._partial = None if isinstance(line, Segment | Ended) else self._partial
        connection = self.connection
        if connection is None:
            return
        if self._partial is not shown and not connection.show(self._partial):
            self._meter.dropped.inc()
        if self.log.last_seq > last_seq:
            connection.look()

    def _show(self, partial: Partial) -> None:
        told = partial.told()
        if told != self._partial and (partial.text or self._partial is not None):
            self._partial = told

    async def _run(self) -> None:
        try:
            await self._caller.run()
        finally:
            await self._caller.close()

    def _worked(self, work: asyncio.Task[None]) -> None:
        self.over = self.finishing = True
        self._length.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self._partial = None
        if not work.cancelled():
            self.failure = work.exception()
        if self.connection is not None:
            self.connection.finish(self.failure)
        elif self.failure is not None:
            log.error("a session failed while no client was there", exc_info=self.failure)
        self._over_now(self)

    def drop(self) -> None:
        """Nobody will want it."""
        self._work.cancel()

    async def dropped(self) -> None:
        self._work.cancel()
        await asyncio.wait({self._work})
