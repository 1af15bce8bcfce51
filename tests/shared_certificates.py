"""One TLS context for all HTTP clients of the tests, who read the authorities' certificates anew each time."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx


@cache
def _context() -> Any:
    return httpx.create_ssl_context()


def share_certificates() -> None:
    """Make clients of httpx that bring no certificates of their own share a context.

    Each takes 20 ms of a core to read a file of them, and `httpx.get` makes a client each time: one that asks every
    50 ms whether a server is there takes half a core from it.
    """
    for transport in (httpx.HTTPTransport, httpx.AsyncHTTPTransport):
        _share(transport)


def _share(transport: Any) -> None:
    original = transport.__init__

    def init(self: Any, verify: Any = True, cert: Any = None, trust_env: bool = True, **options: Any) -> None:
        if verify is True and cert is None and trust_env:
            verify = _context()
        original(self, verify=verify, cert=cert, trust_env=trust_env, **options)

    transport.__init__ = init
