"""GGUF: reading, names, the cache of conversions, and the embedded model against transformers' own loading of
it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models_util import hf_logits, make_hf_model, paged_logits, random_prompts
from preloaded import FORKED
from safetensors.torch import load_file

from vllm.config import ModelConfig
from vllm.loader import embedded_model_path, get_model, resolve_model
from vllm.loader.gguf import tokenizer as gguf_tokenizer
from vllm.loader.gguf.convert import converted_folder
from vllm.loader.gguf.file import GGUFFile

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_gguf(
    path: Path, arch: str, hf_model: Any, extra: dict[str, Any] | None = None, split_max_tensors: int = 0
) -> None:
    """An unquantised GGUF file as llama.cpp's converter lays it out, with a toy tokenizer of bytes."""
    config = hf_model.config
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=split_max_tensors)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (extra or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{arch}.{key}", value)
    letters = [chr(ord("!") + i) for i in range(90)]
    tokens = ["<s>", "</s>", *letters, "ab", "\u0120"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in hf_model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = value.reshape(heads, 2, -1, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        writer.add_tensor(to_gguf_name(name), value)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", make_hf_model("llama", "small"))
    return path


@pytest.mark.parametrize(("arch", "size"), [("llama", "small"), ("llama", "odd"), ("qwen2", "odd"), ("qwen3", "small")])
def test_logits_equal_the_original(arch: str, size: str, tmp_path: Path, cache: Path) -> None:
    no_o_bias = {"attention_bias": False, "mlp_bias": False} if arch == "llama" else {}
    hf_model = make_hf_model(arch, size, rope_parameters={"rope_type": "default", "rope_theta": 5e4}, **no_o_bias)
    write_gguf(tmp_path / "m.gguf", arch, hf_model)
    resolved = resolve_model(str(tmp_path / "m.gguf"), "float32")
    assert resolved.name == "m" and resolved.hf_config.eos_token_ids == (1,)
    prompts = random_prompts(resolved.hf_config.vocab_size)
    got = paged_logits(_load(resolved), resolved.hf_config, prompts)
    for mine, theirs in zip(got, hf_logits(hf_model, prompts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "header",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ],
    ids=["typed", "untyped", "older"],
)
def test_rope_scaling_of_the_header(header: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    hf_model = make_hf_model("qwen2", "small", rope_parameters=rope)
    write_gguf(tmp_path / "m.gguf", "qwen2", hf_model, header)
    resolved = resolve_model(str(tmp_path / "m.gguf"), "float32")
    prompts = random_prompts(resolved.hf_config.vocab_size)
    got = paged_logits(_load(resolved), resolved.hf_config, prompts)
    for mine, theirs in zip(got, hf_logits(hf_model, prompts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_rope_factors_divide_the_frequencies() -> None:
    from vllm.config.checkpoint.config import RopeConfig
    from vllm.layers.rotary_embedding import rope_frequencies

    plain, _ = rope_frequencies(8, RopeConfig())
    divided, scale = rope_frequencies(8, RopeConfig("factors", 1e4, {"factors": [1.0, 2.0, 4.0, 8.0]}))
    assert scale == 1.0 and torch.equal(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_every_quantisation_is_read_as_the_gguf_library_reads_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    expected: dict[str, np.ndarray] = {}
    for kind, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        raw = rng.integers(0, 100, (3, 2 * block_bytes), dtype=np.uint8)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            raw = rng.standard_normal((3, 2)).astype("<f4" if block_bytes == 4 else "<f2")
        try:
            expected[kind.name] = gguf.quants.dequantize(raw, kind)
        except (NotImplementedError, KeyError):
            continue
        if raw.dtype == np.uint8:
            writer.add_tensor(kind.name, raw, raw_shape=raw.shape, raw_dtype=kind)
        else:
            writer.add_tensor(kind.name, raw)
        assert expected[kind.name].shape == (3, 2 * block)
    assert len(expected) > 20
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    file = GGUFFile(tmp_path / "q.gguf")
    for name, want in expected.items():
        np.testing.assert_array_equal(file.dequantize(name), want)


def test_files_that_are_not_usable(tiny: Path, tmp_path: Path, cache: Path) -> None:
    data = tiny.read_bytes()

    def check(content: bytes, message: str) -> None:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            resolve_model(str(path), "float32")
        assert not list(cache.glob("*/float32")) and not list(cache.glob("*/.*"))

    check(b"", "bad.gguf is cut short")
    check(b"PK\x03\x04" + data[4:], "bad.gguf is not a GGUF file")
    check(data[:4] + (1).to_bytes(4, "little") + data[8:], "GGUF version must be one of .* got 1")
    check(data[:1000], "bad.gguf is cut short: expected at least .* bytes for its header, found 1000")
    sizes = f"expected a file of {len(data)} bytes, found {len(data) - 1000}"
    check(data[:-1000], f"bad.gguf is cut short: tensor .* ends at byte .*; {sizes}")
    check(data.replace(b"ffn_gate", b"ffn_what"), "llama has no tensor blk.0.ffn_what.weight")
    other = data.replace(b"llama", b"lamma")
    check(other, "general.architecture must be one of afmoe, .* got .lamma.")
    check(data.replace(b"llama.block_count", b"llama.block_kount"), "bad.gguf has no llama.block_count")


def test_a_model_in_several_files(tiny: Path, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "split"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf", "llama", make_hf_model("llama", "small"), split_max_tensors=8)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"tiny-0000{n}-of-0000{len(parts)}.gguf" for n in range(1, len(parts) + 1)]
    whole = load_file(converted_folder(tiny, "float32") / "model.safetensors")
    for given in (*parts, folder):
        resolved = resolve_model(str(given), "float32")
        assert resolved.name == "tiny"
        own = load_file(resolved.path / "model.safetensors")
        assert own.keys() == whole.keys() and all(torch.equal(own[name], whole[name]) for name in whole)
    write_gguf(folder / "other.gguf", "llama", make_hf_model("llama", "small"))
    with pytest.raises(ValueError, match=f"several .gguf files; name one: other.gguf, {parts[0].name}"):
        resolve_model(str(folder), "float32")
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ValueError, match=f"{parts[1].name} is file 3 of {len(parts)} .*, expected 2 of {len(parts)}"):
        resolve_model(str(parts[0]), "float32")
    parts[1].write_bytes(second[:-100])
    with pytest.raises(ValueError, match=f"{parts[1].name} is cut short: .* {len(second)} bytes, found"):
        resolve_model(str(parts[0]), "float32")
    parts[1].unlink()
    with pytest.raises(ValueError, match=f"is one of {len(parts)} files, of which these are missing: {parts[1].name}"):
        resolve_model(str(parts[0]), "float32")


def test_a_conversion_is_an_ordinary_folder_made_once(tiny: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted_folder(tiny, "float32")
    assert folder.name == "float32" and folder.parent.parent == cache
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted_folder(tiny, "float32") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    hf_model = AutoModelForCausalLM.from_pretrained(folder)
    for (name, theirs), original in zip(
        hf_model.state_dict().items(), make_hf_model("llama", "small").state_dict().values(), strict=True
    ):
        assert torch.equal(theirs, original), name
    assert AutoTokenizer.from_pretrained(folder).encode("ab<s>b a") == [92, 0, 67, 93, 66]


def test_a_second_dtype_takes_over_the_tokenizer(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted_folder(tiny, "float32")
    monkeypatch.setattr(gguf_tokenizer, "_BUILDERS", {})
    second = converted_folder(tiny, "bfloat16")
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert json.loads((second / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_hash_is_of_the_content_and_remembered(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted_folder(tiny, "float32")
    copy = tiny.with_name("copy.gguf")
    copy.write_bytes(tiny.read_bytes())
    assert converted_folder(copy, "float32") == folder
    monkeypatch.setattr("hashlib.sha256", _refuse_files)
    assert converted_folder(tiny, "float32") == folder
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache.parent))
    os.utime(tiny, ns=(1, 1))
    assert converted_folder(tiny, "float32") == folder
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    tiny.write_bytes(bytes(data))
    assert converted_folder(tiny, "float32") != folder


def _refuse_files(data: bytes = b"") -> Any:
    # The note's name is the hash of a path, given whole; a file's hash begins with nothing.
    assert data, "the file was hashed again"
    return SimpleNamespace(hexdigest=lambda: _SHA256(data).hexdigest())


_SHA256 = __import__("hashlib").sha256


CONVERT = """
import sys
from pathlib import Path
from vllm.loader.gguf.convert import converted_folder
print("ready", flush=True)
sys.stdin.read()
print(converted_folder(Path(sys.argv[1]), "float32"))
"""


def test_concurrent_conversions_agree(tiny: Path, cache: Path) -> None:
    command = [sys.executable, "-c", FORKED + CONVERT, str(tiny)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(3)]
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 3
    for worker in workers:
        worker.stdin.close()
    folders = {worker.stdout.read().strip() for worker in workers}
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    for worker in workers:
        worker.stdout.close()
    assert len(folders) == 1
    (folder,) = map(Path, folders)
    # Nothing half-made is left beside it.
    assert [item.name for item in folder.parent.iterdir()] == ["float32"]
    assert (folder / "model.safetensors").is_file()


def test_a_cache_that_cannot_be_written(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="VLLM_CACHE_ROOT names another"):
        converted_folder(tiny, "float32")


@pytest.fixture(scope="module")
def embedded() -> Any:
    path = embedded_model_path()
    assert path is not None
    return resolve_model(None, "float32")


def test_embedded_model_equals_transformers(embedded: Any, embedded_reference: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(embedded.path))
    prompts = [
        tokenizer.encode(text)
        for text in (
            "Once upon a time",
            "Review: The kettle leaks, and the handle gets hot.\nSentiment:",
            "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n",
            "def fibonacci(n):\n    ",
        )
    ]
    got = paged_logits(_load(embedded), embedded.hf_config, prompts, chunk=9)
    for mine, want in zip(got, hf_logits(embedded_reference, prompts), strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=2e-4)


def _load(resolved: Any) -> torch.nn.Module:
    path = str(resolved.path)
    wanted = ModelConfig(path, path=path, hf_config=resolved.hf_config, dtype=resolved.dtype, max_model_len=256)
    return get_model(wanted, "cpu")
