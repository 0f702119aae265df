"""Pages of mapped checkpoints are given back behind their readers, and can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.utils.host_memory import PassedPages

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
