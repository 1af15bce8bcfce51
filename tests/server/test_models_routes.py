"""Models, health, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable

import pytest
from raw_http import FILE_END, FORM_END, Raw, field, file_head
from running_server import MODEL, VOICE, WAIT_S, Running, eventually

from asr_serve import __version__
from asr_serve.config import EngineConfig, GovernanceConfig, ServeConfig
from asr_serve.errors import EngineClosed, ModelNotLoaded, NotAllowed, OptionError, UnknownModel, WeightsMissing
from asr_serve.metrics import ServerMetrics, render_exposition
from asr_serve.models.registry import AsrCard, TtsCard
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, ModelEngine
from asr_serve.server.routes import models

ROUTE = "/v1/audio/transcriptions"
OTHER = "moonshine-base-en"


# --- engines, without HTTP ----------------------------------------------------------------------------


class Shelf:
    """Loads the one real engine under any name that its process knows; closing it is noted and not done."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.go = threading.Event()
        self.go.set()

    def open(self, name: str, config: ServeConfig) -> EngineParts:
        assert self.go.wait(WAIT_S)
        if name == "missing":
            raise WeightsMissing("no weights")
        self.opened.append(name)
        return self.parts._replace(card=self.parts.cards[name], client=Lent(self, name, self.parts.client))


class Lent:
    """The engine's client, but for `close`."""

    def __init__(self, shelf: Shelf, name: str, client: object) -> None:
        self._shelf, self._name, self._client = shelf, name, client
        self.state = "ready"

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def close(self) -> None:
        self._shelf.closed.append(self._name)


@pytest.fixture
def shelf(parts: EngineParts) -> Shelf:
    return Shelf(parts)


async def test_names_and_aliases(shelf):
    engines = EngineRegistry(ServeConfig(voice="none", aliases={"whisper-1": MODEL}), shelf.open)
    await engines.start()
    assert engines.get().name == engines.get(MODEL).name == engines.get("whisper-1").name == MODEL
    assert {MODEL, OTHER} <= set(engines.known_models())
    assert engines.state(OTHER) == "not_loaded"
    assert engines.aliases(MODEL) == ["whisper-1"]
    with pytest.raises(UnknownModel, match=f"did you mean '{MODEL}'"):
        engines.get("moonshine-tiny")
    with pytest.raises(ModelNotLoaded, match=f"/v1/models/{OTHER}/load"):
        engines.get(OTHER)
    await engines.close()
    assert shelf.closed == [MODEL]


async def test_while_it_loads_it_is_not_ready(shelf):
    engines = EngineRegistry(ServeConfig(voice="none", more_models=(OTHER,)), shelf.open)
    shelf.go.clear()
    starting = asyncio.create_task(engines.start())
    await asyncio.sleep(0.05)
    for name in (None, MODEL, OTHER, "anything"):
        with pytest.raises(EngineClosed, match="loading"):
            engines.get(name)
    shelf.go.set()
    await starting
    assert shelf.opened == [MODEL, OTHER]
    assert engines.get(OTHER).name == OTHER
    await engines.close()


async def test_a_folder_may_be_a_further_model(shelf):
    """A folder of a model that is loaded already is refused: requests name models, not folders."""
    folders = {"org/base": OTHER, "./tiny": MODEL}

    def open_place(name: str, config: ServeConfig) -> EngineParts:
        return shelf.open(folders.get(name, name), config)

    engines = EngineRegistry(ServeConfig(voice="none", more_models=("org/base",)), open_place)
    await engines.start()
    assert engines.get("org/base") is engines.get(OTHER)
    assert engines.get().name == MODEL
    await engines.close()
    shelf.closed.clear()
    engines = EngineRegistry(ServeConfig(voice="none", more_models=("./tiny",)), open_place)
    with pytest.raises(OptionError, match=rf"\./tiny holds the model {MODEL}, which is loaded already"):
        await engines.start()
    assert shelf.closed == [MODEL]
    assert engines.get().state == "ready"
    await engines.close()


async def test_places_are_bounded_and_loading_is_shared(shelf):
    engines = EngineRegistry(ServeConfig(voice="none", max_models=2), shelf.open)
    await engines.start()
    shelf.go.clear()
    both = asyncio.gather(engines.load(OTHER), engines.load(OTHER))
    await asyncio.sleep(0.05)
    assert engines.state(OTHER) == "loading"
    shelf.go.set()
    assert len(set(await both)) == 1
    assert shelf.opened == [MODEL, OTHER]
    await engines.close()

    engines = EngineRegistry(ServeConfig(voice="none", max_models=1), shelf.open)
    await engines.start()
    with pytest.raises(NotAllowed, match="max_models=1"):
        await engines.load(OTHER)
    await engines.unload(MODEL)
    assert engines.state(MODEL) == "not_loaded"


