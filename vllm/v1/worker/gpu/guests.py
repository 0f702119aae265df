"""The model runner's questions to its guests.

A guest is a feature that only some requests need: it has a room in `vllm/v1/features`, where also the list of guests
and its order are. The runner calls lists of their methods and knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import KVCaches, RequestStates


class CacheSizes(NamedTuple):
    """Sizes of what is allocated when the KV cache is; 0 blocks: it is freed."""

    num_blocks: int = 0
    num_host_blocks: int = 0
    state_slots: Any = None  # a StateSlots, where layers have states
    is_scratch: bool = False  # for steps whose results are discarded


class Samples(Protocol):
    """Tokens and readings of R requests, dispatched."""

    draws: np.ndarray  # bool [R], rows that need the token; the others need readings only
    owners: np.ndarray  # int64 [R], the numbers of the slots' requests

    @property
    def slots(self) -> np.ndarray:
        """int64 [R]"""
        ...

    def put_into(self, output: ModelRunnerOutput, states: RequestStates) -> dict[int, str]:
        """Wait for the results, and put them into the states and into the output, whose first R requests these are.
        Returns the errors by their number."""
        ...

    def judged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The fate of tokens that were not certain, after `put_into`: the slots that had any, int64, their numbers
        and those of the leading ones that are right, both int32."""
        ...


class StepOutcome(NamedTuple):
    """A step's results while they are put together, on the host."""

    output: ModelRunnerOutput
    sampled: Samples | None  # its tokens are in the states
    errors: dict[str, str]  # request id -> why it ends
    unsound: set[str]  # requests of which nothing is returned

    def by_request(self, found: dict[int, Any]) -> dict[str, Any]:
        """Values by index into `sampled`, by the ids of their requests."""
        return {self.output.req_ids[index]: value for index, value in found.items()}


Completion = Callable[[StepOutcome], None]
"""Called once, when the results of a step are on the host."""


class RunnerGuest:
    """A feature's side in the worker. Every method is optional: only those that a class defines are ever called, in
    the order of the list of guests. Every rank of a tensor-parallel group calls its guests alike.

    Attributes:
        logits_rows: rows of logits that a request may have in a step because of it.
    """

    logits_rows: int = 1

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes that it keeps beside keys and values in each KV block."""
        return 0

    @property
    def own_bytes(self) -> int:
        """Bytes that it takes from the cache's memory beside the KV blocks."""
        return 0

    @property
    def host_block_bytes(self) -> int:
        """Bytes of `in_blocks` in a block."""
        return 0

    def in_blocks(self) -> KVCaches:
        """Tensors [B, ...] that are copied with a KV block when it is."""
        return []

    def reset(self, sizes: CacheSizes) -> None:
        """The KV cache was allocated anew, or freed. No request has a slot."""

    # -- weights --------------------------------------------------------------------------------------------------

    def models(self) -> Sequence[Any]:
        """Models of its own, whose weights sleep and wake with the runner's."""
        return ()

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """The model has taken new weights, by their checkpoint names."""

    def version(self) -> int:
        """A number that changes when steps that were recorded before must not be replayed any more."""
        return 0

    # -- slots ----------------------------------------------------------------------------------------------------

    def remove(self, slot: int) -> None:
        """The slot's request has ended or was preempted."""

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        """A request has taken the slot, which is filled."""

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, step: SchedulerOutput) -> None:
        """A step begins, maybe one without tokens: no slot and no block has changed yet."""

    def before_batch(self, step: SchedulerOutput) -> None:
        """The slots are the step's: tokens that are not certain may be placed after the known ones."""

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        """The batch is built: it may be told which further hidden states are needed, and how layers change."""

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        """The final hidden states of `batch.hidden_rows_np`, [M, H], are dispatched."""

    def sample(self, batch: InputBatch, hidden: Tensor) -> Samples | None:
        """Draw and read in place of the runner; None: the next guest, or the runner, does."""
        return None

    def changes_head(self) -> bool:
        """Whether the logits of some request may be others than the head's product."""
        return False

    def before_rows(self, slots: np.ndarray) -> None:
        """The model's embeddings or its head take rows apart from a step: the slot of each, int64 [L]."""

    def before_request(self, slot: int) -> None:
        """A part of the model takes rows of this request alone."""

    def vector(self, slot: int) -> Tensor | None:
        """The hidden states [L, H] of this request, which the model does not compute then; None: it does."""
        return None

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        """The samples are dispatched. Returns what completes the guest's part of the results, if anything does."""
        return None


def hooks(guests: Sequence[RunnerGuest], name: str) -> tuple[Any, ...]:
    """The methods of this name, bound, of the guests that define one, in their order."""
    base = getattr(RunnerGuest, name)
    return tuple(getattr(guest, name) for guest in guests if getattr(type(guest), name) is not base)
