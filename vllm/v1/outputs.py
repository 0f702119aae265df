"""Results of the sampler and the model runner."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from vllm.logprobs.lists import LogprobsLists, LogprobsRow, LogprobsRows

if TYPE_CHECKING:
    import torch

__all__ = [
    "LogprobsLists",
    "LogprobsRow",
    "LogprobsRows",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "NO_TOKEN",
    "NO_TOKEN_LEFT",
    "NO_TOKEN_MESSAGE",
    "PendingStep",
]

NO_TOKEN = -1
"""In place of a sampled token id: the request has max_tokens=0."""
NO_TOKEN_LEFT = "no_token_left"
"""The stop reason, beside finish reason "error", of a sequence whose constraints rule out every token."""
NO_TOKEN_MESSAGE = (
    "no token can be sampled: structured_outputs, logits processors, bad_words, allowed_token_ids and min_tokens "
    "together rule out every one"
)


Part = TypeVar("Part")


class Parts(dict[type, Any]):
    """Guests' additions to a step or to its results: one value of a class of its own each."""

    def add(self, part: Any) -> None:
        self[type(part)] = part

    def of(self, kind: type[Part]) -> Part | None:
        """The part of this class, if there is one."""
        return self.get(kind)

    def made(self, kind: type[Part]) -> Part:
        """The part of this class; an empty one is added if there is none."""
        part: Part | None = self.get(kind)
        if part is None:
            part = self[kind] = kind()
        return part

    def sendable(self) -> Parts:
        """The parts as the other ranks need them, of those that have a method for it."""
        return Parts({kind: part.sendable() if hasattr(part, "sendable") else part for kind, part in self.items()})

    def without(self, req_ids: Collection[str]) -> Parts:
        """The parts without these requests, of those that have a method for it."""
        return Parts({kind: part.without(req_ids) if hasattr(part, "without") else part for kind, part in self.items()})


class LogprobsTensors(NamedTuple):
    """Readings of L logits rows on the device. Columns: the sampled token, K top-k entries, up to M requested ids.
    Cells that a row did not ask for hold 0."""

    logprob_token_ids: torch.Tensor  # int32 [L, 1 + K + M]
    logprobs: torch.Tensor  # float32 [L, 1 + K + M]
    cu_num_generated_tokens: list[int] | None  # row bounds of each request when it has several rows
    logits: torch.Tensor  # float32 [L, 1 + K + M]
    ranks: torch.Tensor  # int32 [L, 1 + K + M]
    lse: torch.Tensor  # float32 [L]
    num_topk: int  # K
    num_token_ids: torch.Tensor | None = None  # int32 [L], valid ids among the last M columns; None: M == 0
    entropy: torch.Tensor | None = None  # float32 [L], in nats; None: not requested
    table: torch.Tensor | None = None  # int32 [L, 4 (1 + K + M) + 2], as LogprobsLists.table(), if there is one

    @property
    def selected_token_ranks(self) -> torch.Tensor:
        """int32 [L], the sampled token's rank."""
        return self.ranks[:, 0]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> LogprobsTensors:
        """The readings with `move` applied to what `tolists` reads."""
        names = ("logprob_token_ids", "logprobs", "logits", "ranks", "lse", "entropy", "table")
        tensors = ((name, getattr(self, name)) for name in names)
        changed: dict[str, Any] = {name: move(tensor) for name, tensor in tensors if tensor is not None}
        return self._replace(**changed)

    def tolists(self) -> LogprobsLists:
        """The readings as numpy arrays on the host."""
        if self.table is not None:
            return LogprobsLists.of_table(self.table.cpu().numpy(), self.num_topk, self.entropy is not None)
        return LogprobsLists(
            self.logprob_token_ids.cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.logits.cpu().numpy(),
            self.ranks.cpu().numpy(),
            self.lse.cpu().numpy(),
            self.num_topk,
            None if self.entropy is None else self.entropy.cpu().numpy(),
        )


class FollowingTokens(NamedTuple):
    """The N tokens that a step drew for a request after its first one."""

    token_ids: list[int]
    logprobs: list[LogprobsRow]  # N, or none where nothing is read
    allowed_mass: list[float]  # the same, of ModelRunnerOutput.allowed_mass


@dataclass
class ModelRunnerOutput:
    """The results of one step, for the R requests whose known tokens all have KV after it, in batch order."""

    req_ids: list[str]
    sampled_token_ids: np.ndarray  # int32 [R]; NO_TOKEN for a request that samples none
    logprobs: list[LogprobsRow | None]  # one a request; None: no readings requested
    errors: dict[str, str] = field(default_factory=dict)  # request id -> why it ends here
    exhausted: set[str] = field(default_factory=set)  # of `errors`, those that have no token left
    beam_scores: dict[str, LogprobsRow] = field(default_factory=dict)  # a second row of requests that read candidates
    # Logarithms of the model's probability of what a request's grammar allows, where that is read.
    allowed_mass: dict[str, float] = field(default_factory=dict)
    # Readings of prompt positions, those of a request in order; also of requests whose prompt is not complete yet.
    prompt_logprobs: dict[str, list[LogprobsRows]] = field(default_factory=dict)
    following: dict[str, FollowingTokens] = field(default_factory=dict)  # where a request draws several tokens
    parts: Parts = field(default_factory=Parts)  # of guests
    readings_seconds: float = 0.0  # device time spent on reading logits for logprobs
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)  # of pooling models: float32, on the CPU

    def without(self, req_ids: Collection[str]) -> ModelRunnerOutput:
        """The output without these requests."""
        kept = [row for row, req_id in enumerate(self.req_ids) if req_id not in req_ids]
        return replace(
            self,
            req_ids=[self.req_ids[row] for row in kept],
            sampled_token_ids=self.sampled_token_ids[kept],
            logprobs=[self.logprobs[row] for row in kept],
            errors={req_id: message for req_id, message in self.errors.items() if req_id not in req_ids},
            prompt_logprobs={req_id: rows for req_id, rows in self.prompt_logprobs.items() if req_id not in req_ids},
            parts=self.parts.without(req_ids) if self.parts else self.parts,
            pooled={req_id: tensor for req_id, tensor in self.pooled.items() if req_id not in req_ids},
        )


class PendingStep(Protocol):
    """A step that has begun."""

    def result(self) -> ModelRunnerOutput:
        """Its output. Waits for the device; the first call may raise the step's error."""
