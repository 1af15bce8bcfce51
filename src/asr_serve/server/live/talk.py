"""One socket's conversation in FunASR's words: which command may come when, and how it ends.

    idle --START--> hearing --STOP--> finishing --(all text is out)--> idle

It goes on until the client leaves. A mistake of the client's is answered with an error event and changes
nothing. What cannot go on ends the conversation: an error that is raised here is told, and the socket closed, by
whoever runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.types import Receive

from asr_serve import units
from asr_serve.errors import (
    AsrServeError,
    AudioTooLarge,
    AudioTooLong,
    Draining,
    IdleTimeout,
    MalformedRequest,
    OptionError,
    OutOfTurn,
)
from asr_serve.protocols import funasr_live
from asr_serve.protocols.funasr_live import SAMPLE_BYTES, Hotwords, Language, Pcm16, Start, Stop
from asr_serve.server.live.outbox import Outbox

SLICE_BYTES = units.RATE_HZ * SAMPLE_BYTES
"""How much of a large frame is taken before looking whether there is room for more."""
DRAIN_RETRY_MS = 5_000


class Hearing(Protocol):
    """One session, from START until its text is out."""

    @property
    def language(self) -> str: ...
    @property
    def received_samples(self) -> int: ...
    @property
    def full(self) -> bool:
        """Put no more before `room` has come back."""

    def put(self, pcm: bytes | memoryview) -> None:
        """Whole samples."""

    async def room(self) -> None:
        """Wait for a change: `full` may have ended."""

    def finish(self) -> None:
        """No more audio will come."""

    async def run(self) -> str:
        """Work until the text is final; returns the last answer. Raises what ends the conversation."""

    async def close(self) -> None:
        """At any time, idempotent: give everything back."""


class Ears(Protocol):
    """Where sessions come from."""

    def language(self, code: str | None) -> str:
        """The one that would be heard. Raises OptionError for one that cannot be, and as `begin` does."""

    def begin(self, language: str, outbox: Outbox) -> Hearing:
        """Raises AtCapacity, ModelNotLoaded, EngineClosed."""


class Limits(msgspec.Struct, frozen=True):
    idle_s: float
    """How long nothing may come."""
    session_s: float
    """Longest session, in seconds of audio and of time."""
    frame_bytes: int


class Talk:
    """Belongs to the event loop's thread."""

    def __init__(
        self, receive: Receive, outbox: Outbox, ears: Ears, limits: Limits, tell: Callable[[Exception], str]
    ) -> None:
        """`tell`: an error to the event that the client gets."""
        self._receive, self._outbox, self._ears, self._limits, self._tell = receive, outbox, ears, limits, tell
        self._loop = asyncio.get_running_loop()
        self._hearing: Hearing | None = None
        self._session: asyncio.Task[None] | None = None
        self._finishing = self._blocked = self._told_deaf = False
        self._language: str | None = None
        self.hotwords: tuple[str, ...] = ()
        """As they came last; no model here can use them yet."""
        self._pcm = Pcm16()
        self._heard_s = self._began_s = self._loop.time()
        self._ending: BaseException | None = None
        """Why the conversation ends, once the text of its session is out."""
        self._outcome: BaseException | None = None
        self._told: Draining | None = None
        self._over = False
        self.received_samples = 0
        """Of all sessions that are over."""
        self.left_in_session = False
        self.left_code: int | None = None
        """What the client closed with; 1005 for nothing."""
        self._main: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> Draining | None:
        """Until the end: None when the client has left, Draining when it was told so. Raises what else ends it,
        when all that was said before is sent: AtCapacity, IdleTimeout, ClientGone, StepFailed, ..."""
        self._main = asyncio.current_task()
        writer = self._loop.create_task(self._outbox.run())
        writer.add_done_callback(self._task_over)
        self._watch()
        if self._ending is not None:
            self._end(self._ending)  # told to drain before it began
        try:
            outcome = await self._until_over()
            if outcome is not None:
                await self._flush(writer)
        finally:
            assert self._timer is not None, "it was set before anything else"
            self._timer.cancel()
            try:
                await _ended(writer, self._session)
            finally:  # also when we are cancelled once more
                if self._hearing is not None:
                    await self._close(self._hearing)
        if outcome is not None and outcome is not self._told:
            raise outcome
        return self._told if outcome is not None else None

    def drain(self) -> None:
        """The server goes down: say so, finish the text, and end."""
        if self._ending is None:
            self._told = Draining("the server is going down", "it ends every session", DRAIN_RETRY_MS)
            self._outbox.say(self._tell(self._told))
            self._end(self._told)

    async def _until_over(self) -> BaseException | None:
        """Why it ends; None when the client has left."""
        assert self._main is not None
        try:
            await self._read()
            return None
        except asyncio.CancelledError:
            if self._outcome is None:
                raise
            self._main.uncancel()
            return self._outcome
        except AsrServeError as error:
            return error
        finally:
            self._over = True

    async def _flush(self, writer: asyncio.Task[None]) -> None:
        emptied = self._loop.create_task(self._outbox.empty())
        try:
            await asyncio.wait({writer, emptied}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(emptied)

    # --- what comes -----------------------------------------------------------------------------------

    async def _read(self) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            self._heard_s = self._loop.time()
            try:
                if (frame := message.get("bytes")) is not None:
                    await self._audio(frame)
                else:
                    await self._text(message.get("text") or "")
            except (MalformedRequest, OptionError, AudioTooLarge) as error:
                self._outbox.say(self._tell(error))
            if self._outbox.crowded:
                await self._wait(self._outbox.empty())
        self.left_code, self.left_in_session = message.get("code"), self._hearing is not None

    async def _audio(self, frame: bytes) -> None:
        hearing = self._hearing
        if hearing is None or self._finishing:
            if not self._told_deaf and self._ending is None:
                self._told_deaf = True
                raise OutOfTurn(
                    "audio came while no session is open",
                    "it is dropped until START; this is said once",
                    "send START first",
                )
            return
        pcm = memoryview(self._pcm.whole(frame))  # of one that is dropped, too: it may end in half a sample
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller frames, like 100 ms",
            )
        while pcm and not self._finishing:
            if hearing.full:
                await self._wait(hearing.room())
            else:
                hearing.put(pcm[:SLICE_BYTES])
                pcm = pcm[SLICE_BYTES:]
        if units.samples_to_s(hearing.received_samples) > self._limits.session_s:
            self._end(self._too_long())

    async def _text(self, text: str) -> None:
        match funasr_live.command(text):
            case Start():
                await self._start()
            case Stop():
                if self._hearing is None or self._finishing:
                    raise OutOfTurn("STOP came while no session is open", "it ends what START began", "send START")
                self._finish()
            case Language(name, code):
                await self._speak(code)
                self._outbox.say(funasr_live.language_set(name))
            case Hotwords(words):
                self.hotwords = words
                self._outbox.say(funasr_live.hotwords_set(words))

    async def _start(self) -> None:
        if self._finishing and self._session is not None:
            await self._wait(asyncio.wait({self._session}))
        if self._hearing is not None:
            raise OutOfTurn("START came again", "a session is open, and goes on", "send STOP to end it")
        self._begin(self._language)
        self._outbox.say(funasr_live.STARTED)

    async def _speak(self, code: str | None) -> None:
        """Hear that language from now on, or from the next START."""
        language = self._ears.language(code)
        hearing = self._hearing
        if hearing is not None and not self._finishing and language != hearing.language:
            if hearing.received_samples:
                raise OutOfTurn(
                    f"LANGUAGE:{code} came after audio",
                    f"this session is heard as {hearing.language}",
                    "send STOP, then LANGUAGE and START",
                )
            await _ended(self._session)
            await self._close(hearing)
            self._begin(language)
        self._language = language

    async def _wait(self, coming: Any) -> None:
        """While nothing is read: that nothing comes is not the client's doing."""
        self._blocked = True
        try:
            await coming
        finally:
            self._blocked = False
            self._heard_s = self._loop.time()

    # --- sessions -------------------------------------------------------------------------------------

    def _begin(self, language: str | None) -> None:
        hearing = self._ears.begin(self._ears.language(language), self._outbox)
        self._hearing, self._finishing, self._told_deaf = hearing, False, False
        self._pcm = Pcm16()
        self._began_s = self._loop.time()
        self._session = self._loop.create_task(self._hear(hearing))
        self._session.add_done_callback(self._task_over)
        self._watch()

    async def _hear(self, hearing: Hearing) -> None:
        final = await hearing.run()
        await self._close(hearing)
        self._finishing = self._told_deaf = False
        self._heard_s = self._loop.time()
        self._outbox.say_instead(final)
        self._outbox.say(funasr_live.STOPPED)
        if self._ending is not None:
            self._stop(self._ending)

    async def _close(self, hearing: Hearing) -> None:
        await hearing.close()
        self.received_samples += hearing.received_samples
        self._hearing = None

    def _finish(self) -> None:
        if self._hearing is None or self._finishing:
            return
        self._finishing = True
        if self._pcm.left:
            left = MalformedRequest(
                "the audio ends in the middle of a sample",
                "samples are 16 bits, two bytes",
                "the last byte is dropped: check how frames are cut",
            )
            self._outbox.say(self._tell(left))
        self._hearing.finish()

    # --- endings --------------------------------------------------------------------------------------

    def _end(self, why: BaseException) -> None:
        """When the text of what was heard is out."""
        if self._ending is None:
            self._ending = why
        if self._hearing is None:
            self._stop(self._ending)
        else:
            self._finish()

    def _stop(self, outcome: BaseException) -> None:
        """Now: nothing more is read."""
        if not self._over and self._outcome is None and self._main is not None:
            self._outcome = outcome
            self._main.cancel()

    def _task_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._stop(failure)

    def _watch(self) -> None:
        """Look whether the client is still there and the session not too long; and when to look again."""
        if self._timer is not None:
            self._timer.cancel()
        now_s = self._loop.time()
        if self._finishing or self._blocked:
            self._heard_s = now_s  # it waits for us
        due_s = idle_s = self._heard_s + self._limits.idle_s
        if self._hearing is not None and not self._finishing:
            due_s = min(idle_s, self._began_s + self._limits.session_s)
        if now_s >= idle_s:
            self._end(IdleTimeout(f"nothing came for {self._limits.idle_s:g} s", "a silent microphone sends, too"))
        elif now_s >= due_s:
            self._end(self._too_long())
        self._timer = self._loop.call_at(max(due_s, now_s + 1e-3), self._watch)

    def _too_long(self) -> AudioTooLong:
        return AudioTooLong(
            "the session has become too long",
            f"up to {self._limits.session_s:g} s, of audio and of time",
            "connect again for another",
        )


async def _ended(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel them, and wait until they are over."""
    going = {task for task in tasks if task is not None}
    for task in going:
        task.cancel()
    if going:
        await asyncio.wait(going)
