"""Record on disk of the uploads of a batch submission, from which an interrupted submission resumes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from asr_serve.errors import OptionError

MAX_RECORD_AGE_S = 30 * 24 * 3_600
"""Age from which a record is deleted: the time for which servers keep files, unless their settings say otherwise."""


class UploadRecord:
    """Append-only record of the uploads of one submission: a line of JSON for each start and each end of an upload.

    An upload has a key, which changes with the content. The record is not persistent without a file, nor once writing
    the file has failed: the submission itself never fails because of its record."""

    def __init__(self, file: FileIO | None) -> None:
        """Reads the uploads of an earlier command, or starts a new record.

        Args:
            file: unbuffered file, opened for reading and appending.
        """
        self._file = file
        self._ids: dict[str, str] = {}
        self._pending: set[str] = set()
        self._token, self._started_at = "", time.time()
        for entry in self._read():
            if isinstance(token := entry.get("token"), str):
                self._token = token
                started_at = entry.get("started_at")
                self._started_at = float(started_at) if isinstance(started_at, int | float) else 0.0
            elif isinstance(key := entry.get("key"), str):
                if isinstance(file_id := entry.get("id"), str):
                    self._ids[key] = file_id
                    self._pending.discard(key)
                else:
                    self._pending.add(key)
        if not self._token:
            self.renew_token()

    @property
    def is_persistent(self) -> bool:
        """Returns whether a later command can resume from it."""
        return self._file is not None

    @property
    def started_at(self) -> float:
        """Unix time on this machine's clock at which the submission started."""
        return self._started_at

    @property
    def ids(self) -> frozenset[str]:
        """Ids of all uploaded files."""
        return frozenset(self._ids.values())

    def file_id(self, key: str) -> str | None:
        """Id of the file that was uploaded under `key`."""
        return self._ids.get(key)

    def is_pending(self, key: str) -> bool:
        """Returns whether an upload of `key` has started whose result is unknown."""
        return key in self._pending

    def start_upload(self, key: str) -> None:
        """Records that the upload of `key` starts."""
        self._pending.add(key)
        self._append({"key": key})

    def finish_upload(self, key: str, file_id: str) -> None:
        """Records that the server has the file."""
        self._pending.discard(key)
        self._ids[key] = file_id
        self._append({"key": key, "id": file_id})

    def renew_token(self) -> None:
        """Replaces the token from which idempotency keys derive, so that requests are no longer repetitions."""
        self._token = secrets.token_hex(16)
        self._append({"token": self._token, "started_at": self._started_at})

    def idempotency_key(self, *parts: str) -> str:
        """Idempotency key of a request with that content: the same when the submission resumes."""
        return hashlib.sha256("\0".join((self._token, *parts)).encode()).hexdigest()[:32]

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yields the entries. Lines that are no entry are skipped: a killed process may have cut its last one. A file
        that is not UTF-8 is emptied."""
        text = ""
        try:
            if self._file is not None:
                self._file.seek(0)
                text = self._file.readall().decode()
        except UnicodeDecodeError:
            self._truncate()
        except OSError:
            self._file = None
        if text and not text.endswith("\n"):
            self._write(b"\n")
        for line in text.split("\n"):
            with contextlib.suppress(ValueError):
                if isinstance(entry := json.loads(line), dict):
                    yield entry

    def _append(self, entry: dict[str, str | float]) -> None:
        self._write(f"{json.dumps(entry)}\n".encode())

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            written = self._file.write(data)
        except OSError:
            written = 0
        if written != len(data):  # a full disk may take a part
            self._file = None

    def _truncate(self) -> None:
        if self._file is None:
            return
        try:
            self._file.truncate(0)
        except OSError:
            self._file = None


@contextlib.contextmanager
def upload_record(folder: Path, server: str, api_key: str | None, source: Path) -> Iterator[UploadRecord]:
    """Context manager around the record of a submission of `source` to `server` with an API key. The record is deleted
    at the end, unless the submission fails or is interrupted. It is not persistent where the folder cannot be written.
    Raises OptionError while another process has the record."""
    parts = (server.encode("utf-8", "surrogateescape"), (api_key or "").encode("utf-8", "surrogateescape"))
    name = hashlib.sha256(b"\0".join((*parts, os.fsencode(source.resolve())))).hexdigest()[:32]
    path = folder / f"{name}.jsonl"
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _delete_old(folder)
            file = stack.enter_context(_locked(path, source))
        yield UploadRecord(file)
        if file is not None:
            with contextlib.suppress(OSError):
                file.truncate(0)  # nothing resumes from a record that cannot be deleted
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, source: Path) -> Iterator[FileIO]:
    """Context manager around the file of a record, which no other process has. Raises OSError, OptionError."""
    while True:
        with FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OptionError(
                    f"another process is submitting {source}", "one at a time", "wait for its end, or end it"
                ) from None
            # The process that had it before may have deleted it since it was opened.
            if _is_at(file, path):
                yield file
                return


def _is_at(file: FileIO, path: Path) -> bool:
    """Returns whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _delete_old(folder: Path) -> None:
    oldest = time.time() - MAX_RECORD_AGE_S
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
