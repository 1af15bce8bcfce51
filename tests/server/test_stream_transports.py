"""/v1/stream over WebSocket, HTTP/1.1 and HTTP/2: the same words while they are spoken, and every byte arrives."""

from __future__ import annotations

import io
import json
import random
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import av
import numpy as np
import pytest
import soxr
from children import Child
from running_server import WAIT_S, Running, eventually
from stream_client import (
    TRANSPORTS,
    Event,
    Http1,
    Http2,
    Line,
    WebSocket,
    expect_sound,
    numbered,
    pcm_of,
    pour,
    segments,
    whole,
)
from test_funasr_websocket import STARTED, calling

from asr_serve.audio.pcm import alaw_table, decode_pcm16, mulaw_table

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."


@pytest.fixture(scope="module")
def beckett_pcm(beckett):
    return pcm_of(beckett)


@pytest.fixture(scope="module")
def cities_pcm(cities):
    return pcm_of(cities, 30)


@pytest.fixture(params=TRANSPORTS, ids=lambda kind: kind.__name__)
def transport(request):
    return request.param


def received(events) -> int:
    return max(event["received_bytes"] for event in events if "received_bytes" in event)


def acknowledged_s(line: Line) -> float:
    return max((event["received_s"] for event in line.events if event["type"] == "ack"), default=0.0)


def partials(line: Line) -> list[str]:
    return [event["text"] for event in line.events if event["type"] == "partial"]


def test_words_come_while_they_are_spoken(server: Running, beckett_pcm, transport: type[Line]):
    with transport(server.port) as line:
        opened = line.hear("session")  # before a byte was sent
        assert len(opened["session_id"]) == 32
        assert {**opened, "session_id": ""} == {
            "type": "session",
            "session_id": "",
            "resumed": False,
            "model": "moonshine-tiny-en",
            "language": "en",
            "encoding": "s16le",
            "rate_hz": 16_000,
            "received_bytes": 0,
            "last_seq": 0,
            "resume_s": 60.0,
        }
        for second in range(10):
            pour(line, beckett_pcm[32_000 * second : 32_000 * (second + 1)])
            if second < 9:
                line.until(lambda second=second: acknowledged_s(line) > second)
            if second in (2, 4, 6):  # between are whole words
                line.until(lambda most=second / 2: len(partials(line)) >= most)
        before = list(line.events)
        line.end()
        events = line.rest()
    assert {"turn", "partial", "ack"} <= {event["type"] for event in before}
    expect_sound(events)
    assert segments(events) == [(0.102, 9.146, BECKETT)]
    states = [event["state"] for event in events if event["type"] == "turn"]
    assert states == ["started", "stopped", "ended"]
    assert events[-1] == {"type": "end", "seq": len(numbered(events)), "duration_s": 9.963375, "segments": 1}
    acks = [event for event in events if event["type"] == "ack"]
    assert all(b["received_s"] - a["received_s"] <= 1.3 for a, b in pairwise(acks))
    assert acks[-1]["received_bytes"] == received(events) == len(beckett_pcm)
    assert len(set(partials(line))) > 2


@pytest.mark.slow
def test_all_say_what_the_other_protocol_says(server: Running, cities_pcm):
    with calling(server) as caller:
        assert caller.ask("START") == STARTED
        caller.pour(cities_pcm)
        caller.send("STOP")
        final = caller.until_stopped()[-2]["sentences"]
    assert len(final) >= 2
    heard = []
    for kind in TRANSPORTS:
        with kind(server.port) as line:
            events = whole(line, cities_pcm, 32_000)
        expect_sound(events)
        assert any(event["type"] == "locked" for event in events)
        heard.append(segments(events))
    assert heard[0] == heard[1] == heard[2]
    assert [(round(1_000 * a), round(1_000 * b), text) for a, b, text in heard[0]] == [
        (sentence["start"], sentence["end"], sentence["text"]) for sentence in final
    ]


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives(server: Running, beckett_pcm, transport: type[Line], seed: int):
    """Cut anywhere, in bursts and with pauses, in the middle of samples too."""
    rng = random.Random(seed)
    pcm = beckett_pcm[: rng.randrange(50_000, 160_000)]
    with transport(server.port) as line:
        at = 0
        while at < len(pcm):
            size = rng.choice((1, 3, 77, 1_001, 4_096, 20_000, 70_000))
            line.send(pcm[at : at + size])
            at += size
            if rng.random() < 0.3:
                time.sleep(rng.choice((0.0, 0.005, 0.05)))
            while line.poll():
                pass
        line.end()
        events = line.rest()
    expect_sound(events)
    assert received(events) == len(pcm)
    assert events[-1]["duration_s"] == len(pcm) // 2 / 16_000
    odd = [event["code"] for event in events if event["type"] == "error"]
    assert odd == (["malformed_request"] if len(pcm) % 2 else [])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
