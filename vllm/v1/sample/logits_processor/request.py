"""Processors of single requests: callables over one row of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm.utils.checks import num_arguments

RequestLogitsProcessor = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""(output ids, logits [V]) or (prompt ids, output ids, logits [V]) -> logits [V], the argument or a new tensor."""


class WrongResultError(ValueError):
    """A processor returned something that cannot be logits; the message says what."""


class BoundProcessor:
    """A callable with its request's token ids."""

    def __init__(self, processor: Callable[..., Any], prompt_ids: list[int] | None, output_ids: list[int]) -> None:
        """
        Args:
            processor: takes (logits [1, V]), (output_ids, logits [V]) or (prompt_ids, output_ids, logits [V]); returns
                the processed logits, or None when it has changed them in place.
            output_ids: passed on as the same object, so it should grow with the request.

        Raises:
            TypeError: it takes other arguments.
        """
        self.name = processor_name(processor)
        count = num_arguments(processor)
        if count not in (1, 2, 3):
            raise TypeError(f"{self.name} must take (output_ids, logits) or (prompt_ids, output_ids, logits)")
        self._processor = processor
        self._token_ids = ((), (output_ids,), (prompt_ids, output_ids))[count - 1]
        self._takes_matrix = count == 1

    def apply(self, row: torch.Tensor) -> None:
        """Process float32 [V] in place. Raises WrongResultError, or what the callable raised."""
        given = row[None] if self._takes_matrix else row
        result = self._processor(*self._token_ids, given)
        if result is not None and result is not given:
            check_result(result, given)
            given.copy_(result)


def check_result(result: Any, given: torch.Tensor) -> None:
    """Raises WrongResultError when what a processor returned is not a tensor like the one that it was given."""
    if not isinstance(result, torch.Tensor):
        raise WrongResultError(f"{type(result).__name__}, not a tensor")
    if result.shape != given.shape:
        raise WrongResultError(f"a tensor of shape {tuple(result.shape)}, not {tuple(given.shape)}")
    if not result.is_floating_point():
        raise WrongResultError(f"a tensor of {result.dtype}, not of floating-point numbers")
    if result.device != given.device:
        raise WrongResultError(f"a tensor on {result.device}, not on {given.device}")


def processor_name(processor: Any) -> str:
    """The name of a function, a class or an instance's class, for messages."""
    return getattr(processor, "__name__", type(processor).__name__)


def failure_message(name: str, error: Exception) -> str:
    """The user's message when a processor fails."""
    if isinstance(error, WrongResultError):
        return f"logits processor {name} returned {error}"
    return f"logits processor {name} raised {type(error).__name__}: {error}"
