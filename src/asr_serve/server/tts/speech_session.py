"""Speech of a socket: takes text as it is written, which waits until synthesis reaches it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack

from asr_serve.errors import OptionError
from asr_serve.protocols.stream.speech_messages import SpeechFlushed, SpeechSentence, SpeechStarted, StartSpeech
from asr_serve.server.tts.audio_stream import FlushMark, SpeechStream, TextQueue


class SpeechSession:
    """Speech until done, iterated over once and closed by its owner. Belongs to the event loop's thread."""

    def __init__(
        self, start: StartSpeech, started: SpeechStarted, queue: TextQueue, stream: SpeechStream, stack: ExitStack
    ) -> None:
        """`stack`: resources, released by `close`."""
        self._words, self.started = start.words, started
        self._inbox, self._stream, self._resources = queue, stream, stack
        self.characters = 0
        """Number of characters received."""

    @property
    def seconds(self) -> float:
        return self._stream.seconds

    @property
    def sentences(self) -> int:
        return self._stream.sentences

    @property
    def waiting_characters(self) -> int:
        return self._inbox.waiting_characters

    @property
    def pending_flushes(self) -> int:
        """Number of flushes not completed yet."""
        return self._inbox.marks

    def append_text(self, text: str) -> None:
        self.characters += len(text)
        self._inbox.append(text)

    def flush(self, name: str) -> None:
        self._inbox.append(FlushMark(name))

    def end(self) -> None:
        """Ends the text."""
        self._inbox.append(None)

    async def __aiter__(self) -> AsyncIterator[bytes | SpeechSentence | SpeechFlushed | OptionError]:
        """Yields audio, as bytes, and events in order. Raises as the pipeline does."""
        await self._stream.start()
        index = 0
        async for chunk in self._stream:
            if chunk.sentence is not None:
                yield SpeechSentence(index=index, start=chunk.start_s, words=chunk.sentence if self._words else ())
                index += 1
            if chunk.audio:
                yield chunk.audio
            if chunk.mark:
                yield SpeechFlushed(id=chunk.mark, seconds=self.seconds)
            if chunk.refused is not None:
                yield chunk.refused

    async def close(self) -> None:
        """Releases everything; at any time, idempotent."""
        try:
            await self._stream.close()
        finally:
            self._resources.close()