def test_curl_sends_and_reads_at_once(server: Running, beckett_pcm, version: str):
    """The body comes out of a pipe that is filled slowly; events come before it is full."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-sN", "-T", "-", version, "-X", "POST", f"{server.url}/v1/stream"]
    said: list[Event] = []
    with Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as curl:
        assert curl.stdin
        assert curl.stdout

        def read() -> None:
            assert curl.stdout
            for text in curl.stdout:
                if text.startswith(b"data: "):
                    said.append(json.loads(text[6:]))

        reader = threading.Thread(target=read)
        reader.start()
        at, early = 0, set[object]()
        while at < len(beckett_pcm):
            early = {"session", "turn", "ack", "partial"} & {event["type"] for event in said}
            # curl prints only when there is something to send: a slow server is waited for with little at a time.
            size = 3_200 if at < 160_000 or len(early) == 4 else 64
            curl.stdin.write(beckett_pcm[at : at + size])
            curl.stdin.flush()
            at += size
            time.sleep(0.02)
        curl.stdin.close()
        reader.join(WAIT_S)
        assert curl.wait(WAIT_S) == 0
    assert len(early) == 4, early
    expect_sound(said)
    assert [text for _, _, text in segments(said)] == [BECKETT]
    assert received(said) == len(beckett_pcm)


def test_curl_gets_its_answer_at_once_though_it_waits_for_100(server: Running):
    """curl says `Expect: 100-continue` and holds its body back, here for longer than this test lasts,
    unless it is told to go on."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-s", "-T", "-", "--http1.1", "-X", "POST", f"{server.url}/v1/stream"]
    command += ["--expect100-timeout", str(10 * WAIT_S)]
    done = subprocess.run(command, input=bytes(32_000), capture_output=True, check=True, timeout=WAIT_S)
    assert b'"received_bytes":32000' in done.stdout


@pytest.mark.one_server("ingresses of a run share the places for new callers: each has few")
def test_who_asks_for_100_is_told_to_continue_before_the_response(server: Running):
    """The response and the reading of the body start together: whichever is first, 100 Continue comes first."""

    def ask(_: int) -> bytes:
        head = "POST /v1/stream HTTP/1.1\r\nHost: x\r\nContent-Length: 3200\r\nConnection: close\r\n"
        head += "Expect: 100-continue\r\n\r\n"
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as line:
                line.sendall(head.encode())
                first = line.recv(25)
                if not first.startswith(b"HTTP/1.1 429 "):
                    line.sendall(bytes(3_200))
                    while line.recv(65_536):
                        pass
                    return first
            time.sleep(0.5)  # a busy server has no place for a new caller now
        return first

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(64))) == {b"HTTP/1.1 100 Continue\r\n\r\n"}


def test_flush_makes_final_what_was_said(server: Running, beckett_pcm):
    with WebSocket(server.port) as line:
        pour(line, beckett_pcm[:160_000])
        line.flush("one")
        flushed = line.hear("flushed")
        assert (flushed["id"], flushed["position_s"]) == ("one", 5.0)
        assert len(segments(line.events)) == 1
        pour(line, beckett_pcm[160_000:])
        line.flush("two")
        line.flush("")
        line.end()
        events = line.rest()
    expect_sound(events)
    names = [event["id"] for event in events if event["type"] == "flushed"]
    assert names[:2] == ["one", "two"]
    assert names[2].startswith("flush_")
    assert len(segments(events)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Http1, Http2])
