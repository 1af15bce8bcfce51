"""Server process: open the port, load the models, announce them, drain on SIGTERM, exit."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
from granian.constants import Interfaces, SSLProtocols
from granian.server.embed import Server

from asr_serve import __version__
from asr_serve.config import AUTO_MODEL, ServeConfig
from asr_serve.decoding.language_model.sentence_scorer import SentenceScorer
from asr_serve.engine.process.startup_checks import check_startup
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.garbage_collection import exclude_loaded_objects
from asr_serve.governance.policy import read_policy
from asr_serve.metrics import ServerMetrics
from asr_serve.pipelines.stages.language_models import load_scorers
from asr_serve.pipelines.stages.pipeline_file import open_pipeline
from asr_serve.pipelines.stages.stage_files import check_files
from asr_serve.server import silent_connections
from asr_serve.server.app import create_app
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, ServedPipeline, open_engine
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.realtime.funasr.session_defaults import FunAsrSessionDefaults
from asr_serve.server.realtime.riva.packages import load_riva
from asr_serve.server.sessions.redis_store import create_store
from asr_serve.server.telemetry import logs
from asr_serve.server.telemetry.tracing import Tracer

log = logging.getLogger(__name__)

BACKLOG = 1_024
"""Connections that may wait to be accepted."""
SPARE_CONNECTIONS = 8_192
"""Connections beyond the limits: those between two requests, those refused with a retry time, and those that send
nothing or their headers slowly: granian accepts nobody else while all connections are taken. It closes a connection
30 s after the first byte of headers that do not end; `silent_connections` closes those that send nothing at all."""
FILES = 256
"""Open files other than connections."""
FINAL_RESPONSES_S = 0.5
"""Wait after the last request, for its bytes to be sent."""
STOP_S = 3.0
"""Longest wait for cancelled requests to be answered; and for granian, which waits for open connections."""
CLOSE_S = 5.0
"""Longest wait for the engines to close. A loading one cannot be stopped; it ends after this process."""


class ServerSetup(NamedTuple):
    """Checked settings of a server, with what they ask of this machine."""

    config: ServeConfig
    ports: list[int]
    """The server's port, and any for FunASR's realtime clients."""
    connections: int
    """Connections that it accepts."""
    scorers: Mapping[int, SentenceScorer]
    """Language models of the pipeline, by the index of their stage."""


def serve(config: ServeConfig) -> None:
    """Runs until SIGTERM or SIGINT, then exits: code 0, or 1 if it could not start or ended by itself. Raises
    OptionError if the address or the certificate cannot be used, and for unknown models, voices and devices."""
    logs.setup(config.log_format, config.log_level)
    asyncio.run(_serve(prepare(config)))


def check_settings(config: ServeConfig, *, check_models: bool = True) -> None:
    """Checks what settings name: files, models, devices. `check_models`: whether names of models and devices are
    checked, which are of this machine. Raises OptionError as `serve` does."""
    _certificate(config)
    if config.riva_port is not None:
        load_riva()
    if config.sessions.redis_url is not None:
        create_store(config.sessions)
    policy = None if config.governance.policy is None else read_policy(Path(config.governance.policy))
    if check_models and config.pipeline is None:
        check_startup(config, None, (), *(() if policy is None else (tuple(policy.routes), policy.models)))


def prepare(config: ServeConfig, *, check_models: bool = True, in_cluster: bool = False) -> ServerSetup:
    """Checks settings, and chooses ports. `check_models` as in `check_settings`. `in_cluster`: whether the settings
    stand in a cluster file, which errors then name in place of flags. Raises OptionError as `serve` does."""
    check_settings(config, check_models=check_models)
    scorers: Mapping[int, SentenceScorer] = {}
    if config.pipeline is not None:
        pipeline = open_pipeline(config.pipeline)
        if check_models:
            check_startup(config, pipeline.name, pipeline.devices)
        check_files(pipeline)
        scorers = load_scorers(pipeline)
    config = _with_peer_port(config)
    _tune_malloc()
    connections = _connection_limit(config)
    sources: tuple[str, ...] = ("--port", "--realtime-port", "--wyoming-port", "--riva-port")
    if in_cluster:
        names = ("port", "realtime_port", "wyoming_port", "riva_port")
        sources = tuple(f"serve.{name} in the cluster file" for name in names)
    ports = [free_port(config.host, config.port, sources[0])]
    if config.realtime_port is not None:
        ports.append(free_port(config.host, config.realtime_port, sources[1]))
    if config.wyoming_port is not None:
        free_port(config.host, config.wyoming_port, sources[2])
    if config.riva_port is not None:
        free_port(config.host, config.riva_port, sources[3])
    return ServerSetup(config, ports, connections, scorers)


def _with_peer_port(config: ServeConfig) -> ServeConfig:
    """Chooses the port for peers before the engine starts: a restarted one listens there again. Raises OptionError."""
    if config.engine.role != "encode":
        return config
    if config.more_models:
        raise OptionError(
            f"role=encode with {1 + len(config.more_models)} models",
            "one: who asks names none",
            "start a process for each model",
            param="more_models",
        )
    for name in ("port", "realtime_port"):
        if config.encode_port and getattr(config, name) == config.encode_port:
            raise OptionError(
                f"encode_port={config.encode_port}, which is {name} too", "two ports", param="encode_port"
            )
    port = free_port(config.host, config.encode_port, "--encode-port")
    return msgspec.structs.replace(config, encode_port=port)


def _connection_limit(config: ServeConfig) -> int:
    """Connections to accept, after raising the limit of open files for them: the default of many systems is 1024.

    Fewer where the system allows fewer files: accepting without a file left would fail again and again.
    """
    wanted = config.max_concurrent + config.max_live_sessions + SPARE_CONNECTIONS
    other = FILES + config.max_concurrent  # each request may hold a recording's file
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + other:
        soft = wanted + other if hard == resource.RLIM_INFINITY else min(wanted + other, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted + other:
        return wanted
    accepted = max(config.max_concurrent, soft - other)
    log.warning("up to %d connections instead of %d: the system allows %d open files", accepted, wanted, soft)
    return accepted


def _tune_malloc() -> None:
    """Makes glibc reuse audio buffers, on few heaps. By default it maps, zeroes and unmaps each one, for a tenth
    of a short request's time; and every thread gets a heap that grows."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
        library.mallopt(m_arena_max, 2)
        library.mallopt(m_mmap_threshold, 32 << 20)
        library.mallopt(m_trim_threshold, 64 << 20)


