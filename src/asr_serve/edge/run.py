"""Edge process: open the ports, announce them, take packets until a signal, deliver the last words, exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from granian.constants import Interfaces
from granian.server.embed import Server

from asr_serve import __version__
from asr_serve.config import client_key
from asr_serve.cores import usable_cores
from asr_serve.edge.control_api import PATH, create_control_api
from asr_serve.edge.driver_choice import open_driver
from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.edge_service import EdgeService
from asr_serve.edge.gate_worker import GateWorker
from asr_serve.edge.packet_driver import PacketDriver
from asr_serve.edge.telephone import Telephone
from asr_serve.edge.uplink_transport import UplinkTransport, create_transport
from asr_serve.edge.voice_activity import SLOTS, VoiceActivityPool
from asr_serve.metrics import EdgeMetrics
from asr_serve.server.run import free_port
from asr_serve.server.telemetry import logs

MAX_STEPPED = 8
"""Most instances of voice activity for the sake of cores alone."""


def run_edge(config: EdgeConfig) -> None:
    """Runs until SIGTERM or SIGINT. Raises OptionError if an address cannot be listened on, ProgramMissing for
    voice activity without wasmtime and for HTTP/2 without h2."""
    logs.setup()
    # A session that has ended keeps its place until the rest of its audio is gated: there are more than sessions.
    instances = max(1 + config.max_sessions // SLOTS, min(usable_cores(), MAX_STEPPED))
    pool = VoiceActivityPool(instances) if config.voice_activity else None
    transport = create_transport(config, client_key())
    control_port = free_port(config.control_host, config.control_port, "--control-port")
    driver = open_driver(config)
    asyncio.run(_run(config, driver, transport, control_port, pool))


async def _run(
    config: EdgeConfig,
    driver: PacketDriver,
    transport: UplinkTransport,
    control_port: int,
    pool: VoiceActivityPool | None,
) -> None:
    stop = asyncio.Event()

    def handle() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)
    metrics = EdgeMetrics(__version__)
    gates = None if pool is None else GateWorker(pool)
    service = EdgeService(config, driver, metrics, transport, gates=gates)
    telephone = None if config.sip is None else Telephone(service, config.sip, metrics)
    if telephone is not None:
        await telephone.start()
    server = Server(
        create_control_api(service, telephone),
        address=config.control_host,
        port=control_port,
        interface=Interfaces.ASGINL,
        log_dictconfig=logs.GRANIAN,
    )
    serving = asyncio.create_task(server.serve())
    _announce(config, driver, control_port, telephone)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if telephone is not None:
        await telephone.close()
    await service.close()
    server.stop()  # type: ignore[no-untyped-call]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3):
            await serving
    sys.stderr.flush()
    os._exit(0 if stop.is_set() else 1)  # as the server: threads of granian must not meet a Python that ends


def _announce(config: EdgeConfig, driver: PacketDriver, control_port: int, telephone: Telephone | None = None) -> None:
    def shown(host: str) -> str:
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"[{host}]" if ":" in host else host

    control = f"http://{shown(config.control_host)}:{control_port}"
    key = ' -H "Authorization: Bearer KEY"' if config.api_keys else ""
    lines = [
        f"asr-serve {__version__} takes RTP on UDP {config.host}:{driver.port} for {config.engine or config.server} "
        "(stop with ctrl-C)",
        f"  packets   {driver.details}",
        f"  session   curl {control}{PATH}{key} -H 'Content-Type: application/json' -d '{{}}'"
        "   (answers with id and ssrc)",
        f"  send      ffmpeg -re -i talk.wav -ac 1 -ar 8000 -c:a pcm_mulaw -ssrc SSRC "
        f"-f rtp rtp://{shown(config.host)}:{driver.port}",
        f"  listen    curl -N {control}{PATH}/ID/events{key}",
        f"  health    {control}/health   metrics   {control}/metrics",
    ]
    if telephone is not None:
        sip, transports = telephone.config, "UDP and TCP" if telephone.config.tcp else "UDP"
        lines.append(f"  calls     sip:{sip.user}@{shown(sip.host)}:{telephone.port} by {transports}")
        if sip.registrar is not None:
            lines.append(f"            registers {sip.user} at {sip.registrar}")
    print("\n".join(lines), file=sys.stderr, flush=True)
