"""FP8 checkpoints, as AutoFP8, DeepSeek, FBGEMM and transformers write them.

A module with weight [N, K] has
- weight: float8_e4m3fn [N, K];
- weight_scale (or weight_scale_inv, which weights are multiplied by, too): one value, or one for each output; or, in
  blocks of [b, c] values, float [ceil(N / b), ceil(K / c)];
- input_scale or activation_scale, with activation_scheme "static": a scale for activations; FBGEMM's input_scale_ub
  bounds such scales.
Activations are not rounded to 8 bits here, whatever the scheme: as transformers does where it has no FP8 product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.scales import block_scales, row_scales
from vllm.quantization.stacked_scales import split_scales
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_BLOCK = (128, 128)
_INPUT_NAMES = ("input_scale", "input_scale_ub", "activation_scale")


class Fp8Config(StoredConfig):
    """See the module."""

    name = "fp8"
    settings = """
        activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt dequantize
        is_checkpoint_fp8_serialized kv_cache_scheme weight_per_tensor act_per_tensor activation_scale_ub
    """
    names = ("weight_scale", "weight_scale_inv", *_INPUT_NAMES)
    shared_names = ("weight",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        scheme = config.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise ValueError(f"activation_scheme must be dynamic or static, got {scheme!r}")
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"fmt must be e4m3, got {config['fmt']!r}")
        block = config.get("weight_block_size")
        if block is not None and (
            not isinstance(block, list | tuple)
            or len(block) != 2
            or not all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise ValueError(f"weight_block_size must be two sizes, got {block!r}")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        # Names of scales for blocks of half the height.
        self._halved: set[str] = set()

    def unstacked(
        self, tensors: Iterable[tuple[str, Tensor]], files: Mapping[str, str]
    ) -> tuple[Iterable[tuple[str, Tensor]], Mapping[str, str]]:
        return split_scales(tensors, files, self._halved)

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        scale = "weight_scale_inv" if "weight_scale_inv" in stored else "weight_scale"
        return WeightFormat(("weight", scale), _INPUT_NAMES, partial(self._read, scale=scale))

    def _read(self, stored: StoredTensors, scale: str) -> QuantizedWeight | Tensor:
        plain = stored.tensors["weight"]
        if plain.dtype in FLOATS and plain.dim() == 2 and self._leaves_plain(scale, plain.shape):
            # And writes scales that mean nothing.
            return plain
        codes = stored.take("weight", torch.float8_e4m3fn, None, None)
        rows, width = codes.shape
        scales, group_size = stored.tensors[scale], width
        # Blocks of both names have two dimensions; transformers calls the one scale of a tensor weight_scale_inv, too.
        if self._block is not None or (scale == "weight_scale_inv" and scales.numel() > 1):
            height, columns = self._block or _BLOCK
            if stored.name_of(scale) in self._halved:
                height = max(height // 2, 1)
            scales, group_size = block_scales(stored, scale, (rows, width), (height, columns))
        else:
            scales = row_scales(stored, scale, rows)
        return QuantizedWeight(QuantizedTensor(codes, 8, scales, group_size), f"{stored.module}.weight")

    def _leaves_plain(self, scale: str, shape: tuple[int, ...]) -> bool:
        """Whether transformers leaves a weight as it is, because blocks do not fill it."""
        has_blocks = self._block is not None or scale == "weight_scale_inv"
        return has_blocks and any(size % block for size, block in zip(shape, self._block or _BLOCK, strict=True))
