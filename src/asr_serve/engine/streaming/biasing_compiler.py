"""Compiler of the hotwords of streams. It runs on a thread beside the loop, because a long list takes a second, and
caches lists for other streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.engine.cache.biasing_list_cache import BiasingListCache
from asr_serve.engine.executor import LoopContext
from asr_serve.engine.streaming.request import StreamRequest
from asr_serve.errors import StepFailed


class StreamBiasingCompiler:
    """Compiler of hotwords; a stream gets no slot until its list is ready. Belongs to the loop's thread."""

    def __init__(
        self, compile_list: Callable[[str], StreamingBiasingList] | None, fail: Callable[[int, Exception], None]
    ) -> None:
        """`compile_list`: None for a model without a vocabulary. `fail`: called with a stream whose hotwords cannot be
        compiled, and the error."""
        self._compile_list, self._fail = compile_list, fail
        self._lists: BiasingListCache[StreamingBiasingList] = BiasingListCache()
        self._waiting_by_stream: dict[int, tuple[StreamRequest, Future[StreamingBiasingList]]] = {}

    def attach(self, context: LoopContext) -> None:
        self._context = context

    @property
    def waiting_streams(self) -> set[int]:
        """Streams whose hotwords are not compiled yet."""
        return set(self._waiting_by_stream)

    def compile(self, number: int, stream: StreamRequest) -> None:
        """Compiles the stream's hotwords and sets `stream.biasing`; at once where the list is cached."""
        if not stream.bias:
            return
        compiled = self._build(stream.bias)
        self._waiting_by_stream[number] = stream, compiled
        if compiled.done():
            self._deliver(number, stream, compiled)
        else:
            compiled.add_done_callback(lambda _: self._context.call(lambda: self._deliver(number, stream, compiled)))

    def cancel(self, number: int) -> None:
        """Cancels the compilation of the stream's list, if it has not begun and no other stream waits for it."""
        _, compiled = self._waiting_by_stream.pop(number, (None, None))
        if compiled is not None and all(compiled is not other for _, other in self._waiting_by_stream.values()):
            self._lists.cancel(compiled)

    def close(self) -> None:
        self._lists.close()

    def _deliver(self, number: int, stream: StreamRequest, compiled: Future[StreamingBiasingList]) -> None:
        if self._waiting_by_stream.get(number, (None,))[0] is not stream:
            return  # the stream was closed
        del self._waiting_by_stream[number]
        failure = None if compiled.cancelled() else compiled.exception()
        if not compiled.cancelled() and failure is None:
            stream.biasing = compiled.result()
            return
        reason = f"{type(failure).__name__}: {failure}" if failure else "the engine ended"
        error = StepFailed(
            f"compiling hotwords failed: {reason}", todo="leave them out; if it happens again, report it"
        )
        error.__cause__ = failure
        self._fail(number, error)

    def _build(self, bias: str) -> Future[StreamingBiasingList]:
        compile_list = self._compile_list
        assert compile_list is not None, "hotwords came to a model without a vocabulary"
        return self._lists.get_or_build(bias, lambda: compile_list(bias))
