"""selective_scan_ against the recurrence in float64, and in parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, backends, remembered, run, strided
from state_cases import SLACK, Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.selective_scan import selective_scan_


@remembered
def truth(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor | None,
    rate: Tensor,
    bias: Tensor | None,
    skip: Tensor,
    pool: Tensor,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """Results, and the states after them."""
    out, states = torch.zeros(x.shape).double(), pool.double()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        if seq_lens[row] == starts[row + 1] - starts[row]:
            states[slot] = 0
        for t in range(starts[row], starts[row + 1]):
            step = dt[t].double() if bias is None else dt[t].double() + bias.double()
            step = F.softplus(step, threshold=100)
            # [N, C] of each channel's group.
            b_t, c_t = (
                each[t].double().unflatten(0, (-1, len(rate))).t().repeat_interleave(rate.numel() // each.shape[1], 1)
                for each in (b, c)
            )
            states[slot] = states[slot] * torch.exp(-rate.double() * step) + b_t * (step * x[t].double())
            out[t] = (c_t * states[slot]).sum(0) + skip.double() * x[t].double()
            if gate is not None:
                out[t] *= F.silu(gate[t].double())
    return out, states


@pytest.mark.parametrize("backend", backends("selective_scan_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "channels", "gated", "groups"), [(1, 5, False, 1), (16, 64, True, 1), (7, 35, True, 1), (3, 60, True, 3)]
)
def test_selective_scan(backend: str, dtype: torch.dtype, size: int, channels: int, gated: bool, groups: int) -> None:
    torch.manual_seed(channels)
    rows = ragged(backend)
    x, gate = (strided(torch.randn(rows.num_tokens, channels).to(dtype)) for _ in range(2))
    b, c = (strided(torch.randn(rows.num_tokens, groups * size).to(dtype)) for _ in range(2))
    dt = torch.randn(rows.num_tokens, channels) * 3
    # Decays near 1, and near 0.
    dt[::3] -= 12
    dt[1::5] += 20
    dt = dt.to(dtype)
    rate, skip = torch.rand(size, channels) * 10, torch.randn(channels)
    bias = torch.randn(channels) if gated else None
    per_token = [x, dt, b, c, gate if gated else None]
    pool = pool_of(rows, (size, channels))
    expected, states = truth(*per_token, rate, bias, skip, pool, rows)
    after = copied(pool)
    got = run(backend, selective_scan_, *per_token, rate, bias, skip, after, *rows.tensors())
    assert_accurate(backend, got, expected, slack=SLACK)
    used = rows.tensors()[0]
    assert_accurate(backend, after[used], states[used], slack=SLACK)
    check_parts(backend, selective_scan_, per_token, [rate, bias, skip], pool, rows)
