"""A real Redis Cluster of a test's own: three masters without replicas, in memory only."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from children import MODULE_LIMIT_S, Child

WAIT_S = 60.0
SLOTS = 16_384
NODE_TIMEOUT_MS = 1_000


def free_ports(count: int) -> list[int]:
    """Ports that are free, and free too 10,000 above, where nodes of a cluster listen for each other."""
    found: list[int] = []
    while len(found) < count:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            probe, bus = (stack.enter_context(socket.socket()) for _ in range(2))
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] - 10_000
            if port < 1_024 or port in found:
                continue
            bus.bind(("127.0.0.1", port))
            found.append(port)
    return found


class RedisCluster:
    """Masters that share the slots. One can be killed and started again, with its slots and without its data."""

    def __init__(self, folder: Path, masters: int = 3) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("no redis-server: apt install redis-server")
        self._redis = pytest.importorskip("redis", reason="redis is not installed: pip install 'asr-serve[redis]'")
        self._folder, self.ports = folder, free_ports(masters)
        self.url = f"redis+cluster://127.0.0.1:{self.ports[0]}/0"
        self.clients = [self._redis.Redis(port=port, socket_timeout=WAIT_S) for port in self.ports]
        self._processes: list[Child[Any] | None] = [None] * masters
        for number in range(masters):
            self.start(number)
        bounds = [SLOTS * number // masters for number in range(masters + 1)]
        for number, client in enumerate(self.clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        for port in self.ports[1:]:
            self.clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        self.wait(True)

    def start(self, number: int) -> None:
        port = str(self.ports[number])
        command = ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf"]
        command += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--dir", str(self._folder)]
        with (self._folder / f"{port}.log").open("ab") as log:
            self._processes[number] = Child(command, stdout=log, stderr=log, limit_s=MODULE_LIMIT_S)
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                self.clients[number].ping()
                return
            except self._redis.exceptions.RedisError:
                assert time.monotonic() < end_s, f"redis-server at {port} does not answer"
                time.sleep(0.02)

    def wait(self, well: bool) -> None:
        """Waits until all masters that run say that the cluster is well, or that it is not."""
        end_s = time.monotonic() + WAIT_S
        running = [client for client, process in zip(self.clients, self._processes, strict=True) if process is not None]
        while any((b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")) is not well for client in running):
            assert time.monotonic() < end_s, running[0].execute_command("CLUSTER", "NODES")
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        process, self._processes[number] = self._processes[number], None
        assert process is not None
        process.kill()
        process.wait(WAIT_S)

    def close(self) -> None:
        for number, client in enumerate(self.clients):
            client.close()
            if self._processes[number] is not None:
                self.kill(number)
