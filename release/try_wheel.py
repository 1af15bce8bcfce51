"""Installs a wheel into an empty environment, starts the server that it gives, and has it hear and speak: timed.

    python release/try_wheel.py dist/asr_serve-0.1.0-py3-none-any.whl

Only Python and what pip installs for the wheel are used. The clip is one that comes with the default weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import IO

START_S = 300
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


def address(lines: IO[str]) -> str:
    """Address that a starting server prints. Raises RuntimeError if it ends without one."""
    seen = []
    for line in lines:
        seen.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise RuntimeError("the server ended: " + "".join(seen[-20:]))


def main() -> None:
    """Prints one JSON object: seconds of each part, and the text of the clip."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraints", type=Path)
    chosen = parser.parse_args()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asr-serve-trial-") as name:
        home = Path(name)
        began = time.monotonic()
        venv.create(home / "venv", with_pip=True)
        pip = [str(home / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
        limits = ["-c", str(chosen.constraints)] if chosen.constraints else []
        subprocess.run([*pip, *limits, str(chosen.wheel)], check=True, stdout=sys.stderr)
        seconds["install"] = time.monotonic() - began
        began = time.monotonic()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ASR_SERVE_", "PYTHON"))}
        environment |= {"HOME": name, "XDG_CACHE_HOME": f"{name}/cache", "XDG_DATA_HOME": f"{name}/data"}
        server = subprocess.Popen(
            [home / "venv/bin/asr-serve", "serve", "--port", "0"],
            env=environment,
            cwd=home,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            assert server.stdout is not None
            url = address(server.stdout)
            wait_until_ready(url)
            seconds["start"] = time.monotonic() - began
            began = time.monotonic()
            clip = next((home / "venv").rglob("moonshine_voice/assets/beckett.wav"))
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
            server.wait(60)
    if not text.strip() or speech[:4] != b"RIFF" or len(speech) < 20_000:
        raise SystemExit(f"no transcript, or no speech: {text!r}, {len(speech)} bytes of speech")
    rounded = {part: round(value, 1) for part, value in seconds.items()}
    print(json.dumps({"seconds": rounded, "transcript": text, "speech_bytes": len(speech)}))


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
