"""The real application on a real granian, with the real packaged model in its engine process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import wave
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_server import IngressHost
from granian.constants import Interfaces
from granian.server.embed import Server
from openai import OpenAI
from through_cluster import STARTED, THROUGH_CLUSTER

from asr_serve import __version__
from asr_serve.config import BatchConfig, EngineConfig, ServeConfig
from asr_serve.errors import AsrServeError
from asr_serve.metrics import ServerMetrics
from asr_serve.models.auxiliary import eres2net, pyannote
from asr_serve.server.app import create_app
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, open_engine
from asr_serve.server.middleware.admission import AdmissionController
from asr_serve.server.telemetry import logs

WAIT_S = 120.0
"""Longer than anything here takes; only a hang reaches it."""
MODEL = "moonshine-tiny-en"
VOICE = "hibari"
PAID, PAID_WRITTEN = "We paid twenty five dollars for it in nineteen ninety nine.", "We paid $25 for it in 1999."


class Running:
    """A server, and the way into it from a test's thread."""

    def __init__(self, config: ServeConfig, open_engine: Callable[[str, ServeConfig], EngineParts]) -> None:
        self.config = config
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.loop = asyncio.new_event_loop()
        self.metrics = ServerMetrics(__version__)
        self._open = open_engine
        self._clients: list[OpenAI] = []
        self._up: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        self._up.result(WAIT_S)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        eventually(lambda: self._answers())

    async def _serve(self) -> None:
        try:
            self.gate, self.engines = AdmissionController(self.config), EngineRegistry(self.config, self._open)
            self.app = create_app(self.config, self.engines, self.metrics, self.gate)
            self.server = Server(
                self.app, address="127.0.0.1", port=self.port, interface=Interfaces.ASGI, log_dictconfig=logs.GRANIAN
            )
            await self.engines.start()
        except BaseException as failure:
            self._up.set_exception(failure)
            return
        self._up.set_result(None)
        await self.server.serve()

    def _answers(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def openai(self, key: str = "none", **options: Any) -> OpenAI:
        """The unmodified client. One that asks again when told to does so: give it max_retries."""
        options = {"max_retries": 0} | options
        self._clients.append(OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=WAIT_S, **options))
        return self._clients[-1]

    def held(self) -> dict[str, int]:
        """What is held for requests, in the engine and here."""
        engines = list(self.engines)
        found = [engine.client.describe() for engine in engines]
        return {
            "requests": sum(each["requests"] for each in found),
            "sessions": sum(each["sessions"] for each in found),
            "pages": sum(each.get("pages_used", 0) for each in found),
            "inside": self.gate.in_flight_requests,
            "working": self.gate.active_work,
            "users": sum(engine._users for engine in engines),
        }

    def expect_empty(self) -> None:
        eventually(lambda: not any(self.held().values()), lambda: str(self.held()))

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def stop(self) -> None:
        for client in (self.http, *self._clients):
            client.close()
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


def eventually(
    true: Callable[[], object], what: Callable[[], str] = lambda: "it never was", wait_s: float = WAIT_S
) -> None:
    end_s = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < end_s, what()
        time.sleep(0.02)


@pytest.fixture(scope="session")
def parts(packaged_speech: Path) -> Iterator[EngineParts]:
    """One engine process for all servers of the session. It remembers nothing: what is asked is computed. Not with
    8 bits: tests compare its words with those of other precisions, and of audio that differs by a rounding."""
    config = EngineConfig(prefix_bytes=0, quantize="none", new_live_callers=32)
    made = open_engine(MODEL, ServeConfig(engine_threads=1, engine=config))
    yield made
    made.client.close()


@pytest.fixture(scope="session")
def ingress_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IngressHost]:
    """One Ray for all servers of the session that are ingresses."""
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    host = IngressHost(tmp_path_factory.mktemp("ray"))
    yield host
    host.close()


