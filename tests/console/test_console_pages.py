"""The console's files: how they are sent, to whom, and that they are what console/ builds."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from asr_serve import __version__
from asr_serve.config import ServeConfig
from asr_serve.metrics import ServerMetrics
from asr_serve.server.app import create_app
from asr_serve.server.console.pages import PAGES, STATIC
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.admission import AdmissionController

CONSOLE = Path(__file__).resolve().parents[2] / "console"
HTML = [path for path, name in PAGES.items() if name.endswith(".html")]


@pytest.fixture
async def client() -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """`client(draining=True, api_keys=(...,))`: somebody who asks such a server. No model is loaded."""
    made: list[httpx.AsyncClient] = []

    def come(*, draining: bool = False, **settings: object) -> httpx.AsyncClient:
        config = ServeConfig(**settings)
        gate = AdmissionController(config)
        gate.draining = draining
        app = create_app(config, EngineRegistry(config), ServerMetrics(__version__), gate)
        made.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://console.test"))
        return made[-1]

    yield come
    for each in made:
        await each.aclose()


def assets(page: str) -> list[str]:
    return re.findall(r'(?:src|href)="\./([^"]+\.\w+)"', page)


@pytest.mark.parametrize("path", HTML)
async def test_a_page_and_all_it_names(client, path):
    me = client()
    page = await me.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "'unsafe" not in page.headers["content-security-policy"]  # WebAssembly may be compiled: 'wasm-unsafe-eval'
    assert not re.search(r"https?://", page.text), "a page that needs another server"
    assert "<style" not in page.text
    assert " style=" not in page.text
    named = assets(page.text)
    assert len(named) >= 4
    for name in named:
        answer = await me.get(f"/{name}")
        assert answer.status_code == 200, name
        hashed = re.search(r"-[\w-]{8}\.\w+$", name)
        assert answer.headers["cache-control"] == ("public, max-age=31536000, immutable" if hashed else "no-cache")


async def test_a_page_with_a_line_feed_behind_its_path_is_none(client):
    assert (await client().get("/status%0A")).status_code == 404


async def test_the_demo_clip_is_real_speech(client, packaged_speech):
    me = client()
    whole = await me.get("/assets/two_cities.wav")
    assert (whole.status_code, whole.headers["content-type"]) == (200, "audio/wav")
    assert whole.content == (packaged_speech / "two_cities.wav").read_bytes()
    assert (await me.get("/assets/beckett.wav")).status_code == 404


async def test_packed_and_asked_again(client):
    me = client()
    plain = await me.get("/", headers={"accept-encoding": "identity"})
    packed = await me.get("/", headers={"accept-encoding": "gzip, br"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert packed.text == plain.text
    tag = packed.headers["etag"]
    for known in (tag, tag.removeprefix("W/"), f'"other", {tag}', f'"other",W/"another" , {tag}', "*"):
        again = await me.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b""), known
    for unknown in ("", '"other"', f"{tag[:-2]}", f'"other {tag}'):
        assert (await me.get("/", headers={"if-none-match": unknown})).status_code == 200, unknown
    assert (await me.head("/")).status_code == 200


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        *[("gzip", True), ("br;q=1.0, gzip;q=0.5", True), ("gzip;q=1", True), ("deflate,gzip", True)],
        *[("", False), ("identity", False), ("gzip;q=0", False), ("gzip; q=0.000, br", False), ("notgzip", False)],
    ],
)
async def test_packed_for_those_who_take_it(client, accepted, packed):
    answer = await client().get("/", headers={"accept-encoding": accepted})
    assert (answer.headers.get("content-encoding") == "gzip") == packed


async def test_nothing_else_is_served(client):
    me = client()
    for path in ("/assets/", "/assets/none.js", "/assets/../pages.py", "/assets/%2e%2e/index.html", "/index.html"):
        assert (await me.get(path)).status_code == 404, path
    assert (await me.post("/")).status_code == 405


async def test_no_key_is_asked_for_and_draining_does_not_matter(client):
    me = client(api_keys=("k",), draining=True)
    for path in (*PAGES, "/assets/theme.js"):
        assert (await me.get(path)).status_code == 200, path
    assert (await me.get("/v1/models")).status_code == 401


async def test_it_can_be_switched_off(client):
    me = client(console=False, docs=False)
    for path in (*HTML, "/docs", "/assets/theme.js"):
        assert (await me.get(path)).status_code == 404, path
    me = client(console=False)
    assert [(await me.get(path)).status_code for path in ("/", "/docs", "/assets/theme.js")] == [404, 200, 200]


def test_what_is_served_is_what_console_builds(tmp_path):
    """The built files are committed, so that a machine without Node serves them."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    if not (CONSOLE / "node_modules").is_dir():
        pytest.skip("the console's packages are not installed: npm --prefix console ci")
    build = ["npm", "--prefix", str(CONSOLE), "run", "--silent", "build", "--", "--outDir", str(tmp_path)]
    subprocess.run([*build, "--logLevel", "error"], check=True)

    def files(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files(STATIC) == files(tmp_path), "make console"
