"""Pages of the console, `/docs`, and their assets: files built by `make console`, read once, and sent with the headers
that they need."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import re
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from asr_serve.server.middleware.admission import AdmissionClass, admitted_as

STATIC = Path(__file__).parent / "static"
PAGES = {
    "/": "index.html",
    "/history": "history.html",
    "/speak": "speak.html",
    "/compare": "compare.html",
    "/batches": "batches.html",
    "/models": "models.html",
    "/status": "status.html",
    "/key": "key.html",
    "/favicon.svg": "favicon.svg",
}
"""Path -> file."""
DOCS_PAGES = {"/docs": "docs.html", "/favicon.svg": "favicon.svg"}
"""Path -> file of the page that shows the OpenAPI document."""
ASSETS = "/assets/{name}"
VOICE_ACTIVITY = Path(__file__).parents[2] / "edge" / "wasm" / "vad.wasm"
"""Voice activity for the page that sends speech only."""
DEMO_CLIP = "two_cities.wav"
"""Asset with real speech, of the package with the weights of the default model."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'wasm-unsafe-eval'",  # vad.wasm; no script may be evaluated
        "style-src 'self'",
        "img-src 'self'",
        "media-src blob:",  # a recording is played from the page's memory
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HASHED = re.compile(r".+-[\w-]{8}\.\w+")
"""Name of a file whose content never changes: the build adds its hash."""
_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")
"""Accept-Encoding that allows gzip: named, and not with weight 0."""


class ConsolePage(msgspec.Struct, frozen=True):
    """File as it is sent, plain and compressed."""

    body: bytes
    packed: bytes
    headers: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> ConsolePage:
        body = path.read_bytes()
        headers = {
            **SECURITY_HEADERS,
            "Cache-Control": ("public, max-age=31536000, immutable" if _HASHED.fullmatch(path.name) else "no-cache"),
            "Content-Type": TYPES[path.suffix],
            "ETag": f'W/"{hashlib.sha256(body).hexdigest()[:16]}"',  # weak: one tag for both encodings
            "Vary": "Accept-Encoding",
        }
        return cls(body, gzip.compress(body, mtime=0), headers)

    def response(self, headers: Headers) -> Response:
        tags = {tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")}
        if tags & {self.headers["ETag"].removeprefix("W/"), "*"}:
            return Response(status_code=304, headers=self.headers)
        if _GZIP.search(headers.get("accept-encoding", "")):
            return Response(self.packed, headers={**self.headers, "Content-Encoding": "gzip"})
        return Response(self.body, headers=self.headers)


def demo_clip() -> Path | None:
    """Path of DEMO_CLIP; None where its package is not installed. That is not imported: it needs a sound card."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "assets" / DEMO_CLIP
    return path if path.is_file() else None


def routes(*, console: bool, docs: bool) -> list[Route]:
    """Routes of the console's pages, and of the page that shows the OpenAPI document."""
    files = {**(PAGES if console else {}), **(DOCS_PAGES if docs else {})}
    if not files:
        return []
    pages = {path: ConsolePage.load(STATIC / name) for path, name in files.items()}
    clip = demo_clip()
    assets = {path.name: ConsolePage.load(path) for path in [*sorted((STATIC / "assets").iterdir()), VOICE_ACTIVITY]}

    @admitted_as(AdmissionClass.PUBLIC)
    async def page(request: Request) -> Response:
        file = pages.get(request.scope["path"])  # a route matches its path with a line feed behind it too
        if file is None:
            raise HTTPException(404)
        return file.response(request.headers)

    @admitted_as(AdmissionClass.PUBLIC)
    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name == DEMO_CLIP and clip is not None:
            return FileResponse(clip, headers={**SECURITY_HEADERS, "Cache-Control": "no-cache"}, media_type="audio/wav")
        file = assets.get(name)
        if file is None:
            raise HTTPException(404)
        return file.response(request.headers)

    return [*(Route(path, page) for path in files), Route(ASSETS, asset)]
