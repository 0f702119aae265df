"""Rotary position embeddings: one table of cosines and sines a model, shared by its layers."""

from __future__ import annotations

import math
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from vllm.config.checkpoint.config import RopeConfig
from vllm.utils.loading_threads import in_thread


class RotaryEmbedding:
    """The cosines and sines that rotate each head's query and key, float32 [max_positions, head_dim], cosines | sines.

    Of `rope`'s kinds, "dynamic" differs from "default" only beyond the trained length, which is never reached because
    max_position_embeddings bounds the context. "longrope" has its short factors up to the trained length, its long ones
    where max_positions is more. `head_dim` is the number of a head's values that rotate.
    """

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        self._device = torch.get_default_device()
        self.num_frequencies = head_dim // 2
        self._make = partial(_table, *rope_frequencies(head_dim, rope, max_positions))
        self._table = in_thread(partial(self._make, max_positions))
        self._given: Tensor | None = None

    @property
    def cos_sin_cache(self) -> Tensor:
        """See the class; while a step's own rows are given, these."""
        return self._whole if self._given is None else self._given

    @cached_property
    def _whole(self) -> Tensor:
        table: Future[Tensor] = self.__dict__.pop("_table")
        return table.result().to(self._device)

    def reach(self, count: int) -> bool:
        """Have rows of at least so many positions. Returns whether the table is another one from now on."""
        if count <= len(self._whole):
            return False
        self._whole = self._make(count).to(self._device)
        return True

    def give(self, positions: Tensor, axes: Tensor) -> None:
        """Rotate by the rows of a step, until `clear`: its token t, named as position t, turns its frequency f by
        `positions[axes[f], t]`. `positions`: int64 [A, T]; `axes`: int64 [head_dim / 2]."""
        rows = positions[axes].t()  # [T, head_dim / 2]
        self._given = torch.cat([part.gather(0, rows) for part in self._whole.chunk(2, dim=1)], dim=1)

    def clear(self) -> None:
        """Rotate by the positions themselves again."""
        self._given = None


def _table(inv_freq: Tensor, attention_factor: float, max_positions: int) -> Tensor:
    # In place: a long context's table takes tens of megabytes. On the CPU, so that every device has the same one.
    table = torch.empty(max_positions, 2 * len(inv_freq), dtype=torch.float32)
    cosines, sines = table.chunk(2, dim=1)
    torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq, out=cosines)
    torch.sin(cosines, out=sines)
    cosines.cos_()
    return table if attention_factor == 1.0 else table.mul_(attention_factor)


def rope_frequencies(head_dim: int, rope: RopeConfig, max_positions: int = 0) -> tuple[Tensor, float]:
    """Angle a position (float32 [head_dim / 2], on the CPU), and the factor that scales cosines and sines."""
    with torch.device("cpu"):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        params, theta = rope.params, rope.theta
        if rope.rope_type == "ntk_alpha":
            theta *= params["alpha"] ** (head_dim / (head_dim - 2))
        inv_freq = 1.0 / theta**exponents
        if rope.rope_type == "linear":
            return inv_freq / params["factor"], 1.0
        if rope.rope_type == "factors":
            return inv_freq / torch.tensor(params["factors"], dtype=torch.float32), 1.0
        if rope.rope_type == "llama3":
            return _llama3_frequencies(inv_freq, params), 1.0
        if rope.rope_type == "yarn":
            return _yarn_frequencies(inv_freq, rope.theta, head_dim, params), _yarn_attention_factor(params)
        if rope.rope_type == "longrope":
            is_long = max_positions > params["original_max_position_embeddings"]
            factors = torch.tensor(params["long_factor" if is_long else "short_factor"], dtype=torch.float32)
            return 1.0 / (factors * rope.theta**exponents), _longrope_attention_factor(params)
        if rope.rope_type == "proportional":
            num_rotated = int(params["share"] * head_dim // 2)
            inv_freq[num_rotated:] = 0.0
            return inv_freq / params.get("factor", 1.0), 1.0
        return inv_freq, 1.0


def _longrope_attention_factor(params: dict[str, Any]) -> float:
    """LongRoPE's scale (arXiv:2402.13753): sqrt(1 + ln(factor) / ln(trained length))."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor = params["factor"]
    return math.sqrt(1 + math.log(factor) / math.log(params["original_max_position_embeddings"])) if factor > 1 else 1.0


def _llama3_frequencies(inv_freq: Tensor, params: dict[str, Any]) -> Tensor:
    """Slow frequencies (few turns within the trained length) are divided by the factor, fast ones kept, those between
    blended by their number of turns."""
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    turns = params["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / params["factor"])


def _yarn_frequencies(inv_freq: Tensor, theta: float, head_dim: int, params: dict[str, Any]) -> Tensor:
    """Dimensions that turn more than beta_fast times within the trained length are kept, those that turn less than
    beta_slow times divided by the factor, with a linear ramp between."""
    trained = params["original_max_position_embeddings"]

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_of(params.get("beta_fast") or 32.0)
    last = dimension_of(params.get("beta_slow") or 1.0)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    keep = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return inv_freq * keep + inv_freq / params["factor"] * (1.0 - keep)


def _yarn_attention_factor(params: dict[str, Any]) -> float:
    """The factor on cosines and sines, which sharpens attention over the stretched context. Files that are made for
    upstream, such as DeepSeek-R1-0528-Qwen3-8B's, have a further one."""
    own = params.get("attn_factor")
    own = 1.0 if own is None else float(own)
    if params.get("attention_factor") is not None:
        return own * float(params["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(params["factor"]) + 1.0 if params["factor"] > 1 else 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return own * mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return own * mscale(1.0)
