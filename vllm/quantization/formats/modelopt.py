"""Checkpoints of NVIDIA's Model Optimizer.

A module with weight [N, K] has, by its `quant_algo`,
- FP8: weight, float8_e4m3fn [N, K]; weight_scale, one value, or one for each output, or, as [N / 128, 1, K / 128, 1],
  for each block;
- NVFP4: weight, uint8 [N, K / 2], two E2M1 codes a byte, the first in the low half; weight_scale, float8_e4m3fn
  [N, K / 16] (K / 32 where activations are FP8); weight_scale_2, one value, which these are multiplied by;
- MXFP4 and MXFP8: weight as above; weight_scale, uint8 [N, K / 32], powers of two (E8M0);
- W4A16_AWQ and W4A8_AWQ: weight, uint8 [N / 2, K], signed codes of 4 bits of two outputs a byte, the first in the low
  half; weight_scale, float [N, K / group]; weight_scale_2 of the latter says how these were rounded;
- W8A8_SQ_PER_CHANNEL and W8A16: weight, int8 [N, K]; weight_scale, one value for each output, or one;
input_scale, for activations, which are not rounded here; and pre_quant_scale [K], which activations are multiplied by.
The tensors tell which of these a module has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm.logger import init_logger, warn_once
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.activations import InputScale
from vllm.quantization.bits import fp4_values, unpack_nibbles, unsigned_bytes
from vllm.quantization.scales import MX_GROUP, block_scales, powers_of_two, row_scales
from vllm.quantization.setting_values import read_objects
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

logger = init_logger(__name__)

_NVFP4_GROUPS = (16, 32)
_BLOCK = (128, 128)
_WEIGHT_ONLY = ("FP8_PB_WO", "W4A16_NVFP4", "W4A16_MXFP4", "W4A16_AWQ", "W8A16")
_WITH_ACTIVATIONS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_REAL", "NVFP4", "NVFP4_AWQ", "MXFP4", "MXFP8", "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL",
)  # fmt: skip
_MIXED = "MIXED_PRECISION"


class ModelOptConfig(StoredConfig):
    """See the module."""

    name = "modelopt"
    files = ("hf_quant_config.json",)
    settings = """
        quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules ignore producer has_zero_point
        pre_quant_scale quantized_layers config_groups
    """
    names = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
    shared_names = ("weight",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        algorithms = {"quant_algo": _algorithm(config)}
        if algorithms["quant_algo"] == _MIXED:
            layers = read_objects(config, "quantized_layers")
            algorithms = {f"quantized_layers: {name}": _algorithm(each) for name, each in layers.items()}
        for where, algorithm in algorithms.items():
            if algorithm not in (*_WEIGHT_ONLY, *_WITH_ACTIVATIONS):
                known = ", ".join((*_WITH_ACTIVATIONS, *_WEIGHT_ONLY, _MIXED))
                raise ValueError(f"{where} must be one of {known}, got {algorithm!r}")
        # All of them have this, where it is said.
        self._group_size = None if len(algorithms) > 1 or "quantized_layers" in config else config.get("group_size")
        if (cache := config.get("kv_cache_quant_algo")) not in (None, "FP8"):
            raise ValueError(f"kv_cache_quant_algo is not implemented with {cache!r}, only with 'FP8'")
        if set(algorithms.values()) & {*_WITH_ACTIVATIONS}:
            warn_once(logger, "the checkpoint's activations keep the model's dtype: input_scale is not applied")

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        return "quant_algo" in settings

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        optional = ("weight_scale_2", "input_scale", "pre_quant_scale")
        return WeightFormat(("weight", "weight_scale"), optional, self._read)

    def _read(self, stored: StoredTensors) -> QuantizedWeight:
        weight = _read_scaled(stored)
        size = weight.tensor.group_size
        # Powers of two always are for 32 inputs.
        has_size = weight.tensor.bits == 4 and weight.tensor.scales.dtype != torch.float8_e8m0fnu
        if has_size and self._group_size not in (None, 0, size):
            raise stored.error(
                "weight_scale",
                f"has groups of {size} inputs, but quantization_config has group_size={self._group_size}",
            )
        return weight


def _algorithm(settings: dict[str, Any]) -> str:
    """Some versions write some names in small letters."""
    return str(settings.get("quant_algo")).upper()


def _read_scaled(stored: StoredTensors) -> QuantizedWeight:
    weight = QuantizedWeight(_read(stored), f"{stored.module}.weight")
    if "pre_quant_scale" not in stored:
        return weight
    return replace(weight, inputs=InputScale(stored.take("pre_quant_scale", FLOATS, weight.shape[1])))


def _read(stored: StoredTensors) -> QuantizedTensor:
    kind, scales = stored.tensors["weight"].dtype, stored.tensors["weight_scale"]
    if "weight_scale_2" in stored and kind != torch.uint8:
        raise stored.error(
            "weight", f"has dtype {str(kind).removeprefix('torch.')} and a weight_scale_2, expected uint8"
        )
    if kind == torch.uint8 and scales.dtype in FLOATS:
        return _read_int4(stored)
    if kind == torch.uint8 and "weight_scale_2" in stored:
        return _read_nvfp4(stored)
    if kind == torch.uint8:
        codes = _fp4_codes(stored)
        return QuantizedTensor(codes, 4, powers_of_two(stored, *codes.shape), MX_GROUP, values=fp4_values())
    codes = stored.take("weight", (torch.float8_e4m3fn, torch.int8), None, None)
    rows, width = codes.shape
    if kind == torch.int8:
        return QuantizedTensor(
            unsigned_bytes(codes), 8, row_scales(stored, "weight_scale", rows), width, zero_points=128
        )
    if scales.dtype == torch.uint8:
        return QuantizedTensor(codes, 8, powers_of_two(stored, *codes.shape), MX_GROUP)
    if scales.dim() == 4:
        stored.tensors["weight_scale"] = scales.flatten(2).flatten(0, 1)
        return QuantizedTensor(codes, 8, *block_scales(stored, "weight_scale", (rows, width), _BLOCK))
    return QuantizedTensor(codes, 8, row_scales(stored, "weight_scale", rows), width)


def _read_nvfp4(stored: StoredTensors) -> QuantizedTensor:
    codes = _fp4_codes(stored)
    rows, width = codes.shape
    columns = stored.take("weight_scale", torch.float8_e4m3fn, rows, None).shape[1]
    group = next((size for size in _NVFP4_GROUPS if columns * size == width), 16)
    scales = stored.take("weight_scale", torch.float8_e4m3fn, rows, width // group)
    whole = stored.scalar("weight_scale_2").expand(rows, 1)
    return QuantizedTensor(codes, 4, scales, group, values=fp4_values(), super_scales=whole)


def _read_int4(stored: StoredTensors) -> QuantizedTensor:
    packed = stored.take("weight", torch.uint8, None, None)
    # Eight more: codes from 0.
    codes = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1) ^ 8
    rows, width = codes.shape
    scales = stored.take("weight_scale", FLOATS, rows, None)
    group, rest = divmod(width, max(scales.shape[1], 1))
    if rest or not scales.shape[1]:
        raise stored.error("weight_scale", f"has shape {tuple(scales.shape)}: its columns do not divide {width} inputs")
    return QuantizedTensor(codes, 4, scales, group, zero_points=8)


def _fp4_codes(stored: StoredTensors) -> Tensor:
    return unpack_nibbles(stored.take("weight", torch.uint8, None, None))
