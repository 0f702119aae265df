"""The rotary options of config.json, in their older and newer forms."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.config import RopeConfig

# The parameters of each type that are read, those that it needs first.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": ((), ("factor",)),
    # Hunyuan's: theta * alpha ** (dim / (dim - 2)).
    "ntk_alpha": (("alpha",), ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
    "factors": (("factors",), ()),
}
# Names of the share of a head that rotates.
SHARE_NAMES = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", "rotary_percent")
_OTHER_NAMES = {"su": "longrope", "none": "default"}
_ORIGINAL = "original_max_position_embeddings"


def read_rope(
    raw: dict[str, Any],
    where: str,
    theta: float,
    partial: float = 1.0,
    kind: str | None = None,
    sliding_theta: float | None = None,
) -> tuple[RopeConfig, float]:
    """The rotary embedding of layers of `kind` (None = the only one), and the share of a head that rotates.
    `theta` and `partial` are the family's defaults, `sliding_theta` that of layers with a window, where it differs.

    Raises:
        ValueError: an unknown type, or a parameter that is missing or that the type does not have.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{where}: rope_parameters must be an object, got {given!r}")
    if kind is not None and isinstance(given.get(kind), dict):
        given = given[kind]
    elif kind == "sliding_attention":
        # Scalings of files that have one set of options are meant for the layers without a window.
        given = {"rope_theta": raw.get("rope_local_base_freq") or sliding_theta}
    params = {name: value for name, value in given.items() if value is not None}
    old_type = params.pop("type", "default")
    rope_type = params.pop("rope_type", old_type)
    rope_type = _OTHER_NAMES.get(rope_type, rope_type)
    if rope_type == "dynamic" and params.get("alpha"):
        rope_type = "ntk_alpha"
    if rope_type not in _PARAMETERS:
        raise ValueError(f"{where}: rope_type must be one of {', '.join(_PARAMETERS)}, got {rope_type!r}")
    older_theta = raw.get("rope_theta") or raw.get("rotary_emb_base") or theta
    theta = float(params.pop("rope_theta", older_theta))
    older_share = next((raw[name] for name in SHARE_NAMES if raw.get(name)), partial)
    share = params.pop("partial_rotary_factor", older_share)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"{where}: partial_rotary_factor must be a number above 0 and at most 1, got {share!r}")
    if rope_type == "proportional":
        params["share"] = share
    elif rope_type in ("llama3", "yarn", "longrope"):
        original = raw.get(_ORIGINAL) or params.get(_ORIGINAL) or raw.get("max_position_embeddings")
        params[_ORIGINAL] = original
        if rope_type != "llama3" and "factor" not in params:
            params["factor"] = raw["max_position_embeddings"] / original
    _check(params, rope_type, where)
    return RopeConfig(rope_type, theta, params), share


def _check(params: dict[str, Any], rope_type: str, where: str) -> None:
    needed, optional = _PARAMETERS[rope_type]
    for name in needed:
        if name not in params:
            raise ValueError(f"{where}: rope_parameters of type {rope_type} has no {name}")
    known = {*needed, *optional, _ORIGINAL, "share", "max_position_embeddings"}
    for name, value in params.items():
        if name not in known and value not in (None, False, 0):
            raise ValueError(f"{where}: rope_parameters of type {rope_type} has no parameter {name}, got {value!r}")
