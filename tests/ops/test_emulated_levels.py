"""Products at levels whose instructions this machine lacks, over a library that emulates them.

`python -m pytest --emulated tests/ops` runs any tests so, at those levels and the narrower ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import emulated
import pytest
from layouts import needs_kernels

from vllm.ops._dispatch import ISA_LEVELS, cpu_ops

HERE = Path(__file__).parent
# Of what the levels' kernels are for.
FILES = ("test_packed_linear.py", "test_quantized_linear.py", "test_normed_products.py", "test_large_beside_small.py")
WIDEST = "not cpp-portable and not cpp-avx and not reference and not triton"


@needs_kernels
def test_products_of_emulated_levels(request: pytest.FixtureRequest) -> None:
    operators = cpu_ops()
    assert operators is not None
    if request.config.getoption("--emulated") or ISA_LEVELS[operators.set_isa(-1)] != "avx512_bf16":
        pytest.skip("for CPUs of the level avx512_bf16, by whose instructions the wider one is emulated")
    library, reason = emulated.build()
    if library is None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--emulated", "-k", WIDEST]
    run = subprocess.run([*command, *(HERE / name for name in FILES)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
