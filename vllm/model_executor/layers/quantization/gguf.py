"""GGUF's quantised tensors, as the file has them.

A module with weight [N, K] has one tensor, named after GGML's type: uint8 [N, K / block * bytes of a block]. The blocks
are defined by llama.cpp's ggml-common.h and its quants; what they stand for is gguf-py's `quants.dequantize`. Of 16-bit
floats that are not the model's dtype it is [N, K] in theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.stored import StoredConfig, StoredTensors, WeightFormat
from vllm.model_executor.layers.quantization.weight import QuantizedWeight
from vllm.ops.quantized_tensor import QuantizedTensor, plain_tensor

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """float16 [N, B]: of each block [N, B, bytes] the two bytes from `start`."""
    return blocks[:, :, start : start + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(data: Tensor) -> Tensor:
    """[N, B, 2 L] of [N, B, L]: all low halves, then all high ones."""
    return torch.cat((data & 15, data >> 4), 2)


def _flat(values: Tensor) -> Tensor:
    """[N, B * ...] of [N, B, ...]."""
    return values.flatten(1).contiguous()


def _small(blocks: Tensor, bits: int, has_minimum: bool) -> QuantizedTensor:
    """Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 with a scale and maybe a minimum."""
    at = 4 if has_minimum else 2
    codes = _nibbles(blocks[:, :, -16:])
    if bits == 5:
        places = torch.arange(8, dtype=torch.uint8)
        high = (blocks[:, :, at : at + 4, None] >> places) & 1
        codes = codes | (high.flatten(2) << 4)
    return QuantizedTensor(
        _flat(codes),
        bits,
        _halves(blocks, 0),
        32,
        zero_points=0 if has_minimum else 1 << (bits - 1),
        offsets=_halves(blocks, 2) if has_minimum else None,
    )


def _q8_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(_flat(blocks[:, :, 2:] ^ 128), 8, _halves(blocks, 0), 32, zero_points=128)


def _quarters(data: Tensor) -> Tensor:
    """[N, B, 256] of [N, B, 64]: of each 32 bytes the lowest two bits, then the next two, and so on."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return ((data.unflatten(2, (2, 1, 32)) >> shifts) & 3).flatten(2)


def _q2_k(blocks: Tensor) -> QuantizedTensor:
    both = blocks[:, :, :16]
    return QuantizedTensor(
        _flat(_quarters(blocks[:, :, 16:80])),
        2,
        _flat(both & 15),
        16,
        offsets=_flat(both >> 4),
        super_scales=_halves(blocks, 80),
        super_offsets=-_halves(blocks, 82),
    )


