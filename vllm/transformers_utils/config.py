"""config.json and generation_config.json as one object. transformers is not used: its import takes seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Defaults of transformers' configuration classes, which save_pretrained omits from some files.
_TIED_BY_DEFAULT = {"opt"}
_SWITCHED_SLIDING_WINDOW = {"qwen2", "qwen3"}
_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_ROPE_THETA = 10000.0
_DTYPES = ("float32", "bfloat16", "float16")
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: default, linear, dynamic, llama3, yarn, or factors (frequency divisors of a GGUF file).
        theta: base of the frequencies.
        params: the other entries of `rope_parameters` (factor, original_max_position_embeddings ...).
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HFConfig:
    """A model's configuration under config.json's names; `raw` holds the whole file.

    Attributes:
        dtype: the checkpoint's dtype; None if the file has none.
        sliding_window: tokens that a layer attends to at most; None = all.
        eos_token_ids: every end-of-sequence id of config.json and generation_config.json.
        default_sampling_params: sampling fields that generation_config.json recommends.
    """

    architectures: tuple[str, ...]
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    hidden_act: str
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    default_sampling_params: dict[str, Any]
    # OPT
    word_embed_proj_dim: int
    do_layer_norm_before: bool
    remove_final_layer_norm: bool
    enable_bias: bool
    layer_norm_elementwise_affine: bool
    raw: dict[str, Any] = field(repr=False)

    @property
    def max_context_len(self) -> int:
        """Longest sequence in tokens: the trained length times the factor of a linear or yarn scaling, at most the
        sliding window, up to which full attention gives the same result."""
        length = float(self.max_position_embeddings)
        if self.rope.rope_type == "yarn":
            length = max(length, self.rope.params["original_max_position_embeddings"] * self.rope.params["factor"])
        elif self.rope.rope_type == "linear":
            length *= self.rope.params["factor"]
        return int(length) if self.sliding_window is None else min(int(length), self.sliding_window)


def load_hf_config(folder: Path, overrides: dict[str, Any] | None = None) -> HFConfig:
    """Read a model folder's config.json, with `overrides` of its entries, and its generation_config.json if any.

    Raises:
        ValueError: no config.json, not JSON, or a missing or unusable field.
    """
    raw = _read_json(folder, "config.json")
    if raw is None:
        raise ValueError(f"{folder.name} has no config.json, so it is not a Hugging Face model folder")
    _apply_overrides(raw, overrides or {})
    generation = _read_json(folder, "generation_config.json") or {}
    return parse_hf_config(raw, generation, f"{folder.name}/config.json")


def parse_hf_config(raw: dict[str, Any], generation: dict[str, Any], where: str = "config.json") -> HFConfig:
    """Build the configuration from the contents of config.json (`where` in errors) and generation_config.json.

    Raises:
        ValueError: a missing or unusable field.
    """
    fields = _Fields(raw, where)
    model_type = raw.get("model_type") or ""
    is_opt = model_type == "opt"
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads={num_kv_heads}, got {num_heads}"
        )
    return HFConfig(
        architectures=tuple(raw.get("architectures") or ()),
        model_type=model_type,
        hidden_size=hidden_size,
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads),
        intermediate_size=fields.integer("ffn_dim" if is_opt else "intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(raw, where),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", model_type in _TIED_BY_DEFAULT),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        sliding_window=_parse_sliding_window(raw, model_type, fields),
        hidden_act=str(raw.get("activation_function") or "relu" if is_opt else raw.get("hidden_act") or "silu"),
        dtype=_parse_dtype(raw),
        bos_token_id=next(iter(_merge_ids(generation.get("bos_token_id"), raw.get("bos_token_id"))), None),
        eos_token_ids=_merge_ids(raw.get("eos_token_id"), generation.get("eos_token_id")),
        default_sampling_params=_sampling_defaults(generation),
        word_embed_proj_dim=fields.integer("word_embed_proj_dim", hidden_size),
        do_layer_norm_before=fields.boolean("do_layer_norm_before", True),
        remove_final_layer_norm=fields.boolean("_remove_final_layer_norm", False),
        enable_bias=fields.boolean("enable_bias", True),
        layer_norm_elementwise_affine=fields.boolean("layer_norm_elementwise_affine", True),
        raw=raw,
    )


def load_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling fields that a folder's generation_config.json recommends.

    Raises:
        ValueError: there is no such file, or it is not JSON.
    """
    generation = _read_json(folder, "generation_config.json")
    if generation is None:
        raise ValueError(
            f"generation_config must be 'auto', 'vllm' or a folder with generation_config.json, got {folder}"
        )
    return _sampling_defaults(generation)


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation["max_new_tokens"]
    return defaults


class _Fields:
    """Typed access to config.json; errors name the file, field and value."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self._where}: {name} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self._where}: {name} must be a number, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._where}: {name} must be true or false, got {value!r}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"{self._where} has no {name}")
            return default
        return value


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder.name}/{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{folder.name}/{name} must hold an object, got {type(value).__name__}")
    return value


def _apply_overrides(raw: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Replace entries; the older names rope_scaling and rope_theta override a file's rope_parameters, too."""
    raw.update(overrides)
    if "rope_scaling" in overrides and "rope_parameters" not in overrides:
        theta = (raw.pop("rope_parameters", None) or {}).get("rope_theta")
        if theta is not None:
            raw.setdefault("rope_theta", theta)
    if "rope_theta" in overrides and isinstance(raw.get("rope_parameters"), dict):
        raw["rope_parameters"] = raw["rope_parameters"] | {"rope_theta": overrides["rope_theta"]}


def _parse_rope(raw: dict[str, Any], where: str) -> RopeConfig:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{where}: rope_parameters must be an object, got {given!r}")
    params = {name: value for name, value in given.items() if value is not None}
    old_type = params.pop("type", "default")
    rope_type = params.pop("rope_type", old_type)
    theta = params.pop("rope_theta", raw.get("rope_theta") or _DEFAULT_ROPE_THETA)
    if rope_type not in _ROPE_TYPES:
        raise ValueError(f"{where}: rope_type must be one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor must be 1.0, got {partial!r}")
    if rope_type in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        params[name] = raw.get(name) or params.get(name) or raw.get("max_position_embeddings")
    if rope_type == "yarn" and "factor" not in params:
        params["factor"] = raw["max_position_embeddings"] / params["original_max_position_embeddings"]
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "factors": ("factors",),
    }
    for name in needed.get(rope_type, ()):
        if name not in params:
            raise ValueError(f"{where}: rope_parameters of type {rope_type} has no {name}")
    return RopeConfig(rope_type, float(theta), params)


def _parse_sliding_window(raw: dict[str, Any], model_type: str, fields: _Fields) -> int | None:
    if model_type in _SWITCHED_SLIDING_WINDOW:
        # Only layers from max_window_layers on have the window.
        active = fields.boolean("use_sliding_window", False)
        if not active or raw.get("max_window_layers", 28) >= raw["num_hidden_layers"]:
            return None
    elif model_type != "mistral":
        return None
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", _DEFAULT_SLIDING_WINDOW)


def _parse_dtype(raw: dict[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    name = str(value).removeprefix("torch.") if value is not None else None
    return name if name in _DTYPES else None


def _merge_ids(*values: Any) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in ids:
                ids.append(item)
    return tuple(ids)
