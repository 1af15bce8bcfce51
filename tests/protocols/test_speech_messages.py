"""What /v1/audio/speech and its WebSocket understand and say, without a server."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import (
    AsrServeError,
    MalformedRequest,
    MissingOption,
    OptionError,
    TextTooLong,
    UnknownCommand,
    UnknownOption,
    UnsupportedOption,
)
from asr_serve.protocols.openai.speech import (
    SPEECH_MEMBERS,
    SpeechRequest,
    SpeechStyle,
    SpeechWord,
    encode_audio_delta,
    encode_done,
    encode_words,
    max_body_bytes,
    parse_speech_request,
)
from asr_serve.protocols.stream import speech_messages
from asr_serve.protocols.stream.speech_messages import (
    AppendText,
    CancelSpeech,
    EndSpeech,
    FlushSpeech,
    SpeechFinished,
    SpeechSentence,
    StartSpeech,
    parse_speech_command,
)

MOST = 100
MANNER = {"speed": 2, "pitch": -3.5, "energy": 6, "seed": 7, "lexicon": {"GIF": "dʒɪf"}, "watermark": True}
SAID = SpeechStyle(speed=2.0, pitch=-3.5, energy=6.0, seed=7, lexicon={"GIF": "dʒɪf"}, watermark=True)


def body(**members: object) -> bytes:
    return json.dumps({"input": "Hello.", **members}).encode()


def told(line: bytes) -> dict[str, object]:
    assert line.startswith(b"data: ")
    assert line.endswith(b"\n\n")
    return dict(json.loads(line.removeprefix(b"data: ")))


# --- POST -------------------------------------------------------------------------------------------------


def test_only_a_text():
    assert parse_speech_request(body(), MOST) == SpeechRequest("Hello.")
    names = "model voice instructions response_format speed stream_format words ssml phonemes lexicon pitch energy"
    nothing = dict.fromkeys([*names.split(), "seed", "sample_rate", "watermark"])
    assert parse_speech_request(body(**nothing), MOST) == SpeechRequest("Hello.")


def test_all_that_there_is():
    asked = parse_speech_request(
        body(
            model="tts-1",
            voice={"id": "mine"},
            instructions="Whisper.",
            response_format="opus",
            stream_format="sse",
            sample_rate=48_000,
            words=True,
            ssml=True,
            **MANNER,
        ),
        MOST,
    )
    assert asked.style.ssml
    assert asked == SpeechRequest(
        "Hello.", "tts-1", "mine", "opus", 48_000, asked.style, sse=True, words=True, ignored=("instructions",)
    )
    assert parse_speech_request(body(**MANNER), MOST).style == SAID


@pytest.mark.parametrize(
    ("sent", "kind", "param", "says"),
    [
        (b"", MalformedRequest, None, "cannot be read as JSON"),
        (b"\xff", MalformedRequest, None, "cannot be read as JSON"),
        (b"[1]", MalformedRequest, None, "no object"),
        (b"[" * 100_000, MalformedRequest, None, "nested too deeply"),
        (b"{}", MissingOption, "input", "missing"),
        (b'{"input":3}', OptionError, "input", "no text"),
        (body(input="x" * 101), TextTooLong, "input", "101 characters. up to 100"),
        (body(voise="alloy"), UnknownOption, "voise", "did you mean 'voice'"),
        (body(voice=3), OptionError, "voice", '{"id": name}'),
        (body(voice={"id": "a", "x": 1}), UnknownOption, "voice.x", "id"),
        (body(response_format="ogg"), OptionError, "response_format", "mp3, opus, aac, flac, wav, pcm"),
        (body(stream_format="ws"), OptionError, "stream_format", "audio, sse"),
        (body(speed=0.2), OptionError, "speed", "0.25 to 4"),
        (body(speed="fast"), OptionError, "speed", "0.25 to 4"),
        (body(speed=True), OptionError, "speed", "0.25 to 4"),
        (body(pitch=13), OptionError, "pitch", "-12 to 12"),
        (body(energy=-13), OptionError, "energy", "-12 to 12"),
        (body(seed=1.5), OptionError, "seed", "whole"),
        (body(seed=-1), OptionError, "seed", "0 to"),
        (body(sample_rate=11_025), OptionError, "sample_rate", "22050"),
        (body(sample_rate=True), OptionError, "sample_rate", "22050"),
        (body(ssml=1), OptionError, "ssml", "true or false"),
        (body(ssml=True, phonemes=True), OptionError, "phonemes", "one of them"),
        (body(words=True), OptionError, "words", "sse"),
        (body(lexicon=["a"]), OptionError, "lexicon", "no object"),
        (body(lexicon={"a": ""}), OptionError, "lexicon", "phonemes"),
        (body(lexicon={" ": "a"}), OptionError, "lexicon", "phonemes"),
        (body(lexicon={"a": 1}), OptionError, "lexicon", "phonemes"),
        (body(lexicon={"a" * 101: "a"}), OptionError, "lexicon", "100 characters"),
        (body(lexicon={str(n): "a" for n in range(1_001)}), OptionError, "lexicon", "1001 words"),
    ],
)
def test_what_is_no_good_is_refused_by_name(sent, kind, param, says):
    with pytest.raises(kind) as failed:
        parse_speech_request(sent, MOST)
    assert says in str(failed.value)
    assert getattr(failed.value, "param", None) == param


def test_the_list_of_members_is_what_is_read():
    with pytest.raises(UnknownOption) as refused:
        parse_speech_request(body(unknown=1), MOST)
    assert refused.value.allowed == f"known here: {', '.join(sorted(SPEECH_MEMBERS))}"


def test_the_longest_text_fits_into_the_largest_body():
    for letter in ("a", "\u2028", "\U0001f600"):
        longest = json.dumps({"input": letter * MOST}).encode()
        assert len(longest) < max_body_bytes(MOST)
        assert parse_speech_request(longest, MOST).text == letter * MOST


def test_events():
    assert told(encode_audio_delta(b"\0\1")) == {
        "type": "speech.audio.delta",
        "audio": base64.b64encode(b"\0\1").decode(),
    }
    assert told(encode_words([SpeechWord("Hello", 0.0, 0.5)])) == {
        "type": "speech.audio.words",
        "words": [{"word": "Hello", "start": 0.0, "end": 0.5}],
    }
    assert told(encode_done(6, 22_051, 22_050)) == {
        "type": "speech.audio.done",
        "usage": {"input_tokens": 6, "output_tokens": 20, "total_tokens": 26, "seconds": 22_051 / 22_050},
    }
    assert told(encode_done(6, 22_077, 22_050))["usage"]["output_tokens"] == 21  # begun ones count


# --- WebSocket --------------------------------------------------------------------------------------------


def said(**members: object) -> str:
    return json.dumps(members)


def test_commands():
    assert parse_speech_command(said(type="start")) == StartSpeech()
    everything = said(
        type="start", model="m", voice="v", format="mp3", sample_rate=16_000, words=False, instructions="x", **MANNER
    )
    assert parse_speech_command(everything) == StartSpeech("m", "v", "mp3", 16_000, SAID, False, ("instructions",))
    assert parse_speech_command(said(type="text", text=" Hel")) == AppendText(" Hel")
    assert parse_speech_command(said(type="text", text="")) == AppendText("")
    assert parse_speech_command(said(type="flush", id="1")) == FlushSpeech("1")
    assert parse_speech_command(said(type="flush")).id.startswith("flush_")
    assert (parse_speech_command(said(type="end")), parse_speech_command(said(type="cancel"))) == (
        EndSpeech(),
        CancelSpeech(),
    )


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ("", MalformedRequest, "cannot be read"),
        ("{", MalformedRequest, "cannot be read"),
        ("3", MalformedRequest, "no object"),
        ("[" * 100_000, MalformedRequest, "nested too deeply"),
        ("{}", UnknownCommand, "start, text, flush, end, cancel"),
        (said(type="strat"), UnknownCommand, "did you mean 'start'"),
        (said(type="text", text=3), OptionError, "text"),
        (said(type="text", txt="a"), UnknownOption, "did you mean 'text'"),
        (said(type="text", text="a" * 65_537), TextTooLong, "65536"),
        (said(type="text", text="a" * 300_000), MalformedRequest, "262144"),
        (said(type="end", id="1"), UnknownOption, "id"),
        (said(type="flush", id="i" * 201), OptionError, "200"),
        (said(type="start", ssml=True), UnsupportedOption, "POST /v1/audio/speech"),
        (said(type="start", phonemes=True), UnsupportedOption, "POST /v1/audio/speech"),
        (said(type="start", format="ogg"), OptionError, "mp3"),
        (said(type="start", words="yes"), OptionError, "true or false"),
        (said(type="start", input="a"), UnknownOption, "input"),
    ],
)
def test_what_is_no_command_is_refused(message, kind, says):
    with pytest.raises(kind) as failed:
        parse_speech_command(message)
    assert says in str(failed.value)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda each: st.lists(each, max_size=3)))
def test_whatever_comes_is_read_or_refused(value):
    for kind in speech_messages.COMMANDS:
        for name in ("text", "id", "voice", "speed", "lexicon", "words", "format", "sample_rate"):
            try:
                parse_speech_command(json.dumps({"type": kind, name: value}))
            except AsrServeError:
                continue


def test_what_is_told():
    sentence = SpeechSentence(index=0, start=0.25, words=(SpeechWord("Hi", 0.3, 0.5),))
    assert json.loads(sentence.to_json()) == {
        "type": "sentence",
        "index": 0,
        "start": 0.25,
        "words": [{"word": "Hi", "start": 0.3, "end": 0.5}],
    }
    over = SpeechFinished(reason="cancelled", seconds=1.5, sentences=1, characters=9)
    assert json.loads(over.to_json())["reason"] == "cancelled"
    assert json.loads(speech_messages.speech_error("c", "m")) == {"type": "error", "code": "c", "message": "m"}
