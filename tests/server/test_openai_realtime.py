"""OpenAI Realtime over the real server with real speech, through the unmodified SDK; raw sockets where it cannot
say what is to be tested. Every event is held against the SDK's types."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import soxr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai_checked import PARTIAL, checked
from running_server import WAIT_S, Running, eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from asr_serve.audio.pcm import alaw_table, mulaw_table
from asr_serve.audio.reader import open_audio
from asr_serve.config import ServeConfig
from asr_serve.protocols.openai.realtime_client_events import CLIENT_EVENT_TYPES
from asr_serve.server.engine_registry import open_engine
from asr_serve.server.realtime.openai import endpoint
from asr_serve_tools.evaluate.wer import wer

PATH = "/v1/realtime"
ITEM, TRANSCRIPTION = "conversation.item", "conversation.item.input_audio_transcription"
DELTA, COMPLETED = f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"
PACKET_MS = 100
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
NAMES = ("whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe", "gpt-realtime-whisper")
ALIASES = dict.fromkeys(NAMES, "moonshine-tiny-en")
EXTRA = {"intent": "transcription"}


@pytest.fixture(scope="session")
def open_server(serve: Callable[..., Running]) -> Running:
    return serve(aliases=ALIASES)


@pytest.fixture
def server(open_server: Running) -> Iterator[Running]:
    """Of whatever a test does, nothing is left."""
    yield open_server
    open_server.expect_empty()


@pytest.fixture(scope="session")
def speech(beckett: Path) -> np.ndarray:
    """Ten seconds, and a pause. (n,) float32, 16 kHz"""
    return np.concatenate([*open_audio(beckett), np.zeros(16_000, np.float32)])


def pcm24(pcm: np.ndarray) -> bytes:
    return (np.clip(soxr.resample(pcm, 16_000, 24_000), -1, 1) * 32_767).astype("<i2").tobytes()


def companded(pcm: np.ndarray, table: np.ndarray) -> bytes:
    """The byte of the nearest value, at 8 kHz."""
    order = np.argsort(table)
    between = (table[order][1:] + table[order][:-1]) / 2
    return bytes(order[np.searchsorted(between, soxr.resample(pcm, 16_000, 8_000))].astype(np.uint8))


FORMATS: dict[str, tuple[Callable[[np.ndarray], bytes], int]] = {
    "audio/pcm": (pcm24, 48_000),
    "audio/pcmu": (lambda pcm: companded(pcm, mulaw_table()), 8_000),
    "audio/pcma": (lambda pcm: companded(pcm, alaw_table()), 8_000),
}
"""How speech becomes bytes, and how many a second has."""


def expect_beckett(*texts: str, errors: int = 2) -> None:
    """Cut at every pause, a word may be heard otherwise."""
    assert wer([BECKETT], [" ".join(texts)]).errors <= errors, texts


class Heard:
    """What a client has been told, held against the SDK's types and against what must always be."""

    def __init__(self, *, beta: bool = False) -> None:
        self.beta = beta
        self.events: list[dict[str, Any]] = []
        self.deltas: dict[str, str] = {}
        self.completed: dict[str, str] = {}
        self.committed: list[str] = []
        self._ids: set[str] = set()

    def take(self, text: str | bytes) -> dict[str, Any]:
        event = checked(json.loads(text), beta=self.beta)
        assert event["event_id"] not in self._ids
        self._ids.add(event["event_id"])
        self.events.append(event)
        item = event.get("item_id", "")
        match event["type"]:
            case "conversation.item.input_audio_transcription.delta":
                assert item not in self.completed
                self.deltas[item] = self.deltas.get(item, "") + event["delta"]
            case "conversation.item.input_audio_transcription.completed":
                assert item in self.committed
                assert item not in self.completed
                assert event["transcript"] == self.deltas.get(item, "")
                self.completed[item] = event["transcript"]
            case "input_audio_buffer.committed":
                assert event["previous_item_id"] == (self.committed[-1] if self.committed else None)
                self.committed.append(item)
        return event

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


