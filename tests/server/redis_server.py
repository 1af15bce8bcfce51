"""A real redis-server of a test's own, in memory only: one that is killed has lost everything."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from children import Child

WAIT_S = 30.0


class RedisServer:
    """`redis-server` on a port of its own. It can be killed, paused and started again."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", within: Sequence[str] = ()) -> None:
        """`host`: its address. `within`: a command that runs a command, like `ip netns exec NAME`."""
        if shutil.which("redis-server") is None:
            pytest.skip("no redis-server: apt install redis-server")
        redis = pytest.importorskip("redis", reason="redis is not installed: pip install 'asr-serve[redis]'")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://{host}:{self.port}/0"
        self._folder, self._host, self._within = folder, host, within
        self.client = redis.Redis.from_url(self.url, socket_timeout=WAIT_S)
        self._unavailable = redis.exceptions.ConnectionError
        self.start()

    def start(self) -> None:
        command = [*self._within, "redis-server", "--port", str(self.port), "--bind", self._host]
        command += ["--save", "", "--appendonly", "no", "--protected-mode", "no"]
        with (self._folder / "redis.log").open("ab") as log:
            self.process = Child([*command, "--dir", str(self._folder)], stdout=log, stderr=log)
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                self.client.ping()
                return
            except self._unavailable:
                assert time.monotonic() < end_s, "redis-server does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def contents(self, keys: str) -> bytes:
        """Every byte of these keys and of their values."""
        dumped = []
        for key in self.client.scan_iter(keys):
            kind = self.client.type(key)
            value = self.client.hgetall(key) if kind == b"hash" else self.client.xrange(key)
            dumped.append(key + b"".join(_flatten(value)))
        return b"\0".join(dumped)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.kill()


def _flatten(value: object) -> list[bytes]:
    if isinstance(value, bytes):
        return [value]
    if isinstance(value, dict):
        return [part for item in value.items() for each in item for part in _flatten(each)]
    return [part for each in value for part in _flatten(each)] if isinstance(value, list | tuple) else []
