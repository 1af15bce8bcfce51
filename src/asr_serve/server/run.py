"""The server's life: open the port, load the models, say so, drain on SIGTERM, end."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from granian.constants import Interfaces, SSLProtocols
from granian.server.embed import Server

from asr_serve import __version__
from asr_serve.config import ServeConfig
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.metrics import ServerMetrics
from asr_serve.server.app import create_app
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.telemetry import logs
from asr_serve.server.telemetry.tracing import Tracer

log = logging.getLogger(__name__)

BACKLOG = 1_024
"""Connections that may wait to be accepted."""
SPARE_CONNECTIONS = 1_024
"""Over the limits: those that wait between two requests, and those that will be told to come again."""
FILES = 256
"""Open files that are no connections."""
FINAL_RESPONSES_S = 0.5
"""After the last request: for its bytes to leave."""
STOP_S = 3.0
"""For requests that are broken off to be told so; and for granian, which waits for every open connection."""
CLOSE_S = 5.0
"""For the engines to close. One that loads cannot be stopped; it ends by itself when we have."""


def serve(config: ServeConfig) -> int:
    """Run until told to stop. The exit code: 0, or 1 when it could not start or ended by itself.

    Raises OptionError when the address cannot be had, or the certificate not be used.
    """
    logs.setup(config.log_format, config.log_level)
    _certificate(config)
    config = _with_peer_port(config)
    _tune_malloc()
    _raise_file_limit(config)
    ports = [_free_port(config.host, config.port)]
    if config.realtime_port is not None:
        ports.append(_free_port(config.host, config.realtime_port, "--realtime-port"))
    return asyncio.run(_serve(config, ports))


def _with_peer_port(config: ServeConfig) -> ServeConfig:
    """The port for peers too is chosen before anything else: an engine that starts anew listens there again.
    Raises OptionError."""
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
    port = _free_port(config.host, config.encode_port, "--encode-port")
    return msgspec.structs.replace(config, encode_port=port)


def _raise_file_limit(config: ServeConfig) -> None:
    """Have room for every connection: many systems allow 1024 open files unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES + 2 * _connections(config)  # a recording may be on disk
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _connections(config: ServeConfig) -> int:
    return config.max_concurrent + config.max_live_sessions + SPARE_CONNECTIONS


def _tune_malloc() -> None:
    """Have glibc keep the buffers audio passes through, on few heaps. By default each is mapped, zeroed page by
    page and unmapped again, for a tenth of what a short request costs; and every thread gets a heap that grows."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
        library.mallopt(m_arena_max, 2)
        library.mallopt(m_mmap_threshold, 32 << 20)
        library.mallopt(m_trim_threshold, 64 << 20)


def _free_port(host: str, port: int, flag: str = "--port") -> int:
    """The port, or one the system chooses for 0. Raises OptionError when it is taken: granian would share it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as failure:
        raise OptionError(
            f"{host}:{port} cannot be listened on: {failure.strerror or failure}",
            "an address of this machine and a free port",
            f"choose another with {flag}, or 0 for any",
        ) from failure


def _certificate(config: ServeConfig) -> dict[str, Any]:
    """What granian is told of TLS: nothing where there is none. Raises OptionError for files that are no good."""
    if config.tls_cert is None or config.tls_key is None:
        return {}
    cert, key = Path(config.tls_cert).expanduser(), Path(config.tls_key).expanduser()
    for name, file in (("tls_cert", cert), ("tls_key", key)):
        try:
            file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as failure:
            why = failure.strerror if isinstance(failure, OSError) else "not text"
            raise OptionError(
                f"{name}={str(file)!r}: {why}", "a file in PEM that may be read", param=name
            ) from None
    try:
        # The password is for a key that has one: without it OpenSSL would ask at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as failure:
        raise OptionError(
            f"tls_cert={config.tls_cert!r} and tls_key={config.tls_key!r} cannot be used: {failure}",
            "a certificate and its own key, in PEM, without a password",
            "look at both: openssl x509 -in CERT -text, openssl pkey -in KEY -check",
            param="tls_key",
        ) from None
    return {"ssl_cert": cert, "ssl_key": key, "ssl_protocol_min": SSLProtocols.tls12}


