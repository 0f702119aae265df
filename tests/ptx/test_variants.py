"""No kernel is compiled while requests wait: the start has asked for every variant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def variants() -> dict[str, dict[str, list[list[str]]]]:
    # In a process of its own: here Triton interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER.parent / "support")])
    command = [sys.executable, FOLDER / "count_variants.py", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


HELD = ["plain", "8 bits"]


@pytest.mark.parametrize("held", HELD)
def test_batches_of_any_shape_find_their_kernels_compiled(
    variants: dict[str, dict[str, list[list[str]]]], held: str
) -> None:
    assert variants[held]["later"] == []


@pytest.mark.parametrize("held", HELD)
def test_the_start_compiles_few(variants: dict[str, dict[str, list[list[str]]]], held: str) -> None:
    """Each takes 0.5 to 3 s of a first start."""
    at_start = variants[held]["at_start"]
    counts = {name: sum(kernel == name for kernel, _ in at_start) for name, _ in at_start}
    assert counts.pop("_token_readings_kernel") <= 12
    # Layers' products have some shapes, of which each has its divisors.
    assert counts.pop("_quantized_linear_kernel", 0) <= 8
    assert max(counts.values()) <= 4, counts
    assert (held == "8 bits") == any(name == "_quantized_linear_kernel" for name, _ in at_start)
