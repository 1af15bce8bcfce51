"""/v1/audio/speech/stream: text goes in while it is written, sound comes out while it is said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from running_server import MODEL, VOICE, WAIT_S, Running, eventually
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

PATH = "/v1/audio/speech/stream"
TOKENS = ["Ever", " tri", "ed.", " Ever fail", "ed.", " No", " matter."]
TEXT = "".join(TOKENS)
LONG = " ".join(f"This is sentence number {n}, and there are many more of its kind to come." for n in range(1, 200))


class Line:
    """A client."""

    def __init__(self, server: Running, query: str = "", **options: Any) -> None:
        url = f"{server.url.replace('http', 'ws')}{PATH}{query}"
        self._connecting = connect(url, max_size=None, close_timeout=1, **options)
        self.sound = b""

    def __enter__(self) -> Line:
        self.socket: ClientConnection = self._connecting.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def say(self, kind: str, **members: object) -> None:
        self.socket.send(json.dumps({"type": kind, **members}))

    def write(self, *texts: str) -> None:
        for text in texts:
            self.say("text", text=text)

    def next(self) -> dict[str, Any] | bytes:
        message = self.socket.recv(WAIT_S)
        if isinstance(message, bytes):
            self.sound += message
            return message
        return dict(json.loads(message))

    def until(self, kind: str) -> dict[str, Any]:
        """The next event of that type; sound before it is kept."""
        while True:
            told = self.next()
            if isinstance(told, dict):
                if told["type"] == kind:
                    return told
                assert told["type"] not in ("error", "done"), told

    def closed(self) -> tuple[int, list[dict[str, Any]]]:
        """The close code, and the events before it."""
        told = []
        try:
            while True:
                if isinstance(event := self.next(), dict):
                    told.append(event)
        except ConnectionClosed as end:
            return end.rcvd.code if end.rcvd else 1_006, told


def heard(server: Running, line: Line, rate_hz: int = 24_000) -> str:
    from test_speech_routes import as_wav, transcribed

    return transcribed(server, as_wav(line.sound, rate_hz))


def test_tokens_are_spoken_as_they_come(speaker):
    with Line(speaker) as line:
        line.say("start", voice="alloy", instructions="Whisper.")
        started = line.until("started")
        assert started == {
            "type": "started",
            "model": VOICE,
            "voice": "heart",
            "format": "pcm",
            "sample_rate": 24_000,
            "ignored": ["instructions"],
        }
        line.write(*TOKENS[:4])
        sentence = line.until("sentence")  # while the text goes on
        assert [word["word"] for word in sentence["words"]] == ["Ever", "tried."]
        assert (sentence["index"], sentence["start"]) == (0, 0.0)
        assert np.frombuffer(line.next(), "<i2") is not None
        line.write(*TOKENS[4:])
        line.say("end")
        done = line.until("done")
        assert (done["reason"], done["sentences"], done["characters"]) == ("end", 3, len(TEXT))
        assert done["seconds"] == len(line.sound) / 2 / 24_000
        assert heard(speaker, line) == "ever tried ever failed no matter"


def test_a_flush_says_what_is_here(speaker):
    with Line(speaker) as line:
        line.say("start", words=False)
        line.until("started")
        line.write("Ever tried and")
        line.say("flush", id="one")
        line.write(" ever failed")
        line.say("flush", id="two")
        first = line.until("flushed")
        assert (first["id"], first["seconds"]) == ("one", len(line.sound) / 2 / 24_000)
        before = len(line.sound)
        assert before > 24_000 // 2
        second = line.until("flushed")
        assert (second["id"], second["seconds"]) == ("two", len(line.sound) / 2 / 24_000)
        assert len(line.sound) > before
        line.say("flush", id="three")  # nothing to say
        assert line.until("flushed")["seconds"] == second["seconds"]
        line.say("end")
        assert line.until("done")["sentences"] == 2


def test_cancel_stops_at_once_and_another_may_start(speaker):
    with Line(speaker) as line:
        line.say("start")
        line.write(LONG)
        line.until("sentence")
        line.say("cancel")
        done = line.until("done")
        assert done["reason"] == "cancelled"
        assert done["seconds"] < 60
        eventually(lambda: speaker.held()["requests"] == 0)
        line.say("cancel")  # who speaks between cannot know that it was over
        line.sound = b""
        line.say("start", format="wav", sample_rate=16_000)
        line.until("started")
        line.write(TEXT)
        line.say("end")
        assert line.until("done")["reason"] == "end"
        assert line.sound[:4] == b"RIFF"
        assert int.from_bytes(line.sound[24:28], "little") == 16_000


def test_a_speech_without_text(speaker):
    with Line(speaker) as line:
        line.say("start")
        line.write("", " ", "\U0001f600")
        line.say("end")
        line.until("started")
        done = line.until("done")
        assert (done["reason"], done["seconds"], done["sentences"]) == ("end", 0.0, 0)


def test_the_same_as_the_post(speaker):
    with Line(speaker) as line:
        line.say("start", seed=3, speed=1.2)
        line.write("It was the best of times.")
        line.say("end")
        line.until("done")
    asked = {"input": "It was the best of times.", "seed": 3, "speed": 1.2, "response_format": "pcm"}
    assert speaker.http.post("/v1/audio/speech", json=asked).content == line.sound


# --- what is no good ----------------------------------------------------------------------------------


def refused(line: Line) -> str:
    told = line.next()
    while not (isinstance(told, dict) and told["type"] == "error"):
        told = line.next()
    assert told["message"]
    return str(told["code"])


def test_mistakes_change_nothing(speaker):
    with Line(speaker) as line:
        for kind in ("text", "flush", "end"):
            line.say(kind)
            assert refused(line) == "out_of_turn"
        line.socket.send(b"\0\0")
        assert refused(line) == "malformed_request"
        line.say("stop")
        assert refused(line) == "unknown_command"
        for members, code in (
            ({"voice": "nobody"}, "unknown_voice"),
            ({"model": "tts-9"}, "model_not_found"),
            ({"model": MODEL}, "wrong_model"),
            ({"format": "ogg"}, "option_error"),
            ({"ssml": True}, "unsupported_option"),
        ):
            line.say("start", **members)
            assert refused(line) == code
        line.say("start")
        line.until("started")
        line.say("start")
        assert refused(line) == "out_of_turn"
        line.write("Ever tried. ", "Привет. ", "No matter.")
        assert refused(line) == "unsupported_script"
        line.say("end")
        line.until("done")
        line_heard = heard(speaker, line)
        assert line_heard.startswith("ever tried")
        assert line_heard.endswith("no matter")


def test_text_that_waits_is_bounded(serve_voice):
    server = serve_voice(max_characters=1_000)
    with Line(server) as line:
        line.say("start")
        line.until("started")
        line.write(*["A few more words to be said. " * 30] * 40)
        assert refused(line) == "text_too_long"
        line.say("cancel")
        while not (isinstance(told := line.next(), dict) and told["type"] == "done"):
            pass
    server.expect_empty()


# --- who comes and goes -------------------------------------------------------------------------------


def test_a_client_that_leaves_ends_the_work(speaker):
    with Line(speaker) as line:
        line.say("start")
        line.write(LONG)
        line.until("sentence")
    speaker.expect_empty()
    eventually(lambda: speaker.counted("asr_serve_live_sessions_total", route=PATH, end="client_gone"))


def test_a_speech_holds_a_place(serve_voice):
    server = serve_voice(max_concurrent=1, max_live_sessions=2)
    with Line(server) as one, Line(server) as two:
        one.say("start")
        one.until("started")
        two.say("start")
        assert refused(two) == "at_capacity"
        with Line(server) as three:
            code, told = three.closed()
            assert (code, told[0]["code"]) == (1_013, "at_capacity")
        one.say("cancel")
        one.until("done")
        two.say("start")
        two.until("started")
    server.expect_empty()


def test_who_says_nothing_is_told_and_closed(serve_voice):
    server = serve_voice(session_idle_s=0.3)
    with Line(server) as line:
        line.say("start")
        line.until("started")
        line.write("Ever tried.")
        code, told = line.closed()
        assert code == 1_008
        assert [each["type"] for each in told] == ["sentence", "done", "error"]
        assert told[-1]["code"] == "idle_timeout"
        assert line.sound
    server.expect_empty()


def test_a_server_that_goes_down_finishes_the_speech(serve_voice):
    server = serve_voice()
    with Line(server) as line:
        line.say("start")
        line.write(TEXT)
        line.until("sentence")
        server.loop.call_soon_threadsafe(server.gate.drain)
        code, told = line.closed()
        assert code == 1_012
        assert [each["code"] for each in told if each["type"] == "error"] == ["draining"]
        assert told[-1]["reason"] == "end"
    server.expect_empty()


def test_keys_and_queries(serve_voice):
    server = serve_voice(api_keys=("k-speak",))
    with Line(server) as line:
        code, told = line.closed()
        assert (code, told[0]["code"]) == (1_008, "invalid_api_key")
    with Line(server, "?api_key=k-speak") as line:
        line.say("start")
        line.until("started")
    with Line(server, "?api_key=k-speak&api_kye=a") as line:
        code, told = line.closed()
        assert (code, told[0]["param"]) == (1_008, "api_kye")


@pytest.mark.parametrize("form", ["mp3", "opus", "flac"])
def test_other_formats(speaker, form):
    with Line(speaker) as line:
        line.say("start", format=form)
        line.write(TEXT)
        line.say("end")
        line.until("done")
    from test_speech_routes import transcribed

    assert transcribed(speaker, line.sound) == "ever tried ever failed no matter"
