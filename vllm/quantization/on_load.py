"""Plain weights, rounded when they are loaded. A group's values depend on the group alone, whichever rank holds it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.utils.host_memory import rows_at_once

_INT4_GROUP = 32
_INT4_CODES = 15
_FP8_GREATEST = 448.0
# Whose inverse is a float32 of full precision, too.
_LEAST_EXPONENT, _GREATEST_EXPONENT = -120, 120


def round_to_int4(weight: Tensor) -> QuantizedTensor:
    """[N, K] as codes of 4 bits: of each 32 inputs of an output, the least value is code 0 and the greatest code 15.

    Scale and least value are bfloat16; codes are rounded for these. ValueError: a value is not finite.
    """
    size = min(_INT4_GROUP, weight.shape[1])
    codes, scales, offsets = _by_rows(weight, lambda rows: _int4_rows(rows, size))
    return QuantizedTensor(codes, 4, scales, size, offsets=offsets)


def _int4_rows(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, inner = weight.shape
    # The last group is filled up with one of its own values.
    missing = -inner % size
    plain = weight.float()
    groups = torch.cat((plain, plain[:, -1:].expand(rows, missing)), 1).unflatten(1, (-1, size))
    least, greatest = groups.aminmax(dim=2)
    _check_finite("int4", greatest - least)
    offsets = least.bfloat16()
    scales = ((greatest - least) / _INT4_CODES).bfloat16()
    divisors = torch.where(scales > torch.finfo(torch.bfloat16).tiny, scales.float(), torch.inf)
    codes = ((groups - offsets.float()[:, :, None]) / divisors[:, :, None]).round_().clamp_(0, _INT4_CODES)
    return codes.flatten(1)[:, :inner].to(torch.uint8), scales, offsets


def round_to_fp8(weight: Tensor) -> QuantizedTensor:
    """[N, K] as float8 E4M3, times a power of two for each output, so that the greatest value is in its range: values
    keep 4 significant bits. ValueError: a value is not finite."""
    codes, scales = _by_rows(weight, _fp8_rows)
    return QuantizedTensor(codes, 8, scales, max(weight.shape[1], 1))


def _fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    plain = weight.float()
    greatest = plain.abs().amax(1, keepdim=True)
    _check_finite("fp8", greatest)
    exponents = (greatest / _FP8_GREATEST).frexp()[1].clamp(_LEAST_EXPONENT, _GREATEST_EXPONENT)
    return plain.ldexp(-exponents).to(torch.float8_e4m3fn), torch.ones_like(greatest).ldexp_(exponents)


def _by_rows(weight: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """The tensors that are made of a weight's rows, a few rows at a time."""
    parts = zip(*map(make, weight.split(rows_at_once(weight.shape[1]))), strict=True)
    return [torch.cat(part) for part in parts]


def _check_finite(name: str, *values: Tensor) -> None:
    if not all(bool(value.isfinite().all()) for value in values):
        raise ValueError(f"quantization={name!r} needs finite weights, got NaN or infinity")
