"""Results that are read once, with `for` or `async for`, and the threads that read for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Self, TypeVar

T = TypeVar("T")


class Closeable(ABC):
    """Object whose `close` ends it, as does the end of a `with` or `async with` block around it."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. Idempotent."""

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        self.close()


def event_loop_waker(ready: asyncio.Event) -> Callable[[], None]:
    """Function that sets `ready` from any thread, on the running event loop."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: no reader waits
            loop.call_soon_threadsafe(ready.set)

    return wake


async def read_in_threads(generator: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yields what a generator that may block yields, each step in a thread; closes it."""
    step: asyncio.Future[T | None] | None = None
    try:
        while True:
            # No task: the end of the event loop would cancel it while its thread is in the generator.
            step = asyncio.get_running_loop().run_in_executor(None, next, generator, None)
            item = await asyncio.shield(step)
            if item is None:
                return
            yield item
    finally:
        # A generator cannot be closed while a thread is inside it; that one step ends by itself.
        if step is not None and not step.done():
            step.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # avoids a warning
            step.add_done_callback(lambda _: generator.close())
        else:
            generator.close()
