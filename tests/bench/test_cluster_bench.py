"""The cluster's bench: its arithmetic on known rounds, and what it says where a package is missing."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("cluster")
    sys.path.remove(str(BENCH))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    import av

    with av.open(str(tmp_path / "a.flac"), "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16_000, layout="mono", format="s16")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (tmp_path / "transcripts.tsv").write_text("a.flac\tnothing\n")
    return tmp_path


def test_processes_are_told_apart_by_their_command_lines(bench):
    lines = {
        "python -P -m asr_serve.engine.process.main 63 65": "engines",
        "ray::ServeReplica:asr-serve:ingress": "ingress",
        "ray::SERVE_REPLICA::asr-serve#ingress#to44fnkm:ServeReplica:asr-serve:ingress.__init__": "ingress",
        "ray::ServeReplica:asr-serve:moonshine-tiny-en": "ray",
        "/opt/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ingress": "ray",
        "python -c main cluster up --config /tmp/cluster.yaml": "ray",
        "cat": "other",
    }
    assert {line: bench.kind_of(line, False) for line in lines} == lines
    assert bench.kind_of("python -c main serve --port 8000", True) == "ingress"
    assert bench.kind_of("python -c main cluster up", True) == "ray"


def test_rounds_become_a_row(bench):
    rounds = [
        {"rtfx": 90.0, "p50_ms": 30.0, "p95_ms": 80.0, "lost": 1, "finals_ms": [10.0, 30.0, 50.0]},
        {"rtfx": 110.0, "p50_ms": 20.0, "p95_ms": 70.0, "lost": 0, "finals_ms": [20.0]},
        {"rtfx": 100.0, "p50_ms": 25.0, "p95_ms": 75.0, "lost": 2, "finals_ms": []},
    ]
    made = bench.median(rounds)
    assert (made["rtfx"], made["lost"], made["finals"]) == (100.0, 3, 4)
    assert (made["p50_ms"], made["p95_ms"]) == (20.0, 50.0)  # of all rounds' finals
    assert made["rtfx_rounds"] == [90.0, 110.0, 100.0]
    assert "finals_ms" not in made
    base = {"rtfx_rounds": [100.0, 100.0, 50.0]}
    assert bench.ratio(made, base) == 1.1
    assert bench.median([{"failed": "why"}, rounds[0]]) == {"failed": "why"}


def test_half_of_the_repeated_workload_is_popular(bench, data, tmp_path):
    args = bench.parse(["--data", str(data), "--variants", "3"])
    args.ray_folder = str(tmp_path)
    made = bench.Bench(args, tmp_path)
    files, lengths_s = bench.repeated_files(made)
    assert len(files) == len(lengths_s) == 6
    assert lengths_s == [0.25] * 6
    assert files[1::2] == [made.files[0]] * 3
    assert len({file.read_bytes() for file in files[0::2]}) == 3  # each is new to a cache


@pytest.mark.parametrize("wrong", [["--parts", "overhead,faults"], ["--clients", "0"], ["--seconds", "0"]])
def test_wrong_options_are_told(bench, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse(["--data", "folder", *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "missing", "todo"),
    [("overhead", "ray", "pip install 'asr-serve[cluster]'"), ("sessions", "redis-server", "apt install redis-server")],
)
def test_what_is_missing_is_told(bench, data, part, missing, todo, monkeypatch, capsys):
    if missing == "ray":
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.setitem(sys.modules, "ray.serve", None)
    else:
        monkeypatch.setenv("PATH", "")
    assert bench.main(["--data", str(data), "--parts", part]) == 2
    told = capsys.readouterr().err
    assert missing in told
    assert todo in told


def test_rows_have_the_columns(bench):
    rows = [
        {"part": "overhead", "system": "serve", "load": "files", "replicas": 1, "callers": 8, "rtfx": 9.0, "lost": 0},
        {"part": "sessions", "store": "redis", "operation": "write", "p50_us": 300.0, "p95_us": 900.0},
        {"part": "affinity", "cache": "on", "failed": "why"},
    ]
    lines = bench.table(rows).splitlines()
    assert lines[0].split() == ["part", "which", "replicas", "callers", "rtfx", "p50_ms", "p95_ms", "lost", "cores"]
    assert lines[1].split() == ["overhead", "serve", "files", "1", "8", "9.0", "0"]
    assert lines[2].split() == ["sessions", "redis", "write", "0.3", "0.9"]
    assert lines[3].split() == ["affinity", "on", "failed:", "why"]
    json.dumps(rows)
