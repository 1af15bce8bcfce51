"""Result of `model.speak`: audio in chunks while it is made, or all of it, or a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asr_serve.api.reading import Closeable, event_loop_waker
from asr_serve.audio.encode import FORMATS, AudioEncoder, encoded_file
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError
from asr_serve.pipelines.options import AudioChunk, SpeakOptions, SpokenWord
from asr_serve.pipelines.tts.speak import SpeakCanceller, TtsSession, speak
from asr_serve.pipelines.tts.text_feeder import TextFeeder, TextSink
from asr_serve.text.g2p.frontend import TextFrontend
from asr_serve.types import suggest_name

Text = str | Iterable[str] | AsyncIterable[str]
"""Whole text; or pieces, as a language model writes them."""
SUFFIXES = {f".{form}": form for form in FORMATS} | {".ogg": "opus", ".oga": "opus", ".raw": "pcm", ".wave": "wav"}


class Speech(Closeable):
    """Synthesized speech, read once: with `for` or `async for`, or by `read`, `encoded` or `save`. Leaving the
    loop stops the work; so does the end of a `with` block around it, or `close`, from any thread."""

    def __init__(
        self, client: EngineClient, front: TextFrontend, text: Text, options: SpeakOptions, holder: object
    ) -> None:
        """`holder` is kept alive as long as this object. Raises OptionError, WrongModel; reading raises
        TextError, AtCapacity, UnknownVoice, EngineClosed, and the errors of the text's source."""
        if not isinstance(text, str | Iterable | AsyncIterable):
            raise OptionError(
                f"a {type(text).__name__} to speak", "text, or an iterable of pieces of text", param="text"
            )
        self._client, self._front, self._text, self._options = client, front, text, options
        self._owner = holder
        self.rate_hz: int = options.rate_hz or client.voice_card.rate_hz
        self.words: list[SpokenWord] = []
        """Words of the audio read so far, to the end of the current sentence."""
        self._canceller = SpeakCanceller()
        self._begun = False

    # --- chunks ----------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[AudioChunk, None, None]:
        self._begin()
        if not isinstance(self._text, Iterable):
            raise OptionError(
                f"a {type(self._text).__name__} is an asynchronous text", "plain iterables", "use `async for`"
            )
        with contextlib.closing(speak(self._client, self._front, self._text, self._options, self._canceller)) as chunks:
            for chunk in chunks:
                self.words += chunk.words
                yield chunk

    async def __aiter__(self) -> AsyncGenerator[AudioChunk, None]:
        self._begin()
        ready = asyncio.Event()
        wake = event_loop_waker(ready)
        text = self._text
        full_text = text if isinstance(text, str) else None
        session = TtsSession(self._client, self._front, self._options, wake, full_text)
        self._canceller.attach(session)
        feeder = _feeder(session, text, wake)
        try:
            while not session.done:
                ready.clear()
                chunks = session.take_audio(1)
                for chunk in chunks:
                    self.words += chunk.words
                    yield chunk
                if feeder is not None:
                    feeder.raise_failure()
                if not chunks and not session.done:
                    await ready.wait()
        finally:
            session.close()
            if feeder is not None:
                feeder.close()

    # --- all of it -------------------------------------------------------------------------------------

    def read(self) -> np.ndarray:
        """Returns all samples, (n,) int16 at `rate_hz`."""
        return np.concatenate([np.zeros(0, np.int16), *(chunk.pcm for chunk in self)])

    async def aread(self) -> np.ndarray:
        """Reads like `read`, without blocking the event loop."""
        parts = [np.zeros(0, np.int16)]
        async with contextlib.aclosing(aiter(self)) as chunks:
            async for chunk in chunks:
                parts.append(chunk.pcm)
        return np.concatenate(parts)

    def encoded(self, form: str = "wav", **options: Any) -> Iterator[bytes]:
        """Yields the bytes of an audio format as they are made: wav, mp3, opus, aac, flac, pcm. options:
        AudioEncoder's, `to_hz` and `bit_rate`."""
        encoder = AudioEncoder(form, self.rate_hz, **options)
        for chunk in self:
            if data := encoder.encode(chunk.pcm):
                yield data
        yield encoder.finish()

    def save(self, path: str | os.PathLike[str], form: str | None = None) -> Path:
        """Writes a file, whose suffix selects the format unless `form` does. The file appears when it is complete.

        Raises what reading raises; OptionError for a suffix without a format; OSError.
        """
        target = Path(path)
        encoder = AudioEncoder(form or format_of_path(target), self.rate_hz)
        with encoded_file(target, encoder) as write:
            for chunk in self:
                write(chunk.pcm)
        return target

    # --- end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops the work at once. A pending read raises Cancelled. Idempotent."""
        self._canceller.cancel()

    def _begin(self) -> None:
        if self._begun:
            raise OptionError("a speech is read again", "each is read once", "call model.speak again")
        self._begun = True


def format_of_path(path: Path) -> str:
    """Returns the format of a file's suffix. Raises OptionError."""
    form = SUFFIXES.get(path.suffix.lower())
    if form is None:
        raise OptionError(
            f"{path.name}, whose suffix names no format",
            f"one of {' '.join(SUFFIXES)}",
            suggest_name(path.suffix.lower(), list(SUFFIXES)),
            param="format",
        )
    return form


class _AsyncTextFeeder:
    """Feeds an asynchronous text to a session on the event loop; see TextFeeder."""

    def __init__(self, taker: TextSink, texts: AsyncIterable[str], wake: Callable[[], None]) -> None:
        self._taker, self._moved = taker, asyncio.Event()
        self._task = asyncio.ensure_future(self._feed(texts))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # avoids a warning
        self._task.add_done_callback(lambda _: wake())

    def raise_failure(self) -> None:
        self._moved.set()
        if self._task.done() and self._taker.idle:
            self._task.result()

    def close(self) -> None:
        self._task.cancel()

    async def _feed(self, texts: AsyncIterable[str]) -> None:
        async for text in texts:
            while self._taker.full:
                self._moved.clear()
                await self._moved.wait()
            self._taker.append_text(text)
        self._taker.end()


def _feeder(taker: TextSink, text: Text, wake: Callable[[], None]) -> TextFeeder | _AsyncTextFeeder | None:
    """Returns a feeder for a text in pieces; None for a whole text."""
    if isinstance(text, str):
        return None
    return _AsyncTextFeeder(taker, text, wake) if isinstance(text, AsyncIterable) else TextFeeder(taker, text, wake)
