"""The application: every route and layer, wired by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Scope

from asr_serve import __version__
from asr_serve.config import ServeConfig
from asr_serve.metrics import ServerMetrics
from asr_serve.server import openapi
from asr_serve.server.console import pages
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware import error_handlers
from asr_serve.server.middleware.admission import PUBLIC_PATHS, AdmissionController, AdmissionMiddleware
from asr_serve.server.middleware.request_context import RequestContextMiddleware
from asr_serve.server.realtime.endpoint import LiveDependencies
from asr_serve.server.realtime.funasr import endpoint as funasr_endpoint
from asr_serve.server.realtime.openai import endpoint as openai_endpoint
from asr_serve.server.realtime.stream import endpoint as stream_endpoint
from asr_serve.server.routes import health, models, speech, transcriptions
from asr_serve.server.telemetry.tracing import Tracer
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.server.voices import routes as voices

UNMATCHED_ROUTE = "unmatched"
"""The route of requests that match none."""


def create_app(
    config: ServeConfig,
    engines: EngineRegistry,
    metrics: ServerMetrics,
    gate: AdmissionController,
    tracer: Tracer | None = None,
) -> FastAPI:
    """`gate` is the caller's to drain. Whoever gave `engines` and `tracer` closes them, after the last request."""
    jobs = TranscriptionExecutor(config.max_concurrent)
    desk = LiveDependencies(config, engines, gate, jobs, metrics)
    streams = stream_endpoint.create_session_manager(desk)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with gate.on_drain(streams.drain), gate.on_drain(cloning.clonings.drain):
            yield
        await cloning.clonings.close()
        await streams.close()
        jobs.close()

    cloning = voices.VoiceDependencies.create(config, engines)
    speaking = speech.SpeechDependencies.create(config, engines, gate, jobs)
    hears = config.engine.role != "encode"
    docs = config.docs and hears
    app = FastAPI(
        title="asr-serve",
        version=__version__,
        docs_url="/docs" if docs else None,
        openapi_url="/openapi.json" if docs else None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: error_handlers.handle_http_exception,
            RequestValidationError: error_handlers.handle_validation_error,
        },
    )
    of_health = health.routes(engines, gate, metrics, with_metrics=config.metrics)
    if hears:
        routers = [
            transcriptions.routes(transcriptions.TranscriptionDependencies.create(config, engines, jobs)),
            speech.routes(speaking),
            voices.routes(cloning),
            models.routes(engines, admins=bool(config.admin_keys)),
            of_health,
            stream_endpoint.commands(streams),
        ]
        live = [
            *funasr_endpoint.routes(desk),
            openai_endpoint.route(desk),
            speech.route(speaking),
            *stream_endpoint.routes(streams, config.max_frame_bytes),
        ]
    else:
        routers, live = [of_health], []
    console = pages.routes() if config.console and hears else []
    own = [*app.routes, *(route for router in routers for route in router.routes), *live, *console]
    app.state.routes = own
    for router in routers:
        app.include_router(router)
    app.router.routes += [*live, *console]
    if not hears:
        app.router.routes += health.encoder_only_routes()
    app.openapi = openapi.openapi_builder(app, PUBLIC_PATHS, keys=gate.keys.required)  # type: ignore[method-assign]

    # From the inside out.
    app.add_middleware(AdmissionMiddleware, gate=gate, origins=config.cors_origins)
    app.add_middleware(error_handlers.ErrorMiddleware)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client for JavaScript sends many of its own
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", *speech.SPEECH_HEADERS],
        )
    app.add_middleware(
        RequestContextMiddleware, metrics=metrics, tracer=tracer or Tracer(), template=_route_template(own)
    )
    return app


def _route_template(routes: Sequence[BaseRoute]) -> Callable[[Scope], str]:
    """Scope -> the path of the route it matches, as it was declared."""
    known = {
        kind: [(route.path_regex, route.path) for route in routes if isinstance(route, of)]
        for kind, of in (("http", Route), ("websocket", WebSocketRoute))
    }

    def template(scope: Scope) -> str:
        return next(
            (path for pattern, path in known[scope["type"]] if pattern.match(scope["path"])), UNMATCHED_ROUTE
        )

    return template
