"""Framing and events of Wyoming, without a socket: the bytes of its own package, cut anywhere."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.errors import AsrServeError, MalformedRequest, OptionError
from asr_serve.protocols.wyoming import events
from asr_serve.protocols.wyoming.framing import MAX_HEADER_BYTES, EventDecoder, WyomingEvent, encode_event

wyoming_event = pytest.importorskip("wyoming.event", reason="wyoming is not installed: pip install wyoming")
wyoming_asr = pytest.importorskip("wyoming.asr")
wyoming_audio = pytest.importorskip("wyoming.audio")
wyoming_info = pytest.importorskip("wyoming.info")
wyoming_tts = pytest.importorskip("wyoming.tts")


class _Written(bytearray):
    """What the package's own writer wants of a stream."""

    def writelines(self, parts):
        for part in parts:
            self += part

    def write(self, part):
        self += part

    async def drain(self):
        pass


def written(*sent):
    """Bytes that the package writes for these events."""
    stream = _Written()
    for each in sent:
        asyncio.run(wyoming_event.async_write_event(each.event(), stream))
    return bytes(stream)


def read(data):
    """Events that the package reads."""

    async def read_all():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found = []
        while (event := await wyoming_event.async_read_event(reader)) is not None:
            found.append(event)
        return found

    return asyncio.run(read_all())


CLIENTS = written(
    wyoming_info.Describe(),
    wyoming_asr.Transcribe(name="m", language="en", transcript_names=["Ada"], transcript_terms=["Babbage"]),
    wyoming_audio.AudioStart(rate=16_000, width=2, channels=1),
    wyoming_audio.AudioChunk(rate=16_000, width=2, channels=1, audio=b"\n{}\0" * 99),
    wyoming_audio.AudioStop(),
    wyoming_tts.Synthesize(text="Größe", voice=wyoming_tts.SynthesizeVoice(name="heart")),
)
PARSED = [
    events.WyomingDescribe(),
    events.WyomingTranscribe("m", "en", ("Ada",), ("Babbage",)),
    events.WyomingAudioStart(16_000, 2, 1),
    events.WyomingAudioChunk(events.WyomingAudioFormat(16_000, 2, 1), b"\n{}\0" * 99),
    events.WyomingAudioStop(),
    events.WyomingSynthesize("Größe", events.WyomingVoice("heart")),
]


@settings(max_examples=40)
@given(st.lists(st.integers(0, len(CLIENTS)), max_size=12))
def test_what_the_package_writes_is_read_however_it_is_cut(cuts):
    decoder, found, edges = EventDecoder(), [], sorted({0, len(CLIENTS), *cuts})
    for start, end in pairwise(edges):
        found += map(events.parse_event, decoder.feed(CLIENTS[start:end]))
    assert found == PARSED


def test_the_package_reads_what_is_written():
    model = events.WyomingModel("whisper-base", ("en", "de"), "Whisper", "a paper", "https://example.org")
    info, start, chunk, stop, whole, audio, error = read(
        events.encode_info("1.0", [model], [])
        + events.encode_transcript_start("en")
        + events.encode_transcript_chunk("Hello,")
        + events.encode_transcript_end("Hello, you.", "en")
        + events.encode_audio_chunk(b"\1\2", 24_000)
        + events.encode_error("option_error", "no").encode()
    )
    told = wyoming_info.Info.from_event(info)
    (program,) = told.asr
    assert (program.name, program.supports_transcript_streaming) == ("asr-serve", True)
    assert (program.models[0].name, program.models[0].languages) == ("whisper-base", ["en", "de"])
    assert (told.tts, told.wake) == ([], [])
    assert wyoming_asr.TranscriptStart.from_event(start).language == "en"
    assert wyoming_asr.TranscriptChunk.from_event(chunk).text == "Hello,"
    assert wyoming_asr.TranscriptStop.is_type(stop.type)
    assert wyoming_asr.Transcript.from_event(whole) == wyoming_asr.Transcript("Hello, you.", language="en")
    assert wyoming_audio.AudioChunk.from_event(audio).audio == b"\1\2"
    assert (error.type, error.data) == ("error", {"text": "no", "code": "option_error"})


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no header of an event"),
        (b"\x16\x03\x01\x02\n", "no header of an event"),
        (b"[" * 60_000 + b"\n", "no header of an event"),
        (b'{"data": {}}\n', "no header of an event"),
        (b'{"type": "describe", "data": []}\n', "no header of an event"),
        (b"x" * (MAX_HEADER_BYTES + 1), "bytes or more came"),
        (b"x" * (MAX_HEADER_BYTES + 1) + b"\n", "bytes or more came"),
        (b'{"type": "audio-chunk", "payload_length": 1048577}\n', "payload_length is 1048577"),
        (b'{"type": "audio-chunk", "payload_length": -1}\n', "payload_length is -1"),
        (b'{"type": "describe", "data_length": 1048577}\n', "data_length is 1048577"),
        (b'{"type": "describe", "data_length": 2}\n[]', "a JSON object"),
    ],
)
def test_bytes_that_are_no_events_are_refused(sent, says):
    with pytest.raises(MalformedRequest, match=says):
        EventDecoder().feed(sent)


