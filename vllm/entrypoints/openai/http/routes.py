"""What the endpoints' declarations share: the schema of their bodies, and of their errors."""

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
"""Those of `takes`, for the schema's components."""

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
    """A route whose endpoint takes the request and nothing else, and returns a Response. What the framework does for
    other signatures, resolving parameters and encoding results, costs as much as such an endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        return self.endpoint


def takes(
    model: type[RequestModel], answer: Any, chunk: type[ResponseModel] | None = None, **options: Any
) -> dict[str, Any]:
    """Arguments of a route whose body is `model` and whose answer is described by `answer`, and each event of a
    streamed one by `chunk`."""
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
        "anyOf": [
            {"const": "[DONE]"},
            {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}},
        ],
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of answers with these statuses."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


async def body_of(request: Request, model: type[Model]) -> Model:
    """The request's body.

    Raises:
        ApiError: see read_body.
    """
    args = server_state(request).args
    return await read_body(request, model, int(args.max_body_mib * 2**20), args.ignore_unknown_fields)
