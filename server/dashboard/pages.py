"""The dashboard's pages, styles, scripts and pictures: files of this package, the same for everyone, without data.

They need no key: a browser cannot send one before a page has asked for it. What they may do in the browser is bounded
by a Content-Security-Policy: scripts and styles of this server alone, requests to this server alone, no frames.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from server.dashboard.paths import PAGES, STATIC_PATH
from server.errors import RouteNotFound

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask again each time; the tag below makes the answer short
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: Mapping[str, str]


def page_routes() -> APIRouter:
    """The routes to every file, which is read once, now."""
    files = {path.name: _read(path) for path in sorted(Path(__file__).with_name("static").iterdir())}
    router = APIRouter(include_in_schema=False)

    async def page(request: Request) -> Response:
        return _answer(request, files[PAGES[request.scope["route"].path]])

    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise RouteNotFound(f"The dashboard has no file {name[:256]!r}.")
        return _answer(request, files[name])

    async def without_slash(request: Request) -> Response:
        name = request.scope["route"].path.split("/")[-2]
        return RedirectResponse(f"../{name}")  # relative: whatever a proxy puts before it stays

    for path in PAGES:
        router.add_api_route(path, page, methods=["GET", "HEAD"])
        router.add_api_route(f"{path}/", without_slash, methods=["GET", "HEAD"])
    router.add_api_route(f"{STATIC_PATH}/{{name}}", file, methods=["GET", "HEAD"])
    return router


def _read(path: Path) -> _File:
    content = path.read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:32]
    return _File(content, {**_HEADERS, "Content-Type": _MEDIA_TYPES[path.suffix], "ETag": f'"{tag}"'})


def _answer(request: Request, file: _File) -> Response:
    if request.headers.get("if-none-match") == file.headers["ETag"]:
        return Response(None, 304, dict(file.headers))
    return Response(file.content, headers=dict(file.headers))