class Talking:
    """The SDK's connection, and what came over it."""

    def __init__(self, line: Any, heard: Heard) -> None:
        self.line, self.heard = line, heard

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            return self.heard.take(await self.line.recv_bytes())

    async def until(self, done: Callable[[dict[str, Any]], object] | str) -> dict[str, Any]:
        meant = (lambda event: event["type"] == done) if isinstance(done, str) else done
        while not meant(event := await self.next()):
            pass
        return event

    async def until_completed(self, items: int = 1) -> list[str]:
        while len(self.heard.completed) < items:
            await self.next()
        return list(self.heard.completed.values())

    async def all_completed(self) -> list[str]:
        """Once audio has ended in a pause: all items that were begun."""
        await self.until_completed()
        begun = "input_audio_buffer.speech_started"
        with suppress(TimeoutError):
            while True:
                done = len(self.heard.completed) == len(self.heard.of(begun))
                async with asyncio.timeout(2.0 if done else WAIT_S):
                    self.heard.take(await self.line.recv_bytes())
        return list(self.heard.completed.values())

    async def pour(self, pcm: np.ndarray, form: str = "audio/pcm", pause_s: float = 0.0) -> None:
        code, bytes_per_s = FORMATS[form]
        data = code(pcm)
        step = bytes_per_s * PACKET_MS // 1_000
        for at in range(0, len(data), step):
            await self.line.input_audio_buffer.append(audio=base64.b64encode(data[at : at + step]).decode())
            await asyncio.sleep(pause_s)

    async def ask(self, **heard: Any) -> dict[str, Any]:
        await self.line.session.update(session={"type": "transcription", "audio": {"input": heard}})
        return (await self.until(lambda event: event["type"] in ("session.updated", "error"))) or {}


def _ws(server: Running) -> str:
    return server.url.replace("http", "ws", 1)


