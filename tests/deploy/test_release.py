"""A release: twice from one commit it is the same bytes, and it names all that it brings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-release" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-release here: make release-tools")


def release(out: Path, *arguments: str) -> dict[str, str]:
    """Builds a release and returns its SHA256SUMS by file name."""
    temporary = out.with_name(f"{out.name}-tmp")  # other paths each time
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [PYTHON, ROOT / "release" / "build.py", "--out", out, *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=3_000)
    lines = [line.split() for line in (out / "SHA256SUMS").read_text().splitlines()]
    for digest, name in lines:
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert {name for _, name in lines} | {"SHA256SUMS"} == {path.name for path in out.iterdir()}
    return {name: digest for digest, name in lines}


@pytest.mark.exhaustive
@pytest.mark.timeout(6_000)
def test_two_releases_of_one_commit_are_the_same_bytes(tmp_path: Path) -> None:
    """Eight minutes of a core: the native modules are compiled twice."""
    first, second = release(tmp_path / "one"), release(tmp_path / "another-one")
    assert first == second
    native = next((tmp_path / "one").glob("*linux*.whl"))
    with zipfile.ZipFile(native) as wheel:
        modules = [name for name in wheel.namelist() if name.endswith(".so")]
        assert len(modules) == 9
        for name in modules:
            data = wheel.read(name)
            assert str(tmp_path).encode() not in data, name
            assert str(ROOT).encode() not in data, name


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_a_release_without_native_modules_names_all_that_it_brings(tmp_path: Path) -> None:
    sums = release(tmp_path / "one", "--pure")
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    wheel = f"asr_serve-{version[1]}-py3-none-any.whl"
    assert sums.keys() == {wheel, f"asr_serve-{version[1]}.tar.gz", "sbom.cdx.json", "LICENSES.txt"}
    with zipfile.ZipFile(tmp_path / "one" / wheel) as archive:
        names = archive.namelist()
        assert not [name for name in names if name.endswith((".so", ".cpp"))]
        assert "asr_serve/models/tts/weights/fastpitch-en/model.safetensors" in names
        assert len({info.date_time for info in archive.infolist()}) == 1
    sbom = json.loads((tmp_path / "one" / "sbom.cdx.json").read_text())
    listed = {each["name"]: each for each in sbom["components"]}
    assert {"torch", "moonshine-voice", "hibari-tts", "onnxruntime", "granian"} <= listed.keys()
    assert all(each["licenses"] for each in listed.values())
    assert "pytest" not in listed
    licences = (tmp_path / "one" / "LICENSES.txt").read_text().splitlines()
    assert len(licences) == len(listed) + 1
