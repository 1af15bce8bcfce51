"""Health, readiness and metrics: for load balancers and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from asr_serve import __version__
from asr_serve.errors import AsrServeError, NoSuchRoute
from asr_serve.metrics import CONTENT_TYPE, ServerMetrics, render_exposition
from asr_serve.server import openapi
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import DRAIN_RETRY_MS, AdmissionClass, AdmissionController, admitted_as
from asr_serve.server.middleware.error_handlers import JSON, RESTART_MS
from asr_serve.server.openapi import AUTH_ERRORS

_TEXT = {"type": "string"}


def routes(
    engines: EngineRegistry,
    gate: AdmissionController,
    metrics: ServerMetrics,
    *,
    with_metrics: bool,
    store_state: Callable[[], str | None],
) -> APIRouter:
    """`store_state`: state of the store of live sessions, if there is one."""
    router = APIRouter(tags=["Server"])
    started_s = time.monotonic()

    def sessions() -> dict[str, str]:
        state = store_state()
        return {} if state is None else {"session_store": state}

    @router.get("/health", summary="Is the process alive?", **openapi.response_entry(_status("uptime_s"), "It is.", {}))
    @admitted_as(AdmissionClass.PUBLIC)
    async def health() -> Response:
        """Returns 200 while the process can answer at all: restart it when it does not."""
        uptime_s = round(time.monotonic() - started_s, 1)
        return _health_response(200, {"status": "ok", "version": __version__, "uptime_s": uptime_s} | sessions())

    @router.get(
        "/ready",
        summary="Can it take work?",
        **openapi.response_entry(
            _status("models"),
            "It can.",
            {503: {"description": "Not now.", "content": {JSON: {"schema": _status("models", "reason")}}}},
        ),
    )
    @admitted_as(AdmissionClass.PUBLIC)
    async def ready() -> Response:
        """Returns 200 when the default model is ready, the voice is loaded or known to be missing, and the server
        is not draining; otherwise 503: send no work then."""
        report: dict[str, Any] = {"models": engines.describe()} | sessions()
        if gate.draining:
            report |= {"status": "draining", "reason": "the server is going down"}
            return _health_response(503, report, DRAIN_RETRY_MS)
        try:
            engine = engines.get_any()
        except AsrServeError as error:
            return _health_response(503, report | {"status": "not ready", "reason": str(error)}, RESTART_MS)
        if engine.state != "ready":
            reason = f"the engine of {engine.name} is {engine.state}"
            return _health_response(503, report | {"status": "not ready", "reason": reason}, RESTART_MS)
        if engines.pipeline_spec is not None and engines.pipeline_state != "ready":
            reason = f"the pipeline {engines.pipeline_spec.name} is {engines.pipeline_state}"
            return _health_response(503, report | {"status": "not ready", "reason": reason}, RESTART_MS)
        if engines.tts_expected:
            reason = "the voice is loading"
            return _health_response(503, report | {"status": "not ready", "reason": reason}, RESTART_MS)
        return _health_response(200, report | {"status": "ready"})

    if with_metrics:

        @router.get(
            "/metrics",
            summary="Metrics for Prometheus",
            **openapi.response_entry(_TEXT, "Prometheus text.", AUTH_ERRORS, media_type="text/plain"),
        )
        async def metrics_text() -> Response:
            """Metrics of the server and its engines; docs/metrics.md explains each. Where API keys are configured,
            Prometheus needs one of them (`authorization: credentials`)."""
            return Response(render_exposition(metrics, await engines.observe(metrics)), media_type=CONTENT_TYPE)

    return router


def encoder_only_routes() -> list[BaseRoute]:
    """Routes of an engine that encodes for others: all other paths are refused, naming what to call instead."""

    def refuse(path: str) -> NoReturn:
        raise NoSuchRoute(
            f"{path[:100]}: this engine encodes for other engines (role=encode), and takes no requests of clients",
            "it answers at /health, /ready and /metrics",
            "ask a server that has it as a --peer",
        )

    async def http(request: Request) -> Response:
        refuse(request.url.path)

    @admitted_as(AdmissionClass.KEY)
    async def socket(socket: WebSocket) -> None:
        refuse(socket.url.path)

    methods = ["DELETE", "GET", "PATCH", "POST", "PUT"]
    return [Route("/{path:path}", http, methods=methods), WebSocketRoute("/{path:path}", socket)]


def _health_response(status: int, found: dict[str, Any], retry_ms: int = 0) -> Response:
    headers = {"Cache-Control": "no-store"}
    if retry_ms:
        headers["Retry-After"] = str(-(-retry_ms // 1_000))
    return Response(msgspec.json.encode(found), status, headers, JSON)


def _status(*more: str) -> dict[str, Any]:
    kinds: dict[str, Any] = {
        "status": _TEXT,
        "version": _TEXT,
        "uptime_s": {"type": "number"},
        "models": {"type": "object", "additionalProperties": _TEXT, "description": "Name -> state, where loaded."},
        "reason": _TEXT,
        "session_store": {"enum": ["connected", "away"], "description": "Redis, where live sessions are stored in it."},
    }
    names = ["status", *(["version"] if "uptime_s" in more else []), *more]
    return {
        "type": "object",
        "properties": {name: kinds[name] for name in (*names, "session_store")},
        "required": names,
    }