def _q3_k(blocks: Tensor) -> QuantizedTensor:
    mask, scales = blocks[:, :, :32], blocks[:, :, 96:108]
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (mask[:, :, None] >> places) & 1
    codes = _quarters(blocks[:, :, 32:96]) | (high.flatten(2) << 2)
    low = _nibbles(scales[:, :, :8])
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = ((scales[:, :, None, 8:] >> shifts) & 3).flatten(2)
    six = (low | (upper << 4)).to(torch.int8) - 32
    return QuantizedTensor(_flat(codes), 3, _flat(six), 16, zero_points=4, super_scales=_halves(blocks, 108))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima, uint8 [N, B, 8], of 12 bytes."""
    first, second, third = packed.unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), 2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), 2)
    return scales, minima


def _pairs(data: Tensor) -> Tensor:
    """[N, B, 256] of [N, B, 128]: of each 32 bytes all low halves, then all high ones."""
    parts = data.unflatten(2, (4, 32))
    return torch.stack((parts & 15, parts >> 4), 3).flatten(2)


def _q4_or_5_k(blocks: Tensor, bits: int) -> QuantizedTensor:
    scales, minima = _six_bits(blocks[:, :, 4:16])
    codes = _pairs(blocks[:, :, -128:])
    if bits == 5:
        places = torch.arange(8, dtype=torch.uint8)[:, None]
        codes = codes | (((blocks[:, :, None, 16:48] >> places) & 1) << 4).flatten(2)
    return QuantizedTensor(
        _flat(codes),
        bits,
        _flat(scales),
        32,
        offsets=_flat(minima),
        super_scales=_halves(blocks, 0),
        super_offsets=-_halves(blocks, 2),
    )


def _q6_k(blocks: Tensor) -> QuantizedTensor:
    # Of each half: 64 bytes of low bits, whose halves of a byte are 64 apart, and 32 of high ones.
    low = blocks[:, :, :128].unflatten(2, (2, 64))
    low = torch.cat((low & 15, low >> 4), 3)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((blocks[:, :, 128:192].unflatten(2, (2, 1, 32)) >> shifts) & 3).flatten(3)
    codes = low | (high << 4)
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return QuantizedTensor(_flat(codes), 6, _flat(scales), 16, zero_points=32, super_scales=_halves(blocks, 208))


def _iq4_nl(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(
        _flat(_nibbles(blocks[:, :, 2:])), 4, _halves(blocks, 0), 32, values=torch.tensor(_IQ4).float()
    )


def _iq4_xs(blocks: Tensor) -> QuantizedTensor:
    high = blocks[:, :, 2:4].contiguous().view(torch.int16).to(torch.int32)
    upper = (high >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    low = blocks[:, :, 4:8]
    lower = torch.stack((low & 15, low >> 4), 3).flatten(2)
    scales = (lower | (upper.to(torch.uint8) << 4)).to(torch.int8) - 32
    parts = blocks[:, :, 8:].unflatten(2, (8, 16))
    codes = torch.cat((parts & 15, parts >> 4), 3)
    return QuantizedTensor(
        _flat(codes), 4, _flat(scales), 32, values=torch.tensor(_IQ4).float(), super_scales=_halves(blocks, 0)
    )


def _mxfp4(blocks: Tensor) -> QuantizedTensor:
    values = torch.tensor((*_FP4, *(-value for value in _FP4)))
    exponents = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu)
    return QuantizedTensor(_flat(_nibbles(blocks[:, :, 1:])), 4, exponents, 32, values=values)


# By GGML's number of the type: its name, values and bytes of a block, and what a block is.
TYPES: dict[int, tuple[str, int, int, Callable[[Tensor], QuantizedTensor]]] = {
    2: ("Q4_0", 32, 18, partial(_small, bits=4, has_minimum=False)),
    3: ("Q4_1", 32, 20, partial(_small, bits=4, has_minimum=True)),
    6: ("Q5_0", 32, 22, partial(_small, bits=5, has_minimum=False)),
    7: ("Q5_1", 32, 24, partial(_small, bits=5, has_minimum=True)),
    8: ("Q8_0", 32, 34, _q8_0),
    10: ("Q2_K", 256, 84, _q2_k),
    11: ("Q3_K", 256, 110, _q3_k),
    12: ("Q4_K", 256, 144, partial(_q4_or_5_k, bits=4)),
    13: ("Q5_K", 256, 176, partial(_q4_or_5_k, bits=5)),
    14: ("Q6_K", 256, 210, _q6_k),
    20: ("IQ4_NL", 32, 18, _iq4_nl),
    23: ("IQ4_XS", 256, 136, _iq4_xs),
    39: ("MXFP4", 32, 17, _mxfp4),
}
# By the same, floats of 16 bits.
FLOATS = {1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}


def tensor_name(ggml_type: int) -> str:
    """A module's tensor of this type."""
    return f"gguf_{(TYPES | FLOATS)[ggml_type][0].lower()}"


_BY_NAME = {tensor_name(number): form for number, form in TYPES.items()}
_FLOAT_BY_NAME = {tensor_name(number): dtype for number, (_, dtype) in FLOATS.items()}


def read_blocks(data: Tensor, name: str) -> QuantizedTensor:
    """The weight of `tensor_name` `name` whose bytes are uint8 [N, bytes of a row]. ValueError: a row is no whole
    number of blocks."""
    kind, _, size, decode = _BY_NAME[name]
    if data.shape[1] % size:
        raise ValueError(f"has {data.shape[1]} bytes a row, expected a multiple of {size}: blocks of {kind}")
    return decode(data.unflatten(1, (-1, size)))


class GGUFConfig(StoredConfig):
    """See the module."""

    names = (*_BY_NAME, *_FLOAT_BY_NAME)
    # As files in float16, or of types that are de-quantised.
    may_be_plain = True

    def get_name(self) -> str:
        return "gguf"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GGUFConfig:
        return cls()

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        (name,) = stored & set(self.names)
        return WeightFormat((name,), (), partial(self._read, name=name))

    @staticmethod
    def _read(stored: StoredTensors, name: str) -> QuantizedWeight:
        if name in _FLOAT_BY_NAME:
            plain = plain_tensor(stored.take(name, _FLOAT_BY_NAME[name], None, None))
            return QuantizedWeight(plain, stored.name_of(name))
        data = stored.take(name, torch.uint8, None, None)
        try:
            return QuantizedWeight(read_blocks(data, name), stored.name_of(name))
        except ValueError as error:
            raise stored.error(name, str(error)) from None
