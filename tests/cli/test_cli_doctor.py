from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asr_serve.cli import app, doctor
from asr_serve.models import weights


def test_doctor_as_json_tells_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "locate", lambda card: Path("/weights") / card.name)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert report["machine"]["cores_allowed"] >= 1
    assert report["machine"]["memory_bytes"] > 1 << 20
    assert report["packages"]["torch"]
    assert report["device"]["dtype"] in ("fp32", "bf16")
    assert report["device"]["threads"] >= 1
    assert report["codecs"]["flac"] is True
    assert report["models"]["moonshine-tiny-en"] == "/weights/moonshine-tiny-en"


def test_what_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "locate", lambda card: None)
    monkeypatch.setattr(doctor, "native_is_built", lambda: False)
    result = CliRunner().invoke(app, ["doctor"])
    page = result.stdout
    assert "the weights of moonshine-tiny-en  (needed)\n    pip install moonshine-voice==0.1.0\n" in page
    assert "make setup" in page
    assert result.exit_code == 1


def test_without_torch_the_doctor_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "torch" else real(name))
    report = doctor.examine()
    assert (report.device, report.models) == (None, {})
    assert any(finding.command == "pip install torch" and finding.needed for finding in report.missing)
    assert "pip install torch" in doctor.as_page(report)


def test_a_device_that_does_not_exist_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "gpu"])
    assert result.stderr.startswith("error: ")
    assert result.exit_code == 2


def test_cpu_fields_read_the_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: A CPU: 2\nflags\t: avx2 amx_bf16\n\nprocessor\t: 1\nflags\t: x\n"
    )
    assert doctor.cpu_fields(info) == {"processor": "0", "model name": "A CPU: 2", "flags": "avx2 amx_bf16"}
    assert doctor.cpu_fields(tmp_path / "none") == {}
