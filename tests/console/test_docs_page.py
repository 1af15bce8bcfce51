"""The page of the API: it shows every route, without a byte from the internet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from console_page import PHONE, Served, Visitor, browsers, needs_axe


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("docs") / "log", "--set", "console=false")
    yield server
    server.stop()


@needs_axe
@pytest.mark.parametrize("device", [{}, PHONE], ids=["desktop", "phone"])
def test_every_route_is_shown_without_the_internet(served: Served, tmp_path: Path, device: dict[str, object]) -> None:
    elsewhere: list[str] = []
    with browsers() as launch:
        me = Visitor(launch(tmp_path / "none.wav"), **device)

        def only_here(route, request):
            if request.url.startswith(served.url):
                route.continue_()
            else:
                elsewhere.append(request.url)
                route.abort()

        me.context.route("**/*", only_here)
        me.page.goto(f"{served.url}/docs")
        me.until("details.route")
        shown = set(me.page.locator("details.route .path").all_inner_texts())
        me.page.click("summary:has-text('/v1/audio/transcriptions')")
        opened = me.page.locator("details[open]").inner_text()
        me.expect_accessible("docs")
        me.expect_calm()
    assert elsewhere == []
    document = httpx.get(f"{served.url}/openapi.json").json()
    assert shown == set(document["paths"])
    assert "timestamp_granularities[]" in opened
    assert "multipart/form-data" in opened
    assert "429" in opened


def test_the_page_and_the_document_are_served_together(served: Served) -> None:
    assert httpx.get(f"{served.url}/docs").headers["content-security-policy"].startswith("default-src 'none'")
    assert httpx.get(f"{served.url}/").status_code == 404, "docs=true without the console"