@asynccontextmanager
async def talking(server: Running, *, beta: bool = False, key: str = "none", **query: str) -> AsyncIterator[Talking]:
    """Through the SDK. The first event is read."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", websocket_base_url=f"{_ws(server)}/v1", api_key=key) as client:
        realtime: Any = client.beta.realtime if beta else client.realtime
        async with realtime.connect(model=query.pop("model", "gpt-4o-transcribe"), extra_query=EXTRA | query) as line:
            talk = Talking(line, Heard(beta=beta))
            created = await talk.next()
            assert created["type"] == ("transcription_session.created" if beta else "session.created")
            yield talk


class Raw:
    """A client that may say anything."""

    def __init__(self, line: ClientConnection) -> None:
        self.line, self.heard = line, Heard()

    def hear(self) -> dict[str, Any]:
        return self.heard.take(self.line.recv(WAIT_S))

    def ask(self, what: str | bytes) -> dict[str, Any]:
        self.line.send(what)
        return self.hear()

    def say(self, kind: str, **members: Any) -> None:
        self.line.send(json.dumps({"type": kind, **members}))

    def append(self, data: bytes) -> None:
        self.say("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def until(self, kind: str) -> dict[str, Any]:
        while (event := self.hear())["type"] != kind:
            pass
        return event

    def closed(self) -> int:
        try:
            while True:
                self.line.recv(WAIT_S)
        except ConnectionClosed as closed:
            return int(closed.rcvd.code) if closed.rcvd else 1_006


@contextmanager
def calling(server: Running, headers: dict[str, str] | None = None, **query: str) -> Iterator[Raw]:
    url = f"{_ws(server)}{PATH}?{urlencode(EXTRA | query)}"
    with connect(url, additional_headers=headers, max_size=None, open_timeout=WAIT_S) as line:
        yield Raw(line)


def refusal(caller: Raw) -> tuple[str, int]:
    """The code of the error that comes next, and what the socket is closed with."""
    return caller.until("error")["error"]["code"], caller.closed()


# --- turns ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
async def test_turns_are_items(server, speech, form):
    async with talking(server) as talk:
        updated = await talk.ask(format={"type": form}, transcription={"model": "gpt-4o-transcribe", "language": "en"})
        assert updated["session"]["audio"]["input"]["format"]["type"] == form
        await talk.pour(speech, form)
        texts = await talk.all_completed()
    expect_beckett(*texts, errors=2 if form == "audio/pcm" else 3)
    heard = talk.heard
    assert len(texts) >= 4
    starts = [event["audio_start_ms"] for event in heard.of("input_audio_buffer.speech_started")]
    ends = [event["audio_end_ms"] for event in heard.of("input_audio_buffer.speech_stopped")]
    assert all(start < end <= after for start, end, after in zip(starts, ends, [*starts[1:], 11_000], strict=True))
    assert 0 <= starts[0] < 500 < 8_000 < ends[-1] < 10_000
    for item, start, end in zip(heard.committed, starts, ends, strict=True):
        own = [e for e in heard.events if item in (e.get("item_id"), e.get("item", {}).get("id"))]
        assert [event["type"] for event in own if event["type"] != DELTA] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            f"{ITEM}.added",
            f"{ITEM}.done",
            COMPLETED,
        ]
        assert own[-1]["usage"] == {"type": "duration", "seconds": pytest.approx((end - start) / 1_000, abs=2e-3)}


async def test_turns_before(server, speech):
    """The SDK as it was: other names, other shapes."""
    async with talking(server, beta=True) as talk:
        await talk.line.transcription_session.update(
            session={
                "input_audio_format": "pcm16",
                "input_audio_transcription": {"model": "gpt-4o-transcribe", "language": "en", "prompt": ""},
                "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
            }
        )
        session = (await talk.until("transcription_session.updated"))["session"]
        assert session["turn_detection"]["silence_duration_ms"] == 400
        await talk.pour(speech)
        texts = await talk.all_completed()
    expect_beckett(*texts)
    assert f"{ITEM}.created" in talk.heard.kinds
    assert f"{ITEM}.added" not in talk.heard.kinds


@pytest.mark.slow
async def test_words_come_while_they_are_spoken(server, speech):
    async with talking(server, partials="true") as talk:
        await talk.ask(turn_detection={"type": "server_vad", "silence_duration_ms": 2_000})
        spoken = np.tile(speech[:-16_000], 2)
        for at in range(0, len(spoken), 48_000):
            await talk.pour(spoken[at : at + 48_000])
            if at < len(spoken) - 2 * 48_000:
                await talk.until(PARTIAL)
        first = talk.heard.of(DELTA)[0]
        assert first["item_id"] not in talk.heard.committed
        await talk.pour(np.zeros(40_000, np.float32))
        [text] = await talk.all_completed()
    assert len(talk.heard.of(DELTA)) > 2
    assert text.startswith("Ever tried")
    partials = [event["transcript"] for event in talk.heard.of(PARTIAL)]
    assert len(partials) > 3
    assert partials[0].startswith("Ever")


@pytest.mark.slow
async def test_no_partials_unless_asked_for(server, speech):
    async with talking(server) as talk:
        await talk.pour(speech, pause_s=0.01)
        await talk.all_completed()
    assert PARTIAL not in talk.heard.kinds


async def test_probabilities(server, speech):
    async with talking(server) as talk:
        include = ["item.input_audio_transcription.logprobs"]
        await talk.line.session.update(session={"type": "transcription", "include": include})
        assert (await talk.until("session.updated"))["session"]["include"] == include
        await talk.pour(speech)
        await talk.all_completed()
    for event in talk.heard.of(COMPLETED):
        assert "".join(each["token"] for each in event["logprobs"]) == event["transcript"]
        assert all(bytes(each["bytes"]).decode() == each["token"] for each in event["logprobs"])
        assert all(each["logprob"] <= 0 for each in event["logprobs"])


async def test_no_turn_model_no_semantic_vad(server, speech):
    wanted = {"type": "semantic_vad", "eagerness": "high"}
    loaded = server.engines.get().client.turn_model
    async with talking(server) as talk:
        answer = await talk.ask(turn_detection=wanted)
        if loaded is None:
            assert answer["error"]["code"] == "unsupported_option"
            assert "turn_model" in answer["error"]["message"]
        else:
            assert answer["session"]["audio"]["input"]["turn_detection"] == wanted
        await talk.pour(np.concatenate([speech, np.zeros(32_000, np.float32)]))
        expect_beckett(*await talk.all_completed())


# --- the client commits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [False, True])
async def test_the_client_commits(server, speech, beta):
    async with talking(server, beta=beta) as talk:
        if beta:
            await talk.line.transcription_session.update(session={"turn_detection": None})
        else:
            await talk.ask(turn_detection=None)
        for _ in range(2):
            await talk.pour(speech)
            await talk.line.input_audio_buffer.commit()
        texts = await talk.until_completed(2)
    for text in texts:
        expect_beckett(text)
    assert "input_audio_buffer.speech_started" not in talk.heard.kinds
    assert talk.heard.of(COMPLETED)[0]["usage"]["seconds"] == pytest.approx(len(speech) / 16_000, abs=0.1)


async def test_a_commit_in_the_middle_of_speech(server, speech):
    """Nothing is lost at it and nothing said twice, within what a cut costs."""
    half = 5 * 16_000
    async with talking(server, model="gpt-realtime-whisper") as talk:
        await talk.pour(speech[:half])
        await talk.line.input_audio_buffer.commit()
        await talk.pour(speech[half:])
        await talk.line.input_audio_buffer.commit()
        expect_beckett(*await talk.until_completed(2), errors=3)


async def test_what_is_cleared_is_forgotten(server, speech):
    async with talking(server) as talk:
        await talk.ask(turn_detection=None)
        await talk.line.input_audio_buffer.clear()
        assert (await talk.next())["type"] == "input_audio_buffer.cleared"
        await talk.pour(speech[: 3 * 16_000])
        await talk.line.input_audio_buffer.clear()
        await talk.until("input_audio_buffer.cleared")
        await talk.pour(speech)
        await talk.line.input_audio_buffer.commit()
        [text] = await talk.until_completed()
        expect_beckett(text)


async def test_a_commit_of_nothing(server, speech):
    async with talking(server) as talk:
        await talk.ask(turn_detection=None)
        for _ in range(2):
            await talk.line.send({"type": "input_audio_buffer.commit", "event_id": "mine"})
            told = (await talk.until("error"))["error"]
            assert (told["code"], told["event_id"]) == ("input_audio_buffer_commit_empty", "mine")
            await talk.pour(speech)
            await talk.line.input_audio_buffer.commit()
            await talk.until(COMPLETED)


async def test_the_client_commits_beside_turn_detection(server, speech):
    async with talking(server) as talk:
        await talk.pour(speech[:24_500])  # to the first pause
        await talk.line.input_audio_buffer.commit()
        assert await talk.until_completed() == ["Ever tried."]
        await talk.pour(np.zeros(16_000, np.float32))
        await talk.line.input_audio_buffer.commit()
        [_, silent] = await talk.until_completed(2)
        assert silent == ""
        await talk.pour(speech[: 16_000 // 2])
        await talk.until("input_audio_buffer.speech_started")
        await talk.line.input_audio_buffer.clear()
        await talk.pour(np.concatenate([np.zeros(16_000, np.float32), speech]))
        await talk.until("input_audio_buffer.cleared")
        await talk.until(lambda event: "better" in event.get("transcript", ""))
        # What voice activity still takes for speech behind the cut may be an item of its own.
        expect_beckett(*list(talk.heard.completed.values())[2:], errors=3)


# --- what changes in between --------------------------------------------------------------------------------


async def test_a_session_changes_while_it_is_heard(server, speech):
    """Format, turn detection and language; what was not committed is not lost, and time goes on."""
    async with talking(server) as talk:
        await talk.pour(speech)
        await talk.ask(format={"type": "audio/pcmu"}, turn_detection=None)
        first = dict(talk.heard.completed)
        expect_beckett(*first.values())
        await talk.pour(speech, "audio/pcmu")
        await talk.ask(transcription={"language": "en"})
        await talk.line.input_audio_buffer.commit()
        [text] = (await talk.until_completed(len(first) + 1))[len(first) :]
        expect_beckett(text, errors=3)
        await talk.pour(speech[:24_000], "audio/pcmu")
        await talk.ask(transcription={"language": None}, format={"type": "audio/pcma"})
        await talk.ask(format={"type": "audio/pcm"}, turn_detection={"type": "server_vad"})
        assert len(talk.heard.completed) == len(first) + 2
        await talk.pour(speech)
        started = await talk.until("input_audio_buffer.speech_started")
        assert 23_000 < started["audio_start_ms"] < 24_500
        await talk.until(COMPLETED)


def test_audio_cut_anywhere(server, speech):
    data = pcm24(speech)
    with calling(server, model="gpt-realtime-whisper") as caller:
        for at in range(0, len(data), 1_001):
            caller.append(data[at : at + 1_001])
        caller.append(b"")
        caller.say("input_audio_buffer.commit")
        expect_beckett(caller.until(COMPLETED)["transcript"])


async def test_the_same_settings_again_change_nothing(server, speech):
    """As livekit's plugin does with a socket from its pool, in the middle of speech."""
    heard = {
        "transcription": {"model": "gpt-4o-transcribe", "language": "en"},
        "turn_detection": {"type": "server_vad"},
    }
    async with talking(server) as talk:
        await talk.ask(**heard)
        await talk.pour(speech[:90_000])
        await talk.ask(**heard)
        await talk.pour(speech[90_000:])
        expect_beckett(*await talk.all_completed())


