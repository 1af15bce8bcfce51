"""What two models agree on: rates, rows, a folder that goes on, and the real thing."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.api.cli import app
from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import CorruptAudio, OptionError, WrongModel
from asr_serve.models.registry import all_cards
from asr_serve.pipelines.offline.transcribe import Event, FileDone, FileFailed
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.types import Segment, Transcript
from asr_serve_tools.label.command import unique_by_absolute_path
from asr_serve_tools.label.error_rate import edit_distance, error_rate, plain_text
from asr_serve_tools.label.label_store import LabelRow, LabelStore, lock_label_folder
from asr_serve_tools.label.labeling import check_label_options, label_recordings, max_segment_ms, split_writable_items

CHOSEN = {"models": ["one", "two"]}
letters = st.text("abcd ", max_size=40)


class Says:
    """A model that says of each file what it is told; `!` fails it."""

    def __init__(self, texts: dict[str, list[str]]) -> None:
        self.texts, self.closed = texts, False

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]:
        try:
            for index, item in enumerate(items):
                found = self.texts[item.key]
                if found == ["!"]:
                    yield FileFailed(index, item.key, CorruptAudio(f"{item.key} broke"))
                    continue
                segments = tuple(Segment(32_000 * n, 32_000 * n + 16_000, t) for n, t in enumerate(found) if t)
                text = " ".join(filter(None, found))
                yield FileDone(index, item.key, Transcript(item.key, text, "en", 32_000 * len(found), segments))
        finally:
            self.closed = True


def items(*keys: str) -> list[InputItem]:
    return [InputItem(key, key) for key in keys]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_table(a: str, b: str) -> int:
    """The distance as the textbook has it."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


@settings(deadline=None)
@given(letters, letters)
def test_edit_distance_equals_the_textbook_algorithm(a: str, b: str) -> None:
    assert edit_distance(a, b) == by_table(a, b) == edit_distance(b, a)


def test_punctuation_and_case_do_not_count() -> None:
    assert error_rate(plain_text("It’s five, O'Clock!"), plain_text("its FIVE o'clock")) == 0
    assert error_rate(plain_text("你好。"), plain_text("你号")) == 0.5
    assert error_rate("", "") == 0
    assert error_rate("", "x") == 1


def test_segments_are_kept_by_their_own_rate(tmp_path: Path) -> None:
    one = Says({"a": ["Hello there.", "abcd", "", "only one"], "b": ["!"], "c": ["fine"], "d": []})
    two = Says({"a": ["hello there", "abxd", "only two", ""], "b": ["x"], "c": ["fine"], "d": []})
    (tmp_path / "out").mkdir()
    record = LabelStore(tmp_path / "out", CHOSEN)
    failures = label_recordings(
        [one, two], ["one", "two"], items("a", "b", "c", "d"), TranscribeOptions(), record, "segment"
    )
    assert [failure.key for failure in failures] == ["b"]
    assert one.closed
    assert two.closed
    summary = record.finish(0.1, len(failures))
    found = rows(tmp_path / "out" / "all.jsonl")
    assert [(row["audio_filepath"], row["offset"], row["cer"]) for row in found] == [
        ("a", 0.0, 0.0), ("a", 2.0, 0.25), ("a", 4.0, 1.0), ("a", 6.0, 1.0), ("c", 0.0, 0.0),
    ]  # fmt: skip
    kept = rows(tmp_path / "out" / "kept.jsonl")
    assert kept == [found[0], found[4]]
    assert kept[0] == {
        "audio_filepath": "a", "offset": 0.0, "duration": 1.0, "text": "Hello there.", "cer": 0.0,
        "hypotheses": {"one": "Hello there.", "two": "hello there"},
    }  # fmt: skip
    assert (summary.kept_segments, summary.segments, summary.files, summary.failed) == (2, 5, 3, 1)
    assert summary.hours_under["0.24"] == pytest.approx(2 / 3_600, abs=1e-6)
    assert summary.hours_under["0.25"] == pytest.approx(3 / 3_600, abs=1e-6)
    # What only the second model heard has no label at any threshold.
    assert summary.hours_under["1.00"] == pytest.approx(4 / 3_600, abs=1e-6)