async def test_unloading_waits_for_requests(shelf):
    engines = EngineRegistry(ServeConfig(voice="none"), shelf.open)
    await engines.start()
    with engines.get().in_use():
        leaving = asyncio.create_task(engines.unload(MODEL))
        again = asyncio.create_task(engines.unload(MODEL))
        await asyncio.sleep(0.05)
        assert engines.state(MODEL) == "unloading"
        with pytest.raises(ModelNotLoaded):
            engines.get()
        assert shelf.closed == []
    await asyncio.wait_for(asyncio.gather(leaving, again), WAIT_S)
    assert shelf.closed == [MODEL]


async def test_models_of_a_pipeline_stay_while_it_is_still_loading(shelf, tmp_path):
    file = tmp_path / "both.toml"
    stage = '[[stage]]\nkind = "recognize"\nmodel = "{}"\n'
    file.write_text(stage.format(MODEL) + stage.format(OTHER) + 'when = "confidence < 0.9"\n')
    go = threading.Event()

    def open_held(name: str, config: ServeConfig) -> EngineParts:
        assert name == MODEL or go.wait(WAIT_S)
        return shelf.open(name, config)

    engines = EngineRegistry(ServeConfig(voice="none", pipeline=str(file)), open_held)
    starting = asyncio.create_task(engines.start())
    try:
        async with asyncio.timeout(WAIT_S):
            while engines.state(OTHER) != "loading":
                await asyncio.sleep(0.01)
        assert (engines.state(MODEL), engines.pipeline_state) == ("ready", "loading")
        with pytest.raises(NotAllowed, match=f"the pipeline both uses {MODEL}"):
            await engines.unload(MODEL)
    finally:
        go.set()
    await starting
    assert (engines.pipeline_state, shelf.closed) == ("ready", [])
    with pytest.raises(NotAllowed, match=f"the pipeline both uses {OTHER}"):
        await engines.unload(OTHER)
    await engines.close()


async def test_unloading_does_not_wait_for_ever(shelf):
    engines = EngineRegistry(ServeConfig(voice="none", drain_s=0), shelf.open)
    await engines.start()
    with engines.get().in_use():
        await asyncio.wait_for(engines.unload(MODEL), WAIT_S)
    assert shelf.closed == [MODEL]


async def test_a_restart_is_counted_once(parts, monkeypatch):
    """Two who ask for metrics at once meet between reading the count and writing it down."""
    metrics, engine = ServerMetrics("0"), ModelEngine(parts)
    meeting = threading.Barrier(2)

    class Slow(dict[str, int]):
        def get(self, what: str, missing: int = 0) -> int:
            found = super().get(what, missing)
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)
            return found

    monkeypatch.setattr(parts.client.backend._supervisor, "restarts", 1)
    engine._counted = Slow()
    await asyncio.gather(*(asyncio.to_thread(engine.observe, metrics) for _ in range(2)))
    assert metrics.registry.get_sample_value("asr_serve_engine_restarts_total", {"model": MODEL}) == 1


async def test_nothing_is_said_of_a_model_that_is_gone(shelf):
    engines, metrics = EngineRegistry(ServeConfig(voice="none"), shelf.open), ServerMetrics("0")

    def said() -> bool:
        return f'model="{MODEL}"' in render_exposition(metrics, []).decode()

    await engines.start()
    await engines.observe(metrics)
    assert said()
    await engines.unload(MODEL)
    await engines.observe(metrics)
    assert not said()


async def test_a_load_that_fails_leaves_its_place(shelf):
    engines = EngineRegistry(ServeConfig(voice="none", model="missing"), shelf.open)
    with pytest.raises(WeightsMissing):
        await engines.start()
    assert engines.describe() == {}


@pytest.mark.parametrize("quantization", ["auto", "none"])
async def test_evidence_is_of_the_arithmetic_that_runs(shelf, parts, tmp_path, quantization):
    """Not of the setting: it is the engine that knows whether it chose 8 bits for any layer."""
    shelf.parts = parts._replace(quantization=quantization)
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[[route]]\nname = "calls"\nstable = "{MODEL}"\n[route.requires]\ndataset = "calls"\n')
    governance = GovernanceConfig(policy=str(policy), audit_log=str(tmp_path / "audit.jsonl"))
    engines = EngineRegistry(ServeConfig(voice="none", governance=governance), shelf.open)
    await engines.start()
    assert engines.governor._models[MODEL].quantization == quantization
    router = models.routes(engines, admins=False)
    (find,) = [each.endpoint for each in router.routes if each.path.endswith("}") and each.methods == {"GET"}]
    assert json.loads((await find(MODEL)).body)["quantization"] == quantization
    await engines.close()


