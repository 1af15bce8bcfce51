"""Work of requests on threads, which must have ended before what it uses is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def finished(work: asyncio.Future[T]) -> T:
    """Result of work on a thread, which is waited for also by a task that is cancelled. Raises what the work does."""
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        await asyncio.wait({work})
        work.exception()  # retrieved: no warning
        raise
    return work.result()


async def finished_on_thread(work: Callable[[], T]) -> T:
    """Result of work that is done on a thread, in the context of the request. Waits and raises as `finished`."""
    return await finished(asyncio.ensure_future(asyncio.to_thread(work)))
