"""What Triton's compiler makes of every kernel computes what the references compute.

The interpreter of the other tests runs the kernels' Python; here their PTX runs, instruction by instruction, for GPUs
of three generations.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_memory import Memory
from test_triton_cubins import KERNELS

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    # In a process of its own: here Triton interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(FOLDER.parent.parent)
    command = [sys.executable, FOLDER / "check_ptx.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_results_are_those_of_the_references(reports: list[dict[str, Any]]) -> None:
    wrong = [each for each in reports if each["error"] > 1 and not each["check"].startswith("spoiled")]
    assert len(reports) > 100 and wrong == []


def test_an_instruction_that_is_wrong_shows(reports: list[dict[str, Any]]) -> None:
    (spoiled,) = (report for report in reports if report["check"].startswith("spoiled"))
    assert spoiled["error"] == math.inf


def test_every_kernel_is_run(reports: list[dict[str, Any]]) -> None:
    by_capability = {
        capability: {name for report in reports if report["capability"] == capability for name in report["kernels"]}
        for capability in (75, 80, 90)
    }
    products = {"_linear_readings_kernel", "_chosen_logits_kernel"}
    assert by_capability[80] == by_capability[90] == set(KERNELS)
    assert by_capability[75] == set(KERNELS) - products


def test_an_access_outside_of_what_was_given_is_an_error() -> None:
    cells = np.zeros(8, dtype=np.float32)
    memory = Memory(shared_bytes=0)
    memory.allow(cells.ctypes.data, cells.nbytes)
    addresses = cells.ctypes.data + 4 * np.arange(8, dtype=np.uint64)
    assert memory.at(addresses, 4)[1].tolist() == list(range(0, 32, 4))
    with pytest.raises(IndexError, match="outside of every tensor"):
        memory.at(addresses + np.uint64(4), 4)
    with pytest.raises(IndexError, match="not aligned"):
        memory.at(addresses + np.uint64(2), 4)
