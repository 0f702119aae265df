"""Kernels that take a prompt's tokens in chunks, against the recurrences in float64; and that they can be told not
to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run
from state_cases import SLACK, Rows, copied, pool_of
from test_gated_delta_rule import EPS
from test_gated_delta_rule import truth as delta_rule_truth
from test_state_space_scan import truth as state_space_truth
from torch import Tensor

from vllm.ops.gated_delta_rule import gated_delta_rule_
from vllm.ops.state_space_scan import state_space_scan_

pytestmark = pytest.mark.skipif(not {"triton"} & set(backends("state_space_scan_")), reason="Triton is not here")

# A chunk from the first token on, one after some tokens, and none.
ROWS = Rows((17, 26, 1), (0, 7, 3))
HEADS, SIZE, WIDTH = 2, 9, 11


def _state_space(dtype: torch.dtype) -> tuple[Any, list[Any], Tensor, tuple[Any, ...], Any]:
    xbc = torch.randn(ROWS.num_tokens, HEADS * WIDTH + 2 * SIZE).to(dtype)
    dt = torch.randn(ROWS.num_tokens, HEADS) * 3
    dt[::3] -= 12
    dt[1::5] += 20
    numbers = torch.logspace(-2, 1, HEADS), torch.randn(HEADS), torch.randn(HEADS)
    pool = pool_of(ROWS, (HEADS, SIZE, WIDTH))
    return state_space_scan_, [xbc, dt.to(dtype), *numbers], pool, (1, 0.01, 5.0), state_space_truth


def _delta_rule(dtype: torch.dtype) -> tuple[Any, list[Any], Tensor, tuple[Any, ...], Any]:
    qkv = torch.randn(ROWS.num_tokens, 2 * SIZE + HEADS * WIDTH)
    # Keys that are alike, of which each takes most of what the others wrote.
    qkv[3:14, SIZE : 2 * SIZE] = qkv[3, SIZE : 2 * SIZE]
    decay = torch.randn(ROWS.num_tokens, HEADS) * 3
    decay[::3] -= 12
    decay[1::5] += 20
    beta = (torch.randn(ROWS.num_tokens, HEADS) * 3).to(dtype)
    tensors = [qkv.to(dtype), decay.to(dtype), beta, torch.logspace(-2, 1, HEADS), torch.randn(HEADS)]
    pool = pool_of(ROWS, (HEADS, SIZE, WIDTH))
    return gated_delta_rule_, tensors, pool, (1, 2.0, 0.0), delta_rule_truth


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("make", [_state_space, _delta_rule])
def test_chunks(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    operation, tensors, pool, options, truth = make(dtype)
    expected, states = truth(*tensors, pool, ROWS, *options)
    after = copied(pool)
    more = (EPS,) if operation is gated_delta_rule_ else ()
    got = run("triton", operation, *tensors, after, *ROWS.tensors(), *options, *more)
    used = ROWS.tensors()[0]
    assert_accurate("triton", got, expected, slack=SLACK)
    assert_accurate("triton", after[used], states[used], slack=SLACK)


@pytest.mark.parametrize("make", [_state_space, _delta_rule])
def test_no_chunks_where_bits_may_not_depend_on_cuts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    operation, tensors, pool, options, _ = make(torch.float32)
    slots, starts, seq_lens = ROWS.tensors()
    first, last = int(starts[1]), int(starts[2])

    def parts_differ() -> bool:
        whole, cut = copied(pool), copied(pool)
        together = run("triton", operation, *tensors, whole, slots, starts, seq_lens, *options)
        found = []
        for begin, end in ((first, first + 14), (first + 14, last)):
            own = [each[begin:end] if len(each) == ROWS.num_tokens else each for each in tensors]
            where = slots[1:2], torch.tensor([0, end - begin]).int(), seq_lens[1:2] - (last - end)
            found.append(run("triton", operation, *own, cut, *where, *options))
        return not torch.cat(found).equal(together[first:last])

    assert parts_differ()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not parts_differ()