def free_port(host: str, port: int, flag: str = "--port") -> int:
    """Returns the port; for 0 one that the system chooses. Raises OptionError if taken: granian would share it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise OptionError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}",
            "an address of this machine and a free port",
            f"choose another with {flag}, or 0 for any",
        ) from error


def _certificate(config: ServeConfig) -> dict[str, Any]:
    """Arguments of granian for TLS; empty without TLS. Raises OptionError for files that cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return {}
    cert, key = Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser()
    for name, file in (("tls_cert", cert), ("tls_key", key)):
        try:
            file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise OptionError(f"{name}={str(file)!r}: {reason}", "a file in PEM that may be read", param=name) from None
    try:
        # With no password given, OpenSSL would ask for that of an encrypted key at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise OptionError(
            f"tls_cert={config.tls_cert!r} and tls_key={config.tls_key!r} cannot be used: {error}",
            "a certificate and its own key, in PEM, without a password",
            "look at both: openssl x509 -in CERT -text, openssl pkey -in KEY -check",
            param="tls_key",
        ) from None
    return {"ssl_cert": cert, "ssl_key": key, "ssl_protocol_min": SSLProtocols.tls12}


async def _serve(setup: ServerSetup) -> None:
    """Runs until a signal, then exits."""
    stop_requested, code = asyncio.Event(), 1

    def announce(engines: EngineRegistry, took_s: float) -> None:
        config = setup.config
        if config.model == AUTO_MODEL:
            config = msgspec.structs.replace(config, model=engines.get().name)
        _announce(config, setup.ports, took_s, engines.default_tts_model, engines.pipeline)

    with _signals(stop_requested):
        try:
            code = await run_server(setup, stop_requested, announce)
        except AsrServeError as error:
            log.error("the server could not start: %s", error)
        except Exception:
            log.exception("the server could not start")
        finally:
            _exit_now(code)


