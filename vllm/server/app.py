"""The FastAPI application: routes, error handlers, schema."""

from __future__ import annotations

from importlib import import_module

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from vllm import envs
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.server import serving
from vllm.server.errors import ApiError, as_api_error, path_of
from vllm.server.http import middleware, page, routes
from vllm.server.serving.engine_requests import ClientDisconnected
from vllm.server.state import ServerState
from vllm.version import __version__

# Modules of `serving` that have a router, in the order of the page of the API.
_ENDPOINTS = (
    "generation.completion",
    "generation.chat",
    "generation.chat_batch",
    "responses.responses",
    "responses.stored",
    "responses.conversations",
    "messages.messages",
    "generation.generate",
    "invocations",
    "generation.render",
    "pooling.rerank",
    "labels.scoring",
    "labels.decisions",
    "pooling.embeddings",
    "pooling.classify",
    "pooling.pooling",
    "tokenization",
    "models",
    "profile",
)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def build_app(state: ServerState) -> FastAPI:
    """The application over an engine, which `state` may also get later."""
    # Without its description, the application has no pages of it either.
    described = None if state.args.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(title="vLLM", version=__version__, openapi_url=described)
    app.state.serving = state
    for name in _ENDPOINTS:
        app.include_router(_router(name))
    if state.args.page:
        app.include_router(page.router)
    if envs.allows_adapter_updates():
        app.include_router(_router("adapters"))
    if envs.has_development_routes():
        app.include_router(_router("development"))
    for kind in (ApiError, VLLMValidationError, EngineDeadError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    for disconnect in (ClientDisconnected, ClientDisconnect):
        app.add_exception_handler(disconnect, _answer_disconnect)
    middleware.install(app, state)
    routes.document(app, state, has_keys=bool(state.args.api_key or envs.api_keys()))
    return app


def _router(name: str) -> APIRouter:
    router: APIRouter = import_module(f"{serving.__name__}.{name}").router
    return router


def _answer_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(path_of(request.scope))


def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the framework, raised before any endpoint runs."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    status, path = error.status_code, request.url.path
    if status == 404:
        answer = ApiError(404, f"there is no route {path}", code="not_found")
    elif status == 405:
        headers["Allow"] = ", ".join(_methods(request))
        answer = ApiError(405, f"{path} takes {headers['Allow']}, not {request.method}", code="method_not_allowed")
    else:
        answer = ApiError(status, str(error.detail), code="http_error")
    response = answer.response(path_of(request.scope))
    response.headers.update(headers)
    return response


def _answer_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=middleware.CLIENT_CLOSED_REQUEST)


def _methods(request: Request) -> list[str]:
    """All methods of the path. Where several routes share one path, the framework lists those of the first only."""
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    routes = request.app.routes
    return [each["method"] for each in scopes if any(route.matches(each)[0] is Match.FULL for route in routes)]
