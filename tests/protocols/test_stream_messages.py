"""What /v1/stream understands and says, without a server."""

from __future__ import annotations

import contextlib
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.errors import MalformedRequest, OptionError, UnknownCommand
from asr_serve.pipelines.live import events as caller
from asr_serve.pipelines.options import ListenOptions, TurnOptions
from asr_serve.protocols.stream.client_messages import (
    EndCommand,
    FlushCommand,
    NewSessionRequest,
    SilenceCommand,
    StreamResume,
    parse_command,
    parse_flush_body,
    parse_query,
)
from asr_serve.protocols.stream.server_events import (
    MAX_SEGMENT_SPEAKERS,
    AckEvent,
    PartialEvent,
    StreamEventEncoder,
    StreamTurnEvent,
    stream_error,
)
from asr_serve.server.realtime.stream.event_log import MAX_LOG_BYTES
from asr_serve.types import Segment, Word


def test_a_query_that_says_nothing():
    assert parse_query({}, packets=True) == NewSessionRequest(None, "s16le", None, ListenOptions())


def test_a_query_that_says_everything():
    query = {
        "model": "m",
        "language": "English",
        "encoding": "mulaw",
        "rate": "8000",
        "partial_ms": "250",
        "max_segment_ms": "9000",
        "silence_schedule": "inf:300",
        "threshold": "0.4",
        "turn": "smart-turn",
        "eager_threshold": "0.3",
        "turn_threshold": "0.6",
        "prompt": " Said before, so. ",
        "hotwords": "Ada:2, Charles Babbage,,",
        "words": "true",
        "speakers": "1",
        "itn": "yes",
        "api_key": "k",
    }
    assert parse_query({name: [value] for name, value in query.items()}, packets=False) == NewSessionRequest(
        "m",
        "mulaw",
        8_000,
        ListenOptions(
            language="en",
            partial_ms=250,
            max_segment_ms=9_000,
            silence_schedule=SilenceSchedule.from_text("inf:300"),
            threshold=0.4,
            turn=TurnOptions(model="smart-turn", threshold=0.6, eager_threshold=0.3),
            prompt="Said before, so.",
            hotwords=("Ada:2", "Charles Babbage"),
            words=True,
            speakers=True,
            itn=True,
        ),
    )


@pytest.mark.parametrize("name", ["num_speakers", "min_speakers", "max_speakers"])
def test_who_says_how_many_speak_wants_them(name):
    asked = parse_query({name: ["2"]}, packets=True)
    assert isinstance(asked, NewSessionRequest)
    assert asked.options == ListenOptions(speakers=True, **{name: 2})
    for query in ({name: ["0"]}, {name: ["33"]}, {name: ["two"]}, {name: ["2"], "speakers": ["false"]}):
        with pytest.raises(OptionError) as refused:
            parse_query(query, packets=True)
        assert refused.value.param == name


def test_a_resume():
    assert parse_query({"session": ["s"], "after": ["12"], "api_key": ["k"]}, packets=True) == StreamResume("s", 12)
    assert parse_query({"session": ["s"]}, packets=True) == StreamResume("s", 0)
    for query, param in (
        ({"session": ["s"], "encoding": ["alaw"]}, "encoding"),
        ({"session": ["s"], "after": ["-1"]}, "after"),
        ({"after": ["1"]}, "after"),
    ):
        with pytest.raises(OptionError) as refused:
            parse_query(query, packets=True)
        assert refused.value.param == param