async def run_server(
    setup: ServerSetup,
    stop_requested: asyncio.Event,
    on_ready: Callable[[EngineRegistry, float], None],
    open_engine: Callable[[str, ServeConfig], EngineParts] = open_engine,
    on_failure: Callable[[AsrServeError], None] = lambda _: None,
) -> int:
    """Runs until `stop_requested` and returns 0, or 1 if it could not start or ended by itself. `on_ready`: called once
    the models are loaded, with the seconds that took. `on_failure`: called with the reason why it could not start."""
    config, ports, connections, scorers = setup
    metrics, gate, engines = (
        ServerMetrics(__version__),
        AdmissionController(config),
        EngineRegistry(config, open_engine, scorers=scorers),
    )
    tracer = Tracer.create(config.otel_endpoint, "asr-serve")
    funasr_defaults = FunAsrSessionDefaults(config)
    app = create_app(config, engines, metrics, gate, tracer, funasr_defaults)
    servers = [
        Server(
            app,
            address=config.host,
            port=port,
            # The lifespan of the app runs once, with the first.
            interface=Interfaces.ASGINL if number else Interfaces.ASGI,
            backlog=BACKLOG,
            backpressure=connections // len(ports),
            log_dictconfig=logs.GRANIAN,
            **_certificate(config),
        )
        for number, port in enumerate(ports)
    ]
    listening = {asyncio.create_task(server.serve()) for server in servers}
    stop = asyncio.create_task(stop_requested.wait())
    loading = asyncio.create_task(engines.start())
    watching = asyncio.create_task(silent_connections.watch(ports, connections // len(ports)))
    code = 1
    try:
        started = time.perf_counter()
        await asyncio.wait({*listening, stop, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not stop.done() and not any(task.done() for task in listening):
            loading.result()
            if not funasr_defaults.empty:
                funasr_defaults.check(engines.get())
            exclude_loaded_objects()
            on_ready(engines, time.perf_counter() - started)
            await asyncio.wait({*listening, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            await _drain(config, gate)
            code = 0
    except AsrServeError as error:
        log.error("the server could not start: %s", error)
        on_failure(error)
    except Exception:
        log.exception("the server ended badly")
    finally:
        for task in (stop, loading, watching):
            task.cancel()
        for server in servers:
            server.stop()  # type: ignore[no-untyped-call]
        await _wait_tasks({loading, *listening}, STOP_S)
        await _wait_tasks({asyncio.create_task(engines.close())}, CLOSE_S)
        tracer.close()
    return code


async def _wait_tasks(tasks: set[asyncio.Task[Any]], wait_s: float) -> None:
    """Waits for tasks. Logs their errors, except AsrServeError, which is reported."""
    done, _ = await asyncio.wait(tasks, timeout=wait_s)
    for task in done:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AsrServeError):
            log.error("the server ended badly", exc_info=error)


def _exit_now(code: int) -> NoReturn:
    """Exits without finalizing Python, which joins threads, whatever they wait for; and a thread of granian that
    meets a Python being finalized aborts the process, at one exit of twenty."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader is gone
            stream.flush()
    os._exit(code)


async def _drain(config: ServeConfig, gate: AdmissionController) -> None:
    """Refuses new requests, and finishes those in progress within `drain_s`."""
    gate.drain()
    log.info("stopping: %d requests are still answered, for up to %g s", gate.in_flight_requests, config.drain_s)
    try:
        async with asyncio.timeout(config.drain_s):
            await gate.wait_idle()
    except TimeoutError:
        log.warning("%d requests were not answered in %g s and are broken off", gate.in_flight_requests, config.drain_s)
        gate.cancel_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await gate.wait_idle()
    await asyncio.sleep(FINAL_RESPONSES_S)


@contextlib.contextmanager
def _signals(stop_requested: asyncio.Event) -> Iterator[None]:
    """Sets `stop_requested` on SIGTERM or SIGINT; exits at once on the second."""

    def handle() -> None:
        if stop_requested.is_set():
            os._exit(1)  # an exception would be logged by whatever runs; the engines notice the exit
        stop_requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _announce(
    config: ServeConfig, ports: list[int], took_s: float, voice: str | None, pipeline: ServedPipeline | None
) -> None:
    """Prints addresses and examples. `voice`: the default synthesis model, `pipeline`: that of files, if any."""
    name = config.model if pipeline is None else pipeline.name
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    host = f"[{host}]" if ":" in host else host
    secure = "s" if config.tls_cert else ""
    url = f"http{secure}://{host}:{ports[0]}"
    key = ' -H "Authorization: Bearer KEY"' if config.api_keys else ""
    took = f"(ready in {took_s:.1f} s; stop with ctrl-C)"
    health = f"  health    {url}/ready" + (f"   metrics   {url}/metrics" if config.metrics else "")
    if config.engine.role == "encode":
        address = f"{host}:{config.encode_port}"
        lines = [
            f"asr-serve {__version__} encodes {config.model} for others at {address} {took}",
            "",
            f"  ask it    asr-serve serve --role decode --model {config.model} --peer {address}",
            health,
        ]
        _print_facts(
            config, lines, {"encode_at": address, "url": url, "model": config.model, "load_s": round(took_s, 2)}
        )
        return
    live = f"ws{secure}://{host}:{ports[-1]}"
    if voice == config.model:  # synthesis only
        page, usage = f"{url}/speak   (have it read what you write)", []
        live += "/v1/audio/speech/stream   (text while it is written)"
    else:
        page = f"{url}/   (talk to it, or drop a recording)"
        usage = [f"  try it    curl {url}/v1/audio/transcriptions{key} -F model={name} -F file=@talk.wav"]
        live += "   (FunASR's; OpenAI's: /v1/realtime; ours: /v1/stream)"
    lines = [
        f"asr-serve {__version__} serves {name} on {url} {took}",
        "",
        *([f"  peers     {', '.join(config.engine.peers)} (asked to encode)"] if config.engine.peers else []),
        *([f"  console   {page}"] if config.console else []),
        *usage,
        *([f"  speak     {_speak(url, key)}   ({voice})"] if voice else []),
        f"  live      {live}" + (f", by {config.model}" if pipeline else ""),
        *([f"  docs      {url}/docs"] if config.docs else []),
        health,
    ]
    facts = {"url": url, "model": config.model, "voice": voice, "load_s": round(took_s, 2)}
    _print_facts(config, lines, {name: fact for name, fact in facts.items() if fact is not None})


def _speak(url: str, key: str) -> str:
    return f"curl {url}/v1/audio/speech{key} -d " + """'{"input":"Hello."}' -o hello.mp3"""


def _print_facts(config: ServeConfig, lines: list[str], facts: dict[str, Any]) -> None:
    if config.log_format == "json":
        log.info("ready", extra=facts)
    else:
        print("\n".join(lines), file=sys.stderr, flush=True)
