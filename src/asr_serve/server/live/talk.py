"""One socket's conversation in FunASR's words: which command may come when.

    idle --START--> hearing --STOP--> finishing --(all text is out)--> idle

A mistake of the client's is answered with an error event and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import msgspec
from starlette.types import Receive

from asr_serve import units
from asr_serve.audio.pcm import SAMPLE_BYTES, Pcm16Assembler
from asr_serve.errors import AsrServeError, AudioTooLarge, MalformedRequest, OptionError, OutOfTurn
from asr_serve.protocols import funasr_live
from asr_serve.protocols.funasr_live import Flag, Hotwords, Language, Start, Stop, Wants
from asr_serve.server.live.life import Life, Limits, ended
from asr_serve.server.live.outbox import Outbox

SLICE_BYTES = units.RATE_HZ * SAMPLE_BYTES
"""How much of a large frame is taken before looking whether there is room for more."""


class Hearing(Protocol):
    """One session, from START until its text is out."""

    @property
    def language(self) -> str: ...
    @property
    def received_samples(self) -> int: ...
    @property
    def full(self) -> bool:
        """Put no more before `room` has come back."""

    def write(self, pcm: bytes | memoryview) -> None:
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

    def expect(self, wants: Wants) -> None:
        """Raises OptionError for what this model or server cannot tell or take, and as `begin` does."""

    def begin(self, wants: Wants, outbox: Outbox) -> Hearing:
        """`wants.language` is one that `language` told. Raises AtCapacity, ModelNotLoaded, EngineClosed."""


class Talk:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        ears: Ears,
        limits: Limits,
        tell: Callable[[Exception], str],
        wants: Wants,
    ) -> None:
        """`tell`: an error to the event that the client gets. `wants`: what it asked for as it came. Raises what
        `ears.expect` does."""
        ears.expect(wants)
        self._outbox, self._ears, self._limits, self._tell = outbox, ears, limits, tell
        self._loop = asyncio.get_running_loop()
        self._life = Life(receive, outbox, limits, self)
        self.run, self.drain = self._life.run, self._life.drain
        self._hearing: Hearing | None = None
        self._session: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self._told_deaf = False
        self._wants = self._heard_with = wants
        """As the client said last; and as it had said when the session began."""
        self._pcm = Pcm16Assembler()
        self.received_samples = 0
        """Of all sessions that are over."""
        self.left_in_session = False
        """The client left before it had all its words."""
        self.left_code: int | None = None
        """What the client closed with; 1005 for nothing."""

    # --- for its life ---------------------------------------------------------------------------------

    @property
    def hearing(self) -> bool:
        return self._hearing is not None

    @property
    def began_s(self) -> float | None:
        return None if self._hearing is None or self._life.finishing else self._began_s

    async def take(self, message: MutableMapping[str, Any]) -> None:
        try:
            if (frame := message.get("bytes")) is not None:
                await self._audio(frame)
            else:
                await self._text(message.get("text") or "")
        except (MalformedRequest, OptionError, AudioTooLarge) as error:
            self.refuse(error)

    def refuse(self, error: AsrServeError) -> None:
        self._outbox.say(self._tell(error))

    def finish(self) -> None:
        if self._hearing is None:
            return
        if self._pcm.has_pending_byte:
            left = MalformedRequest(
                "the audio ends in the middle of a sample",
                "samples are 16 bits, two bytes",
                "the last byte is dropped: check how frames are cut",
            )
            self.refuse(left)
        self._hearing.finish()

    def left(self, code: int | None) -> None:
        self.left_code, self.left_in_session = code, self.hearing

    def fail(self, error: AsrServeError) -> None:
        """These words have none for text that will not come."""

    async def close(self) -> None:
        if (hearing := self._hearing) is not None:
            await hearing.close()
            self.received_samples += hearing.received_samples
            self._hearing = None

    # --- what comes -----------------------------------------------------------------------------------

    async def _audio(self, frame: bytes) -> None:
        hearing = self._hearing
        if hearing is None or self._life.finishing:
            if not self._told_deaf and self._life.ending is None:
                self._told_deaf = True
                raise OutOfTurn(
                    "audio came while no session is open",
                    "it is dropped until START; this is said once",
                    "send START first",
                )
            return
        pcm = memoryview(
            self._pcm.take_whole_samples(frame)
        )  # of one that is dropped, too: it may end in half a sample
        if len(frame) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"a frame of {len(frame)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller frames, like 100 ms",
            )
        while pcm and not self._life.finishing:
            if hearing.full:
                await self._life.wait(hearing.room())
            else:
                hearing.write(pcm[:SLICE_BYTES])
                pcm = pcm[SLICE_BYTES:]
        self._life.came(hearing.received_samples)

    async def _text(self, text: str) -> None:
        match funasr_live.command(text):
            case Start():
                await self._start()
            case Stop():
                if self._hearing is None or self._life.finishing:
                    raise OutOfTurn("STOP came while no session is open", "it ends what START began", "send START")
                self._life.finish()
            case Language(name, code):
                await self._speak(code)
                self._outbox.say(funasr_live.language_set(name))
            case Hotwords(words):
                why = await self._want(msgspec.structs.replace(self._wants, hotwords=words))
                self._outbox.say(funasr_live.hotwords_set(words, why))
            case Flag(name, on) as flag:
                why = await self._want(msgspec.structs.replace(self._wants, **{name: on}))
                self._outbox.say(funasr_live.flag_set(flag, why))

    async def _start(self) -> None:
        if self._life.finishing and self._session is not None:
            await self._life.wait(asyncio.wait({self._session}))
        if self._hearing is not None:
            raise OutOfTurn("START came again", "a session is open, and goes on", "send STOP to end it")
        self._begin(self._wants)
        self._outbox.say(funasr_live.STARTED)

    async def _speak(self, code: str | None) -> None:
        """Hear that language from now on, or from the next START."""
        language = self._ears.language(code)
        wants = msgspec.structs.replace(self._wants, language=language)
        self._ears.expect(wants)
        hearing = self._hearing
        if hearing is not None and not self._life.finishing and language != hearing.language:
            if hearing.received_samples:
                raise OutOfTurn(
                    f"LANGUAGE:{code} came after audio",
                    f"this session is heard as {hearing.language}",
                    "send STOP, then LANGUAGE and START",
                )
            await self._begin_again(wants)
        self._wants = wants

    async def _want(self, wants: Wants) -> str:
        """That from now on, or, which is then said, from the next START."""
        self._ears.expect(wants)
        hearing, self._wants = self._hearing, wants
        before = msgspec.structs.replace(self._heard_with, language=wants.language)  # that was seen to
        if hearing is None or self._life.finishing or wants == before:
            return ""
        if hearing.received_samples:
            return funasr_live.NOT_YET
        await self._begin_again(wants)
        return ""

    # --- sessions -------------------------------------------------------------------------------------

    async def _begin_again(self, wants: Wants) -> None:
        """Before any audio."""
        assert self._session is not None, "it came with the hearing"
        await ended(self._session)
        await self.close()
        self._begin(wants)

    def _begin(self, wants: Wants) -> None:
        language = self._ears.language(wants.language)
        hearing = self._ears.begin(msgspec.structs.replace(wants, language=language), self._outbox)
        self._hearing, self._told_deaf = hearing, False
        self._heard_with = wants
        self._pcm = Pcm16Assembler()
        self._began_s = self._loop.time()
        self._session = self._life.hear(self._hear(hearing))

    async def _hear(self, hearing: Hearing) -> None:
        final = await hearing.run()
        await self.close()
        self._told_deaf = False
        self._outbox.say_instead(final)
        self._outbox.say(funasr_live.STOPPED)
        self._life.rest()
