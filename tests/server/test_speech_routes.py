"""POST /v1/audio/speech with OpenAI's own client, and by hand where that client cannot."""

from __future__ import annotations

import base64
import io
import json
import threading
import wave
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import openai
import pytest
from case_tiers import exhaustive_after
from openai import AsyncOpenAI
from raw_http import Raw
from running_server import MODEL, VOICE, WAIT_S, Running, eventually

from asr_serve.audio.encode import FORMATS
from asr_serve.audio.reader import open_audio
from asr_serve.audio.resample import resample_clip
from asr_serve.audio.watermark import detect_watermark
from asr_serve.cloning.pitch_tracking import track_pitch
from asr_serve.cloning.voice_corpus import RATE_HZ
from asr_serve.server.tts.audio_stream import SpeechStream
from asr_serve.server.tts.voice_catalog import OPENAI_VOICES

ROUTE = "/v1/audio/speech"
TEXT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
HEARD = "ever tried ever failed no matter try again fail again fail better"
LONG = " ".join(f"This is sentence number {n}, and there are many more of its kind to come." for n in range(1, 120))
"""Minutes of it: more than a server makes for somebody who does not listen."""


def speak(server: Running, text: str = TEXT, **members: object):
    return server.http.post(ROUTE, json={"input": text, **members})


def words(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalpha() or letter == " ").strip()


def pcm(server: Running, text: str = TEXT, **members: object) -> np.ndarray:
    answer = speak(server, text, response_format="pcm", **members)
    assert answer.status_code == 200, answer.text
    return np.frombuffer(answer.content, "<i2")


def events(body: bytes) -> list[dict[str, object]]:
    blocks = body.decode().strip().split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def refused(answer) -> tuple[int, str, str | None, str]:
    error = answer.json()["error"]
    assert answer.headers["x-request-id"]
    return answer.status_code, error["code"], error["param"], error["message"]


# --- the unmodified client ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", exhaustive_after(3, FORMATS))
def test_every_format_says_the_text(speaker, form):
    answer = speaker.openai().audio.speech.create(model="tts-1", voice="heart", input=TEXT, response_format=form)
    sound = answer.read()
    if form == "pcm":
        sound = as_wav(sound, 24_000)
    heard = speaker.openai().audio.transcriptions.create(model=MODEL, file=(f"speech.{form}", sound))
    assert words(heard.text) == HEARD
    assert answer.response.headers["x-model"] == VOICE
    assert answer.response.headers["x-voice"] == "heart"


def as_wav(samples: bytes, rate_hz: int) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(samples)
    return made.getvalue()


def test_the_first_bytes_come_before_the_last_are_made(speaker, monkeypatch):
    """The server is kept from taking a third sentence until the client has heard of the first."""
    text, heard, waited, taken = LONG[:500], threading.Event(), list[bool](), SpeechStream._drain_events

    def waiting(saying):
        if saying.sentences == 2:
            waited.append(heard.wait(WAIT_S))
        return taken(saying)

    monkeypatch.setattr(SpeechStream, "_drain_events", waiting)
    with speaker.openai().audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=text, response_format="pcm"
    ) as answer:
        pieces = answer.iter_bytes(4_096)
        first = next(pieces)
        assert np.frombuffer(first, "<i2").any()
        heard.set()
        assert first + b"".join(pieces) == pcm(speaker, text).tobytes()
    assert waited
    assert all(waited)


def test_events(speaker):
    with speaker.openai().audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="nova", input=TEXT, response_format="pcm", stream_format="sse"
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    *deltas, done = found
    assert {each["type"] for each in deltas} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(each["audio"]) for each in deltas)
    assert sound == pcm(speaker).tobytes()
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["input_tokens"] == len(TEXT)
    assert done["usage"]["seconds"] == len(sound) / 2 / 24_000
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"]


async def test_the_async_client(speaker):
    async with AsyncOpenAI(base_url=f"{speaker.url}/v1", api_key="none") as client:
        answer = await client.audio.speech.create(model="tts-1", voice="echo", input=TEXT, response_format="pcm")
        assert await answer.aread() == pcm(speaker).tobytes()


def test_errors_are_the_clients_own(speaker):
    with pytest.raises(openai.BadRequestError) as failed:
        speaker.openai().audio.speech.create(model="tts-1", voice="hart", input="Hello.")
    assert (failed.value.code, failed.value.param) == ("unknown_voice", "voice")
    assert "did you mean 'heart'?" in failed.value.message
    with pytest.raises(openai.NotFoundError) as failed:
        speaker.openai().audio.speech.create(model="tts-9", voice="heart", input="Hello.")
    assert failed.value.code == "model_not_found"