@pytest.fixture(scope="session")
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    """`serve(api_keys=(...,))`: a server with these settings. It is stopped at the end."""
    through_cluster = request.config.getoption(THROUGH_CLUSTER)
    folders = request.getfixturevalue("tmp_path_factory").mktemp("batch")
    running: list[Any] = []

    def start(**settings: Any) -> Running:
        if through_cluster:
            running.append(request.getfixturevalue("ingress_host").ingress(**settings))
            if STARTED.calling:
                STARTED.servers.append(running[-1])
        else:
            parts = request.getfixturevalue("parts")
            batch = BatchConfig(folder=str(folders / str(len(running))))
            defaults = {"voice": "none", "auto_model": "none", "batch": batch}
            running.append(Running(ServeConfig(**defaults | settings), lambda name, config: parts))
        made: Running = running[-1]
        return made

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def voice_parts() -> Iterator[EngineParts]:
    """The same of a voice that a package brings."""
    pytest.importorskip("hibari", reason="hibari-tts is not installed: pip install hibari-tts")
    made = open_engine(VOICE, ServeConfig(engine_threads=1))
    yield made
    made.client.close()


@pytest.fixture(scope="session")
def serve_voice(request: pytest.FixtureRequest, serve: Callable[..., Running]) -> Iterator[Callable[..., Running]]:
    """As `serve`, of servers that speak."""
    through_cluster = request.config.getoption(THROUGH_CLUSTER)
    running: list[Running] = []

    def start(**settings: Any) -> Running:
        if through_cluster:
            return serve(**{"voice": VOICE} | settings)
        voice_parts, parts = request.getfixturevalue("voice_parts"), request.getfixturevalue("parts")
        config = ServeConfig(**{"voice": VOICE, "auto_model": "none"} | settings)
        running.append(Running(config, lambda name, config: voice_parts if name == VOICE else parts))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def shared_speaker(serve_voice: Callable[..., Running]) -> Running:
    return serve_voice()


@pytest.fixture
def speaker(shared_speaker: Running) -> Iterator[Running]:
    """A server that speaks. Whatever a test does, nothing of it is left."""
    yield shared_speaker
    shared_speaker.expect_empty()


@pytest.fixture(scope="session")
def shared_server(serve: Callable[..., Running]) -> Running:
    return serve(aliases={"whisper-1": MODEL})


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """Without keys or special limits. Whatever a test does, nothing of it is left."""
    yield shared_server
    shared_server.expect_empty()


@pytest.fixture(scope="session")
def paid_wav(shared_speaker: Running) -> bytes:
    """PAID, said by a voice of ours."""
    pytest.importorskip("wetext", reason="wetext is not installed: pip install 'asr-serve[itn]'")
    asked = {"input": PAID, "voice": "heart", "response_format": "wav"}
    answer = shared_speaker.http.post("/v1/audio/speech", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.fixture(scope="session")
def hears_speakers() -> None:
    """For tests that want to be told who speaks."""
    try:
        pyannote.load()
        eres2net.load()
    except AsrServeError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def beckett(packaged_speech: Path) -> Path:
    return packaged_speech / "beckett.wav"


@pytest.fixture(scope="session")
def cities(packaged_speech: Path) -> Path:
    return packaged_speech / "two_cities.wav"


@pytest.fixture(scope="session")
def wav(cities: Path) -> Callable[[float, float], bytes]:
    """`wav(4)`: the first four seconds of two_cities.wav as a file; `wav(4, silence_s)` with silence behind."""

    def cut(seconds: float, silence_s: float = 0.0) -> bytes:
        import io

        made = io.BytesIO()
        with wave.open(str(cities)) as long, wave.open(made, "wb") as short:
            short.setparams(long.getparams())
            short.writeframes(long.readframes(int(seconds * long.getframerate())))
            short.writeframes(bytes(2 * int(silence_s * long.getframerate())))
        return made.getvalue()

    return cut
