"""The page that speaks, as its visitors have it: the real server with a real voice, and a Chromium that plays."""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from case_tiers import exhaustive_after
from console_page import KEY, Served, Visitor, browsers, needs_axe

pytest.importorskip("hibari", reason="hibari-tts is not installed: pip install hibari-tts")

LONG = " ".join(f"This is sentence number {n}, and there are many more of its kind to come." for n in range(1, 60))
"""Minutes. The page takes half a minute more than it has played, so the answer is not over when that begins."""
WATCH = """() => {
  window.seen = { contexts: [], answered: false, loudest: 0, before: 0, heardS: 0, words: new Set() };
  const Own = window.AudioContext;
  window.AudioContext = class extends Own {
    constructor(...given) {
      super(...given);
      seen.contexts.push(this);
    }
    createAnalyser() {
      const made = super.createAnalyser();
      const levels = new Float32Array(made.fftSize);
      const look = () => {
        if (this.state === "closed") return;
        made.getFloatTimeDomainData(levels);
        const loud = Math.max(...levels.map(Math.abs));
        seen.loudest = Math.max(seen.loudest, loud);
        if (loud > 0.02 && !seen.answered) [seen.before, seen.heardS] = [seen.before + 1, this.currentTime];
        const now = document.querySelector("#caption [data-now]");
        if (now) seen.words.add(now.textContent);
        requestAnimationFrame(look);
      };
      look();
      return made;
    }
  };
  const ask = window.fetch.bind(window);
  window.fetch = async (...given) => {
    const answer = await ask(...given);
    if (!String(given[0]).endsWith("v1/audio/speech") || !answer.body) return answer;
    const over = new TransformStream({ flush: () => void (seen.answered = true) });
    return new Response(answer.body.pipeThrough(over), { status: answer.status, headers: answer.headers });
  };
}"""
"""What sounds, and whether the answer was over by then."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("speaks") / "log", "--api-key", KEY, voice="hibari")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Any]]:
    with browsers() as found:
        yield found


@pytest.fixture
def me(launch: Callable[..., Any], served: Served, packaged_speech: Path) -> Iterator[Visitor]:
    """At the page, with a key."""
    visitor = Visitor(launch(packaged_speech / "beckett.wav"))
    visitor.page.add_init_script(f"sessionStorage.setItem('asr-serve.key', '{KEY}'); ({WATCH})()")
    visitor.page.goto(f"{served.url}/speak")
    visitor.page.wait_for_selector("#voice-list input[value=heart]", state="attached")
    yield visitor
    visitor.context.close()


def test_it_plays_as_it_comes(me):
    me.page.fill("#text", LONG)
    assert f"{len(LONG)} characters" in me.page.inner_text("#count")
    me.page.click("#primary")
    me.mode("speaking")
    me.holds("seen.before > 20 && seen.heardS > 2")  # sound for seconds, and the answer goes on
    assert me.page.evaluate("seen.answered") is False
    assert me.page.evaluate("seen.loudest") > 0.05
    assert me.page.evaluate("seen.contexts[0].state") == "running"
    me.holds("document.querySelector('#clock').textContent !== '0:00'")
    me.holds("seen.words.has('sentence')")
    assert me.page.inner_text("#first").endswith("s")
    me.page.keyboard.press("Escape")
    me.mode("idle")
    assert me.page.evaluate("seen.contexts[0].state") == "closed"
    me.holds("document.querySelector('#told').textContent === 'Stopped'")
    me.expect_calm()


def test_it_ends_by_itself(me):
    me.page.fill("#text", "Ever tried. No matter.")
    me.page.keyboard.press("Control+Enter")
    me.mode("speaking")
    me.mode("idle")
    me.holds("document.querySelector('#told').textContent === 'All has been said'")
    assert me.page.evaluate("seen.answered") is True
    assert {"Ever", "tried.", "No", "matter."} >= set(me.page.evaluate("[...seen.words]")) != set()
    me.expect_calm()


def test_a_sample_is_fetched_once_and_stops_what_sounds(me):
    asked = []
    me.page.on("request", lambda request: asked.append(request.url) if "audio/speech" in request.url else None)
    me.page.fill("#text", LONG)
    me.page.click("#primary")
    me.mode("speaking")
    sample = me.page.locator("[data-sample=heart]")
    sample.click()
    me.until("[data-sample=heart][aria-pressed=true]")
    me.mode("speaking")
    me.holds("seen.contexts.filter(({ state }) => state !== 'closed').length === 1")
    me.mode("idle")
    assert len(asked) == 2
    sample.click()
    me.mode("speaking")
    sample.click()  # pressed again: it stops
    me.until("[data-sample=heart][aria-pressed=false]")
    me.mode("idle")
    assert len(asked) == 2, "heard before: from the page's memory"
    me.expect_calm()


def test_a_file_of_it(me, tmp_path):
    me.page.fill("#text", "It was the best of times.")
    with me.page.expect_download() as coming:
        me.page.click("#download")
    assert coming.value.suggested_filename == "speech.wav"
    coming.value.save_as(tmp_path / "speech.wav")
    head = (tmp_path / "speech.wav").read_bytes()[:4]
    assert head == b"RIFF"
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert file.getframerate() == 24_000
    me.mode("idle")
    me.expect_calm()


def test_a_sample_in_place_of_a_download(me):
    me.page.fill("#text", LONG)
    me.page.click("#download")
    me.mode("fetching")
    me.page.click("[data-sample=heart]")
    me.until(".toast:has-text('Nothing was kept')")
    me.mode("speaking")
    me.page.keyboard.press("Escape")
    me.mode("idle")
    me.until("[data-sample=heart][aria-pressed=false]")
    assert me.page.evaluate("seen.contexts.every(({ state }) => state === 'closed')")
    me.expect_calm()


def test_what_cannot_be_said_is_told(me):
    me.page.fill("#text", "Привет")
    me.page.click("#primary")
    me.until("#banner-text:has-text('CYRILLIC')")
    me.mode("idle")
    me.page.fill("#text", "<speak>\n<b>x</b></speak>")
    me.page.check("#ssml")
    me.page.click("#primary")
    me.until("#banner-text:has-text('Line 2')")
    assert me.page.inner_text("#text-problem").split() == ["Line", "2,", "column", "1:", "<b>x</b></speak>", "↑"]
    assert me.page.get_attribute("#text", "aria-invalid") == "true"
    marked = "(text => text.value.slice(text.selectionStart, text.selectionEnd))(document.activeElement)"
    assert me.page.evaluate(marked) == "<b>"
    me.page.fill("#text", '<speak>😀 naïve <break time="1h"/></speak>')
    assert me.page.inner_text("#text-problem") == ""
    me.page.click("#primary")
    me.until("#text-problem:has-text('Line 1, column 16')")
    assert me.page.evaluate(marked) == '<break time="1h"/>'
    me.page.fill("#text", "")
    me.page.uncheck("#ssml")
    me.page.click("#primary")
    me.until("#banner-text:has-text('The text is empty')")
    me.page.click("#banner-close")
    assert me.page.locator("#banner").is_hidden()
    me.expect_calm("400")


@needs_axe
@pytest.mark.parametrize(
    ("scheme", "width"), exhaustive_after(2, [("light", 1280), ("dark", 320), ("dark", 1280), ("light", 320)])
)
def test_axe_finds_nothing_serious(me, scheme, width):
    me.page.emulate_media(color_scheme=scheme)
    me.page.set_viewport_size({"width": width, "height": 740})
    me.expect_accessible("the page that speaks")
    if width == 320:
        me.page.click("#settings")
    me.page.click("#ssml-help")
    me.expect_accessible("examples of SSML")


def test_by_keyboard_alone(me):
    order = []
    me.page.focus("#text")
    for _ in range(8):
        order.append(me.page.evaluate("document.activeElement.id || document.activeElement.value || 'sample'"))
        me.page.keyboard.press("Tab")
    # Of one model there is no choice.
    assert order == ["text", "heart", "sample", "clone", "speed", "pitch", "ssml", "ssml-help"]


def test_every_example_of_ssml_is_inserted_and_read(me):
    me.page.fill("#text", "Before & after")
    me.page.evaluate("document.querySelector('#text').setSelectionRange(7, 7)")
    me.page.click("#ssml-help")
    count = me.page.locator("#examples li").count()
    assert count >= 9
    for number in range(count):
        if number:
            me.page.click("#ssml-help")
        me.page.locator("#examples button").nth(number).click()
        assert me.page.evaluate("document.activeElement.id") == "text"
    assert me.page.is_checked("#ssml")
    text = me.page.input_value("#text")
    assert text.startswith("<speak>\nBefore ")
    assert text.endswith("&amp; after\n</speak>")
    assert all(code in text for code in me.page.locator("#examples code").all_text_contents())
    with me.page.expect_download():
        me.page.click("#download")
    me.mode("idle")
    assert me.page.inner_text("#text-problem") == ""
    me.expect_calm()
