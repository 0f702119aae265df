"""The server's application: its routes, its errors, its schema."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from vllm import envs
from vllm.entrypoints.openai.errors import ApiError, as_api_error
from vllm.entrypoints.openai.http import middleware, openapi, page
from vllm.entrypoints.openai.serving import chat as serving_chat
from vllm.entrypoints.openai.serving import completion as serving_completion
from vllm.entrypoints.openai.serving import development as serving_development
from vllm.entrypoints.openai.serving import metrics as serving_metrics
from vllm.entrypoints.openai.serving import models as serving_models
from vllm.entrypoints.openai.serving import scoring as serving_scoring
from vllm.entrypoints.openai.serving import tokenization as serving_tokenization
from vllm.entrypoints.openai.serving.engine_requests import ClientDisconnected
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.version import __version__

_ROUTERS = (
    serving_completion.router,
    serving_chat.router,
    serving_scoring.router,
    serving_tokenization.router,
    serving_metrics.router,
    serving_models.router,
)

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def build_app(state: ServerState) -> FastAPI:
    """The application over an engine that runs."""
    app = FastAPI(title="vLLM", version=__version__)
    app.state.server = state
    for router in _ROUTERS:
        app.include_router(router)
    if state.args.page:
        app.include_router(page.router)
    if envs.VLLM_SERVER_DEV_MODE:
        app.include_router(serving_development.router)
    for kind in (ApiError, VLLMValidationError, EngineDeadError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    for gone in (ClientDisconnected, ClientDisconnect):
        app.add_exception_handler(gone, _answer_nobody)
    middleware.install(app, state)
    openapi.document(app, state.model_names, has_keys=bool(state.args.api_key or envs.api_keys()))
    return app


def _answer_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses before any endpoint is asked."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        answer = ApiError(404, f"there is no route {request.url.path}", code="not_found")
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
        answer = ApiError(
            405, f"{request.url.path} takes {headers['Allow']}, not {request.method}", code="method_not_allowed"
        )
    else:
        answer = ApiError(error.status_code, str(error.detail), code="http_error")
    response = answer.response()
    response.headers.update(headers)
    return response


def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=middleware.CLIENT_CLOSED_REQUEST)


def _methods(request: Request) -> list[str]:
    """Those that the path takes. Several routes may have one path: the framework names the methods of the first."""
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    routes = request.app.routes
    return [each["method"] for each in scopes if any(route.matches(each)[0] is Match.FULL for route in routes)]
