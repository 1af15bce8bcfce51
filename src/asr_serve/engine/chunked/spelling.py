"""Hot words of streams are made into what a search reads on a thread beside the loop, for a long list takes a
second, and kept for those that come with the same list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from asr_serve.decoding.hotwords import StreamWords
from asr_serve.engine.chunked.stream import Stream
from asr_serve.engine.work import Keeper
from asr_serve.errors import StepFailed

KEPT = 16
"""Lists: of ten thousand words one takes some 40 MB."""


class Spelling:
    """Streams have no slot until their hot words are ready. On the loop's thread."""

    def __init__(self, spell: Callable[[str], StreamWords] | None, drop: Callable[[int, Exception], None]) -> None:
        """`drop`: a stream whose hot words cannot be made ready."""
        self._spell, self._drop = spell, drop
        self._lists: OrderedDict[str, Future[StreamWords]] = OrderedDict()
        """Those that were asked for of late."""
        self._asking: dict[int, tuple[Stream, Future[StreamWords]]] = {}
        self._thread: ThreadPoolExecutor | None = None

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
        if made is None or any(made is other for _, other in self._asking.values()) or not made.cancel():
            return
        for bias in [bias for bias, other in self._lists.items() if other is made]:
            del self._lists[bias]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

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
        if (found := self._lists.get(bias)) is None:
            assert self._spell is not None, "hot words came to a model without a vocabulary"
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="asr-serve-hotwords")
            found = self._lists[bias] = self._thread.submit(self._spell, bias)
        self._lists.move_to_end(bias)
        while len(self._lists) > KEPT:
            self._lists.popitem(last=False)
        return found
