"""gated_rms_norm against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, backends, run, strided

from vllm.ops.gated_rms_norm import gated_rms_norm


@pytest.mark.parametrize("backend", backends("gated_rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("rows", "groups", "width", "is_wide"), [(0, 1, 8, False), (3, 1, 7, True), (5, 4, 40, False)])
def test_gated_rms_norm(
    backend: str, dtype: torch.dtype, gate_first: bool, sigmoid: bool, rows: int, groups: int, width: int, is_wide: bool
) -> None:
    torch.manual_seed(width)
    eps = 1e-5
    x = strided((torch.randn(rows, groups * width) * 2.0 ** torch.arange(rows)[:, None]).to(dtype))
    gate = strided(torch.randn(rows, groups * width).to(dtype))
    for weight in (torch.randn(groups * width), torch.randn(width)):
        weight = weight if is_wide else weight.to(dtype)
        got = run(backend, gated_rms_norm, x, gate, weight, eps, width, sigmoid, gate_first)
        factor = gate.double().sigmoid() if sigmoid else F.silu(gate.double())
        value = (x.double() * factor if gate_first else x.double()).view(rows, groups, width)
        normed = value / (value.square().mean(-1, keepdim=True) + eps).sqrt()
        expected = (normed * weight.double().view(-1, width)).view(rows, groups * width)
        assert_accurate(backend, got, expected if gate_first else expected * factor, slack=4e-6)
