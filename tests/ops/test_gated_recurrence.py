"""gated_recurrence_ against the recurrence in float64, and in parts."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided
from state_cases import SLACK, Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.gated_recurrence import gated_recurrence_


def truth(
    x: Tensor, gates: list[Tensor], biases: list[Tensor], rate: Tensor, pool: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Results, and the states after them."""
    out, states = torch.zeros(x.shape).double(), pool.double()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        begins = seq_lens[row] == starts[row + 1] - starts[row]
        if begins:
            states[slot] = 0
        for t in range(starts[row], starts[row + 1]):
            own, kept = ((gate[t].double() + bias.double()).sigmoid() for gate, bias in zip(gates, biases, strict=True))
            log = -rate.double() * kept
            share = torch.ones(()) if begins and t == starts[row] else (-torch.expm1(2 * log)).sqrt()
            states[slot] = states[slot] * log.exp() + share * own * x[t].double()
            out[t] = states[slot]
    return out, states


@pytest.mark.parametrize("backend", backends("gated_recurrence_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [3, 70])
def test_gated_recurrence(backend: str, dtype: torch.dtype, channels: int) -> None:
    torch.manual_seed(channels)
    rows = ragged(backend)
    x, *gates = (strided((torch.randn(rows.num_tokens, channels) * 3).to(dtype)) for _ in range(3))
    # Decays near 1, and near 0.
    gates[1][::3] -= 12
    biases = [torch.randn(channels) for _ in range(2)]
    rate = torch.logspace(-1, 2, channels)
    pool = pool_of(rows, (channels,))
    expected, states = truth(x, gates, biases, rate, pool, rows)
    after = copied(pool)
    got = run(backend, gated_recurrence_, x, *gates, *biases, rate, after, *rows.tensors())
    assert_accurate(backend, got, expected, slack=SLACK)
    used = rows.tensors()[0]
    assert_accurate(backend, after[used], states[used], slack=SLACK)
    check_parts(backend, gated_recurrence_, [x, *gates], [*biases, rate], pool, rows)
