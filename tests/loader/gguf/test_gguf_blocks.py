"""quantization='gguf': the file's blocks stay as they are, and stand for what gguf-py says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
import torch
from layouts import compiled_levels, needs_kernels
from test_gguf import to_gguf_name
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm
from transformers import LlamaConfig, LlamaForCausalLM

from vllm import SamplingParams, loader
from vllm.loader import resolve_model
from vllm.loader.gguf.file import GGUFFile
from vllm.models.transformers.backend import TransformersForCausalLM
from vllm.ops._dispatch import ISA_LEVELS, cpu_ops
from vllm.ops.block_codes import BlockCodes
from vllm.ops.quantized_panels import pack_panels
from vllm.ops.quantized_tensor import concatenate
from vllm.quantization.formats.gguf import FLOATS, TYPES, read_blocks, tensor_name
from vllm.quantization.weight import QuantizedWeight

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

# Where blocks have float16 numbers.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
NUMBERS = {name: number for number, (name, *_) in TYPES.items()}
FLOAT_NUMBERS = {name: number for number, (name, _) in FLOATS.items()}
WIDTH, VOCAB = 256, 160
PROMPTS = [[5, 9, 40, 41, 3, 77], [8] * 3, list(range(20, 60))]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1, detokenize=False)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid blocks of a type, uint8 [rows, bytes], of values of about 0.05."""
    if kind in FLOAT_NUMBERS:
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05
        return values.to(FLOATS[FLOAT_NUMBERS[kind]][1]).view(torch.uint8).numpy()
    _, block, size, *_ = TYPES[NUMBERS[kind]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        # The values that a scale and a sub-scale multiply are of another size in each type.
        scale = 0.002 if kind in ("Q4_0", "Q5_0", "Q4_1", "Q5_1") else 0.0003 if kind in ("Q8_0", "IQ4_NL") else 2e-5
        values = rng.uniform(0.5, 1, (rows, columns // block)).astype(np.float16) * np.float16(scale)
        data[:, :, at : at + 2] = values.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[:, :, 0] = rng.integers(119, 122, data.shape[:2])
    return data.reshape(rows, -1)


def reference(data: np.ndarray, kind: str) -> torch.Tensor:
    if kind in FLOAT_NUMBERS:
        return torch.from_numpy(data).view(FLOATS[FLOAT_NUMBERS[kind]][1]).float()
    return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType(NUMBERS[kind])).copy())


@pytest.mark.parametrize("kind", NUMBERS)
def test_blocks_are_what_gguf_says(kind: str) -> None:
    data = random_blocks(kind, 5, 1024)
    tensor = read_blocks(torch.from_numpy(data), tensor_name(NUMBERS[kind]))
    assert torch.equal(tensor.dequantize(), reference(data, kind))


@needs_kernels
@pytest.mark.parametrize("kind", NUMBERS)
def test_blocks_are_packed_as_unpacked_codes_are(kind: str) -> None:
    """Whose rows are taken in another order, of several tensors."""
    name = tensor_name(NUMBERS[kind])
    parts = [read_blocks(torch.from_numpy(random_blocks(kind, rows, 1024, rows)), name) for rows in (37, 8)]
    rows = torch.randperm(45, generator=torch.Generator().manual_seed(1))[:41]
    joined = concatenate(parts).take_rows(rows)
    middle = joined.take_columns(256, 768)
    assert isinstance(middle.codes, BlockCodes)
    assert torch.equal(middle.dequantize(), joined.dequantize()[:, 256:768])
    set_isa = torch.ops.vllm_cpu.set_isa
    widest = set_isa(-1)
    try:
        for level in compiled_levels():
            set_isa(ISA_LEVELS.index(level))
            for tensor in (joined, middle):
                plain = replace(tensor, codes=tensor.plain_codes())
                assert torch.equal(pack_panels([tensor]).panels, pack_panels([plain]).panels)
            assert torch.equal(pack_panels(parts, rows).panels, pack_panels([joined]).panels)
    finally:
        set_isa(widest)
    if TYPES[NUMBERS[kind]][1] == 256:
        part = joined.take_columns(32, 288)
        assert torch.equal(part.dequantize(), joined.dequantize()[:, 32:288])


@pytest.mark.parametrize("kind", NUMBERS)
def test_ranks_share_blocks_of_inputs_in_another_order(kind: str) -> None:
    """A rank has all inputs of a block of 256, or half of them."""
    tensor = read_blocks(torch.from_numpy(random_blocks(kind, 3, 1024)), tensor_name(NUMBERS[kind]))
    order = torch.arange(1024).view(4, 2, 128).transpose(0, 1).flatten()
    weight = QuantizedWeight(replace(tensor, input_order=order), "m.gguf")
    assert torch.equal(weight.tensor.dequantize()[:, order], tensor.dequantize())
    for columns in (range(512), range(512, 1024), range(256)):
        part = weight.take_columns(columns).tensor
        assert torch.equal(part.dequantize(), weight.tensor.dequantize()[:, columns.start : columns.stop])


def write(path: Path, kinds: dict[str, str], tied: bool = False, greatest: float = 0.0) -> LlamaForCausalLM:
    """A tiny Llama whose matrices have the type of the first of `kinds` that their name contains; "" is all others. The
    first value of an embedding of BF16 may be `greatest`."""
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=128, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    letters = [chr(ord("!") + index) for index in range(90)]
    tokens = ["<s>", "</s>", *letters, "ab", "\u0120"]
    tokens += [f"<unused{index}>" for index in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    state = model.state_dict()
    for seed, (name, tensor) in enumerate(state.items()):
        if tensor.dim() == 1:
            writer.add_tensor(to_gguf_name(name), tensor.numpy())
            continue
        if name == "lm_head.weight" and tied:
            continue
        kind = next(kind for part, kind in kinds.items() if part in name)
        data = random_blocks(kind, *tensor.shape, seed)
        if greatest and name == "model.embed_tokens.weight":
            torch.from_numpy(data).view(torch.bfloat16)[0, 0] = greatest
        stored = gguf.GGMLQuantizationType((NUMBERS | FLOAT_NUMBERS)[kind])
        writer.add_tensor(to_gguf_name(name), data, raw_dtype=stored)
        values = reference(data, kind)
        if "q_proj" in name or "k_proj" in name:
            # GGUF's order of the rows that rotate together.
            heads = 4 if "q_proj" in name else 2
            values = values.view(heads, -1, 2, WIDTH).transpose(1, 2).reshape(values.shape)
        tensor.copy_(values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))


def generate(llm: Any) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)


