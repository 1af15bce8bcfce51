"""The load bench of the service: its arithmetic on known answers, and whole runs against a real server."""

from __future__ import annotations

import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_modules import bench_modules

ROW_KEYS = {"system", "clients", "rps", "rtfx", "p50_ms", "p95_ms", "p99_ms"}
ROW_KEYS |= {"max_ms", "errors", "wer", "server_cpu_s", "client_cpu_s", "rss_mib"}

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("clips", "serve", "serve_peers", "serve_report") as modules:
        yield modules


def answered(clip: int, latency_s: float, said: str | None, *, begun: bool = True, ended: bool = True) -> Any:
    return {
        "clip": clip,
        "status": 200 if said is not None else 503,
        "latency_s": latency_s,
        "begun_inside": begun,
        "ended_inside": ended,
        "body": json.dumps({"text": said}),
    }


def level(answers: list[Any], wall_s: float = 10.0, refused: int = 0) -> dict[str, Any]:
    return {
        "wall_s": wall_s,
        "answers": answers,
        "refused": refused,
        "reconnects": 0,
        "client_cpu_s": 0.123,
        "server_cpu_s": 9.876,
        "rss_mib": 321.4,
    }


@pytest.mark.parametrize(
    ("count", "share", "value"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.99, 99), (101, 0.99, 100), (200, 0.99, 198), (10, 1.0, 10)],
)
def test_percentiles_are_values_that_were_measured(
    bench: SimpleNamespace, count: int, share: float, value: float
) -> None:
    assert bench.serve_report.percentile([float(n) for n in range(1, count + 1)], share) == value


def test_no_answers_have_no_percentile(bench: SimpleNamespace) -> None:
    assert bench.serve_report.percentile([], 0.5) is None


def test_rates_count_what_ended_and_latencies_what_began(bench: SimpleNamespace) -> None:
    answers = [answered(0, 0.1, "a") for _ in range(18)]
    answers += [answered(1, 7.0, "b", begun=False), answered(1, 9.0, "b", ended=False)]
    answers += [answered(0, 5.0, None), answered(0, 5.0, "a", begun=False, ended=False)]
    row = bench.serve_report.facts(level(answers, refused=2), [2.0, 30.0])
    assert (row["rps"], row["rtfx"]) == (1.9, (18 * 2 + 30) / 10)
    assert (row["p50_ms"], row["p95_ms"], row["max_ms"]) == (100.0, 9_000.0, 9_000.0)
    assert row["p99_over_p50"] == 90.0
    assert (row["errors"], row["requests"]) == ({"503": 1, "429": 2}, 20)
    assert (row["server_cpu_s"], row["client_cpu_s"], row["rss_mib"]) == (9.88, 0.12, 321)


def test_each_clip_counts_once_in_the_error_rate(bench: SimpleNamespace) -> None:
    references = ["red green", "blue grey pink brown", "never asked"]
    pairs = [(0, "red green")] * 7 + [(1, "blue grey pink brown"), (1, "blue grey")]
    assert bench.serve_report.error_rate(references, pairs) == round(100 * (0 + 2 / 2) / 6, 2)
    assert bench.serve_report.error_rate(references, []) is None
    assert bench.serve_report.error_rate(["", "a"], [(0, "noise heard"), (1, "a")]) == 200.0


def test_the_median_round_is_the_row(bench: SimpleNamespace) -> None:
    rounds = [level([answered(0, 0.1, "a")] * count, refused=1) for count in (30, 10, 20)]
    rounds[0]["answers"] = [*rounds[0]["answers"][:-1], answered(0, 0.5, "b")]
    row = bench.serve_report.row("x", 8, rounds, ["a"], [1.0])
    assert row.keys() >= ROW_KEYS
    assert (row["system"], row["clients"], row["rps"]) == ("x", 8, 2.0)
    assert row["rps_rounds"] == [3.0, 1.0, 2.0]
    assert row["errors"] == {"429": 3}
    assert (row["wer"], row["unsteady_clips"]) == (3.33, 1)  # the round with the worst


