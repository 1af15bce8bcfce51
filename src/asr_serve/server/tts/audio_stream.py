"""Sound as somebody takes it: the pipeline and the encoder. Threads compute, and nobody waits on one."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

from asr_serve.audio.encode import AudioEncoder
from asr_serve.errors import OptionError
from asr_serve.pipelines.options import AudioChunk
from asr_serve.pipelines.tts.speak import TtsSession
from asr_serve.protocols.openai.speech import SpeechWord
from asr_serve.units import s_to_samples, samples_to_s

T = TypeVar("T")
MAX_CHUNK_S = 0.25
"""So much sound is encoded before it goes out, and the next."""
StartTts = Callable[[Callable[[], None]], TtsSession]
"""Given what is to be called when there is more to take. Raises what keeps a text from being said."""


class SpeechChunk(NamedTuple):
    """What can be sent now, in the order of its fields."""

    sentence: tuple[SpeechWord, ...] | None = None
    """The words of one that begins."""
    start_s: float = 0.0
    """Where it does."""
    audio: bytes = b""
    mark: str = ""
    """All that came before it has been said."""
    refused: OptionError | None = None
    """Of a part of the text, which is left out."""


class FlushMark(NamedTuple):
    """What was put before it is to be said as it is, and somebody wants to know when."""

    name: str


class TextQueue:
    """Parts of a text that is still being written, which wait to be read. Put on the event loop's thread, read on
    the pipeline's."""

    def __init__(self, awake: Callable[[], None] = lambda: None) -> None:
        self.awake = awake
        """Called when something was put."""
        self._parts: deque[str | FlushMark | None] = deque()
        self._mark: FlushMark | None = None
        """Under way: what came behind it waits."""
        # Each counter has one writer.
        self._queued_characters = self._read_characters = self._queued_marks = self._reported_marks = 0

    @property
    def waiting_characters(self) -> int:
        return self._queued_characters - self._read_characters

    @property
    def marks(self) -> int:
        """Not told yet."""
        return self._queued_marks - self._reported_marks

    def append(self, part: str | FlushMark | None) -> None:
        """None: nothing follows."""
        self._queued_characters += len(part) if isinstance(part, str) else 0
        self._queued_marks += isinstance(part, FlushMark)
        self._parts.append(part)
        self.awake()

    def read(self, speaking: TtsSession, sounding: bool) -> Iterator[SpeechChunk]:
        """As much as there is room for. What is refused of it is left out. `sounding`: sound was taken, and is not
        out."""
        while True:
            if self._mark is not None:
                if sounding or not speaking.idle:
                    return
                yield SpeechChunk(mark=self._mark.name)
                self._mark = None
                self._reported_marks += 1
            if not self._parts or speaking.full:
                return
            part = self._parts.popleft()
            try:
                self._feed(part, speaking)
            except OptionError as error:
                yield SpeechChunk(refused=error)

    def _feed(self, part: str | FlushMark | None, speaking: TtsSession) -> None:
        if isinstance(part, str):
            self._read_characters += len(part)
            speaking.append_text(part)
        elif isinstance(part, FlushMark):
            self._mark = part
            speaking.flush()
        else:
            speaking.end()


class SpeechStream:
    """Begun and iterated over once. Whoever begins it closes it. All methods belong to the event loop's thread."""

    def __init__(
        self, threads: Executor, begin: StartTts, encoder: AudioEncoder, inbox: TextQueue | None = None
    ) -> None:
        """`inbox`: where the text comes from, if it is not all there."""
        self._threads, self._begin, self._encoder, self._inbox = threads, begin, encoder, inbox
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()
        self._context = contextvars.copy_context()  # the request's id, for what is logged there
        self._working: asyncio.Future[Any] | None = None
        self._session: TtsSession | None = None
        self._events: deque[AudioChunk] = deque()
        """Came, and is to be encoded."""
        self.synthesized_samples = self.sentences = 0
        if inbox is not None:
            inbox.awake = self._awake.set

    @property
    def rate_hz(self) -> int:
        return self._encoder.rate_hz

    @property
    def seconds(self) -> float:
        """Of sound that was made."""
        return samples_to_s(self.synthesized_samples, self.rate_hz)

    async def start(self) -> None:
        """Raises what keeps the text from being said."""
        await self._run_in_thread(self._start_session)

    async def __aiter__(self) -> AsyncIterator[SpeechChunk]:
        """What can be sent, in order; nothing more is made than is taken. Raises what the pipeline does."""
        assert self._session is not None, "it was begun"
        while self._events or not self._session.done:
            self._awake.clear()
            pieces, moved = await self._run_in_thread(self._drain_events)
            for piece in pieces:
                yield piece
            if not moved:  # what an encoder keeps to itself is no reason to wait
                await self._awake.wait()
        if tail := await self._run_in_thread(self._encoder.finish):
            yield SpeechChunk(audio=tail)

    async def close(self) -> None:
        """At any time, idempotent: nothing of it is left afterwards, in the engine or on a thread."""
        if self._working is not None:
            await asyncio.wait({self._working})
            if not self._working.cancelled():
                self._working.exception()  # seen: no warning
        if self._session is not None:
            await self._run_in_thread(self._session.close)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        working = self._loop.run_in_executor(self._threads, self._context.copy().run, work)
        self._working = working
        await asyncio.wait({working})  # it goes on without whoever waits
        return working.result()

    def _start_session(self) -> None:
        self._session = self._begin(self._wake)

    def _wake(self) -> None:
        """On any thread."""
        self._loop.call_soon_threadsafe(self._awake.set)

    def _drain_events(self) -> tuple[list[SpeechChunk], bool]:
        """What can be sent of what there is; and whether there was anything."""
        speaking = self._session
        assert speaking is not None
        found = [] if self._inbox is None else list(self._inbox.read(speaking, bool(self._events)))
        if not self._events:
            self._events += speaking.take_audio()
        moved = bool(found or self._events or speaking.done)
        until_samples = self.synthesized_samples + s_to_samples(MAX_CHUNK_S, self.rate_hz)
        while self._events and self.synthesized_samples < until_samples:
            found += self._chunks(self._events.popleft())
        return found, moved

    def _chunks(self, spoken: AudioChunk) -> Iterator[SpeechChunk]:
        words, start_s = None, samples_to_s(spoken.start_samples, self.rate_hz)
        if spoken.sentence:
            self.sentences += 1
            words = tuple(self._word(word.text, word.start_samples, word.end_samples) for word in spoken.words)
        self.synthesized_samples += len(spoken.pcm)
        audio = self._encoder.encode(spoken.pcm)
        if audio or words is not None:
            yield SpeechChunk(words, start_s, audio)

    def _word(self, text: str, start_samples: int, end_samples: int) -> SpeechWord:
        start_s, end_s = (round(samples_to_s(each, self.rate_hz), 3) for each in (start_samples, end_samples))
        return SpeechWord(text, start_s, end_s)
