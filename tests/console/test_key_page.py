"""The page of the API key as its visitors have it: real servers with and without keys, and a Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from console_page import KEY, Cable, Served, Visitor, browsers, devices_and_schemes, needs_axe

ADMIN_KEY = "k-admin"
COUNT_CHANGES = """(selector) => {
  window.changes = 0;
  const kinds = { attributes: true, childList: true, subtree: true };
  const count = (changed) => (window.changes += changed.length);
  new MutationObserver(count).observe(document.querySelector(selector), kinds);
}"""


def flags(settings: dict[str, Any]) -> list[str]:
    return [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    settings = {
        "api_keys": KEY,
        "admin_keys": ADMIN_KEY,
        "requests_per_minute_per_key": 5,
        "concurrent_per_key": 4,
        "batch.folder": folder / "queue",
        "batch.files_per_key": 10,
    }
    server = Served(folder / "log", *flags(settings))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(packaged_speech: Path) -> Iterator[Any]:
    with browsers() as launch:
        yield launch(packaged_speech / "beckett.wav")


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """`visit(url)`: a new visitor at the page of the key there."""
    visitors: list[Visitor] = []

    def come(url: str, **context: Any) -> Visitor:
        visitors.append(Visitor(browser, **context))
        visitors[-1].page.goto(f"{url}/key")
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.context.close()


def use(me: Visitor, key: str, *, remember: bool = False) -> None:
    me.until("#form:not([hidden])")
    me.page.fill("#key-field", key)
    if remember:
        me.page.check("#remember")
    me.page.keyboard.press("Enter")


def limit(me: Visitor, name: str) -> str:
    return str(me.page.locator("#limits-list > div", has_text=name).locator("dd").first.inner_text())


def test_a_key_is_used_shown_and_forgotten(strict, visit, packaged_speech):
    me = visit(strict.url)
    me.until("#state:has-text('This server asks for a key')")
    assert me.page.locator("#limits").is_hidden()
    use(me, "wrong")
    me.until("#key-problem:has-text('does not know this key')")
    assert me.page.get_attribute("#key-field", "aria-invalid") == "true"
    use(me, KEY)
    me.until("#state:has-text('The server’s logs name it key-1')")
    assert me.page.inner_text("#state code >> nth=0") == KEY[-4:]
    assert "in this tab" in me.page.inner_text("#state")
    assert KEY not in me.page.content()
    allowed = me.page.locator("#may-list .allowed").all_inner_texts()
    assert len(allowed) == 3
    assert me.page.locator("#may-list li:not(.allowed)").count() == 2
    assert me.page.locator("#all").is_hidden()
    assert me.page.locator("#new").is_hidden()
    assert limit(me, "Requests in the last minute") == "0 of 5"
    assert limit(me, "Files that are stored") == "0 of 10"
    with (packaged_speech / "beckett.wav").open("rb") as recording:
        sent = httpx.post(
            f"{strict.url}/v1/audio/transcriptions",
            headers={"authorization": f"Bearer {KEY}"},
            files={"file": recording},
            timeout=60,
        )
    assert sent.status_code == 200
    me.page.reload()
    me.until("#limits:not([hidden])")
    assert limit(me, "Requests in the last minute") == "1 of 5"
    assert me.page.get_attribute("[role=meter][aria-label='Requests in the last minute']", "aria-valuetext") == "1 of 5"
    me.page.click("#forget")
    me.until("#state:has-text('This server asks for a key')")
    assert me.page.evaluate("sessionStorage.getItem('asr-serve.key')") is None
    me.expect_calm("401")


def test_a_key_is_remembered_for_all_tabs_or_for_this_one(strict, visit):
    me = visit(strict.url)
    use(me, KEY, remember=True)
    me.until("#state:has-text('in all tabs of this browser')")
    other = me.context.new_page()
    other.goto(strict.url)
    other.wait_for_selector("#model option[value=moonshine-tiny-en]", state="attached")  # no dialog
    other.close()
    me.page.uncheck("#remember")
    me.page.click("#form .strong")
    me.until("#state:has-text('in this tab')")
    other = me.context.new_page()
    other.goto(f"{strict.url}/key")
    other.wait_for_selector("#state:has-text('This server asks for a key')")
    other.close()
    me.expect_calm("401")


def test_administrators_see_all_keys_and_make_new_ones(strict, visit):
    me = visit(strict.url)
    me.context.grant_permissions(["clipboard-read", "clipboard-write"])
    use(me, ADMIN_KEY)
    me.until("#all:not([hidden])")
    rows = me.page.locator("#all-rows tr")
    assert [row.split("\t")[0].strip() for row in rows.all_inner_texts()] == ["key-1", "admin-1 (this one)"]
    assert me.page.locator("#may-list .allowed").count() == 5
    me.page.click("#make-api")
    made = me.page.input_value("#made-key")
    assert re.fullmatch(r"asr_[0-9a-f]{64}", made)
    assert "api_keys_file" in me.page.inner_text("#snippet")
    me.page.click("#copy")
    me.until(".toast:has-text('Copied')")
    assert me.page.evaluate("navigator.clipboard.readText()") == made
    me.page.click("#make-admin")
    assert me.page.input_value("#made-key") != made
    assert "admin_keys_file" in me.page.inner_text("#snippet")
    me.page.reload()
    me.until("#new:not([hidden])")
    assert me.page.locator("#made").is_hidden()  # it was shown once
    assert httpx.get(f"{strict.url}/v1/models", headers={"authorization": f"Bearer {made}"}).status_code == 401
    me.expect_calm("401")


def test_a_key_that_is_made_works_once_it_is_in_the_settings(visit, tmp_path):
    """From a server without keys to one with the key that the page made, in the way that the page tells."""
    first = Served(tmp_path / "first")
    try:
        me = visit(first.url)
        me.until("#state:has-text('This server asks for no key')")
        assert me.page.locator("#forget").is_hidden()
        assert me.page.inner_text("#key-problem") == ""
        assert me.page.inner_text("#may-title") == "What anybody may do"
        me.page.click("#make-api")
        made = me.page.input_value("#made-key")
        setting = me.page.inner_text("#snippet").split()[-1]
    finally:
        first.stop()
    name, _, file = setting.partition("=")
    (tmp_path / file).write_text(f"{made}\n")
    second = Served(tmp_path / "second", "--set", f"{name}={tmp_path / file}")
    try:
        me = visit(second.url)
        use(me, made)
        me.until("#state:has-text('key-1')")
    finally:
        second.stop()


def test_an_admin_key_is_entered_where_others_need_none(visit, tmp_path):
    server = Served(tmp_path / "log", *flags({"admin_keys": ADMIN_KEY}))
    try:
        me = visit(server.url)
        me.until("#state:has-text('This server asks for no key')")
        assert me.page.locator("#all").is_hidden()
        use(me, "wrong")  # the server answers it as it does all who come without one
        me.until("#key-problem:has-text('does not know this key')")
        assert me.page.get_attribute("#key-field", "aria-invalid") == "true"
        use(me, ADMIN_KEY)
        me.until("#all:not([hidden])")
        assert "admin-1" in me.page.inner_text("#state")
        assert me.page.inner_text("#key-problem") == ""
        assert me.page.get_attribute("#key-field", "aria-invalid") is None
        me.page.click("#forget")
        me.until("#state:has-text('This server asks for no key')")
        me.until("#form:not([hidden])")
        me.expect_calm()
    finally:
        server.stop()


def test_a_server_that_is_gone(strict, visit):
    cable = Cable(strict.port)
    try:
        me = visit(cable.url)
        use(me, KEY)
        me.until("#limits:not([hidden])")
        cable.cut()
        me.until("#problem:has-text('The server does not answer')")
        assert me.page.locator("#limits").is_visible()
        me.page.evaluate(COUNT_CHANGES, "#notice")
        with me.page.expect_event("requestfailed"):
            me.page.click("#again")
        assert me.page.evaluate("changes") == 0  # it stays until the server answers, and is announced once
        assert me.page.locator("#notice").is_visible()
        cable.mend()
        me.page.click("#again")
        me.holds("document.querySelector('#notice').hidden")
        me.expect_calm("401", "ERR_")
    finally:
        cable.close()


@needs_axe
@devices_and_schemes
def test_axe_finds_nothing_serious(strict, visit, scheme, device):
    me = visit(strict.url, color_scheme=scheme, **device)
    me.until("#form:not([hidden])")
    me.expect_accessible("no key")
    use(me, "wrong")
    me.until("#key-problem:not(:empty)")
    me.expect_accessible("a wrong key")
    use(me, ADMIN_KEY)
    me.until("#all:not([hidden])")
    me.page.click("#make-api")
    me.expect_accessible("an administrator's")
    me.expect_calm("401")