def test_turn_silence_is_the_rule():
    assert parse_query({"turn": ["silence"], "eager_threshold": ["0.5"]}, packets=True) == NewSessionRequest(
        None, "s16le", None, ListenOptions(turn=TurnOptions(eager_threshold=0.5))
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"type":"flush","id":"a b\\u4e2d"}', FlushCommand("a b中")),
        ('{"type":"end","more":[1]}', EndCommand()),
        ('{"type":"silence","samples":1}', SilenceCommand(1)),
        ('{"type":"silence","samples":2880000}', SilenceCommand(2_880_000)),
        ('{"type":"silence","samples":2880001}', OptionError),
        ('{"type":"silence","samples":0}', OptionError),
        ('{"type":"silence","samples":-1600}', OptionError),
        ('{"type":"silence"}', OptionError),
        ('{"type":"silence","samples":1.5}', MalformedRequest),
        ('{"type":"silence","samples":1e400}', MalformedRequest),
        ('{"type":"silence","samples":"10"}', MalformedRequest),
        ('{"type":"END"}', UnknownCommand),
        ('{"type":"flush","id":7}', MalformedRequest),
        ('{"type":"flush","id":"' + "x" * 201 + '"}', OptionError),
        ("\ud800", MalformedRequest),
        ("null", MalformedRequest),
        ('{"x":' + "[" * 4_000, MalformedRequest),
        ('{"type":"end"}' + " " * 4_096, MalformedRequest),
    ],
)
def test_commands(text: str, found: object):
    if isinstance(found, type):
        with pytest.raises(found):
            parse_command(text)
    else:
        assert parse_command(text) == found


def test_a_flush_without_a_name_gets_one():
    names = {parse_flush_body(b"").id, parse_flush_body(b"{}").id, parse_command('{"type":"flush"}').id}
    assert len(names) == 3


@given(st.binary(max_size=64) | st.text(max_size=64))
def test_any_text_is_a_command_or_refused(text: str | bytes):
    with contextlib.suppress(MalformedRequest, OptionError):
        parse_command(text)


@given(st.integers(0, 16_000 * 86_400 * 365))
def test_times_are_whole_samples(samples: int):
    told = AckEvent(received_bytes=0, received_s=samples / 16_000).encode()
    shown = json.loads(told.json, parse_float=str)["received_s"]
    assert Fraction(shown) == Fraction(samples, 16_000)
    assert len(str(shown).partition(".")[2]) <= 7


def test_an_event_in_both_forms():
    told = StreamTurnEvent(seq=3, state="started", position_s=0.5, probability=None, by="silence").encode()
    assert json.loads(told.json)["probability"] is None
    assert told.sse == b"event: turn\nid: 3\ndata: " + told.json + b"\n\n"
    assert AckEvent(received_bytes=1, received_s=0.5).encode().sse.startswith(b"event: ack\ndata: {")
    assert json.loads(stream_error("c", "m")) == {"type": "error", "code": "c", "message": "m"}
    assert json.loads(stream_error("c", "m", 5, "p"))["retry_after_ms"] == 5


TWENTY = Segment(
    16_000,
    32_000,
    "$20.",
    words=(Word("$20.", 16_000, 31_200, 0.8, "SPEAKER_00", "Twenty dollars."),),
    speaker="SPEAKER_00",
    spoken="Twenty dollars.",
)


def told(script: StreamEventEncoder, *events: caller.LiveEvent) -> list[dict[str, object]]:
    return [json.loads(line.encode().json) for event in events for line in script.encode_events(event)]


def test_a_segment_tells_no_more_than_was_asked_for():
    (segment,) = told(StreamEventEncoder(), caller.LiveSegmentDone(Segment(0, 16_000, "Hello."), 16_000))
    assert segment == {"type": "segment", "index": 0, "start_s": 0.0, "end_s": 1.0, "text": "Hello."}


def test_a_language_that_was_heard_is_told_with_its_probability():
    (segment,) = told(StreamEventEncoder(), caller.LiveSegmentDone(Segment(0, 16_000, "Hej."), 16_000, "sv", 0.87654))
    assert (segment["language"], segment["language_probability"]) == ("sv", 0.8765)
    (segment,) = told(StreamEventEncoder(), caller.LiveSegmentDone(Segment(0, 16_000, "Hej."), 16_000, "sv"))
    assert not {"language", "language_probability"} & segment.keys()


