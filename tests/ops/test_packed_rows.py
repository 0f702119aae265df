"""take_packed_rows: the product of some outputs alone, bias included."""

from __future__ import annotations

import pytest
import torch
from test_packed_linear import LEVELS, packed
from twins import DTYPES, chosen

from vllm.ops.packed_linear import PackedLinear, packed_linear
from vllm.ops.packed_rows import take_packed_rows


@pytest.mark.parametrize("twin", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_are_the_columns_of_the_whole_product(twin: str, dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(130, 300).to(dtype), torch.randn(9, 300).to(dtype)
    bias = torch.randn(130).to(dtype) if with_bias else None
    rows = torch.cat([torch.randperm(130), torch.tensor([129, 0, 0])])
    with chosen(twin):
        whole = packed(twin, weight, bias)
        taken = take_packed_rows(whole, rows)
        assert taken is not None and taken.shape == (133, 300) and taken.layout == whole.layout
        got, want = packed_linear(x, taken), packed_linear(x, whole)[:, rows]
    if whole.layout == "plain":
        # The library chooses the order of its sums by the shape: a last bit may differ.
        assert torch.allclose(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    else:
        assert torch.equal(got, want)


def test_onednn_hides_its_rows() -> None:
    opaque = PackedLinear(torch.zeros(4, 3).bfloat16(), None, "onednn", (4, 3))
    assert take_packed_rows(opaque, torch.tensor([1])) is None
