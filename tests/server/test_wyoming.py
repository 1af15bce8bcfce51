"""Wyoming with its own package's client, on the real server's second port."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest
from running_server import MODEL, WAIT_S, eventually

from asr_serve.audio.reader import read_audio
from asr_serve.config import ServeConfig
from asr_serve.errors import OptionError

wyoming_client = pytest.importorskip("wyoming.client", reason="wyoming is not installed: pip install wyoming")
asr = pytest.importorskip("wyoming.asr")
audio = pytest.importorskip("wyoming.audio")
info = pytest.importorskip("wyoming.info")
ping = pytest.importorskip("wyoming.ping")
tts = pytest.importorskip("wyoming.tts")

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
FORMAT = {"rate": 16_000, "width": 2, "channels": 1}


@pytest.fixture(scope="module")
def home(serve_voice):
    """A server of Home Assistant's."""
    return serve_voice(wyoming_port=0, max_characters=500)


@pytest.fixture
def port(home):
    yield home.app.state.wyoming.port
    home.expect_empty()
    eventually(lambda: not home.gate.live_sessions)


@pytest.fixture(scope="module")
def pcm(packaged_speech):
    return (read_audio(packaged_speech / "beckett.wav") * 32_767).astype("<i2").tobytes()


def talk(port, *sent, until):
    """Sends events over a new connection; returns what comes up to an event of the type `until`, or the end."""

    async def exchange():
        found = []
        async with wyoming_client.AsyncClient.from_uri(f"tcp://127.0.0.1:{port}") as client:
            for event in sent:
                await client.write_event(event.event())
            async with asyncio.timeout(WAIT_S):
                while (event := await client.read_event()) is not None:
                    found.append(event)
                    if event.type == until:
                        break
        return found

    return asyncio.run(exchange())


def spoken(pcm, **transcribe):
    chunks = [audio.AudioChunk(**FORMAT, audio=pcm[at : at + 2_048]) for at in range(0, len(pcm), 2_048)]
    return [asr.Transcribe(**transcribe), audio.AudioStart(**FORMAT), *chunks, audio.AudioStop()]


def test_home_assistant_finds_out_what_is_served(port):
    pong, found = talk(port, ping.Ping("here?"), info.Describe(), until="info")
    assert ping.Pong.from_event(pong).text == "here?"
    told = info.Info.from_event(found)
    assert [model.name for model in told.asr[0].models] == [MODEL]
    assert told.asr[0].models[0].languages == ["en"]
    assert told.tts[0].supports_synthesize_streaming
    assert "heart" in [voice.name for voice in told.tts[0].voices]
    assert not told.wake


def test_speech_becomes_text_while_it_is_spoken(port, home, pcm):
    start, *chunks, stop, whole = talk(port, *spoken(pcm, language="en"), until="transcript")
    assert asr.TranscriptStart.from_event(start).language == "en"
    assert asr.Transcript.from_event(whole) == asr.Transcript(BECKETT, language="en")
    assert asr.TranscriptStop.is_type(stop.type)
    assert len(chunks) > 1  # its words were locked before the sentence ended
    assert "".join(asr.TranscriptChunk.from_event(chunk).text for chunk in chunks) == BECKETT
    eventually(lambda: home.counted("asr_serve_live_sessions_total", route="/wyoming", end="done"))
    assert home.counted("asr_serve_live_audio_seconds_total", route="/wyoming") >= len(pcm) / 32_000


def test_a_text_is_spoken_and_heard_again(port):
    start, *chunks, stop = talk(port, tts.Synthesize("Ever tried. Ever failed."), until="audio-stop")
    rate = audio.AudioStart.from_event(start).rate
    assert audio.AudioStop.is_type(stop.type)
    sound = b"".join(audio.AudioChunk.from_event(chunk).audio for chunk in chunks)
    heard = [
        asr.Transcribe(language="en"),
        audio.AudioStart(rate, 2, 1),
        audio.AudioChunk(rate, 2, 1, sound),
        audio.AudioStop(),
    ]
    assert np.frombuffer(sound, "<i2").any()
    assert asr.Transcript.from_event(talk(port, *heard, until="transcript")[-1]).text.startswith("Ever tried")


