"""The audit log: a chain of lines that shows what was changed, and one writer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from asr_serve.errors import AuditLogCorrupt, AuditLogInUse, SourceNotFound
from asr_serve.governance.audit_log import FIRST, AuditLog, digest, verify_log

FIELDS = {"by": "admin-1", "route": "default", "stable": "tiny", "candidate": "base", "policy_sha256": "0" * 64}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log with three lines."""
    log = AuditLog.open(tmp_path / "audit.jsonl")
    log.append(action="adopted", stage="stable", **FIELDS)
    log.append(action="promoted", stage="canary", reason="Ünïcode\nand lines", figures={"wer": 7.5}, **FIELDS)
    log.append(action="rolled_back", stage="stable", **FIELDS)
    log.close()
    return tmp_path / "audit.jsonl"


def test_lines_are_chained_and_read_back(path: Path) -> None:
    lines = path.read_bytes().splitlines()
    found = verify_log(path)
    assert [entry.number for entry in found.entries] == [1, 2, 3]
    assert [entry.previous for entry in found.entries] == [FIRST, digest(lines[0]), digest(lines[1])]
    assert (found.head, found.torn_bytes) == (digest(lines[2]), 0)
    assert found.entries[1].reason == "Ünïcode\nand lines"
    assert path.stat().st_mode & 0o777 == 0o600
    log = AuditLog.open(path)  # goes on where it was
    log.append(action="promoted", stage="shadow", **FIELDS)
    log.close()
    assert verify_log(path).entries[3].previous == found.head


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"canary", b"shadow"), lines[2]], "line 3 does not follow"),
        (lambda lines: [lines[0].replace(b"admin-1", b"admin-2"), *lines[1:]], "line 2 does not follow"),
        (lambda lines: [lines[0], lines[2]], "line 2 has the number 3"),
        (lambda lines: [lines[1], lines[0], lines[2]], "line 1 has the number 2"),
        (lambda lines: lines[1:], "line 1 has the number 2"),
        (lambda lines: [*lines[:2], lines[2][:-20]], "line 3 is no entry"),
        (lambda lines: [lines[0], b"", *lines[1:]], "line 2 is no entry"),
        (lambda lines: [lines[0], b"\xff\xfe", *lines[1:]], "line 2 is no entry"),
    ],
)
def test_a_change_breaks_the_chain(path: Path, tamper: Callable[[list[bytes]], list[bytes]], said: str) -> None:
    path.write_bytes(b"\n".join(tamper(path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(AuditLogCorrupt, match=said):
        verify_log(path)
    with pytest.raises(AuditLogCorrupt, match=said):
        AuditLog.open(path)


def test_lines_cut_off_at_the_end_are_missed_by_their_digest(path: Path) -> None:
    head = verify_log(path).head
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    assert verify_log(path).head != head


def test_a_line_that_a_crash_has_cut_is_dropped_and_told(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[2][:40])
    assert verify_log(path).torn_bytes == 40
    log = AuditLog.open(path)
    log.close()
    found = verify_log(path)
    assert (found.torn_bytes, found.entries[3].action, found.entries[3].stage) == (0, "recovered", "stable")
    assert "40 bytes" in found.entries[3].reason


def test_one_server_writes(path: Path) -> None:
    log = AuditLog.open(path)
    with pytest.raises(AuditLogInUse, match="a log of its own"):
        AuditLog.open(path)
    with path.open("ab") as other:
        other.write(b"{}\n")
    with pytest.raises(AuditLogCorrupt, match="this server alone"):
        log.append(action="promoted", stage="canary", **FIELDS)
    log.close()
    log.close()
    assert path.read_bytes().endswith(b"{}\n")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        verify_log(tmp_path / "none.jsonl")
    with pytest.raises(SourceNotFound):
        AuditLog.open(tmp_path / "none" / "audit.jsonl")


def test_a_disk_that_refuses_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, size = AuditLog.open(path), path.stat().st_size
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 10:
            return real(fd, bytes(data)[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", lambda fd, data: full(fd, data) if path.stat().st_size == size else full(fd, b""))
    with pytest.raises(OSError, match="No space"):
        log.append(action="promoted", stage="canary", **FIELDS)
    monkeypatch.undo()
    assert path.stat().st_size == size
    log.append(action="promoted", stage="canary", **FIELDS)
    log.close()
    assert len(verify_log(path).entries) == 4
