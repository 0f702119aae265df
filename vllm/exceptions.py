"""Errors that users of the engine see."""

from __future__ import annotations

from typing import Any


class VLLMError(Exception):
    """Base of the errors that are ours."""


class VLLMClientError(VLLMError):
    """A request that cannot be honoured."""


class VLLMServerError(VLLMError):
    """The engine is at fault, or gone."""


class VLLMNotFoundError(VLLMClientError, LookupError):
    """A name that does not exist."""


class GenerationError(VLLMServerError, RuntimeError):
    """A request failed while it ran."""


class VLLMValidationError(VLLMClientError, ValueError):
    """A request field (or an engine argument) has a value that cannot be honoured.

    Raised before anything is queued, so the other requests of a call and the engine itself are unaffected.

    Attributes:
        parameter: name of the offending field, as the user wrote it; None when several are involved.
        value: the offending value.
    """

    def __init__(self, message: str, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        base = super().__str__()
        if self.parameter is None:
            return base
        return f"{base} (parameter={self.parameter}, value={shown(self.value)})"


class UnservedFieldError(VLLMValidationError):
    """A field that is understood, and that nothing here can honour beside the others or for this model."""


class RetryableRequestError(VLLMServerError, RuntimeError):
    """Upstream's name for a request that may be sent again; the server answers 429 or 503 with Retry-After."""


class QueueOverflowError(RetryableRequestError):
    """Upstream's name for a full queue; see RetryableRequestError."""


class EngineDeadError(VLLMServerError, RuntimeError):
    """The engine stopped for good after a fault of its own; the message holds the cause."""


class CliError(Exception):
    """A bad argument or bad data of a command: its message is the line that the user sees, and the exit code is 2."""


def shown(value: Any, limit: int = 120) -> str:
    """The value as an error message shows it, in at most `limit` characters."""
    if isinstance(value, (str, list)):
        # A value that is cut anyway may be long.
        value = value[:limit]
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python prints no integer of more than some thousands of digits, and nothing that is nested too deeply.
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
