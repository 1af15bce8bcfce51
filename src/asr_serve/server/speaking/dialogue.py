"""One socket's speeches: text comes while it is made, sound goes out while it is said.

idle --start--> speaking --end--> finishing --(all sound is out)--> idle
                 \\-----------cancel, or a failure-----------------/

A mistake of the client's is answered with an error event and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from typing import Any, Literal

from starlette.types import Receive

from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    EngineClosed,
    MalformedRequest,
    ModelError,
    OptionError,
    OutOfTurn,
    TextTooLong,
)
from asr_serve.protocols.speech import live
from asr_serve.protocols.speech.live import Cancel, Done, End, Flush, Flushed, Sentence, Start, Text
from asr_serve.server.live.life import Life, Limits, ended
from asr_serve.server.live.outbox import Outbox
from asr_serve.server.speaking.speech import Speech

MOST_FLUSHES = 64
"""Of a speech, under way."""
FLUSH_RETRY_MS = 1_000

Reason = Literal["end", "cancelled", "failed"]


class Dialogue:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        begin: Callable[[Start], Speech],
        limits: Limits,
        most_characters: int,
        tell: Callable[[Exception], str],
    ) -> None:
        """`begin` raises what keeps a speech from beginning. `most_characters`: of text that waits to be said.
        `tell`: an error to the event that the client gets."""
        self._outbox, self._begin, self._most, self._tell = outbox, begin, most_characters, tell
        self._loop = asyncio.get_running_loop()
        self._life = Life(receive, outbox, limits, self)
        self.run, self.drain = self._life.run, self._life.drain
        self._speech: Speech | None = None
        self._saying: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self.left_in_session = False
        """The client left before it had all its sound."""
        self.left_code: int | None = None
        """What the client closed with; 1005 for nothing."""
        self.said_s = 0.0
        """Of all speeches."""

    # --- for its life ---------------------------------------------------------------------------------

    @property
    def hearing(self) -> bool:
        return self._speech is not None

    @property
    def began_s(self) -> float | None:
        return None if self._speech is None or self._life.finishing else self._began_s

    async def take(self, message: MutableMapping[str, Any]) -> None:
        try:
            if message.get("bytes") is not None:
                raise MalformedRequest("a binary message came", "text goes in, as JSON; sound comes out")
            await self._command(message.get("text") or "")
        except (MalformedRequest, OptionError, ModelError, AtCapacity, EngineClosed) as error:
            self.refuse(error)

    def refuse(self, error: AsrServeError) -> None:
        self._outbox.say(self._tell(error))

    def finish(self) -> None:
        if self._speech is not None:
            self._speech.end()

    def left(self, code: int | None) -> None:
        self.left_code, self.left_in_session = code, self.hearing

    def fail(self, error: AsrServeError) -> None:
        """Nothing is owed but the error itself."""

    async def close(self) -> None:
        if (speech := self._speech) is not None:
            await speech.close()
            self.said_s += speech.seconds
            self._speech = None

    # --- what comes -----------------------------------------------------------------------------------

    async def _command(self, message: str) -> None:
        match live.command(message):
            case Start() as start:
                self._start(start)
            case Text(text):
                self._put(text)
            case Flush(name):
                speech = self._open("flush")
                if speech.flushes >= MOST_FLUSHES:
                    raise AtCapacity(
                        f"{speech.flushes} flushes are under way", f"up to {MOST_FLUSHES} at once", FLUSH_RETRY_MS
                    )
                speech.flush(name)
            case End():
                self._open("end")
                self._life.finish()
            case Cancel():
                await self._cancel()

    def _open(self, what: str) -> Speech:
        """The speech, where it still takes text."""
        if self._speech is None or self._life.finishing:
            raise OutOfTurn(f"{what} came while no speech is open", "it belongs to one", "send start")
        return self._speech

    def _start(self, start: Start) -> None:
        if self._speech is not None:
            raise OutOfTurn("start came again", "a speech goes on", "wait for done, or send cancel")
        self._speech = self._begin(start)
        self._began_s = self._loop.time()
        self._outbox.say(self._speech.started.text())
        self._saying = self._life.hear(self._say(self._speech))

    def _put(self, text: str) -> None:
        speech = self._open("text")
        if speech.waiting_characters + len(text) > self._most:
            raise TextTooLong(
                f"{speech.waiting_characters + len(text)} characters would wait to be said",
                f"up to {self._most}; this text is dropped",
                "send text as it is heard, or have max_characters raised",
                param="text",
            )
        speech.write(text)

    async def _cancel(self) -> None:
        speech = self._speech
        if speech is None or self._saying is None:
            return  # it was over already: who speaks between cannot know
        await ended(self._saying)
        if self._speech is speech:  # it may just have come to its end
            await self._over(speech, "cancelled")

    # --- what goes out --------------------------------------------------------------------------------

    async def _say(self, speech: Speech) -> None:
        reason: Reason = "end"
        try:
            async for told in speech:
                match told:
                    case Sentence() | Flushed():
                        self._outbox.say(told.text())
                    case OptionError():
                        self.refuse(told)
                    case bytes():
                        self._outbox.say(told)
                        self._life.stir()  # a client that listens need not say anything
                        await self._outbox.empty()  # nothing more is made than is taken
        except AsrServeError as error:
            self.refuse(error)
            reason = "failed"
        await self._over(speech, reason)

    async def _over(self, speech: Speech, reason: Reason) -> None:
        with contextlib.suppress(AsrServeError):
            await self.close()
        self._outbox.say(
            Done(
                reason=reason,
                seconds=speech.seconds,
                sentences=speech.sentences,
                characters=speech.characters,
            ).text()
        )
        self._life.rest()
