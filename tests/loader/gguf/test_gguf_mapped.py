"""A GGUF file's own bytes are not copied: they are mapped where the file is, also when it has moved."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_gguf_blocks import PARAMS, PROMPTS, write
from tiny_llm import make_tiny_llm

from vllm.config.checkpoint import mapped_tensors
from vllm.config.checkpoint.mapped_tensors import LIST_NAME, block_bytes, find_files, read_places
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import iterate_tensors, stored_dtype
from vllm.loader import resolve_model
from vllm.loader.gguf.file import GGUFFile

gguf = pytest.importorskip("gguf", reason="gguf is not installed")


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
    assert find_files(folder / LIST_NAME) == [file]
    places = read_places(folder / LIST_NAME)
    # Queries and keys are in another order.
    copied = {name for name, _ in iterate_tensors([folder / "model.safetensors"])}
    for part in ("up_proj.gguf_bf16", "down_proj.gguf_q8_0", "gate_proj.gguf_q4_k", "v_proj.gguf_q4_k"):
        assert any(name.endswith(part) for name in places)
        assert not any(name.endswith(part) for name in copied)
    assert all(any(part in name for part in ("q_proj", "k_proj", "norm")) for name in copied)
    tensors = dict(iterate_tensors(shard_files(folder)))
    assert tensors.keys() == places.keys() | copied
    content = file.read_bytes()
    for name, place in places.items():
        own = tensors[name]
        assert own.shape == place.shape
        assert str(own.dtype) == f"torch.{place.dtype}"
        assert own.view(torch.uint8).numpy().tobytes() == content[place.start :][: place.num_bytes]
    assert block_bytes(folder) == sum(tensors[name].nbytes for name in places if tensors[name].dtype == torch.uint8)
    assert stored_dtype(shard_files(folder)) == "bfloat16"


def test_a_link_to_a_file_of_another_name(tmp_path: Path) -> None:
    """The hub's cache holds files by their hashes, and links by their names."""
    blob, link = tmp_path / "blobs" / "0123abcd", tmp_path / "snapshots" / "main" / "m.gguf"
    blob.parent.mkdir()
    link.parent.mkdir(parents=True)
    write(blob, {"": "Q8_0"})
    link.symlink_to(Path("..", "..", "blobs", blob.name))
    expected = readings(link)
    assert readings(link.parent) == expected
    assert readings(blob) == expected


def test_a_tensor_at_an_odd_byte_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_bos_token_id", lambda writer, number: writer.add_custom_alignment(1))
        write(file, {"": "BF16"})
    content = GGUFFile(file)
    odd = [name for name, tensor in content.tensors.items() if tensor.start % 2]
    if not odd:
        pytest.skip("this header's length is even")
    folder = resolve_model(str(file), "float32").path
    tensors = dict(iterate_tensors(shard_files(folder)))
    assert len(tensors) == len(content.tensors)
    assert len(dict(iterate_tensors([folder / "model.safetensors"]))) >= len(odd)


def test_a_known_copy_needs_no_cache_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    write(file, {"": "Q8_0"})
    shutil.copy2(file, other)
    folder = resolve_model(str(file), "float32").path
    assert resolve_model(str(other), "float32").path == folder

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(mapped_tensors, "_write", refuse)
    for known in (file, other):
        assert resolve_model(str(known), "float32").path == folder
    third = tmp_path / "o.gguf"
    shutil.copy2(file, third)
    with pytest.raises(PermissionError, match="cache folder cannot be used .*; VLLM_CACHE_ROOT names another one"):
        resolve_model(str(third), "float32")


def test_a_file_that_has_moved(tmp_path: Path) -> None:
    file, other = tmp_path / "m.gguf", tmp_path / "other" / "n.gguf"
    write(file, {"": "Q8_0"})
    expected = readings(file)
    folder = resolve_model(str(file), "float32").path
    other.parent.mkdir()
    file.rename(other)
    assert resolve_model(str(other), "float32").path == folder
    assert find_files(folder / LIST_NAME) == [other]
    assert readings(other) == expected


def test_a_process_that_sees_another_copy(tmp_path: Path) -> None:
    file, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    write(file, {"": "Q8_0"})
    folder = resolve_model(str(file), "float32").path
    shutil.copy(file, other)
    assert resolve_model(str(other), "float32").path == folder
    assert find_files(folder / LIST_NAME) == [other]
    # A file that is not the one that it was is not read in its place.
    other.write_bytes(bytes(other.stat().st_size))
    assert find_files(folder / LIST_NAME) == [file]


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-4096])])
def test_a_file_that_is_lost_while_it_is_opened(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    file = tmp_path / "m.gguf"
    write(file, {"": "Q8_0"})
    folder = resolve_model(str(file), "float32").path
    damage(file)
    with pytest.raises(ValueError, match="m.gguf was replaced or removed while its weights were to be read"):
        list(iterate_tensors(shard_files(folder)))