def test_an_engine_tells_whether_it_chose_8_bits(parts):
    ready = parts.client.backend.ready
    assert parts.quantization == ready.quantization
    assert ready.quantization == ready.device["quantize"]


# --- over HTTP --------------------------------------------------------------------------------------------


def test_models(server):
    found = server.openai().models.list()
    by_name = {model.id: model for model in found.data}
    assert {MODEL, OTHER} <= set(by_name)
    tiny = by_name[MODEL]
    assert (tiny.object, tiny.owned_by, tiny.state) == ("model", "UsefulSensors", "ready")
    assert tiny.created > 1_700_000_000
    assert (tiny.languages, tiny.aliases, tiny.licence) == (["en"], ["whisper-1"], "MIT")
    assert tiny.parameters > 20_000_000
    assert by_name[OTHER].state == "not_loaded"
    assert (tiny.streaming, tiny.heads, tiny.chunk_ms, tiny.lag_ms) == (False, [], None, None)
    streams = by_name["fastconformer-streaming-medium-en"]
    assert (streams.streaming, streams.heads) == (True, ["rnnt", "ctc"])
    assert (streams.chunk_ms, streams.lag_ms) == (160, 173)
    assert (tiny.hotwords, streams.hotwords) == (True, True)
    assert (tiny.words, streams.words, by_name["fun-asr-nano"].words) == (True, True, True)
    assert not by_name["glm-asr-nano"].words, "it has no head that aligns"
    assert not by_name["vosk-small-en"].hotwords, "its graph of words is fixed"


