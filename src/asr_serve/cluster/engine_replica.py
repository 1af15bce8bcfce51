"""Replica of a model: a Ray Serve replica that runs an engine process and supervises it. Audio does not pass here."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from asr_serve.cluster.attachments import ReplicaAttachments
from asr_serve.cluster.encode_peers import EncodePeers, peer_key
from asr_serve.engine.process import messages
from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.errors import EngineClosed, PeerRefused
from asr_serve.text.tokenizers import TOKENIZER_FILES

OWN_RING = RingSize(2, 64)
"""Ring of the process that supervises: no audio goes through it."""
LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


def digest_key(key: bytes) -> bytes:
    """Key of the digests of audio in a cluster with that key."""
    return hmac.digest(key, b"audio", "sha256")


class EngineReplica:
    """Supervisor of an engine process that servers connect to, or other engines. Its methods are control calls."""

    def __init__(self, spec: bytes, key: bytes, reach: str, encoders: DeploymentHandle | None = None) -> None:
        """Loads the model; blocks meanwhile. `spec`: encoded EngineSpec. `encoders`: replicas that encode for this one.
        Raises the errors of loading."""
        self._closed = threading.Event()
        self._backend: ProcessBackend | None = None
        self._encoders: ReplicaAttachments | None = None
        # Servers of this machine find the socket here; nobody else may read the folder.
        self._folder = tempfile.mkdtemp(prefix="asr-serve-")
        self._node_id = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address() if reach == "network" else None
        engine = msgspec.structs.replace(messages.decode_spec(spec), digest_key=digest_key(key))
        if engine.config.role != "both":
            engine = msgspec.structs.replace(engine, peer_keys=(peer_key(key),), listen=(host or LOOPBACK, 0))
        if engine.config.role != "encode":
            engine = msgspec.structs.replace(engine, servers=messages.ListenSpec(self._folder, host, key))
        self._backend = ProcessBackend(engine, OWN_RING, lambda _: None, lambda: None)
        self._address = self._backend.address
        self._attached: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        """Calls of `attach`, each with an event of a new address."""
        threading.Thread(target=self._watch_address, args=(self._backend,), name="address", daemon=True).start()
        if encoders is not None:
            peers = EncodePeers(self._backend, serve.get_replica_context().replica_id.unique_id)
            name = encoders.deployment_name
            self._encoders = ReplicaAttachments(encoders, name, peers.on_address, peers.on_gone)
            self._encoders.start()

    def _watch_address(self, backend: ProcessBackend) -> None:
        while not self._closed.is_set():
            if (address := backend.wait_address(self._address, WAIT_S)) != self._address:
                self._address = address
                for loop, changed in tuple(self._attached):
                    loop.call_soon_threadsafe(changed.set)

    async def attach(self, replica_id: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yields node and address of the engine process, now and after each restart, until the caller ends the call.
        While anybody is attached, Ray Serve does not end this replica, up to its limit."""
        changed, known = asyncio.Event(), None
        attached = asyncio.get_running_loop(), changed
        self._attached.add(attached)
        try:
            while True:
                changed.clear()
                if (address := self._address) != known:
                    known = address
                    yield self._node_id, msgspec.msgpack.encode(address)
                await changed.wait()
        finally:
            self._attached.discard(attached)

    async def describe(self, replica_id: str | None = None) -> dict[str, Any]:
        """State and counters of the engine."""
        described = await asyncio.to_thread(self._engine.describe)
        return {"pid": os.getpid(), "engine_pid": self._engine.pid, "node": self._node_id, **described}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Load of the engine, for Ray Serve, which calls this on replicas of deployments that are autoscaled. What is
        not measured is absent."""
        report = await asyncio.to_thread(self._engine.report)
        if report is None:
            return {}
        return {name: value for name, value in msgspec.structs.asdict(report.load).items() if value is not None}

    async def tokenizer_files(self, replica_id: str | None = None) -> dict[str, bytes]:
        """Files beside the model's weights that a server on another machine needs for text."""
        return await asyncio.to_thread(read_small_files, self._engine.ready.tokenizer_folder)

    async def check_health(self) -> None:
        """Raises EngineClosed for an engine that does not start: Ray Serve then replaces this replica."""
        if self._engine.state in ("failed", "closed"):
            raise EngineClosed(f"the engine is {self._engine.state}")

    @property
    def _engine(self) -> ProcessBackend:
        assert self._backend is not None
        return self._backend

    def __del__(self) -> None:
        self._closed.set()
        if self._encoders is not None:
            self._encoders.close()
        if self._backend is not None:
            self._backend.close()
        shutil.rmtree(self._folder, ignore_errors=True)


WAIT_S = 1.0
"""Longest wait of a thread for a restart, so that it ends soon after the replica."""
MAX_FILE_BYTES = 32 << 20
"""Size of a file beside the weights up to which it is sent: weights are larger than any tokenizer."""
_WEIGHTS = (".safetensors", ".pt", ".bin", ".onnx", ".ort", ".nemo", ".gguf", ".ckpt")


def read_small_files(folder: str) -> dict[str, bytes]:
    """Contents of the files in a folder, and below, that are no weights. A tokenizer may end as weights do."""
    found: dict[str, bytes] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            is_weights = name.endswith(_WEIGHTS) and name not in TOKENIZER_FILES
            if not is_weights and os.path.getsize(path) <= MAX_FILE_BYTES:
                with open(path, "rb") as file:
                    found[os.path.relpath(path, folder)] = file.read()
    return found


def write_small_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes what `read_small_files` of another machine returned. Raises PeerRefused, before it writes anything, for a
    name that is not one of a file below the folder."""
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or "\0" in name or name.startswith("/") or ".." in parts:
            raise PeerRefused(f"a file of a tokenizer named {name!r}", "names of files below its folder")
    for name, data in files.items():
        path = folder.joinpath(*PurePosixPath(name).parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