def test_commands_beside_a_body(server: Running, beckett_pcm, kind: type[Line]):
    with kind(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, beckett_pcm[:160_000])
        line.until(lambda: any(event.get("received_bytes") == 160_000 for event in line.events))
        said = server.http.post(f"/v1/stream/{session}/flush", json={"id": "mine"})
        assert (said.status_code, said.json()) == (202, {"id": "mine"})
        assert line.hear("flushed")["id"] == "mine"
        assert server.http.post(f"/v1/stream/{session}/flush").json()["id"].startswith("flush_")
        pour(line, beckett_pcm[160_000:])
        line.until(lambda: any(event.get("received_s", 0) >= 9 for event in line.events))
        assert server.http.post(f"/v1/stream/{session}/end").status_code == 202
        events = line.rest()
    assert events[-1]["type"] == "end"
    for path, body, code in (
        (f"{session}/flush", b"{}", "out_of_turn"),
        (f"{session}/flush", b"{", "malformed_request"),
        (f"{session}/flush", b"[" * 5_000, "malformed_request"),
        (f"{session}/flush", json.dumps({"id": "x" * 201}).encode(), "option_error"),
        ("0" * 32 + "/flush", b"", "session_expired"),
        ("0" * 32 + "/end", b"", "session_expired"),
    ):
        refused = server.http.post(f"/v1/stream/{path}", content=body)
        assert refused.json()["error"]["code"] == code, (path, refused.text)


def test_a_command_that_breaks_off_is_no_failure_of_ours(server: Running, caplog):
    before = server.counted("asr_serve_rejections_total", reason="client_gone")
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/stream/0/flush HTTP/1.1\r\nHost: test\r\nContent-Length: 9\r\n\r\n{")
    eventually(lambda: server.counted("asr_serve_rejections_total", reason="client_gone") > before)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def companded(pcm: np.ndarray, table: np.ndarray) -> bytes:
    """The nearest code of each sample."""
    order = np.argsort(table)
    borders = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(borders, pcm)].astype(np.uint8).tobytes()


def test_other_encodings(server: Running, beckett_pcm):
    heard = soxr.resample(decode_pcm16(beckett_pcm), 16_000, 8_000)
    for query, audio in (
        ({"rate": 8_000}, (heard * 32_767).astype("<i2").tobytes()),
        ({"encoding": "mulaw"}, companded(heard, mulaw_table())),
        ({"encoding": "alaw", "rate": 8_000}, companded(heard, alaw_table())),
    ):
        with WebSocket(server.port, **query) as line:
            events = whole(line, audio, 1_601)
        opened = events[0]
        assert (opened["encoding"], opened["rate_hz"]) == (query.get("encoding", "s16le"), 8_000)
        assert received(events) == len(audio)
        assert events[-1]["duration_s"] == len(heard) / 8_000
        assert "fail better" in " ".join(text for _, _, text in segments(events)), query


def opus_of(pcm: bytes, container: str | None) -> list[bytes]:
    """Opus packets of 20 ms, or the bytes of a container around them."""
    made = io.BytesIO()
    with av.open(made, "w", format=container or "ogg") as out:
        stream = out.add_stream("libopus", rate=16_000, options={"b": "32000"})
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate = 16_000
        packets = [packet for piece in (frame, None) for packet in stream.encode(piece)]
        found = [bytes(packet) for packet in packets]
        for packet in packets:
            out.mux(packet)
    return [made.getvalue()] if container else found


def test_opus_in_packets_and_in_ogg(server: Running, beckett_pcm):
    with WebSocket(server.port, encoding="opus") as line:
        packets = opus_of(beckett_pcm, None)
        for packet in packets:
            line.send(packet)
            line.poll()
        line.end()
        events = line.rest()
    assert received(events) == sum(map(len, packets))
    assert events[0]["rate_hz"] == 48_000
    [ogg] = opus_of(beckett_pcm, "ogg")
    heard = {segments(events)[0][2]}
    for kind in TRANSPORTS:
        with kind(server.port, encoding="ogg") as line:
            events = whole(line, ogg, 777)
        assert received(events) == len(ogg)
        expect_sound(events)
        heard.add(segments(events)[0][2])
    assert all("no matter" in text for text in heard), heard


