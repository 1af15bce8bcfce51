"""Tests that want another environment wait while it is built, and skip where there is none."""

from __future__ import annotations

import threading
from pathlib import Path

import other_environments
import pytest
from other_environments import BUILDING, python_of

NAME = ".venv-other"


@pytest.fixture
def building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is there while the environment is built, in a folder of its own."""
    monkeypatch.setattr(other_environments, "ROOT", tmp_path)
    monkeypatch.setattr(other_environments, "gave_up", set())
    monkeypatch.setenv(BUILDING, str(tmp_path / "building"))
    (tmp_path / "building").mkdir()
    (tmp_path / NAME).mkdir()
    return tmp_path / "building" / NAME


def test_one_that_is_being_built_is_waited_for(building: Path, tmp_path: Path) -> None:
    building.touch()

    def finish() -> None:
        (tmp_path / NAME / ".done").touch()
        building.unlink()

    later = threading.Timer(0.1, finish)
    later.start()
    assert python_of(NAME, "none") == tmp_path / NAME / "bin" / "python"
    later.join(30)


@pytest.mark.parametrize("half", [False, True])
def test_without_one_tests_skip(building: Path, tmp_path: Path, half: bool) -> None:
    """Also where its folder is half full: nobody is building it any more."""
    if half:
        (tmp_path / NAME / "bin").mkdir()
        (tmp_path / NAME / "bin" / "python").touch()
    with pytest.raises(pytest.skip.Exception, match="no other Python here"):
        python_of(NAME, "no other Python here")


def test_one_that_takes_too_long_is_waited_for_once(building: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    building.touch()
    monkeypatch.setattr(other_environments, "LIMIT_S", 0.0)
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception):
            python_of(NAME, "none")
    assert other_environments.gave_up == {NAME}
