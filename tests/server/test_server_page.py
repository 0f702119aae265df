"""Routes, fields and flags are as docs/server.md says, and the README names what there is not."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from asgi import server_args

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.server.app import build_app
from vllm.server.protocol import ChatCompletionRequest, CompletionRequest
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState
from vllm.version import __version__

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
_SPAN = re.compile(r"`([^`]+)`")
# Routes that come with a variable of the environment, or are the page's own.
OPTIONAL = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
NOT_LISTED = {"/", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect", "/favicon.ico"}


def table(heading: str) -> list[str]:
    """The first cells of the table under a row."""
    lines = PAGE.partition(f"| {heading}")[2].splitlines()[2:]
    return [line.split(" | ")[0] for line in lines[: next(i for i, line in enumerate(lines) if not line.strip("|-"))]]


def spans(cell: str) -> list[str]:
    return [span.replace("\\|", "|") for span in _SPAN.findall(cell)]


@pytest.fixture(scope="module")
def paths() -> dict[str, set[str]]:
    """The methods of every path."""
    app, found = build_app(ServerState(None, server_args())), dict[str, set[str]]()  # type: ignore[arg-type]
    pending: list[Any] = list(app.routes)
    for route in pending:
        pending += getattr(getattr(route, "original_router", route), "routes", ())
        if hasattr(route, "path") and getattr(route, "methods", None):
            found.setdefault(re.sub(r"\{.*?\}", "NAME", route.path), set()).update(route.methods)
    return found


def listed() -> dict[str, set[str]]:
    """The methods of the table's routes; those without one have that of the span before."""
    routes: dict[str, set[str]] = {}
    for cell in table("route |"):
        methods: set[str] = set()
        for span in spans(cell):
            *given, path = span.split(" ")
            methods = set(given[0].split("|")) if given else methods
            routes.setdefault(path, set()).update(methods)
    return routes


def test_routes_of_the_table_are_there(paths: dict[str, set[str]]) -> None:
    lost = {path: methods for path, methods in listed().items() if not methods <= paths.get(path, set())}
    assert {path: methods for path, methods in lost.items() if path not in OPTIONAL | {"/v1/conversations"}} == {}
    assert "/v1/conversations" in paths


def test_fields_of_the_table_are_there() -> None:
    known = {
        name for model in (CompletionRequest, ChatCompletionRequest) for name in (*model.model_fields, *model.ACCEPTED)
    }
    names = [span.partition(":")[0] for cell in table("field of the request | what it does") for span in spans(cell)]
    assert len(names) > 20 and [name for name in names if name not in known] == []


def test_flags_of_the_page_are_the_servers() -> None:
    known = {"--" + item.name.replace("_", "-") for item in (*fields(ServerArgs), *fields(AsyncEngineArgs))}
    flags = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {"--config", "--help"}
    assert len(flags) > 15
    assert sorted(flag for flag in flags if not {flag, flag.replace("--no-", "--")} & known) == []


def test_what_the_readme_says_there_is_not() -> None:
    """Parts of these kinds are refused by name, as test_pictures.py and test_videos.py try."""
    (claim,) = re.findall(r"Not yet: ([^.]+)\.", README.replace("\n", " "))
    assert claim == "sound"


def test_pythons_and_version_of_the_readme() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    first, last = re.findall(r"Python 3\.(\d+).3\.(\d+)", README)[0]
    assert f'requires-python = ">=3.{first},<3.{int(last) + 1}"' in project
    assert f"`{__version__}`" in README
