"""Audio of synthesized text, as it is consumed: pipeline and encoder run on threads, never the event loop's."""

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
"""Longest audio that is encoded before it is sent."""
StartTts = Callable[[Callable[[], None]], TtsSession]
"""Starts synthesis; its argument is called when there is more audio. Raises what prevents synthesis."""


class SpeechChunk(NamedTuple):
    """Data to be sent now, in the order of its fields."""

    sentence: tuple[SpeechWord, ...] | None = None
    """Words of a sentence that begins."""
    start_s: float = 0.0
    """Start of that sentence."""
    audio: bytes = b""
    mark: str = ""
    """Name of a flush: all text before it has been spoken."""
    refused: OptionError | None = None
    """Error of a part of the text, which is left out."""


class FlushMark(NamedTuple):
    """Flush in the text: all text before it is spoken as it is, and the end of that is reported."""

    name: str


class TextQueue:
    """Queue for the parts of a text that is still being written. Filled on the event loop's thread, read on the
    pipeline's."""

    def __init__(self, awake: Callable[[], None] = lambda: None) -> None:
        self.awake = awake
        """Called after each `append`."""
        self._parts: deque[str | FlushMark | None] = deque()
        self._mark: FlushMark | None = None
        """Flush in progress; the parts after it wait."""
        # Each counter has one writer.
        self._queued_characters = self._read_characters = self._queued_marks = self._reported_marks = 0

    @property
    def waiting_characters(self) -> int:
        return self._queued_characters - self._read_characters

    @property
    def marks(self) -> int:
        """Number of flushes not reported yet."""
        return self._queued_marks - self._reported_marks

    def append(self, part: str | FlushMark | None) -> None:
        """Appends a part; None ends the text."""
        self._queued_characters += len(part) if isinstance(part, str) else 0
        self._queued_marks += isinstance(part, FlushMark)
        self._parts.append(part)
        self.awake()

    def read(self, session: TtsSession, pending: bool) -> Iterator[SpeechChunk]:
        """Passes on parts as there is room; yields completed flushes and the errors of parts that are left out.
        `pending`: some audio is pending, so that no flush is complete."""
        while True:
            if self._mark is not None:
                if pending or not session.idle:
                    return
                yield SpeechChunk(mark=self._mark.name)
                self._mark = None
                self._reported_marks += 1
            if not self._parts or session.full:
                return
            part = self._parts.popleft()
            try:
                self._feed(part, session)
            except OptionError as error:
                yield SpeechChunk(refused=error)

    def _feed(self, part: str | FlushMark | None, session: TtsSession) -> None:
        if isinstance(part, str):
            self._read_characters += len(part)
            session.append_text(part)
        elif isinstance(part, FlushMark):
            self._mark = part
            session.flush()
        else:
            session.end()


class SpeechStream:
    """Audio of one text, iterated over once and closed by its owner. Belongs to the event loop's thread."""

    def __init__(
        self, threads: Executor, begin: StartTts, encoder: AudioEncoder, queue: TextQueue | None = None
    ) -> None:
        """`queue`: source of a text that is not complete yet."""
        self._threads, self._begin, self._encoder, self._inbox = threads, begin, encoder, queue
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()
        self._context = contextvars.copy_context()  # the request's id, for what is logged there
        self._working: asyncio.Future[Any] | None = None
        self._session: TtsSession | None = None
        self._events: deque[AudioChunk] = deque()
        """Chunks to be encoded."""
        self.synthesized_samples = self.sentences = 0
        if queue is not None:
            queue.awake = self._awake.set

    @property
    def rate_hz(self) -> int:
        return self._encoder.rate_hz

    @property
    def seconds(self) -> float:
        """Seconds of audio so far."""
        return samples_to_s(self.synthesized_samples, self.rate_hz)

    async def start(self) -> None:
        """Starts synthesis. Raises what prevents it."""
        await self._run_in_thread(self._start_session)

    async def __aiter__(self) -> AsyncIterator[SpeechChunk]:
        """Yields chunks in order, and makes no more than is consumed. Raises as the pipeline does."""
        assert self._session is not None, "it was begun"
        while self._events or not self._session.done:
            self._awake.clear()
            chunks, moved = await self._run_in_thread(self._drain_events)
            for chunk in chunks:
                yield chunk
            if not moved:  # audio that the encoder withholds is no reason to wait
                await self._awake.wait()
        if tail := await self._run_in_thread(self._encoder.finish):
            yield SpeechChunk(audio=tail)

    async def close(self) -> None:
        """Releases everything, in the engine and on the threads; at any time, idempotent."""
        if self._working is not None:
            await asyncio.wait({self._working})
            if not self._working.cancelled():
                self._working.exception()  # retrieved: asyncio logs no warning
        if self._session is not None:
            await self._run_in_thread(self._session.close)

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        future = self._loop.run_in_executor(self._threads, self._context.copy().run, work)
        self._working = future
        await asyncio.wait({future})  # the thread continues when the waiting task is cancelled
        return future.result()

    def _start_session(self) -> None:
        self._session = self._begin(self._wake)

    def _wake(self) -> None:
        """Wakes the iteration, from any thread."""
        self._loop.call_soon_threadsafe(self._awake.set)

    def _drain_events(self) -> tuple[list[SpeechChunk], bool]:
        """Encodes pending audio: the chunks to send, and whether there was any progress."""
        session = self._session
        assert session is not None
        chunks = [] if self._inbox is None else list(self._inbox.read(session, bool(self._events)))
        if not self._events:
            self._events += session.take_audio()
        moved = bool(chunks or self._events or session.done)
        until_samples = self.synthesized_samples + s_to_samples(MAX_CHUNK_S, self.rate_hz)
        while self._events and self.synthesized_samples < until_samples:
            chunks += self._chunks(self._events.popleft())
        return chunks, moved

    def _chunks(self, chunk: AudioChunk) -> Iterator[SpeechChunk]:
        words, start_s = None, samples_to_s(chunk.start_samples, self.rate_hz)
        if chunk.sentence:
            self.sentences += 1
            words = tuple(self._word(word.text, word.start_samples, word.end_samples) for word in chunk.words)
        self.synthesized_samples += len(chunk.pcm)
        audio = self._encoder.encode(chunk.pcm)
        if audio or words is not None:
            yield SpeechChunk(words, start_s, audio)

    def _word(self, text: str, start_samples: int, end_samples: int) -> SpeechWord:
        start_s, end_s = (round(samples_to_s(n, self.rate_hz), 3) for n in (start_samples, end_samples))
        return SpeechWord(text, start_s, end_s)