def test_a_name_that_no_manifest_can_hold_fails_by_itself() -> None:
    odd = InputItem("odd", os.fsdecode(b"calls/caf\xe9.wav"))
    good, (failure,) = split_writable_items([*items("a"), odd, *items("b")])
    assert good == items("a", "b")
    assert failure.key == "odd"
    assert "not UTF-8" in str(failure.error)


def test_a_file_is_kept_by_all_of_its_characters(tmp_path: Path) -> None:
    one, two = Says({"a": ["aaaaaaaa", "bb"], "b": []}), Says({"a": ["aaaaaaaa", "cc"], "b": []})
    record = LabelStore(tmp_path, CHOSEN)
    assert label_recordings([one, two], ["one", "two"], items("a", "b"), TranscribeOptions(), record, "file") == []
    assert [(row["duration"], row["cer"], row["text"]) for row in rows(tmp_path / "all.jsonl")] == [
        (4.0, 0.2, "aaaaaaaa bb")
    ]


@pytest.mark.parametrize("torn", ["rows", "done", "between"])
def test_a_stopped_run_continues(tmp_path: Path, torn: str) -> None:
    texts = {"a": ["one", "two"], "b": ["three"], "c": ["four"]}
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder, count in ((whole, 3), (part, 2)):
        folder.mkdir()
        record = LabelStore(folder, CHOSEN)
        label_recordings(
            [Says(texts)] * 2, ["one", "two"], items(*"abc"[:count]), TranscribeOptions(), record, "segment"
        )
    if torn == "rows":
        (part / "all.jsonl").write_bytes((part / "all.jsonl").read_bytes() + b'{"audio_filepath":"c","off')
    elif torn == "done":
        (part / "files.jsonl").write_bytes((part / "files.jsonl").read_bytes()[:-9])
    else:  # the rows of the third are there, and it is not noted as done
        (part / "all.jsonl").write_bytes((whole / "all.jsonl").read_bytes())
    record = LabelStore(part, CHOSEN)
    assert set(record.done) == ({"a"} if torn == "done" else {"a", "b"})
    left = [item for item in items("a", "b", "c") if item.key not in record.done]
    label_recordings([Says(texts)] * 2, ["one", "two"], left, TranscribeOptions(), record, "segment")
    record.finish(0.1, 0)
    for name in ("all.jsonl", "files.jsonl"):
        assert (part / name).read_bytes() == (whole / name).read_bytes()


def test_other_models_cannot_continue_a_run(tmp_path: Path) -> None:
    LabelStore(tmp_path, {"models": ["none", "such"]})  # nothing came of it
    LabelStore(tmp_path, CHOSEN).append_file("a", 1.0, [])
    LabelStore(tmp_path, CHOSEN)
    with pytest.raises(OptionError, match="another --out"):
        LabelStore(tmp_path, {"models": ["one", "three"]})


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        lock_label_folder(tmp_path / "out"),
        pytest.raises(OptionError, match="another run"),
        lock_label_folder(tmp_path / "out"),
    ):
        pass
    with lock_label_folder(tmp_path / "out"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="--out"), lock_label_folder(tmp_path / "file"):
        pass


def test_a_changed_recording_is_labelled_again(tmp_path: Path) -> None:
    clip = tmp_path / "clip.wav"
    clip.write_bytes(b"one")
    LabelStore(tmp_path, CHOSEN).append_file(str(clip), 1.0, [])
    assert LabelStore(tmp_path, CHOSEN).is_labeled(str(clip))
    assert not LabelStore(tmp_path, CHOSEN).is_labeled(str(tmp_path / "other.wav"))
    clip.write_bytes(b"another")
    with pytest.raises(OptionError, match=r"clip\.wav has changed"):
        LabelStore(tmp_path, CHOSEN).is_labeled(str(clip))


def test_truncated_rows_are_labelled_again(tmp_path: Path) -> None:
    record = LabelStore(tmp_path, CHOSEN)
    label_recordings(
        [Says({"a": ["one"], "b": ["two"]})] * 2, ["one", "two"], items("a", "b"), TranscribeOptions(), record, "file"
    )
    rows_of = tmp_path / "all.jsonl"
    rows_of.write_bytes(rows_of.read_bytes()[:-5])
    again = LabelStore(tmp_path, CHOSEN)
    assert set(again.done) == {"a"}
    assert again.finish(0.1, 0).segments == 1


