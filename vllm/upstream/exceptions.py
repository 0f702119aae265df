"""Errors that callers catch by upstream's names, and that nothing here raises."""

from __future__ import annotations

from vllm.exceptions import VLLMClientError, VLLMNotFoundError, VLLMValidationError


class VLLMUnprocessableEntityError(VLLMClientError, ValueError):
    """Upstream's name for a request that is understood and cannot be done; ours are VLLMValidationError."""


class LoRAAdapterNotFoundError(VLLMNotFoundError):
    """An adapter that is not there: none is served."""


class ChatTemplateResolutionError(VLLMValidationError):
    """Upstream's name for a missing chat template; ours is VLLMValidationError."""