FORM = {"rate": 16_000, "width": 2, "channels": 1}
SPOKEN = {"text": "a"}
WRONG_DATA: list[tuple[str, dict[str, Any], dict[str, Any], type[AsrServeError]]] = [
    *((kind, FORM, {"rate": 1}, OptionError) for kind in ("audio-start", "audio-chunk")),
    *((kind, FORM, {"width": 4}, OptionError) for kind in ("audio-start", "audio-chunk")),
    *((kind, FORM, {"channels": 2}, OptionError) for kind in ("audio-start", "audio-chunk")),
    ("audio-chunk", {}, {}, MalformedRequest),
    ("audio-chunk", FORM, {"rate": "16000"}, MalformedRequest),
    ("ping", {}, {"text": []}, MalformedRequest),
    ("transcribe", {}, {"name": 1}, MalformedRequest),
    ("transcribe", {}, {"language": 5}, MalformedRequest),
    ("transcribe", {}, {"transcript_names": ["x"] * 1_001}, OptionError),
    ("transcribe", {}, {"transcript_names": "Ada"}, MalformedRequest),
    ("transcribe", {}, {"transcript_terms": [None]}, MalformedRequest),
    ("synthesize", {}, {}, MalformedRequest),
    ("synthesize", {}, {"text": b"\xff"}, MalformedRequest),
    ("synthesize", SPOKEN, {"voice": "heart"}, MalformedRequest),
    *(("synthesize", SPOKEN, {"voice": {name: 1}}, MalformedRequest) for name in ("name", "language", "speaker")),
    ("synthesize", SPOKEN, {"text_format": "html"}, MalformedRequest),
    ("synthesize-start", {}, {"voice": []}, MalformedRequest),
    ("synthesize-start", {}, {"text_format": "html"}, MalformedRequest),
    ("synthesize-chunk", {}, {"text": None}, MalformedRequest),
]
"""Kind of an event, data that is right, the members that are wrong in their place, and the error."""


@pytest.mark.parametrize(("kind", "right", "wrong", "error"), WRONG_DATA)
def test_data_that_is_no_good_is_refused(kind, right, wrong, error):
    with pytest.raises(AsrServeError) as refused:
        events.parse_event(WyomingEvent(kind, right | wrong))
    assert type(refused.value) is error
    assert isinstance(refused.value, OptionError) or f"data of the event {kind}" in str(refused.value)


def test_every_member_has_a_wrong_value():
    members = {
        "ping": events.WyomingPing,
        "transcribe": events.WyomingTranscribe,
        "audio-start": events.WyomingAudioStart,
        "audio-chunk": events.WyomingAudioFormat,
        "synthesize": events.WyomingSynthesize,
        "synthesize-start": events.WyomingSynthesizeStart,
        "synthesize-chunk": events.WyomingSynthesizeChunk,
    }
    for kind, struct in members.items():
        tried = {name for sent, _, wrong, _ in WRONG_DATA if sent == kind for name in wrong}
        assert tried >= set(struct.__struct_fields__), kind


def test_an_event_of_another_service_is_dropped():
    (event,) = EventDecoder().feed(encode_event("detect", {"names": ["ok nabu"]}))
    assert events.parse_event(event) is None
