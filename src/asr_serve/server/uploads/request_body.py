"""Bodies of short requests, read whole: an SDP, a command, a request in JSON."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from asr_serve.errors import ClientGone, MalformedRequest, RequestTimeout


async def read_body(request: Request, about: str, *, max_bytes: int, timeout_s: float) -> bytes:
    """Reads a body. `about`: what it is, as in `an SDP`. Raises MalformedRequest, RequestTimeout, ClientGone."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise MalformedRequest(f"a body of over {max_bytes} bytes came", f"{about} of up to {max_bytes}")
    except TimeoutError:
        raise RequestTimeout(
            f"the body did not come within {timeout_s:g} s", f"{about}, which is short", "send all of it at once"
        ) from None
    except ClientDisconnect:
        raise ClientGone(f"the client left while it sent {about}") from None
    return bytes(body)
