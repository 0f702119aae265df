"""gated_delta_rule_ against the recurrence in float64, and in parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, backends, remembered, run, strided
from state_cases import SLACK, Rows, check_parts, copied, pool_of, ragged
from torch import Tensor

from vllm.ops.gated_delta_rule import gated_delta_rule_

# Heads of queries and keys, of values, their sizes.
SHAPES = [(1, 1, 3, 5), (1, 2, 16, 128), (2, 2, 7, 40)]
EPS = 1e-6


@remembered
def truth(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    rate: Tensor,
    bias: Tensor,
    pool: Tensor,
    rows: Rows,
    key_heads: int,
    *options: float,
) -> tuple[Tensor, Tensor]:
    """Results, and the states after them."""
    beta_scale, bound = options
    _, heads, keys, values = pool.shape
    out, states = torch.zeros(len(qkv), heads, values).double(), pool.double()
    slots, starts, seq_lens = rows.tensors()
    for row, slot in enumerate(slots):
        if seq_lens[row] == starts[row + 1] - starts[row]:
            states[slot] = 0
        for t in range(starts[row], starts[row + 1]):
            q, k, v = qkv[t].double().split([key_heads * keys, key_heads * keys, heads * values])
            for head in range(heads):
                own = slice(head // (heads // key_heads) * keys, (head // (heads // key_heads) + 1) * keys)
                query, key = (each[own] / (each[own].square().sum() + EPS).sqrt() for each in (q, k))
                logit = (decay[t].double() + bias.double()).view(heads, -1)[head]
                rated = rate[head].double()
                log = bound * (rated * logit).sigmoid() if bound else -rated * F.softplus(logit, threshold=100)
                kept = torch.exp(log)
                state = states[slot, head] * kept[:, None]
                lacking = v.view(heads, values)[head] - key @ state
                state += torch.outer(key, lacking * beta_scale * beta[t, head].double().sigmoid())
                states[slot, head] = state
                out[t, head] = query @ state / keys**0.5
    return out.flatten(1), states


def decays(rows: Rows, heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of decays: these are near 0, near 1 and between."""
    logits = torch.randn(rows.num_tokens, heads * width) * 3
    logits[::3] -= 12
    logits[1::5] += 20
    return logits.to(dtype), torch.logspace(-2, 1, heads), torch.randn(heads * width)


@pytest.mark.parametrize("backend", backends("gated_delta_rule_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "keys", "values"), SHAPES)
def test_gated_delta_rule(
    backend: str, dtype: torch.dtype, by_channel: bool, key_heads: int, heads: int, keys: int, values: int
) -> None:
    torch.manual_seed(keys)
    rows = ragged(backend)
    qkv = strided(torch.randn(rows.num_tokens, 2 * key_heads * keys + heads * values).to(dtype))
    decay, rate, bias = decays(rows, heads, keys if by_channel else 1, dtype)
    beta = (torch.randn(rows.num_tokens, heads) * 3).to(dtype)
    options = (2.0, -5.0) if by_channel else (1.0, 0.0)
    pool = pool_of(rows, (heads, keys, values))
    expected, states = truth(qkv, decay, beta, rate, bias, pool, rows, key_heads, *options)
    after = copied(pool)
    got = run(
        backend, gated_delta_rule_, qkv, decay, beta, rate, bias, after, *rows.tensors(), key_heads, *options, EPS
    )
    assert_accurate(backend, got, expected, slack=SLACK)
    used = rows.tensors()[0]
    assert_accurate(backend, after[used], states[used], slack=SLACK)
    per_token = [qkv, decay, beta]
    check_parts(backend, gated_delta_rule_, per_token, [rate, bias], pool, rows, key_heads, *options, EPS)
