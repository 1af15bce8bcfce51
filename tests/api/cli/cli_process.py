"""The command line as tests run it: inside this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import Child
from typer.testing import CliRunner, Result

from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import USAGE

RUN = "from asr_serve.api.cli import main; main()"


def invoke(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    """Run a command in this process; an unexpected exception is raised."""
    result = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def start_python(code: str, *arguments: str | Path, environ: dict[str, str] | None = None, **options: Any) -> Any:
    """Start Python code that finds the package as this process does; its outputs are pipes."""
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "ASR_SERVE_THREADS": "1"} | (environ or {})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Child([sys.executable, "-c", code, *map(str, arguments)], env=settings, **pipes | options)


def start_cli(*arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    return start_python(RUN, *arguments, **options)


def expect_usage_error(result: Result, message: str) -> None:
    assert result.exit_code == USAGE
    assert message in result.stderr
    assert result.stdout == ""


def require_alsa() -> None:
    """Skip where there is no PortAudio, or none that uses ALSA."""
    query = "import sounddevice; print([api['name'] for api in sounddevice.query_hostapis()])"
    found = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, check=False)
    if "ALSA" not in found.stdout:
        pytest.skip(f"no PortAudio with ALSA: {(found.stdout + found.stderr).strip().splitlines()[-1:]}")
