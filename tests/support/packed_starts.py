"""Starts of a model with packed weights on disk and without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import load_model
from torch import nn

from vllm.layers.weight_update import held_tensors
from vllm.loader import packed_state
from vllm.loader import packed_weights as module
from vllm.ops.cpu_kernels import packs_for
from vllm.utils.packed import folder as packed_folder

needs_kernels = pytest.mark.skipif(packs_for() is None, reason="without kernels nothing is packed")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packed weights of the test's own, which keeps those of tiny models, too."""
    folder = tmp_path / "packed"
    monkeypatch.setenv("VLLM_PACKED_CACHE", str(folder))
    monkeypatch.setenv("VLLM_PACKED_CACHE_LEAST_MIB", "0.000001")
    monkeypatch.setattr(module, "_LEAST_SHARED", 1)
    monkeypatch.setattr(packed_folder, "_said", set())
    # The disk of a machine that runs tests may be nearly full.
    monkeypatch.setattr(packed_folder, "_KEPT_FREE", 0.0)
    return folder


def files(folder: Path) -> list[Path]:
    """The entries of a folder of packed weights."""
    return sorted(folder.glob("*.packed"))


def state(model: nn.Module) -> list[tuple[Any, ...]]:
    """The bytes of all tensors of a model, with their shapes, dtypes and strides."""
    found = []
    for tensor in held_tensors(model):
        # Layers have some of one value or none, never written, for their dtype.
        if tensor.numel() > 1:
            dense, strides = packed_state.layout(tensor)
            found.append(
                (tuple(tensor.shape), str(tensor.dtype), strides, dense.reshape(-1).view(torch.uint8).numpy().tobytes())
            )
    return sorted(found)


def is_mapped(model: nn.Module) -> bool:
    """Whether the model's weights are on disk."""
    return bool(model.__dict__.get("mappings"))


def check_starts(folder: Path, **fields: Any) -> None:
    """A start without packed weights on disk, one that writes them and one that maps them have the same bits; and so
    has the one that maps other than that it was built with."""
    place, fields = os.environ["VLLM_PACKED_CACHE"], {"max_model_len": 64, **fields}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PACKED_CACHE", "0")
        plain = load_model(folder, **fields)[0]
        patch.setenv("VLLM_PACKED_CACHE", place)
        writing = load_model(folder, **fields)[0]
        mapping = load_model(folder, **fields)[0]
    assert [is_mapped(model) for model in (plain, writing, mapping)] == [False, True, True]
    expected = state(plain)
    assert state(writing) == expected
    assert state(mapping) == expected
