"""GET /: the page and its static files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.server.errors import ApiError

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parents[1] / "static"
_INDEX = "index.html"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# No other host, no script but our files, no markup made from text.
_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; "
    "require-trusted-types-for 'script'"
)


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """(content, media type, ETag) by name."""
    files = {}
    for path in _FOLDER.iterdir():
        if path.suffix in _MEDIA_TYPES:
            content = path.read_bytes()
            files[path.name] = content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return files


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return _answer(_files()[_INDEX], request)


@router.get("/static/{name}")
async def page_file(name: str, request: Request) -> Response:
    """A style sheet, a module or an image of the page."""
    file = _files().get(name)
    if file is None or name == _INDEX:
        raise ApiError(404, f"there is no route {request.url.path}", code="not_found")
    return _answer(file, request)


def _answer(file: tuple[bytes, str, str], request: Request) -> Response:
    content, media_type, etag = file
    headers = {
        # Revalidated on each use, so that a new version shows at once.
        "Cache-Control": "no-cache",
        "ETag": etag,
        "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)
