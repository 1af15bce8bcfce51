"""Words, speakers, hotwords and the written form on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from fake_model import FakeModel
from typer.testing import CliRunner

import asr_serve
from asr_serve.audio.manifest import Item
from asr_serve.cli import app, options
from asr_serve.cli.listening.captions import Lines
from asr_serve.cli.results.outputs import Screen
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.streaming.results import StreamResult
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


def asked(model: FakeModel, talk: Path, *said: str) -> dict[str, object]:
    """What of it the model was asked for, other than nothing."""
    done = CliRunner().invoke(app, ["transcribe", str(talk), *said])
    assert done.exit_code == 0, done.output
    names = ("words", "speakers", "num_speakers", "min_speakers", "max_speakers", "itn", "hotwords")
    found = {name: getattr(model.options, name) for name in names}
    return {name: value for name, value in found.items() if value}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ((), {}),
        (("--words", "--itn"), {"words": True, "itn": True}),
        (("--speakers",), {"speakers": True}),
        (("--num-speakers", "3"), {"speakers": True, "num_speakers": 3}),
        (("--min-speakers", "2", "--max-speakers", "4"), {"speakers": True, "min_speakers": 2, "max_speakers": 4}),
        (("--format", "karaoke"), {"words": True}),
        (("--format", "ctm"), {"words": True}),
        (("--format", "textgrid"), {"words": True}),
        (("--format", "rttm"), {"speakers": True}),
        (("--hotwords", "Ada, Charles Babbage:2"), {"hotwords": ("Ada", "Charles Babbage:2")}),
    ],
)
def test_what_is_asked_of_the_model(
    model: FakeModel, talk: Path, said: tuple[str, ...], wanted: dict[str, object]
) -> None:
    assert asked(model, talk, *said) == wanted


def test_the_suffix_of_the_output_tells_the_format(model: FakeModel, talk: Path, tmp_path: Path) -> None:
    assert asked(model, talk, "-o", str(tmp_path / "talk.TextGrid")) == {"words": True}
    assert (tmp_path / "talk.TextGrid").read_text().startswith('File type = "ooTextFile"')
    assert asked(model, talk, "-o", str(tmp_path / "talk.rttm")) == {"speakers": True}


def test_more_speakers_at_least_than_at_most_are_refused(model: FakeModel, talk: Path) -> None:
    done = CliRunner().invoke(app, ["transcribe", str(talk), "--min-speakers", "4", "--max-speakers", "2"])
    assert done.exit_code == 2
    assert "min_speakers=4" in done.stderr


@pytest.mark.parametrize("form", ["ctm", "rttm"])
def test_tables_of_several_recordings_are_one_table(form: str) -> None:
    """Each line tells its recording, and a program that reads them knows no headings."""
    stream = io.BytesIO()
    screen = Screen(form, several=True, stream=stream)
    for key in ("a.wav", "b c.wav"):
        said = Segment(0, 16_000, "So", words=(Word("So", 0, 8_000, 0.5),), speaker="SPEAKER_00")
        screen.done(Item(key, key), Transcript(key, "So", "en", 16_000, (said,)))
    lines = stream.getvalue().decode().splitlines()
    assert [line.split()[1 if form == "rttm" else 0] for line in lines] == ["a", "b_c"]


def test_live_times_are_milliseconds_and_words_stay_inside() -> None:
    out = io.BytesIO()
    word = Word("So.", 24_011, 452_436, 0.5, "SPEAKER_00")
    said = Segment(24_011, 452_436, "So.", words=(word,), speaker="SPEAKER_00")
    Lines(out).show(StreamResult("So.", "So.", 28_277, True, (said,)))
    (segment,) = json.loads(out.getvalue())["segments"]
    assert (segment["start"], segment["end"]) == (1.501, 28.277)
    assert segment["words"] == [
        {"word": "So.", "start": 1.501, "end": 28.277, "confidence": 0.5, "speaker": "SPEAKER_00"}
    ]


def test_hotwords_are_lists_and_files(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\ufeffAda\n\n# nobody\nCharles Babbage  # 1791\nSmith, Jones & Co\n", "utf-8")
    assert options.hotwords(["Ada,Grace ,", f"@{names}"]) == (
        "Ada",
        "Grace",
        "Charles Babbage",
        "Smith, Jones & Co",
    )
    assert options.hotwords(None) == ()
    with pytest.raises(SourceNotFound):
        options.hotwords([f"@{tmp_path / 'none.txt'}"])
    names.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        options.hotwords([f"@{names}"])
    names.write_bytes(b"a\n" * (options.MOST_HOTWORD_BYTES // 2 + 1))
    with pytest.raises(OptionError, match="MiB"):
        options.hotwords([f"@{names}"])
