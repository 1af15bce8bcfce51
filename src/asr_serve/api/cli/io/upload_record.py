"""Record on this machine of the uploads of a submission, by which the same command goes on after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from asr_serve.errors import OptionError

KEPT_S = 30 * 24 * 3_600
"""Age from which a record is deleted: servers keep files no longer unless they are told to."""


class UploadRecord:
    """Files that a server has of one submission: a line of JSON for each beginning and each end of an upload. What is
    uploaded has a key, which a changed file does not share."""

    def __init__(self, file: IO[str] | None) -> None:
        """`file`: opened for reading and appending; None: nothing outlives the command."""
        self._file = file
        self._ids: dict[str, str] = {}
        self._token, self._begun = secrets.token_hex(16), ""
        found = False
        for entry in [] if file is None else _entries(file):
            if isinstance(token := entry.get("token"), str):
                self._token, found = token, True
            elif isinstance(key := entry.get("key"), str):
                self._begun = "" if "id" in entry else key
                if isinstance(file_id := entry.get("id"), str):
                    self._ids[key] = file_id
        if not found:
            self._write({"token": self._token})

    @property
    def outlives(self) -> bool:
        """Whether a later command finds it."""
        return self._file is not None

    @property
    def ids(self) -> frozenset[str]:
        """Ids of all uploaded files."""
        return frozenset(self._ids.values())

    def id_of(self, key: str) -> str | None:
        """Id of the file that was uploaded under `key`."""
        return self._ids.get(key)

    def was_begun(self, key: str) -> bool:
        """Returns whether the upload of `key` was the last one that began, and how it ended is not known."""
        return self._begun == key

    def begin(self, key: str) -> None:
        """Records that the upload of `key` begins."""
        self._begun = key
        self._write({"key": key})

    def end(self, key: str, file_id: str) -> None:
        """Records that the server has the file."""
        self._begun, self._ids[key] = "", file_id
        self._write({"key": key, "id": file_id})

    def request_key(self, *parts: str) -> str:
        """Idempotency key of a request of this submission with that content: the same after an interruption."""
        return hashlib.sha256("\0".join((self._token, *parts)).encode()).hexdigest()[:32]

    def _write(self, entry: dict[str, str]) -> None:
        if self._file is not None:
            self._file.write(f"{json.dumps(entry)}\n")
            self._file.flush()


@contextlib.contextmanager
def upload_record(folder: Path, server: str, api_key: str | None, source: Path) -> Iterator[UploadRecord]:
    """Context manager around the record of what `source` sends to `server` with a key. It is deleted at the end,
    unless the submission fails or is interrupted. Where the folder cannot be written, nothing outlives the command.
    Raises OptionError while another process has the record."""
    name = hashlib.sha256("\0".join((server, api_key or "", str(source.resolve()))).encode()).hexdigest()[:32]
    path = folder / f"{name}.jsonl"
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _delete_old(folder)
            file = stack.enter_context(_locked(path, source))
        yield UploadRecord(file)
        if file is not None:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, source: Path) -> Iterator[IO[str]]:
    """Context manager around a record that no other process has. Raises OSError, OptionError."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+", encoding="utf-8")
        with file:
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


def _is_at(file: IO[str], path: Path) -> bool:
    """Returns whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _entries(file: IO[str]) -> Iterator[dict[str, Any]]:
    """Entries of a record; a line that was cut when its process was killed is none, and is ended."""
    file.seek(0)
    text = file.read()
    if text and not text.endswith("\n"):
        file.write("\n")
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
                yield entry


def _delete_old(folder: Path) -> None:
    oldest = time.time() - KEPT_S
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()
