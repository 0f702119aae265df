"""What a model is asked to do. Models here generate."""

from __future__ import annotations

from typing import Literal, get_args

from vllm.pooling_params import PoolingTask

GenerationTask = Literal["generate", "transcription", "realtime"]
SupportedTask = Literal[GenerationTask, PoolingTask, "render"]
GENERATION_TASKS = get_args(GenerationTask)
POOLING_TASKS = get_args(PoolingTask)

__all__ = ["GENERATION_TASKS", "GenerationTask", "POOLING_TASKS", "PoolingTask", "SupportedTask"]
