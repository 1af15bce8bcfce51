"""The console over WebRTC: a real call from a Chromium whose microphone plays a recording."""

from __future__ import annotations

import re
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from console_page import KEY, WAIT_S, Served, Visitor, browsers, words

pytest.importorskip("aiortc", reason="aiortc is not installed: pip install 'asr-serve[webrtc]'")


@pytest.fixture(scope="module")
def served(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("webrtc") / "log", "--api-key", KEY)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def speech(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two minutes: what is said before a call is connected nobody hears, and a busy machine takes its time."""
    path = tmp_path_factory.mktemp("speech") / "long.wav"
    with wave.open(str(packaged_speech / "beckett.wav")) as short, wave.open(str(path), "wb") as long:
        long.setparams(short.getparams())
        long.writeframes(12 * short.readframes(short.getnframes()))
    return path


@pytest.fixture(scope="module")
def visitor(served: Served, speech: Path) -> Iterator[Visitor]:
    with browsers() as launch:
        visitor = Visitor(launch(speech, True))
        visitor.page.goto(served.url)
        visitor.page.fill("#key", KEY)
        visitor.page.keyboard.press("Enter")
        visitor.ready()
        yield visitor


def counted(served: Served, sample: str) -> float:
    told = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return sum(float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith(sample))


def counts(served: Served, sample: str, value: float) -> None:
    """Waits until a metric has this value: the server counts a call when it has ended, after its last word."""
    end_s = time.monotonic() + WAIT_S
    while (found := counted(served, sample)) != value:
        assert time.monotonic() < end_s, (sample, found)
        time.sleep(0.05)


def test_a_talk_over_webrtc(served: Served, visitor: Visitor):
    page = visitor.page
    assert page.locator("#want-speech-only").is_enabled()
    page.select_option("#transport", "webrtc")
    assert page.locator("#want-speech-only").is_disabled()  # the browser sends all sound
    page.locator("body").press("Space")
    visitor.mode("live")
    assert page.locator("#transport").is_disabled()
    visitor.until("#segments .said")
    visitor.holds("/^\\d+ ms$/.test(document.querySelector('#trip').textContent)")
    visitor.holds("/^[\\d,]{2,} of|^\\d+ of [\\d,]{3,}$/.test(document.querySelector('#loss-count').textContent)")
    assert re.fullmatch(r"\d\.\d %|\d\d %", page.inner_text("#loss"))  # what it is depends on the machine's load
    page.locator("body").press("Space")
    visitor.mode("idle")
    # On a busy machine the browser's microphone stutters, and words are lost before anybody sends them.
    assert {"tried", "failed", "matter", "again", "better"} & set(words(visitor.text()))
    counts(served, 'asr_serve_live_sessions_total{end="done",route="/v1/whip"}', 1)
    assert counted(served, "asr_serve_webrtc_packets_total") > 100
    counts(served, 'asr_serve_live_open_sessions{route="/v1/whip"}', 0)
    page.reload()
    assert page.input_value("#transport") == "webrtc"  # the browser remembers it
    visitor.expect_calm("401")


def test_calls_as_openai_documents_them(served: Served, visitor: Visitor):
    """The exchange of OpenAI's documentation, by Chromium's own RTCPeerConnection, and what becomes of it."""
    told: dict[str, Any] = visitor.page.evaluate(OPENAI_CALL, KEY)
    assert told["status"] == 201
    assert told["location"].startswith("/v1/realtime/calls/rtc_")
    assert told["types"][0] == "session.created"
    assert "input_audio_buffer.speech_started" in told["types"]
    assert told["state"] == "closed"
    counts(served, 'asr_serve_live_sessions_total{end="done",route="/v1/realtime/calls"}', 1)


OPENAI_CALL = """async (key) => {
  const pc = new RTCPeerConnection();
  const [track] = (await navigator.mediaDevices.getUserMedia({ audio: true })).getTracks();
  pc.addTrack(track);
  const channel = pc.createDataChannel("oai-events");
  const types = [];
  const heard = new Promise((resolve) => {
    channel.onmessage = ({ data }) => {
      types.push(JSON.parse(data).type);
      if (types.at(-1) === "input_audio_buffer.speech_started") resolve();
    };
  });
  const closed = new Promise((resolve) => (channel.onclose = resolve));
  await pc.setLocalDescription(await pc.createOffer());
  const form = new FormData();
  form.set("sdp", pc.localDescription.sdp);
  form.set("session", JSON.stringify({ type: "transcription" }));
  const headers = { Authorization: `Bearer ${key}` };
  const answer = await fetch("/v1/realtime/calls", { method: "POST", body: form, headers });
  await pc.setRemoteDescription({ type: "answer", sdp: await answer.text() });
  await heard;
  const location = answer.headers.get("location");
  await fetch(`${location}/hangup`, { method: "POST", headers });
  await closed;
  track.stop();
  pc.close();
  return { status: answer.status, location, types, state: channel.readyState };
}"""
