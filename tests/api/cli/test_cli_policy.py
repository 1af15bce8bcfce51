"""asr-serve policy, as far as it needs no server: check, log, verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from asr_serve.api.cli import app
from asr_serve.evaluation.store import EvaluatedDataset, EvaluatedSystem, EvaluationResult, EvaluationStore, RunSettings
from asr_serve.governance.audit_log import AuditLog, verify_log
from asr_serve.models.registry import asr_card

POLICY = """
[[route]]
name = "default"
stable = "moonshine-tiny-en"
candidate = "whisper-tiny-en"
[route.requires]
dataset = "calls"
wer_percent_below = 12.0
license_in = ["MIT", "Apache-2.0"]
residency = ["eu-central-1"]
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["policy", *map(str, args)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return path


def store_evaluation(path: Path, errors: int) -> None:
    card = asr_card("whisper-tiny-en")
    system = EvaluatedSystem(card.name, card.name, card.weights_revision, card.licence, "none")
    with EvaluationStore(path, create=True) as store:
        evaluation = store.begin_run(system, EvaluatedDataset("calls", "/c", "d" * 64, "en", 1), RunSettings())
        store.add_result(evaluation.run_id, EvaluationResult("a", 4.0, "a", "a", 10, errors, 40, errors, 0.5))
        store.finish_run(evaluation.run_id)


def test_check(file: Path, tmp_path: Path) -> None:
    done = run("check", file, "--region", "eu-central-1")
    assert (done.exit_code, done.stdout.splitlines()) == (
        0,
        [
            "default: stable moonshine-tiny-en: ok",
            "default: candidate whisper-tiny-en: ok, its evaluations not looked at (--evaluations FILE)",
        ],
    )
    done = run("check", file)
    assert done.exit_code == 1
    assert "this server names no region (governance.region), and residency = eu-central-1" in done.stdout
    evaluations = tmp_path / "e.sqlite"
    done = run("check", file, "--region", "eu-central-1", "--evaluations", evaluations)
    assert (done.exit_code, "there is no file of evaluations" in done.stderr) == (1, True)
    store_evaluation(evaluations, 1)
    done = run("check", file, "--region", "eu-central-1", "--evaluations", evaluations)
    assert (done.exit_code, done.stdout.splitlines()[1]) == (0, "default: candidate whisper-tiny-en: ok")
    done = run("check", file, "--region", "eu-central-1", "--evaluations", evaluations, "--quantize", "int8")
    assert (done.exit_code, "and this server has" in done.stdout) == (1, True)
    file.write_text(POLICY.replace("12.0", "10.0"))
    done = run("check", file, "--region", "eu-central-1", "--evaluations", evaluations)
    assert done.exit_code == 1
    assert "the word error rate in percent is 10, and wer_percent_below = 10" in done.stdout


def test_check_refuses_a_wrong_file(file: Path) -> None:
    file.write_text(POLICY.replace("stable", "stabel"))
    done = run("check", file)
    assert done.exit_code == 2
    assert "route 1.stabel: stabel is no key" in done.stderr
    file.write_text(POLICY.replace("whisper-tiny-en", "whisper-tiny-eng"))
    done = run("check", file)
    assert (done.exit_code, "whisper-tiny-en" in done.stderr) == (2, True)


def test_log_and_verify(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog.open(path)
    fields = {"by": "admin-1", "stable": "tiny", "candidate": "base", "policy_sha256": "0" * 64}
    log.append(action="adopted", route="default", stage="stable", **fields)
    head = log.head
    log.append(
        action="promoted", route="default", stage="canary", operator="anna", evidence=({"run_id": "run-1"},), **fields
    )
    log.append(action="adopted", route="other", stage="stable", **fields)
    log.close()
    done = run("log", path, "--route", "default")
    assert done.exit_code == 0
    _, _, promoted = done.stdout.splitlines()
    for part in ("promoted", "canary", "admin-1 (anna)", "run-1"):
        assert part in promoted
    assert len(json.loads(run("log", path, "--json").stdout)) == 3
    assert run("verify", path).exit_code == 0
    assert run("verify", path, "--head", verify_log(path).head).exit_code == 0
    assert run("verify", path, "--head", head).exit_code == 0, "of a line before"
    lines = path.read_bytes().splitlines(keepends=True)
    whole = verify_log(path).head
    path.write_bytes(b"".join(lines[:2]))
    done = run("verify", path, "--head", whole)
    assert (done.exit_code, "lines were cut off" in done.stderr) == (1, True)
    path.write_bytes(lines[0] + lines[2])
    done = run("verify", path)
    assert (done.exit_code, "line 2 has the number 3" in done.stderr) == (1, True)
    path.write_bytes(lines[0] + lines[1][:30])
    assert run("verify", path).exit_code == 1


def test_a_server_that_is_not_there() -> None:
    done = run("status", "--server", "http://127.0.0.1:1")
    assert (done.exit_code, "no server answers" in done.stderr) == (1, True)
