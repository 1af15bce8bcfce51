"""The command line with the embedded model and real speech, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "from asr_serve.api.cli import main; main()"


def asr_serve(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    return subprocess.run(command, input=stdin, env=environ, capture_output=True, check=False)


@pytest.mark.slow
def test_real_speech_to_every_format(packaged_speech: Path, tmp_path: Path) -> None:
    cities = packaged_speech / "two_cities.wav"
    plain = asr_serve("transcribe", cities)
    assert plain.returncode == 0, plain.stderr.decode()
    assert b"best of times" in plain.stdout.lower()

    piped = asr_serve("transcribe", "-", "-q", stdin=cities.read_bytes())
    assert (piped.stdout, piped.stderr) == (plain.stdout, b"")

    subtitles = asr_serve("transcribe", cities, "-o", tmp_path / "cities.srt")
    assert subtitles.returncode == 0
    assert (tmp_path / "cities.srt").read_text().startswith("1\n00:00:0")


@pytest.mark.slow
def test_real_speech_with_a_failure_and_a_resume(packaged_speech: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.wav").write_bytes(b"this is no audio at all")
    results = tmp_path / "all.jsonl"
    inputs = (packaged_speech / "beckett.wav", tmp_path / "noise.wav", packaged_speech / "two_cities.wav")
    first = asr_serve("transcribe", *inputs, "-o", results)
    assert first.returncode == 1
    assert b"failed: " in first.stderr
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [Path(row["key"]).name for row in rows] == ["beckett.wav", "two_cities.wav"]
    assert all(row["text"] and row["segments"] for row in rows)
    again = asr_serve("transcribe", *inputs, "-o", results, "--resume")
    assert b"2 already there" in again.stderr
    assert len(results.read_text().splitlines()) == 2
