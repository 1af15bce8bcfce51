from __future__ import annotations

import itertools
import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import OptionError
from asr_serve.text import subtitles
from asr_serve.text.subtitles import CUE_LINES, LINE_COLUMNS, cues, render, split_lines, stamp
from asr_serve.types import Segment, Transcript
from asr_serve.units import samples_to_ms


def transcript(*segments: Segment, key: str = "a.wav") -> Transcript:
    end = segments[-1].end_samples if segments else 0
    return Transcript(
        key=key,
        text=" ".join(s.text for s in segments),
        language="en",
        duration_samples=end,
        segments=segments,
        model="moonshine-tiny-en",
    )


HELLO = transcript(
    Segment(8_000, 24_000, "Hello there.", tokens=(5, 6), avg_logprob=-0.25),
    Segment(32_008, 56_000, "Fish & chips --> <now>"),
)

# Any text a model could give, and texts that look like a subtitle file's own marks.
words = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=60),
        st.sampled_from(["-->", "&amp;", "<b>", "1", "00:00:01,000", "WEBVTT", "NOTE", "你好世界" * 20, "\n\n"]),
    ),
    max_size=40,
).map(" ".join)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """Segments in order that never overlap; gaps and lengths of any size, none included."""
    segments, at = [], 0
    for text in draw(st.lists(words, max_size=6)):
        at += draw(st.integers(0, 20_000))
        end = at + draw(st.one_of(st.integers(0, 40), st.integers(0, 500_000)))
        segments.append(Segment(at, end, text))
        at = end
    return segments


def shown(text: str) -> str:
    """The characters a viewer must see: no white space, no control characters."""
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) != "Cc")


def read(page: str, point: str) -> list[tuple[int, int, list[str]]]:
    """A small independent reader of SRT and VTT blocks."""
    found = []
    time = rf"(\d+):(\d\d):(\d\d){re.escape(point)}(\d\d\d)"
    for block in page.split("\n\n"):
        lines = [line for line in block.split("\n") if line]
        at = next((i for i, line in enumerate(lines) if re.fullmatch(f"{time} --> {time}", line)), None)
        if at is None:
            assert lines in ([], ["WEBVTT"])
            continue
        assert at == (0 if point == "." else 1)
        numbers = [int(n) for n in re.findall(r"\d+", lines[at])]
        start, end = (((h * 60 + m) * 60 + s) * 1_000 + ms for h, m, s, ms in (numbers[:4], numbers[4:]))
        found.append((start, end, lines[at + 1 :]))
    return found


def test_text_is_a_line_for_each_segment_with_words() -> None:
    silent = transcript(Segment(0, 10, " one\ntwo "), Segment(10, 20, "  "), Segment(20, 30, "three"))
    assert render(silent, "text") == "one two\nthree\n"
    assert render(transcript(), "text") == ""


def test_json_and_jsonl_say_the_same() -> None:
    whole, line = json.loads(render(HELLO, "json")), render(HELLO, "jsonl")
    assert line.count("\n") == 1
    assert line.endswith("}\n")
    assert whole == json.loads(line) | {"model": "moonshine-tiny-en"}
    assert whole["key"] == "a.wav"
    assert whole["duration"] == 3.5
    assert whole["segments"][1] == {"start": 2.0005, "end": 3.5, "text": "Fish & chips --> <now>"}


def test_verbose_json_has_the_fields_of_openai() -> None:
    whole = json.loads(render(HELLO, "verbose_json"))
    assert whole["task"] == "transcribe"
    assert {"task", "language", "duration", "text", "segments"} <= whole.keys()
    first = whole["segments"][0]
    ratio = first.pop("compression_ratio")
    assert 0 < ratio < 1  # a short text grows under zlib
    assert first == {
        "id": 0, "seek": 50, "start": 0.5, "end": 1.5, "text": "Hello there.",
        "tokens": [5, 6], "temperature": 0.0, "avg_logprob": -0.25, "no_speech_prob": 0.0,
    }  # fmt: skip
    assert subtitles.compression_ratio("") == 0
    assert subtitles.compression_ratio("round and " * 50) > 10