@torch.no_grad()
def assert_reads(outputs: list[Any], model: LlamaForCausalLM) -> None:
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert expected.argmax(-1)[len(prompt) - 1 : -1].tolist() == list(output.outputs[0].token_ids)
        readings = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for row, reading in zip(expected, readings, strict=False):
            for token, entry in reading.items():
                # Both sum in float32, in other orders.
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)


@pytest.mark.parametrize("kind", [*NUMBERS, *FLOAT_NUMBERS])
def test_readings_of_every_type(kind: str, tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", {"": kind}, tied=kind in ("Q4_0", "Q6_K", "IQ4_NL", "F16"))
    llm = make_tiny_llm(tmp_path / "m.gguf", quantization="gguf")
    assert_reads(generate(llm), model)


def test_types_mixed_in_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Q4_K_M mixes them: queries, keys and values are one product here."""
    kinds = {
        "v_proj": "Q6_K",
        "down_proj": "Q6_K",
        "up_proj": "Q5_0",
        "k_proj": "F16",
        "o_proj": "BF16",
        "embed_tokens": "Q8_0",
        "lm_head": "Q6_K",
        "": "Q4_K",
    }
    model = write(tmp_path / "m.gguf", kinds)
    path = tmp_path / "m.gguf"
    llm = make_tiny_llm(path, quantization="gguf")
    together = generate(llm)
    assert_reads(together, model)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    # The same numbers as the de-quantised weights give.
    monkeypatch.setenv("VLLM_GGUF_DEQUANTIZE", "1")
    plain = generate(make_tiny_llm(path))
    for own, other in zip(together, plain, strict=True):
        np.testing.assert_allclose(own.prompt_logprobs.logprobs, other.prompt_logprobs.logprobs, atol=1e-3)


def test_readings_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Readings of Q4_K_M hold where a step has parts of prompts and decodes of others."""
    model = write(tmp_path / "m.gguf", {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "": "Q4_K"})
    llm = make_tiny_llm(tmp_path / "m.gguf", quantization="gguf", max_num_batched_tokens=16)
    together = generate(llm)
    assert_reads(together, model)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        # Without the kernels, another number of rows has sums in another order.
        limit = 0 if cpu_ops() is not None else 1e-5
        for own, other in ((alone, output), (alone.outputs[0], output.outputs[0])):
            which = "prompt_logprobs" if own is alone else "logprobs"
            values = [getattr(each, which).logprobs for each in (own, other)]
            np.testing.assert_allclose(*values, rtol=0, atol=limit)


def test_a_trial_run_waits_for_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' modules have their weights packed in the background."""
    model, order = write(tmp_path / "m.gguf", {"": "Q4_K"}), []
    packing, check = loader.packing_in_background, TransformersForCausalLM.check_loaded

    @contextlib.contextmanager
    def recorded(*args: Any) -> Iterator[None]:
        with packing(*args):
            yield
        order.append("packed")

    def checked(self: Any) -> None:
        order.append("checked")
        check(self)

    monkeypatch.setattr(loader, "packing_in_background", recorded)
    monkeypatch.setattr(TransformersForCausalLM, "check_loaded", checked)
    llm = make_tiny_llm(tmp_path / "m.gguf", quantization="gguf", model_impl="transformers")
    assert order == ["packed", "checked"]
    assert_reads(generate(llm), model)


def test_two_ranks(tmp_path: Path) -> None:
    kinds = {"embed_tokens": "F16", "lm_head": "Q4_K", "o_proj": "Q4_0", "down_proj": "BF16", "": "Q4_K"}
    fields = {"dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True, "quantization": "gguf"}
    # A block of 256 that is a whole row is cut between its groups.
    for name, types in (("mixed.gguf", kinds), ("rows.gguf", {"": "Q4_K"})):
        model = write(tmp_path / name, types)
        assert_reads(generate(make_thread_llm(tmp_path / name, 2, **fields)), model)


@needs_kernels
@pytest.mark.parametrize(("kind", "dtype"), [("F16", "bfloat16"), ("BF16", "float16")])
def test_floats_keep_their_values_in_a_model_of_another_dtype(kind: str, dtype: str, tmp_path: Path) -> None:
    """Which that would round."""
    model = write(tmp_path / "m.gguf", {"": kind})
    llm = make_tiny_llm(tmp_path / "m.gguf", dtype=dtype)
    own = llm.llm_engine.engine_core.executor.worker.model_runner.model
    units = torch.eye(WIDTH, dtype=getattr(torch, dtype))
    assert torch.equal(own.lm_head(units), model.lm_head.weight.T)
    ids = torch.arange(VOCAB)
    assert torch.equal(own.model.embed_tokens(ids), model.model.embed_tokens.weight.to(units.dtype))
    assert own.lm_head.packed.nbytes == own.model.embed_tokens.quantized.nbytes == VOCAB * WIDTH * 2
    assert all(len(output.outputs[0].token_ids) == 4 for output in generate(llm))


def test_values_beyond_float16_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "m.gguf", {"": "BF16"}, greatest=99840.0)
    monkeypatch.setenv("VLLM_GGUF_DEQUANTIZE", "1")
    with pytest.raises(ValueError, match=r"m.gguf: tensor token_embd.weight has values of up to 99840, beyond float16"):
        make_tiny_llm(tmp_path / "m.gguf", dtype="float16")
    model.bfloat16().save_pretrained(tmp_path / "folder")
    problem = r"folder/model.safetensors: weight model.embed_tokens.weight has values of up to 99840, beyond .* 65504"
    with pytest.raises(ValueError, match=problem):
        make_tiny_llm(tmp_path / "folder", dtype="float16", skip_tokenizer_init=True)


UP = b"blk.0.ffn_up.weight"
# Behind a key: its type, then its value. Behind a tensor's name: the number of sizes, these, its type and its place.
KEY, SIZES, TYPE, PLACE = 4, 4, 20, 24


@pytest.mark.parametrize(
    ("name", "at", "value", "problem"),
    [
        (b"llama.block_count", KEY, pack("<I", 0), r"block_count must be a positive integer, got 0"),
        (b"llama.block_count", 0, pack("<I", 6), r"block_count must be a positive integer, got \d.*e-45"),
        (b"llama.attention.head_count", KEY, pack("<I", 0), r"attention.head_count must be a positive integer, got 0"),
        (b"llama.attention.head_count", KEY, pack("<I", 3), r"blk.0.attn_q.weight does not fit the header's sizes"),
        (b"layer_norm_rms_epsilon", KEY, pack("<f", float("nan")), r"layer_norm_rms_epsilon must be finite, got nan"),
        (b"layer_norm_rms_epsilon", KEY, pack("<f", -1e-6), r"layer_norm_rms_epsilon must be at least 0, got -"),
        (b"tokenizer.ggml.tokens", KEY + 4, pack("<Q", 2**61), r"is cut short: expected at least"),
        (UP, SIZES, pack("<Q", 0), r"blk.0.ffn_up.weight of type Q4_0 has shape \(256, 0\), expected rows of whole"),
        (
            UP,
            SIZES + 8,
            pack("<Q", 1),
            r"m.gguf: float32-blocks/model.mapped.json: weight model.layers.0.mlp.up_proj.* has shape",
        ),
        (UP, SIZES + 8, pack("<Q", 2**40), r"tensors blk.0.ffn_up.weight and blk.0.ffn_down.weight overlap"),
        (UP, TYPE, pack("<I", 15), r"tensors blk.0.ffn_up.weight and blk.0.ffn_down.weight overlap"),
        (UP, PLACE, pack("<Q", 7), r"blk.0.ffn_up.weight begins at byte 7 of the data, .* a multiple of 32"),
        (b"blk.0.attn_k.weight", -19, b"blk.0.attn_q", r"has two tensors blk.0.attn_q.weight"),
    ],
)
def test_damaged_files(name: bytes, at: int, value: bytes, problem: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"": "Q4_0"})
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    start = data.index(name) + len(name) + at
    data[start : start + len(value)] = value
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=problem) as error:
        make_tiny_llm(tmp_path / "m.gguf", skip_tokenizer_init=True)
    assert str(error.value).startswith("m.gguf")


