"""Everything that the values of a model's weights and of what it computes depend on, beside the code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vllm import envs
from vllm.config import ModelConfig
from vllm.ops.cpu_kernels import packs_for


def model_identity(config: ModelConfig, files: Iterable[Path]) -> dict[str, Any]:
    """Torch, the kernels' level, the checkpoint's `files` by path, size and times, the configuration, and the
    environment variables that choose how a model computes. OSError: a file is not there."""
    stats = [(path, path.stat()) for path in files]
    pooling = (config.convert, config.pooler_config, config.pooling, config.pooling_tasks, config.late_interaction)
    return {
        "torch": torch.__version__,
        "level": packs_for(),
        "files": [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats],
        "config": config.hf_config.raw,
        "options": [config.dtype, config.quantization, config.rounding, config.model_impl, config.runner_type],
        "pooling": repr(pooling),
        "environment": envs.arithmetic(),
    }
