"""Numbers of a few bits, packed into words."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W], whose bits from the least significant one on hold unsigned numbers one after another, as uint8
    [..., 32 W / bits]. Numbers of 3, 5, 6 or 7 bits may go over the border of two words: W is a multiple of `bits`."""
    period = 1 if 32 % bits == 0 else bits
    words = words.unflatten(-1, (-1, period))
    mask = (1 << bits) - 1
    codes = torch.empty(*words.shape[:-1], 32 * period // bits, dtype=torch.uint8, device=words.device)
    for index in range(codes.shape[-1]):
        word, shift = divmod(index * bits, 32)
        # A word is signed: what the shift fills up with is masked.
        code = words[..., word] >> shift
        known = 32 - shift
        if known < bits:
            code = (code & ((1 << known) - 1)) | (words[..., word + 1] << known)
        codes[..., index] = code & mask
    return codes.flatten(-2)


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """Rows of `count` numbers, int32 [..., W], as uint8 [..., count]. They may go over the borders of words as in
    `unpack`, or leave the rest of each word empty: the number of words tells. ValueError: it fits neither."""
    if words.shape[-1] == -(-count * bits // 32):
        period = 1 if 32 % bits == 0 else bits
        return unpack(torch.nn.functional.pad(words, (0, -words.shape[-1] % period)), bits)[..., :count]
    per_word = 32 // bits
    if words.shape[-1] != -(-count // per_word):
        raise ValueError(
            f"has {words.shape[-1]} words, expected {-(-count * bits // 32)} for {count} codes of {bits} bits"
        )
    codes = [(words >> (index * bits)) & ((1 << bits) - 1) for index in range(per_word)]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count].to(torch.uint8)


def unpack_nibbles(data: Tensor, high_first: bool = False) -> Tensor:
    """uint8 [..., B] as uint8 [..., 2 B]: of each byte its low half first, or its high one."""
    halves = (data >> 4, data & 15) if high_first else (data & 15, data >> 4)
    return torch.stack(halves, dim=-1).flatten(-2)


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By its code, the value of a 4-bit float with two exponent bits and one of mantissa (E2M1)."""


def fp4_values() -> Tensor:
    """FP4_VALUES, float32 [16]."""
    return torch.tensor(FP4_VALUES, dtype=torch.float32)


def unsigned_bytes(numbers: Tensor) -> Tensor:
    """int8 as uint8: 128 more."""
    return numbers.view(torch.uint8) ^ 128
