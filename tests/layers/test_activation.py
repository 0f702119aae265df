"""Activations that write over their argument give the values of those that do not, up to rounding: other
operators compute them."""

from __future__ import annotations

import pytest
import torch

from vllm.layers.activation import get_act_fn, get_inplace_act_fn


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu", "relu2"])
def test_in_place(name: str) -> None:
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    expected = get_act_fn(name)(x.clone())
    got = get_inplace_act_fn(name)(x)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert got.data_ptr() == x.data_ptr()
