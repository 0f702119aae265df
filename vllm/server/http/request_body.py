"""Request bytes to a model of protocol/, or to an error that names the wrong field."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from fastapi import Request
from pydantic import ValidationError

from vllm.exceptions import shown
from vllm.server.errors import ApiError
from vllm.server.protocol.base import DOORS, RequestModel, check_names

# Invalid JSON is decoded a second time, for a better error, only up to this length.
_SHORT_BODY = 2**20


async def read_json(request: Request, max_bytes: int) -> Any:
    """The value of a JSON body of at most `max_bytes`; for errors see `read_body` in routes.py."""
    _check_headers(request.headers.get("content-type"), request.headers.get("content-encoding"))
    return _decode(await _read(request, max_bytes))


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
