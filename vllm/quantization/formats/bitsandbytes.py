"""bitsandbytes checkpoints, of 4 and of 8 bits.

A module with weight [N, K] has, of 4 bits,
- weight: uint8 [N K / 2, 1] (or other bytes), two codes a byte, the first in the high half;
- weight.quant_map: [16], what the codes stand for;
- weight.absmax: the scale of each block of consecutive values, over the ends of rows; or, nested, uint8: the codes of
  weight.nested_quant_map [256] with scales weight.nested_absmax for blocks of them, and an offset that is added;
- weight.quant_state.bitsandbytes__nf4 (or fp4): JSON as uint8, with the shape, the sizes of blocks and the offset;
and of 8 bits
- weight: int8 [N, K];
- SCB: float32 [N], the greatest magnitude of each output, which 127 stands for;
- weight_format: uint8 [], 0.
Activations are not rounded to 8 bits.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.bits import unpack_nibbles, unsigned_bytes
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_STATE = "weight.quant_state.bitsandbytes__"
_STATES = (f"{_STATE}nf4", f"{_STATE}fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


class BitsAndBytesConfig(StoredConfig):
    """See the module."""

    name = "bitsandbytes"
    settings = """
        load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
        bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
        llm_int8_skip_modules llm_int8_threshold
    """
    names = ("SCB", "weight_format", "weight.absmax", "weight.quant_map", *_NESTED, *_STATES)
    shared_names = ("weight",)

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        if "SCB" in stored or "weight_format" in stored:
            return WeightFormat(("weight", "SCB"), ("weight_format",), _read_8bit)
        state = next((name for name in _STATES if name in stored), _STATES[0])
        required = ["weight", "weight.absmax", "weight.quant_map", state]
        if not stored.isdisjoint(_NESTED):
            required += _NESTED
        return WeightFormat(tuple(required), (), _read_4bit)


def _read_8bit(stored: StoredTensors) -> QuantizedWeight:
    weight = stored.take("weight", torch.int8, None, None)
    if "weight_format" in stored and int(stored.scalar("weight_format", torch.uint8)):
        raise stored.error("weight_format", "is not 0, rows one after another")
    greatest = stored.take("SCB", FLOATS, len(weight)).float()
    tensor = QuantizedTensor(
        codes=unsigned_bytes(weight),
        bits=8,
        scales=(greatest / 127)[:, None],
        group_size=weight.shape[1],
        zero_points=128,
    )
    return QuantizedWeight(tensor, f"{stored.module}.weight")


def _read_4bit(stored: StoredTensors) -> QuantizedWeight:
    state = _state(stored)
    rows, width = state["shape"]
    # bnb_4bit_quant_storage may be any dtype: they are bytes.
    data = stored.tensors["weight"].contiguous().view(torch.uint8).flatten()
    if len(data) * 2 != rows * width:
        raise stored.error("weight", f"has {len(data)} bytes, expected {rows * width // 2} for shape {(rows, width)}")
    block = int(state["blocksize"])
    scales = _scales(stored, state, -(-rows * width // block))
    # Blocks go over the ends of rows where their size does not divide the width.
    size = math.gcd(width, block)
    groups = torch.arange(0, rows * width, size) // block
    tensor = QuantizedTensor(
        codes=unpack_nibbles(data, high_first=True).view(rows, width),
        bits=4,
        scales=scales[groups].view(rows, -1),
        group_size=size,
        values=stored.take("weight.quant_map", FLOATS, 16).float(),
    )
    return QuantizedWeight(tensor, f"{stored.module}.weight")


def _state(stored: StoredTensors) -> dict[str, Any]:
    name = next(name for name in _STATES if name in stored)
    data = stored.take(name, torch.uint8, None)
    try:
        state = json.loads(bytes(data.tolist()))
        (rows, width), _ = state["shape"], state["blocksize"]
        if "weight.nested_absmax" in stored:
            _ = state["nested_blocksize"], state["nested_offset"]
    except (ValueError, KeyError, TypeError) as error:
        raise stored.error(name, f"is not the JSON of a matrix's quant_state: {error!r}") from None
    return {**state, "shape": (int(rows), int(width))}


def _scales(stored: StoredTensors, state: dict[str, Any], blocks: int) -> Tensor:
    """float32 [blocks]."""
    if "weight.nested_absmax" not in stored:
        return stored.take("weight.absmax", FLOATS, blocks).float()
    codes = stored.take("weight.absmax", torch.uint8, blocks).long()
    size = int(state["nested_blocksize"])
    nested = stored.take("weight.nested_absmax", FLOATS, -(-blocks // size)).float()
    values = stored.take("weight.nested_quant_map", FLOATS, 256).float()
    return values[codes] * nested.repeat_interleave(size)[:blocks] + float(state["nested_offset"])
