"""Store of files and batches: one folder with an SQLite file and the files' bytes.

    queue.sqlite   files, batches, the lines that have no answer yet, answers, notices that were not delivered
    files/ID       bytes of a file
    files/*.part   bytes that are being written: a file, or the folder of an upload

What a client was told outlives a crash of the machine: such a change is synced before it returns. Answers of lines are
not synced one by one: after a crash of the machine the last ones are computed again. A killed process loses neither.

A file's row is written after its bytes, and removed before them. Bytes without a row are deleted at the next start. The
answer of a line is a change of its row from none to one, so a line that is computed twice is answered once; the files
of a batch's answers are written from the rows, and the rows are deleted in the transaction that ends the batch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from asr_serve.config import BatchConfig, batch_dir
from asr_serve.errors import (
    AtCapacity,
    BatchEnded,
    FileInUse,
    OptionError,
    QuotaExceeded,
    StoreUnavailable,
    UnknownBatch,
    UnknownFile,
)
from asr_serve.protocols.openai.batches import (
    ENDED_STATUSES,
    OUTPUT_PURPOSE,
    Batch,
    BatchErrors,
    BatchLineError,
    BatchNotice,
    BatchNoticeData,
    BatchRequest,
    BatchRequestCounts,
    BatchStatus,
    FileObject,
    ListQuery,
)

APPLICATION_ID = 0x41535242
"""`ASRB`, in the header of the file."""
SCHEMA_VERSION = 1
BUSY_MS = 10_000
MAX_ATTEMPTS = 10
"""Times that a line is begun: a server that dies ten times in a row over a line died of it."""
SUSPECT_ATTEMPTS = 3
"""Times after which a line is in work alone: else those beside it would be given up with the one that kills."""
BATCH_RETRY_MS = 30_000
STORE_RETRY_MS = 5_000
EXPIRED_AT_ONCE = 1_000
ROW_BYTES = 128
"""Bytes that the row of a line counts as beside its custom_id, its indexes included."""
MAX_ENDED = 10_000
"""Ended batches of a key that are remembered; with more, the oldest is forgotten before its time."""
QUEUE, PART = "queue.sqlite", ".part"
_STORED_NAME = re.compile(r"file-[0-9a-f]{32}(\.part)?", re.ASCII)

_SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, content_type TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL,
    expires INTEGER NOT NULL
) STRICT;
CREATE INDEX files_of ON files (owner, number);
CREATE INDEX files_by_age ON files (expires);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, caller TEXT NOT NULL,
    request_key TEXT, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, window TEXT NOT NULL, metadata TEXT,
    output_s INTEGER,
    created INTEGER NOT NULL, expires INTEGER NOT NULL, status TEXT NOT NULL, ending TEXT, ended INTEGER,
    times TEXT NOT NULL, errors TEXT, output_file TEXT, error_file TEXT, total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE UNIQUE INDEX batches_by_key ON batches (owner, request_key) WHERE request_key IS NOT NULL;
CREATE INDEX batches_of ON batches (owner, number);
CREATE INDEX batches_open ON batches (number) WHERE ended IS NULL;
CREATE INDEX batches_ended ON batches (ended) WHERE ended IS NOT NULL;
CREATE INDEX batches_input ON batches (input_file) WHERE ended IS NULL;
CREATE TABLE lines (
    id INTEGER PRIMARY KEY, batch INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE, number INTEGER NOT NULL,
    custom_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
    outcome TEXT, answer BLOB, UNIQUE (batch, number)
) STRICT;
CREATE INDEX lines_open ON lines (batch, number) WHERE outcome IS NULL;
CREATE TABLE usage (owner TEXT PRIMARY KEY, files INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
CREATE TRIGGER file_added AFTER INSERT ON files BEGIN
    INSERT INTO usage VALUES (new.owner, 1, new.bytes)
        ON CONFLICT (owner) DO UPDATE SET files = files + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER file_removed AFTER DELETE ON files BEGIN
    UPDATE usage SET files = files - 1, bytes = bytes - old.bytes WHERE owner = old.owner; END;
CREATE TABLE notices (
    id TEXT PRIMARY KEY, event TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, due INTEGER NOT NULL
) STRICT;
CREATE INDEX notices_by_due ON notices (due);
"""