@pytest.mark.parametrize(
    ("encoding", "audio", "code"),
    [("opus", b"\xff\xff\xff", "corrupt_audio"), ("ogg", b"RIFFRIFF" * 10_000, "unsupported_audio")],
)
def test_audio_that_is_none_ends_the_session(server: Running, encoding: str, audio: bytes, code: str):
    with WebSocket(server.port, encoding=encoding) as line:
        line.send(audio)
        events = line.rest()
    assert [event["type"] for event in events if event["type"] != "ack"] == ["session", "error", "end"]
    assert [event["code"] for event in events if event["type"] == "error"] == [code]
    assert line.code == 1_008


# --- what is refused ----------------------------------------------------------------------------------------

REFUSED = (
    ({"model": "whisper-9"}, 404, "model_not_found"),
    ({"modle": "x"}, 400, "option_error"),
    ({"encoding": "mp3"}, 400, "option_error"),
    ({"rate": "7999"}, 400, "option_error"),
    ({"rate": "16000", "encoding": "ogg"}, 400, "option_error"),
    ({"partial_ms": "1"}, 400, "option_error"),
    ({"threshold": "2"}, 400, "option_error"),
    ({"threshold": "0"}, 400, "option_error"),
    ({"silence_schedule": "never"}, 400, "option_error"),
    ({"turn": "no-such-model"}, 404, "model_not_loaded"),
    ({"turn_threshold": "0.5"}, 400, "unsupported_option"),
    ({"eager_threshold": "1.5"}, 400, "option_error"),
    ({"after": "3"}, 400, "option_error"),
    ({"session": "0" * 32, "model": "x"}, 400, "option_error"),
    ({"session": "0" * 32}, 410, "session_expired"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("query", "status", "code"), REFUSED, ids=lambda case: str(case))
def test_the_query_is_read_or_refused(server: Running, query, status: int, code: str):
    said = server.http.post("/v1/stream", params=query, content=b"")
    assert (said.status_code, said.json()["error"]["code"]) == (status, code), said.text
    with WebSocket(server.port, **query) as line:
        [told] = line.rest()
    assert (told["type"], told["code"], line.code) == ("error", code, 1_008)
    assert told.get("param") == said.json()["error"]["param"]


def test_opus_packets_need_a_websocket(server: Running):
    said = server.http.post("/v1/stream?encoding=opus", content=b"").json()["error"]
    assert (said["code"], said["param"]) == ("option_error", "encoding")
    assert server.http.get("/v1/stream").status_code == 405


def test_mistakes_in_commands_change_nothing(server: Running, beckett_pcm):
    with WebSocket(server.port) as line:
        pour(line, beckett_pcm[:64_000])
        for text, code in (
            ("", "malformed_request"),
            ("START", "malformed_request"),
            ("[]", "malformed_request"),
            ('{"type":3}', "malformed_request"),
            ('{"type":"fulsh"}', "unknown_command"),
            ("{}", "unknown_command"),
            ("x" * 5_000, "malformed_request"),
            (json.dumps({"type": "flush", "id": "x" * 300}), "option_error"),
        ):
            before = sum(event["type"] == "error" for event in line.events)
            line.say(text)
            line.until(lambda n=before: sum(event["type"] == "error" for event in line.events) > n)
            assert [e["code"] for e in line.events if e["type"] == "error"][-1] == code, text
        pour(line, beckett_pcm[64_000:])
        line.end()
        line.send(bytes(100))
        line.send(bytes(100))
        line.flush("late")
        events = line.rest()
        assert line.code == 1_000
    assert [event["code"] for event in events if event["type"] == "error"][8:] == ["out_of_turn"] * 2
    expect_sound(events)
    assert segments(events) == [(0.102, 9.146, BECKETT)]
    assert received(events) == len(beckett_pcm)


def test_a_flush_at_another_rate_brings_what_the_resampler_held(server: Running, beckett_pcm):
    """Telephones: 100 ms and more lie in the filter."""
    pcm = decode_pcm16(beckett_pcm)
    at_8k = (soxr.resample(pcm, 16_000, 8_000)[:15_999] * 32_767).astype("<i2").tobytes()
    with WebSocket(server.port, rate=8_000) as line:
        line.send(at_8k)
        line.flush("now")
        assert line.hear("flushed")["position_s"] == 2 * 15_999 / 16_000
        line.end()
        assert line.rest()[-1]["duration_s"] == 2 * 15_999 / 16_000


def test_the_same_flush_at_the_same_place_is_one(server: Running, beckett_pcm):
    """A client that comes back cannot know whether it arrived."""
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, beckett_pcm[:64_000])
        line.flush("now")
        line.hear("flushed")
        line.cut(reset=True)
        seen = numbered(line.events)[-1]["seq"]
    with WebSocket(server.port, session=session, after=seen) as line:
        line.flush("now")
        pour(line, beckett_pcm[64_000:96_000])
        line.flush("now")
        line.end()
        events = line.rest()
    assert [event["position_s"] for event in events if event["type"] == "flushed"] == [3.0]


