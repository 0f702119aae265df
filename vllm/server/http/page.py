"""GET /: the page and its static files."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

# Machines' own tables have other names for it, which a browser that may not guess refuses.
mimetypes.add_type("text/javascript", ".js")

_INDEX = "index.html"
_files = StaticFiles(directory=Path(__file__).parents[1] / "static")
_HEADERS = {
    # Revalidated on each use, so that a new version shows at once.
    "Cache-Control": "no-cache",
    # No other host, no script but our files, no markup made from text.
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/")
async def page(request: Request) -> Response:
    """The page."""
    return await _file(_INDEX, request)


@router.get("/static/{name}")
async def page_file(name: str, request: Request) -> Response:
    """A style sheet, a module or an image of the page."""
    if name == _INDEX:
        raise HTTPException(404)
    return await _file(name, request)


async def _file(name: str, request: Request) -> Response:
    response = await _files.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response
