"""Words, speakers, hotwords and the written form on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Self

import pytest
from cli_process import invoke
from fake_model import FakeModel

import asr_serve
from asr_serve.api.cli import backends, options
from asr_serve.api.cli.io.captions import JsonLineCaptions
from asr_serve.api.cli.io.transcript_outputs import StdoutSink
from asr_serve.api.stream import StreamResult
from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.types import Segment, Transcript, Word


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    made = FakeModel()
    monkeypatch.setattr(asr_serve, "load", lambda *_, **__: made)
    return made


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.wav"
    path.write_text("one line")
    return path


def requested_options(model: FakeModel, talk: Path, *said: str) -> dict[str, object]:
    """Options of this kind that reached the model and are set; `words` None is where the model has them."""
    done = invoke("transcribe", talk, *said)
    assert done.exit_code == 0, done.output
    names = ("words", "speakers", "num_speakers", "min_speakers", "max_speakers", "itn", "hotwords")
    found = {name: getattr(model.options, name) for name in names}
    return {name: value for name, value in found.items() if value or (name == "words" and value is None)}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ((), {}),
        (("--words", "--itn"), {"words": True, "itn": True}),
        (("--speakers",), {"speakers": True}),
        (("--num-speakers", "3"), {"speakers": True, "num_speakers": 3}),
        (("--min-speakers", "2", "--max-speakers", "4"), {"speakers": True, "min_speakers": 2, "max_speakers": 4}),
        (("--format", "karaoke"), {"words": None}),
        (("--format", "karaoke", "--words"), {"words": True}),
        (("--format", "ctm"), {"words": None}),
        (("--format", "textgrid"), {"words": None}),
        (("--format", "rttm"), {"speakers": True}),
        (("--hotwords", "Ada, Charles Babbage:2"), {"hotwords": ("Ada", "Charles Babbage:2")}),
    ],
)
def test_flags_and_formats_set_the_options_of_the_model(
    model: FakeModel, talk: Path, said: tuple[str, ...], wanted: dict[str, object]
) -> None:
    assert requested_options(model, talk, *said) == wanted


def test_the_suffix_of_the_output_tells_the_format(model: FakeModel, talk: Path, tmp_path: Path) -> None:
    assert requested_options(model, talk, "-o", str(tmp_path / "talk.TextGrid")) == {"words": None}
    assert (tmp_path / "talk.TextGrid").read_text().startswith('File type = "ooTextFile"')
    assert requested_options(model, talk, "-o", str(tmp_path / "talk.rttm")) == {"speakers": True}


def test_more_speakers_at_least_than_at_most_are_refused(model: FakeModel, talk: Path) -> None:
    done = invoke("transcribe", talk, "--min-speakers", "4", "--max-speakers", "2")
    assert done.exit_code == 2
    assert "min_speakers=4" in done.stderr


@pytest.mark.parametrize("form", ["ctm", "rttm"])
def test_tables_of_several_recordings_are_one_table(form: str) -> None:
    """Each line tells its recording, and a program that reads them knows no headings."""
    stream = io.BytesIO()
    screen = StdoutSink(form, several=True, stream=stream)
    for key in ("a.wav", "b c.wav"):
        said = Segment(0, 16_000, "So", words=(Word("So", 0, 8_000, 0.5),), speaker="SPEAKER_00")
        screen.done(InputItem(key, key), Transcript(key, "So", "en", 16_000, (said,)))
    lines = stream.getvalue().decode().splitlines()
    assert [line.split()[1 if form == "rttm" else 0] for line in lines] == ["a", "b_c"]


def test_live_times_are_milliseconds_inside_the_audio() -> None:
    out = io.BytesIO()
    word = Word("So.", 24_011, 452_436, 0.5, "SPEAKER_00")
    said = Segment(24_011, 452_436, "So.", words=(word,), speaker="SPEAKER_00")
    JsonLineCaptions(out).show(StreamResult("So.", "So.", 28_277, True, (said,)))
    (segment,) = json.loads(out.getvalue())["segments"]
    assert (segment["start"], segment["end"]) == (1.501, 28.277)
    assert segment["words"] == [
        {"word": "So.", "start": 1.501, "end": 28.277, "confidence": 0.5, "speaker": "SPEAKER_00"}
    ]


class FakeTranscriber:
    """A transcriber of two lines, of which the second turns out to be another speaker's."""

    requested_options: dict[str, object]
    model, language = "fake", "en"

    def __init__(self, model: str, options: dict[str, object], **loading: object) -> None:
        type(self).asked = options

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def listen(self, audio: object, rate_hz: int, show: backends.Show, notice: backends.Notice) -> None:
        for last in (False, True):
            second = "SPEAKER_01" if last else "SPEAKER_00"
            segments = (line("So.", 0, "SPEAKER_00"), line("No.", 16_000, second))
            show(StreamResult("So. No.", "So. No.", 2_000, last, segments))