def test_words_of_a_segment():
    (segment,) = told(StreamEventEncoder(words=True), caller.LiveSegmentDone(TWENTY, 40_000))
    assert segment["words"] == [
        {"text": "$20.", "start_s": 1.0, "end_s": 1.95, "confidence": 0.8, "spoken": "Twenty dollars."}
    ]
    assert (segment["speaker"], segment["spoken"]) == ("SPEAKER_00", "Twenty dollars.")
    (segment,) = told(StreamEventEncoder(), caller.LiveSegmentDone(TWENTY, 40_000))
    assert "words" not in segment
    other = Word("you", 0, 16_000, 0.5, "SPEAKER_01")
    (segment,) = told(
        StreamEventEncoder(words=True),
        caller.LiveSegmentDone(Segment(0, 16_000, "you", words=(other,), speaker="a"), 0),
    )
    assert segment["words"][0]["speaker"] == "SPEAKER_01"


def test_at_the_end_those_segments_are_told_that_somebody_else_said():
    script = StreamEventEncoder()
    for speaker in ("", "SPEAKER_00", "SPEAKER_01"):
        told(script, caller.LiveSegmentDone(Segment(0, 16_000, "x", speaker=speaker), 16_000))
    speakers, end = told(
        script, caller.SpeakersRevised(("SPEAKER_00", "SPEAKER_00", "SPEAKER_00")), caller.SessionFinished(0)
    )
    assert speakers["segments"] == [{"index": 0, "speaker": "SPEAKER_00"}, {"index": 2, "speaker": "SPEAKER_00"}]
    assert end["segments"] == 3
    (speakers,) = told(StreamEventEncoder(), caller.SpeakersRevised(()))
    assert speakers["segments"] == []


def test_many_speakers_fit_into_the_log_of_a_session():
    script, count = StreamEventEncoder(), 2 * MAX_SEGMENT_SPEAKERS + 1
    for _ in range(count):
        list(script.encode_events(caller.LiveSegmentDone(Segment(0, 16_000, "x", speaker="SPEAKER_00"), 16_000)))
    lines = [line.encode() for line in script.encode_events(caller.SpeakersRevised(("SPEAKER_01",) * count))]
    assert len(lines) == 3
    assert max(len(line.json) for line in lines) < MAX_LOG_BYTES / 4
    found = [each["index"] for line in lines for each in json.loads(line.json)["segments"]]
    assert found == list(range(count))


WORDS = st.lists(st.sampled_from(["it", "was", "the", "best", "中文"]), min_size=1, max_size=12)


@given(st.lists(st.tuples(WORDS, st.lists(st.integers(0, 12), max_size=6)), max_size=4))
def test_locked_text_is_how_its_segment_begins(spoken: list[tuple[list[str], list[int]]]):
    """However the fixed words of a partial grow, what is locked of a segment is a prefix of it, told once."""
    script, lines = StreamEventEncoder(), []
    for number, (words, cuts) in enumerate(spoken):
        start = 16_000 * number
        for cut in sorted(cuts):
            fixed = " ".join(words[:cut])
            rest = " ".join(words)[len(fixed) :]
            lines += script.encode_events(caller.LivePartial(start, start + 100 * cut, fixed, rest))
        lines += script.encode_events(
            caller.LiveSegmentDone(Segment(start, start + 9_000, " ".join(words)), start + 9_000)
        )
    lines += script.encode_events(caller.SessionFinished(99_000))
    locked, index = "", 0
    for line in lines:
        match line.type:
            case "locked":
                locked += line.text
            case "partial":
                assert isinstance(line, PartialEvent)
                assert locked + line.text == " ".join(spoken[index][0])
            case "segment":
                assert line.text.startswith(locked)
                assert line.index == index
                locked, index = "", index + 1
    assert (lines[-1].type, lines[-1].segments) == ("end", len(spoken))
