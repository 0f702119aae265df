"""Tests of kernels run over these: the instruction-set levels and the layouts that this machine can run, its device."""

from __future__ import annotations

import pytest
import torch

from vllm.ops._dispatch import ISA_LEVELS, cpu_ops
from vllm.ops.cpu_kernels import cpu_kernel_isa

_OPERATORS = cpu_ops()


def compiled_levels() -> list[str]:
    """The levels that this machine runs and the library has, narrowest first."""
    if _OPERATORS is None:
        return []
    used = _OPERATORS.set_isa(-1)
    levels = [level for i, level in enumerate(ISA_LEVELS[: used + 1]) if _OPERATORS.set_isa(i) == i]
    _OPERATORS.set_isa(used)
    return levels


# "cpp" is the widest level, the others are the narrower ones.
CPP_LEVELS = ["cpp", *(f"cpp-{level}" for level in compiled_levels()[:-1])] if _OPERATORS is not None else []
LEVELS = ["reference", *CPP_LEVELS]

needs_kernels = pytest.mark.skipif(_OPERATORS is None, reason="the C++ operators are not built")
needs_float16 = pytest.mark.skipif(
    cpu_kernel_isa() not in ("avx512_fp16", "amx"),
    reason="this CPU has no float16 arithmetic (pytest --emulated does without)",
)
needs_tiles = pytest.mark.skipif(
    cpu_kernel_isa() != "amx", reason="this CPU has no matrix tiles (pytest --emulated does without)"
)

# As VLLM_CPU_GEMM names them.
BFLOAT16_LAYOUTS = ["packed_f32", "packed_bf16_dot", "packed_fp16"]


# The marks of tests that run on a CUDA device, and on a pretended one where there is none.
ON_CUDA = [pytest.mark.gpu] if torch.cuda.is_available() else []
