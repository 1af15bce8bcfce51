from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest

from asr_serve.audio.input_manifest import InputItem, expand_inputs
from asr_serve.errors import AsrServeError, OptionError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """calls/{b.wav, a/x.MP3, a/notes.txt, a/.hidden.wav, .git/y.wav}, one.flac; the working folder."""
    for name in [
        "calls/b.wav",
        "calls/a/x.MP3",
        "calls/a/notes.txt",
        "calls/a/.hidden.wav",
        "calls/.git/y.wav",
        "one.flac",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keys(*inputs: object, **options: bool) -> list[str]:
    return [item.key for item in expand_inputs(inputs, **options)]  # type: ignore[arg-type]


def sources(*inputs: str) -> list[object]:
    return [item.source for item in expand_inputs(inputs)]


def test_a_file_is_itself_whatever_its_name(folder: Path) -> None:
    assert list(expand_inputs(["one.flac"])) == [InputItem("one.flac", Path("one.flac"))]
    assert keys(str(folder / "one.flac")) == [str(folder / "one.flac")]
    assert keys("calls/b.wav", Path("one.flac")) == ["calls/b.wav", "one.flac"]
    assert [item.key for item in expand_inputs("one.flac")] == ["one.flac"], "a single name is not taken apart"


def test_a_folder_gives_its_audio_in_order(folder: Path) -> None:
    assert keys("calls") == ["calls/a/x.MP3", "calls/b.wav"]
    assert keys("calls/", recursive=False) == ["calls/b.wav"]


def test_linked_folders_are_skipped(folder: Path) -> None:
    (folder / "calls/loop").symlink_to(folder / "calls", target_is_directory=True)
    (folder / "calls/linked.wav").symlink_to(folder / "one.flac")
    assert keys("calls") == ["calls/a/x.MP3", "calls/b.wav", "calls/linked.wav"]


def test_globs(folder: Path) -> None:
    assert keys("calls/*.wav", "*.fl?c") == ["calls/b.wav", "one.flac"]
    assert keys("calls/**/*.MP3") == ["calls/a/x.MP3"]
    assert keys("cal*") == ["calls/a/x.MP3", "calls/b.wav"]


def test_an_existing_name_with_glob_characters(folder: Path) -> None:
    (folder / "take[1].wav").write_bytes(b"")
    assert keys("take[1].wav") == ["take[1].wav"]


@pytest.mark.parametrize("name", ["missing.wav", "no*match.wav", "missing.scp", "empty", "bad\0name.wav"])
def test_inputs_without_audio_are_kept(folder: Path, name: str) -> None:
    (folder / "empty").mkdir()
    assert keys(name, "one.flac") == [name, "one.flac"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder_is_kept(folder: Path) -> None:
    (folder / "calls/a").chmod(0)
    try:
        assert keys("calls") == ["calls/a", "calls/b.wav"]
    finally:
        (folder / "calls/a").chmod(0o755)


def test_repeated_keys_are_numbered(folder: Path) -> None:
    expected = ["one.flac", "one.flac#2", "one.flac#2#2", "one.flac#3"]
    assert keys("one.flac", "one.flac", "one.flac#2", "one.flac") == expected


def test_stdin_arrays_bytes_and_items() -> None:
    samples = np.zeros(8, np.float32)
    pipe = io.BytesIO(b"RIFF")
    items = list(expand_inputs(["-", samples, b"RIFF", (samples, 8_000), pipe, InputItem("k", "x.wav")], stdin=pipe))
    assert [item.key for item in items] == ["stdin", "input-2", "input-3", "input-4", "input-5", "k"]
    assert items[0].source is pipe
    assert items[1].source is samples


def test_stdin_can_be_read_once() -> None:
    with pytest.raises(OptionError, match="twice"):
        list(expand_inputs(["-", "-"], stdin=io.BytesIO()))


def test_expansion_is_lazy(folder: Path) -> None:
    def inputs() -> object:
        yield "one.flac"
        raise AssertionError("asked for more than was taken")

    assert next(expand_inputs(inputs())).key == "one.flac"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "expected_keys", "paths"),
    [
        (
            "wav.scp",
            "utt1 b.wav\n\nutt2\t/data/with space.wav\r\nutt1   a/x.MP3\n",
            ["utt1", "utt2", "utt1#2"],
            ["calls/b.wav", "/data/with space.wav", "calls/a/x.MP3"],
        ),
        (
            "list.jsonl",
            '\ufeff{"key": "k1", "wav": "b.wav", "text": "hello"}\n'
            '{"audio_filepath": "a/x.MP3", "duration": 3.2, "offset": 0}\n{"key": 7, "source": "/data/z.wav"}\n',
            ["k1", "a/x.MP3", "7"],
            ["calls/b.wav", "calls/a/x.MP3", "/data/z.wav"],
        ),
    ],
    ids=["scp", "jsonl"],
)
def test_lists_of_keys_and_paths(
    folder: Path, name: str, content: str, expected_keys: list[str], paths: list[str]
) -> None:
    (folder / "calls" / name).write_text(content)
    assert keys(f"calls/{name}") == expected_keys
    assert sources(f"calls/{name}") == list(map(Path, paths))


def test_a_text_list(folder: Path) -> None:
    (folder / "calls/all.txt").write_bytes("# a comment\nb.wav\n  a/x.MP3  \ncaf\xe9.wav".encode("latin-1"))
    assert keys("calls/all.txt") == ["b.wav", "a/x.MP3", "caf\ufffd.wav"]
    assert os.fsencode(sources("calls/all.txt")[2]) == b"calls/caf\xe9.wav"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("wav.scp", "utt1", "a key and no path"),
        ("wav.scp", "utt1 sph2pipe -f wav x.sph |", "a command to run"),
        ("wav.scp", "utt1 raw.ark:1234", "archive"),
        ("l.jsonl", '{"wav": "x.wav"', "not JSON"),
        ("l.jsonl", '["x.wav"]', "a JSON list"),
        ("l.jsonl", '{"key": "a", "file": "x.wav"}', "key, file"),
        ("l.jsonl", '{"wav": ["x.wav"]}', "wav is"),
        ("l.jsonl", '{"wav": ""}', "wav is"),
        ("l.jsonl", '{"wav": "x.wav", "key": [1]}', "key is"),
        ("l.jsonl", '{"audio_filepath": "x.wav", "offset": 2.5}', "offset 2.5"),
        ("l.txt", "RIFF\0\0", "not a line of text"),
        ("l.txt", "x" * (1 << 20) + "xx", "not a line of text"),
    ],
)
def test_a_malformed_list_names_file_and_line(tmp_path: Path, name: str, line: str, message: str) -> None:
    good = {".scp": "ok ok.wav", ".jsonl": '{"wav": "ok.wav"}', ".txt": "ok.wav"}[Path(name).suffix]
    path = tmp_path / name
    path.write_text(f"{good}\n{line}\n")
    items = expand_inputs([path])
    next(items)
    with pytest.raises(AsrServeError) as refused:
        next(items)
    assert f"{path}, line 2: " in str(refused.value)
    assert message in str(refused.value)
