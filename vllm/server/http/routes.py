"""Declarations of endpoints: schemas of bodies and errors, and how bodies are read."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Union

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from vllm.exceptions import shown
from vllm.server.errors import ApiError
from vllm.server.protocol.base import DOORS, RequestModel, ResponseModel, check_names
from vllm.server.protocol.generation import ErrorResponse
from vllm.server.state import ServerState, server_state

Endpoint = Callable[[Request, ServerState, Any], Awaitable[Response]]

SCHEMA_REF = "#/components/schemas/"
REQUEST_MODELS: list[type[RequestModel]] = []
CHUNK_MODELS: list[type[ResponseModel]] = []
"""Models given to `post`, for the components of /openapi.json."""

_ERRORS = {
    400: "A field is missing, unknown, of a wrong type, out of range, or cannot be honoured; `param` names it",
    401: "No valid API key",
    404: "No such model or route",
    406: "The answer cannot be of the type that the Accept header names",
    413: "The body is too long",
    415: "The body is not JSON",
    429: "The queue is full; see Retry-After",
    500: "The model failed on the request",
    503: "The server is stopping; see Retry-After",
}


def _header(description: str, **schema: Any) -> dict[str, Any]:
    return {"description": description, "required": True, "schema": schema}


_REQUEST_ID = {"X-Request-Id": _header("The request's, or a new one.", type="string")}
_RETRY = {"Retry-After": _header("Seconds after which to try again.", type="integer", minimum=1)}
_HEADERS = {"401": {"WWW-Authenticate": _header("Bearer", type="string")}, "429": _RETRY, "503": _RETRY}


class _RequestRoute(APIRoute):
    """A route whose endpoint takes only the request and returns a Response. It skips FastAPI's parameter resolution and
    result encoding, which cost as much as a small endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


class BodyKind(NamedTuple):
    """Bodies of one endpoint; see `post`."""

    model: type[RequestModel]
    answer: Any
    endpoint: Endpoint
    chunk: type[ResponseModel] | None = None


class OtherBody(NamedTuple):
    """Bodies with one of `fields`, which an endpoint takes beside its own kind."""

    fields: tuple[str, ...]
    model: type[RequestModel]
    answer: Any
    endpoint: Endpoint


def post(
    router: APIRouter,
    path: str,
    model: type[RequestModel],
    answer: Any,
    chunk: type[ResponseModel] | None = None,
    other: OtherBody | None = None,
    body_types: tuple[str, ...] = (),
    error: type[ResponseModel] = ErrorResponse,
) -> Callable[[Endpoint], Endpoint]:
    """Decorator that adds an endpoint, called with the request, the server's state and the checked body. The schema
    describes the body by `model`, the answer by `answer`, and each event of a streamed answer by `chunk`; bodies of
    another kind go to `other`. `body_types` are those of answers that are bytes, `error` the shape of errors."""
    REQUEST_MODELS.extend(each for each in (model, other and other.model) if each and each not in REQUEST_MODELS)
    content: dict[str, Any] = {name: {"schema": {"type": "string", "format": "binary"}} for name in body_types}
    if chunk is not None:
        CHUNK_MODELS.append(chunk)
        content["text/event-stream"] = {"schema": _event(chunk, error)}
    body_schema: dict[str, Any] = {"schema": {"$ref": SCHEMA_REF + model.__name__}}
    if other is not None:
        schemas = [{"$ref": SCHEMA_REF + kind.__name__} for kind in (model, other.model)]
        body_schema, answer = {"schema": {"anyOf": schemas}}, Union[answer, other.answer]  # noqa: UP007

    def add(function: Endpoint) -> Endpoint:
        own = BodyKind(model, answer, function)

        async def read_and_run(request: Request) -> Response:
            value = await _noted_value(request)
            is_other = other is not None and isinstance(value, dict) and any(name in value for name in other.fields)
            return await _run(request, value, other if is_other else own)  # type: ignore[arg-type]

        errors = (status for status in _ERRORS if status != 406 or body_types)
        answers = {200: {"model": answer, "content": content}, **error_answers(*errors, model=error)}
        _add(router, path, read_and_run, function.__name__, function.__doc__, body_schema, answers)
        return function

    return add


def post_by_field(router: APIRouter, path: str, description: str, kinds: Mapping[str, tuple[BodyKind, ...]]) -> None:
    """Add an endpoint for bodies of several kinds. `kinds`: for the field that tells them, what a body with it may be;
    it is the first whose task the model can, or else the first."""

    async def endpoint(request: Request) -> Response:
        state, value = server_state(request), await _noted_value(request)
        given = [name for name in kinds if isinstance(value, dict) and value.get(name) is not None]
        if len({id(kinds[name]) for name in given}) != 1:
            names = " or ".join(kinds)
            problem = f"{' and '.join(given)} exclude each other: give one of them" if given else f"{names} is required"
            raise ApiError(400, problem, given[1] if given else next(iter(kinds)), "missing_field")
        possible = kinds[given[0]]
        kind = next((each for each in possible if state.can(each.model.TASK)), possible[0])
        return await _run(request, value, kind)

    every = list(dict.fromkeys(kind for possible in kinds.values() for kind in possible))
    schemas = [{"$ref": SCHEMA_REF + kind.model.__name__} for kind in every]
    content = {
        "text/event-stream": {
            "schema": _event(*(kind.chunk for kind in every if kind.chunk is not None), ErrorResponse)
        }
    }
    answer = {"model": Union[tuple(kind.answer for kind in every)], "content": content}  # noqa: UP007
    answers: dict[int | str, dict[str, Any]] = {200: answer, **error_answers(*_ERRORS)}
    _add(router, path, endpoint, path.strip("/"), description, {"schema": {"oneOf": schemas}}, answers)


