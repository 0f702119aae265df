"""Every Triton kernel compiles to a cubin for each supported generation and spills no register."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kernel_names import kernel_names

FOLDER = Path(__file__).parent
KERNELS = kernel_names()
EXPERTS_KERNELS = {"_sort_kernel", "_first_kernel", "_second_kernel", "_sum_kernel"}
EXPERTS_KERNELS |= {"_grouped_quantized_kernel", "_activate_kernel"}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, int | str]]:
    # In a process of its own: here Triton interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(FOLDER.parent.parent)
    done = subprocess.run(
        [sys.executable, FOLDER / "compile_kernels.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_spills(reports: list[dict[str, int | str]]) -> None:
    assert [each for each in reports if int(each["spilled_bytes"])] == []


# Bytes of shared memory that a block may have, by compute capability (CUDA's programming guide, technical
# specifications).
MAX_SHARED_BYTES = {75: 64 * 1024, 80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def test_shared_memory_is_within_limits(reports: list[dict[str, int | str]]) -> None:
    assert [each for each in reports if int(each["shared_bytes"]) > MAX_SHARED_BYTES[int(each["capability"])]] == []


def programs_of_a_processor(report: dict[str, int | str]) -> int:
    """By its 64 Ki registers, of which a warp takes multiples of 256, and its 228 KiB of shared memory, of which the
    system takes 1 KiB a program."""
    registers = -(-int(report["registers"]) * 32 // 256) * 256 * int(report["num_warps"])
    return min(65536 // registers, 228 * 1024 // (int(report["shared_bytes"]) + 1024))


@pytest.fixture(scope="module")
def head_readings(reports: list[dict[str, int | str]]) -> dict[tuple[int, bool], list[tuple[int, int]]]:
    """Warps of a program, and programs that share a processor, by capability and by whether descriptors fetch tiles."""
    found: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for each in reports:
        if each["kernel"] == "_linear_readings_kernel":
            place = int(each["capability"]), bool(each["fetches_tiles"])
            found.setdefault(place, []).append((int(each["num_warps"]), programs_of_a_processor(each)))
    return {place: sorted(figures) for place, figures in found.items()}


def test_products_share_a_processor_where_their_tiles_are_soon_done(
    head_readings: dict[tuple[int, bool], list[tuple[int, int]]],
) -> None:
    """On Hopper: of small hidden sizes two programs, so that one's reduction and the other's product overlap; of large
    ones one with twice the columns. With descriptors the two have eight warps each. On Blackwell two of any size."""
    assert head_readings[90, False] == [(4, 2), (8, 1)]
    assert head_readings[90, True] == [(8, 1), (8, 2)]
    assert head_readings[100, True] == [(4, 2)]


def test_tiles_are_fetched_by_descriptors_from_hopper_on(
    head_readings: dict[tuple[int, bool], list[tuple[int, int]]],
) -> None:
    assert sorted(head_readings) == [(80, False), (90, False), (90, True), (100, False), (100, True)]


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_every_kernel_is_compiled(reports: list[dict[str, int | str]], capability: int) -> None:
    here = Counter(report["kernel"] for report in reports if report["capability"] == capability)
    # Turing's products go through cuBLAS, and PyTorch attends to latents.
    left_out = (
        {
            *(
                "_linear_readings_kernel",
                "_chosen_logits_kernel",
                "_quantized_linear_kernel",
                "_invariant_linear_kernel",
                "_attend_kernel",
            ),
            *EXPERTS_KERNELS,
        }
        if capability < 80
        else set()
    )
    assert sorted(here) == [name for name in KERNELS if name not in left_out]
    sizes = [report["cubin_bytes"] for report in reports if report["capability"] == capability]
    assert all(int(size) > 0 for size in sizes)


def test_a_kernel_is_what_is_jitted_and_no_part_of_another(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import triton\nfrom triton import jit\n"
        "@jit\ndef part(x):\n    return x\n"
        "@triton.jit(do_not_specialize=['x'])\ndef some_kernel(x):\n    part(x)\n"
        "def no_kernel():\n    some_kernel[1](2)\n"
    )
    assert kernel_names(tmp_path) == ["some_kernel"]
    (tmp_path / "two.py").write_text("import triton\n@triton.jit\ndef some_kernel(x):\n    pass\n")
    with pytest.raises(ValueError, match="'some_kernel'"):
        kernel_names(tmp_path)
