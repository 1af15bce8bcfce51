"""Hot words of streams are made into what a search reads on a thread beside the loop, for a long list takes a
second, and kept for those that come with the same list."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from asr_serve.decoding.hotwords import StreamWords
from asr_serve.engine.chunked.stream import Stream
from asr_serve.engine.utterances.hot.lists import Lists
from asr_serve.engine.work import Keeper
from asr_serve.errors import StepFailed


class Spelling:
    """Streams have no slot until their hot words are ready. On the loop's thread."""

    def __init__(self, spell: Callable[[str], StreamWords] | None, drop: Callable[[int, Exception], None]) -> None:
        """`drop`: a stream whose hot words cannot be made ready."""
        self._spell, self._drop = spell, drop
        self._lists: Lists[StreamWords] = Lists()
        self._asking: dict[int, tuple[Stream, Future[StreamWords]]] = {}

    def begin(self, keeper: Keeper) -> None:
        self._keeper = keeper

    @property
    def waiting(self) -> set[int]:
        """Streams whose hot words are not ready."""
        return set(self._asking)

    def spell(self, number: int, stream: Stream) -> None:
        """It gets what its hot words are to the search: at once where that list is known."""
        if not stream.bias:
            return
        made = self._made(stream.bias)
        self._asking[number] = stream, made
        if made.done():
            self._tell(number, stream, made)
        else:
            made.add_done_callback(lambda _: self._keeper.call(lambda: self._tell(number, stream, made)))

    def leave(self, number: int) -> None:
        """A list that nobody waits for any more, and that was not begun, is not made."""
        _, made = self._asking.pop(number, (None, None))
        if made is not None and all(made is not other for _, other in self._asking.values()):
            self._lists.drop(made)

    def close(self) -> None:
        self._lists.close()

    def _tell(self, number: int, stream: Stream, made: Future[StreamWords]) -> None:
        if self._asking.get(number, (None,))[0] is not stream:
            return  # it has left
        del self._asking[number]
        failure = None if made.cancelled() else made.exception()
        if not made.cancelled() and failure is None:
            stream.hot = made.result()
            return
        told = f"{type(failure).__name__}: {failure}" if failure else "the engine ended"
        error = StepFailed(f"spelling hot words failed: {told}", todo="leave them out; if it stays, report it")
        error.__cause__ = failure
        self._drop(number, error)

    def _made(self, bias: str) -> Future[StreamWords]:
        spell = self._spell
        assert spell is not None, "hot words came to a model without a vocabulary"
        return self._lists.ask(bias, lambda: spell(bias))
