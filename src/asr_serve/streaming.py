"""Chunks in, one result for each: the text of all audio so far, of which a growing part is fixed.

The next chunk is taken when all that can be known of the last one is known. So results tell what was heard, not
how fast; nothing piles up; and whoever stops reading stops the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.buffers import Piece
from asr_serve.audio.io import Source, open_audio
from asr_serve.audio.pcm import clipped, to_mono
from asr_serve.audio.resample import Resampler, expect_rate
from asr_serve.engine.client import EngineClient
from asr_serve.errors import Cancelled, OptionError, UnsupportedAudio
from asr_serve.pipelines.listen import Event, Finished, Listening, ListenOptions, Partial, SegmentDone
from asr_serve.pipelines.utterance import known_options, language
from asr_serve.types import Segment

LEAST_CHUNK_MS, MOST_CHUNK_MS = 100, 30_000
CHUNK_TYPES = (np.dtype(np.int16), np.dtype(np.float32), np.dtype(np.float64))

Chunk = np.ndarray | bytes | bytearray | memoryview
"""Mono samples (n,), int16 or float in -1..1, or the bytes of 16-bit little-endian ones, cut anywhere."""
Chunks = Iterable[Chunk] | AsyncIterable[Chunk]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller may choose. Raises OptionError for what cannot be."""

    chunk_ms: int = 720
    """Audio between two results."""
    rollback_chars: int = 8
    """At the end of the text, how many characters at least are not fixed before it is final."""
    rate_hz: int | None = None
    """Of the chunks. None: 16 kHz."""
    listen: ListenOptions = ListenOptions()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("chunk_ms", LEAST_CHUNK_MS, MOST_CHUNK_MS),
            ("rollback_chars", 0, None),
            ("rate_hz", 1, None),
        ):
            value = getattr(self, name)
            if name == "rate_hz" and value is None:
                continue
            if not isinstance(value, int) or value < least or (most is not None and value > most):
                allowed = f"a whole number, {least} or more" if most is None else f"{least} to {most} ms, whole"
                raise OptionError(f"{name}={value!r}", allowed, param=name)
        expect_rate(self.rate_hz or units.RATE_HZ)

    @classmethod
    def of(cls, options: dict[str, Any]) -> StreamOptions:
        """From keyword arguments: the fields of this and of ListenOptions, less `partial_ms`, which follows
        from `chunk_ms`. An unknown one fails and names the nearest."""
        own = tuple(name for name in cls.__struct_fields__ if name != "listen")
        rest = tuple(name for name in ListenOptions.__struct_fields__ if name != "partial_ms")
        options = known_options(options, own + rest)
        chosen = cls(**{name: options[name] for name in own if name in options})
        # A chunk's hypothesis may be one of its anchors: then what came after that is worth a partial as well.
        partial_ms = max(LEAST_CHUNK_MS, chosen.chunk_ms // 3)
        listen = ListenOptions(partial_ms=partial_ms, **{name: options[name] for name in rest if name in options})
        return msgspec.structs.replace(chosen, listen=listen)


class StreamResult(msgspec.Struct, frozen=True):
    """All that is known after a chunk. May also be read as a mapping: `result["fixed_text"]`."""

    text: str
    """Of all audio so far."""
    fixed_text: str
    """The beginning of `text`, in whole words, that no later result changes."""
    audio_duration_ms: int
    """All audio so far."""
    is_final: bool
    """The last result: no more audio will come, and all of the text is fixed."""
    segments: tuple[Segment, ...]
    """Those that are closed; `text` begins with theirs."""

    @property
    def unfixed_text(self) -> str:
        """The rest of `text`, with the space before it."""
        return self.text[len(self.fixed_text) :]

    def keys(self) -> tuple[str, ...]:
        return (*self.__struct_fields__, "unfixed_text")

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError."""
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


class Stream:
    """Results of one source: read it once, with `for` or `async for`. Leaving the loop frees what it holds; so
    does the end of a `with` block around it, or `close`, from any thread."""

    def __init__(
        self,
        client: EngineClient,
        text: Callable[[list[int]], str],
        source: Source | Chunks,
        options: StreamOptions,
        holder: object,
    ) -> None:
        """`holder` lives as long as this. Raises OptionError, UnsupportedAudio; reading raises AtCapacity,
        EngineClosed, and what the source does."""
        language(client, options.listen.language)
        self._whole = one_source(source)
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
        self._client, self._text, self._source, self._options = client, text, source, options
        self._holder = holder
        self._cut = _Cut(options)
        self._run: _Run | None = None

    def __iter__(self) -> Generator[StreamResult, None, None]:
        awake = threading.Event()

        def known(run: _Run) -> StreamResult:
            while (result := run.take()) is None:
                awake.wait()
                awake.clear()
            return result

        with self._begin(awake.set) as run, contextlib.closing(self._pieces()) as pieces:
            for pcm in pieces:
                run.put(pcm)
                yield known(run)
            run.finish(self._cut.rest())
            yield known(run)

    async def __aiter__(self) -> AsyncGenerator[StreamResult, None]:
        loop, awake = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(awake.set)

        async def known(run: _Run) -> StreamResult:
            while (result := run.take()) is None:
                await awake.wait()
                awake.clear()
            return result

        with self._begin(wake) as run:
            async with contextlib.aclosing(self._pieces_async()) as pieces:
                async for pcm in pieces:
                    run.put(pcm)
                    yield await known(run)
            run.finish(self._cut.rest())
            yield await known(run)

    def close(self) -> None:
        """Free what is held, at once. Whoever is reading gets Cancelled. Idempotent."""
        if self._run is not None:
            self._run.close()

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, wake: Callable[[], None]) -> contextlib.closing[_Run]:
        if self._run is not None:
            raise OptionError("a stream is read again", "each is read once", "call model.stream again")
        self._run = _Run(self._client, self._text, self._options, wake)
        return contextlib.closing(self._run)

    # --- the source ------------------------------------------------------------------------------------

    def _pieces(self) -> Generator[np.ndarray, None, None]:
        """Whole chunks; the rest stays in `_cut`."""
        if self._whole:
            with open_audio(cast(Source, self._source)) as audio:
                for pcm in audio:
                    yield from self._cut.add(pcm)
        elif isinstance(self._source, Iterable):
            for chunk in self._source:
                yield from self._cut.chunk(chunk)
        else:
            raise UnsupportedAudio(
                f"a {type(self._source).__name__} is an asynchronous source",
                "a plain loop reads plain iterables",
                "use `async for`",
            )

    async def _pieces_async(self) -> AsyncGenerator[np.ndarray, None]:
        if isinstance(self._source, AsyncIterable):
            async for chunk in self._source:
                for pcm in self._cut.chunk(chunk):
                    yield pcm
        elif isinstance(self._source, np.ndarray | list | tuple):
            for pcm in self._pieces():
                yield pcm
        else:  # it may have to wait, for a disk or for somebody to speak
            pieces = self._pieces()
            step: asyncio.Future[np.ndarray | None] | None = None
            try:
                while True:
                    step = asyncio.get_running_loop().run_in_executor(None, next, pieces, None)
                    if (piece := await asyncio.shield(step)) is None:
                        return
                    yield piece
            finally:
                # A generator cannot be closed while a thread is inside it; that one step ends by itself.
                if step is not None and not step.done():
                    step.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # no warning
                    step.add_done_callback(lambda _: pieces.close())
                else:
                    pieces.close()


class _Cut:
    """Audio in chunks of any size and kind in, pieces of one size out."""

    def __init__(self, options: StreamOptions) -> None:
        self._samples = units.ms_to_samples(options.chunk_ms)
        self._resampler = Resampler(options.rate_hz or units.RATE_HZ)
        self._piece = Piece()
        self._half = b""
        """Of a sample, when bytes were cut in the middle of one."""

    def chunk(self, chunk: object) -> Iterator[np.ndarray]:
        """Raises UnsupportedAudio."""
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
            pcm = to_mono(chunk.copy())  # whoever records may fill the same array again
            return self.add(clipped(self._resampler.put(pcm)))
        raise UnsupportedAudio(
            f"{came} came as a chunk", "(n,) int16 or float samples, or bytes of PCM16, are allowed", todo
        )

    def add(self, pcm: np.ndarray) -> Iterator[np.ndarray]:
        """`pcm` (n,) float32 at 16 kHz."""
        self._piece.add(pcm)
        while self._piece.samples >= self._samples:
            yield self._piece.take(self._samples, 1, last=False)

    def rest(self) -> np.ndarray:
        """What is left at the end: less than a piece, and half a sample is none."""
        self._piece.add(clipped(self._resampler.finish()))
        return self._piece.take(0, 1, last=True)


class _Listening(Listening):
    @property
    def idle(self) -> bool:
        """Nothing is under way: there is no news before more is put."""
        return self._hearing is None and all(each.job is None for each in self._segments)


class _Run:
    """One source on its way through the pipeline, in the turns of whoever reads."""

    def __init__(
        self,
        client: EngineClient,
        text: Callable[[list[int]], str],
        options: StreamOptions,
        wake: Callable[[], None],
    ) -> None:
        self._rollback, self._partial_s = options.rollback_chars, options.listen.partial_ms / 1_000
        self._wake, self._called = wake, False
        self._lock = threading.Lock()
        """Held while working, so that another thread may close."""
        self._closed = self._looked_again = self._finishing = self._finished = False
        self._segments: tuple[Segment, ...] = ()
        self._locked = self._fixed = ""
        self._partial = Partial(0, 0)
        self._listening = _Listening(client, text, options.listen, self._woken, self._clock)

    def put(self, pcm: np.ndarray) -> None:
        self._listening.put(pcm)
        self._looked_again = False

    def finish(self, pcm: np.ndarray) -> None:
        """With the last of the audio."""
        self._finishing = True
        self._listening.put(pcm)
        self._listening.finish()

    def take(self) -> StreamResult | None:
        """The result, once all that was put has been heard; None: call again after `wake`.

        Raises Cancelled when it was closed, and what Listening does.
        """
        with self._lock:
            while True:
                if self._closed:
                    raise Cancelled("the stream was closed", "", "read it before it is")
                self._called = False  # before advancing: a call from now on tells of something new
                for event in self._listening.advance():
                    self._note(event)
                if self._finished:
                    return self._result(is_final=True)
                if self._called or self._finishing or not self._listening.idle:
                    return None
                if self._looked_again:
                    return self._result(is_final=False)
                self._looked_again = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._listening.close()
        self._wake()

    def _clock(self) -> float:
        """Audio is the clock of what is asked for; a second look is for what came after an anchor."""
        heard_s = units.samples_to_s(self._listening.received_samples)
        return heard_s + self._partial_s if self._looked_again else heard_s

    def _woken(self) -> None:
        if not self._called:
            self._called = True
            self._wake()

    def _note(self, event: Event) -> None:
        match event:
            case SegmentDone(segment):
                self._segments += (segment,)
                self._locked = _joined(self._locked, segment.text)
            case Partial():
                self._partial = event
            case Finished():
                self._finished = True

    def _result(self, *, is_final: bool) -> StreamResult:
        text = _joined(self._locked, self._partial.text)
        if is_final:
            self._fixed = text
        else:
            certain = _joined(self._locked, self._partial.fixed)
            end = min(len(certain), len(text) - self._rollback)
            if end < len(text):
                end = text.rfind(" ", 0, max(0, end + 1))
            self._fixed = max(self._fixed, text[: max(0, end)], key=len)
        duration_ms = units.samples_to_ms(self._listening.received_samples)
        return StreamResult(text, self._fixed, duration_ms, is_final, self._segments)


def one_source(given: object) -> bool:
    """Whether it is one source of audio, and not several or chunks; a list of numbers is none."""
    if isinstance(given, tuple) and len(given) == 2:
        return isinstance(given[0], np.ndarray) and not isinstance(given[1], np.ndarray | tuple)
    plain = isinstance(given, str | bytes | bytearray | memoryview | os.PathLike | np.ndarray)
    return plain or hasattr(given, "read")


def _joined(before: str, after: str) -> str:
    return f"{before} {after}" if before and after else before + after