async def _serve(config: ServeConfig, ports: list[int]) -> int:
    """`ports`: the server's own, and perhaps that for FunASR's realtime clients."""
    told = asyncio.Event()
    metrics, gate, engines = ServerMetrics(__version__), AdmissionController(config), EngineRegistry(config)
    tracer = Tracer.create(config.otel_endpoint, "asr-serve")
    app = create_app(config, engines, metrics, gate, tracer)
    servers = [
        Server(
            app,
            address=config.host,
            port=port,
            # The app begins and ends once, with the first.
            interface=Interfaces.ASGINL if number else Interfaces.ASGI,
            backlog=BACKLOG,
            backpressure=_connections(config),
            log_dictconfig=logs.GRANIAN,
            **_certificate(config),
        )
        for number, port in enumerate(ports)
    ]
    with _signals(told):
        listening = {asyncio.create_task(server.serve()) for server in servers}
        stop = asyncio.create_task(told.wait())
        loading = asyncio.create_task(engines.start())
        code, late = 1, set[asyncio.Task[Any]]()
        try:
            started = time.perf_counter()
            await asyncio.wait({*listening, stop, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not stop.done() and not any(task.done() for task in listening):
                loading.result()
                _announce(config, ports, time.perf_counter() - started, engines.default_tts_model)
                await asyncio.wait({*listening, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                await _drain(config, gate)
                code = 0
        except AsrServeError as failure:
            log.error("the server could not start: %s", failure)
        finally:
            stop.cancel()
            loading.cancel()
            for server in servers:
                server.stop()  # type: ignore[no-untyped-call]
            late |= await _wait_tasks({loading, *listening}, STOP_S)
            late |= await _wait_tasks({asyncio.create_task(engines.close())}, CLOSE_S)
            tracer.close()
            if late:
                _exit_now(code)
    return code


async def _wait_tasks(tasks: set[asyncio.Task[Any]], wait_s: float) -> set[asyncio.Task[Any]]:
    """Wait for them; returns those that go on. What a task fails with is logged, unless somebody was told."""
    done, late = await asyncio.wait(tasks, timeout=wait_s)
    for task in done:
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not isinstance(failure, AsrServeError):
            log.error("the server ended badly", exc_info=failure)
    return late


def _exit_now(code: int) -> NoReturn:
    """End now, and wait for nothing: an orderly exit joins threads, whatever they wait for."""
    logging.shutdown()
    os._exit(code)


async def _drain(config: ServeConfig, gate: AdmissionController) -> None:
    """Take nothing new, and finish what was accepted."""
    gate.drain()
    log.info("stopping: %d requests are still answered, for up to %g s", gate.in_flight_requests, config.drain_s)
    try:
        async with asyncio.timeout(config.drain_s):
            await gate.wait_idle()
    except TimeoutError:
        log.warning(
            "%d requests were not answered in %g s and are broken off", gate.in_flight_requests, config.drain_s
        )
        gate.cancel_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await gate.wait_idle()
    await asyncio.sleep(FINAL_RESPONSES_S)


@contextlib.contextmanager
def _signals(told: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask to stop; the second one does not ask."""

    def ask() -> None:
        if told.is_set():
            os._exit(1)  # an exception would pass through whatever runs, and be logged there; the engines notice
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _announce(config: ServeConfig, ports: list[int], took_s: float, voice: str | None) -> None:
    """What somebody who has just started it wants to know. `voice`: the model that speaks, if one does."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    host = f"[{host}]" if ":" in host else host
    secure = "s" if config.tls_cert else ""
    url = f"http{secure}://{host}:{ports[0]}"
    key = ' -H "Authorization: Bearer KEY"' if config.api_keys else ""
    took = f"(ready in {took_s:.1f} s; stop with ctrl-C)"
    health = f"  health    {url}/ready" + (f"   metrics   {url}/metrics" if config.metrics else "")
    if config.engine.role == "encode":
        at = f"{host}:{config.encode_port}"
        lines = [
            f"asr-serve {__version__} encodes {config.model} for others at {at} {took}",
            "",
            f"  ask it    asr-serve serve --role decode --model {config.model} --peer {at}",
            health,
        ]
        _print_facts(
            config, lines, {"encode_at": at, "url": url, "model": config.model, "load_s": round(took_s, 2)}
        )
        return
    live = f"ws{secure}://{host}:{ports[-1]}"
    if voice == config.model:  # it speaks, and hears nothing
        page, ways = f"{url}/speak   (have it read what you write)", []
        live += "/v1/audio/speech/stream   (text while it is written)"
    else:
        page = f"{url}/   (talk to it, or drop a recording)"
        ways = [f"  try it    curl {url}/v1/audio/transcriptions{key} -F model={config.model} -F file=@talk.wav"]
        live += "   (FunASR's; OpenAI's: /v1/realtime; ours: /v1/stream)"
    lines = [
        f"asr-serve {__version__} serves {config.model} on {url} {took}",
        "",
        *([f"  peers     {', '.join(config.engine.peers)} (asked to encode)"] if config.engine.peers else []),
        *([f"  console   {page}"] if config.console else []),
        *ways,
        *([f"  speak     {_speak(url, key)}   ({voice})"] if voice else []),
        f"  live      {live}",
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