def test_srt() -> None:
    assert render(HELLO, "srt") == (
        "1\n00:00:00,500 --> 00:00:01,500\nHello there.\n\n"
        "2\n00:00:02,001 --> 00:00:03,500\nFish & chips → <now>\n"
    )
    assert render(transcript(), "srt") == ""


def test_vtt_escapes() -> None:
    assert render(HELLO, "vtt") == (
        "WEBVTT\n\n00:00:00.500 --> 00:00:01.500\nHello there.\n\n"
        "00:00:02.001 --> 00:00:03.500\nFish &amp; chips --&gt; &lt;now&gt;\n"
    )
    assert render(transcript(), "vtt") == "WEBVTT\n"


@pytest.mark.parametrize(
    ("ms", "expected"),
    [(0, "00:00:00,000"), (999, "00:00:00,999"), (3_599_999, "00:59:59,999"), (360_000_000, "100:00:00,000")],
)
def test_stamp(ms: int, expected: str) -> None:
    assert stamp(ms, ",") == expected


def test_a_long_segment_shares_time_by_characters_and_lines_are_even() -> None:
    text = " ".join(["four"] * 40)  # 199 characters: five lines, three cues
    cut = list(cues([Segment(16_000, 176_000, text)]))
    assert [len(cue.lines) for cue in cut] == [2, 2, 1]
    assert (cut[0].start_ms, cut[-1].end_ms) == (1_000, 11_000)
    assert cut[1].start_ms == cut[0].end_ms == 1_000 + 10_000 * 2 // 5
    assert max(map(len, split_lines("one two three four five six seven eight nine ten"))) < LINE_COLUMNS - 10


def test_wide_characters_take_two_columns() -> None:
    assert [len(line) for line in split_lines("语" * 50)] == [21, 21, 8]


@given(segment_lists())
def test_cues_are_small_ordered_and_lose_nothing(segments: list[Segment]) -> None:
    cut = list(cues(segments))
    before = 0
    for cue in cut:
        assert before <= cue.start_ms < cue.end_ms
        before = cue.end_ms
        assert 1 <= len(cue.lines) <= CUE_LINES
        assert all(0 < len(line) <= LINE_COLUMNS for line in cue.lines)
    assert shown("".join("".join(cue.lines) for cue in cut)) == shown("".join(s.text for s in segments))


@given(st.integers(0, 10**9), st.integers(1, 10**6), words)
def test_cues_fill_their_segment_exactly_when_it_has_room(start: int, length: int, text: str) -> None:
    cut = list(cues([Segment(start, start + length, text)]))
    if cut and samples_to_ms(start + length) - samples_to_ms(start) >= len(cut):
        assert (cut[0].start_ms, cut[-1].end_ms) == (samples_to_ms(start), samples_to_ms(start + length))
        assert all(a.end_ms == b.start_ms for a, b in itertools.pairwise(cut))


@given(segment_lists())
def test_srt_and_vtt_read_back(segments: list[Segment]) -> None:
    whole = transcript(*segments)
    expected = [(cue.start_ms, cue.end_ms) for cue in cues(segments)]
    in_srt, in_vtt = read(render(whole, "srt"), ","), read(render(whole, "vtt"), ".")
    assert [each[:2] for each in in_srt] == expected
    assert [each[:2] for each in in_vtt] == expected
    assert all("-->" not in line for _, _, lines in in_srt + in_vtt for line in lines)
    back = str.maketrans({"→": "-->"})
    text = "".join("".join(lines) for _, _, lines in in_vtt)
    for escape, c in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        text = text.replace(escape, c)
    assert shown(text) == shown("".join(s.text for s in segments))
    srt_text = "".join("".join(lines) for _, _, lines in in_srt)
    assert shown(srt_text).translate(back) == shown("".join(s.text for s in segments)).translate(back)


@given(segment_lists(), st.text(max_size=20))
def test_jsonl_is_one_line_that_reads_back(segments: list[Segment], key: str) -> None:
    line = render(transcript(*segments, key=key), "jsonl")
    assert line.count("\n") == 1
    row = json.loads(line)
    assert row["key"] == key
    assert [s["text"] for s in row["segments"]] == [s.text for s in segments]


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="'srt'"):
        render(HELLO, "sr")
