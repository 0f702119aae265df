"""short_conv_ against float64, and in parts."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided
from state_cases import SLACK, Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.short_conv import gated_short_conv_, short_conv_


def truth(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, rows: Rows, silu: bool
) -> tuple[Tensor, Tensor]:
    """Results, and the tails after them."""
    out, tails = [], tail.clone()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        own = x[starts[row] : starts[row + 1]]
        before = torch.zeros_like(tail[0]) if seq_lens[row] == len(own) else tail[slot]
        inputs = torch.cat([before, own])
        for end in range(len(weight), len(inputs) + 1):
            total = (inputs[end - len(weight) : end].double() * weight.double()).sum(0)
            total = total if bias is None else total + bias.double()
            out.append(total * total.sigmoid() if silu else total)
        tails[slot] = inputs[len(inputs) - len(before) :]
    return torch.stack(out), tails


@pytest.mark.parametrize("backend", backends("short_conv_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "channels", "silu"), [(2, 5, True), (3, 70, False), (4, 33, True), (7, 128, False)])
def test_short_conv(backend: str, dtype: torch.dtype, width: int, channels: int, silu: bool) -> None:
    torch.manual_seed(channels)
    rows = ragged(backend)
    x = strided(torch.randn(rows.num_tokens, channels).to(dtype))
    weight = torch.randn(width, channels).to(dtype)
    bias = torch.randn(channels).to(dtype) if silu else None
    tail = pool_of(rows, (width - 1, channels), dtype)
    expected, tails = truth(x, weight, bias, tail, rows, silu)
    got = run(backend, short_conv_, x, weight, bias, after := copied(tail), *rows.tensors(), silu)
    assert_accurate(backend, got, expected)
    torch.testing.assert_close(after, tails, rtol=0, atol=0, equal_nan=True)
    check_parts(backend, short_conv_, [x], [weight, bias], tail, rows, silu)


@pytest.mark.parametrize("backend", backends("short_conv_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows = ragged(backend)
    bcx = torch.randn(rows.num_tokens, 3 * 40).to(dtype)
    weight, tail = torch.randn(3, 40).to(dtype), pool_of(rows, (2, 40), dtype)
    b, c, x = bcx.chunk(3, dim=1)
    expected, tails = truth(b * x, weight, None, tail, rows, False)
    got = run(backend, gated_short_conv_, bcx, weight, None, after := copied(tail), *rows.tensors())
    # The interpreter cuts off where the compiled kernel rounds.
    cut = 1e-2 if backend == "triton" and dtype == torch.bfloat16 else 0
    assert_accurate(backend, got, expected * c.double(), slack=max(cut, SLACK))
    torch.testing.assert_close(after, tails, rtol=cut, atol=0, equal_nan=True)
    check_parts(backend, gated_short_conv_, [bcx], [weight, None], tail, rows)


@pytest.mark.parametrize("backend", [backend for backend in backends("short_conv_") if backend != "reference"])
@pytest.mark.parametrize("width", [1, 9])
def test_other_widths_are_refused(backend: str, width: int) -> None:
    rows = Rows((1,), (0,))
    with pytest.raises((ValueError, RuntimeError), match="2 to 8 rows"):
        run(backend, short_conv_, torch.ones(1, 4), torch.ones(width, 4), None, torch.ones(3, 4, 4), *rows.tensors())
