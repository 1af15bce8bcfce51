"""The pictures of docs/console.md, taken of a server that runs.

    ASR_SERVE_ADMIN_KEYS=k-admin asr-serve serve --set more_models=vosk-small-en &
    python console/screenshots.py --speech two_cities.wav --dialogue endgame_nagg_nell.wav

Needs playwright and a Chromium. The speech is half a minute or longer: it is spoken into the page's microphone. In
the dialogue two people speak. `--only rich` takes one picture.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
DESKTOP = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 1040}
PHONE = {"width": 390, "height": 844}
SPOKEN_MS = 28_000
PLAYED_MS = 4_000
WATCHED_MS = 50_000
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness. It was the epoch of belief, it was the epoch of incredulity."
)
DONE = 'body[data-mode="idle"] #segments .said'
LARGEST_BYTES = 170_000
ADMIN_KEY = "k-admin"
"""The server's, for the picture of cloning."""


def speaking(page: Any, url: str) -> None:
    page.goto(url)
    page.keyboard.press("Space")
    page.wait_for_timeout(SPOKEN_MS)


def calling(page: Any, url: str) -> None:
    """Over WebRTC; what it measures is scrolled into view."""
    page.goto(url)
    page.wait_for_selector("#model option[value=moonshine-tiny-en]", state="attached")
    page.select_option("#transport", "webrtc")
    page.keyboard.press("Space")
    page.locator("#loss-room").scroll_into_view_if_needed()
    page.wait_for_timeout(SPOKEN_MS // 2)


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
    page.wait_for_selector("#voice-list input", state="attached")
    page.fill("#text", TEXT)
    page.click("#primary")
    page.wait_for_selector('body[data-mode="speaking"]')
    page.wait_for_timeout(PLAYED_MS)


def conversing(page: Any, url: str, dialogue: Path) -> None:
    """Two speakers with their names, a word that is heard, and what is known of it."""
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.locator("label:has(#want-speakers)").click()
    page.fill("#hotwords", "Nagg, Nell\nHamm:2")
    page.set_input_files("#file", dialogue)
    page.wait_for_selector(DONE)
    page.wait_for_selector("button.stamp")
    for at, name in enumerate(("Nagg", "Nell")):
        page.locator("#voices button").nth(at).click()
        page.keyboard.type(name)
        page.keyboard.press("Enter")
    page.locator(".word", has_text="resource").first.click()
    page.wait_for_selector(".word.now")
    page.click("#primary")  # paused, where the word is still marked
    page.locator(".word.now").hover()
    page.wait_for_selector("#word-tip:not([hidden])")


def batching(page: Any, url: str, speech: Path) -> None:
    """One batch that is done, its results open, and one that runs."""
    page.goto(f"{url}/batches")
    page.wait_for_selector("#choose-files")
    for name, count in (("Interviews, week 47", 3), ("Archive 1998", 60)):
        with tempfile.TemporaryDirectory() as folder:
            for n in range(1, count + 1):
                shutil.copy(speech, Path(folder) / f"{name.split(',')[0].split()[0].lower()}-{n:02}.wav")
            page.set_input_files("#files", sorted(Path(folder).iterdir()))
            page.fill("#name", name)
            page.click("#submit")
            page.wait_for_selector("#form", state="hidden")  # it is submitted, and the first in the list
        if count == 3:
            page.wait_for_selector(".batch:first-child .pill[data-state=completed]", timeout=120_000)
            page.click(".batch:first-child summary")
            page.wait_for_selector(".answers li")
    page.wait_for_selector(".batch .pill[data-state=in_progress]")
    page.wait_for_timeout(2 * PLAYED_MS)
    page.evaluate("document.querySelectorAll('.toast').forEach((each) => each.remove())")
    page.evaluate("document.activeElement.blur()")


def searching(page: Any, url: str, *recordings: Path) -> None:
    """A history of some recordings, and a search in it."""
    page.goto(url)
    page.wait_for_selector("#model option[value=moonshine-tiny-en]", state="attached")
    page.evaluate("localStorage.setItem('asr-serve.history', 'on')")
    page.reload()
    page.wait_for_selector("#model option[value=moonshine-tiny-en]", state="attached")
    for recording in recordings:
        page.set_input_files("#file", recording)
        page.wait_for_selector(DONE)
    page.goto(f"{url}/history")
    page.wait_for_selector("#list .saved")
    page.fill("#query", "times")
    page.wait_for_selector("#list mark")


def sharing(page: Any, url: str, speech: Path) -> None:
    """The file that is shared, as its reader has it."""
    page.goto(url)
    page.wait_for_selector("#model option[value=moonshine-tiny-en]", state="attached")
    page.set_input_files("#file", speech)
    page.wait_for_selector(DONE)
    page.wait_for_selector("button.stamp")
    page.click("#share")
    page.check("#share-audio")
    with page.expect_download() as coming:
        page.click("#share-download")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / coming.value.suggested_filename
        coming.value.save_as(file)
        page.goto(file.as_uri())
        page.locator("button.time").nth(1).click()
        page.wait_for_selector("li.now")
        page.wait_for_timeout(PLAYED_MS // 2)


def limited(page: Any, url: str, key: str) -> None:
    page.goto(f"{url}/key")
    page.wait_for_selector("#state")
    if key:
        page.fill("#key-field", key)
        page.keyboard.press("Enter")
    page.wait_for_selector("#limits:not([hidden])")


def comparing(page: Any, url: str) -> None:
    """Two models with their differences; the demo clip has its text."""
    page.goto(f"{url}/compare")
    page.wait_for_selector("#model-b option:not([value='']):not([disabled])", state="attached")
    page.click("#demo")
    page.wait_for_selector("#primary:not([disabled])")
    page.click("#primary")
    page.wait_for_selector("#results:not([hidden])", timeout=120_000)
    page.evaluate("document.querySelector('#results').scrollIntoView()")


def cloning(page: Any, url: str) -> None:
    """The dialog in which somebody reads sentences aloud; one is being recorded."""
    page.add_init_script(f"sessionStorage.setItem('asr-serve.key', '{ADMIN_KEY}')")
    page.goto(f"{url}/speak")
    page.wait_for_selector("#voice-list input", state="attached")
    page.click("#clone")
    page.fill("#speaker", "Ada Lovelace")
    page.click("#read")
    page.wait_for_selector("#read[aria-pressed=true]")
    page.wait_for_timeout(PLAYED_MS)


def uploads(url: str, speech: Path, over: threading.Event) -> None:
    """Somebody else's recordings, so that there is something to draw."""
    while not over.wait(2):
        subprocess.run(
            ["curl", "-s", "-o", "/dev/null", f"{url}/v1/audio/transcriptions", "-F", f"file=@{speech}"], check=True
        )


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--url", default="http://127.0.0.1:8000")
    asked.add_argument("--speech", type=Path, required=True)
    asked.add_argument("--dialogue", type=Path, required=True)
    asked.add_argument("--key", default="", help="for the picture of the page of the key, of a server that has some")
    asked.add_argument("--only", help="the one picture to take, like rich")
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

        def page(viewport: dict[str, int], scheme: str = "light", *, first: bool = False) -> Any:
            phone = viewport is PHONE
            context = browser.new_context(
                viewport=viewport, color_scheme=scheme, has_touch=phone, is_mobile=phone, locale="en-GB"
            )
            if not first:
                context.add_init_script("try { localStorage.setItem('asr-serve.tour', 'seen') } catch {}")
            return context.new_page()

        def keep(shown: Any, name: str) -> None:
            path = given.out / f"console-{name}.png"
            shown.screenshot(path=path)
            print(f"{path}: {path.stat().st_size} bytes")
            if path.stat().st_size > LARGEST_BYTES:
                raise SystemExit(f"{path} is larger than {LARGEST_BYTES} bytes")
            shown.context.close()

        def wants(name: str) -> bool:
            return given.only in (None, name)

        if wants("desktop"):
            shown = page(DESKTOP)
            speaking(shown, given.url)
            keep(shown, "desktop")
        if wants("webrtc"):
            shown = page(DESKTOP)
            calling(shown, given.url)
            keep(shown, "webrtc")
        for name, viewport, scheme in (("phone", PHONE, "light"), ("dark", DESKTOP, "dark")):
            if wants(name):
                shown = page(viewport, scheme)
                playing(shown, given.url, given.speech)
                keep(shown, name)
        if wants("rich"):
            shown = page(DESKTOP)
            conversing(shown, given.url, given.dialogue)
            keep(shown, "rich")
        if wants("speak"):
            shown = page(DESKTOP)
            reading(shown, given.url)
            keep(shown, "speak")
        for name, viewport, scheme in (("batches", TALL, "light"), ("batches-phone", PHONE, "dark")):
            if wants(name):
                shown = page(viewport, scheme)
                batching(shown, given.url, given.speech)
                keep(shown, name)
        for name, viewport, scheme in (("history", DESKTOP, "light"), ("history-phone", PHONE, "dark")):
            if wants(name):
                shown = page(viewport, scheme)
                searching(shown, given.url, given.speech, given.dialogue)
                keep(shown, name)
        if wants("key"):
            shown = page(TALL, "dark")
            limited(shown, given.url, given.key)
            keep(shown, "key")
        if wants("shared"):
            shown = page(PHONE)
            sharing(shown, given.url, given.speech)
            keep(shown, "shared")
        for name, viewport, scheme in (
            ("compare", DESKTOP, "light"),
            ("compare-dark", DESKTOP, "dark"),
            ("compare-phone", PHONE, "light"),
        ):
            if wants(name):
                shown = page(viewport, scheme)
                comparing(shown, given.url)
                keep(shown, name)
        if wants("clone"):
            shown = page(DESKTOP)
            cloning(shown, given.url)
            keep(shown, "clone")
        if wants("tour"):
            shown = page(PHONE, first=True)
            shown.goto(given.url)
            shown.wait_for_selector("dialog.tour[open]")
            shown.wait_for_timeout(PLAYED_MS // 8)
            keep(shown, "tour")
        if wants("status"):
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
