"""One socket's conversation in the words of OpenAI Realtime: which event may come when.

The first audio begins a caller. A mistake of the client's is answered with an error event and changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

from starlette.types import Receive

from asr_serve.audio.stream_decoder import LiveAudioDecoder, create_live_decoder
from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    AudioTooLarge,
    Draining,
    EmptyAudio,
    MalformedRequest,
    ModelError,
    OptionError,
)
from asr_serve.pipelines.live.events import LiveEvent, SessionFinished
from asr_serve.protocols.openai import Problem, Spell
from asr_serve.protocols.openai_realtime import (
    FORMATS,
    Append,
    Clear,
    Commit,
    Sent,
    Settings,
    Update,
    read,
    sent,
    updated,
)
from asr_serve.protocols.openai_realtime_items import Items, Voice
from asr_serve.server.live.caller import Caller
from asr_serve.server.live.life import Life, Limits
from asr_serve.server.live.outbox import Outbox

SLICES = 2
"""To the second: how much of an event's audio is taken before looking whether there is room for more."""


class Ears(Protocol):
    """Where callers come from."""

    def expect(self, settings: Settings) -> str:
        """Of the model that will hear it, the name. Raises OptionError, UnknownModel, ModelNotLoaded,
        EngineClosed when it cannot be heard."""

    def begin(self, settings: Settings, hear: Callable[[list[LiveEvent]], None]) -> tuple[Caller, Spell]:
        """Raises AtCapacity and as `expect` does."""


class Tell(Protocol):
    """What a client is told of an error, and when it may try again."""

    def __call__(self, error: Exception) -> tuple[Problem, int | None]: ...


