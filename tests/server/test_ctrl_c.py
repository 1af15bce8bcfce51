"""ctrl-C in a terminal, which every process in the foreground hears: an orderly end, and nothing said of it."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from children import Child
from raw_http import Raw, file_head

WAIT_S = 180.0
ROUTE = "/v1/audio/transcriptions"
SERVE = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"  # in its own session: who types is there
    "from asr_serve.api.cli import main; main()"
)


class Terminal:
    """A terminal in which a server runs."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._screen, theirs = pty.openpty()
        command = [sys.executable, "-c", SERVE, "serve", "--port", str(self.port), "--voice", "none"]
        command += ["--set", "engine_threads=1"]
        self.process = Child(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.shown = ""

    def until(self, words: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while words not in self.shown:
            assert time.monotonic() < end_s, self.shown
            assert self._read() or words in self.shown, self.shown

    def engine(self) -> psutil.Process:
        end_s = time.monotonic() + WAIT_S
        while not (found := psutil.Process(self.process.pid).children()):
            assert time.monotonic() < end_s, self.shown
            self._read(wait_s=0.01)
        return found[0]

    def ctrl_c(self) -> None:
        os.write(self._screen, b"\x03")

    def code(self) -> int:
        """Its exit code; what it said last is in `shown`."""
        while self._read():
            pass
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._screen)

    def _read(self, wait_s: float = 1.0) -> bool:
        if not select.select([self._screen], [], [], wait_s)[0]:
            return True
        try:
            piece = os.read(self._screen, 65_536)
        except OSError:  # how Linux tells the end of a terminal
            piece = b""
        self.shown += piece.decode(errors="replace")
        return bool(piece)


@pytest.fixture
def terminal(packaged_speech: object) -> Iterator[Terminal]:
    started = Terminal()
    yield started
    started.close()


def expect_quiet(terminal: Terminal) -> None:
    assert not re.search("Traceback|panicked|unwind|Exception|KeyboardInterrupt", terminal.shown), terminal.shown


@pytest.mark.slow
def test_while_the_model_loads(terminal):
    engine = terminal.engine()
    terminal.ctrl_c()
    assert terminal.code() == 0
    expect_quiet(terminal)
    engine.wait(WAIT_S)


@pytest.mark.slow
def test_after_work(terminal, beckett):
    terminal.until("stop with ctrl-C")
    engine = terminal.engine()
    with httpx.Client(base_url=f"http://127.0.0.1:{terminal.port}", timeout=WAIT_S) as http:
        assert http.post(ROUTE, files={"file": beckett.read_bytes()}).status_code == 200
        terminal.ctrl_c()
        assert terminal.code() == 0  # though a connection is kept
    expect_quiet(terminal)
    engine.wait(WAIT_S)


@pytest.mark.slow
def test_twice_does_not_wait(terminal):
    terminal.until("stop with ctrl-C")
    engine = terminal.engine()
    with Raw(terminal.port) as raw:
        raw.head(ROUTE)
        raw.chunk(file_head())
        while httpx.get(f"http://127.0.0.1:{terminal.port}/metrics").text.count(f'in_flight{{route="{ROUTE}"}} 1') < 1:
            time.sleep(0.02)
        terminal.ctrl_c()
        terminal.until("1 requests are still answered")
        terminal.ctrl_c()
        assert terminal.code() == 1
    expect_quiet(terminal)
    engine.wait(WAIT_S)
