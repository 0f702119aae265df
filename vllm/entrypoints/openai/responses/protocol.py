"""Bodies of the Responses API."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved

_NOT_SERVED = "the Responses API is not served; /v1/chat/completions is"


class ResponsesRequest(Unserved):
    """A request."""

    instead: ClassVar[str] = _NOT_SERVED


class ResponsesResponse(Unserved):
    """An answer."""

    instead: ClassVar[str] = _NOT_SERVED
