"""Audit log of a policy: JSON lines that are only appended, each with the digest of the line before it.

A line that is changed, removed or put in breaks the chain. A changed last line, lines cut off at the end, and a file
written anew with all its digests do not: compare the digest of the last line (`asr-serve policy verify --head`) with
one that was noted elsewhere; the server logs each.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from asr_serve.errors import AuditLogCorrupt, AuditLogInUse, SourceNotFound
from asr_serve.governance.policy import Stage

MAX_LOG_BYTES = 64 << 20
"""Largest log that is read: some hundred thousand changes."""
FIRST = "0" * 64
"""Digest before the first line."""

Action = Literal["adopted", "policy_changed", "promoted", "rolled_back", "recovered"]
"""Kind of a change. adopted: the models of a route are new here. policy_changed: the file is another, and the models
of the route are the same. recovered: a line that a crash had cut was dropped; the change it told of was never made."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line: who changed what, when, and on which evidence."""

    number: int
    """Counted from 1."""
    previous: str
    """SHA-256 of the line before, as it is in the file, without its end; FIRST for the first one."""
    at_utc: str
    by: str
    """Authenticated author: the name of an admin key, `server`, or `os:USER` for whoever runs it."""
    operator: str = ""
    """Author as the client names it, not authenticated: the user of the command line."""
    action: Action
    route: str
    stage: Stage
    """Stage from then on."""
    stable: str
    candidate: str | None = None
    policy_sha256: str
    evidence: tuple[dict[str, Any], ...] = ()
    """Evaluations that the decision rests on."""
    figures: dict[str, float] = {}
    """Figures of callers in the stage that ended, those that broke a rule among them."""
    reason: str = ""


class VerifiedLog(NamedTuple):
    """Content of a log whose chain is whole."""

    entries: list[AuditEntry]
    head: str
    """Digest of the last line."""
    whole_bytes: int
    """Length up to the end of the last whole line."""
    torn_bytes: int
    """Length of a last line that a crash has cut; 0: none."""


def verify_log(path: Path) -> VerifiedLog:
    """Reads a log and checks its chain. Raises AuditLogCorrupt with the line, SourceNotFound."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LOG_BYTES + 1)
    except OSError as failure:
        raise SourceNotFound(
            f"the audit log {path} cannot be read: {failure.strerror}", todo="check the path"
        ) from failure
    return _verify(content, path)


def _verify(content: bytes, path: Path) -> VerifiedLog:
    if len(content) > MAX_LOG_BYTES:
        raise AuditLogCorrupt(
            f"the audit log {path} has more than {MAX_LOG_BYTES} bytes", "", "keep it elsewhere, and begin another"
        )
    *lines, torn = content.split(b"\n")
    entries: list[AuditEntry] = []
    head = FIRST
    for number, line in enumerate(lines, 1):
        try:
            entry = msgspec.json.decode(line, type=AuditEntry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as failure:
            raise _corrupt(path, number, f"is no entry: {failure}") from None
        if entry.number != number:
            raise _corrupt(path, number, f"has the number {entry.number}: lines are missing, or were put in")
        if entry.previous != head:
            raise _corrupt(path, number, "does not follow from the line before, which was changed after it was written")
        entries.append(entry)
        head = digest(line)
    return VerifiedLog(entries, head, len(content) - len(torn), len(torn))


def digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _corrupt(path: Path, number: int, what: str) -> AuditLogCorrupt:
    return AuditLogCorrupt(
        f"{path}, line {number} {what}",
        "a log as the server wrote it",
        "find out who changed it; restore a copy, or begin another log under another name",
    )


class AuditLog:
    """The log that one server appends to; no other may meanwhile. Belongs to one thread at a time."""

    def __init__(self, path: Path, fd: int, found: VerifiedLog, clock: Callable[[], datetime]) -> None:
        self.path, self._fd, self._clock = path, fd, clock
        self.entries = found.entries
        self.head = found.head
        self._size_bytes = found.whole_bytes

    @classmethod
    def open(cls, path: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Self:
        """Opens a log, or begins one. A last line that a crash has cut is dropped, which a line tells. Raises
        AuditLogCorrupt, AuditLogInUse, SourceNotFound."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as failure:
            raise SourceNotFound(
                f"the audit log {path} cannot be opened: {failure.strerror}", "a file that may be written", "check it"
            ) from failure
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise AuditLogInUse(
                    f"another server appends to {path}", "one at a time", "give each server a log of its own"
                ) from None
            with os.fdopen(os.dup(fd), "rb") as file:
                found = _verify(file.read(MAX_LOG_BYTES + 1), path)
            log = cls(path, fd, found, clock)
            if found.torn_bytes:
                os.ftruncate(fd, found.whole_bytes)
                last = found.entries[-1] if found.entries else None
                log.append(
                    by="server",
                    action="recovered",
                    route=last.route if last else "",
                    stage=last.stage if last else "stable",
                    stable=last.stable if last else "",
                    candidate=last.candidate if last else None,
                    policy_sha256=last.policy_sha256 if last else "",
                    figures=last.figures if last else {},  # a promoted model's baselines are read from the last line
                    reason=f"a last line of {found.torn_bytes} bytes without its end was dropped",
                )
            undo.pop_all()
        return log

    def append(self, **fields: Any) -> AuditEntry:
        """Appends a line with these fields of an AuditEntry, and returns once it is on disk. Blocks. Raises
        AuditLogCorrupt where somebody else has changed the file since, OSError where the disk refuses."""
        size = os.fstat(self._fd).st_size
        if size != self._size_bytes:
            raise AuditLogCorrupt(
                f"{self.path} has {size} bytes, and this server wrote {self._size_bytes}",
                "a log to which this server alone appends",
                "find out who changed it, and restart the server with a log of its own",
            )
        at_utc = self._clock().astimezone(UTC).isoformat(timespec="milliseconds")
        entry = AuditEntry(number=len(self.entries) + 1, previous=self.head, at_utc=at_utc, **fields)
        line = msgspec.json.encode(entry)
        try:
            remaining = memoryview(line + b"\n")
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size_bytes)  # half a line would be the start of the next
            raise
        self._size_bytes += len(line) + 1
        self.head = digest(line)
        self.entries.append(entry)
        return entry

    def close(self) -> None:
        """Closes the file, which another server may open then. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
