"""The pictures of docs/console.md, taken of a server that runs.

    asr-serve serve &
    python console/screenshots.py --speech two_cities.wav

Needs playwright and a Chromium. The speech is half a minute or longer: it is spoken into the page's microphone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
SPOKEN_MS = 28_000
PLAYED_MS = 4_000
WATCHED_MS = 50_000
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness. It was the epoch of belief, it was the epoch of incredulity."
)
DONE = 'body[data-mode="idle"] #segments .said'
LARGEST_BYTES = 150_000


def speaking(page: Any, url: str) -> None:
    page.goto(url)
    page.keyboard.press("Space")
    page.wait_for_timeout(SPOKEN_MS)


def playing(page: Any, url: str, speech: Path) -> None:
    page.goto(url)
    page.set_input_files("#file", speech)
    page.wait_for_selector(DONE)
    page.wait_for_selector("button.stamp")
    page.click("button.stamp >> nth=-1")
    page.wait_for_timeout(PLAYED_MS)
    page.mouse.move(0, 0)


def reading(page: Any, url: str) -> None:
    page.goto(f"{url}/speak")
    page.wait_for_selector("#voice option:not([value=''])", state="attached")
    page.fill("#text", TEXT)
    page.click("#primary")
    page.wait_for_selector('body[data-mode="speaking"]')
    page.wait_for_timeout(PLAYED_MS)


def uploads(url: str, speech: Path, over: threading.Event) -> None:
    """Somebody else's recordings, so that there is something to draw."""
    while not over.wait(2):
        subprocess.run(
            ["curl", "-s", "-o", "/dev/null", f"{url}/v1/audio/transcriptions", "-F", f"file=@{speech}"],
            check=True,
        )


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--url", default="http://127.0.0.1:8000")
    asked.add_argument("--speech", type=Path, required=True)
    asked.add_argument("--out", type=Path, default=IMAGES)
    asked.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    given = asked.parse_args()
    flags = [
        "--no-sandbox",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={given.speech.resolve()}%noloop",
    ]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=given.chromium, args=flags)

        def page(viewport: dict[str, int], scheme: str = "light") -> Any:
            phone = viewport is PHONE
            return browser.new_context(
                viewport=viewport, color_scheme=scheme, has_touch=phone, is_mobile=phone, locale="en-GB"
            ).new_page()

        def keep(shown: Any, name: str) -> None:
            path = given.out / f"console-{name}.png"
            shown.screenshot(path=path)
            print(f"{path}: {path.stat().st_size} bytes")
            if path.stat().st_size > LARGEST_BYTES:
                raise SystemExit(f"{path} is larger than {LARGEST_BYTES} bytes")
            shown.context.close()

        desktop = page(DESKTOP)
        speaking(desktop, given.url)
        keep(desktop, "desktop")
        for name, viewport, scheme in (("phone", PHONE, "light"), ("dark", DESKTOP, "dark")):
            shown = page(viewport, scheme)
            playing(shown, given.url, given.speech)
            keep(shown, name)

        shown = page(DESKTOP)
        reading(shown, given.url)
        keep(shown, "speak")

        over = threading.Event()
        others = threading.Thread(target=uploads, args=(given.url, given.speech, over))
        others.start()
        status, caller = page(DESKTOP), page(DESKTOP)
        status.goto(f"{given.url}/status")
        caller.goto(given.url)
        caller.keyboard.press("Space")
        status.wait_for_timeout(WATCHED_MS)
        keep(status, "status")
        over.set()
        others.join()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
