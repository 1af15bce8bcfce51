"""What /v1/stream understands and says, without a server."""

from __future__ import annotations

import contextlib
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import MalformedRequest, OptionError, UnknownCommand
from asr_serve.pipelines.live import caller
from asr_serve.pipelines.live.caller import ListenOptions, TurnOptions
from asr_serve.protocols.stream import Ask, End, Flush, Resume, ask, command, flush
from asr_serve.protocols.stream_events import Ack, Partial, Script, Turn, error
from asr_serve.types import Segment
from asr_serve.vad.schedule import SilenceSchedule


def test_a_query_that_says_nothing():
    assert ask({}, packets=True) == Ask(None, "s16le", None, ListenOptions())


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
        "hotwords": "Ada, Charles Babbage,,",
        "api_key": "k",
    }
    assert ask({name: [value] for name, value in query.items()}, packets=False) == Ask(
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
            hotwords=("Ada", "Charles Babbage"),
        ),
    )


def test_a_resume():
    assert ask({"session": ["s"], "after": ["12"], "api_key": ["k"]}, packets=True) == Resume("s", 12)
    assert ask({"session": ["s"]}, packets=True) == Resume("s", 0)
    for query, param in (
        ({"session": ["s"], "encoding": ["alaw"]}, "encoding"),
        ({"session": ["s"], "after": ["-1"]}, "after"),
        ({"after": ["1"]}, "after"),
    ):
        with pytest.raises(OptionError) as refused:
            ask(query, packets=True)
        assert refused.value.param == param


def test_turn_silence_is_the_rule():
    assert ask({"turn": ["silence"], "eager_threshold": ["0.5"]}, packets=True) == Ask(
        None, "s16le", None, ListenOptions(turn=TurnOptions(eager_threshold=0.5))
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"type":"flush","id":"a b\\u4e2d"}', Flush("a b中")),
        ('{"type":"end","more":[1]}', End()),
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
            command(text)
    else:
        assert command(text) == found


def test_a_flush_without_a_name_gets_one():
    names = {flush(b"").id, flush(b"{}").id, command('{"type":"flush"}').id}
    assert len(names) == 3


@given(st.binary(max_size=64) | st.text(max_size=64))
def test_any_text_is_a_command_or_refused(text: str | bytes):
    with contextlib.suppress(MalformedRequest, OptionError):
        command(text)


@given(st.integers(0, 16_000 * 86_400 * 365))
def test_times_are_whole_samples(samples: int):
    told = Ack(received_bytes=0, received_s=samples / 16_000).told()
    shown = json.loads(told.json, parse_float=str)["received_s"]
    assert Fraction(shown) == Fraction(samples, 16_000)
    assert len(str(shown).partition(".")[2]) <= 7


def test_an_event_in_both_forms():
    told = Turn(seq=3, state="started", position_s=0.5, probability=None, by="silence").told()
    assert json.loads(told.json)["probability"] is None
    assert told.sse == b"event: turn\nid: 3\ndata: " + told.json + b"\n\n"
    assert Ack(received_bytes=1, received_s=0.5).told().sse.startswith(b"event: ack\ndata: {")
    assert json.loads(error("c", "m")) == {"type": "error", "code": "c", "message": "m"}
    assert json.loads(error("c", "m", 5, "p"))["retry_after_ms"] == 5


WORDS = st.lists(st.sampled_from(["it", "was", "the", "best", "中文"]), min_size=1, max_size=12)


@given(st.lists(st.tuples(WORDS, st.lists(st.integers(0, 12), max_size=6)), max_size=4))
def test_locked_text_is_how_its_segment_begins(spoken: list[tuple[list[str], list[int]]]):
    """However the fixed words of a partial grow, what is locked of a segment is a prefix of it, told once."""
    script, lines = Script(), []
    for number, (words, cuts) in enumerate(spoken):
        start = 16_000 * number
        for cut in sorted(cuts):
            fixed = " ".join(words[:cut])
            rest = " ".join(words)[len(fixed) :]
            lines += script.lines(caller.Partial(start, start + 100 * cut, fixed, rest))
        lines += script.lines(caller.SegmentDone(Segment(start, start + 9_000, " ".join(words)), start + 9_000))
    lines += script.lines(caller.Finished(99_000))
    locked, index = "", 0
    for line in lines:
        match line.type:
            case "locked":
                locked += line.text
            case "partial":
                assert isinstance(line, Partial)
                assert locked + line.text == " ".join(spoken[index][0])
            case "segment":
                assert line.text.startswith(locked)
                assert line.index == index
                locked, index = "", index + 1
    assert (lines[-1].type, lines[-1].segments) == ("end", len(spoken))
