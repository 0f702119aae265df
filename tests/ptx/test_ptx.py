"""Every kernel, as Triton's compiler makes it, computes what the references compute.

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
from ptx_races import Races
from test_triton_cubins import EXPERTS_KERNELS, KERNELS

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def everything() -> list[dict[str, Any]]:
    # In a process of its own: here Triton interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(FOLDER.parent.parent)
    command = [sys.executable, FOLDER / "check_ptx.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def reports(everything: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports of kernels that ran to their end."""
    return [report for report in everything if "race" not in report]


def test_results_are_those_of_the_references(reports: list[dict[str, Any]]) -> None:
    wrong = [each for each in reports if each["error"] > 1 and not each["check"].startswith("spoiled")]
    assert len(reports) > 70 and wrong == []


def test_an_instruction_that_is_wrong_shows(reports: list[dict[str, Any]]) -> None:
    (spoiled,) = (report for report in reports if report["check"].startswith("spoiled"))
    assert spoiled["error"] == math.inf


def test_a_race_between_programs_shows(everything: list[dict[str, Any]]) -> None:
    races = [report["race"] for report in everything if "race" in report]
    assert len(races) == 2 and all("a race: " in race for race in races)


def test_every_kernel_is_run(reports: list[dict[str, Any]]) -> None:
    by_capability = {
        capability: {name for report in reports if report["capability"] == capability for name in report["kernels"]}
        for capability in (75, 80, 90)
    }
    products = {"_linear_readings_kernel", "_chosen_logits_kernel", "_quantized_linear_kernel"}
    products |= {"_invariant_linear_kernel", *EXPERTS_KERNELS}
    latent = {"_attend_kernel", "_write_kernel"}
    attention = {"_decode_kernel", "_merge_splits_kernel", "_prefill_kernel", "_write_cache_kernel", *latent}
    assert by_capability[90] == set(KERNELS)
    assert by_capability[80] == products | attention | {"_shrink_kernel", "_expand_kernel", "_look_up_kernel"}
    # On Turing PyTorch attends to latents.
    assert by_capability[75] == set(KERNELS) - products - {"_attend_kernel"}


def test_an_access_outside_of_what_was_given_is_an_error() -> None:
    cells = np.zeros(8, dtype=np.float32)
    memory = Memory(shared_bytes=0)
    memory.allow(cells.ctypes.data, cells.nbytes)
    addresses = cells.ctypes.data + 4 * np.arange(8, dtype=np.uint64)
    assert memory.at(addresses, 4)[1].tolist() == np.arange(32).reshape(8, 4).tolist()
    with pytest.raises(IndexError, match="outside of every tensor"):
        memory.at(addresses + np.uint64(4), 4)
    with pytest.raises(IndexError, match="not aligned"):
        memory.at(addresses + np.uint64(2), 4)


@pytest.fixture
def cells() -> np.ndarray:
    return np.zeros(16, dtype=np.uint8)


BYTES = np.arange(8).reshape(4, 2)
THREADS = np.arange(4)
DATA = np.zeros((4, 2), dtype=np.uint8)


def test_threads_of_a_block_are_ordered_by_barriers(cells: np.ndarray) -> None:
    races = Races(num_blocks=1)
    races.begin_block()
    races.write(cells, BYTES, THREADS, DATA)
    races.read(cells, BYTES, THREADS)
    with pytest.raises(RuntimeError, match="thread 1 of block 1 reads what thread 0 of block 1 accessed"):
        races.read(cells, BYTES[:1], THREADS[1:2])
    races.barrier()
    races.read(cells, BYTES[:1], THREADS[1:2])
    races.read(cells, BYTES[:1], THREADS[2:3])
    with pytest.raises(RuntimeError, match="writes over what several threads of block 1"):
        races.write(cells, BYTES[:1], THREADS[2:3], DATA[:1])
    races.barrier()
    races.write(cells, BYTES[:1], THREADS[2:3], DATA[:1])


def test_threads_that_store_different_values_at_once_race(cells: np.ndarray) -> None:
    races = Races(num_blocks=1)
    races.begin_block()
    same_place = BYTES[[0, 0]]
    races.write(cells, same_place, THREADS[:2], DATA[:2])
    with pytest.raises(RuntimeError, match="different values"):
        races.write(cells, same_place, THREADS[:2], np.array([[0, 0], [0, 1]], dtype=np.uint8))


@pytest.mark.parametrize("is_released", [False, True])
def test_blocks_are_ordered_by_what_is_acquired(cells: np.ndarray, is_released: bool) -> None:
    races = Races(num_blocks=3)
    counter = np.arange(8, 12)
    for block in range(3):
        races.begin_block()
        races.write(cells, BYTES[block : block + 1], THREADS[:1], DATA[:1])
        races.barrier()
        races.atomic(cells, counter, 0, synchronises=is_released)
        races.barrier()
    if is_released:
        races.read(cells, BYTES[:3], THREADS[:3])
        races.write(cells, counter[None], THREADS[3:], cells[None, counter])
        return
    with pytest.raises(RuntimeError, match="reads what thread 0 of block 1"):
        races.read(cells, BYTES[:3], THREADS[:3])
    with pytest.raises(RuntimeError, match="writes over what several blocks"):
        races.write(cells, counter[None], THREADS[3:], cells[None, counter])


def test_blocks_that_read_the_same_do_not_race_till_one_writes(cells: np.ndarray) -> None:
    races = Races(num_blocks=3)
    for _ in range(2):
        races.begin_block()
        races.read(cells, BYTES, THREADS)
    races.begin_block()
    races.read(cells, BYTES, THREADS)
    with pytest.raises(RuntimeError, match="writes over what several blocks"):
        races.write(cells, BYTES, THREADS, DATA)
