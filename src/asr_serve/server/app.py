"""The ASGI application: wires every route and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Scope

from asr_serve import __version__
from asr_serve.config import ServeConfig
from asr_serve.evaluation.reader import EvaluationReader
from asr_serve.metrics import ServerMetrics
from asr_serve.server import openapi
from asr_serve.server.batch import routes as batch_routes
from asr_serve.server.batch.batch_queue import BatchQueue
from asr_serve.server.batch.line_runner import LineRunner
from asr_serve.server.console import pages
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware import error_handlers
from asr_serve.server.middleware.admission import (
    AdmissionClass,
    AdmissionController,
    AdmissionMiddleware,
    AdmissionTable,
    admitted_as,
)
from asr_serve.server.middleware.request_context import IGNORED_HEADER, LANGUAGE_HEADER, RequestContextMiddleware
from asr_serve.server.realtime.deepgram import endpoint as deepgram_endpoint
from asr_serve.server.realtime.endpoint import LiveDependencies
from asr_serve.server.realtime.funasr import endpoint as funasr_endpoint
from asr_serve.server.realtime.funasr.session_defaults import FunAsrSessionDefaults
from asr_serve.server.realtime.openai import endpoint as openai_endpoint
from asr_serve.server.realtime.riva.packages import load_riva
from asr_serve.server.realtime.stream import endpoint as stream_endpoint
from asr_serve.server.realtime.webrtc import endpoint as webrtc_endpoint
from asr_serve.server.realtime.webrtc.call_manager import CallManager
from asr_serve.server.realtime.wyoming import endpoint as wyoming_endpoint
from asr_serve.server.realtime.wyoming.tcp_server import WyomingServer
from asr_serve.server.routes import asr, deepgram, evaluations, health, keys, models, policy, speech, transcriptions
from asr_serve.server.shadow_transcriber import ShadowTranscriber
from asr_serve.server.telemetry.tracing import Tracer
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.server.voices import routes as voices

UNMATCHED_ROUTE = "unmatched"
"""Route label of requests that match no route."""


def create_app(
    config: ServeConfig,
    engines: EngineRegistry,
    metrics: ServerMetrics,
    gate: AdmissionController,
    tracer: Tracer | None = None,
    funasr_defaults: FunAsrSessionDefaults | None = None,
) -> FastAPI:
    """Builds the application. The caller drains `gate`, and closes `engines` and `tracer` at the end.
    `funasr_defaults`: None: those of `config`. Raises OptionError where these cannot be read, ProgramMissing for
    `riva_port` without the extra `riva`."""
    executor = TranscriptionExecutor(config.max_concurrent)
    shadows = ShadowTranscriber(engines, executor, metrics)
    if engines.governor is not None:
        engines.governor.set_metrics(metrics.governance)
    dependencies = LiveDependencies(config, engines, gate, executor, metrics)
    streams = stream_endpoint.create_session_manager(dependencies)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await streams.start()
        for server in own_ports:
            await server.start()
        if full_server:
            await batches.start()
        with (
            gate.on_drain(streams.drain),
            gate.on_drain(voice_dependencies.clonings.drain),
            gate.on_drain(batches.drain),
        ):
            yield
        for server in own_ports:
            await server.close()
        await batches.close()
        line_executor.close()
        await voice_dependencies.clonings.close()
        await streams.close()
        await calls.close()
        await shadows.close()
        evaluation_reader.close()
        executor.close()

    voice_dependencies = voices.VoiceDependencies.create(config, engines)
    speech_dependencies = speech.SpeechDependencies.create(config, engines, gate, executor)
    line_executor = TranscriptionExecutor(config.batch.concurrent_lines)
    batches = BatchQueue(config.batch, LineRunner(config, engines, line_executor, speech_dependencies), metrics.batch)
    calls = CallManager(
        dependencies,
        speech.SpeechEndpoint(speech_dependencies).call_conversation,
        lambda: any(engine.is_tts for engine in engines),
    )
    evaluation_reader = EvaluationReader(config.evaluations)
    full_server = config.engine.role != "encode"
    docs = config.docs and full_server
    app = FastAPI(
        title="asr-serve",
        version=__version__,
        docs_url=None,  # FastAPI's page loads its scripts from the internet: `pages` has one of ours
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
    port = config.wyoming_port if full_server else None
    wyoming = None if port is None else WyomingServer(app, config.host, port)
    riva_packages = None if config.riva_port is None or not full_server else load_riva()
    riva = None if riva_packages is None else riva_packages.grpc_server.RivaServer(app, config)
    own_ports = [server for server in (wyoming, riva) if server is not None]
    app.state.wyoming, app.state.riva = wyoming, riva
    for route in app.routes:  # FastAPI's own: the document
        if isinstance(route, Route):
            admitted_as(AdmissionClass.PUBLIC)(route.endpoint)
    health_routes = health.routes(
        engines, gate, metrics, with_metrics=config.metrics, store_state=lambda: streams.store_state
    )
    uploads = transcriptions.TranscriptionDependencies.create(config, engines, executor, shadows)
    if full_server:
        routers = [
            transcriptions.routes(uploads),
            asr.routes(uploads),
            speech.routes(speech_dependencies),
            deepgram.listen_routes(uploads),
            deepgram.speak_routes(speech_dependencies),
            voices.routes(voice_dependencies),
            batch_routes.routes(batch_routes.BatchDependencies.create(config, batches)),
            models.routes(engines, admins=bool(config.admin_keys)),
            keys.routes(config, gate, batches.quotas),
            evaluations.routes(evaluation_reader, admins=bool(config.admin_keys)),
            *([] if engines.governor is None else [policy.routes(engines.governor, admins=bool(config.admin_keys))]),
            health_routes,
            stream_endpoint.commands(streams),
        ]
        live = [
            *funasr_endpoint.routes(dependencies, funasr_defaults or FunAsrSessionDefaults(config)),
            openai_endpoint.route(dependencies),
            speech.route(speech_dependencies),
            deepgram_endpoint.route(dependencies),
            deepgram.speak_route(speech_dependencies),
            *stream_endpoint.routes(streams, config.max_frame_bytes),
            *webrtc_endpoint.routes(dependencies, calls, streams),
        ]
        if wyoming is not None:
            begin = partial(speech.begin_speech, speech_dependencies)
            live.append(wyoming_endpoint.route(dependencies, speech_dependencies.voices, begin))
        if riva_packages is not None:
            live += riva_packages.endpoints.routes(dependencies, uploads, speech_dependencies)
    else:
        routers, live = [health_routes], []
    console = pages.routes(console=config.console and full_server, docs=docs)
    all_routes = [*app.routes, *(route for router in routers for route in router.routes), *live, *console]
    app.state.routes, app.state.calls = all_routes, calls
    for router in routers:
        app.include_router(router)
    app.router.routes += [*live, *console]
    refused = [] if full_server else health.encoder_only_routes()
    app.router.routes += refused
    table = AdmissionTable([*all_routes, *refused])
    app.openapi = openapi.openapi_builder(  # type: ignore[method-assign]
        app, table.public_paths, keys=gate.keys.required, strict_fields=config.strict_fields
    )

    # The innermost first.
    app.add_middleware(AdmissionMiddleware, gate=gate, table=table, origins=config.cors_origins)
    app.add_middleware(error_handlers.ErrorMiddleware)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends many of its own
            expose_headers=[
                "x-request-id",
                "retry-after",
                "retry-after-ms",
                IGNORED_HEADER,
                "x-model",
                LANGUAGE_HEADER,
                *(name for name in speech.SPEECH_HEADERS if name != "x-model"),
                *webrtc_endpoint.CALL_HEADERS,
            ],
        )
    app.add_middleware(
        RequestContextMiddleware,
        metrics=metrics,
        tracer=tracer or Tracer(),
        template=_route_template(all_routes),
        strict_fields=config.strict_fields,
    )
    return app


def _route_template(routes: Sequence[BaseRoute]) -> Callable[[Scope], str]:
    """Returns a function from a scope to the declared path of the route that it matches."""
    patterns = {
        kind: [(route.path_regex, route.path) for route in routes if isinstance(route, route_class)]
        for kind, route_class in (("http", Route), ("websocket", WebSocketRoute))
    }

    def template(scope: Scope) -> str:
        return next(
            (path for pattern, path in patterns[scope["type"]] if pattern.match(scope["path"])), UNMATCHED_ROUTE
        )

    return template
