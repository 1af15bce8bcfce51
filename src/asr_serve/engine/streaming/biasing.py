"""Hot words of streams are made into what a search reads on a thread beside the loop, for a long list takes a
second, and kept for those that come with the same list."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.engine.cache.biasing_lists import BiasingListCache
from asr_serve.engine.executor import LoopContext
from asr_serve.engine.streaming.request import StreamRequest
from asr_serve.errors import StepFailed


class StreamBiasingCompiler:
    """Streams have no slot until their hot words are ready. On the loop's thread."""

    def __init__(
        self, spell: Callable[[str], StreamingBiasingList] | None, drop: Callable[[int, Exception], None]
    ) -> None:
        """`drop`: a stream whose hot words cannot be made ready."""
        self._compile_list, self._drop = spell, drop
        self._lists: BiasingListCache[StreamingBiasingList] = BiasingListCache()
        self._waiting_by_list: dict[int, tuple[StreamRequest, Future[StreamingBiasingList]]] = {}

    def attach(self, keeper: LoopContext) -> None:
        self._keeper = keeper

    @property
    def waiting_streams(self) -> set[int]:
        """Streams whose hot words are not ready."""
        return set(self._waiting_by_list)

    def compile(self, number: int, stream: StreamRequest) -> None:
        """It gets what its hot words are to the search: at once where that list is known."""
        if not stream.bias:
            return
        made = self._build(stream.bias)
        self._waiting_by_list[number] = stream, made
        if made.done():
            self._deliver(number, stream, made)
        else:
            made.add_done_callback(lambda _: self._keeper.call(lambda: self._deliver(number, stream, made)))

    def cancel(self, number: int) -> None:
        """A list that nobody waits for any more, and that was not begun, is not made."""
        _, made = self._waiting_by_list.pop(number, (None, None))
        if made is not None and all(made is not other for _, other in self._waiting_by_list.values()):
            self._lists.cancel(made)

    def close(self) -> None:
        self._lists.close()

    def _deliver(self, number: int, stream: StreamRequest, made: Future[StreamingBiasingList]) -> None:
        if self._waiting_by_list.get(number, (None,))[0] is not stream:
            return  # it has left
        del self._waiting_by_list[number]
        failure = None if made.cancelled() else made.exception()
        if not made.cancelled() and failure is None:
            stream.biasing = made.result()
            return
        told = f"{type(failure).__name__}: {failure}" if failure else "the engine ended"
        error = StepFailed(f"spelling hot words failed: {told}", todo="leave them out; if it stays, report it")
        error.__cause__ = failure
        self._drop(number, error)

    def _build(self, bias: str) -> Future[StreamingBiasingList]:
        spell = self._compile_list
        assert spell is not None, "hot words came to a model without a vocabulary"
        return self._lists.get_or_build(bias, lambda: spell(bias))
