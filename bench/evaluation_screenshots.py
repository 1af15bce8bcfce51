"""The pictures of docs/evaluation.md, taken of a report and of the page /models of a server.

    asr-serve eval report --store evaluations.sqlite --html report.html
    asr-serve serve --set evaluations=evaluations.sqlite &
    python bench/evaluation_screenshots.py --report report.html --url http://127.0.0.1:8000

Needs playwright and a Chromium. A server with admin keys: --key.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import ViewportSize, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
PICTURES: tuple[tuple[str, ViewportSize, Literal["light", "dark"], str], ...] = (
    ("", DESKTOP, "light", ""),
    ("-dark", DESKTOP, "dark", ""),
    ("-phone", PHONE, "light", "#run"),
)
"""End of the name, window, colours, and the element to which it is scrolled."""
LARGEST_BYTES = 150_000
LONGEST_WAIT_MS = 120_000


def keep(page: Any, path: Path) -> None:
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size} bytes")
    if path.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{path} is larger than {LARGEST_BYTES} bytes")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--report", type=Path)
    asked.add_argument("--url", help="of the server, whose page /models is taken")
    asked.add_argument("--key", default="", help="key of an administrator of that server")
    asked.add_argument("--out", type=Path, default=IMAGES)
    asked.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    given = asked.parse_args()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        pages = [("evaluation", given.report.resolve().as_uri())] if given.report else []
        pages += [("models", f"{given.url}/models")] if given.url else []
        for name, address in pages:
            for suffix, viewport, scheme, to in PICTURES:
                page = browser.new_context(viewport=viewport, color_scheme=scheme, locale="en-GB").new_page()
                page.set_default_timeout(LONGEST_WAIT_MS)
                if given.key:
                    page.add_init_script(f"sessionStorage.setItem('asr-serve.key', {json.dumps(given.key)})")
                page.goto(address, wait_until="networkidle")
                page.locator("details summary").first.wait_for()
                if to:
                    page.locator("details summary").first.click()
                    page.locator(".words").wait_for()
                    page.locator("audio").wait_for()
                    page.evaluate("to => document.querySelector(to).closest('.controls').scrollIntoView()", to)
                keep(page, given.out / f"{name}{suffix}.png")
                page.context.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
