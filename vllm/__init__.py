"""An inference engine, compatible with vLLM, for reading the log-probabilities of chosen tokens."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm.utils.packages import needed_by
from vllm.version import __version__, __version_tuple__

_EXPORTS = {
    "LLM": "vllm.entrypoints.llm",
    "LLMEngine": "vllm.v1.engine.llm_engine",
    "AsyncLLM": "vllm.entrypoints.async_llm",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "SamplingParams": "vllm.sampling_params",
    "BeamSearchParams": "vllm.beam_search",
    "RequestOutput": "vllm.outputs",
    "CompletionOutput": "vllm.outputs",
    "LabelScore": "vllm.outputs",
    "LabelScores": "vllm.outputs",
    "TokensPrompt": "vllm.inputs",
    "TextPrompt": "vllm.inputs",
    "PromptType": "vllm.inputs",
    "PoolingParams": "vllm.pooling_params",
    "PoolingOutput": "vllm.outputs",
    "PoolingRequestOutput": "vllm.outputs",
    "EmbeddingOutput": "vllm.outputs",
    "EmbeddingRequestOutput": "vllm.outputs",
    "ClassificationOutput": "vllm.outputs",
    "ClassificationRequestOutput": "vllm.outputs",
    "ScoringOutput": "vllm.outputs",
    "ScoringRequestOutput": "vllm.outputs",
    "ModelRegistry": "vllm.model_executor.models",
    "initialize_ray_cluster": "vllm.v1.executor.ray_utils",
}

__all__ = ["__version__", "__version_tuple__", *_EXPORTS]

if TYPE_CHECKING:
    from vllm.beam_search import BeamSearchParams
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.entrypoints.async_llm import AsyncLLM
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models import ModelRegistry
    from vllm.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        LabelScore,
        LabelScores,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.ray_utils import initialize_ray_cluster


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    with needed_by(f"vllm.{name}"):
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
