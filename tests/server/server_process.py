"""Servers as an operator starts them, by the command, in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from children import Child

WAIT_S = 120.0
"""Longer than anything here takes; only a hang reaches it."""


class Serving:
    """`asr-serve serve` with these flags, on ports of its own choice. `within`: a command that runs a command,
    like `ip netns exec NAME`."""

    def __init__(self, log: Path, *flags: str, within: Sequence[str] = ()) -> None:
        self.log, self.within = log, within
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ASR_SERVE_")}
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [*within, sys.executable, "-c", "from asr_serve.api.cli import main; main()", "serve", *flags]
        settings = ["--voice=none", "--device=cpu", "--dtype=fp32", "--set=engine_threads=1", "--set=turn_model=none"]
        with log.open("w") as out:
            self.process = Child([*command, *settings], stderr=out, stdout=out, env=environ)

    def said(self, pattern: str) -> re.Match[str]:
        """Wait until its log has that."""
        end_s = time.monotonic() + WAIT_S
        while (found := re.search(pattern, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end_s, f"never said {pattern}:\n{self.log.read_text()}"
            time.sleep(0.05)
        return found

    @property
    def url(self) -> str:
        return self.said(r"health\s+(http://\S+)/ready")[1]

    @property
    def encodes_at(self) -> str:
        return self.said(r"for others at (\S+:\d+)")[1]

    def engine(self) -> psutil.Process:
        """Its engine process."""
        return next(
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "asr_serve.engine.process.main" in " ".join(child.cmdline())
        )

    def kill(self) -> None:
        """All of it, at once: the server first, that nobody starts another engine."""
        everything = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for each in everything:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(WAIT_S)
        psutil.wait_procs(everything[1:], WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
