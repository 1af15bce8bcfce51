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
from asr_serve.server import documents, health, models, openai_live, sockets, speech, streaming, transcribe
from asr_serve.server.console import pages
from asr_serve.server.engines import Engines
from asr_serve.server.jobs import Jobs
from asr_serve.server.layers import replies
from asr_serve.server.layers.gate import OPEN, Gate, Guard
from asr_serve.server.layers.visits import Visits
from asr_serve.server.telemetry.tracing import Tracer
from asr_serve.server.voices import routes as voices

UNMATCHED = "unmatched"
"""The route of requests that match none."""


def create_app(
    config: ServeConfig, engines: Engines, metrics: ServerMetrics, gate: Gate, tracer: Tracer | None = None
) -> FastAPI:
    """`gate` is the caller's to drain. Whoever gave `engines` and `tracer` closes them, after the last request."""
    jobs = Jobs(config.max_concurrent)
    desk = sockets.Desk(config, engines, gate, jobs, metrics)
    streams = streaming.sessions(desk)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with gate.warned(streams.drain), gate.warned(cloning.clonings.drain):
            yield
        await cloning.clonings.close()
        await streams.close()
        jobs.close()

    cloning = voices.Desk.of(config, engines)
    speaking = speech.Desk.of(config, engines, gate, jobs)
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
        exception_handlers={HTTPException: replies.not_found, RequestValidationError: replies.invalid},
    )
    of_health = health.routes(engines, gate, metrics, with_metrics=config.metrics)
    if hears:
        routers = [
            transcribe.routes(transcribe.Desk.of(config, engines, jobs)),
            speech.routes(speaking),
            voices.routes(cloning),
            models.routes(engines, admins=bool(config.admin_keys)),
            of_health,
            streaming.commands(streams),
        ]
        live = [
            *sockets.routes(desk),
            openai_live.route(desk),
            speech.route(speaking),
            *streaming.routes(streams, config.max_frame_bytes),
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
        app.router.routes += health.deaf_elsewhere()
    app.openapi = documents.openapi(app, OPEN, keys=gate.keys.needed)  # type: ignore[method-assign]

    # From the inside out.
    app.add_middleware(Guard, gate=gate, origins=config.cors_origins)
    app.add_middleware(replies.Replies)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client for JavaScript sends many of its own
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", *speech.HEADERS],
        )
    app.add_middleware(Visits, metrics=metrics, tracer=tracer or Tracer(), template=_template(own))
    return app


def _template(routes: Sequence[BaseRoute]) -> Callable[[Scope], str]:
    """Scope -> the path of the route it matches, as it was declared."""
    known = {
        kind: [(route.path_regex, route.path) for route in routes if isinstance(route, of)]
        for kind, of in (("http", Route), ("websocket", WebSocketRoute))
    }

    def template(scope: Scope) -> str:
        return next((path for pattern, path in known[scope["type"]] if pattern.match(scope["path"])), UNMATCHED)

    return template
