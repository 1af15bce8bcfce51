"""The tour of a first visit: three steps, by pointer, keyboard and screen reader, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from console_page import Served, Visitor, browsers, devices_and_schemes, needs_axe


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("tour") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(packaged_speech: Path) -> Iterator[Any]:
    with browsers() as launch:
        yield launch(packaged_speech / "beckett.wav")


@pytest.fixture
def first(browser: Any, served: Served) -> Iterator[Callable[..., Visitor]]:
    made: list[Visitor] = []

    def come(**context: Any) -> Visitor:
        made.append(Visitor(browser, first=True, **context))
        made[-1].page.goto(served.url)
        made[-1].until("dialog.tour[open]")
        return made[-1]

    yield come
    for visitor in made:
        visitor.expect_calm()
        visitor.context.close()


def title(me: Visitor) -> str:
    return me.page.inner_text("#tour-title")


def test_three_steps_by_keyboard(first):
    me = first()
    assert me.page.inner_text("#tour-place") == "Step 1 of 3"
    assert title(me) == "Transcribe a recording"
    assert me.page.evaluate("document.activeElement.id") == "tour-title"
    assert me.page.evaluate("document.querySelector('.tour').getAttribute('aria-describedby')") == "tour-text"
    assert me.page.locator("#invite-open[data-tour]").count() == 1
    me.page.keyboard.press("Tab")
    me.page.keyboard.press("Tab")
    me.page.keyboard.press("Enter")
    assert title(me) == "Talk, and read along"
    assert me.page.locator("#invite-open[data-tour]").count() == 0
    me.page.click(".tour button:has-text('Next')")
    assert title(me) == "Have a text spoken"
    me.page.click(".tour button:has-text('Back')")
    assert me.page.inner_text("#tour-place") == "Step 2 of 3"
    me.page.click(".tour button:has-text('Next')")
    me.page.click(".tour button:has-text('Done')")
    me.holds("!document.querySelector('.tour, [data-tour]')")


def test_escape_skips_it_and_it_does_not_come_again(first):
    me = first()
    me.page.keyboard.press("Escape")
    me.holds("!document.querySelector('.tour')")
    me.page.reload()
    me.ready()
    assert me.page.locator(".tour").count() == 0
    assert me.page.evaluate("document.body.dataset.mode") == "idle", "Space and Escape were the tour's"


def test_the_help_shows_it_again_and_gives_the_focus_back(first):
    me = first()
    me.page.click(".tour button:has-text('Skip')")
    me.page.focus("#keys")
    me.page.keyboard.press("Enter")
    me.page.click("#tour")
    me.until("dialog.tour[open]")
    assert me.page.locator("#keys-dialog[open]").count() == 0
    me.page.keyboard.press("Escape")
    me.holds("document.activeElement.id === 'keys'")


def test_nothing_moves_for_who_asks_for_calm(first):
    me = first(reduced_motion="reduce")
    assert me.page.evaluate("getComputedStyle(document.querySelector('.tour')).animationDuration") == "0.001s"


@needs_axe
@devices_and_schemes
def test_axe_finds_nothing_serious(first, device, scheme):
    me = first(color_scheme=scheme, **device)
    me.expect_accessible("the tour")
    me.page.click(".tour button:has-text('Next')")
    me.page.click(".tour button:has-text('Next')")
    me.expect_accessible("its last step")
