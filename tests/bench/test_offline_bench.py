"""The offline bench without its peers, its data or a clock: reading, taking turns, rows, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_modules import bench_modules

ROW_KEYS = {"name", "rtfx", "wer", "wall_s", "audio_s"}

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("clips", "footprint", "machine", "offline", "peers", "report", "worker") as modules:
        yield modules


class Parrot:
    """Says the samples' count, so that every text shows whose it is."""

    def __init__(self, device: str, threads: int, **options: Any) -> None:
        self.facts = {"dtype": options.get("dtype", "fp32"), "threads": threads, "notes": "a parrot"}
        self.calls: list[int] = []

    def prepare(self, audio: Sequence[Any]) -> Sequence[Any]:
        return audio

    def transcribe(self, prepared: Sequence[Any]) -> list[str]:
        self.calls.append(len(prepared))
        return [f"{len(clip)} samples" for clip in prepared]

    def close(self) -> None:
        pass


class Absent(Parrot):
    def __init__(self, device: str, threads: int, **options: Any) -> None:
        raise ImportError("No module named 'absent'")


@pytest.fixture
def data(tmp_path: Path, bench: SimpleNamespace) -> Path:
    """Three clips of 0.5, 1.0 and 1.5 s with their texts; the last text is half wrong."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = []
    for number, text in enumerate(["8000 samples", "16000 samples", "24000 horses"], start=1):
        sound = np.full(8_000 * number, 0.1, np.float32)
        clip = bench.clips.Clip(f"{number}.flac", sound, text)
        bench.clips.write_long(folder / clip.path, [clip], 0.001, gap_s=0.0)
        lines.append(f"{clip.path}\t{text}")
    (folder / "transcripts.tsv").write_text("\n".join(lines) + "\n\n")
    return folder


@pytest.fixture
def makers(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in bench.peers.MAKERS:
        monkeypatch.setitem(bench.peers.MAKERS, name, Absent if name == "faster-whisper" else Parrot)
    monkeypatch.setattr(bench.worker, "os", SimpleNamespace())  # the tests keep all their cores


def result(walls_s: list[float], texts: list[str], audio_s: float = 60.0) -> dict[str, Any]:
    return {
        "walls_s": walls_s,
        "cpus_s": walls_s,
        "texts": texts,
        "facts": {"dtype": "bf16", "threads": 2, "notes": "n"},
        "audio_s": audio_s,
        "load_s": 1.0,
        "first_text_s": 2.0,
        "peak_mib": 300.4,
    }


def test_a_whole_run(bench: SimpleNamespace, makers: None, data: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    args = bench.offline.parse(
        f"--data {data} --peers onnx,faster-whisper --repeats 2 --dtypes bf16 --texts {texts} "
        "--sweep batch,length --threads 2".split()
    )
    turns: list[str] = []

    def start(work: dict[str, Any]) -> dict[str, Any]:
        turns.append(f"{work['maker']} {work['options'].get('dtype', '')}".strip())
        return bench.worker.run(json.loads(json.dumps(work)))

    found = json.loads(json.dumps(bench.offline.run(args, tmp_path, start, {})))
    assert list(found) == ["bench", "machine", "rows"]
    assert found["bench"] == "offline"
    assert {"cpu", "cores", "threads", "packages", "python"} <= found["machine"].keys()
    assert all(row.keys() >= ROW_KEYS for row in found["rows"])

    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    ours = rows["asr-serve"]
    assert (ours["audio_s"], ours["wer"], ours["words"]) == (3.0, 16.67, 6)
    assert (ours["dtype"], ours["threads"], len(ours["walls_s"])) == ("auto", 2, 6)
    assert ours["rtfx"] > 0
    assert ours["wer_minus_onnx"] == 0
    assert rows["asr-serve bf16"]["dtype"] == "bf16"
    assert rows["onnx"]["vs_onnx"] == 1.0
    assert rows["faster-whisper"]["skipped"] == "not installed: No module named 'absent'"
    assert rows["faster-whisper"]["rtfx"] is None

    once = ["asr-serve auto", "asr-serve bf16", "asr-serve auto", "onnx", "faster-whisper", "faster-whisper"]
    present = ["faster-whisper batched", "faster-whisper joined"]
    assert turns[:14] == [*once, *present, *once[:4], *present]

    assert {row["batch"] for row in found["rows"] if row.get("sweep") == "batch"} == {1, 2, 4, 8, 16, 32, 64}
    assert rows["asr-serve batch=64"]["audio_s"] == 43 * 3.0
    assert {"asr-serve length=1", "onnx length=30"} <= rows.keys()
    assert rows["onnx length=30"]["clips"] == 1

    clip = json.loads(texts.read_text())["clips"][2]
    assert (clip["path"], clip["reference"]) == ("3.flac", "24000 horses")
    assert clip["texts"]["asr-serve"] == "24000 samples"
    assert "faster-whisper: skipped: not installed" in bench.report.table(found["rows"])


def test_a_worker_warms_up_once_then_takes_the_whole_set(bench: SimpleNamespace) -> None:
    parrot = Parrot("cpu", 2)
    measured = bench.worker.measure(parrot, [np.zeros(n, np.float32) for n in (3, 1, 2)], passes=2)
    assert parrot.calls == [1, 3, 3]
    assert measured["texts"] == ["3 samples", "1 samples", "2 samples"]
    assert len(measured["walls_s"]) == len(measured["cpus_s"]) == 2


def test_median_and_best(bench: SimpleNamespace) -> None:
    row = bench.report.row("x", [result([wall], ["a b"]) for wall in (3.0, 1.0, 2.0)], ["a b"])
    assert (row["wall_s"], row["rtfx"], row["best_wall_s"], row["best_rtfx"]) == (2.0, 30.0, 1.0, 60.0)
    assert (row["wer"], row["notes"], row["peak_mib"]) == (0.0, "n", 300)


def test_texts_that_change_give_the_worst_rate_and_a_note(bench: SimpleNamespace) -> None:
    row = bench.report.row("x", [result([1.0], ["a b"]), result([1.0], ["a c"])], ["a b"])
    assert row["wer"] == 50.0
    assert row["notes"] == "n; texts differ between rounds, worst WER shown"


def test_the_ratio_is_made_within_the_run(bench: SimpleNamespace) -> None:
    ours = bench.report.row("asr-serve", [result([1.0], ["a"]), result([2.0], ["a"])], ["a"])
    base = bench.report.row("onnx", [result([8.0], ["b"]), result([10.0], ["b"])], ["a"])
    gone = bench.report.row("gone", [{"skipped": "not installed"}], ["a"])
    bench.report.compare([ours, base, gone])
    assert ours["vs_onnx"] == 6.0
    assert ours["vs_onnx_rounds"] == [5.0, 8.0]
    assert ours["wer_minus_onnx"] == -100.0
    assert "vs_onnx" not in gone


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (None, "not found"),
        ("", "no line with a clip"),
        ("one.flac a text without a tab\n", r"transcripts.tsv:1: expected"),
        ("a.flac\tfine\n\tno path\n", r"transcripts.tsv:2: expected"),
    ],
    ids=["no-table", "empty", "no-tab", "no-path"],
)
def test_bad_tables(bench: SimpleNamespace, tmp_path: Path, table: str | None, says: str) -> None:
    if table is not None:
        (tmp_path / "transcripts.tsv").write_text(table)
    with pytest.raises(SystemExit, match=says):
        bench.clips.read_transcripts(tmp_path)


def test_clips_arrive_unchanged_at_the_worker(bench: SimpleNamespace, data: Path, tmp_path: Path) -> None:
    speech = bench.clips.load(data)
    assert [len(clip.audio) for clip in speech] == [8_000, 16_000, 24_000]
    assert [clip.text for clip in speech] == ["8000 samples", "16000 samples", "24000 horses"]
    np.testing.assert_allclose(speech[0].audio, 0.1, atol=1 / 32_768)
    bench.clips.save(tmp_path / "x.npz", [clip.audio for clip in speech])
    for clip, back in zip(speech, bench.clips.restore(tmp_path / "x.npz"), strict=True):
        np.testing.assert_array_equal(clip.audio, back)


@pytest.mark.parametrize(
    ("count", "wanted", "places"),
    [(3, None, [0, 1, 2]), (3, 9, [0, 1, 2]), (50, 5, [0, 10, 20, 30, 40]), (5, 2, [0, 2])],
)
def test_some_clips_are_spread_over_the_set(
    bench: SimpleNamespace, count: int, wanted: int | None, places: list[int]
) -> None:
    assert bench.clips.spread(count, wanted) == places


def test_cut_keeps_the_samples_in_order(bench: SimpleNamespace) -> None:
    audio = [np.arange(16_000, dtype=np.float32), np.arange(16_000, 40_000, dtype=np.float32)]
    pieces = bench.clips.cut(audio, 1)
    assert [len(piece) for piece in pieces] == [16_000, 16_000]
    np.testing.assert_array_equal(np.concatenate(pieces), np.arange(32_000))
    assert [len(piece) for piece in bench.clips.cut(audio, 5)] == [80_000]


def test_a_long_file_repeats_the_clips(bench: SimpleNamespace, tmp_path: Path) -> None:
    speech = [bench.clips.Clip("a", np.full(16_000, 0.5, np.float32), "one")]
    speech += [bench.clips.Clip("b", np.full(8_000, -0.5, np.float32), "two")]
    length_s, said = bench.clips.write_long(tmp_path / "long.flac", speech, 4.0)
    assert (length_s, said) == (4.0, "one two one")
    back = bench.clips.decode(tmp_path / "long.flac")
    assert len(back) == 64_000
    np.testing.assert_allclose(back[[0, 20_000, 25_000, 33_000, 41_000]], [0.5, 0, -0.5, 0, 0.5])


def test_the_vocabulary_of_moonshine(bench: SimpleNamespace) -> None:
    long = b"x" * 130
    data = b"\x00" + b"\x02ab" + bytes([130 % 128 + 128, 130 // 128]) + long
    assert bench.peers.read_vocabulary(data) == [b"", b"ab", long]


@pytest.mark.parametrize(
    "line", ["--peers nobody", "--repeats 0", "--sweep size", "--engine rows", "--device abacus", "--dtypes fp7"]
)
def test_bad_options(bench: SimpleNamespace, line: str) -> None:
    with pytest.raises(SystemExit):
        bench.offline.parse(["--data", "x", *line.split()])


def test_a_worker_that_dies_is_a_row(bench: SimpleNamespace, tmp_path: Path) -> None:
    start = bench.offline.starter(tmp_path, bench.offline.environment(2), limit_s=60)
    failed = start(bench.worker.job("nobody", {}, tmp_path / "missing.npz", "cpu", 2))
    assert failed["failed"].startswith("exit 1: FileNotFoundError")
    row = bench.report.row("nobody", [failed], ["a"])
    assert row["rtfx"] is None
    assert "exit 1" in row["failed"]


FAKE_COMMAND = """
import sys
print()
print("red green blue")
if "--output" in sys.argv:
    open(sys.argv[sys.argv.index("--output") + 1], "w").write("red green grey")
