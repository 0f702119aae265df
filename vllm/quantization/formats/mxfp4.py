"""MXFP4 checkpoints of gpt-oss: the experts' weights.

A stack of E weights [N, K] called `name` has
- name_blocks: uint8 [E, N, K / 32, 16], two E2M1 codes a byte, the first in the low half;
- name_scales: uint8 [E, N, K / 32], powers of two (E8M0).
"""

from __future__ import annotations

import torch

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.bits import fp4_values, unpack_nibbles
from vllm.quantization.stored import StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedStack, QuantizedWeight

_GROUP = 32


class Mxfp4Config(StoredConfig):
    """See the module."""

    name = "mxfp4"
    settings = "modules_to_not_convert dequantize"
    names = ("_blocks", "_scales")

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        return WeightFormat(("_blocks", "_scales"), (), _read)


def _read(stored: StoredTensors) -> QuantizedStack:
    blocks = stored.take("_blocks", torch.uint8, None, None, None, _GROUP // 2)
    scales = stored.take("_scales", torch.uint8, *blocks.shape[:3]).view(torch.float8_e8m0fnu)
    values = fp4_values()
    weights = [
        QuantizedTensor(unpack_nibbles(codes.flatten(1)), 4, own, _GROUP, values=values)
        for codes, own in zip(blocks, scales, strict=True)
    ]
    return QuantizedStack([[QuantizedWeight(tensor, stored.name_of("_blocks"))] for tensor in weights])
