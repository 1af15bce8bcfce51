"""Servers behind a real Ray: the ingress of a cluster in its own process, with what tests ask of `Running`."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import httpx
import msgspec
import pytest
from children import MODULE_LIMIT_S, Child
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from asr_serve.config import ServeConfig

WAIT_S = 180.0
MODEL, VOICE = "moonshine-tiny-en", "hibari"
INSIDE = frozenset({"app", "call", "engines", "gate", "loop", "metrics", "server"})
"""What tests of a server in their own process look at, and cannot where it has another."""
SETTINGS: dict[str, Any] = {"port": 0, "drain_s": 5, "engine": {"prefix_bytes": 0}}


class ClusterServer:
    """An ingress, and the way into it."""

    def __init__(self, url: str, config: ServeConfig, end: Callable[[], None]) -> None:
        """`end`: ends the ingress."""
        self.url, self.config, self.end = url, config, end
        self.port = int(url.rpartition(":")[2])
        self.http = httpx.Client(base_url=url, timeout=WAIT_S)
        self._clients: list[OpenAI] = []

    def __getattr__(self, name: str) -> NoReturn:
        if name in INSIDE:
            pytest.skip(f"it looks inside the server's process: {name}")
        raise AttributeError(name)

    def openai(self, key: str = "none", **options: Any) -> OpenAI:
        """The unmodified client."""
        options = {"max_retries": 0} | options
        self._clients.append(OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=WAIT_S, **options))
        return self._clients[-1]

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Metrics of the ingress and of its replicas."""
        keys = (*self.config.admin_keys, *self.config.api_keys)
        answer = self.http.get("/metrics", headers={"Authorization": f"Bearer {keys[0]}"} if keys else {})
        assert answer.status_code == 200, answer.text
        families = text_string_to_metric_families(answer.text)
        return [(sample.name, dict(sample.labels), sample.value) for family in families for sample in family.samples]

    def counted(self, name: str, **labels: str) -> float:
        return sum(value for found, of, value in self.samples() if found == name and of == labels)

    def held(self) -> dict[str, int]:
        """What is held for requests, in the engines and in the ingress."""
        totals: dict[str, float] = {}
        for name, labels, value in self.samples():
            if labels.get("route") != "/metrics":
                totals[name] = totals.get(name, 0.0) + value
        names = {
            "requests": "asr_serve_engine_requests",
            "sessions": "asr_serve_sessions",
            "pages": "asr_serve_pages_used",
            "inside": "asr_serve_requests_in_flight",
            "live": "asr_serve_live_open_sessions",
        }
        return {held: int(totals.get(name, 0)) for held, name in names.items()}

    def expect_empty(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while any((held := self.held()).values()):
            assert time.monotonic() < end_s, str(held)
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends its clients. The ingress ends with its cluster."""
        for client in (self.http, *self._clients):
            client.close()


class IngressHost:
    """Ray, and two replicas of a recognition model and one of a voice, in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("ASR_SERVE_", "RAY_"))}
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environ["RAY_raylet_start_wait_time_s"] = "180"  # by default 30, too short where other tests want all cores
        replicas = [{"model": MODEL, "replicas": 2, "cpus": 0.5}, {"model": VOICE, "replicas": 1, "cpus": 0.5}]
        settings = json.dumps({"models": replicas, "serve": SETTINGS | {"voice": VOICE}})
        with self._log.open("w") as log:
            command = [sys.executable, str(Path(__file__).parent / "ingress_host.py"), settings]
            self._process: Child[str] = Child(
                command, stdin=-1, stdout=-1, stderr=log, text=True, env=environ, limit_s=MODULE_LIMIT_S
            )
        self._started = 0
        self.first_url = self._url()

    def _url(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if found := re.match(r"ready (http://\S+)", line):
                return found[1]
            if line.startswith("failed "):
                raise AssertionError(json.loads(line.removeprefix("failed ")))
        raise AssertionError(self._log.read_text()[-5_000:])

    def ingress(self, **settings: Any) -> ClusterServer:
        """An ingress with these settings."""
        config = ServeConfig(**{"voice": "none"} | settings)
        if settings == {"voice": VOICE}:
            return ClusterServer(self.first_url, config, lambda: None)
        names = [MODEL] if config.voice == "none" else [MODEL, VOICE]
        plain = msgspec.to_builtins(ServeConfig())
        changed = {name: value for name, value in msgspec.to_builtins(config).items() if value != plain[name]}
        asked = {"models": [{"model": name} for name in names], "serve": SETTINGS | changed}
        self._started += 1
        name = f"ingress-{self._started}"
        self._send({"start": name, "settings": asked})
        return ClusterServer(self._url(), config, lambda: self._send({"end": name}))

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