# --- what is refused ------------------------------------------------------------------------------------


def test_events_that_are_refused_change_nothing(server, speech):
    def event(kind: str, **members: Any) -> str:
        return json.dumps({"type": kind, "event_id": "mine", **members})

    def update(**members: Any) -> str:
        return event("session.update", session={"type": "transcription", **members})

    with calling(server) as caller:
        caller.until("session.created")
        for said, code, param in (
            ("{", "invalid_event", None),
            ("[]", "invalid_event", None),
            (b"\0\0", "invalid_event", None),
            ("{}", "missing_required_parameter", "type"),
            (event("session.updat"), "invalid_value", "type"),
            (event("response.create"), "invalid_value", "type"),
            (event("conversation.item.create", item={}), "invalid_value", "type"),
            (event("input_audio_buffer.append", audio="no base64"), "invalid_value", "audio"),
            (event("input_audio_buffer.commit"), "input_audio_buffer_commit_empty", None),
            (event("session.update", session={"type": "realtime"}), "unsupported_option", "session.type"),
            (event("session.update", session={}), "missing_required_parameter", "session.type"),
            (update(aduio={}), "unknown_parameter", "session.aduio"),
            (update(audio={"input": {"transcription": {"model": "whisper-9"}}}), "model_not_found", None),
            (update(audio={"input": {"transcription": {"language": "xx"}}}), "invalid_value", None),
        ):
            told = caller.ask(said)
            assert told["type"] == "error", said
            assert (told["error"]["code"], told["error"]["type"]) == (code, "invalid_request_error"), said
            assert param is None or told["error"]["param"] == param
            known = "mine" if isinstance(said, str) and "mine" in said else None
            assert told["error"]["event_id"] == known
            assert told["error"]["message"].count(".") >= 1
        caller.append(pcm24(speech))
        caller.until(COMPLETED)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
