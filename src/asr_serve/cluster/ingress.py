"""Ingress: today's server in a Ray Serve replica, with its own listener, in front of the replicas of all models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from asr_serve.cluster.attachments import ReplicaAttachments
from asr_serve.cluster.cluster_config import ClusterConfig
from asr_serve.cluster.engine_replica import digest_key, write_small_files
from asr_serve.config import ServeConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.replicas.backend import REPORT_TIMEOUT_S, ReplicatedBackend, answered, replicated_backend
from asr_serve.errors import AsrServeError, EngineClosed, NotAllowed
from asr_serve.models.registry import AnyCard, TtsCard
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, ModelEngine, engine_parts, engine_spec
from asr_serve.server.run import prepare, run_server
from asr_serve.server.telemetry import logs

log = logging.getLogger(__name__)

CONTROL_S = 30.0
"""Longest wait for the answer to a control call. `describe` waits for replicas for a part of it."""
STOP_S = 10.0
"""Time for the server's last steps beyond its `drain_s`."""

decode_address = msgspec.msgpack.Decoder(messages.EngineAddress).decode


def engine_role(card: AnyCard) -> str:
    """Work of a model's engine, which its kind decides."""
    if isinstance(card, TtsCard):
        return "speak"
    return "stream" if card.streaming or card.incremental_encoder else "recognise"


class ReplicaConnectionSettings(NamedTuple):
    """Settings of the connections to replicas."""

    key: bytes
    digest_key: bytes
    ring: RingSize
    silent_s: float


class ServeDirectory:
    """Replicas of one deployment, as Ray Serve reports them."""

    def __init__(self, handle: DeploymentHandle, deployment: str, drain_s: float) -> None:
        self._handle, self._deployment, self._drain_s = handle, deployment, drain_s
        self._node_id = ray.get_runtime_context().get_node_id()
        self._attachments: ReplicaAttachments | None = None

    def start(self, backend: ReplicatedBackend) -> None:
        def connect(replica_id: str, node_id: str, address: bytes) -> None:
            backend.connect(replica_id, decode_address(address), same_machine=node_id == self._node_id)

        self._attachments = ReplicaAttachments(
            self._handle,
            self._deployment,
            connect,
            lambda replica_id: backend.drain(replica_id, self._drain_s),
            lambda: backend.loads,
        )
        self._attachments.start()

    def close(self) -> None:
        if self._attachments is not None:
            self._attachments.close()


def describe_models(engines: Iterable[ModelEngine], timeout_s: float = REPORT_TIMEOUT_S) -> dict[str, Any]:
    """State of each model and of its replicas, all of which have `timeout_s` together; `answers` tells those that are
    silent. Blocks meanwhile."""
    backends: list[tuple[ModelEngine, ReplicatedBackend, dict[str, Future[messages.EngineReport]]]] = []
    for engine in engines:
        backend = engine.client.backend
        assert isinstance(backend, ReplicatedBackend)
        backends.append((engine, backend, backend.request_reports()))
    wait([answer for _, _, answers in backends for answer in answers.values()], timeout_s)
    models: dict[str, Any] = {}
    for engine, backend, answers in backends:
        reports, queue = answered(answers), backend.queue_state
        models[engine.name] = {
            "role": engine_role(engine.card_of_any_kind),
            "state": engine.state,
            "lost_connections": backend.restarts,
            "audio_hits": backend.audio_hits,
            "queue": {"waiting": queue.waiting, "capacity": engine.client.config.max_requests},
            "moved": {" ".join(labels): count for labels, count in backend.moved.items()},
            "replicas": {
                replica_id: {
                    "answers": replica_id in reports,
                    "queued_samples": load.queued_samples,
                    "sessions": load.sessions,
                    "requests": reports[replica_id].describe.get("requests") if replica_id in reports else None,
                    "load": msgspec.structs.asdict(reports[replica_id].load) if replica_id in reports else {},
                    "peers": reports[replica_id].describe.get("peers") if replica_id in reports else None,
                }
                for replica_id, load in backend.loads.items()
            },
        }
    return models


