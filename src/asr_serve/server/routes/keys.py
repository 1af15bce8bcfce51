"""/v1/key and /v1/keys: limits of API keys and how much of them is used. No key is ever sent."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from asr_serve.config import ServeConfig
from asr_serve.errors import StoreUnavailable
from asr_serve.protocols.key_status import BatchQuotas, KeyList, KeyStatus, Quota
from asr_serve.protocols.schemas.responses import ref
from asr_serve.server.middleware.admission import ANONYMOUS, AdmissionController
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import ApiClient, batch_owner, expect_admin, request_context
from asr_serve.server.openapi import AUTH_ERRORS, error_response_entry, response_entry

_EXAMPLE = {
    "object": "key",
    "name": "key-1",
    "admin": False,
    "concurrent": {"used": 1, "limit": 4},
    "requests_per_minute": {"used": 3, "limit": 60},
    "batches": {
        "bytes": {"used": 576_226, "limit": 17_179_869_184},
        "files": {"used": 2, "limit": 200_000},
        "open_batches": {"used": 1, "limit": 100},
    },
}


def routes(
    config: ServeConfig,
    gate: AdmissionController,
    batch_quotas: Callable[[Sequence[str]], Awaitable[Sequence[BatchQuotas] | None]],
) -> APIRouter:
    """Router of /v1/key and /v1/keys. `batch_quotas`: BatchQueue.quotas."""
    router = APIRouter(prefix="/v1", tags=["Server"])

    async def statuses(clients: Sequence[ApiClient]) -> list[KeyStatus]:
        per_minute = config.requests_per_minute_per_key
        stored: Sequence[BatchQuotas | None] | None = None
        with contextlib.suppress(StoreUnavailable):  # then the rest is told
            stored = await batch_quotas([batch_owner(client) for client in clients])
        return [
            KeyStatus(
                name=client.name,
                admin=client.admin,
                concurrent=Quota(gate.in_use(client), config.concurrent_per_key),
                requests_per_minute=None if per_minute is None else Quota(gate.recent_requests(client), per_minute),
                batches=quotas,
            )
            for client, quotas in zip(clients, stored or [None] * len(clients), strict=True)
        ]

    @router.get(
        "/key", summary="Look at this key", **response_entry(ref("KeyStatus"), "Its state.", AUTH_ERRORS, _EXAMPLE)
    )
    async def key(request: Request) -> Response:
        """Returns what the key of this request may do, its limits, and how much of them is used."""
        (found,) = await statuses([request_context(request.scope).client or ANONYMOUS])
        return _json(found)

    @router.get(
        "/keys",
        summary="List keys",
        **response_entry(
            ref("KeyList"),
            "All keys, by their names.",
            {**AUTH_ERRORS, **error_response_entry(403, "For administrators.")},
            {"data": [_EXAMPLE], "object": "list"},
        ),
    )
    async def keys(request: Request) -> Response:
        """Lists all keys of the configuration by their names, with their limits and use. For administrators."""
        expect_admin(request, "see all keys", admins=bool(config.admin_keys))
        return _json(KeyList(await statuses(gate.keys.clients)))

    return router


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
