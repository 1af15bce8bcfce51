"""What the console's tests stand on: a server as it is run, a connection to cut, a browser that hears a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from children import MODULE_LIMIT_S, Child
from websockets.sync.client import connect

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
KEY = "k-console"
ROUTE = "/v1/audio/transcriptions"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
AXE = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
needs_axe = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm --prefix console ci")
devices_and_schemes = pytest.mark.parametrize(
    ("device", "scheme"),
    [
        pytest.param({}, "light", id="desktop-light"),
        pytest.param(PHONE, "dark", id="phone-dark", marks=pytest.mark.slow),
        pytest.param({}, "dark", id="desktop-dark", marks=pytest.mark.exhaustive),
        pytest.param(PHONE, "light", id="phone-light", marks=pytest.mark.exhaustive),
    ],
)
ASKED_LATE = """() => {
  const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  window.tracks = [];
  navigator.mediaDevices.getUserMedia = (...given) =>
    new Promise((resolve, reject) => {
      window.allow = async () => {
        const stream = await ask(...given);
        tracks.push(...stream.getTracks());
        resolve(stream);
      };
      window.refuse = () => reject(new DOMException("no", "NotAllowedError"));
    });
}"""
"""The browser asks whether the page may use the microphone, and nobody answers until the test does."""
MICROPHONE_OFF = "tracks.length > 0 && tracks.every(({ readyState }) => readyState === 'ended')"
ELSEWHERE = "console.test"
"""A name that the browser takes for this machine, and not for a safe one."""


class Served:
    """`asr-serve serve` in a process of its own."""

    def __init__(self, log: Path, *flags: str, port: int = 0, voice: str = "none", auto_model: str = "none") -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-c",
            "from asr_serve.api.cli import main; main()",
            "serve",
            "--port",
            str(self.port),
            "--set",
            "engine_threads=1",
            "--set",
            "engine.prefix_bytes=0",  # a recording that comes again is worked for again
            "--set",
            f"auto_model={auto_model}",
            "--voice",
            voice,
        ]
        with log.open("w") as out:
            self.process = Child(
                [*command, *flags],
                stdout=out,
                stderr=out,
                limit_s=MODULE_LIMIT_S,
                env={name: value for name, value in os.environ.items() if not name.startswith("ASR_SERVE_P")},
            )
        end_s = time.monotonic() + WAIT_S
        while not self._ready():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)


class Cable:
    """A TCP proxy: `cut` breaks every connection and lets none in until `mend`."""

    def __init__(self, port: int) -> None:
        self._to, self._whole = port, True
        self._ends: set[socket.socket] = set()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        self._whole = False
        for end in list(self._ends):
            self._drop(end)

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            if not self._whole:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to))
            self._ends |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        self._drop(source)
        self._drop(sink)

    def _drop(self, end: socket.socket) -> None:
        self._ends.discard(end)
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


@contextmanager
def browsers() -> Iterator[Callable[[Path, bool], Any]]:
    """`launch(speech, allow)`: a browser whose microphone plays a WAV once to whoever opens it. `allow` False: who is
    asked for the microphone says no. One browser for all who ask for the same: it costs seconds of a core to start, and
    its visitors share nothing."""
    if not CHROMIUM:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as play:
        opened: dict[tuple[Path, bool], Any] = {}

        def launch(speech: Path, allow: bool = True) -> Any:
            if (speech, allow) in opened:
                return opened[speech, allow]
            flags = [
                "--no-sandbox",
                "--disable-gpu",
                "--use-fake-device-for-media-stream",
                f"--use-file-for-fake-audio-capture={speech}%noloop",
                f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
                *(["--use-fake-ui-for-media-stream"] if allow else []),
            ]
            opened[speech, allow] = play.chromium.launch(executable_path=CHROMIUM, args=flags)
            return opened[speech, allow]

        yield launch
        for browser in opened.values():
            browser.close()


class Visitor:
    """Somebody at a page. What the browser complains of is kept, and has to be expected by the test."""

    def __init__(self, browser: Any, *, first: bool = False, **context: Any) -> None:
        """`first`: they were never here, and are shown around."""
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
        self.context.set_default_timeout(1_000 * WAIT_S)
        if not first:
            self.context.add_init_script("try { localStorage.setItem('asr-serve.tour', 'seen') } catch {}")
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda failure: self.complaints.append(str(failure)))

    def expect_calm(self, *expected: str) -> None:
        """No complaint but those that hold one of these words."""
        left = [said for said in self.complaints if not any(word in said for word in expected)]
        assert not left, left

    def expect_accessible(self, where: str) -> None:
        """Axe finds nothing to mend but minor things, and nothing is wider than the window."""
        self.page.wait_for_timeout(250)  # transitions of colours end
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("() => axe.run({resultTypes: ['violations']})")["violations"]
        bad = [(each["id"], node["html"]) for each in found for node in each["nodes"] if each["impact"] != "minor"]
        assert not bad, (where, bad)
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), where

    def until(self, selector: str, limit_s: float = WAIT_S) -> Any:
        return self.page.wait_for_selector(selector, timeout=1_000 * limit_s)

    def holds(self, expression: str) -> None:
        """Soon. Not `wait_for_function`: the page's content policy stops what that evaluates later."""
        end_s = time.monotonic() + WAIT_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < end_s, expression
            self.page.wait_for_timeout(50)

    def mode(self, name: str) -> None:
        self.until(f'body[data-mode="{name}"]')

    def talked(self, seconds: int) -> None:
        """The microphone has given so much."""
        self.holds(
            f"document.querySelector('#clock').textContent.split(':').reduce((sum, n) => 60 * sum + +n, 0) >= {seconds}"
        )

    def ready(self) -> None:
        """The server has told what it can hear with."""
        self.page.wait_for_selector("#model option[value=moonshine-tiny-en]", state="attached")

    def hear(self, recording: Path) -> None:
        """A file is transcribed, and its words are there."""
        self.page.set_input_files("#file", recording)
        self.until("#segments .said")
        self.mode("idle")

    def text(self) -> str:
        """All final segments."""
        return " ".join(self.page.locator("#segments .said").all_inner_texts())


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def told_by_stream(url: str, recording: Path) -> str:
    """What /v1/stream makes of a WAV that is sent at once."""
    with wave.open(str(recording)) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    said: list[str] = []
    with connect(f"{url.replace('http', 'ws')}/v1/stream?rate={rate_hz}", max_size=None) as line:
        sender = threading.Thread(target=lambda: _send(line, pcm))
        sender.start()
        for message in line:
            event = json.loads(message)
            assert event["type"] != "error", event
            if event["type"] == "segment":
                said.append(event["text"])
        sender.join(WAIT_S)
    return " ".join(said)


def _send(line: Any, pcm: bytes) -> None:
    for at in range(0, len(pcm), 32_000):
        line.send(pcm[at : at + 32_000])
    line.send('{"type":"end"}')
