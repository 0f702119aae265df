"""Which layout a weight takes, on machines that are not this one: what they can do is asked, and here answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from layouts import needs_kernels

from vllm import EngineArgs, envs
from vllm.ops import packed_linear as module
from vllm.ops._dispatch import ISA_LEVELS
from vllm.ops.packed_linear import Layout, sums_in_float16

pytestmark = needs_kernels


class Machine(NamedTuple):
    """A CPU's answers, and the layouts of bfloat16 layers and of results that are wanted in float32."""

    isa: str
    fast_dot: bool
    layers: Layout
    head: Layout


MACHINES = {
    "avx2": Machine("avx2", False, "packed_f32", "packed_f32"),
    "avx512": Machine("avx512", False, "packed_f32", "packed_f32"),
    "avx512_bf16 of Intel": Machine("avx512_bf16", False, "packed_f32", "packed_f32"),
    "avx512_bf16 of AMD": Machine("avx512_bf16", True, "packed_bf16_dot", "packed_bf16_dot"),
    "avx512_fp16": Machine("avx512_fp16", False, "packed_fp16", "packed_f32"),
    "amx": Machine("amx", False, "packed_bf16_dot", "packed_bf16_dot"),
}


@pytest.fixture(params=MACHINES.values(), ids=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """pack_linear asks one of them, and packs nothing."""
    cpu: Machine = request.param
    probes = SimpleNamespace(has_fast_bf16_dot=lambda: cpu.fast_dot, set_isa=lambda _: ISA_LEVELS.index(cpu.isa))
    monkeypatch.setattr(module, "cpu_ops", lambda: probes)
    monkeypatch.delenv("VLLM_CPU_GEMM", raising=False)
    return cpu


def layout_of(weight: torch.Tensor, float_out: bool = False) -> Layout:
    return module._layout(weight, float_out)


WEIGHT = torch.zeros(32, 8).bfloat16()


def test_what_the_machine_multiplies_fastest(machine: Machine) -> None:
    assert layout_of(WEIGHT) == machine.layers
    assert layout_of(WEIGHT, float_out=True) == machine.head
    for weight in (WEIGHT.float(), WEIGHT.half()):
        assert layout_of(weight) == layout_of(weight, float_out=True) == "packed_f32"


def test_what_the_variable_names(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("packed_f32", "packed_bf16_dot", "packed_fp16"):
        monkeypatch.setenv("VLLM_CPU_GEMM", name)
        assert layout_of(WEIGHT) == name
        assert layout_of(WEIGHT, float_out=True) == (machine.head if name == "packed_fp16" else name)


def test_a_name_that_is_no_layout_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", "tiles")
    for ask in (envs.cpu_gemm, lambda: EngineArgs(device="cpu").create_engine_config()):
        with pytest.raises(ValueError, match="one of packed_f32, packed_bf16_dot, packed_fp16, got 'tiles'"):
            ask()


def test_products_with_quantised_weights(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are our own kernel's on any machine."""
    assert sums_in_float16(float_out=False) == (machine.isa == "avx512_fp16")
    assert not sums_in_float16(float_out=True)
    monkeypatch.setenv("VLLM_CPU_GEMM", "packed_f32")
    assert not sums_in_float16(float_out=False)


@pytest.mark.parametrize(
    ("former", "layout"), [("panels", "packed_f32"), ("pairs", "packed_bf16_dot"), ("halves", "packed_fp16")]
)
def test_former_names_of_the_layouts(former: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", former)
    assert envs.cpu_gemm() == layout == layout_of(WEIGHT)
