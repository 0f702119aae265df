"""One shape for every error: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from vllm.exceptions import EngineDeadError, RetryableRequestError, UnservedFieldError, VLLMValidationError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    406: "not_acceptable_error",
    413: "request_too_large_error",
    415: "unsupported_media_type_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}


# The types of Anthropic's API.
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's older streams."""


def is_of_messages(path: str) -> bool:
    """Whether the path is one of Anthropic's API."""
    return path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


def path_of(scope: Scope) -> str:
    """A request's path, by which errors have the shape of an API; Anthropic's clients read theirs at every path."""
    is_anthropic = any(name == b"anthropic-version" for name, _ in scope["headers"])
    return "/v1/messages" if is_anthropic else scope["path"]


def _named_event(body: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


class ApiError(Exception):
    """The answer to a request that fails.

    Attributes:
        message: what is wrong, for a person; `code`, for a program.
        param: the field at fault, as the client wrote it, or None.
        retry_after: seconds after which the client may try again; None when that would not help.
        details: what Anthropic's clients read to go on by another way; other routes do not show it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.details = details

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON object to send, in the shape of the API that `path` belongs to."""
        told = {"param": _clean(self.param), "code": self.code}
        if is_of_messages(path):
            kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            details = {} if self.details is None else {"details": self.details}
            return {"type": "error", "error": {"type": kind, "message": _clean(self.message), **told, **details}}
        kind = _TYPES.get(self.status, "internal_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": _clean(self.message), "type": kind, **told}}

    def response(self, path: str = "") -> Response:
        """The HTTP answer to a request at `path`."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(path), self.status, headers)

    def event(self, path: str, sequence_number: int = 0) -> bytes:
        """The last event of a stream at `path`."""
        if is_of_messages(path):
            return _named_event(self.body(path))
        if "/v1/responses" in path:
            told = {"message": _clean(self.message), "param": _clean(self.param), "code": self.code}
            return _named_event({"type": "error", "sequence_number": sequence_number, **told})
        return b"data: " + msgspec.json.encode(self.body()) + b"\n\n" + DONE


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`content` is anything that msgspec can encode."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """The answer for an exception; an unexpected one shows its type only, as its message may hold secrets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, VLLMValidationError):
        # `param` is the field's name; the index of the entry at fault is in the message.
        param = None if error.parameter is None else re.sub(r"(\[\d+\])+$", "", error.parameter)
        code = "unsupported_field" if isinstance(error, UnservedFieldError) else "invalid_value"
        return ApiError(400, error.args[0], param=param, code=code)
    if isinstance(error, RetryableRequestError):
        return ApiError(429, str(error), code="overloaded", retry_after=1)
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine has stopped after a fault of its own", code="engine_dead", retry_after=10)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def _clean(text: str | None) -> str | None:
    """Escape lone surrogates, which clients may send and UTF-8 cannot hold."""
    return None if text is None else text.encode("utf-8", errors="backslashreplace").decode()
