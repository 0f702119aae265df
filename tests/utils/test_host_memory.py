"""Memory that the system can give, and pages of mapped checkpoints that are given back behind their readers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.utils.host_memory import PassedPages, available_bytes, read_later

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's list of mappings")


def resident_kib(path: Path) -> int:
    """The resident size of the file's mappings in this process."""
    found, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            is_own = line.endswith(str(path))
        elif is_own and first == "Rss:":
            found += int(line.split()[1])
    return found


@needs_proc
@pytest.mark.parametrize("kept", [1 << 18, 1 << 30])
def test_pages_are_given_back_behind_the_reader(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassedPages, "_KEPT", kept)
    path = tmp_path / "model.safetensors"
    values = {f"{index:02}": torch.full((1 << 16,), index, dtype=torch.int32) for index in range(32)}
    save_file(values, path)
    read, most = {}, 0
    for name, tensor in iterate_tensors([path]):
        assert tensor.sum() == tensor.numel() * int(name)
        read[name] = tensor
        most = max(most, resident_kib(path))
    # Pages 2 to 3 times `kept` behind are gone, of 8 MiB; else all of them are there.
    assert (most <= 2048) is (kept == 1 << 18)
    # It is read again where it is needed after all.
    assert all(tensor.equal(values[name]) for name, tensor in read.items())


@needs_proc
def test_pages_that_are_read_later_stay_as_long_as_their_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassedPages, "_KEPT", 1 << 18)
    path = tmp_path / "model.safetensors"
    save_file({f"{index:02}": torch.full((1 << 16,), index, dtype=torch.int32) for index in range(32)}, path)
    held, sizes, others = [], [], []
    for name, tensor in iterate_tensors([path]):
        if int(name) < 16:
            held.append(tensor[:])
            read_later(held[-1])
            sizes.append(resident_kib(path))
        others.append(tensor)
    # They were read when they were held, not by who needed them.
    assert sizes[-1] >= 16 * 256 - 64
    held.clear()
    assert resident_kib(path) <= 1024
    assert all(tensor.eq(index).all() for index, tensor in enumerate(others))


@needs_proc
def test_tensors_may_be_freed_while_others_are_passed(tmp_path: Path) -> None:
    """As by a thread that packs: here a collection, which any new object can begin, frees some."""
    path = tmp_path / "model.safetensors"
    save_file({f"{index:03}": torch.full((1 << 12,), index, dtype=torch.int32) for index in range(200)}, path)
    held: list[torch.Tensor] = []
    thresholds = gc.get_threshold()

    def let_go(*_: Any) -> None:
        if held:
            held.pop()

    try:
        for name, tensor in iterate_tensors([path]):
            if int(name) < 150:
                held.append(tensor[:])
                read_later(held[-1])
            elif int(name) == 150:
                # Tuples that were freed are used again without a collection.
                gc.collect()
                gc.callbacks.append(let_go)
                gc.set_threshold(1)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_go)
    assert len(held) < 150


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "prefix"),
    [
        ("0::/", "sys/fs/cgroup", "memory.max", "memory.current", ""),
        ("0::/outer/inner", "sys/fs/cgroup/outer", "memory.max", "memory.current", ""),
        # The path is that of outside, and the container's own group the top.
        ("4:memory:/docker/0", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_limits_of_control_groups_are_kept(
    line: str, folder: str, limit: str, used: str, prefix: str, tmp_path: Path
) -> None:
    group = tmp_path / folder
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text(f"7:cpu:/\n{line}\n")
    (group / "memory.stat").write_text(f"anon 5\n{prefix}active_file 300\n{prefix}inactive_file 20\n")
    (group / used).write_text("5000\n")
    (group / limit).write_text("max\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    (group / limit).write_text("6000\n")
    assert available_bytes(tmp_path) == 6000 - 5000 + 300 + 20
    # More than its limit, for a moment.
    (group / used).write_text("7000\n")
    assert available_bytes(tmp_path) == 0