NAMES_SENT = st.sampled_from(
    ["type", "audio", "input", "format", "rate", "transcription", "turn_detection", "model", "threshold", "include"]
)
MEMBERS = st.recursive(
    LEAVES, lambda each: st.lists(each) | st.dictionaries(NAMES_SENT | st.text(), each), max_leaves=9
)
KINDS = st.sampled_from([*CLIENT_EVENT_TYPES, "response.create", ""])


def test_whatever_is_sent_is_answered_or_taken(server):
    """And the session goes on: the last word is answered, after anything."""
    with calling(server, {"OpenAI-Beta": "realtime=v1"}, model="gpt-4o-transcribe") as caller:
        caller.heard.beta = True  # so it is anyway, once a session of before is asked for
        caller.until("transcription_session.created")

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
        @given(KINDS, st.dictionaries(NAMES_SENT | st.just("session"), MEMBERS, max_size=4))
        def any_event(kind: str, members: dict[str, Any]) -> None:
            caller.line.send(json.dumps(members | {"type": kind}))
            caller.say("last", event_id="last")
            while caller.until("error")["error"]["event_id"] != "last":
                pass

        any_event()


def test_the_query_is_read_or_refused(server):
    for query, code in (
        ({"model": "whisper-9"}, "model_not_found"),
        ({"model": "moonshine-base-en"}, "model_not_loaded"),
        ({"intent": "conversation"}, "unsupported_option"),
        ({"partials": "some"}, "invalid_value"),
        ({"modle": "ash"}, "invalid_value"),
    ):
        with calling(server, **query) as caller:
            assert refusal(caller) == (code, 1_008), query


def test_an_event_too_large_is_dropped_and_the_session_goes_on(serve, speech):
    server = serve(max_frame_bytes=8_192)
    with calling(server) as caller:
        caller.until("session.created")
        caller.append(bytes(8_192))
        assert caller.hear()["error"]["code"] == "audio_too_large"
        data = pcm24(speech)
        for at in range(0, len(data), 4_800):
            caller.append(data[at : at + 4_800])
        caller.until(COMPLETED)
    server.expect_empty()


