"""The engine's configuration as a model that was written for upstream reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.config.checkpoint.auto_config import load_auto_config, rope_parameters
from vllm.distributed.parallel_state import get_tp_group
from vllm.upstream.config.compilation import CompilationConfig


def transformers_config(raw: dict[str, Any], folder: Path, trust_remote_code: bool) -> Any:
    """transformers' configuration object of a folder; a bare one of config.json's entries for a model_type that nobody
    registered. Options of the rotary embedding are there by their former names, too.

    Raises:
        ValueError: see `load_auto_config`.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    has_code = "AutoConfig" in (raw.get("auto_map") or {})
    is_known = str(raw.get("model_type")) in CONFIG_MAPPING or has_code
    config = load_auto_config(raw, folder, trust_remote_code) if is_known else PretrainedConfig.from_dict(dict(raw))
    config._name_or_path = str(folder)
    ropes = rope_parameters(config)
    if len(ropes) == 1:
        rope = ropes[0]
        _default(config, "rope_theta", rope.get("rope_theta"))
        is_plain = rope.get("rope_type", "default") == "default"
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        _default(config, "rope_scaling", None if is_plain else scaling)
        _default(config, "partial_rotary_factor", rope.get("partial_rotary_factor"))
    return config


def _default(config: Any, name: str, value: Any) -> None:
    if not hasattr(config, name) and (value is not None or name == "rope_scaling"):
        setattr(config, name, value)


class View:
    """An object's attributes, of which some are others."""

    def __init__(self, of: Any, **own: Any) -> None:
        self.__dict__.update(own, _of=of)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_of"], name)

    def __repr__(self) -> str:
        return repr(self._of)


def engines_own(config: Any) -> Any:
    """The engine's own configuration that a view is of."""
    while isinstance(config, View):
        config = config.__dict__["_of"]
    return config


class ModelConfigView(View):
    """ModelConfig: `hf_config` is transformers' object, `dtype` torch's."""

    def get_num_layers(self, parallel_config: Any = None) -> int:
        """Layers of the decoder."""
        return self._of.hf_config.num_hidden_layers

    def get_num_attention_heads(self, parallel_config: Any = None) -> int:
        """This rank's query heads."""
        return self._of.hf_config.num_attention_heads // get_tp_group().world_size

    def get_num_kv_heads(self, parallel_config: Any = None) -> int:
        """This rank's key/value heads."""
        return max(1, self.get_total_num_kv_heads() // get_tp_group().world_size)

    def get_total_num_kv_heads(self) -> int:
        """All key/value heads."""
        return self._of.hf_config.num_key_value_heads

    def get_head_size(self) -> int:
        """Values of a head."""
        return self._of.hf_config.head_dim

    def get_sliding_window(self) -> int | None:
        """Tokens that a query sees in every layer; None: all, or it depends on the layer."""
        return uniform_window(self.hf_text_config)


class VllmConfigView(View):
    """VllmConfig of such parts."""

    def with_hf_config(self, hf_config: Any, architectures: list[str] | None = None) -> VllmConfigView:
        """The same for a part of the model that has its own configuration."""
        if architectures is not None:
            hf_config.architectures = architectures
        model = ModelConfigView(
            self.model_config, hf_config=hf_config, hf_text_config=hf_config, multimodal_config=None
        )
        return VllmConfigView(self, model_config=model)


def uniform_window(hf: Any) -> int | None:
    """The window that all layers have, by transformers' configuration."""
    window = getattr(hf, "sliding_window", None)
    if not window or getattr(hf, "use_sliding_window", True) is False:
        return None
    kinds = set(getattr(hf, "layer_types", None) or ())
    return None if len(kinds) > 1 or kinds == {"full_attention"} else window


def view_of(config: VllmConfig, hf_config: Any) -> VllmConfigView:
    """`config` as upstream's models read it."""
    model = config.model_config
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    model_view = ModelConfigView(
        model,
        hf_config=hf_config,
        hf_text_config=text,
        dtype=getattr(torch, model.dtype),
        multimodal_config=None,
        use_mla=False,
        is_attention_free=False,
        head_dtype=torch.float32,
    )
    cache = View(
        config.cache_config,
        sliding_window=uniform_window(text),
        cache_dtype=config.cache_config.cache_dtype,
        calculate_kv_scales=False,
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
    )
    parallel = View(
        config.parallel_config,
        enable_expert_parallel=False,
        enable_eplb=False,
        eplb_config=View(None, num_redundant_experts=0),
        use_sequence_parallel_moe=False,
    )
    compilation = View(CompilationConfig(), static_forward_context={})
    parts = {"model_config": model_view, "cache_config": cache, "parallel_config": parallel}
    return VllmConfigView(config, **parts, quant_config=None, compilation_config=compilation)
