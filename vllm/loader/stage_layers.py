"""The share of a model's layers that a stage has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm import envs
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.stages import WHOLE, ModelSizes, Stage, building_stage, layers_as_asked, split_layers
from vllm.layers.attention import attention_layers
from vllm.layers.kv_cache_spec import kv_cache_specs
from vllm.layers.weight_update import module_slots
from vllm.models.registry import import_model_class, model_entry
from vllm.models.vision.families import picture_family


def layers_of_stage(config: ModelConfig, stage: Stage) -> range:
    """The same on every rank of every stage: what VLLM_PP_LAYER_PARTITION says, else see `split_layers`.

    Raises:
        ValueError: there are more stages than layers, or VLLM_PP_LAYER_PARTITION does not fit them.
    """
    asked = envs.layer_partition()
    if asked is not None:
        return layers_as_asked(asked, config.hf_config.num_hidden_layers, stage.size)[stage.index]
    return split_layers(_sizes(config), stage.size, stage.rooms)[stage.index]


def _sizes(config: ModelConfig) -> ModelSizes:
    """Sizes of plain weights, of a model that is built without memory."""
    hf_config = config.hf_config
    make = import_model_class(model_entry(hf_config.architectures, config.model_impl, hf_config.raw))
    before, dtype = torch.get_default_dtype(), getattr(torch, config.dtype)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), building_stage(WHOLE):
            model: Any = make(hf_config, config.max_model_len)
    finally:
        torch.set_default_dtype(before)
    layers, specs = model.model.layers, iter(kv_cache_specs(model, hf_config, get_tp_group()))
    token_bytes = [
        sum(next(specs).values_per_token for _ in attention_layers(each)) * dtype.itemsize for each in layers
    ]
    vocab_bytes = _weight_bytes(model.model.embed_tokens)
    return ModelSizes(
        [_weight_bytes(each) for each in layers],
        [config.max_model_len * each for each in token_bytes],
        vocab_bytes,
        0 if config.runner_type == "pooling" else vocab_bytes,
        max(picture_family(hf_config, Path(config.path)).added_before, default=0) if config.reads_images else 0,
    )


def _weight_bytes(part: nn.Module) -> int:
    slots = (slot for name, module in part.named_modules() for slot in module_slots(module, name).values())
    return sum(slot.target.numel() * slot.target.element_size() for slot in slots)
