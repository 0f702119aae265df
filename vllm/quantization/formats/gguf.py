"""GGUF's quantised tensors, as the file has them.

A module with weight [N, K] has one tensor, named after GGML's type: uint8 [N, K / block * bytes of a block]. The blocks
are defined by llama.cpp's ggml-common.h and its quants; what they stand for is gguf-py's `quants.dequantize`. Of 16-bit
floats that are not the model's dtype it is [N, K] in theirs. `input_heads` has modules whose inputs lie in the file as
(heads of a group, groups, size of a head), where the model's are (groups, heads of a group, size): both counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm.ops.block_codes import BitField, BlockCodes, BlockLayout
from vllm.ops.quantized_tensor import QuantizedTensor, plain_tensor
from vllm.quantization.stored import StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """float16 [N, B]: of each block [N, B, bytes] the two bytes from `start`, where they are."""
    return blocks[:, :, start : start + 2].view(torch.float16).squeeze(2)


def _flat(values: Tensor) -> Tensor:
    """[N, B * ...] of [N, B, ...]."""
    return values.flatten(1).contiguous()


def _nibbles(at: int, count: int = 32, size: int = 32) -> tuple[BitField, ...]:
    """Each `size` codes are in half as many bytes: all low halves, then all high ones."""
    half = size // 2
    return tuple(
        BitField(start + part * half, half, at + start // 2, 4, shift=4 * part)
        for start in range(0, count, size)
        for part in range(2)
    )


def _quarters(at: int, to: int = 0) -> tuple[BitField, ...]:
    """256 codes in 64 bytes: of each 32 bytes the lowest two bits, then the next two, and so on."""
    return tuple(
        BitField(128 * half + 32 * part, 32, at + 32 * half, 2, shift=2 * part, to=to)
        for half in range(2)
        for part in range(4)
    )


def _eighths(at: int, to: int) -> tuple[BitField, ...]:
    """256 codes in 32 bytes: the lowest bits, then the next ones, and so on."""
    return tuple(BitField(32 * part, 32, at, 1, shift=part, to=to) for part in range(8))


def _small(blocks: Tensor, codes: BlockCodes, bits: int, has_minimum: bool) -> QuantizedTensor:
    """Q4_0, Q4_1, Q5_0 and Q5_1: blocks of 32 with a scale and maybe a minimum."""
    return QuantizedTensor(
        codes,
        bits,
        _halves(blocks, 0),
        32,
        zero_points=0 if has_minimum else 1 << (bits - 1),
        offsets=_halves(blocks, 2) if has_minimum else None,
    )


def _q8_0(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    return QuantizedTensor(codes, 8, _halves(blocks, 0), 32, zero_points=128)


def _q2_k(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    both = blocks[:, :, :16]
    return QuantizedTensor(
        codes,
        2,
        _flat(both & 15),
        16,
        offsets=_flat(both >> 4),
        super_scales=_halves(blocks, 80),
        super_offsets=-_halves(blocks, 82),
    )


def _q3_k(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    scales = blocks[:, :, 96:108]
    low = torch.cat((scales[:, :, :8] & 15, scales[:, :, :8] >> 4), 2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = ((scales[:, :, None, 8:] >> shifts) & 3).flatten(2)
    six = (low | (upper << 4)).to(torch.int8) - 32
    return QuantizedTensor(codes, 3, _flat(six), 16, zero_points=4, super_scales=_halves(blocks, 108))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima, uint8 [N, 8 B], of the first 12 of these bytes [N, B, ...], four at a time."""
    first, second, third = packed[:, :, :12].contiguous().view(torch.int32).unbind(2)
    scales = (first & 0x3F3F3F3F, (third & 0x0F0F0F0F) | ((first >> 2) & 0x30303030))
    minima = (second & 0x3F3F3F3F, ((third >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030))
    both = (torch.stack(words, 2).view(torch.uint8).flatten(1) for words in (scales, minima))
    return next(both), next(both)


def _q4_or_5_k(blocks: Tensor, codes: BlockCodes, bits: int) -> QuantizedTensor:
    scales, minima = _six_bits(blocks[:, :, 4:])
    return QuantizedTensor(
        codes,
        bits,
        scales,
        32,
        offsets=minima,
        super_scales=_halves(blocks, 0),
        super_offsets=-_halves(blocks, 2),
    )


def _q6_k(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return QuantizedTensor(codes, 6, _flat(scales), 16, zero_points=32, super_scales=_halves(blocks, 208))


def _iq4_nl(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    return QuantizedTensor(codes, 4, _halves(blocks, 0), 32, values=torch.tensor(_IQ4).float())


def _iq4_xs(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    high = blocks[:, :, 2:4].contiguous().view(torch.int16).to(torch.int32)
    upper = (high >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    low = blocks[:, :, 4:8]
    lower = torch.stack((low & 15, low >> 4), 3).flatten(2)
    scales = (lower | (upper.to(torch.uint8) << 4)).to(torch.int8) - 32
    return QuantizedTensor(
        codes, 4, _flat(scales), 32, values=torch.tensor(_IQ4).float(), super_scales=_halves(blocks, 0)
    )


def _mxfp4(blocks: Tensor, codes: BlockCodes) -> QuantizedTensor:
    values = torch.tensor((*_FP4, *(-value for value in _FP4)))
    exponents = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu)
    return QuantizedTensor(codes, 4, exponents, 32, values=values)


_Decode = Callable[[Tensor, BlockCodes], QuantizedTensor]


def _small_type(name: str, size: int, fields: tuple[BitField, ...], decode: _Decode, flipped: int = 0) -> Any:
    return name, 32, size, decode, BlockLayout(32, size, fields, flipped)


def _large_type(name: str, size: int, fields: tuple[BitField, ...], decode: _Decode) -> Any:
    return name, 256, size, decode, BlockLayout(256, size, fields)


def _fifth_bits(at: int) -> tuple[BitField, ...]:
    return (BitField(0, 32, at, 1, per_byte=8, to=4),)


_SMALL = {
    (bits, has_minimum): partial(_small, bits=bits, has_minimum=has_minimum)
    for bits in (4, 5)
    for has_minimum in (False, True)
}
# By GGML's number of the type: its name, values and bytes of a block, what a block is, and where its codes are.
TYPES: dict[int, tuple[str, int, int, _Decode, BlockLayout]] = {
    2: _small_type("Q4_0", 18, _nibbles(2), _SMALL[4, False]),
    3: _small_type("Q4_1", 20, _nibbles(4), _SMALL[4, True]),
    6: _small_type("Q5_0", 22, (*_nibbles(6), *_fifth_bits(2)), _SMALL[5, False]),
    7: _small_type("Q5_1", 24, (*_nibbles(8), *_fifth_bits(4)), _SMALL[5, True]),
    8: _small_type("Q8_0", 34, (BitField(0, 32, 2, 8),), _q8_0, flipped=128),
    10: _large_type("Q2_K", 84, _quarters(16), _q2_k),
    11: _large_type("Q3_K", 110, (*_quarters(32), *_eighths(0, to=2)), _q3_k),
    12: _large_type("Q4_K", 144, _nibbles(16, 256, 64), partial(_q4_or_5_k, bits=4)),
    13: _large_type("Q5_K", 176, (*_nibbles(48, 256, 64), *_eighths(16, to=4)), partial(_q4_or_5_k, bits=5)),
    14: _large_type("Q6_K", 210, (*_nibbles(0, 256, 128), *_quarters(128, to=4)), _q6_k),
    20: _small_type("IQ4_NL", 18, _nibbles(2), _iq4_nl),
    23: _large_type("IQ4_XS", 136, _nibbles(8, 256, 32), _iq4_xs),
    39: _small_type("MXFP4", 17, _nibbles(1), _mxfp4),
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
    kind, _, size, decode, layout = _BY_NAME[name]
    if data.shape[1] % size:
        raise ValueError(f"has {data.shape[1]} bytes a row, expected a multiple of {size}: blocks of {kind}")
    return decode(data.unflatten(1, (-1, size)), BlockCodes.of(data, layout))


class GGUFConfig(StoredConfig):
    """See the module."""

    name = "gguf"
    names = (*_BY_NAME, *_FLOAT_BY_NAME)
    # As files in float16, or of types that are de-quantised.
    may_be_plain = True
    is_read_in_place = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._heads: dict[str, list[int]] = config.get("input_heads", {})

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        (name,) = stored & set(self.names)
        return WeightFormat((name,), (), partial(self._read, name=name, heads=self._heads.get(module)))

    @staticmethod
    def _read(stored: StoredTensors, name: str, heads: list[int] | None) -> QuantizedWeight:
        if name in _FLOAT_BY_NAME:
            plain = plain_tensor(stored.take(name, _FLOAT_BY_NAME[name], None, None))
            return QuantizedWeight(plain, stored.name_of(name))
        data = stored.take(name, torch.uint8, None, None)
        try:
            tensor = read_blocks(data, name)
            if heads is not None:
                share, groups = heads
                order = torch.arange(tensor.codes.shape[1]).view(groups, share, -1).transpose(0, 1).flatten()
                tensor = replace(tensor, input_order=order)
            return QuantizedWeight(tensor, stored.name_of(name))
        except ValueError as error:
            raise stored.error(name, str(error)) from None