def test_why_a_session_was_ended_is_told_again(serve, beckett_pcm):
    """The connection may have broken before it arrived."""
    server = serve(max_session_s=1.0)
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, beckett_pcm[:64_000])
        line.hear("error")
        line.cut(reset=True)
    with WebSocket(server.port, session=session, after=0) as line:
        events = line.rest()
    assert [event["code"] for event in events if event["type"] == "error"] == ["audio_too_long"]
    assert events[-1]["type"] == "end"


def test_silence_as_a_count_is_heard_as_zeros(server: Running, beckett_pcm):
    """Audio, a count, the same audio at an odd position, a count: once told, once as bytes."""
    half, pause, tail = beckett_pcm[: 2 * 80_000], 2 * 47_777, 2 * 16_000 * 3
    with WebSocket(server.port) as line:
        whole_events = whole(line, half + bytes(pause) + half + bytes(tail), 16_000)
    with WebSocket(server.port) as line:
        pour(line, half)
        line.say(json.dumps({"type": "silence", "samples": pause // 2}))
        pour(line, half)
        line.say(json.dumps({"type": "silence", "samples": tail // 2}))
        line.end()
        events = line.rest()
    expect_sound(events)
    assert not [event for event in events if event["type"] == "error"]
    assert segments(events) == segments(whole_events)
    assert len(segments(events)) == 2
    assert received(events) == 2 * len(half) + pause + tail
    assert events[-1]["duration_s"] == whole_events[-1]["duration_s"] == received(events) / 32_000


def test_a_silence_that_cannot_be_is_refused_and_the_session_goes_on(server: Running, beckett_pcm):
    with WebSocket(server.port) as line:
        line.send(beckett_pcm[:101])
        line.say('{"type":"silence","samples":160}')  # in the middle of a sample
        line.send(beckett_pcm[101:102])
        line.say('{"type":"silence","samples":960001}')  # a minute, and a sample
        line.say('{"type":"silence","samples":949}')
        line.end()
        events = line.rest()
    errors = [(event["code"], event.get("param")) for event in events if event["type"] == "error"]
    assert errors == [("malformed_request", None), ("option_error", "samples")]
    assert events[-1]["duration_s"] == 1_000 / 16_000
    with WebSocket(server.port, encoding="opus") as line:
        line.say('{"type":"silence","samples":160}')
        line.end()
        (error,) = [event for event in line.rest() if event["type"] == "error"]
    assert error["code"] == "unsupported_option"
    assert "DTX" in error["message"]


def test_a_session_resumes_in_the_middle_of_a_silence(server: Running, beckett_pcm):
    """The position counts the bytes that a silence stands for."""
    with WebSocket(server.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, beckett_pcm[:64_000])
        line.say('{"type":"silence","samples":40000}')
        line.until(lambda: acknowledged_s(line) >= 4)
        line.cut(reset=False)
    with WebSocket(server.port, session=session, after=0) as line:
        assert line.hear("session")["received_bytes"] == 64_000 + 80_000
        line.end()
        assert line.rest()[-1]["duration_s"] == 4.5