async def read_body(request: Request, model: type[RequestModel]) -> Any:
    """The `model` that a request's JSON body describes. Raises ApiError: 415 for another content type or a compressed
    body, 413 for a longer body than the server takes, 400 otherwise."""
    return parse_body(await read_json(request), model, server_state(request).args.ignore_unknown_fields)


async def _noted_value(request: Request) -> Any:
    value = await read_json(request)
    note_session(request, value)
    return value


async def _run(request: Request, value: Any, kind: BodyKind | OtherBody) -> Response:
    state = server_state(request)
    body = parse_body(value, kind.model, state.args.ignore_unknown_fields)
    if "model" in kind.model.model_fields:
        await state.choose_model(body.model)
    state.check_task(kind.model.TASK)
    return await kind.endpoint(request, state, body)


def _add(
    router: APIRouter,
    path: str,
    endpoint: Any,
    name: str,
    description: str | None,
    body_schema: dict[str, Any],
    answers: dict[int | str, dict[str, Any]],
) -> None:
    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=name,
        description=description or "",
        route_class_override=_RequestRoute,
        response_model=None,
        responses=answers,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": body_schema}}},
    )


def _event(*models: type[ResponseModel]) -> dict[str, Any]:
    kinds = [{"$ref": SCHEMA_REF + model.__name__} for model in models]
    data = {
        "type": "string",
        "description": "A chunk; or an error; or, as the last, [DONE].",
        "anyOf": [{"const": "[DONE]"}, {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}],
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def error_answers(*statuses: int, model: type[ResponseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of errors with these statuses."""
    return {status: {"model": model, "description": _ERRORS[status]} for status in statuses}


def document(app: FastAPI, state: ServerState, has_keys: bool) -> None:
    """Complete `app.openapi` of an application that has all its routes: bodies, names accepted as `model`, API keys."""
    make_schema = app.openapi

    app.openapi = lambda: app.openapi_schema or _complete(make_schema(), state.listed_names, has_keys)  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], model_names: list[str] | None, has_keys: bool) -> dict[str, Any]:
    components = schema["components"]
    models = [(model, "validation") for model in (*REQUEST_MODELS, *CHUNK_MODELS)]
    _, definitions = models_json_schema(models, ref_template=SCHEMA_REF + "{model}")  # type: ignore[arg-type]
    components["schemas"].update(definitions["$defs"])
    for model in REQUEST_MODELS:
        if "model" not in model.model_fields:
            continue
        field = components["schemas"][model.__name__]["properties"]["model"]
        own = next(each for each in field.get("anyOf", [field]) if each["type"] == "string")
        if model_names is not None:
            own["enum"] = model_names
    # FastAPI's errors never occur: `parse_body` checks the bodies, and path parameters are strings.
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    if has_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            for status, answer in answers.items():
                answer["headers"] = {**_REQUEST_ID, **_HEADERS.get(status, {})}
            if has_keys and "401" in answers:
                operation["security"] = [{"bearer": []}]
    return schema


HEADER = "X-Session-ID"

session: ContextVar[str | None] = ContextVar("session", default=None)
"""The session of the request that is served."""


def note_session(request: Request, body: Any) -> None:
    """Set `session` to the body's `session_id`, else to the header's; None: neither has a text."""
    given = body.get("session_id") if isinstance(body, dict) else None
    session.set(given if given and isinstance(given, str) else request.headers.get(HEADER) or None)


# Invalid JSON is decoded a second time, for a better error, only up to this length.
_SHORT_BODY = 2**20


async def read_json(request: Request) -> Any:
    """The value of a request's JSON body; for errors see `read_body`."""
    _check_headers(request.headers.get("content-type"), request.headers.get("content-encoding"))
    return _decode(await _read(request, int(server_state(request).args.max_body_mib * 2**20)))


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if len(data) <= _SHORT_BODY:
            # Python's decoder accepts lone surrogates and large integers: the error can then name the field.
            try:
                return json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                pass
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json") from None


def parse_body(value: Any, model: type[RequestModel], ignore_unknown: bool) -> Any:
    """The `model` that a body's value describes; unknown fields are errors or ignored. Raises ApiError 400."""
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        message = f"the body must be a JSON object, got {kinds.get(type(value), 'a number')}"
        raise ApiError(400, message, code="invalid_type")
    # Before validation: a misspelt field explains a missing one.
    check_names(value, model, ignore_unknown)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(error, value, model) from None


def _explain(error: ValidationError, value: dict[str, Any], model: type[RequestModel]) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ""
    for step in first["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    param = ".".join(str(step) for step in first["loc"] if not isinstance(step, int)) or None
    if first["type"] == "missing":
        others = [name for name in value if name in DOORS and name not in model.model_fields]
        hint = f"; {DOORS[others[0]]} takes {others[0]}" if others and len(first["loc"]) == 1 else ""
        return ApiError(400, f"{place} is required{hint}", param, "missing_field")
    problem = re.sub(r"^\w+ should ", "must ", first["msg"].removeprefix("Value error, "))
    return ApiError(400, f"{place} {problem}, got {shown(first['input'])}", param, "invalid_type")


def _check_headers(content_type: str | None, encoding: str | None) -> None:
    kind = (content_type or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"the body must be application/json, got {kind}", code="unsupported_media_type")
    if (encoding or "identity").strip().lower() != "identity":
        message = f"the body must not be compressed, got Content-Encoding {encoding}"
        raise ApiError(415, message, code="unsupported_content_encoding")


async def _read(request: Request, max_bytes: int) -> bytes:
    message = f"the body is longer than the limit of {max_bytes} bytes (--max-body-mib)"
    too_long = ApiError(413, message, code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_long
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > max_bytes:
            raise too_long
        parts.append(part)
    return b"".join(parts)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
