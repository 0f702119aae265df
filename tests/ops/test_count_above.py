"""count_above: exact, so it equals a count in float64."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, backends, remembered, run, strided
from torch import Tensor

from vllm.ops.count_above import count_above

BACKENDS = backends("count_above")


@remembered
def truth(logits: Tensor, values: Tensor, num_values: Tensor | None) -> Tensor:
    counts = (logits.double()[:, :, None] > values.double()[:, None, :]).sum(dim=1).to(torch.int32)
    if num_values is not None:
        counts[torch.arange(values.shape[1]) >= num_values[:, None]] = 0
    return counts


@remembered
def truth_by_sorting(logits: Tensor, values: Tensor) -> Tensor:
    """The same where the comparisons would not fit the memory."""
    ascending = logits.sort(dim=1).values
    return (logits.shape[1] - torch.searchsorted(ascending, values, right=True)).to(torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width"),
    [
        (0, 5, 2),
        (1, 1, 0),
        (1, 1, 3),
        (3, 7, 7),
        (1, 4096, 1),
        (2, 4097, 9),
        (2, 9001, 64),
        (2, 601, 65),
        (2, 601, 257),
    ],
)
def test_shapes(backend: str, dtype: torch.dtype, num_rows: int, vocab_size: int, width: int) -> None:
    """Values from elsewhere, and some that stand in the row."""
    torch.manual_seed(width)
    logits = torch.randn(num_rows, vocab_size).mul_(4).to(dtype)
    values = torch.randn(num_rows, width).mul_(4)
    values[:, ::2] = logits[:, torch.randint(vocab_size, (len(range(0, width, 2)),))].float()
    got = run(backend, count_above, logits, values, None)
    assert got.dtype == torch.int32
    assert torch.equal(got, truth(logits, values, None))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [20, 300])
def test_hostile_values(backend: str, dtype: torch.dtype, width: int) -> None:
    """Ties, infinities, one vocabulary of -inf, strided tables, and padding with anything in it."""
    torch.manual_seed(width)
    logits = torch.randint(-2, 3, (5, 5000)).to(dtype)
    logits[1] = -torch.inf
    logits[2, ::3] = torch.inf
    logits[3, :4096] = -torch.inf
    values = torch.randint(-3, 4, (5, width)).float()
    values[:, 0], values[:, 1], values[:, 2] = -torch.inf, torch.inf, -0.0
    num_values = torch.tensor([width, 3, 5, 0, width - 1], dtype=torch.int32)
    for row, count in enumerate(num_values.tolist()):
        values[row, count:] = torch.nan if row % 2 else torch.inf
    got = run(backend, count_above, strided(logits), strided(values), num_values)
    assert torch.equal(got, truth(logits, values, num_values))


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend.startswith("cpp")])
@pytest.mark.parametrize("width", [5, 6, 7, 9, 15, 16, 17, 23, 24, 30, 31, 32, 46, 192])
@pytest.mark.parametrize("num_blocks", [1, 7, 8, 64, 65.5, 511, 600])
def test_blocks_that_are_searched(backend: str, width: int, num_blocks: float) -> None:
    """Blocks of 512 logits over which many values are spread, each in another order, with ties; as many blocks as fill
    some bit planes, as many as fill all of them, and more."""
    torch.manual_seed(width)
    vocab_size = int(512 * num_blocks)
    rows = 2 if num_blocks > 500 else 3
    logits = torch.randint(-width, width, (rows, vocab_size)).float().div_(2)
    logits[0].add_(torch.randn(vocab_size))
    values = torch.randint(-width, width, (rows, width)).float().div_(2)
    values[1, :: width - 1] = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(run(backend, count_above, logits, values, None), truth_by_sorting(logits, values))


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend.startswith("cpp")])
@pytest.mark.parametrize("width", [129, 193, 255, 256, 257, 263, 264, 287, 318, 510, 1020, 1021])
def test_many_values(backend: str, width: int) -> None:
    """More than are compared: trees of every depth, what a tree leaves over, sorts of all of a row or of its top."""
    torch.manual_seed(width)
    logits = torch.randn(6, 3001)
    logits[1] = (logits[1] * 9).round() / 9
    logits[2, ::2] = -torch.inf
    logits[3, 5] = torch.inf
    values = torch.randn(6, width)
    values[1] = (values[1] * 9).round() / 9
    values[1, :4] = torch.tensor([-torch.inf, torch.inf, -0.0, 0.0])
    # Values of the row's top, and some that nothing exceeds.
    values[4] = logits[4].topk(width).values[torch.randperm(width)]
    values[5] = 9.0
    num_values = torch.tensor([width, width, width - 1, 129, width, width], dtype=torch.int32)
    got = run(backend, count_above, logits, values, num_values)
    expected = truth_by_sorting(logits, values)
    expected[torch.arange(width) >= num_values[:, None]] = 0
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_seen_as_many(backend: str) -> None:
    torch.manual_seed(4)
    logits, values = torch.randn(1, 300).expand(3, 300), torch.randn(3, 2)
    assert torch.equal(run(backend, count_above, logits, values, None), truth(logits, values, None))


@pytest.mark.parametrize(
    ("logits", "values", "num_values", "field"),
    [
        (torch.zeros(2, 0), torch.zeros(2, 1), None, "logits"),
        (torch.zeros(3, 2).t(), torch.zeros(2, 1), None, "logits"),
        (torch.zeros(2, 3).double(), torch.zeros(2, 1), None, "logits"),
        (torch.zeros(2, 3), torch.zeros(2, 1).double(), None, "values"),
        (torch.zeros(2, 3), torch.zeros(3, 1), None, "values"),
        (torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2), "num_values"),
    ],
)
def test_wrong_arguments_are_named(logits: Tensor, values: Tensor, num_values: Tensor | None, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        count_above(logits, values, num_values)
