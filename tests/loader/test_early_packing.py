"""Layers are packed while later ones are read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import load_model, make_random_model
from packed_starts import needs_kernels, packed  # noqa: F401 - a fixture
from safetensors.torch import load_file, save_file

from vllm import loader
from vllm.layers.linear import LinearBase
from vllm.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.layers.vocab_parallel_embedding import VocabParallelEmbedding as _Embedding
from vllm.loader import early_packing, packed_weights, weights
from vllm.quantization import on_load
from vllm.utils.host_memory import scratch


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_few_layers_have_plain_weights_at_a_time(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_random_model("llama", "small", tmp_path, num_hidden_layers=12)
    monkeypatch.setattr(packed_weights, "_place", lambda *_: None)
    counts: list[int] = []
    filled = early_packing.EarlyPacking.filled

    def count(self: early_packing.EarlyPacking, name: str) -> None:
        layers = [layer for layer in self._missing if isinstance(layer, LinearBase)]
        plain = [bool(layer._given) or (layer.weight is not None and not layer.weight.is_meta) for layer in layers]
        counts.append(sum(plain))
        filled(self, name)

    monkeypatch.setattr(early_packing.EarlyPacking, "filled", count)
    load_model(tmp_path, quantization=quantization)
    # One layer of each kind is being filled, at most four threads pack one each, and as many wait.
    assert len(counts) > 4 * 12
    assert 0 < max(counts) <= 4 + 2 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_the_layer_s_dtype_are_packed_where_they_are(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_random_model("llama", "small", tmp_path)  # in float32
    monkeypatch.setattr(packed_weights, "_place", lambda *_: None)
    copied: list[str] = []
    rows = LinearBase._weight_rows

    def note(self: LinearBase, own: slice) -> torch.Tensor:
        copied.append("/".join(self.parts))
        return rows(self, own)

    monkeypatch.setattr(LinearBase, "_weight_rows", note)
    load_model(tmp_path, dtype=dtype)
    assert bool(copied) == (dtype != "float32")


@pytest.mark.parametrize("tied", [True, False])
def test_heads_are_packed_meanwhile(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model("llama", "small", tmp_path, num_hidden_layers=12, tie_word_embeddings=tied)
    monkeypatch.setattr(packed_weights, "_place", lambda *_: None)
    left: list[set[Any]] = []
    pack = loader._pack

    def note(model: Any, *arguments: Any) -> None:
        assert model.lm_head.weight is None
        left.append(arguments[-1])
        pack(model, *arguments)

    monkeypatch.setattr(loader, "_pack", note)
    model, _ = load_model(tmp_path)
    assert model.lm_head in left[0]


def test_a_head_is_compared_once_its_copy_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread frees the embedding's weight, which the comparison with a second copy reads."""
    make_random_model("llama", "small", tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    all_read, seen = threading.Event(), []
    pack, wait, holds = ParallelLMHead.process_weights_after_loading, weights.await_handed_over, _Embedding.holds

    def pack_late(self: ParallelLMHead, *arguments: Any) -> None:
        all_read.wait(10)
        pack(self, *arguments)

    def wait_for_packing() -> None:
        all_read.set()
        wait()

    def compare(self: _Embedding, values: Any) -> bool:
        seen.append(self._parameters["weight"])
        return holds(self, values)

    monkeypatch.setattr(ParallelLMHead, "process_weights_after_loading", pack_late)
    monkeypatch.setattr(weights, "await_handed_over", wait_for_packing)
    monkeypatch.setattr(_Embedding, "holds", compare)
    load_model(tmp_path)
    assert all_read.is_set() and seen == [None]


@needs_kernels
@pytest.mark.parametrize("fault", ["finite", "lacks weights: model.layers.11.self_attn.o_proj.weight"])
def test_an_error_between_leaves_nothing(fault: str, tmp_path: Path, packed: Path) -> None:  # noqa: F811
    make_random_model("llama", "small", tmp_path / "m", num_hidden_layers=12)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    if fault == "finite":
        tensors["model.layers.5.mlp.up_proj.weight"][3, 3] = torch.nan
    else:
        del tensors["model.layers.11.self_attn.o_proj.weight"]
    save_file(tensors, file)
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match=fault):
        load_model(tmp_path / "m", quantization="int8")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("loading")]
    assert [path.suffix for path in packed.iterdir()] == [".lock"]
    assert torch.get_num_threads() == before and not scratch._users and not scratch._free


@pytest.mark.parametrize("shape", [(100, 200), (64, 64), (33, 7)])
def test_rounding_by_rows_changes_no_bits(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def rounded() -> list[torch.Tensor]:
        found = [on_load.round_to_int4(weight), on_load.round_to_fp8(weight)]
        return [value for each in found for value in vars(each).values() if isinstance(value, torch.Tensor)]

    whole = rounded()
    monkeypatch.setattr(on_load, "rows_at_once", lambda width: 1)
    by_rows = rounded()
    assert len(whole) == len(by_rows) > 3
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, by_rows, strict=True))


def test_freed_memory_is_used_again_within_the_block_alone() -> None:
    like = torch.zeros(0, dtype=torch.bfloat16)
    with scratch.kept():
        first = scratch.empty(like, 1024, 1024)
        assert first.dtype == torch.bfloat16
        second = scratch.empty(like, 1024, 1024)
        assert first.data_ptr() != second.data_ptr()
        second.fill_(2)
        address = first.data_ptr()
        # A view holds the memory.
        row = first.fill_(1)[0]
        del first
        assert scratch.empty(like, 1024, 1024).data_ptr() not in (address, second.data_ptr())
        del row
        assert scratch.empty(like, 1024, 1024).data_ptr() == address
        # Memory that a tensor keeps must not be much larger than it.
        assert scratch.empty(like, 512, 1024).data_ptr() != address
    assert not scratch._free
    assert (second == 2).all()