def test_a_text_is_spoken_while_it_is_written(port):
    """As Home Assistant sends it: in parts, and whole at the end for servers that take no parts."""
    voice = tts.SynthesizeVoice(name="heart")
    parts = [tts.SynthesizeChunk(text) for text in ("Ever tr", "ied. Ever", " failed.")]
    sent = [tts.SynthesizeStart(voice=voice), *parts, tts.Synthesize("Ever tried. Ever failed."), tts.SynthesizeStop()]
    found = talk(port, *sent, until="synthesize-stopped")
    assert [event.type for event in found[-2:]] == ["audio-stop", "synthesize-stopped"]
    once = talk(port, tts.Synthesize("Ever tried. Ever failed.", voice=voice), until="audio-stop")
    sound = [b"".join(event.payload or b"" for event in events) for events in (found, once)]
    assert sound[0] == sound[1]


def test_a_voice_is_chosen_by_its_language(port):
    """Home Assistant names no voice where none is chosen in its settings."""
    voices = (None, *(tts.SynthesizeVoice(language=tag) for tag in ("en", "en-GB", "en_US")))
    found = [talk(port, tts.Synthesize("Ever tried.", voice=voice), until="audio-stop") for voice in voices]
    sounds = [b"".join(event.payload or b"" for event in events) for events in found]
    assert np.frombuffer(sounds[0], "<i2").any()
    assert sounds == [sounds[0]] * len(voices)


def test_requests_that_do_not_wait_are_answered_in_their_order(port, pcm):
    again = [asr.Transcribe(language="en-US"), *spoken(pcm)[1:]]
    found = talk(port, *spoken(pcm), *again, tts.Synthesize("Ever tried."), until="audio-stop")
    texts = [asr.Transcript.from_event(event).text for event in found if event.type == "transcript"]
    assert texts == [BECKETT, BECKETT]
    assert found[-1].type == "audio-stop"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([asr.Transcribe(name="nobody"), audio.AudioStart(**FORMAT)], "model_not_found"),
        ([asr.Transcribe(language="fr"), audio.AudioStart(**FORMAT)], "option_error"),
        ([audio.AudioStart(16_000, 2, 2)], "option_error"),
        ([audio.AudioStart(**FORMAT), audio.AudioStart(**FORMAT)], "out_of_turn"),
        ([audio.AudioStart(**FORMAT), audio.AudioChunk(8_000, 2, 1, bytes(2))], "out_of_turn"),
        ([audio.AudioStart(**FORMAT), tts.Synthesize("Hello.")], "out_of_turn"),
        ([tts.SynthesizeChunk("Hello.")], "out_of_turn"),
        ([tts.SynthesizeStop()], "out_of_turn"),
        ([tts.Synthesize("Hello.", voice=tts.SynthesizeVoice(name="nobody"))], "unknown_voice"),
        ([tts.Synthesize("Hello.", voice=tts.SynthesizeVoice(language="tlh"))], "unsupported_option"),
        ([tts.Synthesize("x" * 501)], "text_too_long"),
    ],
)
def test_what_is_not_served_is_told_and_ends_the_connection(port, sent, code):
    found = talk(port, *sent, until=None)
    assert (found[-1].type, found[-1].data["code"]) == ("error", code)
    assert found[-1].data["text"]


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b'{"type": "audio-chunk", "payload_length": 99999999}\n'])
def test_what_is_no_wyoming_is_refused(port, sent):
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as raw:
        raw.sendall(sent)
        answer = b"".join(iter(lambda: raw.recv(4_096), b""))
    assert b'"type":"error"' in answer
    assert b"malformed_request" in answer


def test_who_leaves_in_the_middle_leaves_nothing_behind(port, home, pcm):
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as raw:
        chunk = (
            b'{"type": "audio-chunk", "data": {"rate": 16000, "width": 2, "channels": 1}, "payload_length": 32000}\n'
        )
        raw.sendall(chunk + pcm[:32_000])
        eventually(lambda: home.held()["sessions"])


def test_it_is_no_websocket_and_takes_no_keys(home):
    answer = home.http.get("/wyoming")
    assert answer.status_code == 404
    with pytest.raises(OptionError) as refused:
        ServeConfig(wyoming_port=10_300, api_keys=("secret",))
    assert refused.value.param == "wyoming_port"
