"""Streaming transcription in Python: an iterable, sync or async, with one result for each chunk of audio.

The next chunk is read when all that can be known of the last one is known. So results depend on the audio, not on
timing; nothing queues up; and work stops when the reader does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator
from typing import Any, cast

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.api.reading import Closeable, event_loop_waker, read_in_threads
from asr_serve.audio.audio_buffers import WindowAlignedBuffer
from asr_serve.audio.pcm import clipped, to_mono
from asr_serve.audio.reader import Source, open_audio
from asr_serve.audio.resample import MAX_RATE_HZ, MIN_RATE_HZ, Resampler
from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled, OptionError, UnsupportedAudio
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone, SessionFinished, SpeakersRevised
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.options import ListenOptions
from asr_serve.pipelines.prompting import hotword_bias, live_language_model, prompt_tokens
from asr_serve.pipelines.segments import check_decoder_options, check_search, resolve_language, validate_option_names
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.text.word_timing import is_unspaced
from asr_serve.types import Segment

CHUNK_TYPES = (np.dtype(np.int16), np.dtype(np.float32), np.dtype(np.float64))

Chunk = np.ndarray | bytes | bytearray | memoryview
"""Mono samples (n,), int16 or float in -1..1, or bytes of 16-bit little-endian samples, cut anywhere."""
Chunks = Iterable[Chunk] | AsyncIterable[Chunk]


def is_single_source(given: object) -> bool:
    """Returns whether `given` is one source of audio, not several sources or chunks; a list of numbers is none."""
    if isinstance(given, tuple) and len(given) == 2:
        return isinstance(given[0], np.ndarray) and not isinstance(given[1], np.ndarray | tuple)
    plain = isinstance(given, str | bytes | bytearray | memoryview | os.PathLike | np.ndarray)
    return plain or hasattr(given, "read")


class Chunker:
    """Cuts chunks of any size and type into pieces of one size."""

    def __init__(self, piece_ms: int, rate_hz: int) -> None:
        """`rate_hz`: sample rate of the chunks passed to `add_chunk`."""
        self._samples = units.ms_to_samples(piece_ms)
        self._resampler = Resampler(rate_hz)
        self._piece = WindowAlignedBuffer()
        self._half = b""
        """First byte of a sample whose second is in the next chunk."""

    def add_chunk(self, chunk: object) -> Iterator[np.ndarray]:
        """Adds a chunk and yields complete pieces. Raises UnsupportedAudio."""
        if isinstance(chunk, bytes | bytearray | memoryview):
            joined = self._half + bytes(chunk)
            whole = len(joined) // 2 * 2
            chunk, self._half = np.frombuffer(joined[:whole], "<i2"), joined[whole:]
        if not isinstance(chunk, np.ndarray):
            came, todo = f"a {type(chunk).__name__}", "a recording may come by itself, not in a list"
        elif chunk.ndim != 1:
            came, todo = f"an array of shape {chunk.shape}", "pick or average the channels: chunk[:, 0]"
        elif chunk.dtype not in CHUNK_TYPES:
            came, todo = f"an array of {chunk.dtype}", "convert the samples first"
        else:
            pcm = to_mono(chunk.copy())  # the caller may refill the same array
            return self.add(clipped(self._resampler.resample(pcm)))
        raise UnsupportedAudio(
            f"{came} came as a chunk", "(n,) int16 or float samples, or bytes of PCM16, are allowed", todo
        )

    def add(self, pcm: np.ndarray) -> Iterator[np.ndarray]:
        """Adds `pcm` (n,) float32 at 16 kHz and yields complete pieces."""
        self._piece.append(pcm)
        while self._piece.samples >= self._samples:
            yield self._piece.take_windows(self._samples, 1, last=False)

    def flush(self) -> np.ndarray:
        """Returns the rest, shorter than a piece; half a sample is dropped."""
        self._piece.append(clipped(self._resampler.finish()))
        return self._piece.take_windows(0, 1, last=True)


MIN_CHUNK_MS, MAX_CHUNK_MS = 100, 30_000


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a stream. Raises OptionError for invalid values."""

    chunk_ms: int = 720
    """Audio between two results."""
    rollback_chars: int = 8
    """Least number of characters at the end of the text that are not fixed before the final result."""
    rate_hz: int | None = None
    """Sample rate of the chunks. None: 16 kHz."""
    listen: ListenOptions = ListenOptions()

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("chunk_ms", self.chunk_ms, MIN_CHUNK_MS, MAX_CHUNK_MS),
            ("rollback_chars", self.rollback_chars, 0, sys.maxsize),
            ("rate_hz", units.RATE_HZ if self.rate_hz is None else self.rate_hz, MIN_RATE_HZ, MAX_RATE_HZ),
        ):
            if type(value) is not int or not least <= value <= most:
                upper = "or more" if most == sys.maxsize else f"to {most}"
                raise OptionError(f"{name}={value!r}", f"a whole number, {least} {upper}", param=name)

    @classmethod
    def of(cls, options: dict[str, Any]) -> StreamOptions:
        """Builds options from keyword arguments: the fields of this class and of ListenOptions, except
        `partial_ms`, which follows from `chunk_ms`. Raises for an unknown name and suggests the nearest."""
        own = tuple(name for name in cls.__struct_fields__ if name != "listen")
        rest = tuple(name for name in ListenOptions.__struct_fields__ if name != "partial_ms")
        options = validate_option_names(options, own + rest)
        chosen = cls(**{name: options[name] for name in own if name in options})
        # A chunk's hypothesis may be an anchor: then the audio after the anchor is worth a partial as well.
        partial_ms = max(MIN_CHUNK_MS, chosen.chunk_ms // 3)
        listen = ListenOptions.of({"partial_ms": partial_ms} | {n: options[n] for n in rest if n in options})
        return msgspec.structs.replace(chosen, listen=listen)


class StreamResult(msgspec.Struct, frozen=True):
    """Result after a chunk. Readable as a mapping, too: `result["fixed_text"]`."""

    text: str
    """Text of all audio so far."""
    fixed_text: str
    """Beginning of `text`, in whole words, that no later result changes."""
    audio_duration_ms: int
    """Duration of all audio so far."""
    is_final: bool
    """Whether this is the last result: the audio has ended, and all of the text is fixed."""
    segments: tuple[Segment, ...]
    """Closed segments; `text` begins with theirs."""
    language: str = ""
    """Language code of the last segment; empty before there is one, and where the model has only one language."""
    language_prob: float = 0.0
    """Probability of the language, 0 to 1; 0 where it was not detected."""

    @property
    def unfixed_text(self) -> str:
        """Rest of `text`, with the space before it."""
        return self.text[len(self.fixed_text) :]

    def keys(self) -> tuple[str, ...]:
        return (*self.__struct_fields__, "unfixed_text")

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError."""
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


class StreamRun:
    """Recognition of one source, advanced by its reader."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, options: StreamOptions, wake: Callable[[], None]
    ) -> None:
        self._rollback, self._partial_s = options.rollback_chars, options.listen.partial_ms / 1_000
        self._itn = options.listen.itn
        self._wake, self._called = wake, False
        self._lock = threading.Lock()
        """Held while advancing, so that another thread may close."""
        self._closed = self._rechecked = self._finishing = self._finished = False
        self._segments: tuple[Segment, ...] = ()
        self._locked = self._fixed = ""
        self._language_and_prob = "", 0.0
        self._partial = LivePartial(0, 0)
        self._samples = 0
        self._session = LiveSession(client, tokenizer, options.listen, self._on_wake, self._clock)

    def append_audio(self, pcm: np.ndarray) -> None:
        self._samples += len(pcm)
        self._session.append_audio(pcm)
        self._rechecked = False

    def finish(self, pcm: np.ndarray) -> None:
        """Appends the last audio and ends the session."""
        self.append_audio(pcm)
        self._finishing = True
        self._session.finish()

    def take_result(self) -> StreamResult | None:
        """Returns the result once all appended audio has been processed; None: call again after `wake`. Raises
        Cancelled once closed, and what LiveSession raises."""
        with self._lock:
            while True:
                if self._closed:
                    raise Cancelled("the stream was closed", "", "read it before it is")
                self._called = False  # before advancing: any later call means something new
                for event in self._session.advance():
                    self._apply_event(event)
                if self._finished:
                    return self._result(is_final=True)
                if self._called or self._finishing or not self._session.idle:
                    return None
                if self._rechecked:
                    return self._result(is_final=False)
                self._rechecked = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._session.close()
        self._wake()

    def _clock(self) -> float:
        """Time by which partials are spaced: audio appended, in seconds. The second pass over a chunk is a
        partial interval later, so that audio after an anchor gets a partial."""
        audio_s = units.samples_to_s(self._samples)
        return audio_s + self._partial_s if self._rechecked else audio_s

    def _on_wake(self) -> None:
        if not self._called:
            self._called = True
            self._wake()

    def _apply_event(self, event: LiveEvent) -> None:
        match event:
            case LiveSegmentDone(segment):
                self._segments += (segment,)
                self._language_and_prob = event.language, event.language_prob
                self._locked = _joined(self._locked, segment.text)
            case LivePartial():
                self._partial = event
            case SpeakersRevised(speakers):
                self._segments = tuple(map(with_speaker, self._segments, speakers))
            case SessionFinished():
                self._finished = True

    def _result(self, *, is_final: bool) -> StreamResult:
        text = _joined(self._locked, self._partial.text)
        if is_final:
            self._fixed = text
        else:
            # A number that is not complete may still be written differently.
            locked = self._locked if self._itn else _joined(self._locked, self._partial.locked_text)
            end = whole_words(text, max(0, min(len(locked), len(text) - self._rollback)))
            self._fixed = max(self._fixed, text[:end], key=len)
        duration_ms = units.samples_to_ms(self._samples)
        return StreamResult(text, self._fixed, duration_ms, is_final, self._segments, *self._language_and_prob)


