"""The voice that ships, over HTTP and a WebSocket: sentences are made chunk by chunk, many callers' in a step."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from case_tiers import exhaustive_after
from raw_http import Raw
from running_server import WAIT_S, Running, eventually
from test_speech_routes import ROUTE, events, pcm, post, speak, transcribed
from test_speech_socket import Line

from asr_serve.audio.encode import FORMATS
from asr_serve.audio.reader import open_audio
from asr_serve.config import ServeConfig
from asr_serve.errors import AsrServeError
from asr_serve.server.engine_registry import EngineParts, open_engine
from asr_serve.server.tts.audio_stream import SpeechStream
from asr_serve.units import s_to_samples

VOICE = "fastpitch-en"
CALLERS = (
    ("heart", "It was the best of times, it was the worst of times."),
    ("adam", "Ever tried. Ever failed."),
    ("emma", "The total comes to $14.50, and your order number is 7."),
    ("george", "No matter."),
    ("nova", "Please hold for about three minutes, while I look for that."),
    ("onyx", "Yes."),
)
SENTENCE = (
    "When the rain had stopped and all the carts had gone round by the mill, nobody spoke of the old bridge any "
    "more until the morning came"
)
"""Many chunks of it, which no comma divides."""
EARLY_S = 0.7
"""Of sound: so much may be made before the first of it must have arrived."""


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[EngineParts, Callable[[], psutil.Process]]]:
    """The voice, and what its engine's process is now."""
    others = set(psutil.Process().children(recursive=True))
    made = open_engine(VOICE, ServeConfig(engine_threads=1))

    def process() -> psutil.Process:
        return next(
            child
            for child in psutil.Process().children(recursive=True)
            if child not in others and "asr_serve.engine.process.main" in " ".join(child.cmdline())
        )

    yield made, process
    made.client.close()


@pytest.fixture(scope="module")
def running(parts: EngineParts, engine: tuple[EngineParts, object]) -> Iterator[Running]:
    server = Running(ServeConfig(voice=VOICE), lambda name, config: engine[0] if name == VOICE else parts)
    yield server
    server.stop()


@pytest.fixture
def speaker(running: Running) -> Iterator[Running]:
    yield running
    running.expect_empty()


@pytest.mark.slow
def test_the_text_is_heard(speaker):
    for voice in ("heart", "michael"):
        said = speak(speaker, "Ever tried. Ever failed. No matter.", voice=voice, response_format="wav").content
        assert transcribed(speaker, said) == "ever tried ever failed no matter"


@pytest.mark.slow
@pytest.mark.parametrize("form", exhaustive_after(3, FORMATS))
def test_sound_leaves_before_its_sentence_is_made(speaker, form, monkeypatch, tmp_path):
    """The server is kept from taking more than EARLY_S until some of it was decoded here."""
    heard, taken = threading.Event(), SpeechStream._drain_events
    before: list[bool] = []

    def waiting(saying):
        if saying.synthesized_samples > s_to_samples(EARLY_S, saying.rate_hz):
            before.append(heard.wait(WAIT_S))
        return taken(saying)

    monkeypatch.setattr(SpeechStream, "_drain_events", waiting)
    path, sound = tmp_path / f"begun.{form}", b""
    with Raw(speaker.port) as line:
        post(line, input=SENTENCE, response_format=form)
        line.until(b"\r\n\r\n")
        while size := int(line.until(b"\r\n"), 16):
            sound += line.exactly(size + 2)[:-2]
            heard.is_set() or (decoded(path, sound) and heard.set())
    assert before
    assert all(before)
    assert decoded(path, sound) > 4 * EARLY_S


def decoded(path, sound: bytes) -> float:
    """Seconds of sound that are in there, if it has any yet."""
    if path.suffix == ".pcm":
        return len(sound) / 2 / 24_000
    path.write_bytes(sound)
    try:
        return sum(len(chunk) for chunk in open_audio(str(path))) / 16_000
    except AsrServeError:  # a head alone
        return 0.0


