"""The server's application: its routes, its errors, its schema."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from vllm import __version__
from vllm.entrypoints.openai import (
    middleware,
    page,
    serving_chat,
    serving_completion,
    serving_metrics,
    serving_models,
    serving_scoring,
    serving_tokenization,
)
from vllm.entrypoints.openai.engine_requests import ClientDisconnected
from vllm.entrypoints.openai.errors import ApiError, as_api_error
from vllm.entrypoints.openai.routes import REQUEST_MODELS, SCHEMA_REF
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineDeadError, VLLMValidationError

_ROUTERS = (
    serving_completion.router,
    serving_chat.router,
    serving_scoring.router,
    serving_tokenization.router,
    serving_metrics.router,
    serving_models.router,
)


def build_app(state: ServerState) -> FastAPI:
    """The application over an engine that runs."""
    app = FastAPI(title="vLLM", version=__version__)
    app.state.server = state
    for router in _ROUTERS:
        app.include_router(router)
    if state.args.page:
        app.include_router(page.router)
    for kind in (ApiError, VLLMValidationError, EngineDeadError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    for gone in (ClientDisconnected, ClientDisconnect):
        app.add_exception_handler(gone, _answer_nobody)
    middleware.install(app, state)
    _document_bodies(app)
    return app


def _answer_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses before any endpoint is asked."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        answer = ApiError(404, f"there is no route {request.url.path}", code="not_found")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        answer = ApiError(405, f"{request.url.path} takes {allowed}, not {request.method}", code="method_not_allowed")
    else:
        answer = ApiError(error.status_code, str(error.detail), code="http_error")
    response = answer.response()
    response.headers.update(error.headers or {})
    return response


def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=middleware.CLIENT_CLOSED_REQUEST)


def _document_bodies(app: FastAPI) -> None:
    """Add the request models, which endpoints read themselves, to the schema."""
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make_schema()
            models = [(model, "validation") for model in REQUEST_MODELS]
            _, definitions = models_json_schema(models, ref_template=SCHEMA_REF + "{model}")  # type: ignore[arg-type]
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