_ROW_BYTES = f"{ROW_BYTES} + length(CAST(custom_id AS BLOB))"
_LINE_BYTES = f"{_ROW_BYTES} + coalesce(length(answer), 0)"
_COLUMNS = (
    "number, id, owner, caller, endpoint, input_file, window, metadata, output_s, created, expires, status, ending,"
    " times, errors, output_file, error_file, total, completed, failed"
)


class StoredFile(NamedTuple):
    """File of a client."""

    object: FileObject
    content_type: str
    path: Path


class NewFile(NamedTuple):
    """File that was written and has no row yet."""

    id: str
    part: Path
    """Path of its bytes, which are moved to their place."""
    name: str
    purpose: str
    content_type: str
    bytes: int
    keep_s: float


class OpenBatch(NamedTuple):
    """Batch that has not ended, as the queue needs it."""

    number: int
    id: str
    owner: str
    caller: str
    """Identity by which a route keeps its model: see server/caller_models.py."""
    endpoint: str
    input_file: str
    status: BatchStatus
    expires: int
    ending: BatchStatus | None
    """Status that it will have at its end, once that is known."""


class OwnerUsage(NamedTuple):
    """Use of the store by one owner."""

    files: int
    bytes: int
    open_batches: int
    """Batches that have not ended."""


class BatchLine(NamedTuple):
    """Line without an answer."""

    number: int
    """Number, from 1."""
    custom_id: str
    start: int
    """Position in the input file, in bytes."""
    length: int
    attempts: int
    """Times that it was begun before."""


class AnsweredLine(NamedTuple):
    number: int
    outcome: str | None
    """completed, failed; None: it has no answer."""
    custom_id: str
    answer: bytes | None


class DueNotice(NamedTuple):
    """Notice that is to be delivered now."""

    id: str
    event: bytes
    attempts: int


class _BatchRow(NamedTuple):
    number: int
    id: str
    owner: str
    caller: str
    endpoint: Any
    input_file: str
    window: str
    metadata: str | None
    output_s: int | None
    created: int
    expires: int
    status: Any
    ending: Any
    times: str
    errors: str | None
    output_file: str | None
    error_file: str | None
    total: int
    completed: int
    failed: int

    def describe(self) -> Batch:
        return Batch(
            id=self.id,
            endpoint=self.endpoint,
            errors=None if self.errors is None else msgspec.json.decode(self.errors, type=BatchErrors),
            input_file_id=self.input_file,
            completion_window=self.window,
            status=self.status,
            output_file_id=self.output_file,
            error_file_id=self.error_file,
            created_at=self.created,
            expires_at=self.expires,
            request_counts=BatchRequestCounts(self.total, self.completed, self.failed),
            metadata=None if self.metadata is None else msgspec.json.decode(self.metadata),
            **msgspec.json.decode(self.times),
        )


