"""Building a resolved model with its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.linear_method import linear_method
from vllm.model_executor.layers.quantization.settings import load_quantization
from vllm.model_executor.layers.quantization.stored import StoredConfig
from vllm.model_executor.layers.weight_update import WeightUpdater
from vllm.model_executor.model_loader.resolve import (
    NO_EMBEDDED_MODEL,
    ResolvedModel,
    embedded_model_path,
    resolve_model,
)
from vllm.model_executor.model_loader.weights import fill_with_noise, load_weights
from vllm.model_executor.models.registry import TRANSFORMERS, import_model_class, model_entry
from vllm.utils.host_memory import return_freed_memory

if TYPE_CHECKING:
    from vllm.config import ModelConfig

__all__ = ["NO_EMBEDDED_MODEL", "ResolvedModel", "embedded_model_path", "get_model", "resolve_model"]


def get_model(model_config: ModelConfig, device: torch.device | str, use_tqdm: bool = False) -> nn.Module:
    """Build the model of `model_config` on `device`, with its weights loaded (random with load_format="dummy") and
    packed. Its methods are those of LlamaForCausalLM. ValueError for an architecture that is not supported, or weights
    that are missing, unexpected or of another shape."""
    config = model_config.hf_config
    entry = model_entry(config.architectures, model_config.model_impl)
    model_class: Any = import_model_class(entry)
    with _building(getattr(torch, model_config.dtype), torch.device(device)):
        if entry == TRANSFORMERS:
            model = model_class(model_config)
        else:
            model = model_class(config, model_config.max_model_len)
    quantization = load_quantization(model_config.quantization, Path(model_config.path), config.raw)
    if isinstance(quantization, StoredConfig):
        _defer_weights(model)
    method = linear_method(model_config.quantization)
    model.weight_updater = WeightUpdater(model, method)
    with torch.inference_mode():
        if model_config.load_format == "dummy":
            fill_with_noise(model, model_config.seed)
        else:
            load_weights(model, Path(model_config.path), use_tqdm, quantization)
        for module in model.modules():
            finish = getattr(module, "process_weights_after_loading", None)
            if finish is not None:
                finish(method)
        if entry == TRANSFORMERS:
            model.check_loaded()
    # Loading and packing freed, with a small model, as much memory as the weights take.
    return_freed_memory()
    return model.eval()


def _defer_weights(model: nn.Module) -> None:
    """Let linear layers take memory for their weights only if these are not quantised."""
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.defer_weight()


@contextlib.contextmanager
def _building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """New parameters get this dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
