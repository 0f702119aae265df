"""What a request to a pooling model asks for. None is served yet: whoever takes these values refuses them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

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
        extra_kwargs: further arguments of a plug-in.
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

    def clone(self) -> PoolingParams:
        """A copy of its own."""
        return copy.deepcopy(self)


def refuse_pooling(what: str) -> NoReturn:
    """
    Args:
        what: the method or argument, at the beginning of the message.

    Raises:
        VLLMValidationError: always.
    """
    raise VLLMValidationError(
        f"{what}: pooling models (embeddings, classifiers, rerankers) are not served; LLM.score_labels and "
        "logprob_token_ids read the probabilities of chosen answers from a generating model",
        what,
    )
