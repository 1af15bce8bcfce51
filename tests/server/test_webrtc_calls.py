"""Calls over WebRTC to the real server with real speech, by aiortc as the client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import sys
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from running_server import WAIT_S, Running, eventually
from websockets.sync.client import connect

pytest.importorskip("aiortc", reason="aiortc is not installed: pip install 'asr-serve[webrtc]'")

from aioice import stun
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from webrtc_caller import CALLS, TRANSCRIPTION, WHIP, Caller

from asr_serve.audio.reader import open_audio
from asr_serve.config import WebRtcConfig
from asr_serve_tools.evaluate.wer import wer

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
MOST_ERRORS = 4
"""Words of twelve that Opus and a busy machine may cost: "ever tried" is heard as "ever try, I'd", too."""
SPOKEN = "It was the best of times."
LONG = "This is a long reply that nobody wants to hear to its end. " * 5
COMPLETED = f"{TRANSCRIPTION}.completed"
SDP = {"content-type": "application/sdp"}


@pytest.fixture(scope="module")
def open_server(serve_voice: Callable[..., Running]) -> Running:
    return serve_voice(
        api_keys=("secret-one", "secret-two"), webrtc=WebRtcConfig(udp_port=0, max_calls=2, connect_s=4.0)
    )


@pytest.fixture
def server(open_server: Running) -> Iterator[Running]:
    """Of whatever a test does, nothing is left: no session, no call, no address of a peer."""
    yield open_server
    open_server.expect_empty()
    calls = open_server.app.state.calls
    eventually(lambda: calls.open_calls == 0)
    port = calls.udp_port
    assert port is None or (port.calls, port.addresses) == (0, 0)
    assert open_server.counted("asr_serve_live_open_sessions", route=CALLS) == 0


@pytest.fixture(scope="module")
def speech(beckett: Path) -> np.ndarray:
    """Ten seconds at 48 kHz."""
    return soxr.resample(np.concatenate([*open_audio(beckett)]), 16_000, 48_000)


def caller(server: Running, pcm: np.ndarray, key: str = "secret-one", **options: Any) -> Caller:
    return Caller(server, pcm, key=key, **options)


def heard_over_websocket(server: Running, pcm: np.ndarray) -> str:
    """What the WebSocket of the same protocol makes of it."""
    samples = (np.clip(soxr.resample(pcm, 48_000, 24_000), -1, 1) * 32_767).astype("<i2").tobytes()
    address = server.url.replace("http", "ws") + "/v1/realtime?intent=transcription"
    with connect(address, additional_headers={"Authorization": "Bearer secret-one"}) as line:
        for at in range(0, len(samples), 48_000):
            audio = base64.b64encode(samples[at : at + 48_000]).decode()
            line.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        line.send('{"type":"input_audio_buffer.commit"}')
        texts: list[str] = []
        committed: set[str] = set()
        while True:
            event = json.loads(line.recv(WAIT_S))
            if event["type"] == "input_audio_buffer.committed":
                committed.add(event["item_id"])
            if event["type"] == COMPLETED:
                texts.append(event["transcript"])
                committed.discard(event["item_id"])
                if not committed and len(" ".join(texts).split()) > 10:
                    return " ".join(texts)


async def hang_up(line: Caller) -> None:
    """Ends the call over HTTP; its last words come before its end."""
    ended = await line.request("POST", f"{line.location}/hangup")
    assert ended.status_code == 200
    async with asyncio.timeout(WAIT_S):
        await line.closed.wait()


async def test_a_call_as_openai_documents_it(server: Running, speech: np.ndarray):
    done = server.counted("asr_serve_live_sessions_total", route=CALLS, end="done")
    async with caller(server, speech) as line:
        await line.call()
        assert line.location.startswith(f"{CALLS}/rtc_")
        assert "a=ice-lite" in line.answer.text
        assert "m=audio 0" not in line.answer.text
        created = await line.until("session.created")
        assert created["session"]["type"] == "transcription"
        await line.until(COMPLETED)
        async with asyncio.timeout(WAIT_S):
            await line.track.said.wait()
        await hang_up(line)
        async with asyncio.timeout(WAIT_S):  # the server learns of the end a moment later
            while (again := await line.request("POST", f"{line.location}/hangup")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "unknown_call")
    assert wer([BECKETT], [line.text]).errors <= MOST_ERRORS, line.text
    # Opus may cost a word: nothing else does.
    assert wer([await asyncio.to_thread(heard_over_websocket, server, speech)], [line.text]).errors <= MOST_ERRORS
    assert not any(kind.endswith("audio_lost") for kind in line.kinds)
    assert server.counted("asr_serve_live_sessions_total", route=CALLS, end="done") == done + 1


async def test_a_session_in_the_form_and_events_on_the_channel(server: Running, speech: np.ndarray):
    session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    async with caller(server, speech) as line:
        await line.call(session=session, query="?partials=true")
        created = await line.until("session.created")
        assert created["session"]["audio"]["input"]["turn_detection"] is None
        line.send(type="input_audio_buffer.append", audio="AAAA")
        refused = await line.until("error")
        assert refused["error"]["code"] == "unsupported_option"
        assert "track" in refused["error"]["message"]
        pcmu = {"type": "transcription", "audio": {"input": {"format": {"type": "audio/pcmu"}}}}
        line.send(type="session.update", session=pcmu)
        seen = line.events.index(refused) + 1
        assert (await line.until("error", seen))["error"]["param"] == "session.audio.input.format"
        line.channel.send(b"no text")
        assert (await line.until("error", len(line.events)))["error"]["code"] == "invalid_event"
        async with asyncio.timeout(WAIT_S):
            await line.track.said.wait()
        line.send(type="input_audio_buffer.commit")
        item = await line.until(COMPLETED)
    assert f"{TRANSCRIPTION}.partial" in line.kinds
    assert wer([BECKETT], [item["transcript"]]).errors <= MOST_ERRORS, item


async def test_what_is_lost_is_concealed_and_told(server: Running, speech: np.ndarray):
    """Every tenth packet: told as often as it is missing, at its place; no time is lost with it. Five seconds: sent
    faster than they are spoken, more would not be taken for a loss."""
    lost_before = server.counted("asr_serve_webrtc_lost_packets_total")
    async with caller(server, speech[: 5 * 48_000]) as line:
        transport = line.peer.addTrack(line.track).transport
        send, sent, dropped = transport._send_rtp, 0, 0

        async def lossy(data: bytes) -> None:
            nonlocal sent, dropped
            if data[1] & 0x7F < 64 or data[1] & 0x7F > 95:  # no RTCP
                sent += 1
                if sent % 10 == 0 and not line.track.said.is_set():
                    dropped += 1
                    return
            await send(data)

        transport._send_rtp = lossy
        await line.call()
        async with asyncio.timeout(WAIT_S):
            await line.track.said.wait()
        await asyncio.sleep(1.6)  # a receiver report comes each second
        reports = [each for each in (await line.peer.getStats()).values() if each.type == "remote-inbound-rtp"]
        await hang_up(line)
    told = [event for event in line.events if event["type"].endswith("audio_lost")]
    assert sum(event["packets"] for event in told) == dropped > 20
    assert all(event["audio_end_ms"] - event["audio_start_ms"] == 20 * event["packets"] for event in told)
    assert all(event["audio_start_ms"] % 20 == 0 for event in told)  # the clock: every packet is at its place
    assert server.counted("asr_serve_webrtc_lost_packets_total") - lost_before == dropped
    assert reports[0].packetsLost == dropped
    assert reports[0].roundTripTime is None or reports[0].roundTripTime < 60
    assert wer(["Ever tried, ever failed, no matter"], [line.text]).errors <= 2, line.text


async def test_whip(server: Running, speech: np.ndarray):
    """A publisher without a data channel: results are server-sent events, its end a DELETE."""
    async with caller(server, speech) as line:
        publisher = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        publisher.addTrack(line.track)
        await publisher.setLocalDescription(await publisher.createOffer())
        offered = publisher.localDescription.sdp
        made = await line.request("POST", f"{WHIP}?language=en&words=true", content=offered, headers=SDP)
        assert made.status_code == 201, made.text
        location, etag = made.headers["location"], made.headers["etag"]
        assert made.headers["link"].startswith(f"<{location}/events>")
        await publisher.setRemoteDescription(RTCSessionDescription(made.text, "answer"))

        trickle = {"content-type": "application/trickle-ice-sdpfrag"}
        credentials = [each for each in offered.splitlines() if each.startswith(("a=ice-ufrag:", "a=ice-pwd:"))][:2]
        fragment = "\r\n".join([*credentials, "m=audio 9 UDP/TLS/RTP/SAVPF 0", "a=mid:0", "a=end-of-candidates", ""])
        other = fragment.replace("a=ice-ufrag:", "a=ice-ufrag:x")
        for content, headers, status in (
            (fragment, trickle | {"if-match": etag}, 204),
            (fragment, trickle, 428),
            (fragment, trickle | {"if-match": '"other"'}, 412),
            (other, trickle | {"if-match": "*"}, 422),
            (other, trickle | {"if-match": etag}, 422),
            (fragment, SDP | {"if-match": etag}, 415),
            ("", trickle | {"if-match": etag}, 400),
        ):
            patched = await line.request("PATCH", location, content=content, headers=headers)
            assert patched.status_code == status, (headers, patched.text)
        assert (await line.request("GET", location)).status_code == 405
        assert (await line.request("OPTIONS", WHIP)).headers["accept-post"] == "application/sdp"

        async with asyncio.timeout(WAIT_S):
            await line.track.said.wait()
        assert (await line.request("DELETE", location)).status_code == 200
        told = (await line.request("GET", f"{location}/events")).text  # to the end
        await publisher.close()
        assert (await line.request("DELETE", location)).status_code == 404
        after = (await line.request("GET", f"{location}/events", headers={"last-event-id": "2"})).text
    events = [json.loads(each.removeprefix("data: ")) for each in told.splitlines() if each.startswith("data: ")]
    assert (events[0]["type"], events[0]["rate_hz"], events[-1]["type"]) == ("session", 16_000, "end")
    segments = [event for event in events if event["type"] == "segment"]
    lost = [event for event in events if event["type"] == "loss"]
    assert wer([BECKETT], [" ".join(segment["text"] for segment in segments)]).errors <= MOST_ERRORS, (segments, lost)
    assert all(segment["words"] for segment in segments)
    assert re.search(r"^id: [0-9a-f]+-3$", after, re.MULTILINE)
    assert not re.search(r"^id: [0-9a-f]+-2$", after, re.MULTILINE)


async def test_whip_with_a_data_channel(server: Running, speech: np.ndarray):
    """The events of `/v1/stream`, as from a WebSocket; its commands, but for those that are audio."""
    async with caller(server, speech) as line:
        refused = await line.request("POST", f"{WHIP}?rate=8000", content=await line.offer(), headers=SDP)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rate")
        await line.call(WHIP)
        session = await line.until("session")
        assert session["encoding"] == "s16le"
        line.send(type="silence", samples=16_000)
        assert (await line.until("error"))["code"] == "unsupported_option"
        line.channel.send(b"bytes")
        assert (await line.until("error", len(line.events)))["code"] == "malformed_request"
        line.send(type="flush", id="f1")
        await line.until("flushed")
        async with asyncio.timeout(WAIT_S):
            await line.track.said.wait()
        line.send(type="end")
        await line.until("end")
        async with asyncio.timeout(WAIT_S):
            await line.closed.wait()
    texts = [event["text"] for event in line.events if event["type"] == "segment"]
    assert wer([BECKETT], [" ".join(texts)]).errors <= MOST_ERRORS, texts


async def test_texts_are_spoken_on_the_audio_track(server: Running, speech: np.ndarray):
    """A reply that is interrupted is silent at once; the next one is heard to its end, while the call listens on."""
    async with caller(server, speech, speed=1) as line:
        sound: list[np.ndarray] = []
        lines = line.peer.createDataChannel("speech")
        told: list[dict[str, Any]] = []
        lines.on("message", lambda message: told.append(json.loads(message)))

        @line.peer.on("track")
        def on_track(track: MediaStreamTrack) -> None:
            async def record() -> None:
                with suppress(MediaStreamError):
                    while True:
                        frame = await track.recv()
                        sound.append(frame.to_ndarray()[0, ::2])

            recording.append(asyncio.create_task(record()))

        recording: list[asyncio.Task[None]] = []
        await line.call()
        assert "a=sendrecv" in line.answer.text
        await line.until("session.created")
        await until(lambda: lines.readyState == "open")
        for message in ({"type": "start", "format": "mp3"}, {"type": "start"}, {"type": "text", "text": LONG}):
            lines.send(json.dumps(message))
        await until(lambda: sound and np.abs(sound[-1]).max() > 1_000)
        lines.send('{"type":"cancel"}')
        await until(lambda: told[-1]["type"] == "done")
        assert [event["type"] for event in told if event["type"] in ("error", "started")] == ["error", "started"]
        assert told[-1]["reason"] == "cancelled"
        assert (told[0]["code"], told[0]["param"]) == ("unsupported_option", "format")
        await until(lambda: np.abs(np.concatenate(sound[-10:])).max() < 200)

        before = len(sound)
        for message in ({"type": "start"}, {"type": "text", "text": SPOKEN}, {"type": "end"}):
            lines.send(json.dumps(message))
        await until(lambda: told[-1]["type"] == "done" and told[-1]["reason"] == "end")
        await until(lambda: len(sound) > before + 50 and np.abs(np.concatenate(sound[-25:])).max() < 200)
        await hang_up(line)
        recording[0].cancel()
    with io.BytesIO() as file:
        with wave.open(file, "wb") as wav:
            wav.setparams((1, 2, 48_000, 0, "NONE", ""))
            wav.writeframes(np.concatenate(sound[before:]).astype("<i2").tobytes())
        asked = {"model": "moonshine-tiny-en"}
        key = {"Authorization": "Bearer secret-one"}
        form = {"file": ("said.wav", file.getvalue())}
        heard = await asyncio.to_thread(
            server.http.post, "/v1/audio/transcriptions", data=asked, files=form, headers=key
        )
    assert wer([SPOKEN], [heard.json()["text"]]).errors <= 1, heard.text
    assert line.text or any(kind.endswith("delta") for kind in line.kinds)  # it was heard meanwhile


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.02)


async def test_a_client_that_leaves_leaves_nothing(server: Running, speech: np.ndarray):
    gone = server.counted("asr_serve_live_sessions_total", route=CALLS, end="client_gone")
    async with caller(server, speech) as line:
        await line.call()
        await line.until(f"{TRANSCRIPTION}.delta")
        refused = await line.request("POST", f"{line.location}/hangup", headers={"Authorization": "Bearer secret-two"})
        assert refused.status_code == 404  # another client's
    eventually(lambda: server.counted("asr_serve_live_sessions_total", route=CALLS, end="client_gone") == gone + 1)


def offer_with(*changes: tuple[str, str], offer: str) -> str:
    for old, new in changes:
        assert old in offer, old
        offer = offer.replace(old, new)
    return offer


@pytest.fixture(scope="module")
def offered(open_server: Running) -> str:
    async def make() -> str:
        async with Caller(open_server, np.zeros(960, np.float32)) as line:
            return await line.offer()

    return asyncio.run(make())


def test_bad_offers_are_refused(server: Running, offered: str):
    key = {"Authorization": "Bearer secret-one"}
    audio = offered[offered.index("m=audio") : offered.index("m=application")]
    bad = {
        "": ("malformed_request", "empty"),
        "hello": ("malformed_request", "v=0"),
        "v=0\r\nm=audio": ("malformed_request", "m=KIND"),
        offered.replace(audio, ""): ("option_error", "m=audio"),
        offered.replace("m=audio ", "m=video "): ("option_error", "m=audio"),
        offered.replace("a=sendrecv", "a=recvonly"): ("option_error", "sends nothing"),
        offered[: offered.index("m=application")]: ("unsupported_option", "data channel"),
        offered.replace("opus/48000", "vorbis/48000").replace("PCM", "PCX").replace("G722", "G7"): (
            "unsupported_option",
            "vorbis",
        ),
        offered.replace("a=ice-pwd", "a=ice-pw"): ("option_error", "ICE"),
        offered.replace("a=fingerprint", "a=finger"): ("option_error", "fingerprint"),
        offered.replace("a=group:BUNDLE", "a=group:LS"): ("unsupported_option", "BUNDLE"),
        offered.replace("v=0", "v=0\r\na=ice-lite", 1): ("unsupported_option", "lite"),
    }
    for sdp, (code, word) in bad.items():
        refused = server.http.post(CALLS, content=sdp, headers=SDP | key)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, code), (sdp[:200], refused.text)
        assert word in error["message"], error
    for headers, status in ((SDP, 401), (SDP | {"Authorization": "Bearer no"}, 401), (key, 415)):
        assert server.http.post(CALLS, content=offered, headers=headers).status_code == status
        assert server.http.post(WHIP, content=offered, headers=headers).status_code == status
    for fields in ({"session": (None, "{")}, {"session": (None, '{"type":"realtime"}')}, {"sesion": (None, "x")}):
        refused = server.http.post(CALLS, files={"sdp": (None, offered), **fields}, headers=key)
        assert refused.status_code == 400, refused.text
    assert server.http.post(f"{CALLS}?model=none", content=offered, headers=SDP | key).status_code == 404
    assert server.http.post(f"{CALLS}/rtc_0/hangup", headers=key).status_code == 404


def test_without_the_extra_it_says_what_to_install(server: Running, offered: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("ice_lite", "media_peer"):
        monkeypatch.delitem(sys.modules, f"asr_serve.server.realtime.webrtc.{name}", raising=False)
        monkeypatch.delattr(f"asr_serve.server.realtime.webrtc.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "aiortc", None)
    refused = server.http.post(CALLS, content=offered, headers=SDP | {"Authorization": "Bearer secret-one"})
    assert refused.status_code == 404
    assert "pip install 'asr-serve[webrtc]'" in refused.json()["error"]["message"]


def dropped(server: Running, reason: str) -> float:
    return server.counted("asr_serve_webrtc_dropped_datagrams_total", reason=reason)


def test_calls_that_never_connect_end_and_hostile_packets_reach_none(server: Running, offered: str):
    """Calls are bounded; the places of those that never connect are free again after `connect_s`."""
    headers = SDP | {"Authorization": "Bearer secret-one"}
    late = server.counted("asr_serve_live_sessions_total", route=CALLS, end="request_timeout")
    answers = [server.http.post(CALLS, content=offered, headers=headers) for _ in range(2)]
    full = server.http.post(CALLS, content=offered, headers=headers)
    assert [each.status_code for each in (*answers, full)] == [201, 201, 429]
    assert full.json()["error"]["code"] == "at_capacity"
    assert full.headers["retry-after"]

    calls = server.app.state.calls
    ufrag = answers[0].text.partition("a=ice-ufrag:")[2].split()[0]
    theirs = offered.partition("a=ice-ufrag:")[2].split()[0]
    wrong = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
    wrong.attributes["USERNAME"] = f"{ufrag}:{theirs}"
    wrong.add_message_integrity(b"guessed")
    unknown = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
    unknown.attributes["USERNAME"] = "nobody:here"
    unknown.add_message_integrity(b"guessed")
    sent = {
        "bad_check": [bytes(wrong), bytes(20), b"\x00\x01" + bytes(60), b"\xff", b""],
        "unknown_call": [bytes(unknown)],
        "unknown_source": [b"\x16" + bytes(80), b"\x80\x6f" + bytes(80), b"\x80\x00"],
    }
    before = {reason: dropped(server, reason) for reason in sent}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for datagrams in sent.values():
            for datagram in datagrams:
                stranger.sendto(datagram, ("127.0.0.1", calls.udp_port.port))
        wanted = {reason: before[reason] + len(datagrams) for reason, datagrams in sent.items()}
        eventually(lambda: {reason: dropped(server, reason) for reason in sent} == wanted)
        with pytest.raises(TimeoutError):
            stranger.recv(2_000)  # a stranger gets no answer: nothing is reflected
    eventually(lambda: calls.open_calls == 0)
    ended = server.counted("asr_serve_live_sessions_total", route=CALLS, end="request_timeout")
    assert ended == late + 2


async def test_a_server_that_goes_down_finishes_its_calls(serve: Callable[..., Running], speech: np.ndarray):
    """Both are told why, get the rest of their text, and are ended."""
    server = await asyncio.to_thread(serve, webrtc=WebRtcConfig(udp_port=0))
    async with caller(server, speech) as line, caller(server, speech) as other:
        await line.call()
        await other.call(WHIP)
        await line.until(f"{TRANSCRIPTION}.delta")
        await other.until("partial")
        server.loop.call_soon_threadsafe(server.gate.drain)
        for each in (line, other):
            async with asyncio.timeout(WAIT_S):
                await each.closed.wait()
        assert next(event for event in line.events if event["type"] == "error")["error"]["code"] == "draining"
        assert next(event for event in other.events if event["type"] == "error")["code"] == "draining"
        assert COMPLETED in line.kinds
        assert other.kinds[-1] == "end"
        refused = await line.request("POST", CALLS, content="v=0", headers=SDP)
        assert refused.status_code == 503
    await asyncio.to_thread(server.expect_empty)
    assert server.app.state.calls.udp_port.calls == 0
