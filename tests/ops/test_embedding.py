"""Rows of a table by index."""

from __future__ import annotations

import pytest
import torch

from tests.ops.backends import DTYPES
from vllm.ops._dispatch import cpu_ops, force
from vllm.ops.embedding import embedding

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the C++ operators are not built")


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "hidden", "tokens"), [(1, 1, 1), (7, 3, 20), (300, 576, 5), (4, 8, 0)])
def test_implementations_are_equal(vocab, hidden, tokens, dtype, index_dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    ids = torch.randint(0, vocab, (tokens,), generator=generator, dtype=index_dtype)
    with force("cpp"):
        rows = embedding(ids, weight)
    assert torch.equal(rows, weight[ids.long()])


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_outside_the_table(bad):
    with force("cpp"), pytest.raises(RuntimeError, match=rf"token_ids must be in \[0, 5\), got {bad}"):
        embedding(torch.tensor([0, bad]), torch.zeros(5, 2))
