"""The interface of custom logits processors, and the updates of the batch that they receive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams


class MoveDirectionality(Enum):
    """The effect of a move (a, b) on the requests at the two indices."""

    UNIDIRECTIONAL = "unidirectional"
    """The request at a goes to b; nothing is left at a."""
    SWAP = "swap"
    """The two requests change places."""


RemovedRequest = int
"""The index that a request left."""
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt token ids, and the output token ids: the request's own list, which grows with every token
that it generates."""
MovedRequest = tuple[int, int, MoveDirectionality]
"""The indices a and b, and the direction."""


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch differs from the last step's. To be followed in this order: removed, added, moved. An added request
    may take the index of a finished one; the index is then not among `removed`."""

    batch_size: int  # requests in the batch after the update; their indices are 0 to batch_size - 1
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of a whole batch, once a step. One instance serves all requests of an engine. Every step first
    calls `update_state`, then `apply`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: B027
        """`device` is that of the logits in `apply`; with `is_pin_memory`, tensors to be uploaded to it should be in
        pinned memory."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request's parameters before it is queued. Raises ValueError when they cannot be honoured, which the
        engine raises as a VLLMValidationError."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether `apply` never changes which token of a row is the most likely. Called once, when the engine starts.
        Such a processor runs after min_p, does not affect greedy requests, and is skipped when all are greedy."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch's changes; None: nothing changed. Called in every step, also when `apply` is skipped."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Process float32 [batch_size, V]; row i is of the request at index i. Returns the argument, changed in place,
        or a new tensor of its shape."""
