"""mlstm_ against the recurrence in float64, and in parts."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, remembered, run, strided
from state_cases import Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.mlstm import mlstm_

EPS = 1e-6
# Exponents, up to 30 here, are rounded before they are taken, and sums of keys are near 0.
SLACK = 5e-5


@remembered
def truth(qkv: Tensor, gates: Tensor, pool: Tensor, rows: Rows, keys: int, cap: float) -> tuple[Tensor, Tensor]:
    """Results, and matrices with their sums of keys [slots, H, V + 1, K] after them, as they are."""
    heads = pool.shape[1]
    width = qkv.shape[1] // heads - 2 * keys
    parts = qkv.double().split([heads * keys, heads * keys, heads * width], dim=1)
    q, k, v = (part.unflatten(1, (heads, -1)) for part in parts)
    v = torch.cat((v, torch.ones_like(v[..., :1])), dim=2)
    given, kept = (cap * torch.tanh(gates.double() / cap)).unflatten(1, (2, heads)).unbind(1)
    matrix, norm, peak = pool.double().split([keys * width, keys, 1], dim=2)
    states = torch.cat((matrix.unflatten(2, (keys, width)), norm[..., None]), dim=3) * peak.exp()[..., None]
    out = torch.zeros(len(qkv), heads, width).double()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        top = peak[slot, :, 0].clone()
        if seq_lens[row] == starts[row + 1] - starts[row]:
            states[slot], top[:] = 0, 0
        for t in range(starts[row], starts[row + 1]):
            forget = kept[t].sigmoid()
            top = torch.maximum(top + forget.log(), given[t])
            written = given[t].exp()[:, None, None] * k[t, :, :, None] * v[t, :, None]
            states[slot] = states[slot] * forget[:, None, None] + written
            read = (q[t, :, :, None] * states[slot]).sum(1) * keys**-0.5
            out[t] = read[:, :-1] / (read[:, -1:].abs().clamp(min=1.0) + top.exp()[:, None] * EPS)
    return out.flatten(1), states


@pytest.mark.parametrize("backend", backends("mlstm_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "keys", "width"), [(1, 3, 5), (2, 16, 64), (3, 9, 35)])
def test_mlstm(backend: str, dtype: torch.dtype, heads: int, keys: int, width: int) -> None:
    torch.manual_seed(keys)
    rows, cap = ragged(backend), 15.0
    qkv = strided(torch.randn(rows.num_tokens, heads * (2 * keys + width)).to(dtype))
    gates = torch.randn(rows.num_tokens, 2 * heads) * 2
    # Tokens that outweigh all before them, memories that are kept whole, and some that are lost.
    gates[1::5, :heads] += 20
    gates[2::3, heads:] += 30
    gates[4::7, heads:] -= 30
    gates = strided(gates.to(dtype))
    pool = pool_of(rows, (heads, keys * width + keys + 1))
    expected, states = truth(qkv, gates, pool, rows, keys, cap)
    after = copied(pool)
    got = run(backend, mlstm_, qkv, gates, after, *rows.tensors(), keys, cap, EPS)
    assert_accurate(backend, got, expected, slack=SLACK)
    used = rows.tensors()[0]
    matrix, norm, peak = after[used].split([keys * width, keys, 1], dim=2)
    got_states = torch.cat((matrix.unflatten(2, (keys, width)), norm[..., None]), dim=3)
    assert_accurate(backend, got_states, states[used] * (-peak.double()).exp()[..., None], slack=SLACK)
    check_parts(backend, mlstm_, [qkv, gates], [], pool, rows, keys, cap, EPS)
