"""The engine as a server asks it. AsyncLLM is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.async_llm import AsyncLLM

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.inputs import PromptType
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


@dataclass
class StreamingInput:
    """A part of a prompt that is still to be continued."""

    prompt: Any
    sampling_params: SamplingParams | None = None


class EngineClient(ABC):
    """Base for isinstance checks and annotations; AsyncLLM counts as one."""

    vllm_config: VllmConfig
    model_config: ModelConfig

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether the engine is dead."""

    @property
    @abstractmethod
    def dead_error(self) -> BaseException | None:
        """The error that ended the engine."""

    @abstractmethod
    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs, as they come."""

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Drop requests."""

    @abstractmethod
    async def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: the engine is dead.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks."""


EngineClient.register(AsyncLLM)


_READ_LOGGERS = "the engine feeds no loggers: read LLM.get_metrics, the server's /metrics, or RequestOutput.metrics"