class BatchStore:
    """Store of one folder, which it locks. Its methods block, and may be called from any thread."""

    def __init__(self, config: BatchConfig) -> None:
        """Opens the folder, creating it; deletes bytes that have no row. Raises StoreUnavailable where another server
        has it, or it cannot be used."""
        self._config = config
        self.folder = batch_dir(config.folder)
        self._files = self.folder / "files"
        self._lock = threading.Lock()
        self._reserved: dict[object, tuple[str, int]] = {}
        """Uploads in progress: their owner, and bytes that they may have."""
        self._reserved_lock = threading.Lock()
        """Held for a moment, so that `release` waits for no transaction."""
        with self._failing(), contextlib.ExitStack() as undo:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files.mkdir(exist_ok=True, mode=0o700)
            self._lock_file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
            undo.callback(os.close, self._lock_file)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreUnavailable(
                    f"another server has the folder of batches, {self.folder}",
                    "one server at a time; this one goes on when that one ends, or with a batch.folder of its own",
                    STORE_RETRY_MS,
                ) from None
            self._db = self._open()
            undo.callback(self._db.close)
            self._sweep()
            self._recount()
            undo.pop_all()

    def close(self) -> None:
        with self._lock:
            self._db.close()
            os.close(self._lock_file)

    def _open(self) -> sqlite3.Connection:
        path = self.folder / QUEUE
        db = sqlite3.connect(path, timeout=BUSY_MS / 1_000, check_same_thread=False, isolation_level=None)
        with contextlib.ExitStack() as undo:
            undo.callback(db.close)
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if not (application or version or tables):
                db.execute("PRAGMA journal_mode = WAL")
                script = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {script} COMMIT;")
                application, version = APPLICATION_ID, SCHEMA_VERSION
            if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
                raise OSError(f"{path} is no queue of batches of this version of asr-serve")
            db.execute("PRAGMA foreign_keys = ON")
            undo.pop_all()
        return db

    def _sweep(self) -> None:
        """Deletes bytes without a row, which a killed server left."""
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for entry in os.scandir(self._files):
            # By their names, for a folder may hold other things.
            if _STORED_NAME.fullmatch(entry.name) and entry.name not in known:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)

    def _recount(self) -> None:
        """Counts anew what each owner uses: an earlier version counted the rows of lines not at all. Those rows are
        also counted by themselves, in a table that lasts as long as the connection and is in its transactions."""
        with self._db as db:
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("CREATE TEMP TABLE row_usage (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) STRICT")
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                f"INSERT INTO row_usage SELECT owner, sum({_ROW_BYTES}) FROM lines"
                " JOIN batches ON batches.number = lines.batch GROUP BY owner"
            )
            db.execute("DELETE FROM usage")
            db.execute(
                "INSERT INTO usage SELECT owner, sum(files), sum(bytes) FROM ("
                " SELECT owner, 1 AS files, bytes FROM files UNION ALL"
                f" SELECT owner, 0, {_LINE_BYTES} FROM lines JOIN batches ON batches.number = lines.batch"
                ") GROUP BY owner"
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as failure:
            reason = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
            raise StoreUnavailable(
                f"the folder of batches, {self.folder}, cannot be used: {reason}",
                "a folder on a local disk that this server may write to, and room; see batch.folder",
                STORE_RETRY_MS,
            ) from failure

    @contextmanager
    def _write(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction. `synced`: whether it outlives a crash of the machine, when it returns."""
        with self._lock, self._failing():
            self._db.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            with self._db:  # commits, or rolls back
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, self._failing():
            return self._db.execute(query, values).fetchall()

    # --- files

    def part_path(self, file_id: str) -> Path:
        """Path at which the bytes of a new file are written. The caller deletes them, unless `add_file` moves them."""
        return self._files / f"{file_id}{PART}"

    def path(self, file_id: str) -> Path:
        return self._files / file_id

    def usage(self, owners: Sequence[str]) -> list[OwnerUsage]:
        """Use of the store by each of these owners, without uploads in progress."""
        stored = {owner: (files, size) for owner, files, size in self._rows("SELECT owner, files, bytes FROM usage")}
        open_batches = dict(self._rows("SELECT owner, count(*) FROM batches WHERE ended IS NULL GROUP BY owner"))
        return [OwnerUsage(*stored.get(owner, (0, 0)), open_batches.get(owner, 0)) for owner in owners]

    def reserve(self, ticket: object, owner: str, size_bytes: int) -> None:
        """Reserves room for an upload, until `release` of that ticket. Raises QuotaExceeded."""
        with self._lock, self._failing():
            self._check_quota(owner, 1, size_bytes, self._reservations())
            with self._reserved_lock:
                self._reserved[ticket] = (owner, size_bytes)

    def release(self, ticket: object) -> None:
        """Gives up what was reserved, if it was. Does not block, and may be called on the event loop's thread."""
        with self._reserved_lock:
            self._reserved.pop(ticket, None)

    def _reservations(self, but: object = None) -> list[tuple[str, int]]:
        with self._reserved_lock:
            return [reserved for ticket, reserved in self._reserved.items() if ticket is not but]

    def add_file(self, owner: str, file: NewFile, reserved: object) -> FileObject:
        """Moves the bytes of a file to their place and adds its row, synced, in the room that was `reserved`. Raises
        QuotaExceeded."""
        with self._placed([file]), self._write() as db:
            self._check_quota(owner, 1, file.bytes, self._reservations(but=reserved))
            return self._insert(db, owner, file)

    def file(self, owner: str, file_id: str) -> StoredFile:
        """Raises UnknownFile."""
        rows = self._rows(
            "SELECT bytes, created, expires, name, purpose, content_type FROM files"
            " WHERE id = ? AND owner = ? AND expires > ?",
            file_id,
            owner,
            int(time.time()),
        )
        for size, created, expires, name, purpose, content_type in rows:
            found = FileObject(
                id=file_id, bytes=size, created_at=created, expires_at=expires, filename=name, purpose=purpose
            )
            return StoredFile(found, content_type, self.path(file_id))
        raise UnknownFile(
            f"there is no file {file_id[:80]!r}",
            "files of this key, which are deleted when they are too old",
            "GET /v1/files lists them",
        )

    def list_files(self, owner: str, query: ListQuery) -> list[FileObject]:
        """Page of files, and one more if there are more. Raises UnknownFile for a cursor that is none."""
        way, order = (">", "ASC") if query.ascending else ("<", "DESC")
        where, values = "owner = ? AND expires > ?", [owner, int(time.time())]
        if query.purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, query.purpose]
        if query.after is not None:
            self.file(owner, query.after)
            where, values = f"{where} AND number {way} (SELECT number FROM files WHERE id = ?)", [*values, query.after]
        rows = self._rows(
            f"SELECT id, bytes, created, expires, name, purpose FROM files WHERE {where}"
            f" ORDER BY number {order} LIMIT ?",
            *values,
            query.limit + 1,
        )
        return [
            FileObject(id=id, bytes=size, created_at=created, expires_at=expires, filename=name, purpose=purpose)
            for id, size, created, expires, name, purpose in rows
        ]

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises UnknownFile; FileInUse for the input of a batch that has not ended."""
        self.file(owner, file_id)
        with self._write() as db:
            used = db.execute(
                "SELECT id FROM batches WHERE input_file = ? AND ended IS NULL LIMIT 1", (file_id,)
            ).fetchone()
            if used:
                raise FileInUse(
                    f"the batch {used[0]} reads {file_id}",
                    "files that no batch reads",
                    "cancel it, or wait for its end",
                )
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        with self._failing():
            self.path(file_id).unlink(missing_ok=True)

    def remove_expired(self, now: float) -> int | None:
        """Deletes EXPIRED_AT_ONCE of the files that are too old, for other calls wait meanwhile, and forgets batches
        that ended too long ago. Returns the Unix time at which the next file is too old; None: there is none."""
        unread = "FROM files f WHERE NOT EXISTS (SELECT 1 FROM batches b WHERE b.input_file = f.id AND b.ended IS NULL)"
        oldest_ended = int(now - self._config.keep_s)
        if self._rows("SELECT 1 FROM batches WHERE ended <= ? LIMIT 1", oldest_ended):
            with self._write() as db:
                db.execute("DELETE FROM batches WHERE ended <= ?", (oldest_ended,))
        next_expiry = self._rows(f"SELECT f.expires {unread} ORDER BY f.expires LIMIT 1")
        if next_expiry and next_expiry[0][0] <= now:
            with self._write() as db:
                expired = db.execute(
                    f"DELETE FROM files WHERE id IN (SELECT f.id {unread} AND f.expires <= ? LIMIT ?) RETURNING id",
                    (int(now), EXPIRED_AT_ONCE),
                ).fetchall()
            with self._failing():
                for (file_id,) in expired:
                    self.path(file_id).unlink(missing_ok=True)
            next_expiry = self._rows(f"SELECT f.expires {unread} ORDER BY f.expires LIMIT 1")
        return next_expiry[0][0] if next_expiry else None

    @contextmanager
    def _placed(self, files: Sequence[NewFile]) -> Iterator[None]:
        """Syncs the bytes of files and moves them to their place; deletes them there if their rows are not written."""
        with contextlib.ExitStack() as undo:
            with self._failing():
                for file in files:
                    sync_file(file.part)
                    undo.callback(_unlink, self.path(file.id))
                    file.part.replace(self.path(file.id))
                if files:
                    sync_file(self._files)
            yield
            undo.pop_all()

    def _insert(self, db: sqlite3.Connection, owner: str, file: NewFile) -> FileObject:
        now = int(time.time())
        expires = now + max(1, int(file.keep_s))
        db.execute(
            "INSERT INTO files (id, owner, purpose, name, content_type, bytes, created, expires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.name, file.content_type, file.bytes, now, expires),
        )
        return FileObject(
            id=file.id, bytes=file.bytes, created_at=now, expires_at=expires, filename=file.name, purpose=file.purpose
        )

    def _check_quota(
        self, owner: str, files: int, size_bytes: int, reserved: Iterable[tuple[str, int]] = (), *, rows: bool = True
    ) -> None:
        """Checks that there is room for so many more beside what is `reserved`, with the lock held. `rows`: whether
        the rows of lines count. Raises QuotaExceeded."""
        usage = {key: (count, size) for key, count, size in self._db.execute("SELECT owner, files, bytes FROM usage")}
        if not rows:
            for key, row_bytes in self._db.execute("SELECT owner, bytes FROM row_usage"):
                count, size = usage[key]
                usage[key] = count, size - row_bytes
        own_files, own_bytes = usage.get(owner, (0, 0))
        total_bytes = sum(size for _, size in usage.values())
        for who, upload_bytes in reserved:
            total_bytes += upload_bytes
            own_bytes += upload_bytes if who == owner else 0
            own_files += who == owner
        config, todo = self._config, "delete files that are not needed any more, or have the limit raised"
        for came, after, limit, setting in (
            (f"{own_files} files of this key", own_files + files, config.files_per_key, "files_per_key"),
            (f"{own_bytes} bytes of this key", own_bytes + size_bytes, config.bytes_per_key, "bytes_per_key"),
            (f"{total_bytes} bytes of all keys", total_bytes + size_bytes, config.max_bytes, "max_bytes"),
        ):
            if after > limit:
                more = f"{size_bytes} bytes" if "bytes" in setting else "another file"
                raise QuotaExceeded(f"{more} beside {came}", f"up to {limit} (batch.{setting})", todo)

    # --- batches

    def create_batch(self, owner: str, caller: str, request: BatchRequest, request_key: str | None = None) -> Batch:
        """Adds a batch, synced. `request_key`: a request that comes again with it is answered with its batch. Raises
        UnknownFile, OptionError for a file that is no input or a key of another request, AtCapacity."""
        if request_key is not None and (found := self._repeated(owner, request_key, request)) is not None:
            return found
        file = self.file(owner, request.input_file_id).object
        if file.purpose != "batch":
            raise OptionError(
                f"input_file_id={file.id}, whose purpose is {file.purpose}",
                "a file with the purpose batch",
                param="input_file_id",
            )
        now = int(time.time())
        with self._write() as db:
            (unfinished,) = db.execute(
                "SELECT count(*) FROM batches WHERE owner = ? AND ended IS NULL", (owner,)
            ).fetchone()
            if unfinished >= self._config.batches_per_key:
                raise AtCapacity(
                    f"{unfinished} batches of this key have not ended",
                    f"up to {self._config.batches_per_key} (batch.batches_per_key)",
                    BATCH_RETRY_MS,
                )
            metadata = None if request.metadata is None else msgspec.json.encode(request.metadata).decode()
            batch_id = f"batch_{secrets.token_hex(16)}"
            db.execute(
                "INSERT INTO batches (id, owner, caller, request_key, endpoint, input_file, window, metadata, output_s,"
                " created, expires, status, times) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'validating', '{}')",
                (
                    *(batch_id, owner, caller, request_key, request.endpoint, file.id),
                    *(request.completion_window, metadata),
                    *(request.output_expires_after_s, now, now + request.window_s),
                ),
            )
            return self._batch(db, "id = ?", batch_id).describe()

    def _repeated(self, owner: str, request_key: str, request: BatchRequest) -> Batch | None:
        rows = self._rows(f"SELECT {_COLUMNS} FROM batches WHERE owner = ? AND request_key = ?", owner, request_key)
        for row in rows:
            found = _BatchRow(*row).describe()
            asked = request.input_file_id, request.endpoint, request.completion_window, request.metadata
            if (found.input_file_id, found.endpoint, found.completion_window, found.metadata) != asked:
                raise OptionError(
                    f"the Idempotency-Key of {found.id} came with another request",
                    "a key for each request",
                    param="Idempotency-Key",
                )
            return found
        return None

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Raises UnknownBatch."""
        rows = self._rows(f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        for row in rows:
            return _BatchRow(*row).describe()
        raise _unknown_batch(batch_id)

    def list_batches(self, owner: str, query: ListQuery) -> list[Batch]:
        """Page of batches, and one more if there are more. Raises UnknownBatch for a cursor that is none."""
        where, values = "owner = ?", [owner]
        if query.after is not None:
            self.batch(owner, query.after)
            where, values = f"{where} AND number < (SELECT number FROM batches WHERE id = ?)", [owner, query.after]
        rows = self._rows(
            f"SELECT {_COLUMNS} FROM batches WHERE {where} ORDER BY number DESC LIMIT ?", *values, query.limit + 1
        )
        return [_BatchRow(*row).describe() for row in rows]

    def cancel_batch(self, owner: str, batch_id: str) -> Batch:
        """Marks a batch as being cancelled, synced; again, it stays so. Raises UnknownBatch, BatchEnded."""
        with self._write() as db:
            row = self._batch(db, "id = ? AND owner = ?", batch_id, owner)
            if row.status in ENDED_STATUSES:
                raise BatchEnded(f"the batch {row.id} is {row.status}", "batches that have not ended")
            if row.ending is None:  # else its answers are being written, or it is being cancelled already
                self._set_status(db, row, "cancelling", ending="cancelled")
            return self._batch(db, "number = ?", row.number).describe()

    def open_batches(self) -> list[OpenBatch]:
        """Batches that have not ended, the oldest first."""
        rows = self._rows(
            "SELECT number, id, owner, caller, endpoint, input_file, status, expires, ending FROM batches"
            " WHERE ended IS NULL ORDER BY number"
        )
        return [OpenBatch(*row) for row in rows]

    def begin_batch(self, number: int, lines: list[tuple[str, int, int]]) -> None:
        """Adds the lines of a batch, each with its custom_id, position and length, and starts it. Raises QuotaExceeded
        where its owner has no room for them."""
        with self._write(synced=False) as db:
            row = self._batch(db, "number = ?", number)
            if row.status != "validating":  # cancelled meanwhile
                return
            size_bytes = sum(ROW_BYTES + len(custom_id.encode()) for custom_id, _, _ in lines)
            self._check_quota(row.owner, 0, size_bytes, self._reservations())
            self._count_lines(db, row.owner, size_bytes, size_bytes)
            db.executemany(
                "INSERT INTO lines (batch, number, custom_id, start, length) VALUES (?, ?, ?, ?, ?)",
                ((number, line, *fields) for line, fields in enumerate(lines, 1)),
            )
            db.execute("UPDATE batches SET total = ? WHERE number = ?", (len(lines), number))
            self._set_status(db, row, "in_progress")

    def fail_batch(self, number: int, errors: list[BatchLineError]) -> None:
        """Ends a batch whose input is no good."""
        with self._write() as db:
            row = self._batch(db, "number = ?", number)
            encoded = msgspec.json.encode(BatchErrors(errors)).decode()
            db.execute("UPDATE batches SET errors = ? WHERE number = ?", (encoded, number))
            self._set_status(db, row, "failed")
            self._end(db, row, "failed")

    def begin_ending(self, number: int, ending: BatchStatus) -> None:
        """Notes that no line of a batch is begun any more, and how it will end."""
        with self._write(synced=False) as db:
            row = self._batch(db, "number = ?", number)
            if row.ending is None:
                self._set_status(db, row, "finalizing", ending=ending)

    def finish_batch(self, number: int, output: NewFile | None, errors: NewFile | None) -> BatchStatus:
        """Ends a batch: its files and its status appear together, and its lines are forgotten. Returns the status."""
        files = [file for file in (output, errors) if file is not None]
        with self._placed(files), self._write() as db:
            row = self._batch(db, "number = ?", number)
            assert row.ending is not None, "begin_ending was called"
            # Lines have been counted as bytes of their owner since they came, with their answers.
            line_bytes, row_bytes = self._line_bytes(db, number)
            self._count_lines(db, row.owner, -line_bytes, -row_bytes)
            for file in files:
                self._insert(db, row.owner, file._replace(keep_s=row.output_s or self._config.keep_s))
            db.execute("DELETE FROM lines WHERE batch = ?", (number,))
            db.execute(
                "UPDATE batches SET output_file = ?, error_file = ?, failed = total - completed WHERE number = ?",
                (output.id if output else None, errors.id if errors else None, number),
            )
            ending: BatchStatus = row.ending
            self._set_status(db, row, ending)
            self._end(db, row, ending)
            return ending

    def _batch(self, db: sqlite3.Connection, where: str, *values: object) -> _BatchRow:
        for row in db.execute(f"SELECT {_COLUMNS} FROM batches WHERE {where}", values):
            return _BatchRow(*row)
        raise _unknown_batch(str(values[0]))

    def _set_status(
        self, db: sqlite3.Connection, row: _BatchRow, status: BatchStatus, ending: BatchStatus | None = None
    ) -> None:
        times = {**msgspec.json.decode(row.times), f"{status}_at": int(time.time())}
        db.execute(
            "UPDATE batches SET status = ?, ending = coalesce(?, ending), times = ? WHERE number = ?",
            (status, ending, msgspec.json.encode(times).decode(), row.number),
        )

    def _end(self, db: sqlite3.Connection, row: _BatchRow, status: BatchStatus) -> None:
        """Marks a batch as ended, and adds the notice of that."""
        now = int(time.time())
        db.execute("UPDATE batches SET ended = ? WHERE number = ?", (now, row.number))
        db.execute(
            "DELETE FROM batches WHERE owner = ? AND ended IS NOT NULL AND number <="
            " (SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (row.owner, row.owner, MAX_ENDED + self._config.batches_per_key),
        )
        if self._config.webhook is not None:
            notice = BatchNotice(f"evt_{secrets.token_hex(16)}", now, f"batch.{status}", BatchNoticeData(row.id))
            db.execute(
                "INSERT INTO notices (id, event, due) VALUES (?, ?, ?)",
                (notice.id, msgspec.json.encode(notice).decode(), now),
            )

    # --- lines

    def open_lines(self, batch: int, after: int, count: int) -> list[BatchLine]:
        """The next lines of a batch without an answer, behind the line `after`."""
        rows = self._rows(
            "SELECT number, custom_id, start, length, attempts FROM lines"
            " WHERE batch = ? AND outcome IS NULL AND number > ? ORDER BY number LIMIT ?",
            batch,
            after,
            count,
        )
        return [BatchLine(*row) for row in rows]

    def begin_line(self, batch: int, line: int) -> None:
        """Counts that a line is begun."""
        with self._write(synced=False) as db:
            db.execute("UPDATE lines SET attempts = attempts + 1 WHERE batch = ? AND number = ?", (batch, line))

    def release_line(self, batch: int, line: int) -> None:
        """Takes back that a line was begun: the server lives, and the line has no answer yet."""
        with self._write(synced=False) as db:
            db.execute(
                "UPDATE lines SET attempts = max(0, attempts - 1) WHERE batch = ? AND number = ? AND outcome IS NULL",
                (batch, line),
            )

    def answer_line(
        self, batch: OpenBatch, line: int, outcome: str, answer: bytes, file: NewFile | None = None
    ) -> bool:
        """Sets the answer of a line, and adds the file with its audio. False: it has an answer already. Raises
        QuotaExceeded where neither has room beside files and answers."""
        with self._placed([] if file is None else [file]), self._write(synced=False) as db:
            # An error is short, and must have room. Neither what uploads in progress reserve nor the rows of lines, of
            # which an earlier version accepted more, are a reason to lose an answer.
            if outcome == "completed":
                size_bytes = len(answer) + (file.bytes if file else 0)
                self._check_quota(batch.owner, int(file is not None), size_bytes, rows=False)
            changed = db.execute(
                "UPDATE lines SET outcome = ?, answer = ? WHERE batch = ? AND number = ? AND outcome IS NULL",
                (outcome, answer, batch.number, line),
            ).rowcount
            if changed:
                db.execute(f"UPDATE batches SET {outcome} = {outcome} + 1 WHERE number = ?", (batch.number,))
                self._count_lines(db, batch.owner, len(answer))
                if file is not None:
                    self._insert(db, batch.owner, file)
        if not changed and file is not None:
            self.path(file.id).unlink(missing_ok=True)
        return bool(changed)

    def answers(self, batch: int, after: int, count: int) -> list[AnsweredLine]:
        """Lines of a batch behind the line `after`, with their answers."""
        rows = self._rows(
            "SELECT number, outcome, custom_id, answer FROM lines WHERE batch = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            batch,
            after,
            count,
        )
        return [AnsweredLine(*row) for row in rows]

    def count_open_lines(self) -> int:
        """Number of lines without an answer."""
        return int(self._rows("SELECT count(*) FROM lines WHERE outcome IS NULL")[0][0])

    def stored_bytes(self) -> int:
        """Bytes of all files, lines and answers."""
        return int(self._rows("SELECT coalesce(sum(bytes), 0) FROM usage")[0][0])

    def _line_bytes(self, db: sqlite3.Connection, batch: int) -> tuple[int, int]:
        """Bytes of the lines of a batch with their answers, and of their rows alone."""
        query = f"SELECT coalesce(sum({_LINE_BYTES}), 0), coalesce(sum({_ROW_BYTES}), 0) FROM lines WHERE batch = ?"
        line_bytes, row_bytes = db.execute(query, (batch,)).fetchone()
        return line_bytes, row_bytes

    def _count_lines(self, db: sqlite3.Connection, owner: str, size_bytes: int, row_bytes: int = 0) -> None:
        """Counts bytes of lines as their owner's, `row_bytes` of which are those of rows."""
        add = "ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes"
        db.execute(f"INSERT INTO usage VALUES (?, 0, ?) {add}", (owner, size_bytes))
        if row_bytes:
            db.execute(f"INSERT INTO row_usage VALUES (?, ?) {add}", (owner, row_bytes))

    # --- notices

    def due_notices(self, now: float, count: int) -> list[DueNotice]:
        rows = self._rows(
            "SELECT id, event, attempts FROM notices WHERE due <= ? ORDER BY due LIMIT ?", int(now), count
        )
        return [DueNotice(id, event.encode(), attempts) for id, event, attempts in rows]

    def next_notice_due(self) -> int | None:
        """Unix time at which the next notice is due; None: there is none."""
        due = self._rows("SELECT min(due) FROM notices")[0][0]
        return None if due is None else int(due)

    def remove_notice(self, notice_id: str) -> None:
        """Forgets a notice that was delivered, or is given up."""
        with self._write(synced=False) as db:
            db.execute("DELETE FROM notices WHERE id = ?", (notice_id,))

    def postpone_notice(self, notice_id: str, due: float) -> None:
        with self._write(synced=False) as db:
            db.execute("UPDATE notices SET attempts = attempts + 1, due = ? WHERE id = ?", (int(due), notice_id))


def has_queue(config: BatchConfig) -> bool:
    """Returns whether the folder has a queue. A folder that cannot be looked into has none."""
    try:
        return (batch_dir(config.folder) / QUEUE).is_file()
    except OSError:
        return False


def open_stored(path: Path) -> BinaryIO:
    """Opens the bytes of a file. Raises UnknownFile where it was deleted meanwhile, StoreUnavailable."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise UnknownFile(f"the file {path.name} was deleted", "files that are there") from None
    except OSError as error:  # too many open files, a disk that fails: this passes, and is no error of a request
        raise unreadable(error) from error


def unreadable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(
        f"a file of batches cannot be read: {error.strerror}", "a disk that can be read", STORE_RETRY_MS
    )


def sync_file(path: Path) -> None:
    """Syncs a file or a folder. A big file takes seconds: who wrote it syncs it on a thread of its own first, so that
    the store's thread finds nothing to write."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def output_file(file_id: str, part: Path, name: str, size_bytes: int, content_type: str, keep_s: float) -> NewFile:
    """File of answers that was written."""
    return NewFile(file_id, part, name, OUTPUT_PURPOSE, content_type, size_bytes, keep_s)


def _unknown_batch(batch_id: str) -> UnknownBatch:
    return UnknownBatch(f"there is no batch {batch_id[:80]!r}", "batches of this key", "GET /v1/batches lists them")
