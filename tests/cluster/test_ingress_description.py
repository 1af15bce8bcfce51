"""Description of an ingress: the replicas of all models are asked at once, and one that is silent is named."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from engine_clients import RING, WAIT_S, wait_until

from asr_serve.api.cli.cluster import _rows
from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.engine.process.server_handshake import greet_server
from asr_serve.engine.replicas.backend import ReplicatedBackend, replicated_backend
from asr_serve.models.registry import asr_card
from asr_serve.server.engine_registry import EngineParts, ModelEngine

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported

KEY = b"a key of this test alone"
CARD = asr_card("moonshine-tiny-en")
MODELS = 7
"""Models, one after another, whose silence would take longer than a control call may."""


class Settings:
    key = digest_key = KEY
    ring = RING
    silent_s = 600.0


class Replica:
    """A replica that reports once `MODELS` of them were asked, or never."""

    def __init__(self, path: str, asked: threading.Barrier, answers: bool) -> None:
        self._asked, self._answers = asked, answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self.address = messages.EngineAddress(path, None)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        line, _ = self._listener.accept()
        for descriptor in greet_server(line, KEY) or ():
            os.close(descriptor)
        ready = messages.EngineReady(CARD, None, (), "", 1, 1, {}, 0.0)
        with Connection(line.detach()) as pipe:
            pipe.send_bytes(messages.encode(ready))
            try:
                while True:
                    message = messages.decode_to_engine(pipe.recv_bytes())
                    if isinstance(message, messages.ReportQuery) and self._answers:
                        self._asked.wait(WAIT_S)
                        pipe.send_bytes(messages.encode(messages.EngineReport(message.number, {"requests": 3}, b"")))
            except (EOFError, OSError, threading.BrokenBarrierError):
                return

    def start(self, backend: ReplicatedBackend) -> None:
        backend.connect("speaks" if self._answers else "silent", self.address, same_machine=True)

    def close(self) -> None:
        self._listener.close()


class Directory:
    """The replicas of one model."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas

    def start(self, backend: ReplicatedBackend) -> None:
        for replica in self._replicas:
            replica.start(backend)

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[ModelEngine]]:
    asked = threading.Barrier(MODELS)

    def open_model(number: int) -> ModelEngine:
        replicas = [Replica(str(tmp_path / f"{number}.sock"), asked, True)]
        if number == 0:
            replicas.append(Replica(str(tmp_path / "silent.sock"), asked, False))
        client = EngineClient(EngineConfig(), replicated_backend(Directory(replicas), Settings()))
        card = msgspec.structs.replace(CARD, name=f"model {number}")
        return ModelEngine(EngineParts(card, client, None, {}))

    with ThreadPoolExecutor(MODELS) as pool:
        found = list(pool.map(open_model, range(MODELS)))
    yield found
    for engine in found:
        engine.client.close()


def test_replicas_of_all_models_are_asked_at_once_and_a_silent_one_is_named(engines: list[ModelEngine]):
    from asr_serve.cluster.control import ModelStatus
    from asr_serve.cluster.ingress import describe_models

    wait_until(lambda: len(engines[0].client.backend.loads) == 2)
    described = describe_models(engines, timeout_s=3.0)
    assert list(described) == [f"model {number}" for number in range(MODELS)]
    for name, model in described.items():
        assert model["replicas"]["speaks"]["answers"], name
        assert model["replicas"]["speaks"]["requests"] == 3
    silent = described["model 0"]["replicas"]["silent"]
    assert (silent["answers"], silent["requests"], silent["load"]) == (False, None, {})
    status = ModelStatus("model 0", "recognise", "HEALTHY", 2, 2, described["model 0"])
    assert sorted(row[4] for row in _rows([status])) == ["silent: no answer", "speaks"]
