"""What a request to a pooling model asks for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.utils.checks import check_integer

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"]


@dataclass
class LateInteractionParams:
    """How token embeddings of queries and documents are compared."""

    mode: str
    query_key: str
    query_uses: int | None = None


@dataclass
class LateChunkingParams:
    """Embeddings of parts of `chunk_size` tokens, each read in the light of the whole text."""

    chunk_size: int

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise VLLMValidationError("chunk_size must be at least 1", "chunk_size", self.chunk_size)


@dataclass
class PoolingParams:
    """Parameters of one request to a pooling model.

    Attributes:
        use_activation: apply the head's activation; None: the model's default.
        dimensions: length of the embedding; None: the model's.
        step_tag_id: the token whose positions are read, for reward models.
        returned_token_ids: the columns that are kept of such a reading.
        task: which pooling is asked for; None: the method called says it.
        requires_token_ids: whether the head needs the prompt's ids.
        skip_reading_prefix_cache: compute the whole prompt.
        extra_kwargs: compressed_token_type_ids: the position from which tokens have type 1.
        truncate_prompt_tokens: keep so many tokens of the beginning; -1: as many as the model takes; None: no more is
            an error.
        normalize: the older name of use_activation for embeddings.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: PoolingTask | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: LateChunkingParams | None = None
    truncate_prompt_tokens: int | None = None
    normalize: bool | None = None

    def verified(self, tasks: Sequence[str], hidden_size: int) -> PoolingParams:
        """A copy with its task, for a model that has `tasks`.

        Raises:
            VLLMValidationError: a task that the model does not have, or a field that is not served.
        """
        own = self.clone()
        own.task = own.task or tasks[0]  # type: ignore[assignment]
        if own.task not in tasks:
            raise VLLMValidationError(f"the model has the tasks {', '.join(tasks)}, not {own.task}", "task", own.task)
        if own.normalize is not None:
            own.use_activation, own.normalize = own.normalize, None
        if own.dimensions is not None:
            if "classify" in own.task:  # type: ignore[operator]
                raise VLLMValidationError("dimensions is for embeddings", "dimensions", own.dimensions)
            check_integer("dimensions", own.dimensions, 1, hidden_size)
        for name in ("late_interaction_params", "late_chunking_params"):
            value = getattr(own, name)
            if value:
                raise VLLMValidationError(f"PoolingParams.{name} is not supported: leave it out", name, value)
        for name in ("step_tag_id", "returned_token_ids"):
            value = getattr(own, name)
            if value is not None and own.task != "token_classify":
                raise VLLMValidationError(f"{name} is for the task token_classify, not {own.task}", name, value)
        return own

    def clone(self) -> PoolingParams:
        """A copy of its own."""
        return copy.deepcopy(self)