@pytest.mark.slow
def test_one_event_of_fifteen_megabytes(server, speech):
    """As much as OpenAI allows in one: it is taken piece by piece, and others are heard meanwhile."""
    data = pcm24(np.tile(speech, 20))[: 11 << 20]
    with calling(server) as caller, calling(server) as other:
        caller.until("session.created")
        caller.append(data)
        other.append(pcm24(speech))
        other.until(COMPLETED)
        caller.until(COMPLETED)
        seconds = len(data) / 48_000
        eventually(lambda: server.counted("asr_serve_live_audio_seconds_total", route=PATH) > seconds, wait_s=120)


def test_a_session_too_long_is_finished_and_closed(serve, speech):
    server = serve(max_session_s=4.0)
    with calling(server) as caller:
        expires_s = caller.until("session.created")["session"]["expires_at"]
        assert abs(expires_s - time.time()) < 6
        caller.append(pcm24(speech))
        assert refusal(caller) == ("session_expired", 1_008)
        assert set(caller.heard.completed) == set(caller.heard.committed)
        assert caller.heard.completed
    server.expect_empty()


# --- who may come in --------------------------------------------------------------------------------------


async def test_keys(serve):
    server = serve(api_keys=("s3cret",), aliases=ALIASES)
    with calling(server) as caller:
        assert refusal(caller) == ("invalid_api_key", 1_008)
    async with talking(server, key="s3cret"), talking(server, beta=True, key="s3cret"):
        pass
    url = f"{_ws(server)}{PATH}?intent=transcription"
    for key, code in (("s3cret", None), ("wr0ng", "invalid_api_key")):
        # As OpenAI's clients do in a browser, where a WebSocket brings no headers.
        offered: Any = ["realtime", f"openai-insecure-api-key.{key}", "openai-beta.realtime-v1"]
        with connect(url, subprotocols=offered) as line:
            assert line.subprotocol == "realtime"
            told = json.loads(line.recv(WAIT_S))
            assert told["type"] == ("transcription_session.created" if code is None else "error")
            assert code is None or told["error"]["code"] == code
    server.expect_empty()


def test_full(serve):
    server = serve(max_live_sessions=1)
    with calling(server) as one:
        one.until("session.created")
        with calling(server) as two:
            told = two.hear()["error"]
            assert (told["code"], told["type"], two.closed()) == ("at_capacity", "rate_limit_error", 1_013)
            assert told["retry_after_ms"] > 0
            assert str(told["retry_after_ms"]) in told["message"]
    server.expect_empty()


# --- how it ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["idle", "speaking", "committed"])
def test_a_client_that_is_gone_leaves_nothing(server, speech, when):
    for _ in range(4):
        with calling(server) as caller:
            caller.until("session.created")
            if when == "committed":
                turns = {"audio": {"input": {"turn_detection": None}}}
                caller.say("session.update", session={"type": "transcription", **turns})
            if when != "idle":
                caller.append(pcm24(speech))
            if when == "committed":
                caller.say("input_audio_buffer.commit")
            caller.line.socket.shutdown(2)
    server.expect_empty()


@pytest.mark.slow
def test_a_client_that_says_nothing(serve, speech):
    server = serve(session_idle_s=1.0)
    with calling(server) as caller:
        assert refusal(caller) == ("idle_timeout", 1_008)
    with calling(server, model="moonshine-tiny-en") as caller:
        caller.append(pcm24(speech))
        assert refusal(caller) == ("idle_timeout", 1_008)
        expect_beckett(*caller.heard.completed.values())
    server.expect_empty()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "drain"])
