"""Files that are written whole: what is there afterwards, and what an error names."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from asr_serve.output_file import replaced_file


def test_a_file_is_replaced_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replaced_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "new")]


def test_after_an_error_the_old_file_is_there_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    stack = contextlib.ExitStack()
    stack.enter_context(replaced_file(path)).write_text("half")
    with pytest.raises(ZeroDivisionError), stack:
        _ = 1 / 0
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "old")]


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / folder / "a.txt"
    with pytest.raises(OSError, match=r"a\.txt") as refused, replaced_file(path) as part:
        part.write_text("new")
    assert refused.value.filename == str(path)
    assert ".part" not in str(refused.value)


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"a\.txt"), replaced_file(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError) as broken, replaced_file(tmp_path / "a.txt"):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert broken.value.filename is None
