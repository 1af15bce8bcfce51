"""/v1/key and /v1/keys: limits of keys, and how much of them is used. No model is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from asr_serve import __version__
from asr_serve.config import BatchConfig, ServeConfig
from asr_serve.metrics import ServerMetrics
from asr_serve.server.app import create_app
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionController

KEYS = {"api_keys": ("k-one", "k-two"), "admin_keys": ("k-boss",)}
NONE_LEFT = {"used": 0, "limit": None}


class Server:
    """Application in this process, with a clock that stands still."""

    def __init__(self, **settings: Any) -> None:
        config = ServeConfig(**settings)
        self.now_s = 0.0
        self.gate = AdmissionController(config, lambda: self.now_s)
        app = create_app(config, EngineRegistry(config), ServerMetrics(__version__), self.gate)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://keys.test")

    async def get(self, path: str, key: str | None = None) -> tuple[int, Any]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = await self.client.get(path, headers=headers)
        return answer.status_code, answer.json()

    async def store(self, key: str, data: bytes) -> str:
        """Uploads the lines of a batch; returns the id of the file."""
        files = {"file": ("lines.jsonl", data)}
        headers = {"authorization": f"Bearer {key}"}
        answer = await self.client.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(**settings: Any) -> Server:
        settings.setdefault("batch", BatchConfig(folder=str(tmp_path / "batch")))
        made.append(Server(**settings))
        return made[-1]

    yield start
    for each in made:
        await each.client.aclose()


async def test_without_keys_all_callers_are_one(serve, tmp_path):
    server = serve()
    status, found = await server.get("/v1/key")
    assert (status, found["object"], found["name"], found["admin"]) == (200, "key", "anonymous", False)
    assert found["concurrent"] == NONE_LEFT
    assert found["requests_per_minute"] is None
    assert found["batches"]["files"] == {"used": 0, "limit": BatchConfig().files_per_key}
    assert not (tmp_path / "batch").exists()  # to look writes nothing
    assert (await server.get("/v1/keys"))[0] == 401


async def test_a_key_sees_its_own_use_alone(serve):
    server = serve(**KEYS, concurrent_per_key=3, requests_per_minute_per_key=10)
    await server.store("k-one", b"x" * 700)
    one, boss = server.gate.keys.clients[0], server.gate.keys.clients[2]
    with ExitStack() as work:
        for client in (one, one, boss):
            work.enter_context(server.gate.admit(client, work=True))
        _, found = await server.get("/v1/key", "k-one")
        assert (found["name"], found["admin"]) == ("key-1", False)
        assert found["concurrent"] == {"used": 2, "limit": 3}
        assert found["requests_per_minute"] == {"used": 2, "limit": 10}
        assert (found["batches"]["bytes"]["used"], found["batches"]["files"]["used"]) == (700, 1)
        _, other = await server.get("/v1/key", "k-two")
        assert (other["name"], other["concurrent"]["used"], other["requests_per_minute"]["used"]) == ("key-2", 0, 0)
        assert (other["batches"]["bytes"]["used"], other["batches"]["files"]["used"]) == (0, 0)
    server.now_s = 6.0  # a tenth of a minute: one of ten has come again
    _, found = await server.get("/v1/key", "k-one")
    assert (found["concurrent"]["used"], found["requests_per_minute"]["used"]) == (0, 1)


async def test_open_batches_count(serve):
    server = serve(**KEYS)
    lines = await server.store("k-one", b"{}\n")
    body = {"input_file_id": lines, "endpoint": "/v1/audio/transcriptions", "completion_window": "24h"}
    headers = {"authorization": "Bearer k-one"}
    made = await server.client.post("/v1/batches", json=body, headers=headers)
    assert made.status_code == 200, made.text
    used = (await server.get("/v1/keys", "k-boss"))[1]["data"][0]["batches"]["open_batches"]["used"]
    status = (await server.client.get(f"/v1/batches/{made.json()['id']}", headers=headers)).json()["status"]
    assert used == (status != "failed")  # a line without a request ends it soon


async def test_administrators_see_all_keys_by_name(serve):
    server = serve(**KEYS)
    status, found = await server.get("/v1/keys", "k-boss")
    assert (status, found["object"]) == (200, "list")
    assert [(each["name"], each["admin"]) for each in found["data"]] == [
        ("key-1", False),
        ("key-2", False),
        ("admin-1", True),
    ]
    assert "k-" not in str(found).replace("key-", "")  # no key is sent
    assert (await server.get("/v1/key", "k-boss"))[1]["admin"] is True
    assert (await server.get("/v1/keys", "k-one"))[0] == 403
    for path in ("/v1/key", "/v1/keys"):
        assert (await server.get(path))[0] == 401
        assert (await server.get(path, "k-three"))[0] == 401


async def test_without_batches_there_is_nothing_to_count(serve):
    server = serve(batch=BatchConfig(enabled=False))
    assert (await server.get("/v1/key"))[1]["batches"] is None


async def test_a_folder_that_another_server_has_is_no_failure(serve, tmp_path):
    first = serve(**KEYS)
    await first.store("k-one", b"x")
    status, found = await serve(**KEYS).get("/v1/key", "k-one")
    assert (status, found["name"], found["batches"]) == (200, "key-1", None)