def whole_words(text: str, end: int) -> int:
    """Length of the whole words in the first `end` characters; every letter of a script without spaces is one.

    >>> whole_words("It is late", 5), whole_words("It is late", 4), whole_words("今天很晚", 2)
    (5, 2, 2)
    """
    while 0 < end < len(text) and not (text[end] == " " or is_unspaced(text[end]) or is_unspaced(text[end - 1])):
        end -= 1
    return end


def with_speaker(segment: Segment, speaker: str) -> Segment:
    """Returns the segment with a revised speaker."""
    if segment.speaker == speaker:
        return segment
    words = tuple(msgspec.structs.replace(word, speaker=speaker) for word in segment.words)
    return msgspec.structs.replace(segment, speaker=speaker, words=words)


def _joined(before: str, after: str) -> str:
    return f"{before} {after}" if before and after else before + after


class TranscriptStream(Closeable):
    """Results of one source, read once with `for` or `async for`. Leaving the loop frees the session; so does
    the end of a `with` block around it, or `close`, from any thread."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        source: Source | Chunks,
        options: StreamOptions,
        holder: object,
    ) -> None:
        """`holder` is kept alive as long as this object. Raises OptionError, UnsupportedAudio; reading raises
        AtCapacity, EngineClosed, and the source's errors."""
        resolve_language(client, options.listen.language)
        prompt_tokens(client, tokenizer, options.listen.prompt)
        hotword_bias(client, tokenizer, options.listen.hotwords)
        live_language_model(client, options.listen)
        check_search(client, "transcribe", options.listen.temperatures, beam=1)
        check_decoder_options(client, options.listen)
        self._whole = is_single_source(source)
        if self._whole and options.rate_hz is not None:
            raise OptionError(
                f"rate_hz={options.rate_hz} with a whole source",
                "it is the rate of chunks",
                "leave it out: a file knows its rate, and an array may come as (array, rate_hz)",
                param="rate_hz",
            )
        if not (self._whole or isinstance(source, Iterable | AsyncIterable)):
            raise UnsupportedAudio(
                f"a {type(source).__name__} came as audio",
                "a path, bytes, a binary stream, an array, (array, rate_hz), or chunks is allowed",
                "convert it to one of these",
            )
        self._client, self._tokenizer, self._source, self._options = client, tokenizer, source, options
        self._owner = holder
        self._chunker = Chunker(options.chunk_ms, options.rate_hz or units.RATE_HZ)
        self._session: StreamRun | None = None

    def __iter__(self) -> Generator[StreamResult, None, None]:
        ready = threading.Event()

        def wait_result(run: StreamRun) -> StreamResult:
            while (result := run.take_result()) is None:
                ready.wait()
                ready.clear()
            return result

        with self._begin(ready.set) as run, contextlib.closing(self._pieces()) as pieces:
            for pcm in pieces:
                run.append_audio(pcm)
                yield wait_result(run)
            run.finish(self._chunker.flush())
            yield wait_result(run)

    async def __aiter__(self) -> AsyncGenerator[StreamResult, None]:
        ready = asyncio.Event()

        async def wait_result(run: StreamRun) -> StreamResult:
            while (result := run.take_result()) is None:
                await ready.wait()
                ready.clear()
            return result

        with self._begin(event_loop_waker(ready)) as run:
            async with contextlib.aclosing(self._pieces_async()) as pieces:
                async for pcm in pieces:
                    run.append_audio(pcm)
                    yield await wait_result(run)
            run.finish(self._chunker.flush())
            yield await wait_result(run)

    def close(self) -> None:
        """Frees the session at once. A pending read raises Cancelled. Idempotent."""
        if self._session is not None:
            self._session.close()

    def _begin(self, wake: Callable[[], None]) -> contextlib.closing[StreamRun]:
        if self._session is not None:
            raise OptionError("a stream is read again", "each is read once", "call model.stream again")
        self._session = StreamRun(self._client, self._tokenizer, self._options, wake)
        return contextlib.closing(self._session)

    # --- source ---------------------------------------------------------------------------------------

    def _pieces(self) -> Generator[np.ndarray, None, None]:
        """Yields complete pieces; the rest stays in the chunker."""
        if self._whole:
            with open_audio(cast(Source, self._source)) as audio:
                for pcm in audio:
                    yield from self._chunker.add(pcm)
        elif isinstance(self._source, Iterable):
            for chunk in self._source:
                yield from self._chunker.add_chunk(chunk)
        else:
            raise UnsupportedAudio(
                f"a {type(self._source).__name__} is an asynchronous source",
                "a plain loop reads plain iterables",
                "use `async for`",
            )

    async def _pieces_async(self) -> AsyncGenerator[np.ndarray, None]:
        if isinstance(self._source, AsyncIterable):
            async for chunk in self._source:
                for pcm in self._chunker.add_chunk(chunk):
                    yield pcm
        elif isinstance(self._source, np.ndarray | list | tuple):
            for pcm in self._pieces():
                yield pcm
        else:  # reading may block: on a disk, or on live audio
            async with contextlib.aclosing(read_in_threads(self._pieces())) as pieces:
                async for pcm in pieces:
                    yield pcm
