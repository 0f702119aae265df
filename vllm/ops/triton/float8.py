"""8-bit floats of the key/value cache, by the bits of their bytes: GPUs before sm_89 do not convert them.

E4M3 is read as float16 of a 256th of the value, which takes no multiplication: `RAW_FACTOR` goes into the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
"""By a cache's dtype, what the kernels call FLOAT8; 0: keys and values as they are."""
RAW_FACTOR = {0: 1.0, 1: 256.0, 2: 1.0}
"""The results of `widened` are the values over this, by FLOAT8."""


def as_bytes(cache: Tensor) -> Tensor:
    """Triton refuses float8 pointers on GPUs that do not convert them."""
    return cache.view(torch.uint8) if cache.dtype in KINDS else cache


@triton.jit
def widened(x, FLOAT8: tl.constexpr, dtype: tl.constexpr):
    """Cached values in `dtype`."""
    if FLOAT8 == 0:
        return x.to(dtype)
    else:
        word = x.to(tl.uint16)
        if FLOAT8 == 1:
            # The last code is NaN: a bit more makes its exponent float16's last one, too.
            magnitude = word & 0x7F
            magnitude = magnitude | ((magnitude + 1) & 0x80)
            word = ((word & 0x80) << 8) | (magnitude << 7)
        else:
            word = word << 8
        return word.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def narrowed(x, scale, FLOAT8: tl.constexpr):
    """Keys or values x as a cache holds them; see `vllm.ops.kv_cache.as_cached`."""
    if FLOAT8 == 0:
        return x
    else:
        MANTISSA: tl.constexpr = 3 if FLOAT8 == 1 else 2
        BIAS: tl.constexpr = 7 if FLOAT8 == 1 else 15
        MOST: tl.constexpr = 448.0 if FLOAT8 == 1 else 57344.0
        # Its last bit is the least value that is not 0.
        UNIT: tl.constexpr = 16384.0 if FLOAT8 == 1 else 128.0
        UNIT_BITS: tl.constexpr = 0x46800000 if FLOAT8 == 1 else 0x43000000
        LEAST_NORMAL: tl.constexpr = 0.015625 if FLOAT8 == 1 else 0.00006103515625
        SHIFT: tl.constexpr = 23 - MANTISSA
        bits = tl.div_rn(x.to(tl.float32), scale).to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        magnitude = bits.to(tl.float32, bitcast=True)
        magnitude = tl.where(magnitude > MOST, MOST, magnitude)
        rounded = magnitude.to(tl.int32, bitcast=True)
        rounded += (1 << (SHIFT - 1)) - 1 + ((rounded >> SHIFT) & 1)
        normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
        subnormal = (magnitude + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
        code = tl.where(magnitude < LEAST_NORMAL, subnormal, normal)
        code = tl.where(bits > 0x7F800000, 0x7F, code)
        return (code | sign).to(tl.uint8)
