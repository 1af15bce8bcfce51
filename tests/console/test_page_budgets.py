"""What every page of the console costs and promises: bytes, requests, blocking files, layout, accessibility. The pages
are those of the routes, so a page that is added is measured too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from console_page import Served, Visitor, browsers, devices_and_schemes, needs_axe

from asr_serve.server.console.pages import DOCS_PAGES, PAGES

PATHS = [path for path, name in {**PAGES, **DOCS_PAGES}.items() if name.endswith(".html")]
FILES_BYTES = 70_000
"""Most bytes of a page's own files, as they come over the wire with their headers."""
DATA_BYTES = 600_000
"""Most bytes of the API's answers that a page asks for by itself; the description of the API is the largest."""
MOST_BLOCKING = 6
"""Most files that hold up the first picture: one script for the colours, and style sheets."""
MOST_REQUESTS = 25
MOST_SHIFT = 0.1
"""Cumulative layout shift that Lighthouse calls good."""
WATCH = """() => {
  window.measured = { shift: 0, largest: 0 };
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) measured.shift += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) measured.largest = entry.startTime;
  }).observe({ type: "largest-contentful-paint", buffered: true });
}"""


class Transfer(NamedTuple):
    """Answer that a page got."""

    url: str
    status: int
    headers: dict[str, str]
    size_bytes: int
    """Bytes over the wire, headers included."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("budgets") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(packaged_speech: Path) -> Iterator[Any]:
    with browsers() as launch:
        yield launch(packaged_speech / "beckett.wav")


def visit(browser: Any, served: Served, path: str, **context: Any) -> tuple[Visitor, list[Transfer]]:
    """A first visit with an empty cache, until the page has what it asks for."""
    me = Visitor(browser, **context)
    me.page.add_init_script(f"({WATCH})()")
    wire = me.context.new_cdp_session(me.page)
    wire.send("Network.enable")
    answers: dict[str, dict[str, Any]] = {}
    transfers: list[Transfer] = []

    def finished(event: dict[str, Any]) -> None:
        answer = answers.get(event["requestId"])
        if answer is not None and urlsplit(answer["url"]).scheme in ("http", "https"):
            headers = {name.lower(): value for name, value in answer["headers"].items()}
            transfers.append(Transfer(answer["url"], answer["status"], headers, int(event["encodedDataLength"])))

    wire.on("Network.responseReceived", lambda event: answers.update({event["requestId"]: event["response"]}))
    wire.on("Network.loadingFinished", finished)
    me.page.goto(served.url + path)
    me.page.wait_for_load_state("load")
    me.page.wait_for_timeout(1_500)  # pages ask for data once they are there, and /status asks again for ever
    return me, transfers


def is_file(transfer: Transfer) -> bool:
    path = urlsplit(transfer.url).path
    return path in PATHS or path.startswith("/assets/") or path == "/favicon.svg"


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_small_and_comes_from_here_alone(browser, served, path):
    me, transfers = visit(browser, served, path)
    assert all(transfer.url.startswith(served.url) for transfer in transfers), "nothing is loaded from elsewhere"
    files = [transfer for transfer in transfers if is_file(transfer)]
    data = [transfer for transfer in transfers if not is_file(transfer)]
    assert sum(transfer.size_bytes for transfer in files) <= FILES_BYTES
    assert sum(transfer.size_bytes for transfer in data) <= DATA_BYTES
    assert len(transfers) <= MOST_REQUESTS
    for transfer in files:
        name = urlsplit(transfer.url).path
        assert transfer.status == 200, name
        assert transfer.headers["content-encoding"] == "gzip", name
        assert transfer.headers["vary"] == "Accept-Encoding", name
        is_hashed = name.startswith("/assets/") and name != "/assets/theme.js"
        expected = "public, max-age=31536000, immutable" if is_hashed else "no-cache"
        assert transfer.headers["cache-control"] == expected, name
        assert transfer.headers["x-content-type-options"] == "nosniff", name
    blocking = "performance.getEntriesByType('resource').filter((entry) => entry.renderBlockingStatus === 'blocking')"
    assert me.page.evaluate(f"{blocking}.length") <= MOST_BLOCKING
    me.context.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_second_visit_asks_for_no_hashed_file_again(browser, served, path):
    me, first = visit(browser, served, path)
    hashed = {transfer.url for transfer in first if transfer.headers.get("cache-control", "").endswith("immutable")}
    assert hashed
    before = me.page.evaluate("performance.timeOrigin")
    me.page.goto(served.url + path)
    me.page.wait_for_load_state("load")
    assert me.page.evaluate("performance.timeOrigin") > before
    loaded = "performance.getEntriesByType('resource').filter(({ transferSize }) => transferSize > 0)"
    assert not hashed & set(me.page.evaluate(f"{loaded}.map(({{ name }}) => name)")), "from the browser's cache"
    me.context.close()


@devices_and_schemes
@pytest.mark.parametrize("path", PATHS)
def test_nothing_jumps_while_a_page_loads(browser, served, path, device, scheme):
    me, _ = visit(browser, served, path, color_scheme=scheme, **device)
    measured = me.page.evaluate("measured")
    assert measured["shift"] <= MOST_SHIFT
    assert measured["largest"] > 0, "something large is painted"
    unsized = "[...document.images].filter((image) => !image.hasAttribute('width') || !image.hasAttribute('height'))"
    assert me.page.evaluate(f"{unsized}.length") == 0
    me.context.close()


@needs_axe
@devices_and_schemes
@pytest.mark.parametrize("path", PATHS)
def test_axe_finds_nothing_serious(browser, served, path, device, scheme):
    me, _ = visit(browser, served, path, color_scheme=scheme, **device)
    me.expect_accessible(path)
    assert me.page.get_attribute("html", "lang") == "en"
    assert me.page.title()
    assert me.page.locator("h1").count() == 1
    assert me.page.locator("main").count() == 1
    assert me.page.locator(f'nav a[href="{"./" + path[1:]}"][aria-current=page]').count() == (path in PAGES)
    me.context.close()
