"""An inference engine, compatible with vLLM, for reading the log-probabilities of chosen tokens."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from vllm.upstream import finder
from vllm.version import __version__, __version_tuple__

_EXPORTS = {
    "LLM": "vllm.entrypoints.llm",
    "LLMEngine": "vllm.v1.engine.llm_engine",
    "AsyncLLM": "vllm.entrypoints.async_llm",
    "AsyncLLMEngine": "vllm.entrypoints.async_llm:AsyncLLM",
    "EngineArgs": "vllm.engine.arg_utils",
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "SamplingParams": "vllm.sampling_params",
    "BeamSearchParams": "vllm.params.beam_search",
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
    "ModelRegistry": "vllm.models",
    "audit": "vllm.auditing.api",
    "initialize_ray_cluster": "vllm.v1.executor.ray_utils",
}

# Their import takes seconds.
_ENGINES = ("LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine")

__all__ = ["__version__", "__version_tuple__", *_EXPORTS]

if TYPE_CHECKING:
    from vllm.auditing.api import audit
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.async_llm import AsyncLLM
    from vllm.entrypoints.async_llm import AsyncLLM as AsyncLLMEngine
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.models import ModelRegistry
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
    from vllm.params.beam_search import BeamSearchParams
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.ray_utils import initialize_ray_cluster

finder.install()

# OpenMP's threads spin while they wait for one another, by default for some milliseconds; where other programs have
# taken a core, every operator waits that long. The library reads this when torch loads it; our processes inherit it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    from vllm.utils.packages import needed_by

    if name in _ENGINES:
        from vllm.utils.packed import ahead

        ahead.begin()
    module, _, other = _EXPORTS[name].partition(":")
    with needed_by(f"vllm.{name}"):
        value = getattr(importlib.import_module(module), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
