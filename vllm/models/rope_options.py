"""The rotary options of config.json, in their older and newer forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config.checkpoint.config import RopeConfig

# The parameters of each type that are read, those that it needs first.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # The sections are of pictures' positions; text has one position in all of them.
    "default": ((), ("mrope_section", "mrope_interleaved")),
    "linear": (("factor",), ()),
    "dynamic": ((), ("factor",)),
    # Hunyuan's: theta * alpha ** (dim / (dim - 2)).
    "ntk_alpha": (("alpha",), ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        (
            *("beta_fast", "beta_slow", "attention_factor", "attn_factor", "mscale", "mscale_all_dim", "truncate"),
            "llama_4_scaling_beta",
        ),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
    "factors": (("factors",), ()),
}
_OTHER_NAMES = {"su": "longrope", "none": "default", "mrope": "default"}
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeDefaults:
    """A family's rotary positions where config.json says nothing.

    Attributes:
        theta: base of the frequencies; `sliding_theta` that of layers with a window, where kinds have their own.
        partial: share of a head that rotates; None = all of it, and the option is refused.
        theta_names, share_names: the options outside of rope_parameters.
        parameters: those that the family has beside the type's own.
    """

    theta: float = 10000.0
    sliding_theta: float = 10000.0
    partial: float | None = None
    theta_names: Sequence[str] = ("rope_theta",)
    share_names: Sequence[str] = ("partial_rotary_factor",)
    parameters: Sequence[str] = ()


def read_rope(
    raw: dict[str, Any], where: str, defaults: RopeDefaults, kind: str | None = None
) -> tuple[RopeConfig, float]:
    """The rotary embedding of layers of `kind` (None = the only one), and the share of a head that rotates.

    Raises:
        ValueError: an unknown type, or a parameter that is missing or that the type does not have.
    """
    params = {name: value for name, value in _given(raw, where, kind).items() if value is not None}
    old_type = params.pop("type", "default")
    rope_type = params.pop("rope_type", old_type)
    rope_type = _OTHER_NAMES.get(rope_type, rope_type)
    if rope_type == "dynamic" and params.get("alpha"):
        rope_type = "ntk_alpha"
    if rope_type not in _PARAMETERS:
        raise ValueError(f"{where}: rope_type must be one of {', '.join(_PARAMETERS)}, got {rope_type!r}")
    theta_names, theta = defaults.theta_names, defaults.theta
    if kind == "sliding_attention":
        theta_names, theta = ("rope_local_base_freq",), defaults.sliding_theta
    theta = _positive(params.pop("rope_theta", _first(raw, theta_names, theta)), "rope_theta", where)
    share = params.pop("partial_rotary_factor", _first(raw, defaults.share_names, defaults.partial or 1.0))
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"{where}: partial_rotary_factor must be a number above 0 and at most 1, got {share!r}")
    if rope_type == "proportional":
        params["share"] = share
    elif share != 1 and defaults.partial is None:
        raise ValueError(f"{where}: partial_rotary_factor={share!r} is not supported: the whole of a head rotates")
    if rope_type in ("llama3", "yarn", "longrope"):
        outside = raw.get(_ORIGINAL) if kind is None else None
        params[_ORIGINAL] = outside or params.get(_ORIGINAL) or raw.get("max_position_embeddings")
        if rope_type != "llama3" and "factor" not in params:
            params["factor"] = raw["max_position_embeddings"] / params[_ORIGINAL]
    if kind is not None and params.get("truncate") is False:
        raise ValueError(f"{where}: rope_parameters of a kind of layers have no parameter truncate")
    _check(params, rope_type, where, defaults.parameters)
    return RopeConfig(rope_type, theta, params), share


def _given(raw: dict[str, Any], where: str, kind: str | None) -> dict[str, Any]:
    """The parameters of layers of `kind`. Scalings of older files, with one set of options, are meant for the layers
    without a window; newer files name the kinds."""
    newer, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for given in (newer, older):
        if not isinstance(given, dict):
            raise ValueError(f"{where}: rope_parameters must be an object, got {given!r}")
    if kind is None:
        return older or newer
    for given in (newer, older):
        if isinstance(given.get(kind), dict):
            return given[kind]
    if newer and not {"full_attention", "sliding_attention"} & newer.keys():
        raise ValueError(f"{where}: rope_parameters must have parameters of each kind of layer, got {newer!r}")
    if "type" in older and "rope_type" not in older:
        raise ValueError(
            f"{where}: rope_scaling of models with two kinds of layers must have a rope_type, got {older!r}"
        )
    return older if kind == "full_attention" else {}


def _first(raw: dict[str, Any], names: Sequence[str], default: float) -> Any:
    return next((raw[name] for name in names if raw.get(name) is not None), default)


def _positive(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


def _check(params: dict[str, Any], rope_type: str, where: str, others: Sequence[str]) -> None:
    needed, optional = _PARAMETERS[rope_type]
    for name in needed:
        if name not in params:
            raise ValueError(f"{where}: rope_parameters of type {rope_type} has no {name}")
    known = {*needed, *optional, *others, _ORIGINAL, "share", "max_position_embeddings"}
    for name, value in params.items():
        if name not in known and value not in (None, False, 0):
            raise ValueError(f"{where}: rope_parameters of type {rope_type} has no parameter {name}, got {value!r}")
