"""The image: its Dockerfile is linted, and its steps are executed in a fresh root, where the server hears."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docker_steps import Builder, check_health, parse, start_read_only

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
INSTRUCTIONS = parse(DOCKERFILE.read_text())
HADOLINT = ROOT / ".venv-release" / "bin" / "hadolint"
LIMIT_BYTES = 1_600_000_000


@pytest.mark.parametrize("folder", ["docker", "kuberay"])
def test_hadolint_finds_nothing(folder: str) -> None:
    if not HADOLINT.exists():
        pytest.skip("no .venv-release here: make release-tools")
    done = subprocess.run(
        [HADOLINT, ROOT / "deploy" / folder / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_of_two_stages_without_root_and_with_a_health_check() -> None:
    names = [each.name for each in INSTRUCTIONS]
    assert names.count("FROM") == 2
    last = INSTRUCTIONS[len(names) - names[::-1].index("FROM") :]
    assert [each.text for each in last if each.name == "USER"] == ["10001:10001"]
    assert any(each.name == "HEALTHCHECK" for each in last)
    assert not any("g++" in each.text or "pip install" in each.text for each in last)


@pytest.mark.parametrize("folder", ["docker", "kuberay"])
def test_what_is_copied_is_in_the_build_context(folder: str) -> None:
    """The allow-list of .dockerignore has exactly what COPY names."""
    file = ROOT / "deploy" / folder / "Dockerfile"
    copied = {
        name
        for each in parse(file.read_text())
        if each.name == "COPY" and not each.text.startswith("--from")
        for name in each.text.split()[:-1]
    }
    ignore = file.with_name("Dockerfile.dockerignore").read_text().split()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.exhaustive
@pytest.mark.timeout(3_600)
def test_the_steps_give_a_server_that_hears_on_a_read_only_root(tmp_path: Path) -> None:
    """About ten minutes: every instruction is executed in a root that debootstrap made, with pip's own index."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("no debootstrap here, or no root to run it")
    base = tmp_path / "bookworm"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", base], check=True, stdout=subprocess.DEVNULL)
    arguments = {"PIP_ARGS": os.environ.get("PIP_ARGS", "")}
    find_links = [Path(folder) for folder in os.environ.get("PIP_FIND_LINKS", "").split() if Path(folder).is_dir()]
    work = tmp_path / "stages"
    work.mkdir()
    builder = Builder(ROOT, work, {"debian:bookworm-slim": base}, arguments, find_links)
    image = builder.build(INSTRUCTIONS)
    assert builder.executed == [each.name for each in INSTRUCTIONS]
    for extra in ("var/cache/apt", "usr/share/doc", "usr/share/locale"):  # of debootstrap: the slim image has none
        shutil.rmtree(image.root / extra, ignore_errors=True)
    size = sum(each.lstat().st_size for each in image.root.rglob("*") if not each.is_symlink() and each.is_file())
    print(f"the image has {size / 1e6:.0f} MB")
    assert size < LIMIT_BYTES, size
    port = 18_423
    health = [word.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for word in image.health]
    assert health != image.health
    image.health = health
    environment = {"ASR_SERVE_PORT": str(port), "ASR_SERVE_HOST": "127.0.0.1"}
    server = start_read_only(image, environment)
    try:
        until = time.monotonic() + 300
        while check_health(image, environment) != 0:
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server was not healthy in time"
            time.sleep(1)
        clip = subprocess.run(
            [sys.executable, ROOT / "examples" / "demo_clip.py"], capture_output=True, text=True, check=True
        ).stdout.strip()
        # Healthy is before ready: until the model is loaded, a request is refused with a time to try again.
        url = f"http://127.0.0.1:{port}/v1/audio/transcriptions"
        command = ["curl", "-sf", "--retry", "60", "--retry-delay", "1", url, "-F", f"file=@{clip}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        assert len(json.loads(answer)["text"].split()) > 5
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert "Uid:\t10001\t10001" in status
        assert "NoNewPrivs:\t1" in status
    finally:
        server.terminate()
        server.wait(60)
