"""The pictures of docs/evaluation.md, taken of a report.

    asr-serve eval report --store evaluations.sqlite --html report.html
    python bench/evaluation_screenshots.py --report report.html

Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import ViewportSize, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
PICTURES: tuple[tuple[str, ViewportSize, Literal["light", "dark"], str], ...] = (
    ("evaluation", DESKTOP, "light", ""),
    ("evaluation-dark", DESKTOP, "dark", ""),
    ("evaluation-phone", PHONE, "light", "#run"),
)
LARGEST_BYTES = 150_000


def keep(page: Any, path: Path) -> None:
    page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size} bytes")
    if path.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{path} is larger than {LARGEST_BYTES} bytes")


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--report", type=Path, required=True)
    asked.add_argument("--out", type=Path, default=IMAGES)
    asked.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    given = asked.parse_args()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        for name, viewport, scheme, to in PICTURES:
            page = browser.new_context(viewport=viewport, color_scheme=scheme, locale="en-GB").new_page()
            page.goto(given.report.resolve().as_uri())
            if to:
                page.locator("details summary").first.click()
                page.locator(".words").wait_for()
                page.evaluate("to => document.querySelector(to).closest('.controls').scrollIntoView()", to)
            keep(page, given.out / f"{name}.png")
            page.context.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
