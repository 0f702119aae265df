"""What callers do after they have loaded weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
from vllm.utils.torch_utils import set_default_torch_dtype

__all__ = ["process_weights_after_loading", "set_default_torch_dtype"]


def process_weights_after_loading(model: nn.Module, model_config: Any, target_device: torch.device) -> None:
    """Check that what was loaded is whole; layouts are made anew by load_weights.

    Raises:
        ValueError: parts of a layer have come and others not.
    """
    finalize_layerwise_processing(model, model_config)
