"""Installs a wheel into an empty environment, starts the server that it gives, and has it hear and speak: timed.

    python release/try_wheel.py dist/asr_serve-0.1.0-py3-none-any.whl
    .venv/bin/python release/try_wheel.py --packages-from-here dist/asr_serve-0.1.0-py3-none-any.whl

Only Python and what pip installs for the wheel are used. The clip is one that comes with the default weights. The
second form downloads nothing: in place of what pip would fetch, the new environment is given links to those packages of
the one that runs this script which the wheel requires, directly or by way of others, and no more. pip still checks that
they satisfy the wheel, and a package that is used and not required is missing; but that pip finds them in an index is
not shown.

Prints one JSON object: `seconds` of each part by the clock, `cpu_s` of all processes, and what was heard and spoken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
import zipfile
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

START_S = 600
"""Longest wait for the server's first line that tells its address, conversion of the weights included."""


def request(url: str, body: bytes, kind: str) -> bytes:
    """Response to a POST. Raises HTTPError for any but a success."""
    call = urllib.request.Request(url, body, {"Content-Type": kind})
    with urllib.request.urlopen(call, timeout=300) as response:
        return bytes(response.read())


def form(fields: dict[str, str], clip: Path) -> tuple[bytes, str]:
    """A multipart form with one file, and its content type."""
    limit = "wheel-trial-boundary"
    parts = [f'--{limit}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields.items()]
    head = f'--{limit}\r\nContent-Disposition: form-data; name="file"; filename="{clip.name}"\r\n\r\n'
    body = "".join(parts).encode() + head.encode() + clip.read_bytes() + f"\r\n--{limit}--\r\n".encode()
    return body, f"multipart/form-data; boundary={limit}"


def address(server: subprocess.Popen[bytes], output: Path) -> str:
    """Address that a starting server prints. Raises RuntimeError if it ends without one, TimeoutError."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        ended, text = server.poll() is not None, output.read_text(errors="replace")
        if found := re.search(r"http://127\.0\.0\.1:\d+(?=\D)", text):
            return found.group()
        if ended:
            raise RuntimeError(f"the server ended: {text[-4_000:]}")
        time.sleep(0.1)
    raise TimeoutError(f"the server told no address within {START_S} s")


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires, as its metadata has it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def link_required(wheel: Path, into: Path) -> None:
    """Fills a folder with links to the packages of this environment that a wheel requires, those that they require
    themselves included. A package that is not here gets none: pip says so then."""
    from packaging.requirements import Requirement  # no part of Python; who gives --packages-from-here has it
    from packaging.utils import canonicalize_name

    into.mkdir()
    waiting, linked = [Requirement(text) for text in requirements(wheel)], set[tuple[str, str]]()
    while waiting:
        wanted = waiting.pop()
        for extra in wanted.extras or {""}:
            name = canonicalize_name(wanted.name)
            if (name, extra) in linked or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            linked.add((name, extra))
            try:
                package = distribution(name)
            except PackageNotFoundError:
                continue
            needed = [Requirement(text) for text in package.requires or []]
            waiting += [
                Requirement(str(each).partition(";")[0])
                for each in needed
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
            for top in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
                if not (into / top).exists():
                    (into / top).symlink_to(Path(str(package.locate_file(top))).resolve())


def run(command: list[object]) -> None:
    """Runs a program, whose output goes where it does not disturb ours. Raises CalledProcessError."""
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)


def install(wheel: Path, home: Path, constraints: Path | None) -> None:
    """Installs a wheel into an empty environment, by that environment's own pip. Raises CalledProcessError."""
    venv.create(home / "venv", with_pip=True)
    limits = [] if constraints is None else ["-c", constraints]
    run([home / "venv/bin/python", "-m", "pip", "install", "--quiet", *limits, wheel])


def install_linked(wheel: Path, home: Path) -> None:
    """Makes an environment of a wheel and links to what it requires. This environment's pip installs and checks; the
    new one has no pip, and not the setuptools that come with older Pythons, which would hide those that are required.
    Raises CalledProcessError where requirements are not met."""
    venv.create(home / "venv", with_pip=False)
    link_required(wheel, home / "packages")
    (site,) = (home / "venv/lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(f"{home / 'packages'}\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", home / "venv"]
    run([*pip, "install", "--no-index", "--no-deps", wheel])
    run([*pip, "check"])


def check_origin(home: Path) -> None:
    """Raises RuntimeError unless the new environment's asr_serve is the wheel's."""
    code = "import importlib.util as util; print(util.find_spec('asr_serve').origin)"
    command = [home / "venv/bin/python", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=home, env=clean(home))
    found = done.stdout.strip()
    if not Path(found).resolve().is_relative_to(home.resolve()):
        raise RuntimeError(f"asr_serve is {found}, which is not in {home}")


def clean(home: Path) -> dict[str, str]:
    """Environment of a new user with that home."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ASR_SERVE_", "PYTHON"))}
    return kept | {"HOME": str(home), "XDG_CACHE_HOME": f"{home}/cache", "XDG_DATA_HOME": f"{home}/data"}


def main() -> None:
    """Tries a wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraints", type=Path)
    parser.add_argument(
        "--packages-from-here", action="store_true", help="links to required packages of this environment, no download"
    )
    chosen = parser.parse_args()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asr-serve-trial-") as name:
        home = Path(name)
        began = time.monotonic()
        if chosen.packages_from_here:
            install_linked(chosen.wheel, home)
        else:
            install(chosen.wheel, home, chosen.constraints)
        check_origin(home)
        seconds["install"] = time.monotonic() - began
        began = time.monotonic()
        output = home / "server.log"  # no pipe, which a server that logs much would fill, and then wait
        with output.open("wb") as log:
            server = subprocess.Popen(
                [home / "venv/bin/asr-serve", "serve", "--port", "0"],
                env=clean(home),
                cwd=home,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            url = address(server, output)
            wait_until_ready(url)
            seconds["start"] = time.monotonic() - began
            began = time.monotonic()
            clip = next(
                file
                for pattern in ("packages", "venv/lib/python*/site-packages")
                for file in home.glob(f"{pattern}/moonshine_voice/assets/beckett.wav")
            )
            text = json.loads(request(f"{url}/v1/audio/transcriptions", *form({"model": "moonshine-tiny-en"}, clip)))[
                "text"
            ]
            seconds["transcript"] = time.monotonic() - began
            began = time.monotonic()
            wanted = {"model": "fastpitch-en", "input": "Good morning.", "voice": "heart", "response_format": "wav"}
            speech = request(f"{url}/v1/audio/speech", json.dumps(wanted).encode(), "application/json")
            seconds["speech"] = time.monotonic() - began
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    if not text.strip() or speech[:4] != b"RIFF" or len(speech) < 20_000:
        raise SystemExit(f"no transcript, or no speech: {text!r}, {len(speech)} bytes of speech")
    rounded = {part: round(value, 1) for part, value in seconds.items()}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = round(used.ru_utime + used.ru_stime, 1)
    print(json.dumps({"seconds": rounded, "cpu_s": cpu_s, "transcript": text, "speech_bytes": len(speech)}))


def wait_until_ready(url: str) -> None:
    """Waits until /ready answers with a success. Raises TimeoutError."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"the server is not ready after {START_S} s")


if __name__ == "__main__":
    main()
