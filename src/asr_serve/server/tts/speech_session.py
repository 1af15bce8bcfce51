"""One speech of a socket: text goes in while it is written, and waits until the voice is so far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack

from asr_serve.errors import OptionError
from asr_serve.protocols.stream.speech_messages import SpeechFlushed, SpeechSentence, SpeechStarted, StartSpeech
from asr_serve.server.tts.audio_stream import FlushMark, SpeechStream, TextQueue


class SpeechSession:
    """From start until done. Iterated over once; whoever begins it closes it. Belongs to the event loop's
    thread."""

    def __init__(
        self, start: StartSpeech, started: SpeechStarted, inbox: TextQueue, saying: SpeechStream, held: ExitStack
    ) -> None:
        """`held`: what is given back in the end."""
        self._words, self.started = start.words, started
        self._inbox, self._stream, self._resources = inbox, saying, held
        self.characters = 0
        """That came."""

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
        """Under way."""
        return self._inbox.marks

    def append_text(self, text: str) -> None:
        self.characters += len(text)
        self._inbox.append(text)

    def flush(self, name: str) -> None:
        self._inbox.append(FlushMark(name))

    def end(self) -> None:
        """No more text will come."""
        self._inbox.append(None)

    async def __aiter__(self) -> AsyncIterator[bytes | SpeechSentence | SpeechFlushed | OptionError]:
        """What is to be told, in order; bytes are sound. Raises what the pipeline does."""
        await self._stream.start()
        index = 0
        async for piece in self._stream:
            if piece.sentence is not None:
                yield SpeechSentence(index=index, start=piece.start_s, words=piece.sentence if self._words else ())
                index += 1
            if piece.audio:
                yield piece.audio
            if piece.mark:
                yield SpeechFlushed(id=piece.mark, seconds=self.seconds)
            if piece.refused is not None:
                yield piece.refused

    async def close(self) -> None:
        """At any time, idempotent."""
        try:
            await self._stream.close()
        finally:
            self._resources.close()
