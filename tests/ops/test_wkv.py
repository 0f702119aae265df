"""wkv_ against the recurrence in float64, and in parts."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided
from state_cases import Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.wkv import wkv_

# Exponents, up to 70 here, are rounded before they are taken.
SLACK = 2e-5


def truth(
    key: Tensor, value: Tensor, gate: Tensor, rate: Tensor, bonus: Tensor, pool: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Results, and both sums after them, as they are."""
    out = torch.zeros(key.shape).double()
    sums = (pool[:, :2].double() * pool[:, 2:].double().exp()).clone()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        if seq_lens[row] == starts[row + 1] - starts[row]:
            sums[slot] = 0
        for t in range(starts[row], starts[row + 1]):
            k, v = key[t].double(), value[t].double()
            now = (bonus.double() + k).exp()
            mean = (sums[slot, 0] + now * v) / (sums[slot, 1] + now)
            out[t] = gate[t].double().sigmoid() * mean
            sums[slot] = sums[slot] * (-rate.double()).exp() + k.exp() * torch.stack((v, torch.ones_like(v)))
    return out, sums


@pytest.mark.parametrize("backend", backends("wkv_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [3, 70])
def test_wkv(backend: str, dtype: torch.dtype, channels: int) -> None:
    torch.manual_seed(channels)
    rows = ragged(backend)
    key, value, gate = (strided((torch.randn(rows.num_tokens, channels) * 3).to(dtype)) for _ in range(3))
    # Keys that outweigh all before them, and some that count for nothing.
    key[1::7] += 60
    key[3::7] -= 60
    # Decays near 1, and near 0.
    rate, bonus = torch.logspace(-4, 2, channels), torch.randn(channels) * 2
    pool = pool_of(rows, (3, channels))
    pool[:, 1].abs_()
    expected, sums = truth(key, value, gate, rate, bonus, pool, rows)
    after = copied(pool)
    got = run(backend, wkv_, key, value, gate, rate, bonus, after, *rows.tensors())
    assert_accurate(backend, got, expected, slack=SLACK)
    used = rows.tensors()[0]
    peak = after[used, 2:].double()
    assert_accurate(backend, after[used, :2], sums[used] * (-peak).exp(), slack=SLACK)
    check_parts(backend, wkv_, [key, value, gate], [rate, bonus], pool, rows)
