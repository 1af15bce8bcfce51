"""A server with a model that hears and one that speaks: each is asked for what it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import MODEL, WAIT_S, Running

from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.errors import ModelNotLoaded, WeightsMissing, WrongModel
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, open_engine
from asr_serve.server.run import _announce
from asr_serve.types import PhonemeSpan, Sentence

VOICE = "hibari"


@pytest.fixture(scope="module")
def speaking() -> Iterator[EngineParts]:
    try:
        store.verified_published_folder(tts_card(VOICE))
    except WeightsMissing as missing:
        pytest.skip(str(missing))
    made = open_engine(VOICE, ServeConfig(engine_threads=1, engine=EngineConfig(prefix_bytes=0)))
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def both(parts: EngineParts, speaking: EngineParts) -> Iterator[Running]:
    config = ServeConfig(more_models=(VOICE,), voice="none", aliases={"tts-1": VOICE})
    server = Running(config, lambda name, config: speaking if name == VOICE else parts)
    yield server
    server.stop()


def test_models_tell_which_of_them_speak(both: Running) -> None:
    found = {entry["id"]: entry for entry in both.http.get("/v1/models").json()["data"]}
    assert (found[VOICE]["state"], found[VOICE]["speaks"], found[VOICE]["voices"]) == ("ready", True, ["heart"])
    assert (found[MODEL]["state"], found[MODEL]["speaks"], found[MODEL]["voices"]) == ("ready", False, [])
    assert both.http.get("/v1/models/tts-1").json()["aliases"] == ["tts-1"]
    ready = both.http.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {MODEL: "ready", VOICE: "ready"})
    assert f'asr_serve_spoken_seconds_total{{model="{VOICE}"}}' in both.http.get("/metrics").text


def test_a_model_that_speaks_transcribes_nothing(both: Running, cities: Path) -> None:
    with cities.open("rb") as file:
        asked = both.http.post("/v1/audio/transcriptions", files={"file": file}, data={"model": VOICE})
    assert asked.status_code == 400
    assert asked.json()["error"]["code"] == "wrong_model"
    assert "hibari synthesizes speech, and does not recognize it" in asked.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "code", "came"),
    [
        ({"model": "hibary"}, "model_not_found", "did you mean 'hibari'?"),
        ({"model": MODEL}, "wrong_model", "a speech synthesis model: hibari"),
    ],
)
def test_errors_of_a_synthesis_request_list_models_that_synthesize(
    both: Running, body: dict[str, str], code: str, came: str
) -> None:
    error = both.http.post("/v1/audio/speech", json={"input": "Hello.", **body}).json()["error"]
    assert (error["code"], error["param"]) == (code, "model")
    assert came in error["message"]
    assert "whisper" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "code", "came"),
    [
        ({"model": "moonshine-tiny"}, "model_not_found", f"did you mean {MODEL!r}?"),
        ({"model": "tts-1"}, "wrong_model", f"a recognition model: {MODEL}."),
        ({"model": "kokoro"}, "wrong_model", f"a recognition model: {MODEL}."),
        ({"model": "whisper-tiny"}, "model_not_loaded", f"loaded: {MODEL}."),
    ],
)
def test_errors_of_a_transcription_list_models_that_recognize(
    both: Running, cities: Path, fields: dict[str, str], code: str, came: str
) -> None:
    for last in (False, True):  # the field before the file, and after it
        parts = [("file", ("a.wav", cities.read_bytes()[:64_000])), *((name, (None, v)) for name, v in fields.items())]
        answer = both.http.post("/v1/audio/transcriptions", files=parts if last else parts[::-1])
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, "model")
        assert came in error["message"]
        assert "hibari," not in error["message"]


def test_engines_find_who_speaks_and_who_hears(both: Running) -> None:
    engines = both.engines
    assert engines.get().name == MODEL
    assert engines.get_tts().name == engines.get_tts("tts-1").name == VOICE
    assert engines.get_any(VOICE).is_tts
    with pytest.raises(WrongModel, match="hibari synthesizes"):
        engines.get(VOICE)
    with pytest.raises(WrongModel, match=f"{MODEL} recognizes speech"):
        engines.get_tts(MODEL)
    with pytest.raises(WrongModel):
        _ = engines.get_tts().tokenizer
    sound: list[bytes] = []
    ticket = engines.get_tts().client.synthesize(
        Sentence((PhonemeSpan("həlˈO"),), "heart"), lambda piece: sound.append(piece.pcm)
    )
    assert ticket.future.result(WAIT_S) == len(b"".join(sound)) // 2


async def test_the_servers_voice_is_loaded_beside_its_models(parts: EngineParts, speaking: EngineParts) -> None:
    opened = []

    def opening(name: str, config: ServeConfig) -> EngineParts:
        opened.append(name)
        return speaking if name in ("auto", VOICE) else parts

    engines = EngineRegistry(ServeConfig(max_models=1), opening)
    await engines.start()
    assert opened == [MODEL, "auto"]
    assert engines.get_tts().name == VOICE
    # A name that leaves the choice to the server, not that of the voice of this name.
    assert (engines.get("auto").name, engines.get_tts("auto").name) == (MODEL, VOICE)
    assert engines.describe() == {MODEL: "ready", VOICE: "ready"}
    assert (await engines.load(VOICE)).name == VOICE


@pytest.mark.parametrize("voice", ["auto", VOICE])
async def test_a_voice_that_is_there_already_is_not_loaded_again(
    parts: EngineParts, speaking: EngineParts, voice: str
) -> None:
    opened = []

    def opening(name: str, config: ServeConfig) -> EngineParts:
        opened.append(name)
        return speaking if name == VOICE else parts

    engines = EngineRegistry(ServeConfig(more_models=(VOICE,), voice=voice), opening)
    await engines.start()
    assert opened == [MODEL, VOICE]
    assert engines.get_tts().name == VOICE


@pytest.mark.parametrize("model", [MODEL, VOICE])
def test_who_starts_it_is_told_what_it_can(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _announce(ServeConfig(model=model, port=9_000), [9_000], 1.0, VOICE, None)
    told = capsys.readouterr()
    said = told.out + told.err
    assert "/v1/audio/speech -d" in said
    assert ("/v1/audio/transcriptions" in said) == ("/v1/realtime" in said) == (model == MODEL)
    assert ("http://127.0.0.1:9000/speak" in said) == (model == VOICE)


async def test_without_a_voice_on_this_machine_nothing_speaks(parts: EngineParts) -> None:
    def opening(name: str, config: ServeConfig) -> EngineParts:
        if name != MODEL:
            raise WeightsMissing(f"the weights of {name} are not on this machine")
        return parts

    engines = EngineRegistry(ServeConfig(), opening)
    await engines.start()
    with pytest.raises(ModelNotLoaded, match="start the server with --voice"):
        engines.get_tts()
    with pytest.raises(WeightsMissing):
        await EngineRegistry(ServeConfig(voice=VOICE), opening).start()
