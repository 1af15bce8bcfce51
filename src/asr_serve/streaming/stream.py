"""Read with `for` or `async for`: chunks in, a result for each.

The next chunk is taken when all that can be known of the last one is known. So results tell what was heard, not
how fast; nothing piles up; and whoever stops reading stops the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from types import TracebackType
from typing import Self, cast

import numpy as np

from asr_serve import units
from asr_serve.audio.io import Source, open_audio
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError, UnsupportedAudio
from asr_serve.pipelines.prompts import hotword_bias, prompt_tokens
from asr_serve.pipelines.utterance import language
from asr_serve.streaming.chunks import Chunks, Cut, one_source
from asr_serve.streaming.results import Run, StreamOptions, StreamResult
from asr_serve.text.tokens import Tokenizer


class Stream:
    """Results of one source: read it once, with `for` or `async for`. Leaving the loop frees what it holds; so
    does the end of a `with` block around it, or `close`, from any thread."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        source: Source | Chunks,
        options: StreamOptions,
        holder: object,
    ) -> None:
        """`holder` lives as long as this. Raises OptionError, UnsupportedAudio; reading raises AtCapacity,
        EngineClosed, and what the source does."""
        language(client, options.listen.language)
        prompt_tokens(client, tokenizer, options.listen.prompt)
        hotword_bias(client, tokenizer, options.listen.hotwords)
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
        self._client, self._tokenizer, self._source, self._options = client, tokenizer, source, options
        self._holder = holder
        self._cut = Cut(options.chunk_ms, options.rate_hz or units.RATE_HZ)
        self._run: Run | None = None

    def __iter__(self) -> Generator[StreamResult, None, None]:
        awake = threading.Event()

        def known(run: Run) -> StreamResult:
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

        async def known(run: Run) -> StreamResult:
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

    def _begin(self, wake: Callable[[], None]) -> contextlib.closing[Run]:
        if self._run is not None:
            raise OptionError("a stream is read again", "each is read once", "call model.stream again")
        self._run = Run(self._client, self._tokenizer, self._options, wake)
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
