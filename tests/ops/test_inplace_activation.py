"""activation_ against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, backends, run
from torch import Tensor

from vllm.ops.activation import ACTIVATIONS, activation_

# On CUDA PyTorch's activations run, as in the reference.
BACKENDS = [each for each in backends("activation_") if each != "triton"]


def truth(x: Tensor, name: str) -> Tensor:
    """GELUs in forms that do not cancel below 0."""
    x = x.double()
    curves = {
        "silu": F.silu,
        "gelu_tanh": lambda x: x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3)),
        "gelu": lambda x: x * torch.erfc(-x / 2**0.5) / 2,
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "mish": F.mish,
    }
    return curves[name](x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 7), (2, 1536), (9, 5003)])
def test_activations(backend: str, dtype: torch.dtype, name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[1])
    x = torch.randn(shape).mul_(3).to(dtype)
    expected = truth(x, name)
    assert run(backend, lambda own: activation_(own, name) is own, x)
    assert_accurate(backend, x, expected)


# PyTorch's GELU loses digits to cancellation far below 0, which is not tested.
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "reference"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_beyond_the_exponential_and_none(backend: str, name: str) -> None:
    far = [-6e4, -200.0, -90.0, -20.0, -12.5, -5.0, -1e-3, -0.0, 0.0, 1e-3, 5.0, 12.5, 20.0, 90.0, 200.0, 6e4]
    x = torch.tensor([far]).repeat(3, 1)
    expected = truth(x, name)
    run(backend, lambda own: activation_(own, name), x)
    for column in range(len(far)):
        assert_accurate(backend, x[:, column], expected[:, column], slack=1e-5 if abs(far[column]) > 4 else 2e-6)
    nothing = torch.tensor([[torch.nan, torch.inf, 1.0]])
    run(backend, lambda own: activation_(own, name), nothing)
    assert nothing[0].isnan().tolist() == [True, False, False]
    assert nothing[0, 1] == (1.0 if name in ("sigmoid", "tanh") else torch.inf)
