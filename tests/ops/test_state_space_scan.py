"""state_space_scan_ against the recurrence in float64, and in parts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, backends, remembered, run, strided
from state_cases import SLACK, Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.state_space_scan import state_space_scan_

# Groups, heads, size of a state, width of a head.
SHAPES = [(1, 1, 3, 5), (1, 2, 16, 128), (2, 2, 7, 40)]


@remembered
def truth(
    xbc: Tensor,
    dt: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor | None,
    pool: Tensor,
    rows: Rows,
    groups: int,
    *limits: float,
) -> tuple[Tensor, Tensor]:
    """Results, and the states after them."""
    _, heads, size, width = pool.shape
    out, states = torch.zeros(len(xbc), heads, width).double(), pool.double()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        if seq_lens[row] == starts[row + 1] - starts[row]:
            states[slot] = 0
        for t in range(starts[row], starts[row + 1]):
            x, b, c = xbc[t].double().split([heads * width, groups * size, groups * size])
            step = F.softplus(dt[t].double() + bias.double(), threshold=100).clamp(*limits)
            for head in range(heads):
                own = slice(head // (heads // groups) * size, (head // (heads // groups) + 1) * size)
                mine = x.view(heads, width)[head]
                kept = torch.exp(-rate[head].double() * step[head])
                states[slot, head] = states[slot, head] * kept + torch.outer(b[own], mine * step[head])
                out[t, head] = c[own] @ states[slot, head]
                if skip is not None:
                    out[t, head] += skip[head].double() * mine
    return out.flatten(1), states


@pytest.mark.parametrize("backend", backends("state_space_scan_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.01, 0.5)])
@pytest.mark.parametrize(("groups", "heads", "size", "width"), SHAPES)
def test_state_space_scan(
    backend: str, dtype: torch.dtype, limits: tuple[float, float], groups: int, heads: int, size: int, width: int
) -> None:
    torch.manual_seed(size)
    rows = ragged(backend)
    xbc = strided(torch.randn(rows.num_tokens, heads * width + 2 * groups * size).to(dtype))
    dt = torch.randn(rows.num_tokens, heads) * 3
    # Decays near 1, and near 0.
    dt[::3] -= 12
    dt[1::5] += 20
    dt = dt.to(dtype)
    rate, bias = torch.logspace(-2, 1, heads), torch.randn(heads)
    skip = torch.randn(heads) if limits[0] else None
    pool = pool_of(rows, (heads, size, width))
    expected, states = truth(xbc, dt, rate, bias, skip, pool, rows, groups, *limits)
    after = copied(pool)
    got = run(backend, state_space_scan_, xbc, dt, rate, bias, skip, after, *rows.tensors(), groups, *limits)
    assert_accurate(backend, got, expected, slack=SLACK)
    used = rows.tensors()[0]
    assert_accurate(backend, after[used], states[used], slack=SLACK)
    check_parts(backend, state_space_scan_, [xbc, dt], [rate, bias, skip], pool, rows, groups, *limits)
