"""VLLM_BATCH_INVARIANT=1 rules out what it cannot be kept with, and changes the kernels that would break it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm import EngineArgs, envs
from vllm.layers.activation import get_act_fn
from vllm.ops import cpu_kernels
from vllm.ops.cpu_kernels import check_batch_invariance


@pytest.fixture(autouse=True)
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_variable(value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert envs.batch_invariant() is expected


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT must be one of 0, 1, got 'yes'"):
        EngineArgs(device="cpu").create_engine_config()


def test_the_cpu_kernels_keep_it() -> None:
    check_batch_invariance("cpu")


def test_a_variable_that_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OPS", "reference")
    with pytest.raises(ValueError, match="cannot be kept: VLLM_OPS=reference"):
        EngineArgs(device="cpu").create_engine_config()


def test_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check_batch_invariance("cuda")
    monkeypatch.setenv("VLLM_USE_TRITON", "0")
    with pytest.raises(ValueError, match="on CUDA it needs Triton's kernels: .*do not set VLLM_USE_TRITON=0"):
        check_batch_invariance("cuda")


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "cpu_ops", lambda: None)
    with pytest.raises(ValueError, match=r"it needs the C\+\+ kernels"):
        check_batch_invariance("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_new", "silu", "tanh", "sigmoid", "mish"])
def test_activations_by_rows(name: str, dtype: torch.dtype) -> None:
    """At a width that is no multiple of a vector; one unit in the last place of the output is rounding."""
    x = (torch.randn(33, 100, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    act = get_act_fn(name)
    whole = act(x)
    for start, stop in ((0, 1), (7, 9), (20, 33)):
        assert torch.equal(act(x[start:stop].clone()), whole[start:stop])
    plain = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh")}
    plain |= {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "mish": F.mish}
    torch.testing.assert_close(whole, plain[name](x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert act(x[:0]).shape == (0, 100)