@pytest.mark.slow
def test_every_way_there_is_gives_the_same_samples(speaker):
    text = f"{SENTENCE}. Ever tried. No matter."
    whole = pcm(speaker, text, voice="emma").tobytes()
    with speaker.openai().audio.speech.with_streaming_response.create(
        model="tts-1", voice="emma", input=text, response_format="pcm"
    ) as answer:
        assert b"".join(answer.iter_bytes(1_000)) == whole
    told = events(speak(speaker, text, voice="emma", response_format="pcm", stream_format="sse").content)
    assert b"".join(base64.b64decode(each["audio"]) for each in told[:-1]) == whole
    with Line(speaker) as line:
        line.say("start", voice="emma")
        line.write(*text)  # a letter each
        line.say("end")
        assert line.until("done")["characters"] == len(text)
        assert line.sound == whole


@pytest.mark.slow
def test_callers_share_steps_and_nothing_else(speaker):
    alone = [pcm(speaker, text, voice=voice).tobytes() for voice, text in CALLERS]
    with ThreadPoolExecutor(len(CALLERS)) as callers:
        together = list(callers.map(lambda each: pcm(speaker, each[1], voice=each[0]).tobytes(), CALLERS))
    assert together == alone
    assert len(set(together)) == len(CALLERS)


def test_words_are_where_they_sound(speaker):
    told = events(
        speak(speaker, "One. Two.", response_format="pcm", stream_format="sse", words=True, speed=0.8).content
    )
    sound = np.frombuffer(b"".join(base64.b64decode(each.get("audio", "")) for each in told), "<i2")
    spoken = [word for each in told for word in each.get("words", ())]
    assert [word["word"] for word in spoken] == ["One.", "Two."]
    between = sound[int(spoken[0]["end"] * 24_000) : int(spoken[1]["start"] * 24_000)].astype(float)
    for word in spoken:
        within = sound[int(word["start"] * 24_000) : int(word["end"] * 24_000)].astype(float)
        assert np.sqrt(np.mean(within**2)) > 5 * np.sqrt(np.mean(between**2))


def test_a_client_that_resets_frees_its_row(speaker):
    long = " ".join(f"{SENTENCE}, number {n}." for n in range(40))
    with Raw(speaker.port) as line:
        post(line, input=long)
        line.until(b"\r\n\r\n")
        line.exactly(1_000)
        assert speaker.held()["requests"] > 0
    speaker.expect_empty()
    with Line(speaker) as line:
        line.say("start")
        line.write(long)
        line.until("sentence")
        line.say("cancel")
        done = line.until("done")
        assert (done["reason"], done["seconds"] < 60) == ("cancelled", True)
        eventually(lambda: speaker.held()["requests"] == 0)


def test_an_engine_that_dies_in_a_sentence_costs_a_pause(speaker, engine):
    text = " ".join(f"{SENTENCE} number {n}." for n in range(3))
    whole = pcm(speaker, text, voice="liam").tobytes()
    restarts = engine[0].client.describe()["restarts"]
    with Raw(speaker.port) as line, Line(speaker) as other:
        other.say("start", voice="liam", words=False)
        other.write(text)
        other.say("end")
        post(line, input=text, voice="liam", sample_rate=24_000)
        assert b"200 OK" in line.until(b"\r\n\r\n")
        sound = line.exactly(int(line.until(b"\r\n"), 16) + 2)[:-2]
        assert other.next()
        engine[1]().kill()
        while size := int(line.until(b"\r\n"), 16):
            sound += line.exactly(size + 2)[:-2]
        assert sound == whole
        assert other.until("done")["reason"] == "end"
        assert len(other.sound) > len(whole)  # it is cut at every clause, since nobody knew of the next
    assert engine[0].client.describe()["restarts"] == restarts + 1
    with Line(speaker) as again:
        again.say("start", voice="liam")
        again.write(text)
        again.say("end")
        again.until("done")
        assert again.sound == other.sound
    eventually(lambda: speaker.http.get("/ready").status_code == 200)


def test_who_speaks(speaker):
    listed = [each["id"] for each in speaker.http.get("/v1/audio/voices").json()["voices"]]
    assert (len(listed), listed[0]) == (28, "heart")
    for asked, found in (("ash", "adam"), ("nova", "nova"), (None, "heart"), ({"id": "lily"}, "lily")):
        answer = speaker.http.post(ROUTE, content=json.dumps({"input": "No.", "voice": asked}))
        assert (answer.status_code, answer.headers["x-voice"]) == (200, found)
