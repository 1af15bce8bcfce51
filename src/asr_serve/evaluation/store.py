"""Store of evaluations: one SQLite file, written clip by clip, read by reports, the server and governance.

A run is one system over one dataset with one set of settings. Its results are rows of their own, committed one by one,
so that a run that was killed goes on where it stopped. Figures are computed from the rows when they are read: no table
holds a rate that could disagree with its clips.

    runs      one system x one dataset x settings; finished or not
    systems   what was measured: name, model, revision, licence, quantization
    datasets  what it was measured on: name, language, SHA-256 of its list and its audio
    passes    continuous stretches of work of a run, by wall clock: what RTFx is computed from
    results   one row a clip: texts, counts, times, or the error

All rates are in percent.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import msgspec

from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.evaluation.bootstrap import error_interval

APPLICATION_ID = 0x41535245
"""`ASRE`, in the header of the file."""
SCHEMA_VERSION = 2
BUSY_MS = 10_000
"""Time to wait for another process that writes."""
CACHED_SUMMARIES = 512

_SCHEMA = """
CREATE TABLE systems (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, model TEXT NOT NULL, revision TEXT NOT NULL, license TEXT NOT NULL,
    quantization TEXT NOT NULL, UNIQUE (name, model, revision, license, quantization)
) STRICT;
CREATE TABLE datasets (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, folder TEXT NOT NULL, sha256 TEXT NOT NULL, language TEXT NOT NULL,
    clips INTEGER NOT NULL, UNIQUE (name, sha256, language)
) STRICT;
CREATE TABLE runs (
    id TEXT PRIMARY KEY, system_id INTEGER NOT NULL REFERENCES systems, dataset_id INTEGER NOT NULL REFERENCES datasets,
    settings TEXT NOT NULL, cost_per_hour REAL, created INTEGER NOT NULL, finished INTEGER
) STRICT;
CREATE INDEX runs_of ON runs (system_id, dataset_id);
CREATE TABLE passes (
    run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, clips INTEGER NOT NULL, audio_s REAL NOT NULL,
    seconds REAL NOT NULL
) STRICT;
CREATE TABLE results (
    run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, path TEXT NOT NULL, audio_s REAL NOT NULL,
    reference TEXT, hypothesis TEXT, words INTEGER, word_errors INTEGER, characters INTEGER, character_errors INTEGER,
    seconds REAL, first_word_ms REAL, final_ms REAL, speaker_s REAL, speaker_error_s REAL,
    hotwords INTEGER, hotwords_found INTEGER, error TEXT, differences TEXT, PRIMARY KEY (run_id, path)
) STRICT, WITHOUT ROWID;
"""


ClipOrder = Literal["path", "errors", "error_rate", "slowest", "longest"]
_ERRORS = "iif(words IS NULL, character_errors, word_errors)"
_CLIP_ORDERS: dict[ClipOrder, str] = {
    "path": "path",
    "errors": f"error IS NULL, {_ERRORS} DESC, path",
    "error_rate": f"error IS NULL, 1.0 * {_ERRORS} / max(iif(words IS NULL, characters, words), 1) DESC, path",
    "slowest": "coalesce(seconds, final_ms / 1000) DESC, path",
    "longest": "audio_s DESC, path",
}
"""Orders of clips in SQL; those that failed have most errors."""
_WITH_RESULTS = "EXISTS (SELECT 1 FROM results x WHERE x.run_id = r.id)"


class TextDifference(NamedTuple):
    """Stretch of an alignment of two normalized texts: what is the same, or what is there in place of what."""

    kind: str
    """equal, substitute, delete or insert."""
    reference: str
    hypothesis: str


class EvaluatedSystem(msgspec.Struct, frozen=True):
    """A recognizer that is measured."""

    name: str
    """Name on the command line: `whisper-tiny-en@int8`, `http://host:8000/v1#model`."""
    model: str
    """Name of its model: of ours the card's, `whisper-tiny-en`."""
    revision: str = ""
    """Revision of the weights, or version of the package; empty where it is not known."""
    license: str = ""
    quantization: str = ""


class EvaluatedDataset(msgspec.Struct, frozen=True):
    """A list of clips with references."""

    name: str
    folder: str
    """Absolute path at the time of the run."""
    sha256: str
    """Digest of the list, and of the names and sizes of its audio files."""
    language: str
    clips: int
    """Number of clips that a whole run has."""


class RunSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings by which two runs of a system over a dataset differ."""

    live: bool = False
    """Whether audio was sent at its own speed, and the times of its words were measured."""
    jobs: int = 1
    """Number of requests in flight at a server."""
    hotwords: tuple[str, ...] = ()
    diarize: bool = False


class EvaluationResult(msgspec.Struct, frozen=True):
    """One clip of a run. Counts are None where the clip failed, and where it has no reference of that kind."""

    path: str
    """Relative to the dataset's folder."""
    audio_s: float
    reference: str | None = None
    hypothesis: str | None = None
    words: int | None = None
    """Number of words of the normalized reference."""
    word_errors: int | None = None
    characters: int | None = None
    character_errors: int | None = None
    seconds: float | None = None
    """Time from the request to the whole answer; None where the clip was not asked alone."""
    first_word_ms: float | None = None
    final_ms: float | None = None
    speaker_s: float | None = None
    """Time of the reference's speakers: the denominator of the diarization error rate."""
    speaker_error_s: float | None = None
    hotwords: int | None = None
    """Number of hotwords that the reference holds."""
    hotwords_found: int | None = None
    error: str | None = None
    """The reason why there is no hypothesis."""
    differences: tuple[TextDifference, ...] | None = None
    """Alignment of reference and hypothesis, of which the errors are counted."""


class EvaluationRun(msgspec.Struct, frozen=True):
    run_id: str
    system: EvaluatedSystem
    dataset: EvaluatedDataset
    settings: RunSettings
    cost_per_hour: float | None
    created: int
    finished: int | None
    """UTC seconds at which the last clip was done; None for a run that goes on, or was interrupted."""


class EvaluationSummary(msgspec.Struct, frozen=True):
    """Figures of one run. Rates are in percent; intervals are of 95 %, by bootstrap over clips."""

    system: str
    model: str
    revision: str
    license: str
    quantization: str
    dataset: str
    dataset_sha256: str
    language: str
    clips: int
    """Number of clips with a result, failed ones not counted."""
    failed: int
    audio_s: float
    """Length of the clips with a result."""
    wer: float | None
    """Word error rate of the corpus; None where no clip has a reference, or all failed."""
    wer_low: float | None
    wer_high: float | None
    cer: float | None
    rtfx: float | None
    """Seconds of audio per second of wall clock, over one uninterrupted pass. None for a run that was interrupted, and
    for a live run, whose speed is the audio's."""
    latency_p50_s: float | None
    """Time from the request to the whole answer of a clip."""
    latency_p95_s: float | None
    first_word_p50_ms: float | None
    first_word_p95_ms: float | None
    final_p95_ms: float | None
    der: float | None
    hotword_recall: float | None
    cost_per_audio_hour: float | None
    created: int
    """UTC seconds."""
    run_id: str
    cer_low: float | None = None
    cer_high: float | None = None
    live: bool = False
    finished: bool = True
    """Whether every clip of the dataset has a row; evidence for a decision should be."""
    dataset_clips: int = 0