def test_one_model(server):
    client = server.openai()
    assert client.models.retrieve("whisper-1") == client.models.retrieve(MODEL)
    answer = server.http.get("/v1/models/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_alias_with_a_slash(serve):
    """As hubs name models: OpenAI's Python client sends the slash as it is, others encode it."""
    server = serve(aliases={"openai/whisper-large-v3": MODEL}, admin_keys=("boss",))
    assert server.openai().models.retrieve("openai/whisper-large-v3").id == MODEL
    assert server.http.get("/v1/models/openai%2Fwhisper-large-v3").json()["id"] == MODEL
    gone = server.http.get("/v1/models/openai/nobody")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    loaded = server.http.post("/v1/models/openai/whisper-large-v3/load", headers={"Authorization": "Bearer boss"})
    assert (loaded.status_code, loaded.json()["id"]) == (200, MODEL)


@pytest.mark.parametrize("verb", ["load", "unload", "renew"])
def test_not_without_an_admin_key(server, serve, verb):
    for headers, status in (({}, 401), ({"Authorization": "Bearer boss"}, 403)):
        answer = server.http.post(f"/v1/models/{MODEL}/{verb}", headers=headers)
        assert answer.status_code == status
        assert "admin_keys" in answer.json()["error"]["message"]
    locked = serve(api_keys=("user",), admin_keys=("boss",))
    answer = locked.http.post(f"/v1/models/{MODEL}/{verb}", headers={"Authorization": "Bearer user"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    assert locked.http.post(f"/v1/models/{MODEL}/{verb}").status_code == 401


def test_unload_and_load(serve_with: Callable[..., Running], wav):
    server = serve_with(admin_keys=("boss",))
    admin = {"Authorization": "Bearer boss"}
    loaded = server.http.post(f"/v1/models/{OTHER}/load", headers=admin)
    assert (loaded.status_code, loaded.json()["id"], loaded.json()["state"]) == (200, OTHER, "ready")
    assert server.http.get("/ready").json()["models"] == {MODEL: "ready", OTHER: "ready"}
    assert server.http.post("/v1/models/nobody/load", headers=admin).status_code == 404

    with Raw(server.port) as raw:  # a request that is under way is answered
        raw.head(ROUTE)
        raw.chunk(file_head() + wav(4))
        eventually(lambda: server.engines.get()._users == 1)
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(server.http.post(f"/v1/models/{MODEL}/unload", headers=admin))
        )
        thread.start()
        eventually(lambda: server.engines.state(MODEL) == "unloading")
        refused = server.http.post(ROUTE, files={"file": wav(1)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_loaded")
        raw.chunk(FILE_END + FORM_END)
        raw.end()
        status, _, body = raw.answer()
        assert (status, "best of times" in json.loads(body)["text"]) == (200, True)
        thread.join(WAIT_S)
    assert answers[0].json()["state"] == "not_loaded"
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (503, {OTHER: "ready"})
    assert "not loaded" in ready.json()["reason"]

    assert server.http.post(f"/v1/models/{OTHER}/unload", headers=admin).status_code == 200
    again = server.http.post(f"/v1/models/{MODEL}/load", headers=admin)  # also when it was the last one
    assert (again.status_code, again.json()["state"]) == (200, "ready")
    assert server.http.get("/ready").status_code == 200


def test_the_model_behind_the_file(serve_with: Callable[..., Running], wav):
    """The server's own cannot take it: which one is meant is known at the end."""
    server = serve_with(more_models=(OTHER,), admin_keys=("boss",))
    unloaded = server.http.post(f"/v1/models/{MODEL}/unload", headers={"Authorization": "Bearer boss"})
    assert unloaded.status_code == 200
    for behind, expected in (([("model", OTHER)], 200), ([], 404)):
        with Raw(server.port) as raw:
            raw.head(ROUTE)
            raw.chunk(file_head() + wav(4))
            time.sleep(0.2)  # longer than a short upload is waited for
            raw.chunk(FILE_END + b"".join(field(*each) for each in behind) + FORM_END)
            raw.end()
            assert raw.answer()[0] == expected


@pytest.fixture
def serve_with(shelf: Shelf):
    """Servers whose engines come from the shelf, so that they can be unloaded."""
    running: list[Running] = []

    def start(**settings: object) -> Running:
        running.append(Running(ServeConfig(voice="none", engine=EngineConfig(), **settings), shelf.open))
        return running[-1]

    yield start
    for server in running:
        server.stop()


def test_health_and_readiness(server):
    health = server.http.get("/health").json()
    assert (health["status"], health["version"]) == ("ok", __version__)
    assert health["uptime_s"] > 0
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "models": {MODEL: "ready"}})


def test_metrics(server, beckett):
    server.http.post(ROUTE, files={"file": beckett.read_bytes()})
    text = server.http.get("/metrics").text
    for line in (
        'asr_serve_engine_up{model="moonshine-tiny-en"} 1.0',
        'asr_serve_ring_slots{model="moonshine-tiny-en"} 1024.0',
        'asr_serve_requests_total{method="POST",route="/v1/audio/transcriptions",status="200"}',
        'asr_serve_step_seconds_count{model="moonshine-tiny-en",stage="decode"}',
        f'asr_serve_build_info{{version="{__version__}"}} 1.0',
    ):
        assert line in text
    assert server.counted("asr_serve_upload_audio_seconds_total", route=ROUTE) >= 9.9
    assert server.counted("asr_serve_first_text_seconds_count", route=ROUTE) >= 1
    assert server.counted("asr_serve_real_time_factor_count", route=ROUTE) >= 1
    assert server.counted("asr_serve_upload_bytes_total", route=ROUTE) > 300_000


def test_switched_off(serve):
    server = serve(docs=False, metrics=False)
    for path in ("/docs", "/openapi.json", "/metrics"):
        assert server.http.get(path).status_code == 404


def test_the_document_is_whole(server):
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        ROUTE, "/v1/audio/translations", "/asr", "/detect-language", "/inference",
        "/v1/audio/speech", "/v1/audio/voices",
        *(path for path in document["paths"] if path.startswith("/v1/voices")),  # in test_schema
        "/v1/models", "/v1/models/{model}", "/v1/models/{model}/load", "/v1/models/{model}/unload",
        "/v1/models/{model}/renew", "/v1/listen", "/v1/speak",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
        "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel",
        "/v1/key", "/v1/keys", "/v1/evaluations", "/v1/evaluations/{run_id}", "/v1/evaluations/{run_id}/audio",
        "/health", "/ready", "/metrics", "/v1/stream/{session_id}/flush", "/v1/stream/{session_id}/end",
    }  # fmt: skip
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names
    form = document["paths"][ROUTE]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file"]
    assert {"file", "model", "stream", "include[]", "chunking_strategy[type]"} <= set(form["properties"])
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"]
            assert operation["tags"]
            assert ("security" in operation) == (path not in ("/health", "/ready"))
    assert "./openapi.json" in server.http.get("/docs").text


def test_a_card_says_what_the_list_needs(parts):
    assert all(isinstance(card, AsrCard | TtsCard) and card.name for card in parts.cards.values())
    assert {VOICE, "fastpitch-en"} <= {card.name for card in parts.cards.values() if isinstance(card, TtsCard)}
