"""Riva's gRPC services with its own client, on the real server's second port."""

from __future__ import annotations

import wave

import numpy as np
import pytest
from running_server import MODEL, WAIT_S, eventually

riva_client = pytest.importorskip("riva.client", reason="no client of Riva here: pip install nvidia-riva-client")

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
MAX_CHARACTERS = 500


@pytest.fixture(scope="module")
def riva(serve_voice):
    """A server with a port for Riva's clients."""
    return serve_voice(riva_port=0, max_characters=MAX_CHARACTERS)


@pytest.fixture
def auth(riva):
    made = riva_client.Auth(uri=f"127.0.0.1:{riva.app.state.riva.port}")
    yield made
    made.channel.close()
    riva.expect_empty()
    eventually(lambda: not riva.gate.live_sessions)


@pytest.fixture
def asr(auth):
    return riva_client.ASRService(auth)


@pytest.fixture
def tts(auth):
    return riva_client.SpeechSynthesisService(auth)


@pytest.fixture(scope="module")
def pcm(packaged_speech):
    """beckett.wav as s16le at 16 kHz."""
    from asr_serve.audio.reader import read_audio

    return (read_audio(packaged_speech / "beckett.wav") * 32_767).astype("<i2").tobytes()


def text_of(results):
    return "".join(result.alternatives[0].transcript for result in results).strip()


def test_a_recording_has_the_text_of_our_own_route(asr, riva, cities):
    config = riva_client.RecognitionConfig(language_code="en-US", enable_automatic_punctuation=True)
    response = asr.offline_recognize(cities.read_bytes(), config)
    ours = riva.http.post("/v1/audio/transcriptions", files={"file": cities.read_bytes()}).json()
    assert text_of(response.results) == ours["text"]
    assert len(response.results) > 1


def test_live(asr, pcm):
    config = riva_client.StreamingRecognitionConfig(config=riva_client.RecognitionConfig(encoding=1, sample_rate_hertz=16000, language_code="en-US", enable_automatic_punctuation=True), interim_results=True)
    chunks = [pcm[at : at + 3_200] for at in range(0, len(pcm), 3_200)]
    found = list(asr.streaming_response_generator(chunks, config))
    assert text_of(r for f in found for r in f.results if r.is_final) == BECKETT


def test_speak(tts):
    response = tts.synthesize("Ever tried.", sample_rate_hz=16000)
    assert np.frombuffer(response.audio, "<i2").any()
    parts = list(tts.synthesize_online("Ever tried.", sample_rate_hz=16000))
    assert b"".join(p.audio for p in parts) == response.audio
