"""transformers' configuration object of a model, for models that run as transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config.checkpoint.config import HFConfig, parse_hf_config

# They recompute the rotation of all positions when a sequence grows beyond the trained length.
_GROWING_ROPE_TYPES = ("dynamic", "longrope")


def load_auto_config(raw: dict[str, Any], folder: Path, trust_remote_code: bool) -> Any:
    """transformers' configuration of the contents `raw` of a folder's config.json, overrides included.

    Raises:
        ValueError: transformers does not know the model type or cannot use a value, or the folder has code of its own
            and `trust_remote_code` is False.
    """
    from transformers import CONFIG_MAPPING

    raw = _with_floats(raw)
    model_type, remote = str(raw.get("model_type")), (raw.get("auto_map") or {}).get("AutoConfig")
    try:
        if remote is not None and (trust_remote_code or model_type not in CONFIG_MAPPING):
            if not trust_remote_code:
                raise ValueError(
                    f"{folder.name} has a model of its own code ({remote}): pass trust_remote_code=True to run it"
                )
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            config_class: Any = get_class_from_dynamic_module(remote, str(folder))
            return config_class.from_dict(raw)
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"{folder.name}/config.json: transformers has no model_type {model_type!r}")
        return CONFIG_MAPPING[model_type].from_dict(raw)
    except ValueError:
        raise
    except Exception as error:  # a configuration class may refuse a value in any way
        raise ValueError(f"{folder.name}/config.json is not one that transformers takes: {error}") from error


def _with_floats(value: Any) -> Any:
    """A value of config.json with the floats in it that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def describe(auto: Any, geometry: dict[str, int], raw: dict[str, Any], generation: dict[str, Any]) -> HFConfig:
    """A model's configuration as the engine reads it, from transformers' configuration and the sizes of its parts
    (`geometry`: hidden_size, vocab_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim).

    Raises:
        ValueError: the configuration has no longest position.
    """
    width = getattr(auto, "intermediate_size", None)
    known = {
        **geometry,
        "architectures": raw.get("architectures"),
        "intermediate_size": width if isinstance(width, int) and width > 0 else geometry["hidden_size"],
        "max_position_embeddings": longest_context(auto),
        **{name: raw.get(name) for name in ("dtype", "torch_dtype", "eos_token_id", "bos_token_id")},
    }
    for name in ("eos_token_id", "bos_token_id"):
        if known[name] is None:
            known[name] = getattr(auto, name, None)
    config = parse_hf_config(known, generation)
    return replace(config, model_type=str(raw.get("model_type")), raw=raw)


def longest_context(auto: Any) -> int:
    """Tokens of the longest sequence in which transformers' module computes a position as it does in shorter ones.

    Raises:
        ValueError: the configuration names none.
    """
    length = getattr(auto, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            "config.json has no max_position_embeddings: name the longest sequence by "
            "hf_overrides={'max_position_embeddings': N}"
        )
    longest = float(length)
    for rope in rope_parameters(auto):
        kind, trained = rope.get("rope_type"), rope.get("original_max_position_embeddings") or length
        if kind in _GROWING_ROPE_TYPES:
            return trained
        if kind == "yarn":
            longest = max(longest, trained * (rope.get("factor") or 1.0))
        elif kind == "linear":
            longest = max(longest, length * (rope.get("factor") or 1.0))
    return int(longest)


def rope_parameters(auto: Any) -> list[dict[str, Any]]:
    """The rotary settings, one for each kind of layers that has its own."""
    found = getattr(auto, "rope_parameters", None) or {}
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