def test_a_file_under_two_names_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = unique_by_absolute_path(
        [InputItem("a.wav", "a.wav"), InputItem("b", "x/../a.wav"), InputItem("c", str(tmp_path / "c.wav"))]
    )
    assert [(item.key, item.source) for item in found] == [
        ("a.wav", str(tmp_path / "a.wav")),
        ("c", str(tmp_path / "c.wav")),
    ]


@pytest.mark.parametrize(
    ("names", "threshold", "per"),
    [(["a"], 0.1, "segment"), (["a", "a"], 0.1, "segment"), (["a", "b"], 1.5, "segment"), (["a", "b"], 0.1, "word")],
)
def test_invalid_options_are_refused(names: list[str], threshold: float, per: str) -> None:
    with pytest.raises(OptionError):
        check_label_options(names, threshold, per)


def test_both_models_get_segments_of_the_same_length() -> None:
    cards = all_cards()
    tiny, whisper = cards["moonshine-tiny-en"], cards["whisper-tiny-en"]
    assert max_segment_ms([tiny, whisper]) < min(tiny.max_segment_ms, whisper.max_segment_ms)
    with pytest.raises(WrongModel):
        max_segment_ms([tiny, cards["fastpitch-en"]])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 30)), max_size=20), st.floats(0, 1))
def test_the_plot_is_complete_and_its_curve_never_falls(
    tmp_path_factory: pytest.TempPathFactory, found: list[tuple[float, float]], threshold: float
) -> None:
    record = LabelStore(tmp_path_factory.mktemp("label"), CHOSEN)
    record.append_file("a", 9.0, [LabelRow("a", 0.0, length, "x", round(cer, 4), {}) for cer, length in found])
    summary = record.finish(threshold, 0)
    curve = [*summary.hours_under.values()]
    assert curve == sorted(curve)
    assert summary.kept_segments == sum(round(cer, 4) <= threshold for cer, _ in found)
    drawing = ET.parse(record.folder / "kept.svg").getroot()
    line = drawing.find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    assert all(0 <= height <= 400 for height in heights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, packaged_speech: Path) -> Path:
    made = tmp_path_factory.mktemp("speech")
    for clip in ("beckett.wav", "two_cities.wav"):
        (made / clip).write_bytes((packaged_speech / clip).read_bytes())
    (made / "torn.wav").write_bytes(b"no audio at all")
    return made


@pytest.mark.slow
def test_two_models_label_real_speech(folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    command = ["label", str(folder), "--out", str(tmp_path / "out"), "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1  # one could not be read
    assert "torn.wav" in done.stderr
    first = done.stdout
    assert re.match(r"kept \d+ of \d+ segments", first)
    kept = rows(tmp_path / "out" / "kept.jsonl")
    assert {Path(str(row["audio_filepath"])).name for row in kept} <= {"beckett.wav", "two_cities.wav"}
    assert any("best of times" in str(row["text"]) for row in kept)
    assert all(row["cer"] <= 0.1 for row in kept)  # type: ignore[operator]
    assert all(set(row["hypotheses"]) == {"moonshine-tiny-en", "whisper-tiny-en"} for row in kept)  # type: ignore[call-overload]
    before = (tmp_path / "out" / "all.jsonl").read_bytes()
    again = CliRunner().invoke(app, [*command, "--threshold", "1"])
    assert (tmp_path / "out" / "all.jsonl").read_bytes() == before
    assert again.stdout != first


@pytest.mark.slow
def test_two_models_label_speech_without_text(speech_data: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    clips = sorted((speech_data / "librispeech-train-untranscribed").glob("*.flac"))[:6]
    if not clips:
        pytest.skip("no untranscribed speech there")
    done = CliRunner().invoke(app, ["label", *map(str, clips), "--out", str(tmp_path), "--quiet"])
    assert done.exit_code == 0
    found = rows(tmp_path / "all.jsonl")
    assert {row["audio_filepath"] for row in found} == set(map(str, clips))
    assert all(row["offset"] >= 0 and row["duration"] > 0 for row in found)  # type: ignore[operator]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["kept_hours"] <= summary["speech_hours"] <= summary["hours"]
