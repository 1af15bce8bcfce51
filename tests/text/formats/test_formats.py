"""Output formats: subtitles, text, JSON and tables of words, speakers and times."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.errors import OptionError
from asr_serve.text import word_timing
from asr_serve.text.formats import tables, text_and_json
from asr_serve.text.formats.cues import (
    CUE_LINES,
    LEAST_MS,
    MOST_MS,
    PAUSE_MS,
    READ_CHARACTERS,
    Cue,
    build_cues,
    split_lines,
)
from asr_serve.text.formats.registry import TRANSCRIPT_FORMATS, render, transcript_format
from asr_serve.text.formats.subtitle_tokens import LINE_COLUMNS, display_columns
from asr_serve.text.formats.subtitles import stamp
from asr_serve.types import Segment, SpeakerTurn, Transcript, Word
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


def visible(text: str) -> str:
    """The characters a viewer must see: no white space, no control characters."""
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) != "Cc")


def text_of(segments: list[Segment]) -> str:
    return visible("".join(segment.text for segment in segments))


def expect_valid_cues(cues: list[Cue]) -> None:
    """Cues are in order without overlap, and their lines fit."""
    before = 0
    for cue in cues:
        assert before <= cue.start_ms < cue.end_ms
        before = cue.end_ms
        assert 1 <= len(cue.lines) <= CUE_LINES
        assert all(0 < display_columns(line) <= LINE_COLUMNS for line in cue.lines)


def expect_tier_without_gaps(tier: str) -> list[tuple[str, str]]:
    """The intervals of a TextGrid tier, each of which starts where the one before it ends."""
    intervals = re.findall(r"xmin = (\S+)\n +xmax = (\S+)\n +text", tier)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(intervals))
    assert all(float(a) < float(b) for a, b in intervals)
    return intervals


def read_cues(page: str, point: str) -> list[tuple[int, int, list[str]]]:
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


def test_json_and_jsonl_have_the_same_fields() -> None:
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
    assert text_and_json.compression_ratio("") == 0
    assert text_and_json.compression_ratio("round and " * 50) > 10


@pytest.mark.parametrize(
    ("form", "empty", "page"),
    [
        (
            "srt",
            "",
            "1\n00:00:00,500 --> 00:00:01,500\nHello there.\n\n"
            "2\n00:00:02,001 --> 00:00:03,500\nFish & chips → <now>\n",
        ),
        (
            "vtt",
            "WEBVTT\n",
            "WEBVTT\n\n00:00:00.500 --> 00:00:01.500\nHello there.\n\n"
            "00:00:02.001 --> 00:00:03.500\nFish &amp; chips --&gt; &lt;now&gt;\n",
        ),
    ],
    ids=["srt", "vtt"],
)
def test_subtitles(form: str, empty: str, page: str) -> None:
    assert render(HELLO, form) == page
    assert render(transcript(), form) == empty


@pytest.mark.parametrize(
    ("ms", "expected"),
    [(0, "00:00:00,000"), (999, "00:00:00,999"), (3_599_999, "00:59:59,999"), (360_000_000, "100:00:00,000")],
)
def test_stamp(ms: int, expected: str) -> None:
    assert stamp(ms, ",") == expected


def test_a_long_segment_shares_time_by_characters_and_lines_are_even() -> None:
    text = " ".join(["four"] * 40)  # 199 characters: three cues at least
    cut = list(build_cues([Segment(16_000, 176_000, text)]))
    assert (cut[0].start_ms, cut[-1].end_ms) == (1_000, 11_000)
    shares = [(cue.end_ms - cue.start_ms) / sum(map(len, "".join(cue.lines).split())) for cue in cut]
    assert max(shares) - min(shares) < 0.1
    assert all(len(cue.lines) == 2 and abs(len(cue.lines[0]) - len(cue.lines[1])) <= 5 for cue in cut)
    assert max(map(len, split_lines("one two three four five six seven eight nine ten"))) < LINE_COLUMNS - 10


def test_wide_characters_take_two_columns() -> None:
    assert [len(line) for line in split_lines("语" * 50)] == [17, 17, 16]


@settings(deadline=None)
@given(segment_lists())
def test_cues_are_small_ordered_and_lose_nothing(segments: list[Segment]) -> None:
    cues = list(build_cues(segments))
    expect_valid_cues(cues)
    assert all(len(line) <= LINE_COLUMNS for cue in cues for line in cue.lines)
    assert visible("".join("".join(cue.lines) for cue in cues)) == text_of(segments)


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 10**6), words)
def test_cues_fill_their_segment_exactly_when_it_has_room(start: int, length: int, text: str) -> None:
    end_ms = samples_to_ms(start + length)
    cut = list(build_cues([Segment(start, start + length, text)], end_ms))
    if cut and end_ms - samples_to_ms(start) >= len(cut):
        assert (cut[0].start_ms, cut[-1].end_ms) == (samples_to_ms(start), end_ms)
        assert all(a.end_ms == b.start_ms for a, b in itertools.pairwise(cut))


@settings(max_examples=40, deadline=None)
@given(segment_lists())
def test_srt_and_vtt_read_back(segments: list[Segment]) -> None:
    whole = transcript(*segments)
    expected = [(cue.start_ms, cue.end_ms) for cue in build_cues(segments, samples_to_ms(whole.duration_samples))]
    in_srt, in_vtt = read_cues(render(whole, "srt"), ","), read_cues(render(whole, "vtt"), ".")
    assert [each[:2] for each in in_srt] == [each[:2] for each in in_vtt] == expected
    assert all("-->" not in line for _, _, lines in in_srt + in_vtt for line in lines)
    back = str.maketrans({"→": "-->"})
    text = "".join("".join(lines) for _, _, lines in in_vtt)
    for escape, c in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        text = text.replace(escape, c)
    assert visible(text) == text_of(segments)
    srt_text = "".join("".join(lines) for _, _, lines in in_srt)
    assert visible(srt_text).translate(back) == text_of(segments).translate(back)


@settings(deadline=None)
@given(segment_lists(), st.text(max_size=20))
def test_jsonl_is_one_line_that_reads_back(segments: list[Segment], key: str) -> None:
    line = render(transcript(*segments, key=key), "jsonl")
    assert line.count("\n") == 1
    row = json.loads(line)
    assert row["key"] == key
    assert [s["text"] for s in row["segments"]] == [s.text for s in segments]


def test_the_error_of_an_unknown_format_suggests_the_nearest() -> None:
    with pytest.raises(OptionError, match="'srt'"):
        render(HELLO, "sr")


# --- with words and speakers ------------------------------------------------------------------------------


def timed_segment(text: str, *times: tuple[float, float], speaker: str = "") -> Segment:
    """A segment of words at these seconds."""
    parts = [text[first:behind] for first, behind in word_timing.split_words(text)]
    words = tuple(
        Word(part, round(start * 16_000), round(end * 16_000), 0.5, speaker)
        for part, (start, end) in zip(parts, times, strict=True)
    )
    return Segment(words[0].start_samples, words[-1].end_samples, text, words=words, speaker=speaker)


def even_segment(text: str, start: float = 0.0, each: float = 0.4, speaker: str = "") -> Segment:
    """A segment of words of one length, one after the other."""
    count = len(word_timing.split_words(text))
    return timed_segment(text, *((start + each * n, start + each * (n + 1)) for n in range(count)), speaker=speaker)


FIRST = timed_segment("Fish & chips?", (0.5, 0.9), (0.9, 1.0), (1.0, 1.5), speaker="SPEAKER_00")
SECOND = timed_segment("I <do>.", (2.0, 2.2), (2.2, 2.8), speaker="Bob >1<")
CONVERSATION = msgspec.structs.replace(
    transcript(FIRST, SECOND, key="calls/monday 7.wav"),
    duration_samples=64_000,
    language_prob=0.98765,
    turns=(SpeakerTurn("SPEAKER_00", 8_000, 36_000), SpeakerTurn("Bob >1<", 32_000, 45_000)),
)


@st.composite
def word_segments(draw: st.DrawFn) -> list[Segment]:
    """Segments with words, pauses, speakers."""
    segments, at = [], 0
    for text in draw(st.lists(words, max_size=5)):
        ranges = word_timing.split_words(text)
        edges = sorted(draw(st.lists(st.integers(0, 160_000), min_size=2 * len(ranges), max_size=2 * len(ranges))))
        names = draw(st.lists(st.sampled_from(["", "A", "B C"]), min_size=len(ranges), max_size=len(ranges)))
        found = tuple(
            Word(text[a:b], at + start, at + end, 0.5, name)
            for (a, b), start, end, name in zip(ranges, edges[::2], edges[1::2], names, strict=True)
        )
        end = at + (edges[-1] if edges else 0)
        segments.append(Segment(at, end, text, words=found, speaker="A"))
        at = end
    return segments


@settings(deadline=None)
@given(word_segments(), st.booleans())
def test_cues_of_words_are_small_ordered_and_lose_nothing(segments: list[Segment], names: bool) -> None:
    cues = list(build_cues(segments, names=names))
    expect_valid_cues(cues)
    if not names:
        assert visible("".join("".join(cue.lines) for cue in cues)) == text_of(segments)


@settings(max_examples=40, deadline=None)
@given(word_segments())
def test_every_format_renders_any_words_and_speakers(segments: list[Segment]) -> None:
    whole = transcript(*segments)
    for form in TRANSCRIPT_FORMATS:
        assert render(whole, form) == render(whole, form)
    inside = re.findall(r"<(\d\d:\d\d:\d\d\.\d{3})>", render(whole, "karaoke"))
    assert inside == sorted(inside)


def test_cues_start_with_their_first_word_and_break_at_sentences_and_pauses() -> None:
    text = "Good morning, everyone. Before we begin, let me say that we have read every single letter you sent."
    times = [(0.4 * n + (1.0 if n > 2 else 0), 0.4 * n + 0.4 + (1.0 if n > 2 else 0)) for n in range(18)]
    cut = list(build_cues([timed_segment(text, *times)]))
    assert [cue.lines for cue in cut] == [
        ("Good morning, everyone.",),
        ("Before we begin, let me say that we", "have read every single letter you sent."),
    ]
    assert (cut[0].start_ms, cut[1].start_ms) == (0, 2_200)
    assert cut[-1].end_ms >= 8_200


def test_a_cue_lasts_as_long_as_reading_takes_but_ends_before_the_next() -> None:
    quick = "Seventy-two characters said in no time at all, far faster than one reads"
    alone = list(build_cues([timed_segment(quick, *((0.05 * n, 0.05 * n + 0.05) for n in range(13)))], 60_000))
    assert len(alone) == 1
    read_ms = 1_000 * sum(map(len, alone[0].lines)) / READ_CHARACTERS
    assert read_ms <= alone[0].end_ms < read_ms + 1
    short, after = timed_segment("No.", (1.0, 1.1)), timed_segment("Yes.", (1.5, 1.6))
    assert [(cue.start_ms, cue.end_ms) for cue in build_cues([short], 60_000)] == [(1_000, 1_000 + LEAST_MS)]
    assert [(cue.start_ms, cue.end_ms) for cue in build_cues([short], 1_200)] == [(1_000, 1_200)]
    assert next(build_cues([short, after], 60_000)).end_ms == 1_500
    # A gap shorter than a pause is closed, a longer one is left.
    far = timed_segment("Yes.", (1.0 + (LEAST_MS + PAUSE_MS) / 1_000, 3.0))
    assert next(build_cues([short, far], 60_000)).end_ms == 1_000 + LEAST_MS


def test_slow_speech_is_cut_before_seven_seconds() -> None:
    cut = list(build_cues([even_segment("so we wait and we wait and we wait and we wait", each=1.0)]))
    assert len(cut) > 1
    assert all(cue.end_ms - cue.start_ms <= MOST_MS for cue in cut)


def test_a_cue_has_one_speaker() -> None:
    first = timed_segment("Who is it? Me.", (0, 1), (1, 2), (2, 3), (3, 4))
    words = (*first.words[:3], msgspec.structs.replace(first.words[3], speaker="SPEAKER_01"))
    cut = list(build_cues([msgspec.structs.replace(first, words=words, speaker="SPEAKER_00")]))
    assert [(cue.speaker, cue.lines) for cue in cut] == [("SPEAKER_00", ("Who is it?",)), ("SPEAKER_01", ("Me.",))]


def test_chinese_breaks_at_marks_and_never_before_them() -> None:
    text = "今天天气很好，我们一起去公园散步吧。你想不想去看电影？我觉得那部新的电影很有意思，大家都说好。"
    cut = list(build_cues([Segment(0, 160_000, text)]))
    lines = [line for cue in cut for line in cue.lines]
    assert "".join(lines) == text
    assert not any(line[0] in "，。？" for line in lines)
    assert all(cue.lines[-1][-1] in "，。？" for cue in cut)


def test_words_that_differ_from_the_text_are_ignored() -> None:
    odd = msgspec.structs.replace(FIRST, text="Something else.")
    assert [cue.lines for cue in build_cues([odd])] == [("Something else.",)]


def test_srt_names_who_speaks_where_that_changes() -> None:
    assert render(CONVERSATION, "srt") == (
        "1\n00:00:00,500 --> 00:00:02,000\nSPEAKER_00: Fish & chips?\n\n"
        "2\n00:00:02,000 --> 00:00:02,942\nBob >1<: I <do>.\n"
    )


def test_vtt_has_voices_and_karaoke_times() -> None:
    assert render(CONVERSATION, "vtt") == (
        "WEBVTT\n\n00:00:00.500 --> 00:00:01.500\n<v SPEAKER_00>Fish &amp; chips?\n\n"
        "00:00:02.000 --> 00:00:02.833\n<v Bob &gt;1&lt;>I &lt;do&gt;.\n"
    )
    assert "<v SPEAKER_00>Fish <00:00:00.900>&amp; chips?\n" in render(CONVERSATION, "karaoke").replace(
        "<00:00:01.000>", ""
    )
    assert "I <00:00:02.200>&lt;do&gt;." in render(CONVERSATION, "karaoke")
    assert render(HELLO, "karaoke") == render(HELLO, "vtt")


def test_text_names_a_speaker_where_that_changes() -> None:
    assert render(CONVERSATION, "text") == "SPEAKER_00: Fish & chips?\nBob >1<: I <do>.\n"
    twice = transcript(FIRST, msgspec.structs.replace(SECOND, speaker="SPEAKER_00"))
    assert render(twice, "text") == "SPEAKER_00: Fish & chips?\nI <do>.\n"


def test_json_has_words_speakers_and_spoken_forms() -> None:
    written = msgspec.structs.replace(
        SECOND, spoken="I do", words=(msgspec.structs.replace(SECOND.words[0], spoken="eye"), SECOND.words[1])
    )
    whole = json.loads(render(msgspec.structs.replace(CONVERSATION, segments=(FIRST, written)), "json"))
    assert whole["language_probability"] == 0.9877
    assert whole["turns"][1] == {"speaker": "Bob >1<", "start": 2.0, "end": 2.8125}
    one, two = whole["segments"]
    assert (one["speaker"], "spoken" in one) == ("SPEAKER_00", False)
    first_word = {"word": "Fish", "start": 0.5, "end": 0.9, "confidence": 0.5, "speaker": "SPEAKER_00"}
    assert one["words"][0] == first_word
    assert (two["spoken"], two["words"][0]["spoken"]) == ("I do", "eye")
    verbose = json.loads(render(CONVERSATION, "verbose_json"))
    assert [word["word"] for word in verbose["words"]] == ["Fish", "&", "chips?", "I", "<do>."]
    assert verbose["segments"][0]["words"] == verbose["words"][: len(FIRST.words)]
    assert "words" not in json.loads(render(HELLO, "verbose_json"))


def test_rttm_is_a_line_for_each_turn() -> None:
    assert render(CONVERSATION, "rttm") == (
        "SPEAKER monday_7 1 0.500 1.750 <NA> <NA> SPEAKER_00 <NA> <NA>\n"
        "SPEAKER monday_7 1 2.000 0.813 <NA> <NA> Bob_>1< <NA> <NA>\n"
    )
    without_turns = msgspec.structs.replace(CONVERSATION, turns=())
    assert render(without_turns, "rttm").splitlines()[1].split()[3:5] == ["2.000", "0.800"]
    assert render(HELLO, "rttm") == ""


def test_ctm_is_a_line_for_each_word() -> None:
    time = msgspec.structs.replace(SECOND.words[0], text="3:30 p.m.", confidence=0.25)
    whole = transcript(msgspec.structs.replace(SECOND, text="3:30 p.m. <do>.", words=(time, SECOND.words[1])))
    assert render(whole, "ctm") == (
        "a 1 2.000 0.100 3:30 0.250\na 1 2.100 0.100 p.m. 0.250\na 1 2.200 0.600 <do>. 0.500\n"
    )


def test_textgrid_tiers_meet_from_start_to_end() -> None:
    quoted = msgspec.structs.replace(
        CONVERSATION, segments=(msgspec.structs.replace(FIRST, text='Fish "and" chips?'), SECOND)
    )
    page = render(quoted, "textgrid")
    assert 'text = "Fish ""and"" chips?"' in page
    tiers = page.split("    item [")[1:]
    assert re.findall(r'name = "(\w+)"', page) == ["words", "segments", "speakers"]
    for tier in tiers:
        intervals = expect_tier_without_gaps(tier)
        assert (intervals[0][0], intervals[-1][1]) == ("0", "4")
        assert f"size = {len(intervals)}\n" in tier
    assert re.findall(r'text = "(.*)"', tiers[2]) == ["", "SPEAKER_00", "Bob >1< + SPEAKER_00", "Bob >1<", ""]


@settings(deadline=None)
@given(word_segments())
def test_textgrid_loses_no_word(segments: list[Segment]) -> None:
    page = render(transcript(*segments), "textgrid")
    tier = page.split("    item [")[1]
    texts = re.findall(r'            text = "((?:[^"]|"")*)"\n', tier)
    everything = "".join(word.text for segment in segments for word in segment.words)
    assert visible("".join(texts).replace('""', '"')) == visible(everything)
    for tier in page.split("    item [")[1:]:
        expect_tier_without_gaps(tier)


def test_names_of_recordings_and_formats() -> None:
    assert tables.recording_name("a;b c.wav") == "a_b_c"
    for name, row in TRANSCRIPT_FORMATS.items():
        assert row.name == name
        assert row.suffix.startswith(".")
        assert row.shows_words or not row.needs_words
        assert render(HELLO, name) == row.render(HELLO)
        assert render(HELLO, name).startswith(row.signature)
    with pytest.raises(OptionError, match="--format"):
        transcript_format("srtt", param="--format")


def said(speaker: str, start_s: float, text: str, word_s: float = 0.5) -> Segment:
    """Segment whose words last equally long."""
    words = []
    for number, word in enumerate(text.split()):
        begin = round((start_s + number * word_s) * 16_000)
        words.append(Word(word, begin, begin + round(word_s * 16_000), 0.9, speaker))
    return Segment(words[0].start_samples, words[-1].end_samples, text, words=tuple(words), speaker=speaker)


def test_cues_of_two_who_talk_at_once_are_shown_together():
    segments = [
        said("A", 0.0, "The first speaker goes on. And on with this sentence. Until the end."),
        said("B", 2.0, "Another one interrupts them."),
        said("A", 20.0, "Later."),
    ]
    cues = list(build_cues(segments))
    assert [cue.start_ms for cue in cues] == sorted(cue.start_ms for cue in cues)
    shown = {who: [cue for cue in cues if cue.speaker == who] for who in "AB"}
    assert " ".join(line for cue in shown["B"] for line in cue.lines) == segments[1].text
    assert " ".join(line for cue in shown["A"] for line in cue.lines) == f"{segments[0].text} {segments[2].text}"
    assert shown["B"][0].start_ms == 2_000
    for own in shown.values():
        assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(own))
        assert all(cue.end_ms - cue.start_ms >= 500 for cue in own)
    alone = [said("A", 0.0, "One. Two."), said("B", 1.0, "Three."), said("A", 1.5, "Four.")]
    timed = list(build_cues(alone))
    assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(timed))


@st.composite
def people_at_once(draw: st.DrawFn) -> list[Segment]:
    """Segments in order of time, of speakers of whom each says one after the other, over the others."""
    texts = st.lists(st.sampled_from(["one", "seven,", "of", "course.", "a-rather-long-word"]), min_size=1, max_size=30)
    segments = []
    for speaker in ("A", "Ada Lovelace", "a name that takes more than one line of 42 columns"):
        at_s = 0.0
        for words in draw(st.lists(texts, max_size=3)):
            at_s += draw(st.sampled_from([0.0, 0.4, 3.0]))
            segments.append(said(speaker, at_s, " ".join(words)))
            at_s = segments[-1].end_samples / 16_000
    return sorted(segments, key=lambda segment: segment.start_samples)


@settings(deadline=None)
@given(people_at_once())
def test_a_cue_without_a_name_is_of_the_speaker_before(segments: list[Segment]) -> None:
    cues = list(build_cues(segments, names=True))
    assert [cue.start_ms for cue in cues] == sorted(cue.start_ms for cue in cues)
    speaker, text = "", {segment.speaker: "" for segment in segments}
    for cue in cues:
        assert 1 <= len(cue.lines) <= CUE_LINES
        assert all(0 < display_columns(line) <= LINE_COLUMNS for line in cue.lines)
        shown = " ".join(cue.lines)
        name = next((name for name in text if shown.startswith(f"{name}:")), "")
        assert bool(name) == (cue.speaker != speaker)
        assert cue.speaker == (name or speaker)
        speaker = cue.speaker
        text[speaker] += visible(shown.removeprefix(f"{name}:") if name else shown)
    for name, whole in text.items():
        assert whole == text_of([segment for segment in segments if segment.speaker == name])


def test_who_goes_on_after_another_interrupted_is_named_again():
    long = "I would like to tell you about everything that I saw there. And then about whatever else there was to see."
    page = render(transcript(said("Ada", 0.0, long), said("Bob", 2.0, "No, thank you."), key="a.wav"), "srt")
    lines = [block.splitlines()[2].split(":")[0] for block in page.split("\n\n")]
    assert lines[:3] == ["Ada", "Bob", "Ada"]
    assert not {"Ada", "Bob"} & set(lines[3:])


def test_words_of_a_ctm_are_in_order_of_time():
    whole = transcript(said("A", 0.0, "one two three four"), said("B", 0.75, "five six"), said("A", 2.0, "end"))
    rows = [line.split() for line in render(whole, "ctm").splitlines()]
    assert [row[4] for row in rows] == ["one", "two", "five", "three", "six", "four", "end"]
    assert [float(row[2]) for row in rows] == [0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0]


def test_a_segment_inside_another_is_in_the_interval_of_textgrid_that_covers_it():
    inside = [said("A", 0.0, "one two three four"), said("B", 0.5, "five"), said("A", 5.0, "later")]
    over = [said("A", 0.0, "one two three four"), said("B", 1.0, "six seven eight"), said("C", 1.5, "nine")]
    for segments, expected in (
        (inside, [("0", "2", "one two three four five"), ("2", "5", ""), ("5", "5.5", "later")]),
        (over, [("0", "2", "one two three four nine"), ("2", "2.5", "six seven eight")]),
    ):
        tier = render(transcript(*segments), "textgrid").split("    item [")[2]
        assert expect_tier_without_gaps(tier) == [(start, end) for start, end, _ in expected]
        assert re.findall(r' text = "(.*)"', tier) == [text for *_, text in expected]