class EvaluationStore:
    """Store in one SQLite file, used from any thread, and by several processes at once (WAL)."""

    def __init__(self, path: Path | str, *, create: bool = False) -> None:
        """Opens a file. `create`: for writing, made where it is missing; else it is read only.

        Raises SourceNotFound for a missing file, OptionError for a file that is no store, or one of another version.
        """
        self.path = Path(path)
        self._lock = threading.RLock()
        self._summaries: dict[str, tuple[tuple[Any, ...], EvaluationSummary]] = {}
        if not create and not self.path.is_file():
            raise SourceNotFound(f"there is no file of evaluations at {path}", todo="make it with: asr-serve eval run")
        try:
            self._db = self._open(create)
        except sqlite3.OperationalError as failure:  # locked, full, or a folder in which nothing may be written
            raise OptionError(
                f"{path} cannot be opened: {failure}", "a file that can be written, and room for it", param="store"
            ) from failure
        except sqlite3.Error as failure:
            raise OptionError(
                f"{path} is no file of evaluations: {failure}",
                "an SQLite file that `asr-serve eval run` wrote",
                "name another --store",
                param="store",
            ) from failure

    def begin_run(
        self,
        system: EvaluatedSystem,
        dataset: EvaluatedDataset,
        settings: RunSettings,
        cost_per_hour: float | None = None,
        *,
        resume: bool = True,
    ) -> EvaluationRun:
        """The run of this system, dataset and settings: with `resume` the newest one that is there, finished or not;
        else a new one."""
        with self._write() as db:
            system_id = self._id_of(db, "systems", msgspec.structs.asdict(system), ())
            dataset_id = self._id_of(db, "datasets", msgspec.structs.asdict(dataset), ("folder", "clips"))
            encoded = msgspec.json.encode(settings, order="sorted").decode()
            if resume:
                found = db.execute(
                    "SELECT id FROM runs WHERE system_id = ? AND dataset_id = ? AND settings = ?"
                    " ORDER BY created DESC, rowid DESC LIMIT 1",
                    (system_id, dataset_id, encoded),
                ).fetchone()
                if found:
                    if cost_per_hour is not None:
                        db.execute("UPDATE runs SET cost_per_hour = ? WHERE id = ?", (cost_per_hour, found[0]))
                    return self.run(found[0])
            run_id = uuid.uuid4().hex
            db.execute(
                "INSERT INTO runs (id, system_id, dataset_id, settings, cost_per_hour, created)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (run_id, system_id, dataset_id, encoded, cost_per_hour, int(time.time())),
            )
            return self.run(run_id)

    def add_result(self, run_id: str, result: EvaluationResult) -> None:
        """Commits one clip; a clip that is there is replaced."""
        fields = msgspec.structs.asdict(result)
        if result.differences is not None:
            fields["differences"] = msgspec.json.encode(result.differences).decode()
        names = ("run_id", *fields)
        with self._write() as db:
            db.execute(
                f"INSERT OR REPLACE INTO results ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
                (run_id, *fields.values()),
            )

    def set_seconds(self, run_id: str, path: str, seconds: float) -> None:
        """Adds the time that a clip took when it was asked alone."""
        with self._write() as db:
            db.execute("UPDATE results SET seconds = ? WHERE run_id = ? AND path = ?", (seconds, run_id, path))

    def add_pass(self, run_id: str, clips: int, audio_s: float, seconds: float) -> None:
        """Adds a continuous stretch of work, by wall clock."""
        with self._write() as db:
            db.execute("INSERT INTO passes VALUES (?, ?, ?, ?)", (run_id, clips, audio_s, seconds))

    def finish_run(self, run_id: str) -> None:
        with self._write() as db:
            db.execute("UPDATE runs SET finished = ? WHERE id = ?", (int(time.time()), run_id))

    def done_paths(self, run_id: str) -> set[str]:
        """Paths of the clips of a run that have a result."""
        return {row[0] for row in self._rows("SELECT path FROM results WHERE run_id = ? AND error IS NULL", run_id)}

    def run(self, run_id: str) -> EvaluationRun:
        """Raises OptionError for an unknown run."""
        for run in self._runs("WHERE r.id = ?", run_id):
            return run
        raise OptionError(f"no run {run_id} in {self.path}", "a run_id of `asr-serve eval list`", param="run_id")

    def runs(self) -> list[EvaluationRun]:
        """All runs, newest first."""
        return list(self._runs(""))

    def results(
        self, run_id: str, order: ClipOrder = "path", limit: int | None = None, offset: int = 0
    ) -> list[EvaluationResult]:
        """Clips of a run. `limit`: so many at most, from the place `offset` on."""
        names = EvaluationResult.__struct_fields__
        rows = self._rows(
            f"SELECT {', '.join(names)} FROM results WHERE run_id = ? ORDER BY {_CLIP_ORDERS[order]} LIMIT ? OFFSET ?",
            *(run_id, _limit(limit), offset),
        )
        return [_result(dict(zip(names, row, strict=True))) for row in rows]

    def result(self, run_id: str, path: str) -> EvaluationResult | None:
        """One clip of a run; None where it has none of that path."""
        names = EvaluationResult.__struct_fields__
        rows = self._rows(f"SELECT {', '.join(names)} FROM results WHERE run_id = ? AND path = ?", run_id, path)
        return _result(dict(zip(names, rows[0], strict=True))) if rows else None

    def summaries(
        self, model: str | None = None, dataset: str | None = None, limit: int | None = None, offset: int = 0
    ) -> list[EvaluationSummary]:
        """Figures of the runs that have a result, newest first. `model`, `dataset`: of that name only. `limit`: of so
        many at most, from the place `offset` on."""
        runs = self._runs(
            f"WHERE {_WITH_RESULTS} AND coalesce(s.model = ?, true) AND coalesce(d.name = ?, true)",
            *(model, dataset),
            limit=limit,
            offset=offset,
        )
        return [summary for run in runs if (summary := self._summary(run)) is not None]

    def summary(self, run_id: str) -> EvaluationSummary | None:
        """Figures of one run; None where it is unknown, or has no result."""
        return next((found for run in self._runs("WHERE r.id = ?", run_id) if (found := self._summary(run))), None)

    def count_summaries(self) -> int:
        """Number of runs that have a result."""
        return int(self._rows(f"SELECT count(*) FROM runs r WHERE {_WITH_RESULTS}")[0][0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _open(self, create: bool) -> sqlite3.Connection:
        if create:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as failure:
                raise OptionError(
                    f"cannot write {self.path}: {failure.strerror}", "a path that can be written", param="store"
                ) from failure
        mode = "rwc" if create else "ro"
        address = self.path.absolute().as_uri()
        if mode == "ro" and not self.path.with_name(self.path.name + "-wal").exists():
            mode = (
                "ro" if os.access(self.path.parent, os.W_OK) else "ro&immutable=1"
            )  # nothing may be written beside it
        db = sqlite3.connect(
            f"{address}?mode={mode}", uri=True, timeout=BUSY_MS / 1_000, check_same_thread=False, isolation_level=None
        )
        with ExitStack() as stack:
            stack.callback(db.close)
            self._check(db, create)
            stack.pop_all()
        return db

    def _check(self, db: sqlite3.Connection, create: bool) -> None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if create and not (application or version or tables):
            db.execute("PRAGMA journal_mode = WAL")
            with _transaction(db):
                (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                if not tables:  # another process may have been faster
                    for statement in _SCHEMA.split(";\n"):
                        db.execute(statement)
                    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise OptionError(
                f"{self.path} is an SQLite file of another program",
                "a file that `asr-serve eval run` wrote",
                "name another --store",
                param="store",
            )
        if version != SCHEMA_VERSION:
            raise OptionError(
                f"{self.path} has version {version}",
                f"this program reads version {SCHEMA_VERSION}",
                "use the asr-serve that wrote it, or name another --store",
                param="store",
            )
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = NORMAL")  # outlives the process, not always the power

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failing(), _transaction(self._db):
            yield self._db

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as failure:
            raise OptionError(
                f"{self.path} cannot be used: {failure}", "a file that can be written, and room for it", param="store"
            ) from failure

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, self._failing():
            return self._db.execute(query, values).fetchall()

    def _id_of(self, db: sqlite3.Connection, table: str, fields: dict[str, Any], changing: tuple[str, ...]) -> int:
        """Id of a system or dataset, added if it is new. `changing`: fields that do not tell it from others."""
        keys = [name for name in fields if name not in changing]
        where = " AND ".join(f"{name} = ?" for name in keys)
        values = [fields[name] for name in keys]
        names = ", ".join(fields)
        db.execute(
            f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({', '.join('?' * len(fields))})", tuple(fields.values())
        )
        if changing:
            what = ", ".join(f"{name} = ?" for name in changing)
            db.execute(f"UPDATE {table} SET {what} WHERE {where}", [*(fields[name] for name in changing), *values])
        return int(db.execute(f"SELECT id FROM {table} WHERE {where}", values).fetchone()[0])

    def _runs(self, where: str, *values: object, limit: int | None = None, offset: int = 0) -> Iterator[EvaluationRun]:
        systems, datasets = EvaluatedSystem.__struct_fields__, EvaluatedDataset.__struct_fields__
        columns = [*(f"s.{name}" for name in systems), *(f"d.{name}" for name in datasets)]
        rows = self._rows(
            f"SELECT r.id, r.settings, r.cost_per_hour, r.created, r.finished, {', '.join(columns)} FROM runs r"
            f" JOIN systems s ON s.id = r.system_id JOIN datasets d ON d.id = r.dataset_id {where}"
            " ORDER BY r.created DESC, r.rowid DESC LIMIT ? OFFSET ?",
            *(*values, _limit(limit), offset),
        )
        for run_id, settings, cost, created, finished, *fields in rows:
            yield EvaluationRun(
                run_id=run_id,
                system=EvaluatedSystem(*fields[: len(systems)]),
                dataset=EvaluatedDataset(*fields[len(systems) :]),
                settings=msgspec.json.decode(settings, type=RunSettings),
                cost_per_hour=cost,
                created=created,
                finished=finished,
            )

    def _summary(self, run: EvaluationRun) -> EvaluationSummary | None:
        """Figures of a run, computed again when its rows have changed; None without a row."""
        state = self._rows(
            "SELECT count(*), total(word_errors), total(character_errors), total(audio_s), total(seconds), count(error)"
            " FROM results WHERE run_id = ?",
            run.run_id,
        )[0]
        if not state[0]:
            return None
        passes = self._rows("SELECT clips, audio_s, seconds FROM passes WHERE run_id = ?", run.run_id)
        key = (run, *state, len(passes))
        with self._lock:
            if (cached := self._summaries.get(run.run_id)) is not None and cached[0] == key:
                return cached[1]
        found = summarize(run, self.results(run.run_id), passes)
        with self._lock:
            while len(self._summaries) >= CACHED_SUMMARIES:
                self._summaries.pop(next(iter(self._summaries)))
            self._summaries[run.run_id] = (key, found)
        return found


def summarize(run: EvaluationRun, results: list[EvaluationResult], passes: list[tuple[Any, ...]]) -> EvaluationSummary:
    """Figures of a run from its clips. `passes`: clips, seconds of audio and seconds of wall clock of each."""
    good = [row for row in results if row.error is None]
    failed = len(results) - len(good)
    words = [(row.word_errors, row.words) for row in good if row.words is not None and row.word_errors is not None]
    letters = [
        (row.character_errors, row.characters)
        for row in good
        if row.characters is not None and row.character_errors is not None
    ]
    speakers = [
        (row.speaker_error_s, row.speaker_s)
        for row in good
        if row.speaker_s is not None and row.speaker_error_s is not None
    ]
    hot = [
        (row.hotwords_found, row.hotwords)
        for row in good
        if row.hotwords is not None and row.hotwords_found is not None
    ]
    whole = len(passes) == 1 and passes[0][0] == run.dataset.clips and not run.settings.live
    rtfx = passes[0][1] / passes[0][2] if whole and passes[0][2] > 0 else None
    wer_bounds, cer_bounds = _interval(words), _interval(letters)
    seconds = [row.seconds for row in good if row.seconds is not None]
    first = [row.first_word_ms for row in good if row.first_word_ms is not None]
    final = [row.final_ms for row in good if row.final_ms is not None]
    return EvaluationSummary(
        system=run.system.name,
        model=run.system.model,
        revision=run.system.revision,
        license=run.system.license,
        quantization=run.system.quantization,
        dataset=run.dataset.name,
        dataset_sha256=run.dataset.sha256,
        language=run.dataset.language,
        clips=len(good),
        failed=failed,
        audio_s=sum(row.audio_s for row in good),
        wer=_percent(words),
        wer_low=wer_bounds[0],
        wer_high=wer_bounds[1],
        cer=_percent(letters),
        rtfx=rtfx,
        latency_p50_s=percentile(seconds, 50),
        latency_p95_s=percentile(seconds, 95),
        first_word_p50_ms=percentile(first, 50),
        first_word_p95_ms=percentile(first, 95),
        final_p95_ms=percentile(final, 95),
        der=_percent(speakers),
        hotword_recall=_percent(hot),
        cost_per_audio_hour=run.cost_per_hour / rtfx if run.cost_per_hour is not None and rtfx else None,
        created=run.created,
        run_id=run.run_id,
        cer_low=cer_bounds[0],
        cer_high=cer_bounds[1],
        live=run.settings.live,
        finished=run.finished is not None,
        dataset_clips=run.dataset.clips,
    )


def _result(fields: dict[str, Any]) -> EvaluationResult:
    if fields["differences"] is not None:
        fields["differences"] = msgspec.json.decode(fields["differences"], type=tuple[TextDifference, ...])
    return EvaluationResult(**fields)


def _limit(limit: int | None) -> int:
    return -1 if limit is None else limit  # SQLite's word for all


def percentile(values: list[float], percent: float) -> float | None:
    """Nearest rank: the smallest value that `percent` of all do not exceed. None for no value."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def _percent(pairs: list[Any]) -> float | None:
    total = sum(length for _, length in pairs)
    return 100 * sum(part for part, _ in pairs) / total if total else None


def _interval(pairs: list[Any]) -> tuple[float, float] | tuple[None, None]:
    return error_interval([errors for errors, _ in pairs], [length for _, length in pairs]) or (None, None)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """One transaction; one inside another is part of it."""
    if db.in_transaction:
        yield
        return
    with db:  # commits, or rolls back
        db.execute("BEGIN IMMEDIATE")
        yield
