"""Products at levels whose instructions this machine lacks, over a library that emulates them.

`python -m pytest --emulated tests/ops` runs any tests so, at those levels and the narrower ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import emulated
import pytest
import torch
from layouts import needs_float16, needs_kernels, needs_tiles
from preloaded import FORKED
from test_tile_products import PRODUCTS, rows_of
from torch import Tensor

from vllm.ops._dispatch import ISA_LEVELS, cpu_ops
from vllm.ops.packed_linear import pack_linear, packed_linear

HERE = Path(__file__).parent
# Operations with kernels of their own a level, and which of their tests run emulated levels: attention is the widest's
# alone, and experts take the products that the others test.
_PRODUCTS = (
    *("test_packed_linear.py", "test_quantized_linear.py", "test_normed_products.py", "test_large_beside_small.py"),
    *("test_int8_linear.py", "test_int8_activations.py", "test_tile_products.py", "test_adapted_linear.py"),
)
_OTHERS = (
    "test_paged_attention.py",
    "test_attention_options.py",
    "test_packed_attention.py",
    "test_latent_attention.py",
    "test_tile_attention.py",
    "test_experts_bits.py",
)
RUNS = {
    "products": (_PRODUCTS, "(cpp-avx512_fp16 or not (cpp-portable or cpp-avx)) and not reference and not triton"),
    "attention and experts": (_OTHERS, "not cpp-portable and not cpp-avx and not reference and not triton"),
}


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Path:
    if request.config.getoption("--emulated"):
        pytest.skip("this session's library is the emulated one")
    found, reason = emulated.build()
    if found is None:
        pytest.skip(reason)
    return found


@needs_kernels
@pytest.mark.parametrize("run", RUNS)
def test_emulated_levels(run: str, request: pytest.FixtureRequest) -> None:
    operators = cpu_ops()
    assert operators is not None
    if ISA_LEVELS[operators.set_isa(-1)] != "avx512_bf16":
        pytest.skip("for CPUs of the level avx512_bf16, by whose instructions the wider ones are emulated")
    request.getfixturevalue("library")
    files, levels = RUNS[run]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--emulated", "-k", levels]
    done = subprocess.run([*command, *(HERE / name for name in files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def products_in_float16() -> Tensor:
    """Products of rows that take float16 sums, at every tile height."""
    torch.manual_seed(0)
    weight, x = torch.randn(70, 300).bfloat16(), torch.randn(13, 300).bfloat16()
    ready = pack_linear(weight, None)
    return torch.cat([packed_linear(x[:rows], ready, float_out=True) for rows in range(1, 14)])


def products_in_tiles() -> Tensor:
    """Products of each kind of weight, with rows whose sums are below the smallest normal number."""
    torch.manual_seed(0)
    x = rows_of(100, 300, torch.bfloat16)
    x[::3] *= 1e-36
    return torch.cat([make()(x) for make in PRODUCTS.values()])


@pytest.mark.parametrize(
    ("products", "layout"),
    [
        pytest.param(products_in_float16, "packed_fp16", marks=needs_float16),
        pytest.param(products_in_tiles, "packed_bf16_dot", marks=needs_tiles),
    ],
)
def test_the_emulation_gives_the_bits_of_the_instructions(
    products: Callable[[], Tensor], layout: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    code = f"""
import sys, torch
from pathlib import Path
sys.path[:0] = {[str(HERE), str(HERE.parent / "support")]}
from vllm.ops import _dispatch
_dispatch.LIBRARY = Path({str(library)!r})
from test_emulated_levels import {products.__name__}
torch.save({products.__name__}(), {str(tmp_path / "products.pt")!r})
"""
    subprocess.run([sys.executable, "-c", FORKED + code], check=True)
    assert torch.equal(products(), torch.load(tmp_path / "products.pt"))