def line(text: str, start: int, speaker: str) -> Segment:
    word = Word(text, start, start + 8_000, 0.5, speaker)
    return Segment(start, start + 16_000, text, words=(word,), speaker=speaker)


@pytest.fixture
def fake_transcriber(monkeypatch: pytest.MonkeyPatch) -> type[FakeTranscriber]:
    monkeypatch.setattr(backends, "LocalTranscriber", FakeTranscriber)
    return FakeTranscriber


@pytest.mark.usefixtures("fake_transcriber")
def test_the_file_of_a_live_transcript_has_the_final_speakers(talk: Path, tmp_path: Path) -> None:
    note = tmp_path / "notes" / "note.txt"
    done = invoke("listen", talk, "--speakers", "-o", note)
    assert done.exit_code == 0, done.output
    assert done.stdout == "SPEAKER_00: So.\nNo.\n"
    assert "0:01 SPEAKER_01: No." in done.stderr
    assert f"-> {note}" in done.stderr
    assert note.read_text() == "SPEAKER_00: So.\nSPEAKER_01: No.\n"
    assert [path.name for path in note.parent.iterdir()] == ["note.txt"]
    done = invoke("listen", talk, "--json", "-q", "-o", note, "--format", "json")
    assert done.exit_code == 0, done.output
    written = json.loads(note.read_text())
    assert written["key"] == str(talk)
    assert (written["language"], written["model"], written["duration"]) == ("en", "fake", 2.0)
    assert [each["speaker"] for each in written["segments"]] == ["SPEAKER_00", "SPEAKER_01"]
    assert written["segments"][1]["words"][0]["speaker"] == "SPEAKER_01"


@pytest.mark.parametrize(
    ("suffix", "wanted", "holds"),
    [
        ("rttm", {"speakers": True}, "SPEAKER talk 1 1.000 1.000 <NA> <NA> SPEAKER_01 <NA> <NA>"),
        ("ctm", {"words": None}, "talk 1 1.000 0.500 No. 0.500"),
        ("vtt", {}, "<v SPEAKER_01>No."),
    ],
)
def test_the_format_of_a_live_file_sets_the_options(
    fake_transcriber: type[FakeTranscriber],
    talk: Path,
    tmp_path: Path,
    suffix: str,
    wanted: dict[str, object],
    holds: str,
) -> None:
    done = invoke("listen", talk, "-o", tmp_path / f"talk.{suffix}")
    assert done.exit_code == 0, done.output
    assert {
        name: fake_transcriber.asked[name] for name in ("words", "speakers") if name in fake_transcriber.asked
    } == wanted
    assert holds in (tmp_path / f"talk.{suffix}").read_text()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["--output", "notes/"], "--output notes/. one file. name it: note.txt"),
        (["--output", "note.doc"], "--output note.doc ends in .doc"),
        (["--output", "talk.wav", "--format", "text"], "--output would overwrite the input"),
        (["--format", "srt"], "--format srt without --output"),
        (["--output", "note.txt", "--format", "srtt"], "unknown --format 'srtt'"),
    ],
)
def test_an_invalid_output_is_refused_at_the_start(
    model: FakeModel, talk: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], message: str
) -> None:
    monkeypatch.chdir(talk.parent)
    done = invoke("listen", talk.name, *said)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert [path.name for path in talk.parent.iterdir()] == [talk.name]


def test_hotwords_are_lists_and_files(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\ufeffAda\n\n# nobody\nCharles Babbage  # 1791\nSmith, Jones & Co\n", "utf-8")
    expected = ("Ada", "Grace", "Charles Babbage", "Smith, Jones & Co")
    assert options.hotwords(["Ada,Grace ,", f"@{names}"]) == expected
    assert options.hotwords(None) == ()
    with pytest.raises(SourceNotFound):
        options.hotwords([f"@{tmp_path / 'none.txt'}"])
    names.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        options.hotwords([f"@{names}"])
    names.write_bytes(b"a\n" * (options.MOST_HOTWORD_BYTES // 2 + 1))
    with pytest.raises(OptionError, match="MiB"):
        options.hotwords([f"@{names}"])