def test_instructions_are_taken_and_not_followed(speaker):
    answer = speak(speaker, instructions="Whisper.", response_format="pcm")
    assert answer.headers["x-ignored"] == "instructions"
    assert answer.content == pcm(speaker).tobytes()
    assert "x-ignored" not in speak(speaker).headers


@pytest.mark.parametrize("voice", [*OPENAI_VOICES, {"id": "heart"}, None], ids=str)
def test_openais_voices_always_speak(speaker, voice):
    answer = speak(speaker, "Hello.", voice=voice)
    assert (answer.status_code, answer.headers["x-voice"]) == (200, "heart")


def test_names_of_ones_own(serve_voice):
    server = serve_voice(aliases={"reader": VOICE}, voice_aliases={"narrator": "heart", "alloy": "nobody"})
    assert speak(server, "Hello.", model="reader", voice="narrator").headers["x-voice"] == "heart"
    status, code, _, message = refused(speak(server, "Hello.", voice="narator"))
    assert (status, code) == (400, "unknown_voice")
    assert "did you mean 'narrator'?" in message
    assert refused(speak(server, "Hello.", voice="alloy"))[1] == "unknown_voice"  # as the operator has it


def test_voices_are_listed(speaker):
    found = speaker.http.get("/v1/audio/voices").json()
    assert found == {"voices": [{"id": "heart", "name": "heart", "model": VOICE, "default": True, "cloned": False}]}


# --- how it is said -----------------------------------------------------------------------------------


def test_the_same_request_gives_the_same_samples(speaker):
    assert np.array_equal(pcm(speaker, seed=7), pcm(speaker, seed=7))


def test_speed_pitch_and_energy(speaker):
    text = "It was the best of times and the worst of times."
    usual = pcm(speaker, text)
    assert len(pcm(speaker, text, speed=0.5)) == pytest.approx(2 * len(usual), rel=0.02)
    # Durations of this voice are whole frames of 25 ms, one at least: twice as fast is longer than half.
    fast, faster = (len(usual) / len(pcm(speaker, text, speed=speed)) for speed in (2, 4))
    assert 1.5 < fast < faster < 4
    for wanted_db in (6, -6):
        assert loudness_db(pcm(speaker, text, energy=wanted_db)) - loudness_db(usual) == pytest.approx(
            wanted_db, abs=0.2
        )
    for semitones in (4, -4):
        moved = pcm(speaker, text, pitch=semitones)
        assert len(moved) == pytest.approx(len(usual), rel=0.01)
        assert 12 * np.log2(height_hz(moved) / height_hz(usual)) == pytest.approx(semitones, abs=0.6)


def loudness_db(said: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(np.square(said, dtype=np.float64))))


def height_hz(said: np.ndarray) -> float:
    """Of what OpenAI calls pcm: the geometric mean of F0."""
    heights = track_pitch(resample_clip(said.astype(np.float32) / 32_768, 24_000, RATE_HZ))
    return float(np.exp(np.log(heights[heights > 0]).mean()))


def test_rates(speaker):
    for form, rate_hz, found_hz in (("wav", None, 24_000), ("wav", 8_000, 8_000), ("pcm", 48_000, 48_000)):
        answer = speak(speaker, response_format=form, sample_rate=rate_hz)
        assert answer.headers["x-sample-rate"] == str(found_hz)
        if form == "wav":
            assert int.from_bytes(answer.content[24:28], "little") == found_hz
    assert abs(len(pcm(speaker, sample_rate=48_000)) - 2 * len(pcm(speaker))) <= 2
    assert speak(speaker, response_format="opus", sample_rate=22_050).headers["x-sample-rate"] == "24000"


def test_ssml_phonemes_and_a_lexicon(speaker):
    plain, pause = (pcm(speaker, "One. Two."), pcm(speaker, '<speak>One. <break time="2s"/> Two.</speak>', ssml=True))
    assert 1.5 * 24_000 < len(pause) - len(plain) < 2.5 * 24_000
    heard = speak(speaker, "nˈO mˈæTəɹ", phonemes=True, response_format="wav")
    assert transcribed(speaker, heard.content) == "no matter"
    said = speak(speaker, "Ever xqz.", lexicon={"xqz": "fˈAld"}, response_format="wav")
    assert transcribed(speaker, said.content) == "ever failed"


def transcribed(server: Running, sound: bytes) -> str:
    return words(server.openai().audio.transcriptions.create(model=MODEL, file=("a.wav", sound)).text)


