"""One speech of a socket: text goes in while it is written, and waits until the voice is so far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack

from asr_serve.errors import OptionError
from asr_serve.protocols.speech.live import Flushed, Sentence, Start, Started
from asr_serve.server.speaking.saying import Inbox, Mark, Saying


class Speech:
    """From start until done. Iterated over once; whoever begins it closes it. Belongs to the event loop's
    thread."""

    def __init__(self, start: Start, started: Started, inbox: Inbox, saying: Saying, held: ExitStack) -> None:
        """`held`: what is given back in the end."""
        self._words, self.started = start.words, started
        self._inbox, self._saying, self._held = inbox, saying, held
        self.characters = 0
        """That came."""

    @property
    def seconds(self) -> float:
        return self._saying.seconds

    @property
    def sentences(self) -> int:
        return self._saying.sentences

    @property
    def waiting_characters(self) -> int:
        return self._inbox.waiting_characters

    @property
    def flushes(self) -> int:
        """Under way."""
        return self._inbox.marks

    def write(self, text: str) -> None:
        self.characters += len(text)
        self._inbox.write(text)

    def flush(self, name: str) -> None:
        self._inbox.write(Mark(name))

    def end(self) -> None:
        """No more text will come."""
        self._inbox.write(None)

    async def __aiter__(self) -> AsyncIterator[bytes | Sentence | Flushed | OptionError]:
        """What is to be told, in order; bytes are sound. Raises what the pipeline does."""
        await self._saying.begin()
        index = 0
        async for piece in self._saying:
            if piece.sentence is not None:
                yield Sentence(index=index, start=piece.start_s, words=piece.sentence if self._words else ())
                index += 1
            if piece.audio:
                yield piece.audio
            if piece.mark:
                yield Flushed(id=piece.mark, seconds=self.seconds)
            if piece.refused is not None:
                yield piece.refused

    async def close(self) -> None:
        """At any time, idempotent."""
        try:
            await self._saying.close()
        finally:
            self._held.close()
