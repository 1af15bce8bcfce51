"""Server-sent events: comments that keep a quiet connection open, errors after the status was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.types import Scope

from asr_serve.errors import ClientGone
from asr_serve.protocols.openai.events import server_sent_event
from asr_serve.server.middleware.error_handlers import live_error_event, record_error
from asr_serve.server.middleware.request_context import request_context

KEEP_ALIVE_S = 15.0
"""Longest time without a byte: proxies close quiet connections."""
KEEP_ALIVE = b": still listening\n\n"


async def with_keep_alive(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yields `pieces`, and a comment whenever none came for KEEP_ALIVE_S."""
    async with contextlib.aclosing(pieces):
        while True:
            pending = asyncio.ensure_future(anext(pieces, None))
            try:
                while not (await asyncio.wait({pending}, timeout=KEEP_ALIVE_S))[0]:
                    yield KEEP_ALIVE
            finally:
                pending.cancel()
                await asyncio.wait({pending})
            if (piece := pending.result()) is None:
                return
            yield piece


async def with_error_event(
    events: AsyncGenerator[bytes, None], scope: Scope, live: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yields `events`, then one error event for an exception: the response's status has been sent by then. Closes
    `events` when it ends. `live`: in the format of the live protocol at that path, instead of OpenAI's."""
    async with contextlib.aclosing(events):
        try:
            async for piece in events:
                yield piece
        except ClientGone:
            raise
        except Exception as error:
            problem = record_error(error, scope)
            event = live_error_event(error, request_context(scope).request_id, scope["path"]).encode()
            yield b"event: error\n" + (
                b"data: %s\n\n" % event if live else server_sent_event({"type": "error", "error": problem})
            )
