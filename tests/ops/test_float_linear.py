"""float_linear: float32 sums of 16-bit products, wherever they are computed, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, strided
from layouts import ON_CUDA
from pretend_cuda import pretending
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ops import float_linear as module
from vllm.ops.float_linear import float_linear
from vllm.v1.worker.gpu.cuda import GraphRecorder

# One tile, whole ones and what is left; of columns no wider than the inner dimension, and wider.
SHAPES = [(1, 1), (7, 33), (64, 32), (130, 64), (503, 72)]
_TILE = 4 * 64 * 32


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE_BYTES", _TILE)


@contextmanager
def place(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of "cpu", "cuda" and "cuda, tiles": one without products that come out in float32."""
    if name == "cuda, tiles":
        monkeypatch.setattr(module, "_gives_float32", lambda device: False)
    device = name.partition(",")[0]
    is_there = device == "cpu" or torch.cuda.is_available()
    with torch.inference_mode(), nullcontext() if is_there else pretending():
        yield device


ON_DEVICE = [pytest.param(name, marks=ON_CUDA) for name in ("cuda", "cuda, tiles")]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("device", ["cpu", *ON_DEVICE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_sums(device: str, dtype: torch.dtype, columns: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    x = strided(torch.randn(40, inner, generator=generator).to(dtype))
    truth = F.linear(x.double(), weight.double())
    with place(device, monkeypatch) as where:
        for rows in (0, 1, 3, 40):
            got = float_linear(x[:rows].to(where), weight.to(where))
            assert got.dtype == torch.float32
            assert_accurate("reference", got.cpu(), truth[:rows], slack=4e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("device", ON_DEVICE)
def test_a_graph_may_record_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay computes with what is there then; nothing waits for the device while it is recorded."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 64, generator=generator).bfloat16()
    first, second = torch.randn(2, 5, 64, generator=generator).bfloat16()
    with place(device, monkeypatch) as where:
        x, there = first.to(where), weight.to(where)
        result, replay = GraphRecorder(torch.device(where, 0)).record(lambda: float_linear(x, there))
        for rows in (second, first):
            x.copy_(rows)
            replay()
            assert_accurate("reference", result.cpu(), F.linear(rows.double(), weight.double()), slack=4e-6)


class _Largest(TorchDispatchMode):
    """The greatest tensor that any operation makes, in bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.usefixtures("small_tiles")
def test_the_weight_is_never_widened_whole() -> None:
    x, weight = torch.zeros(2, 64).bfloat16(), torch.zeros(503, 64).bfloat16()
    with _Largest() as largest:
        float_linear(x, weight)
    assert largest.num_bytes <= weight.nbytes
