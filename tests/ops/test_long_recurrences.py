"""Over long sequences errors against float64 grow no faster than those of transformers' own recurrences in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import backends, remembered, run
from state_cases import Rows
from test_gated_delta_rule import truth as delta_rule_truth
from test_state_space_scan import truth as state_space_truth
from torch import Tensor

from vllm.ops.gated_delta_rule import gated_delta_rule_
from vllm.ops.state_space_scan import state_space_scan_

pytest.importorskip("transformers")

LENGTH, HEADS, SIZE, WIDTH = 1600, 2, 16, 24
_BACKENDS = [name for name in backends("gated_delta_rule_") if name != "triton"]


def _mean_errors(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """The mean errors of the first and the last 400 tokens."""
    errors = (got.double() - expected).square().mean(1)
    return errors[:400].mean().sqrt().item(), errors[-400:].mean().sqrt().item()


def _assert_grows_no_faster(own: Tensor, theirs: Tensor, expected: Tensor) -> None:
    (first, last), (their_first, their_last) = _mean_errors(own, expected), _mean_errors(theirs, expected)
    # A margin for the order of sums; that of rounding where memories last for thousands of tokens would be far more.
    assert last <= 1.2 * their_last
    assert last / first <= 1.5 * max(1.0, their_last / their_first)


def _sequence() -> tuple[Rows, tuple[Tensor, Tensor, Tensor]]:
    rows = Rows((LENGTH,), (0,))
    return rows, rows.tensors()


@remembered
def _their_delta_rule(q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    return torch_recurrent_gated_delta_rule(q, k, v, logs, beta, use_qk_l2norm_in_kernel=True)[0]


@pytest.mark.parametrize("backend", _BACKENDS)
def test_gated_delta_rule(backend: str) -> None:
    torch.manual_seed(3)
    rows, where = _sequence()
    qkv = torch.randn(LENGTH, HEADS * (2 * SIZE + WIDTH))
    # Memories that last for thousands of tokens, and some that are written slowly.
    decay, rate, bias = torch.randn(LENGTH, HEADS) - 9, torch.tensor([0.5, 4.0]), torch.zeros(HEADS)
    beta = torch.randn(LENGTH, HEADS) - 2
    pool = torch.zeros(rows.num_slots, HEADS, SIZE, WIDTH)
    expected, _ = delta_rule_truth(qkv, decay, beta, rate, bias, pool, rows, HEADS, 1.0, 0.0)
    own = run(backend, gated_delta_rule_, qkv, decay, beta, rate, bias, pool.clone(), *where, HEADS)
    parts = qkv.split([HEADS * SIZE, HEADS * SIZE, HEADS * WIDTH], dim=1)
    q, k, v = (part.unflatten(1, (HEADS, -1))[None] for part in parts)
    logs = -rate * F.softplus(decay + bias)
    theirs = _their_delta_rule(q, k, v, logs[None], beta.sigmoid()[None])
    _assert_grows_no_faster(own, theirs[0].flatten(1), expected)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_state_space_scan(backend: str) -> None:
    from transformers.models.zamba2.modeling_zamba2 import mamba2_selective_state_update

    torch.manual_seed(4)
    rows, where = _sequence()
    xbc, dt = torch.randn(LENGTH, HEADS * WIDTH + 2 * SIZE), torch.randn(LENGTH, HEADS) - 6
    rate, bias, skip = torch.tensor([0.1, 2.0]), torch.zeros(HEADS), torch.ones(HEADS)
    pool = torch.zeros(rows.num_slots, HEADS, SIZE, WIDTH)
    numbers = rate, bias, skip
    expected, _ = state_space_truth(xbc, dt, *numbers, pool, rows, 1, 0.0, torch.inf)
    own = run(backend, state_space_scan_, xbc, dt, *numbers, pool.clone(), *where, 1)
    x, b, c = (part[:, None] for part in xbc.split([HEADS * WIDTH, SIZE, SIZE], dim=1))
    state = torch.zeros(1, HEADS, WIDTH, SIZE)
    wide_rate, wide_bias, wide_skip = (each[:, None].expand(HEADS, WIDTH) for each in (-rate, bias, skip))
    theirs = [
        mamba2_selective_state_update(
            state,
            x[t].unflatten(1, (HEADS, WIDTH)),
            dt[t, None, :, None].expand(1, HEADS, WIDTH),
            wide_rate[..., None].expand(HEADS, WIDTH, SIZE),
            b[t, None],
            c[t, None],
            wide_skip,
            dt_bias=wide_bias,
            dt_softplus=True,
        )
        for t in range(LENGTH)
    ]
    _assert_grows_no_faster(own, torch.cat(theirs).flatten(1), expected)
