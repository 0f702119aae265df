"""Methods of LLM for pooling models, none of which is served yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.pooling_params import refuse_pooling

if TYPE_CHECKING:
    from vllm.inputs import DataPrompt, PromptType
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams, PoolingTask


class PoolingOfflineMixin:
    """Each method raises VLLMValidationError and says what to do instead."""

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType] | DataPrompt,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Hidden states, pooled."""
        refuse_pooling("LLM.encode")

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """An embedding for each prompt."""
        refuse_pooling("LLM.embed")

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Class probabilities for each prompt."""
        refuse_pooling("LLM.classify")

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> NoReturn:
        """How well texts match."""
        refuse_pooling("LLM.score")

    def reward(
        self,
        prompts: PromptType | Sequence[PromptType],
        /,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: list[LoRARequest] | LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """A reward model's values."""
        refuse_pooling("LLM.reward")
