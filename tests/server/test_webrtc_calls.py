"""Calls over WebRTC to the real server with real speech, by aiortc as the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from running_server import WAIT_S, Running, eventually

pytest.importorskip("aiortc", reason="aiortc is not installed: pip install 'asr-serve[webrtc]'")

from webrtc_caller import CALLS, TRANSCRIPTION, WHIP, Caller

from asr_serve.audio.reader import open_audio
from asr_serve.config import WebRtcConfig
from asr_serve_tools.evaluate.wer import wer

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
COMPLETED = f"{TRANSCRIPTION}.completed"
SDP = {"content-type": "application/sdp"}


@pytest.fixture(scope="module")
def open_server(serve: Callable[..., Running]) -> Running:
    return serve(api_keys=("secret-one", "secret-two"), webrtc=WebRtcConfig(port=0, max_calls=2, connect_s=3.0))


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


async def test_a_call_as_openai_documents_it(server: Running, speech: np.ndarray):
    async with caller(server, speech) as line:
        await line.call()
        assert line.location.startswith(f"{CALLS}/rtc_")
        assert "a=ice-lite" in line.answer.text
        await line.until("session.created")
        await line.until(COMPLETED)
        ended = await line.request("POST", f"{line.location}/hangup")
        assert ended.status_code == 200
        async with asyncio.timeout(WAIT_S):
            await line.closed.wait()
    assert wer([BECKETT], [line.text]).errors <= 2, line.text