class Ingress:
    """Server that callers connect to: a Ray Serve deployment. Its methods are control calls."""

    def __init__(self, config: bytes, key: bytes, handles: Mapping[str, DeploymentHandle]) -> None:
        """Listens, and waits until every model has a replica. `config`: ClusterConfig. Raises EngineClosed."""
        self._cluster = msgspec.msgpack.decode(config, type=ClusterConfig)
        self._key, self._handles = key, dict(handles)
        self._node_id = ray.get_runtime_context().get_node_id()
        self._ready: Future[dict[str, Any]] = Future()
        self._registry: EngineRegistry | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._code: int | None = None
        self._failure: AsrServeError | None = None
        """Reason why the server could not start."""
        self._folders = contextlib.ExitStack()
        """Folders of tokenizers from other machines, removed when the server has ended."""
        self._thread = threading.Thread(target=self._run, name="asr-serve", daemon=True)
        settings = self._cluster.server()
        logs.setup(settings.log_format, settings.log_level)
        self._setup = prepare(settings, check_models=False, in_cluster=True)
        self._thread.start()
        self._ready.result()

    def _run(self) -> None:
        try:
            with self._folders:
                self._code = asyncio.run(self._serve())
        finally:
            if not self._ready.done():
                self._ready.set_exception(
                    self._failure or EngineClosed("the server could not start", todo="see the log of the ingress")
                )

    async def _serve(self) -> int:
        self._loop = asyncio.get_running_loop()

        def ready(registry: EngineRegistry, took_s: float) -> None:
            self._registry = registry
            self._ready.set_result(self._address)

        def failed(error: AsrServeError) -> None:
            self._failure = error

        return await run_server(self._setup, self._stop, ready, self._open_engine, failed)

    @property
    def _address(self) -> dict[str, Any]:
        config = self._setup.config
        host = ray.util.get_node_ip_address() if config.host in ("0.0.0.0", "::") else config.host
        host = f"[{host}]" if ":" in host else host
        secure = "s" if config.tls_cert else ""
        urls = [f"http{secure}://{host}:{port}" for port in self._setup.ports]
        return {"url": urls[0], "urls": urls, "reach": self._cluster.reach, "node": self._node_id, "pid": os.getpid()}

    def _open_engine(self, name: str, config: ServeConfig) -> EngineParts:
        """Connects to the replicas of a model. Raises NotAllowed for a model that the cluster does not have."""
        handle = self._handles.get(name)
        chosen = next((each for each in self._cluster.models if each.model == name), None)
        if handle is None or chosen is None:
            names = ", ".join(each.model for each in self._cluster.models)
            raise NotAllowed(
                f"{name} is no model of this cluster", f"its models: {names}", "add it to the cluster file"
            )
        directory = ServeDirectory(handle, name, config.drain_s)
        ring = RingSize(config.ring_slots, config.ring_payload_bytes)
        settings = ReplicaConnectionSettings(self._key, digest_key(self._key), ring, self._cluster.replica_silent_s)
        engine = engine_spec(name, config).config
        client = EngineClient(engine, replicated_backend(directory, settings))
        assert isinstance(client.backend, ReplicatedBackend)
        client.backend.watch_room(client.set_room)
        ready = client.backend.ready
        # A path of another machine may exist here too, with other files.
        local = client.backend.first_on_this_machine
        folder = Path(ready.tokenizer_folder) if local else self._fetch_tokenizer(handle, client.backend)
        return engine_parts(client, ready, folder)

    def _fetch_tokenizer(self, handle: DeploymentHandle, backend: ReplicatedBackend) -> Path:
        """Copies the tokenizer's files from the first replica, or from another where that one is gone: all have equal
        ones. Raises EngineClosed, PeerRefused."""
        folder = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="asr-serve-tokenizer-")))
        for replica_id in dict.fromkeys((backend.first_replica, *backend.loads)):
            try:
                files = handle.tokenizer_files.remote(replica_id=replica_id).result(timeout_s=CONTROL_S)
            except (RayError, RayServeException, TimeoutError) as failure:
                log.warning("replica %s sent no tokenizer: %s", replica_id, type(failure).__name__)
                continue
            write_small_files(folder, files)
            return folder
        raise EngineClosed("no replica sent the files of its tokenizer", todo="see the log of the replicas")

    async def describe(self) -> dict[str, Any]:
        """Address of the server, and the replicas of each model with their loads."""
        models = await asyncio.to_thread(describe_models, tuple(self._registry or ()))
        return {**self._address, "models": models}

    async def check_health(self) -> None:
        """Raises EngineClosed once the server has ended: Ray Serve then replaces this ingress. It is ended where an
        upgrade left only replicas with another tokenizer or card."""
        backends = [engine.client.backend for engine in self._registry or ()]
        outdated = any(isinstance(backend, ReplicatedBackend) and backend.outdated for backend in backends)
        if outdated and self._loop is not None and not self._stop.is_set():
            log.warning(
                "only replicas with another tokenizer are left: this ingress finishes its callers and is replaced"
            )
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._code is not None:
            raise EngineClosed(f"the server ended with code {self._code}")

    def stop(self) -> None:
        """Refuses new callers and finishes those in progress within `drain_s`; blocks meanwhile."""
        if self._loop is None:
            return  # it has not begun
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        end_s = time.monotonic() + self._setup.config.drain_s + STOP_S
        self._thread.join(max(0.0, end_s - time.monotonic()))

    def __del__(self) -> None:
        self.stop()
