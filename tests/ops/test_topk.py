"""topk is exact, the order of equals included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import DTYPES, backends, run, strided

from vllm.ops.topk import topk

BACKENDS = backends("topk")


def assert_true(got: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, k: int) -> None:
    values, ids = got
    assert values.dtype == torch.float32 and ids.dtype == torch.int32
    table = logits.double().numpy()
    for row in range(len(table)):
        order = np.lexsort((np.arange(table.shape[1]), -table[row]))[:k]
        assert ids[row].tolist() == order.tolist()
        assert values[row].tolist() == table[row][order].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "k"),
    [(0, 5, 2), (1, 1, 0), (1, 1, 1), (3, 7, 7), (1, 2048, 1), (2, 2049, 20), (2, 9001, 65), (2, 500, 500)],
)
def test_shapes(backend: str, dtype: torch.dtype, num_rows: int, vocab_size: int, k: int) -> None:
    torch.manual_seed(k)
    logits = torch.randn(num_rows, vocab_size).mul_(4).to(dtype)
    assert_true(run(backend, topk, logits, k), logits, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 20, 3000])
def test_ties_infinities_and_strides(backend: str, dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-2, 3, (5, 3001)).float()
    logits[1].masked_fill_(torch.rand(3001) < 0.999, -torch.inf)
    logits[2] = -torch.inf
    # The two zeros are equals.
    logits[3] = torch.where(torch.rand(3001) < 0.5, -0.0, 0.0)
    logits[4, 77] = torch.inf
    logits = strided(logits.to(dtype))
    assert_true(run(backend, topk, logits, k), logits, k)


@pytest.mark.gpu
def test_real_sizes_on_a_device() -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, 151936).to(torch.bfloat16)
    assert_true(run("triton", topk, logits, 20), logits, 20)


@pytest.mark.parametrize("k", [-1, 4])
def test_k_beyond_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match=r"k must be in \[0, 3\]"):
        topk(torch.zeros(2, 3), k)


def test_wrong_dtype() -> None:
    with pytest.raises(ValueError, match="logits must be"):
        topk(torch.zeros(2, 3).double(), 1)
