"""The store of evaluations: what is written comes back, figures follow from the rows, foreign files are refused."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.evaluation.bootstrap import error_interval
from asr_serve.evaluation.store import (
    EvaluatedDataset,
    EvaluatedSystem,
    EvaluationResult,
    EvaluationStore,
    RunSettings,
    percentile,
)

SYSTEM = EvaluatedSystem("tiny@int8", "tiny", "abc", "MIT", "int8")
DATASET = EvaluatedDataset("calls", "/data/calls", "0" * 64, "en", 3)


def result(path: str, words: int = 10, errors: int = 1, seconds: float | None = 0.5) -> EvaluationResult:
    return EvaluationResult(path, 4.0, "a b", "a c", words, errors, 5 * words, 2 * errors, seconds)


def test_figures_of_a_whole_run(tmp_path: Path) -> None:
    with EvaluationStore(tmp_path / "deep" / "e.sqlite", create=True) as store:
        run = store.begin_run(SYSTEM, DATASET, RunSettings(), 0.5)
        for path, errors, seconds in (("a", 0, 1.0), ("b", 2, 2.0), ("c", 4, None)):
            store.add_result(run.run_id, result(path, errors=errors, seconds=seconds))
        store.add_pass(run.run_id, 3, 12.0, 2.0)
        store.finish_run(run.run_id)
        (summary,) = store.summaries()
        assert store.results(run.run_id)[1] == result("b", errors=2, seconds=2.0)
    with EvaluationStore(tmp_path / "deep" / "e.sqlite") as again:
        assert again.summaries("tiny", "calls") == [summary]
        assert again.summaries("other") == again.summaries(None, "other") == []
    assert (summary.wer, summary.cer) == (20.0, 8.0)
    assert summary.wer_low is not None
    assert summary.wer_high is not None
    assert 0 <= summary.wer_low <= 20.0 <= summary.wer_high <= 40.0
    assert (summary.rtfx, summary.cost_per_audio_hour) == (6.0, 0.5 / 6)
    assert (summary.latency_p50_s, summary.latency_p95_s) == (1.0, 2.0)
    assert (summary.clips, summary.failed, summary.audio_s, summary.finished) == (3, 0, 12.0, True)
    assert summary.der is summary.hotword_recall is summary.first_word_p50_ms is None


def test_an_interrupted_run_goes_on_without_a_speed(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    with EvaluationStore(path, create=True) as store:
        run = store.begin_run(SYSTEM, DATASET, RunSettings())
        store.add_result(run.run_id, result("a"))
        store.add_result(run.run_id, EvaluationResult("b", 4.0, error="no answer"))
        store.add_pass(run.run_id, 1, 4.0, 1.0)
        (summary,) = store.summaries()
        assert (summary.clips, summary.failed, summary.finished, summary.rtfx) == (1, 1, False, None)
    with EvaluationStore(path, create=True) as store:
        again = store.begin_run(SYSTEM, DATASET, RunSettings())
        assert again.run_id == run.run_id
        assert store.done_paths(run.run_id) == {"a"}  # what failed is tried again
        for name in ("b", "c"):
            store.add_result(run.run_id, result(name))
        store.add_pass(run.run_id, 2, 8.0, 2.0)
        (summary,) = store.summaries()
        assert (summary.clips, summary.failed, summary.rtfx) == (3, 0, None)


@pytest.mark.parametrize(
    ("system", "dataset", "settings"),
    [
        (EvaluatedSystem("tiny@int8", "tiny", "def", "MIT", "int8"), DATASET, RunSettings()),
        (SYSTEM, EvaluatedDataset("calls", "/data/calls", "1" * 64, "en", 3), RunSettings()),
        (SYSTEM, DATASET, RunSettings(live=True)),
    ],
    ids=["revision", "audio", "settings"],
)
def test_what_makes_another_run(
    tmp_path: Path, system: EvaluatedSystem, dataset: EvaluatedDataset, settings: RunSettings
) -> None:
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        first = store.begin_run(SYSTEM, DATASET, RunSettings())
        assert store.begin_run(system, dataset, settings).run_id != first.run_id
        assert store.begin_run(SYSTEM, DATASET, RunSettings(), resume=False).run_id != first.run_id
        assert len(store.runs()) == 3


def test_a_moved_folder_is_the_same_dataset(tmp_path: Path) -> None:
    moved = EvaluatedDataset("calls", "/elsewhere/calls", "0" * 64, "en", 3)
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        first = store.begin_run(SYSTEM, DATASET, RunSettings())
        again = store.begin_run(SYSTEM, moved, RunSettings())
    assert (again.run_id, again.dataset.folder) == (first.run_id, "/elsewhere/calls")


def test_a_reader_sees_what_a_writer_adds(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    with EvaluationStore(path, create=True) as writer, EvaluationStore(path) as reader:
        run = writer.begin_run(SYSTEM, DATASET, RunSettings())
        assert reader.summaries() == []
        for count, name in enumerate("abc", start=1):
            writer.add_result(run.run_id, result(name))
            assert [summary.clips for summary in reader.summaries()] == [count]
        with pytest.raises(OptionError, match="readonly"):
            reader.finish_run(run.run_id)


def test_files_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="asr-serve eval run"):
        EvaluationStore(tmp_path / "none.sqlite")
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to be read as the header of one. " * 20)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE mine (a)")
    db.close()
    newer = tmp_path / "newer.sqlite"
    EvaluationStore(newer, create=True).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    for path, message in ((text, "no file of evaluations"), (foreign, "another program"), (newer, "version 99")):
        before = path.read_bytes()
        for create in (False, True):
            with pytest.raises(OptionError, match=message) as failure:
                EvaluationStore(path, create=create)
            assert failure.value.param == "store"
        assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into folders without permission")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    with EvaluationStore(path, create=True) as store:
        store.add_result(store.begin_run(SYSTEM, DATASET, RunSettings()).run_id, result("a"))
    tmp_path.chmod(0o500)
    try:
        with EvaluationStore(path) as store:
            assert store.summaries()[0].clips == 1
        with pytest.raises(OptionError):
            EvaluationStore(tmp_path / "new.sqlite", create=True)
    finally:
        tmp_path.chmod(0o700)


def test_bounds_of_the_bootstrap() -> None:
    assert error_interval([], []) is error_interval([1], [0]) is None
    assert error_interval([1] * 50, [10] * 50) == (10.0, 10.0)
    few, many = error_interval([0, 4] * 5, [10] * 10), error_interval([0, 4] * 500, [10] * 1_000)
    assert few is not None
    assert many is not None
    assert few[0] < many[0] < 20.0 < many[1] < few[1]
    # 1,000 clips of 0 or 4 errors in 10 words: the rate's standard error is 20 % / sqrt(1,000) = 0.63 %.
    assert many[1] - many[0] == pytest.approx(2 * 1.96 * 0.632, rel=0.1)
    assert error_interval([0, 4] * 5, [10] * 10) == few


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0, 50, 95, 100)] == [1.0, 2.0, 3.0, 3.0]