def test_damaged_blocks(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"": "Q4_0"})
    tensor = GGUFFile(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[tensor.start : tensor.start + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"m.gguf: float32-blocks/.*mlp.up_proj.gguf_q4_0 has a scale, .* infinite"):
        make_tiny_llm(tmp_path / "m.gguf", quantization="gguf")


def test_a_type_of_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"lm_head": "Q8_0", "": "Q4_0"})
    file = GGUFFile(tmp_path / "m.gguf")
    file.tensors["output.weight"] = replace(file.tensors["output.weight"], ggml_type=24)
    with pytest.raises(ValueError, match=r"m.gguf: tensor output.weight has type I8, expected a float or a type of"):
        file.dequantize("output.weight")


@needs_kernels
def test_which_files_keep_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", {"": "Q4_0"})

    def kept(**fields: Any) -> bool:
        resolved = resolve_model(str(tmp_path / "m.gguf"), "float32", **fields)
        assert (resolved.quantization == "gguf") == resolved.path.name.endswith("-blocks")
        return resolved.quantization == "gguf"

    assert kept() and kept(quantization="gguf")
    assert not kept(quantization="int8") and not kept(needs_weights=False) and not kept(device="cuda")
    assert kept(device="cuda", quantization="gguf")
    with pytest.raises(ValueError, match=r"quantization='awq', but m.gguf is a GGUF file: leave it out, or use one of"):
        kept(quantization="awq")
    monkeypatch.setenv("VLLM_GGUF_DEQUANTIZE", "1")
    assert not kept() and kept(quantization="gguf")


def test_it_is_for_gguf_files_and_keeps_its_weights(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"": "Q4_0"})
    llm = make_tiny_llm(tmp_path / "m.gguf", quantization="gguf")
    model = llm.llm_engine.engine_core.executor.worker.model_runner.model
    with pytest.raises(ValueError, match="the embedding is quantised"):
        model.load_weights([("model.embed_tokens.weight", torch.zeros(VOCAB, WIDTH))])
    folder = tmp_path / "folder"
    LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=VOCAB)).save_pretrained(folder)
    with pytest.raises(ValueError, match="quantization='gguf'"):
        make_tiny_llm(folder, quantization="gguf")