class Conversation:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        receive: Receive,
        outbox: Outbox,
        ears: Ears,
        limits: Limits,
        tell: Tell,
        voice: Voice,
        settings: Settings,
        *,
        partials: bool,
    ) -> None:
        self._outbox, self._ears, self._limits = outbox, ears, limits
        self._tell, self._voice, self._settings = tell, voice, settings
        self._life = Life(receive, outbox, limits, self)
        self.drain = self._life.drain
        self._items = Items(voice, turns=settings.turns is not None, partials=partials)
        self._caller: Caller | None = None
        self._spell: Spell | None = None
        self._session: asyncio.Task[None] | None = None
        self._decoder: LiveAudioDecoder | None = None
        self._before_samples = 0
        """Of callers that are over."""
        self.began_s = asyncio.get_running_loop().time()
        self.left_in_session = False
        """The client left before it had all its words."""
        self.left_code: int | None = None
        """What the client closed with; 1005 for nothing."""
        self._expires_s = int(time.time() + limits.session_s)

    @property
    def received_samples(self) -> int:
        return self._before_samples + (self._caller.received_samples if self._caller is not None else 0)

    async def run(self) -> Draining | None:
        """As `Life.run`. Raises what `Ears.expect` does, too."""
        self._say_session("created", self._ears.expect(self._settings))
        return await self._life.run()

    # --- for its life ---------------------------------------------------------------------------------

    @property
    def hearing(self) -> bool:
        return self._caller is not None

    async def take(self, message: MutableMapping[str, Any]) -> None:
        came: Sent | None = None
        try:
            came = self._sent(message)
            await self._take(came)
        except (MalformedRequest, OptionError, AudioTooLarge, EmptyAudio, ModelError) as error:
            self.refuse(error, came)

    def refuse(self, error: AsrServeError, came: Sent | None = None) -> None:
        what, retry_ms = self._tell(error)
        self._outbox.say(self._voice.error(what, retry_ms, None if came is None else came.event_id))

    def finish(self) -> None:
        if self._caller is None:
            self._commit_rest()
            return
        assert self._decoder is not None, "it came with the caller"
        self._caller.write(self._decoder.finish())
        self._caller.finish()

    def left(self, code: int | None) -> None:
        self.left_code, self.left_in_session = code, self._items.busy

    def fail(self, error: AsrServeError) -> None:
        self._say(self._items.failed(self._tell(error)[0]))

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()
            self._before_samples, self._caller = self.received_samples, None

    # --- what comes -----------------------------------------------------------------------------------

    def _sent(self, message: MutableMapping[str, Any]) -> Sent:
        text = message.get("text")
        if text is None:
            raise MalformedRequest("a binary frame came", "events are JSON in text frames", "send audio in base64")
        if len(text) > self._limits.frame_bytes:
            raise AudioTooLarge(
                f"an event of {len(text)} bytes came",
                f"up to {self._limits.frame_bytes} are allowed; this one is dropped, and its words are lost",
                "send audio in smaller events, like 100 ms",
            )
        return sent(text)

    async def _take(self, came: Sent) -> None:
        match event := read(came):
            case Append(audio):
                await self._append(audio)
            case Commit():
                self._commit(came)
            case Clear():
                self._clear(came)
            case Update():
                await self._update(event)

    async def _append(self, audio: bytes) -> None:
        if self._life.ending is not None or not audio:
            return
        try:
            caller = self._caller or self._begin()
        except (OptionError, ModelError) as error:  # it was good when the session was told so
            self._life.end(error)
            return
        assert self._decoder is not None, "it came with the caller"
        self._items.arrive()
        step = self._decoder.rate_hz // SLICES
        for at in range(0, len(audio), step):
            while caller.full and not self._life.finishing:
                await self._life.wait(caller.room())
            if self._life.finishing:
                return
            caller.write(self._decoder.decode(audio[at : at + step]))
        self._life.came(self.received_samples)

    def _commit(self, came: Sent) -> None:
        if self.received_samples == self._items.taken_samples:
            raise EmptyAudio(
                "a commit of nothing came", "audio must have come since the last one", "append audio first"
            )
        self._request(self._items.commit, came)

    def _clear(self, came: Sent) -> None:
        if self.received_samples == self._items.taken_samples:
            self._outbox.say(self._items.cleared())
        else:
            self._request(self._items.clear, came)

    def _request(self, ask: Callable[[int], list[str]], came: Sent) -> None:
        if self._caller is not None and self._decoder is not None and not self._life.finishing:
            self._caller.write(self._decoder.drain_resampler())
        received = self.received_samples
        if self._caller is None:  # another has not begun; what came before it has been heard
            self._say([*ask(received), *self._items.hear(SessionFinished(received))])
        elif not self._life.finishing:
            try:
                self._caller.flush("")
            except AtCapacity as error:
                self.refuse(error, came)
            else:
                self._say(ask(received))

    async def _update(self, update: Update) -> None:
        settings = updated(self._settings, update)
        model = self._ears.expect(settings)
        if self._caller is not None and not self._life.finishing and not settings.heard_as(self._settings):
            self._life.finish()
            assert self._session is not None, "it came with the caller"
            await self._life.wait(asyncio.wait({self._session}))
        if self._caller is None and settings.turns is not None:
            self._commit_rest()
        self._settings = settings
        self._items.spell = self._spell if settings.logprobs else None
        self._voice.beta |= update.beta
        self._say_session("updated", model)

    # --- what is heard --------------------------------------------------------------------------------

    def _begin(self) -> Caller:
        settings = self._settings
        self._decoder = create_live_decoder(*FORMATS[settings.format])
        self._items.begin(self._before_samples, turns=settings.turns is not None)
        self._caller, self._spell = self._ears.begin(settings, self._hear)
        self._items.spell = self._spell if settings.logprobs else None
        self._session = self._life.hear(self._until_finished(self._caller))
        return self._caller

    async def _until_finished(self, caller: Caller) -> None:
        await caller.run()
        await self.close()
        self._life.rest()

    def _hear(self, events: list[LiveEvent]) -> None:
        for event in events:
            self._say(self._items.hear(event))

    def _commit_rest(self) -> None:
        """What the client has not committed is an item, too. All of it has been heard."""
        received = self.received_samples
        if self._settings.turns is None and received > self._items.taken_samples:
            self._say([*self._items.commit(received), *self._items.hear(SessionFinished(received))])

    # --- what is told ---------------------------------------------------------------------------------

    def _say(self, events: list[str]) -> None:
        for event in events:
            self._outbox.say(event)

    def _say_session(self, what: str, model: str) -> None:
        self._outbox.say(self._voice.session(what, self._settings, model, self._expires_s))