def test_a_watermark(speaker):
    marked, plain = (pcm(speaker, LONG[:400], watermark=watermark) / np.float32(32_768) for watermark in (True, False))
    assert len(marked) == len(plain)
    assert detect_watermark(marked, 24_000).is_marked
    assert not detect_watermark(plain, 24_000).is_marked


def test_words_have_times(speaker):
    answer = speak(speaker, "Ever tried. No matter.", response_format="pcm", stream_format="sse", words=True)
    found = events(answer.content)
    sentences = [each for each in found if each["type"] == "speech.audio.words"]
    said = [word for each in sentences for word in each["words"]]
    assert [words(word["word"]) for word in said] == ["ever", "tried", "no", "matter"]
    assert all(before["end"] <= after["start"] for before, after in pairwise(said))
    seconds = found[-1]["usage"]["seconds"]
    assert 0 <= said[0]["start"] < said[-1]["end"] <= seconds
    sound = 0
    for each in found[:-1]:  # a sentence's words come before its sound
        if each["type"] == "speech.audio.words":
            assert each["words"][0]["start"] >= sound / 24_000 - 0.001
        else:
            sound += len(base64.b64decode(each["audio"])) // 2


# --- what is no good ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "code", "param", "says"),
    [
        ({"input": ""}, "empty_text", "input", "empty"),
        ({"input": " \n"}, "empty_text", "input", "empty"),
        ({"input": "\U0001f600 \U0001f680"}, "empty_text", "input", "nothing in it to say"),
        ({"input": "..."}, "empty_text", "input", "nothing in it to say"),
        ({"input": "x" * 100_000}, "text_too_long", "input", "100000 characters. up to 50000"),
        ({"input": "Привет"}, "unsupported_script", "input", "CYRILLIC"),
        ({"input": "こんにちは"}, "unsupported_script", "input", "HIRAGANA"),
        ({"input": "<speak>\n <b>x</b></speak>", "ssml": True}, "malformed_ssml", "input", "line 2, column 2"),
        ({"input": "<speak>x", "ssml": True}, "malformed_ssml", "input", "line 1"),
        ({"input": "ʘ", "phonemes": True}, "unknown_phoneme", "input", "ʘ"),
        ({"input": "x", "lexicon": {"x": "ʘ"}}, "unknown_phoneme", "lexicon", "ʘ"),
        ({"input": "Hello.", "voice": "nobody"}, "unknown_voice", "voice", "voices: heart"),
        ({"input": "Hello.", "response_format": "ogg"}, "option_error", "response_format", "mp3, opus"),
        ({"input": "Hello.", "speed": 5}, "option_error", "speed", "0.25 to 4"),
        ({"input": "Hello.", "voise": "a"}, "unknown_option", "voise", "voice"),
        ({"input": "Hello.", "model": MODEL}, "wrong_model", "model", "does not synthesize"),
        ({}, "missing_option", "input", "missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_good_is_told(speaker, members, code, param, says):
    status, *found, message = refused(speaker.http.post(ROUTE, json=members))
    assert (status, found) == (400, [code, param])
    assert says in message


def test_a_model_that_speaks_hears_nothing(speaker, beckett):
    with pytest.raises(openai.BadRequestError) as failed:
        speaker.openai().audio.transcriptions.create(model=VOICE, file=beckett)
    assert failed.value.code == "wrong_model"


def test_a_server_without_a_voice_says_so(server):
    status, code, _, message = refused(speak(server, "Hello."))
    assert (status, code) == (404, "model_not_loaded")
    assert "--voice" in message
    assert server.http.get("/v1/audio/voices").json() == {"voices": []}


def test_bodies_that_are_too_large_or_too_late(serve_voice):
    server = serve_voice(max_characters=10, upload_idle_s=0.2)
    assert refused(speak(server, "x" * 11))[1] == "text_too_long"
    for length in (100_000, None):
        with Raw(server.port) as line:
            line.head(ROUTE, length)
            if length is None:
                line.chunk(b"x" * 100_000)
            status, _, body = line.answer()
            assert (status, json.loads(body)["error"]["code"]) == (400, "text_too_long")
    with Raw(server.port) as line:
        line.head(ROUTE, 30)
        line.socket.sendall(b'{"input":')
        status, _, body = line.answer()
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    server.expect_empty()


# --- who comes and goes -------------------------------------------------------------------------------


def post(line: Raw, **members: object) -> None:
    body = json.dumps({"input": LONG, "response_format": "pcm", **members}).encode()
    line.head(ROUTE, len(body))
    line.socket.sendall(body)


def test_a_client_that_hangs_up_ends_the_work(speaker):
    with Raw(speaker.port) as line:
        post(line)
        line.until(b"\r\n\r\n")
        line.exactly(1_000)
    eventually(lambda: speaker.counted("asr_serve_requests_total", route=ROUTE, method="POST", status="499"))
    speaker.expect_empty()


def test_a_client_that_does_not_read_is_paced(speaker, monkeypatch):
    sayings = []
    begin = SpeechStream.start

    async def begun(saying):
        sayings.append(saying)
        await begin(saying)

    monkeypatch.setattr(SpeechStream, "start", begun)
    with Raw(speaker.port) as line:
        post(line, sample_rate=48_000)
        line.until(b"\r\n\r\n")
        (slow,) = sayings
        before = -1
        while slow.synthesized_samples != before:  # until nothing more is made, however much the system buffers
            before = slow.synthesized_samples
            for _ in range(5):
                assert speak(speaker).status_code == 200  # others are served meanwhile
        assert speaker.held()["working"] == 1
        assert slow.sentences < LONG.count(".") - 2
    speaker.expect_empty()


def test_many_at_once_are_each_as_if_alone(speaker):
    texts = [f"Number {n} is speaking now." for n in range(1, 9)]
    alone = [pcm(speaker, text).tobytes() for text in texts]
    with ThreadPoolExecutor(len(texts)) as callers:
        together = list(callers.map(lambda text: pcm(speaker, text).tobytes(), texts))
    assert together == alone


def test_places_are_counted(serve_voice):
    server = serve_voice(max_concurrent=1)
    with Raw(server.port) as line:
        post(line)
        line.until(b"\r\n\r\n")
        answer = speak(server, "Hello.")
        assert refused(answer)[:2] == (429, "at_capacity")
        assert int(answer.headers["retry-after-ms"]) > 0
    server.expect_empty()
    assert speak(server, "Hello.").status_code == 200


def test_a_key_is_asked_for(serve_voice):
    server = serve_voice(api_keys=("k-speak",))
    assert refused(speak(server, "Hello."))[:2] == (401, "invalid_api_key")
    assert server.http.get("/v1/audio/voices").status_code == 401
    assert server.openai("k-speak").audio.speech.create(model="tts-1", voice="heart", input="Hello.").read()


def test_what_fails_in_the_middle_is_seen(speaker, monkeypatch):
    """A stream of events says so; of sound, the end is missing."""
    pieces = SpeechStream._chunks

    def break_off(saying, spoken):
        if saying.sentences > 1:
            raise ZeroDivisionError("an encoder's fault")
        return pieces(saying, spoken)

    monkeypatch.setattr(SpeechStream, "_chunks", break_off)
    with Raw(speaker.port) as line:
        post(line)
        assert b"200 OK" in line.until(b"\r\n\r\n")
        rest = b""
        while got := line.socket.recv(65_536):
            rest += got
        assert not rest.endswith(b"0\r\n\r\n")
    *_, last = speak(speaker, LONG, stream_format="sse").text.strip().split("\n\n")
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"]["code"] == "internal_error"


def test_a_server_that_goes_down_finishes_what_it_says(serve_voice):
    server = serve_voice()
    with Raw(server.port) as line:
        post(line, input=TEXT)
        line.until(b"\r\n\r\n")
        server.loop.call_soon_threadsafe(server.gate.drain)
        eventually(lambda: server.gate.draining)
        assert refused(speak(server, "Hello."))[:2] == (503, "draining")
        sound = b""
        while size := int(line.until(b"\r\n"), 16):
            sound += line.exactly(size + 2)[:-2]
    assert len(sound) > 2 * 24_000
    server.expect_empty()


def test_ready_tells_of_the_voice(speaker):
    found = speaker.http.get("/ready").json()
    assert found == {"models": {MODEL: "ready", VOICE: "ready"}, "status": "ready"}
    listed = {each["id"]: each for each in speaker.http.get("/v1/models").json()["data"]}
    assert (listed[VOICE]["speaks"], listed[VOICE]["voices"], listed[MODEL]["speaks"]) == (True, ["heart"], False)


def test_sound_can_be_read_while_it_comes(speaker, tmp_path):
    """What the encoders make is what players read: here our own reader, of every format that has a head."""
    for form in ("mp3", "opus", "aac", "flac", "wav"):
        path = tmp_path / f"speech.{form}"
        path.write_bytes(speak(speaker, response_format=form).content)
        samples = sum(len(chunk) for chunk in open_audio(str(path)))
        assert abs(samples / 16_000 - len(pcm(speaker)) / 24_000) < 0.15, form
