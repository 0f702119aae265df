"""packing_in_background: the same panels, complete at its end; weights that are not finite are refused there."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import needs_kernels

from vllm.ops.packing import packing_in_background, refuse_unless_finite
from vllm.ops.quantized_linear import pack_quantized
from vllm.ops.quantized_panels import QuantizedPanels
from vllm.ops.quantized_tensor import QuantizedTensor

pytestmark = needs_kernels


def weight(rows: int = 100, dtype: torch.dtype = torch.float16) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, 96), dtype=torch.uint8, generator=generator)
    scales, offsets = torch.rand(2, rows, 3, generator=generator).to(dtype)
    return QuantizedTensor(codes, 4, scales, 32, offsets=offsets)


def panels(tensor: QuantizedTensor) -> QuantizedPanels:
    (part,) = pack_quantized(tensor, None).parts
    assert isinstance(part, QuantizedPanels)
    return part


@pytest.mark.parametrize("reserved", [0, 5000, 2**27])
def test_panels_are_complete_at_the_end(reserved: int) -> None:
    tensors = [weight(rows) for rows in (1, 32, 33, 100, 5000)]
    expected = [panels(tensor).panels for tensor in tensors]
    with packing_in_background(reserved):
        packed = [panels(tensor) for tensor in tensors]
    for one, other in zip(packed, expected, strict=True):
        assert torch.equal(one.panels, other)


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_reserved_memory_that_nothing_took_is_given_back() -> None:
    reserved = 2**28
    before = resident()
    with packing_in_background(reserved):
        kept = panels(weight(5000))
        while resident() < before + reserved // 2:
            pass
    assert resident() < before + reserved // 4
    assert kept.panels.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(dtype: torch.dtype, value: float) -> None:
    good, bad = weight(dtype=dtype), weight(dtype=dtype)
    assert bad.offsets is not None
    bad.offsets[99, 2] = value
    refuse_unless_finite(good, lambda: ValueError("good"))
    with pytest.raises(ValueError, match="the second"):
        refuse_unless_finite(bad, lambda: ValueError("the second"))
    reached = False
    with pytest.raises(ValueError, match="the second"), packing_in_background():
        refuse_unless_finite(good, lambda: ValueError("the first"))
        refuse_unless_finite(bad, lambda: ValueError("the second"))
        reached = True
    assert reached


def test_values_and_kinds_that_are_not_searched_are_refused_at_once() -> None:
    table = torch.arange(16.0)
    table[3] = float("nan")
    bad = [
        replace(weight(), values=table),
        replace(weight(), scales=torch.full((100, 3), float("nan")).to(torch.float8_e4m3fn), offsets=None),
    ]
    for tensor in bad:
        with pytest.raises(ValueError, match="bad"), packing_in_background():
            refuse_unless_finite(tensor, lambda: ValueError("bad"))
            raise AssertionError("was not refused")


def test_an_error_of_the_block_is_the_caller_s_and_the_next_block_works() -> None:
    with pytest.raises(ValueError, match="other"), packing_in_background():
        panels(weight())
        raise ValueError("other")
    with packing_in_background():
        packed = panels(weight())
        with pytest.raises(RuntimeError, match="has begun"), packing_in_background():
            pass
    assert torch.equal(packed.panels, panels(weight()).panels)
