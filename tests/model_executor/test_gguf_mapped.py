"""A GGUF file's own bytes are not copied: they are mapped where the file is, also when it has moved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_gguf_blocks import PARAMS, PROMPTS, write
from tiny_llm import make_tiny_llm

from vllm.model_executor.model_loader import resolve_model
from vllm.model_executor.model_loader.mapped_tensors import LIST_NAME, find_files, read_places
from vllm.model_executor.model_loader.weight_files import iterate_tensors, shard_files, stored_bytes, stored_dtype

pytest.importorskip("gguf", reason="gguf is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def readings(file: Path) -> list[object]:
    outputs = make_tiny_llm(file).generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in outputs]


def test_only_what_changes_is_copied(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write(file, {"mlp.up": "BF16", "mlp.down": "Q8_0", "": "Q4_K"})
    folder = resolve_model(str(file), "float32").path
    assert find_files(folder / LIST_NAME) == [file.resolve()]
    places = read_places(folder / LIST_NAME)
    # Queries and keys are in another order.
    copied = {name for name, _ in iterate_tensors([folder / "model.safetensors"])}
    parts = (
        "up_proj.gguf_bf16",
        "down_proj.gguf_q8_0",
        "gate_proj.gguf_q4_k",
        "v_proj.gguf_q4_k",
        "embed_tokens.gguf_q4_k",
    )
    for part in parts:
        assert any(name.endswith(part) for name in places) and not any(name.endswith(part) for name in copied)
    assert {name for name in copied if "q_proj" not in name and "k_proj" not in name and "norm" not in name} == set()
    tensors = dict(iterate_tensors(shard_files(folder)))
    assert tensors.keys() == places.keys() | copied
    for name, place in places.items():
        own = tensors[name]
        assert own.shape == place.shape and str(own.dtype) == f"torch.{place.dtype}"
        with file.open("rb") as opened:
            opened.seek(place.start)
            assert (
                opened.read(place.num_bytes)
                == own.contiguous().view(-1).view(dtype=own.dtype).numpy(force=True).tobytes()
                if own.dtype.itemsize == 1
                else True
            )
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total <= stored_bytes(shard_files(folder)) < total + 4096
    assert stored_dtype(shard_files(folder)) == "bfloat16"


def test_a_file_that_has_moved(tmp_path: Path) -> None:
    file, other = tmp_path / "m.gguf", tmp_path / "other" / "n.gguf"
    write(file, {"": "Q8_0"})
    expected = readings(file)
    folder = resolve_model(str(file), "float32").path
    other.parent.mkdir()
    file.rename(other)
    assert resolve_model(str(other), "float32").path == folder
    assert find_files(folder / LIST_NAME) == [other.resolve()]
    assert readings(other) == expected


def test_a_process_that_sees_another_copy(tmp_path: Path) -> None:
    file, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    write(file, {"": "Q8_0"})
    folder = resolve_model(str(file), "float32").path
    shutil.copy(file, other)
    assert resolve_model(str(other), "float32").path == folder
    assert find_files(folder / LIST_NAME) == [other.resolve()]
    # What is not the file that it was is not read in its place.
    other.write_bytes(bytes(other.stat().st_size))
    assert find_files(folder / LIST_NAME) == [file.resolve()]


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-4096])])
def test_a_file_that_is_lost_while_it_is_opened(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    file = tmp_path / "m.gguf"
    write(file, {"": "Q8_0"})
    folder = resolve_model(str(file), "float32").path
    damage(file)
    with pytest.raises(ValueError, match="m.gguf was replaced or removed while its weights were to be read"):
        list(iterate_tensors(shard_files(folder)))
