"""What `model.speak` returns: sound, piece by piece while it is made, or all of it, or a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from asr_serve.audio.encode import FORMATS, AudioEncoder
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError
from asr_serve.pipelines.options import AudioChunk, SpeakOptions, SpokenWord
from asr_serve.pipelines.tts.speak import SpeakCanceller, TtsSession, speak
from asr_serve.pipelines.tts.text_feeder import TextFeeder, TextSink
from asr_serve.text.g2p.frontend import TextFrontend
from asr_serve.types import suggest_name

Text = str | Iterable[str] | AsyncIterable[str]
"""All of it; or pieces, as a language model writes them."""
SUFFIXES = {f".{form}": form for form in FORMATS} | {".ogg": "opus", ".oga": "opus", ".raw": "pcm", ".wave": "wav"}


class Speech:
    """One speech. Read it once: with `for` or `async for`, or by `read`, `encoded` or `save`. Leaving the loop
    stops the work; so does the end of a `with` block around it, or `close`, from any thread."""

    def __init__(
        self, client: EngineClient, front: TextFrontend, text: Text, options: SpeakOptions, holder: object
    ) -> None:
        """`holder` lives as long as this. Raises OptionError, WrongModel; reading raises TextError, AtCapacity,
        UnknownVoice, EngineClosed, and what the text's source does."""
        if not isinstance(text, str | Iterable | AsyncIterable):
            raise OptionError(
                f"a {type(text).__name__} to speak", "text, or an iterable of pieces of text", param="text"
            )
        self._client, self._front, self._text, self._options = client, front, text, options
        self._owner = holder
        self.rate_hz: int = options.rate_hz or client.voice_card.rate_hz
        self.words: list[SpokenWord] = []
        """Of what was read so far, and of the sentence that is being read, to its end."""
        self._canceller = SpeakCanceller()
        self._begun = False

    # --- pieces ----------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[AudioChunk, None, None]:
        self._begin()
        if not isinstance(self._text, Iterable):
            raise OptionError(
                f"a {type(self._text).__name__} is an asynchronous text", "plain iterables", "use `async for`"
            )
        with contextlib.closing(
            speak(self._client, self._front, self._text, self._options, self._canceller)
        ) as pieces:
            for spoken in pieces:
                self.words += spoken.words
                yield spoken

    async def __aiter__(self) -> AsyncGenerator[AudioChunk, None]:
        self._begin()
        loop, awake = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(awake.set)

        text = self._text
        whole = text if isinstance(text, str) else None
        speaking = TtsSession(self._client, self._front, self._options, wake, whole)
        self._canceller.attach(speaking)
        feeder = _feeder(speaking, text, wake)
        try:
            while not speaking.done:
                awake.clear()
                pieces = speaking.take_audio(1)
                for spoken in pieces:
                    self.words += spoken.words
                    yield spoken
                if feeder is not None:
                    feeder.raise_failure()
                if not pieces and not speaking.done:
                    await awake.wait()
        finally:
            speaking.close()
            if feeder is not None:
                feeder.close()

    # --- all of it -------------------------------------------------------------------------------------

    def read(self) -> np.ndarray:
        """All samples, (n,) int16 at `rate_hz`."""
        return np.concatenate([np.zeros(0, np.int16), *(spoken.pcm for spoken in self)])

    async def aread(self) -> np.ndarray:
        """The same without blocking the event loop."""
        found = [np.zeros(0, np.int16)]
        async with contextlib.aclosing(aiter(self)) as pieces:
            async for spoken in pieces:
                found.append(spoken.pcm)
        return np.concatenate(found)

    def encoded(self, form: str = "wav", **options: Any) -> Iterator[bytes]:
        """The bytes of an audio format, as they come: wav, mp3, opus, aac, flac, pcm. options: Encoder's,
        `to_hz` and `bit_rate`."""
        encoder = AudioEncoder(form, self.rate_hz, **options)
        for spoken in self:
            if data := encoder.encode(spoken.pcm):
                yield data
        yield encoder.finish()

    def save(self, path: str | os.PathLike[str], form: str | None = None) -> Path:
        """Into a file, whose suffix tells the format unless `form` does. It appears when it is whole.

        Raises what reading does; OptionError for a suffix that is no format's; OSError.
        """
        target = Path(path)
        encoder = AudioEncoder(form or format_of_path(target), self.rate_hz)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                for spoken in self:
                    file.write(encoder.encode(spoken.pcm))
                file.write(encoder.finish())
                if header := encoder.final_header():
                    file.seek(0)
                    file.write(header)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    # --- its end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the work, at once. Whoever is reading gets Cancelled. Idempotent."""
        self._canceller.cancel()

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

    def _begin(self) -> None:
        if self._begun:
            raise OptionError("a speech is read again", "each is read once", "call model.speak again")
        self._begun = True


def format_of_path(path: Path) -> str:
    """The format that a file's name tells. Raises OptionError."""
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise OptionError(
            f"{path.name}, whose suffix names no format",
            f"one of {' '.join(SUFFIXES)}",
            suggest_name(path.suffix.lower(), list(SUFFIXES)),
            param="format",
        )
    return found


class _AsyncTextFeeder:
    """A text that comes asynchronously, fed to a speech on the event loop; see Feeder."""

    def __init__(self, taker: TextSink, texts: AsyncIterable[str], wake: Callable[[], None]) -> None:
        self._taker, self._moved = taker, asyncio.Event()
        self._task = asyncio.ensure_future(self._feed(texts))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen: no warning
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
    """None: the text is whole."""
    if isinstance(text, str):
        return None
    return (
        _AsyncTextFeeder(taker, text, wake) if isinstance(text, AsyncIterable) else TextFeeder(taker, text, wake)
    )