def test_the_service_beside_the_engine(bench: SimpleNamespace) -> None:
    made = bench.serve_report
    rows = [
        {**made.blank(made.OURS, count), "rps": rps, "rtfx": 7 * rps, "p99_over_p50": ratio}
        for count, rps, ratio in ((1, 10.0, 1.5), (32, 40.0, 2.5), (128, 38.0, 4.0))
    ]
    rows += [{**made.blank("peer", 8), "rps": 2.0, "rtfx": 14.0, "p99_over_p50": 1.1}]
    rows += [{**made.blank("gone", 8), "skipped": "why"}]
    rows += [{**made.blank(made.OFFLINE, None), "rtfx": 350.0}, {**made.blank(made.WHOLE, None), "rtfx": 400.0}]
    ours, peer = made.summarize(rows)
    assert ours == {
        "system": "asr-serve",
        "at_clients": 32,
        "rps": 40.0,
        "rtfx": 280.0,
        "share_of_offline": 0.8,
        "share_of_offline_whole": 0.7,
        "p99_over_p50": 2.5,
        "held_past_saturation": 0.95,
    }
    assert (peer["system"], peer["at_clients"], peer["held_past_saturation"]) == ("peer", 8, 1.0)
    assert "share_of_offline" not in peer
    assert [row.get("share_of_offline") for row in rows[:3]] == [0.2, 0.8, 0.76]
    rows[2].update(rps=None, rtfx=None, failed="the server ended")
    assert made.summarize(rows)[0]["held_past_saturation"] == 0.0
    shown = made.table(rows)
    assert "asr-serve: failed: the server ended" in shown
    assert "gone: skipped: why" in shown
    assert "share_of_offline=0.8" in made.lines([ours])


def test_the_engine_alone(bench: SimpleNamespace) -> None:
    result = {
        "walls_s": [2.0, 1.0, 4.0],
        "cpus_s": [3.0, 3.0, 3.0],
        "texts": ["a", "b"],
        "facts": {"dtype": "bf16", "notes": "n"},
        "audio_s": 60.0,
        "load_s": 1.0,
        "first_text_s": 2.0,
        "peak_mib": 300.4,
    }
    row = bench.serve_report.alone("asr-serve offline", [result], ["a", "c"])
    assert row.keys() >= ROW_KEYS
    assert (row["clients"], row["rps"], row["rtfx"], row["wer"]) == (None, 1.0, 30.0, 50.0)
    assert (row["server_cpu_s"], row["rss_mib"], row["rtfx_rounds"]) == (3.0, 300, [30.0])
    assert bench.serve_report.alone("x", [{"failed": "why"}], ["a"])["failed"] == "why"


# A server in a process of its own --------------------------------------------------------------------------------

APP = '''
import asyncio, json, re

async def app(scope, receive, send):
    """Says the name of the file it was sent."""
    assert scope["type"] == "http"
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    name = re.search(rb'filename="(.+?)"', body)
    said = json.dumps({"text": "this is " + name[1].decode() if name else "ready"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})
'''


