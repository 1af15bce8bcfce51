"""FunASR's html5 page, unmodified, in Chromium: files, and a microphone in each mode. The page is no part of this
repository: ASR_SERVE_FUNASR names a checkout of FunASR's."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import WAIT_S, Running, eventually

from asr_serve_tools.evaluate.wer import wer

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
CHROMIUM = shutil.which("chromium")
VARIABLE = "ASR_SERVE_FUNASR"


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Writes no line for each request."""


@pytest.fixture(scope="module")
def page_url() -> Iterator[str]:
    folder = Path(os.environ.get(VARIABLE, "")) / "runtime/html5/static"
    if VARIABLE not in os.environ or not folder.is_dir():
        pytest.skip(f"{VARIABLE} names no checkout of FunASR: its page is no part of the repository")
    handler = functools.partial(_Files, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{files.server_address[1]}"
        files.shutdown()


@pytest.fixture(scope="module")
def page_server(serve: Callable[..., Running], page_url: str) -> Running:
    return serve(cors_origins=(page_url,))


@pytest.fixture
def page(page_url: str, page_server: Running, beckett: Path) -> Iterator[Any]:
    """The page with the server's address in it, and a microphone that plays beckett.wav once."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    flags = ["--no-sandbox", "--disable-gpu", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    flags.append(f"--use-file-for-fake-audio-capture={beckett}%noloop")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        opened = browser.new_page()
        opened.set_default_timeout(1_000 * WAIT_S)
        opened.goto(f"{page_url}/index.html")
        opened.fill("#wssip", page_server.url.replace("http", "ws", 1))
        yield opened
        browser.close()
    page_server.expect_empty()


def shown(page: Any) -> str:
    """Text of the page, without the times that it writes before each word."""
    lines = page.input_value("#varArea").splitlines()
    return " ".join(line.rpartition(":")[2] for line in lines)


def test_a_file(page, beckett):
    page.check("input[name=recoder_mode][value=file]")
    with page.expect_file_chooser() as chosen:
        page.click("#upfile")
    chosen.value.set_files(beckett)
    page.wait_for_timeout(500)  # the page reads it
    page.click("#btnConnect")
    page.wait_for_selector("#btnConnect:not([disabled])")
    assert wer([BECKETT], [shown(page)]).errors == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["2pass", "online", "offline"])
def test_the_microphone(page, mode):
    """Its user says Chinese hotwords unless he takes them out, which an English model leaves out."""
    page.check(f'input[name=asr_mode][value="{mode}"]')
    page.click("#btnConnect")
    page.click("#btnStart")
    page.wait_for_timeout(11_000)  # the recording has 10 s
    page.click("#btnStop")
    eventually(lambda: (page.wait_for_timeout(100), wer([BECKETT], [shown(page)]).errors <= 2)[1])
