"""Origin headers that cannot be read, refused before anything looks for a host in them."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from asr_serve.errors import NotAllowed

SHOWN_CHARACTERS = 100


class ReadableOrigin:
    """ASGI middleware that refuses a POST or a WebSocket whose `Origin` is no URL, such as `http://[`.

    `Guard`, further in, compares the host of an origin with ours. An origin without a host to compare is nobody's
    that we know, so it gets the refusal of a foreign one. Other methods are let through, as `Guard` does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] == "POST"):
            expect_readable(Headers(scope=scope).get("origin"))
        await self.app(scope, receive, send)


def expect_readable(origin: str | None) -> None:
    """Raise NotAllowed for an origin that is no URL; None, for a client that is no page, is well."""
    if origin is None:
        return
    try:
        urlsplit(origin)
    except ValueError as error:
        raise NotAllowed(
            f"the Origin header {origin[:SHOWN_CHARACTERS]!r} is no URL: {error}",
            "an origin like https://example.org, or no such header",
            "send the origin that the page has",
        ) from error