@pytest.fixture
def data(tmp_path: Path, bench: SimpleNamespace) -> Path:
    """Three clips of 0.5, 1.0 and 1.5 s. The text of the last is what the server will not say."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = []
    for number, said in enumerate(["this is 1.flac", "this is 2.flac", "that was 3.flac"], start=1):
        clip = bench.clips.Clip(f"{number}.flac", np.full(8_000 * number, 0.1, np.float32), said)
        bench.clips.write_long(folder / clip.path, [clip], 0.001, gap_s=0.0)
        lines.append(f"{clip.path}\t{said}")
    (folder / "transcripts.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_a_whole_run_against_granian(
    bench: SimpleNamespace, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("granian")
    (tmp_path / "hello.py").write_text(APP)
    ports: list[int] = []

    def granian(setting: Any) -> Any:
        ports.append(setting.port)
        command = [sys.executable, "-m", "granian", "--interface", "asgi", "--host", bench.serve_peers.HOST]
        command += ["--port", str(setting.port), "--working-dir", str(tmp_path), "hello:app"]
        return bench.serve_peers.Service(command, "/ready", "m", "says file names")

    def absent(setting: Any) -> Any:
        raise bench.serve_peers.Absent("no such package")

    def broken(setting: Any) -> Any:
        command = [sys.executable, "-c", "raise SystemExit('no weights')"]
        return bench.serve_peers.Service(command, "/ready", "m", "ends at once")

    entries = [("granian", granian), ("absent", absent), ("broken", broken)]
    monkeypatch.setitem(bench.serve_peers.PEERS, "agent-cli", entries)
    found_at = tmp_path / "out" / "serve.json"
    line = f"--data {data} --only-peers --peers agent-cli --clients 1,4 --repeats 2 --seconds 0.2 --requests 20"
    assert bench.serve.main([*line.split(), "--json", str(found_at)]) == 0

    found = json.loads(found_at.read_text())
    assert list(found) == ["bench", "machine", "rows", "summary"]
    assert found["bench"] == "serve"
    assert "granian" in found["machine"]["packages"]
    rows = {(row["system"], row["clients"]): row for row in found["rows"]}
    assert list(rows) == [(name, count) for name, _ in entries for count in (1, 4)]
    assert all(row.keys() >= ROW_KEYS for row in found["rows"])
    for count in (1, 4):
        row = rows["granian", count]
        assert (row["wer"], row["errors"], row["unsteady_clips"], row["reconnects"]) == (16.67, {}, 0, 0)
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["requests"] >= 20
        assert row["rtfx"] == pytest.approx(row["rps"], rel=0.5)  # the clips are a second long, on the whole
        assert row["rss_mib"] > 20
        assert len(row["rps_rounds"]) == 2
        assert row["notes"] == "says file names"
        assert rows["absent", count]["skipped"] == "cannot be installed: no such package"
        assert rows["broken", count]["failed"] == "exit 1 before it was ready: no weights"
    assert [made["system"] for made in found["summary"]] == ["granian"]
    for port in ports:  # nothing is left behind
        with bench.serve.socket.socket() as again:
            again.bind((bench.serve_peers.HOST, port))


def test_wav_files_are_the_clips(bench: SimpleNamespace, tmp_path: Path) -> None:
    sound = np.array([0.0, 0.5, -1.0, 1.0], np.float32)
    path = bench.serve.write_wav(tmp_path / "x.wav", bench.clips.Clip("x", sound, ""))
    with wave.open(str(path)) as file:
        assert file.getparams()[:4] == (1, 2, 16_000, 4)
        assert np.frombuffer(file.readframes(4), "<i2").tolist() == [0, 16_384, -32_768, 32_767]


@pytest.mark.parametrize(
    "line", ["--clients 0", "--clients 1,x", "--peers nobody", "--repeats 0", "--requests 0", "--per-client 0"]
)
def test_bad_serve_options(bench: SimpleNamespace, line: str) -> None:
    with pytest.raises(SystemExit):
        bench.serve.parse(["--data", "x", *line.split()])


def test_serve_options(bench: SimpleNamespace, tmp_path: Path) -> None:
    args = bench.serve.parse(["--data", "x", "--clients", "8,1,8", "--server", "--set 'engine.max_decode_rows=64'"])
    assert args.clients == [8, 1]
    setting = bench.serve_peers.Setting(5, 2, tmp_path, args.server)
    command = bench.serve_peers.asr_serve(setting).command
    assert "--set engine.prefix_bytes=0" in " ".join(command)
    assert command[-2:] == ["--set", "engine.max_decode_rows=64"]
