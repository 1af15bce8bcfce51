"""/v1/policy: the routes of the policy, promotion and rollback. For administrators."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from asr_serve.errors import MalformedRequest
from asr_serve.governance.governor import ModelGovernor, RouteStatus
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import expect_admin
from asr_serve.server.uploads.request_body import read_body

MAX_BODY_BYTES = 16 << 10
BODY_TIMEOUT_S = 10.0

ShortText = Annotated[str, Meta(max_length=500)]


class StageChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a promotion or a rollback."""

    reason: ShortText = ""
    operator: ShortText = ""
    """Author of the change, for the audit log; not authenticated, as the key is."""
    to: ShortText | None = None
    """Stage that a promotion must lead to; None: whichever is next."""


class PolicyStatus(msgspec.Struct, frozen=True):
    """State of all routes."""

    policy_sha256: str
    audit_head: str
    """Digest of the last line of the audit log: keep it elsewhere, and lines that are cut off are missed."""
    only_routes: bool
    routes: list[RouteStatus]


def routes(governor: ModelGovernor, *, admins: bool) -> APIRouter:
    """Router of /v1/policy. `admins`: whether any admin keys are configured."""
    router = APIRouter(prefix="/v1/policy", tags=["Models"], include_in_schema=False)

    @router.get("")
    async def status(request: Request) -> Response:
        expect_admin(request, "see the policy", admins=admins)
        found = await asyncio.to_thread(lambda: [governor.status(name) for name in governor.policy.routes])
        policy = governor.policy
        return _response(PolicyStatus(policy.sha256, governor.head, policy.only_routes, found))

    @router.post("/{route}/promote")
    async def promote(request: Request, route: str) -> Response:
        """Brings the candidate of a route to its next stage."""
        by = expect_admin(request, "promote models", admins=admins)
        change = await _read_change(request)
        # Shielded: what has begun is done and logged, whether or not the client waits.
        promoting = asyncio.to_thread(
            governor.promote, route, by=by, operator=change.operator, reason=change.reason, to=change.to
        )
        return _response(await asyncio.shield(promoting))

    @router.post("/{route}/rollback")
    async def roll_back(request: Request, route: str) -> Response:
        """Takes the candidate of a route back."""
        by = expect_admin(request, "roll models back", admins=admins)
        change = await _read_change(request)
        rolling = asyncio.to_thread(governor.roll_back, route, by=by, operator=change.operator, reason=change.reason)
        return _response(await asyncio.shield(rolling))

    return router


async def _read_change(request: Request) -> StageChange:
    """Raises MalformedRequest for a body that is none."""
    body = await read_body(request, "a change", max_bytes=MAX_BODY_BYTES, timeout_s=BODY_TIMEOUT_S)
    if not body.strip():
        return StageChange()
    try:
        return msgspec.json.decode(body, type=StageChange)
    except msgspec.MsgspecError as failure:
        raise MalformedRequest(
            f"the body is no change of a stage: {failure}", 'JSON like {"reason": "figures hold"}, or none'
        ) from None


def _response(found: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(found), media_type=JSON)
