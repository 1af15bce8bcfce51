"""The arithmetic of bench/clone.py: who is held out, which cosines are compared, what becomes of a failure."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The bench's files as they import each other when run as scripts."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("clone")
    sys.path.remove(str(BENCH))


@pytest.mark.parametrize(("clips", "most", "learnt"), [(10, 20, 7), (32, 20, 20), (23, 20, 20), (6, 2, 2)])
def test_held_out_clips_are_not_trained_on(bench: Any, clips: int, most: int, learnt: int) -> None:
    paths = [Path(f"{number}.flac") for number in range(clips)]
    found = bench.divided("ada", paths, most)
    assert len(found.learnt) == learnt
    assert sorted([*found.learnt, *found.held_out]) == sorted(paths)


def test_cosines_of_pairs_and_of_means(bench: Any) -> None:
    one, other = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0]])
    assert bench.pairs(one, other) == 0.5
    found = bench.alike(
        learnt=np.array([[1.0, 0.0]]),
        held_out=np.array([[1.0, 0.0], [0.8, 0.6]]),
        said=np.array([[0.6, 0.8], [0.8, 0.6]]),
        stock=np.array([[0.0, 1.0]]),
        others=np.array([[0.0, 1.0], [0.6, -0.8]]),
    )
    assert (found["ceiling"], found["similarity"]) == (0.9, pytest.approx((0.6 + 0.8 + 0.96 + 1.0) / 4))
    assert found["share"] == pytest.approx(0.84 / 0.9, abs=1e-3)
    assert found["stock"] == 0.3
    assert found["floor"] == pytest.approx((0 + 0.6 + 0.6 + 0.0) / 4)
    mean = np.array([1.8, 0.6]) / np.hypot(1.8, 0.6)
    assert found["voice_ceiling"] == pytest.approx(mean[0], abs=1e-3)
    assert found["voice_similarity"] == pytest.approx(mean @ np.array([1.0, 1.0]) / np.sqrt(2), abs=1e-3)


def test_speakers_that_are_there(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("7", "12"):
        folder = tmp_path / "librispeech-test-other" / name
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"{number}.flac").touch()
    (tmp_path / "lj").mkdir()
    args = ["--data", str(tmp_path), "--ljspeech", str(tmp_path / "lj")]
    with pytest.raises(SystemExit, match=r"no LJ\*\.wav"):
        bench.found(bench.parse(args))
    (tmp_path / "lj" / "LJ001-0001.wav").touch()
    assert [each.name for each in bench.found(bench.parse(args))] == ["librispeech 12", "librispeech 7", "ljspeech"]
    assert [each.name for each in bench.found(bench.parse([*args, "--speakers", "1"]))] == ["librispeech 12"]
    assert len(bench.found(bench.parse(args[:2]))) == 2
    assert "no LJSpeech" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no speakers"):
        bench.found(bench.parse(["--data", str(tmp_path / "lj")]))


@pytest.mark.slow
def test_a_speaker_that_cannot_be_cloned_is_told(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command itself; and the others' rows are kept as they come."""
    noise = tmp_path / "a.wav"
    noise.write_bytes(b"no audio")
    args = bench.parse(["--data", str(tmp_path)])
    report, trouble = bench.cloned(args, bench.Speaker("ada", [noise], []), tmp_path, "bench-0")
    assert report is None
    assert trouble.startswith("exit ")
    rows = [{"speaker": "ada", "failed": trouble}, {"speaker": "grace", "share": 0.8}]
    monkeypatch.setattr(bench, "found", lambda args: [])
    monkeypatch.setattr(bench, "measured", lambda args, speakers: iter(rows))
    monkeypatch.setattr(bench.machine, "describe", lambda threads, packages: {"packages": {}})
    assert bench.main(["--data", "x", "--json", str(tmp_path / "found.json")]) == 1
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows
    assert f"ada: {trouble}" in capsys.readouterr().out
