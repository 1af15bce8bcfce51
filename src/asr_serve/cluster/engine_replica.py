"""Replica of a model: a Ray Serve replica that runs an engine process and supervises it. Audio does not pass here."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import ray

from asr_serve.engine.process import messages
from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.errors import EngineClosed, PeerRefused

OWN_RING = RingSize(2, 64)
"""Ring of the process that supervises: no audio goes through it."""

log = logging.getLogger(__name__)


def digest_key(key: bytes) -> bytes:
    """Key of the digests of audio in a cluster with that key."""
    return hmac.digest(key, b"audio", "sha256")


class EngineReplica:
    """Supervisor of an engine process that servers connect to. Its methods are control calls."""

    def __init__(self, spec: bytes, key: bytes, reach: str) -> None:
        """Loads the model; blocks meanwhile. `spec`: encoded EngineSpec. Raises the errors of loading."""
        self._backend: ProcessBackend | None = None
        # Servers of this machine find the socket here; nobody else may read the folder.
        self._folder = tempfile.mkdtemp(prefix="asr-serve-")
        host = ray.util.get_node_ip_address() if reach == "network" else None
        engine = msgspec.structs.replace(
            messages.decode_spec(spec), servers=messages.ListenSpec(self._folder, host, key), digest_key=digest_key(key)
        )
        self._node_id = ray.get_runtime_context().get_node_id()
        self._backend = ProcessBackend(engine, OWN_RING, lambda _: None, lambda: None)

    async def attach(self, replica_id: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yields node and address of the engine process, now and after each restart, until the caller ends the call.
        While a server is attached, Ray Serve does not end this replica, up to its limit."""
        known: messages.EngineAddress | None = None
        while True:
            address = await asyncio.to_thread(self._engine.wait_address, known, WAIT_S)
            if address is not None and address != known:
                known = address
                yield self._node_id, msgspec.msgpack.encode(address)

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
        if self._backend is not None:
            self._backend.close()
        shutil.rmtree(self._folder, ignore_errors=True)


WAIT_S = 1.0
"""Longest wait of a thread for a restart, so that it ends soon after the call."""
MAX_FILE_BYTES = 32 << 20
"""Size of a file beside the weights up to which it is sent: weights are larger than any tokenizer."""
_WEIGHTS = (".safetensors", ".pt", ".bin", ".onnx", ".ort", ".nemo", ".gguf", ".ckpt")


def read_small_files(folder: str) -> dict[str, bytes]:
    """Contents of the files in a folder, and below, that are no weights."""
    found: dict[str, bytes] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if not name.endswith(_WEIGHTS) and os.path.getsize(path) <= MAX_FILE_BYTES:
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
