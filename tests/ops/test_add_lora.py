"""Adapters' thin products, on rows of different adapters and of none."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided

from vllm.ops.add_lora import RANK_GROUP, add_lora_, add_lora_embedding_, grouped_ranks, rank_groups

# Rows of each of three adapters and, last, of none; the parts' columns; their ranks by adapter.
CASES = {
    "one row": ([0, 1, 0, 0], [5], [[3], [4], [1]]),
    "no adapter": ([0, 0, 0, 7], [40], [[3], [4], [1]]),
    "tails": ([9, 0, 17, 3], [33, 1, 70], [[16, 0, 2], [1, 1, 1], [0, 7, 20]]),
    "wide": ([3, 8, 17, 1], [270, 20], [[17, 32], [8, 8], [16, 16]]),
}
INNER = 37
# The values between the products may be rounded to bfloat16, by 2^-9, as in a model of that dtype; its products with B
# are added up, and may be several times their sum.
SLACK = {torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2**-7}


def make(case: str, dtype: torch.dtype, inner: int = INNER):
    counts, sizes, ranks = CASES[case]
    torch.manual_seed(7)
    adapters = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor(counts))
    adapters = adapters[torch.randperm(len(adapters))]
    groups = rank_groups(max(max(each) for each in ranks))
    a = torch.zeros(3, len(sizes) * groups, inner, RANK_GROUP, dtype=dtype)
    b = torch.full((3, groups * RANK_GROUP, sum(sizes)), float("nan"), dtype=dtype)
    borders = torch.tensor([0, *sizes]).cumsum(0).int()
    for adapter in range(3):
        for part, (size, rank) in enumerate(zip(sizes, ranks[adapter], strict=True)):
            own = torch.randn(rank, inner).to(dtype)
            a[adapter, part * groups : (part + 1) * groups] = grouped_ranks(own, groups)
            b[adapter, :rank, borders[part] : borders[part + 1]] = torch.randn(rank, size).to(dtype)
    order = torch.full((len(adapters),), -(2**30), dtype=torch.int32)
    starts = torch.zeros(4, dtype=torch.int32)
    for adapter in range(3):
        rows = (adapters == adapter).nonzero().flatten()
        starts[adapter + 1] = starts[adapter] + len(rows)
        order[starts[adapter] : starts[adapter + 1]] = rows.int()
    return adapters, order, starts, a, b, torch.tensor(ranks, dtype=torch.int32), torch.rand(3, len(sizes)), borders


def truth(out, x, adapters, a, b, ranks, scales, borders, gain=None, shift=None):
    """In float64, row by row."""
    groups, total = a.shape[1] // (len(borders) - 1), out.double().clone()
    for row, adapter in enumerate(adapters.tolist()):
        if adapter < 0:
            continue
        if gain is not None:
            total[row] += out[row].double() * gain[adapter].double() + shift[adapter].double()
        for part, (first, end) in enumerate(pairwise(borders.tolist())):
            rank = int(ranks[adapter, part])
            own = a[adapter, part * groups : (part + 1) * groups].transpose(1, 2).flatten(0, 1)[:rank].double()
            inner = own @ x[row].double() * scales[adapter, part].double()
            total[row, first:end] += inner @ b[adapter, :rank, first:end].double()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", backends("add_lora_"))
def test_equals_float64(backend, case, dtype):
    adapters, order, starts, a, b, *rest = make(case, dtype)
    x = strided(torch.randn(len(adapters), INNER).to(dtype))
    for out_dtype in {dtype, torch.float32}:
        before = torch.randn(len(adapters), b.shape[2]).to(out_dtype)
        # The interpreter is slow.
        plain = [()] if backend != "triton" or case != "wide" else []
        for own in (*plain, (torch.randn(3, b.shape[2]), torch.randn(3, b.shape[2]))):
            out = strided(before.clone())
            run(backend, add_lora_, out, x, order, starts, a, b, *rest, *own)
            wanted = truth(before, x, adapters, a, b, *rest, *own)
            assert_accurate(backend, out.clone(), wanted, slack=SLACK[dtype])
            assert torch.equal(out[adapters < 0], before[adapters < 0])


@pytest.mark.parametrize("dtype", DTYPES)
# PyTorch's products, of which the reference is, choose the order of their sums by the shape, as those of Triton's
# interpreter do.
@pytest.mark.parametrize("backend", [each for each in backends("add_lora_") if each.startswith("cpp")])
def test_a_row_does_not_depend_on_the_others(backend, dtype):
    adapters, order, starts, a, b, *rest = make("wide", dtype)
    x, before = torch.randn(len(adapters), INNER).to(dtype), torch.randn(len(adapters), b.shape[2]).to(dtype)
    together = before.clone()
    run(backend, add_lora_, together, x, order, starts, a, b, *rest)
    for row, adapter in list(enumerate(adapters.tolist()))[::5]:
        alone = before[row : row + 1].clone()
        own_starts = torch.tensor([0] * (adapter + 1) + [1] * (3 - adapter), dtype=torch.int32)
        own_starts = own_starts if adapter >= 0 else torch.zeros(4, dtype=torch.int32)
        run(backend, add_lora_, alone, x[row : row + 1], torch.zeros(1, dtype=torch.int32), own_starts, a, b, *rest)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("ids_dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", backends("add_lora_embedding_"))
def test_an_embedding_takes_the_tokens_row(backend, dtype, ids_dtype):
    adapters, order, starts, a, b, *rest = make("one row", dtype, inner=50)
    ids = torch.tensor([49], dtype=ids_dtype)
    before = torch.randn(1, b.shape[2]).to(dtype)
    out = before.clone()
    run(backend, add_lora_embedding_, out, ids, order, starts, a, b, *rest)
    unit = torch.nn.functional.one_hot(ids.long(), 50).to(dtype)
    assert_accurate(backend, out, truth(before, unit, adapters, a, b, *rest), slack=SLACK[dtype])
    out = before.clone()
    run(backend, add_lora_embedding_, out, torch.tensor([50], dtype=ids_dtype), order, starts, a, b, *rest)
    assert torch.equal(out, before)
