"""Every path, port and setting of the compose file and of the systemd unit exists."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from asr_serve.config_sources import all_settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose"
FILE: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVER: dict[str, Any] = FILE["services"]["asr-serve"]
UNIT = ROOT / "deploy" / "systemd" / "asr-serve.service"
VARIABLES = {each.variable for each in all_settings().values()} | {"ASR_SERVE_CACHE"}
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_every_path_of_the_compose_file_exists() -> None:
    context = COMPOSE / SERVER["build"]["context"]
    assert (context / SERVER["build"]["dockerfile"]).is_file()
    mounts = [text.split(":") for each in FILE["services"].values() for text in each.get("volumes", [])]
    assert len(mounts) == 8
    for source, target, *mode in mounts:
        if source.startswith("."):
            assert (COMPOSE / source).exists(), source
            assert mode == ["ro"], source
        else:
            assert source in FILE["volumes"]
        assert target.startswith("/")


def test_the_compose_file_fits_the_specification() -> None:
    python = ROOT / ".venv-release" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-release here: make release-tools")
    text = (COMPOSE / "compose.yaml").read_text()
    script = "import sys, compose_spec; compose_spec.PyCompose.from_yaml(sys.stdin.read()).validate()"
    for given, fits in ((text, True), (text.replace("read_only", "read_onli"), False)):
        done = subprocess.run([python, "-c", script], input=given, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) is fits, done.stderr


def test_services_name_one_another_by_ports_that_they_have() -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    original = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == original["rule_files"]
    assert job["static_configs"] == [{"targets": ["asr-serve:8000"]}]
    assert SERVER["ports"] == ["127.0.0.1:8000:8000"]
    assert "EXPOSE 8000" in DOCKERFILE
    assert job["authorization"]["credentials_file"] == SERVER["environment"]["ASR_SERVE_API_KEYS_FILE"]
    (source,) = yaml.safe_load((COMPOSE / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert f"../grafana:{provider['options']['path']}:ro" in FILE["services"]["grafana"]["volumes"]
    for service in FILE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert set(service.get("secrets", [])) <= FILE["secrets"].keys()


def test_the_server_of_the_compose_file_may_write_nothing_but_tmp() -> None:
    assert SERVER["read_only"] is True
    assert SERVER["cap_drop"] == ["ALL"]
    drain_s = float(SERVER["environment"]["ASR_SERVE_DRAIN_S"])
    assert float(SERVER["stop_grace_period"].removesuffix("s")) > drain_s


def test_variables_are_those_of_settings() -> None:
    named = set(SERVER["environment"])
    lines = (ROOT / "deploy" / "systemd" / "asr-serve.env").read_text().splitlines()
    named |= {line.lstrip("#").partition("=")[0] for line in lines if "=" in line}
    named |= {
        word.partition("=")[0]
        for text in (UNIT.read_text(), DOCKERFILE)
        for word in text.split()
        if word.startswith("ASR_SERVE_")
    }
    assert named <= VARIABLES
    assert len(named) > 6


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name
    text = UNIT.read_text()
    assert "ExecStart=/opt/asr-serve/bin/asr-serve serve" in text
    # verify wants the program to be there
    unit.write_text(text.replace("/opt/asr-serve/bin/asr-serve", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
