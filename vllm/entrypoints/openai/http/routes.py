"""Declarations of endpoints: schemas of bodies and errors, and how bodies are read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from vllm.entrypoints.openai.http.request_body import read_body
from vllm.entrypoints.openai.protocol.base import RequestModel, ResponseModel
from vllm.entrypoints.openai.protocol.generation import ErrorResponse
from vllm.entrypoints.openai.state import server_state

Model = TypeVar("Model", bound=RequestModel)

SCHEMA_REF = "#/components/schemas/"
REQUEST_MODELS: list[type[RequestModel]] = []
CHUNK_MODELS: list[type[ResponseModel]] = []
"""Models given to `takes`, for the components of /openapi.json."""

_ERRORS = {
    400: "A field is missing, unknown, of a wrong type, out of range, or cannot be honoured; `param` names it",
    401: "No valid API key",
    404: "No such model or route",
    413: "The body is too long",
    415: "The body is not JSON",
    429: "The queue is full; see Retry-After",
    500: "The model failed on the request",
    503: "The server is stopping; see Retry-After",
}


class RequestRoute(APIRoute):
    """A route whose endpoint takes only the request and returns a Response. It skips FastAPI's parameter resolution and
    result encoding, which cost as much as a small endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def takes(
    model: type[RequestModel], answer: Any, chunk: type[ResponseModel] | None = None, **options: Any
) -> dict[str, Any]:
    """Arguments of a route: the models of its body, of its answer, and of each event of a streamed answer."""
    REQUEST_MODELS.append(model)
    content = {}
    if chunk is not None:
        CHUNK_MODELS.append(chunk)
        content["text/event-stream"] = {"schema": _event(chunk)}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": SCHEMA_REF + model.__name__}}}}
    return {
        "openapi_extra": {"requestBody": body},
        "responses": {200: {"model": answer, "content": content}, **error_answers(*_ERRORS)},
        "response_model": None,
        **options,
    }


def _event(chunk: type[ResponseModel]) -> dict[str, Any]:
    kinds = [{"$ref": SCHEMA_REF + name} for name in (chunk.__name__, ErrorResponse.__name__)]
    data = {
        "type": "string",
        "description": "A chunk; or an error; or, as the last, [DONE].",
        "anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}],
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of errors with these statuses."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


async def body_of(request: Request, model: type[Model]) -> Model:
    """The request's body, under the server's limits; see read_body."""
    args = server_state(request).args
    return await read_body(request, model, int(args.max_body_mib * 2**20), args.ignore_unknown_fields)
