"""The report of an evaluation, read by a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stored_evaluations import EVIL, store_evaluations
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.evaluation.store import EvaluationStore
from asr_serve_tools.evaluate.evaluation_report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

AXE = Path(__file__).resolve().parents[3] / "console" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EvaluationStore]:
    with EvaluationStore(store_evaluations(tmp_path_factory.mktemp("clips"))) as store:
        yield store


@pytest.fixture(scope="module")
def page_file(stored: EvaluationStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    command = ["eval", "report", "--store", str(stored.path), "--html", str(path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert "3 runs" in done.stderr
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("no Chromium: apt install chromium")
    with playwright.sync_playwright() as engine:
        chromium = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    """The report, at the width of a phone. It asks for nothing, and nothing in it goes wrong."""
    made = browser.new_page(viewport={"width": 390, "height": 800})
    requests, errors = list[str](), list[str]()
    made.on("request", lambda request: requests.append(request.url))
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    made.goto(page_file.as_uri())
    yield made
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    made.close()


def systems(page: Any) -> list[str]:
    found: list[str] = page.locator("#runs tbody th").all_inner_texts()
    return found


def test_tables_sort_by_keyboard(page: Any) -> None:
    assert systems(page) == ["slow", "fast", "fast"]  # by errors, what was not measured last
    button = page.locator("#runs thead button", has_text="RTFx")
    for order, direction in ((["slow", "fast", "fast"], "ascending"), (["fast", "slow", "fast"], "descending")):
        button.focus()
        page.keyboard.press("Enter")
        assert systems(page) == order
        assert page.locator("#runs th[aria-sort]", has_text="RTFx").get_attribute("aria-sort") == direction
        assert page.evaluate("document.activeElement.textContent") == "RTFx"  # it is where it was
    page.locator("#system").select_option("slow")
    assert systems(page) == ["slow"]
    assert page.locator("#run option").all_inner_texts() == ["slow, calls"]
    assert page.locator("#plot .point").count() == 1


def test_differences_of_a_clip_that_plays(page: Any) -> None:
    page.locator("#run").select_option(label="fast, calls")
    clip = page.locator("details", has_text="one.wav")
    clip.locator("summary").focus()
    page.keyboard.press("Enter")
    assert clip.locator("summary").inner_text() == "3/7 wrong: one.wav"
    marked = clip.locator(".words").evaluate(
        "p => [...p.querySelectorAll('del, ins')].map(e => [e.tagName, e.lastChild.textContent])"
    )
    assert marked == [["DEL", "cat"], ["INS", "dog"], ["INS", "big"], ["DEL", "today"]]
    assert clip.locator(".changed").count() == 1  # one word in place of another
    length_s = clip.locator("audio").evaluate(
        "a => new Promise((done, fail) => { a.onended = () => done(a.currentTime); a.onerror = fail; a.play() })"
    )
    assert length_s == pytest.approx(0.5, abs=0.1)


def test_what_was_heard_is_text(page: Any) -> None:
    page.locator("#run").select_option(label="fast, calls")
    clip = page.locator("details", has_text="three.wav")
    clip.locator("summary").click()
    clip.locator(".words").wait_for()
    assert EVIL in clip.inner_text()
    page.locator("#run").select_option(label="fast, <b>other</b>")
    page.locator("details summary").click()
    page.get_by_text("it <i>broke</i>").wait_for()
    assert page.evaluate("window.evil") is None
    assert page.locator("main img, main b, main i").count() == 0


def test_the_page_fits_a_phone_and_shows_what_is_left_out(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("#plot .point").count() == 2
    assert page.locator("#plot .point").first.get_attribute("aria-label").count("x real time") == 1
    assert "1 of 3 runs" in page.locator("#plot-note").inner_text()
    assert page.locator("#left-out").inner_text() == "1 clips have no audio, because their files are gone."


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm --prefix console ci")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.locator("details summary").first.click()
    page.locator("details .soft").first.wait_for()
    page.evaluate(AXE.read_text())
    found = page.evaluate("() => axe.run({resultTypes: ['violations']})")["violations"]
    assert [(each["id"], node["html"]) for each in found for node in each["nodes"] if each["impact"] != "minor"] == []


def test_audio_beyond_the_bound_is_named_by_its_path(stored: EvaluationStore, tmp_path: Path) -> None:
    size = Path(stored.path.parent, "one.wav").stat().st_size
    message = write_report(stored, tmp_path / "r.html", size)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "2 of 4 clips are played from their files" in message
    assert len(re.findall(r"data:audio/wav;base64", text)) == 1
    # Names that the page's data has: escaped, so that no clip's name is read as HTML either.
    assert f"{stored.path.parent.name}/two.wav" in text
    assert "<script>window.evil" not in text


def test_neither_page_nor_json() -> None:
    done = CliRunner().invoke(app, ["eval", "report", "--store", "none.sqlite"])
    assert (done.exit_code, "--html" in done.stderr) == (2, True)