def test_an_engine_that_is_gone_when_a_session_ends(how):
    """A silent caller learns of it when the last samples of all are put: nobody waits for ever."""
    server = Running(ServeConfig(engine_threads=1, session_idle_s=5.0 if how == "idle" else 60.0), open_engine)
    with calling(server) as caller:
        caller.append(bytes(2 * 24_000 * 480 // 1_000))  # whole windows, with what the resampler holds
        eventually(lambda: server.counted("asr_serve_live_audio_seconds_total", route=PATH) > 0.4)
        time.sleep(0.5)  # until voice activity has answered, and nothing is under way
        server.engines.get().client.close()

        async def drain() -> None:
            server.gate.drain()

        if how == "drain":
            server.call(drain())
        with suppress(ConnectionClosed):
            while caller.until("error")["error"]["code"] != "engine_closed":
                pass
        assert caller.closed() == 1_013
    eventually(lambda: not server.gate.in_flight_requests)
    server.stop()


@pytest.mark.slow
def test_what_was_not_committed_is_told_at_the_end(serve, speech):
    """Also when its caller is over, since the session changed."""
    server = serve(session_idle_s=1.0, aliases=ALIASES)
    for change in (False, True):
        with calling(server, model="gpt-realtime-whisper") as caller:
            caller.append(pcm24(speech))
            if change:
                heard = {"audio": {"input": {"format": {"type": "audio/pcma"}}}}
                caller.say("session.update", session={"type": "transcription", **heard})
            assert refusal(caller) == ("idle_timeout", 1_008)
            expect_beckett(*caller.heard.completed.values())
    server.expect_empty()


@pytest.mark.parametrize("manual", [False, True])
def test_who_drains_tells_finishes_and_closes(serve, speech, manual):
    server = serve(aliases=ALIASES)
    model = "gpt-realtime-whisper" if manual else "gpt-4o-transcribe"
    with calling(server) as idle, calling(server, model=model) as caller:
        idle.until("session.created")
        caller.append(pcm24(speech[:-16_000]))
        eventually(lambda: server.counted("asr_serve_live_audio_seconds_total", route=PATH) > 9.9)

        async def drain() -> None:
            server.gate.drain()

        server.call(drain())
        assert refusal(idle) == ("draining", 1_012)
        assert caller.until("error")["error"]["code"] == "draining"
        with suppress(ConnectionClosed):
            while True:
                caller.hear()
        assert caller.closed() == 1_012
        expect_beckett(*caller.heard.completed.values())
    server.expect_empty()


def test_who_waits_no_longer_breaks_off(serve):
    server = serve()
    with calling(server) as caller:
        caller.until("session.created")

        async def break_off() -> None:
            server.gate.cancel_all()

        server.call(break_off())
        assert refusal(caller) == ("draining", 1_012)
    server.expect_empty()


@pytest.mark.slow
def test_a_client_that_never_reads_is_dropped(server, speech, monkeypatch):
    monkeypatch.setattr(endpoint, "OUTBOX_SEND_TIMEOUT_S", 1.0)
    gone = server.counted("asr_serve_live_sessions_total", route=PATH, end="client_gone")
    url = _ws(server) + PATH
    with connect(url, max_queue=1, ping_interval=None, close_timeout=1) as deaf:
        deaf.socket.settimeout(WAIT_S)
        wrong = json.dumps({"type": "x" * 50, "event_id": "i" * 500})
        with suppress(ConnectionClosed):
            for _ in range(200_000):  # answers of some 700 bytes each: more than all buffers between us
                deaf.send(wrong)
        eventually(lambda: server.counted("asr_serve_live_sessions_total", route=PATH, end="client_gone") == gone + 1)
    server.expect_empty()


# --- what is told of it -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.one_server("an ingress tells the metrics of its replicas too, and logs in its own process")
async def test_metrics_and_one_line(serve, speech, caplog):
    caplog.set_level("INFO", "asr_serve.access")
    server = serve(api_keys=("k1",), aliases=ALIASES)
    async with talking(server, key="k1") as talk:
        assert server.counted("asr_serve_live_open_sessions", route=PATH) == 1
        await talk.pour(speech, pause_s=0.01)
        await talk.all_completed()
    await asyncio.to_thread(
        eventually, lambda: server.counted("asr_serve_live_sessions_total", route=PATH, end="done") == 1
    )
    assert server.counted("asr_serve_live_audio_seconds_total", route=PATH) == pytest.approx(11, abs=0.1)
    assert server.counted("asr_serve_live_final_seconds_count", route=PATH) >= 4
    [line] = [record for record in caplog.records if getattr(record, "ended", None) == "done"]
    assert (line.method, line.route, line.status, line.client) == ("WEBSOCKET", PATH, 101, "key-1")
    assert (line.model, line.audio_ms) == ("moonshine-tiny-en", pytest.approx(11_000, abs=100))