sys.exit(3 if "--device=broken" in "=".join(sys.argv) else 0)
"""


def test_the_command_as_a_user_meets_it(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.footprint, "COMMAND", [sys.executable, "-c", FAKE_COMMAND])
    clip, env = (bench.clips.Clip("a", np.zeros(8_000, np.float32), "red green blue"), bench.offline.environment(2))

    row = bench.footprint.memory([clip], "cpu", env, hours=1 / 3_600)
    assert row.keys() >= {*ROW_KEYS, "peak_mib"}
    assert (row["name"], row["audio_s"], row["wer"]) == ("asr-serve memory", 1.0, 33.33)
    cold, warm = bench.footprint.startup(clip, "cpu", env, 2, tmp_path)
    assert (cold["name"], warm["name"]) == ("asr-serve startup cold", "asr-serve startup warm")
    assert 0 < warm["first_text_s"] <= warm["wall_s"]

    assert bench.footprint.memory([clip], "broken", env, hours=1 / 3_600)["failed"] == "exit 3"
    assert all("failed" in row for row in bench.footprint.startup(clip, "broken", env, 1, tmp_path))


def test_peak_memory_of_a_process(bench: SimpleNamespace) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    assert bench.machine.peak_mib() > 1
    assert bench.machine.peak_mib("999999999") == 0.0
