"""Quantised checkpoints of several families, over ranks, and with parts that differ."""

from __future__ import annotations

import json
from functools import partial

import pytest
import quantized_packing as packing
import torch
from quantized_models import PROMPTS, assert_reads, errors, generate, make_llm, make_quantized
from safetensors.torch import load_file, save_file
from test_formats import FLOAT8, FP8, INT8, ROWS, only_blocks
from thread_ranks import make_thread_llm

from vllm.ops._dispatch import cpu_ops

SMALL = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
pack_small = partial(packing.gptq, group_size=32, sym=False)
THREADS = {"max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True}


def all_but_head(name: str, weight: torch.Tensor):
    return None if "head" in name or "embed_out" in name or name.rpartition(".")[2] == "gate" else pack_small(weight)


# Fused query, key and value (one of them by heads), biases, rows in another order (interleaved rotary positions),
# matrices that are stored transposed.
FAMILIES = {
    "bloom": {"n_head": 4},
    "cohere": {},
    "falcon": {},
    "gemma2": {"num_hidden_layers": 4},
    "glm": {},
    "gpt2": {"n_head": 4},
    "gpt_bigcode": {"n_head": 4},
    "gpt_neox": {},
    "mpt": {"n_heads": 4, "d_model": 128},
    "opt": {"word_embed_proj_dim": 128},
    "phi3": {},
    "qwen2": {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    quantized = make_quantized(tmp_path, all_but_head, SMALL, family, **FAMILIES[family])
    assert_reads(generate(make_llm(tmp_path)), quantized.model)


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "glm4"])
def test_modules_of_transformers(family, tmp_path):
    quantized = make_quantized(tmp_path, all_but_head, SMALL, family, num_hidden_layers=4)
    assert_reads(generate(make_llm(tmp_path, model_impl="transformers")), quantized.model)


@pytest.mark.parametrize(
    "name",
    [
        "gptq-3", "gptq-8-asym", "gptq-desc-act", "gptq-desc-act-uneven", "gptq-rows", "awq-32", "squeezellm-full-rows",
        "packed-4", "packed-8-asym", "packed-actorder", "int8", "float8-tensor", "nvfp4", "mxfp4", "fp8", "nf4",
        "bitsandbytes-8", "modelopt-int4-awq",
    ],
)  # fmt: skip
def test_two_ranks(name, tmp_path):
    row = ROWS[name]
    quantized = make_quantized(tmp_path, only_blocks(row.pack), row.settings, where=row.where)
    assert_reads(generate(make_thread_llm(tmp_path, 2, **THREADS)), quantized.model)


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "cohere"])
def test_two_ranks_of_fused_layers(family, tmp_path):
    quantized = make_quantized(tmp_path, all_but_head, SMALL, family, num_hidden_layers=4)
    assert_reads(generate(make_thread_llm(tmp_path, 2, **THREADS)), quantized.model)


def test_blocks_over_ranks(tmp_path):
    pack = partial(packing.fp8, block=(128, 128))
    settings = FP8 | {"weight_block_size": [128, 128]}
    fields = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
    quantized = make_quantized(tmp_path, only_blocks(pack), settings, **fields)
    assert_reads(generate(make_thread_llm(tmp_path, 2, **THREADS)), quantized.model)


def test_a_group_that_straddles_ranks_is_refused(tmp_path):
    make_quantized(tmp_path, only_blocks(partial(packing.gptq, group_size=64)), SMALL | {"group_size": 64, "sym": True})
    problem = r"model.layers.0.self_attn.o_proj.qweight: tensor parallelism splits its 128 inputs inside of a group"
    with pytest.raises(ValueError, match=problem):
        make_thread_llm(tmp_path, 4, **THREADS)


@pytest.mark.parametrize(
    "name", ["gptq-4-asym", "squeezellm", "int8", "nvfp4", "fp8-block", "nf4", "modelopt-int4-awq"]
)
def test_readings_do_not_depend_on_the_batch(name, tmp_path):
    row = ROWS[name]
    quantized = make_quantized(tmp_path, only_blocks(row.pack), row.settings, where=row.where)
    llm = make_llm(quantized.folder, max_num_batched_tokens=16)
    together = generate(llm, PROMPTS * 3)
    assert_reads(together, quantized.model, PROMPTS * 3)
    for prompt, output in zip(PROMPTS, together, strict=False):
        (alone,) = generate(llm, [prompt])
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        for one, other in zip(alone.outputs[0].logprobs, output.outputs[0].logprobs, strict=True):
            # Without the kernels, another number of rows has sums in another order.
            limit = 0 if cpu_ops() is not None else 1e-5
            assert all(abs(one[token].logprob - other[token].logprob) <= limit for token in one)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_quantised_head(ranks, tmp_path):
    quantized = make_quantized(
        tmp_path, lambda name, weight: pack_small(weight), SMALL | {"lm_head": True}, vocab_size=224
    )
    assert "lm_head" in quantized.names
    llm = make_llm(tmp_path) if ranks == 1 else make_thread_llm(tmp_path, 2, **THREADS)
    assert_reads(generate(llm), quantized.model)


def test_a_quantised_head_of_a_tied_model(tmp_path):
    """It would have no effect."""
    make_quantized(tmp_path, lambda name, weight: pack_small(weight), SMALL | {"lm_head": True}, vocab_size=224)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"has an lm_head.weight that differs from the embeddings.*hf_overrides"):
        make_llm(tmp_path)


def test_settings_of_single_modules(tmp_path):
    """Parts of one product with other bits, and with none."""
    dynamic = {
        r"+:.*\.q_proj": {"bits": 8, "group_size": 64, "sym": True},
        r".*\.1\.mlp\.up_proj": {"bits": 2},
        r"-:.*\.0\.mlp\.gate_proj": {},
        r"-:.*\.v_proj": {},
    }

    def pack(name, weight):
        if name.endswith(("v_proj", "0.mlp.gate_proj", "lm_head")):
            return None
        if name.endswith("q_proj"):
            return packing.gptq(weight, 8, 64)
        return packing.gptq(weight, 2 if name.endswith("1.mlp.up_proj") else 4, 32, sym=False)

    quantized = make_quantized(tmp_path, pack, SMALL | {"dynamic": dynamic})
    assert_reads(generate(make_llm(tmp_path)), quantized.model)
    assert_reads(generate(make_thread_llm(tmp_path, 2, **THREADS)), quantized.model)


def test_several_groups_of_compressed_tensors(tmp_path):
    groups = {
        "ints": {"targets": ["re:.*self_attn.[qk]_proj"], "weights": INT8, "format": "int-quantized"},
        "floats": {"targets": ["Linear"], "weights": FLOAT8, "format": "float-quantized"},
        "fours": {
            "targets": ["model.layers.0.mlp.down_proj", "re:.*o_proj$"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            "format": "pack-quantized",
        },
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", r"re:.*\.1\.mlp\.(gate|up)_proj"],
    }

    def pack(name, weight):
        if name == "lm_head" or name.endswith(("1.mlp.gate_proj", "1.mlp.up_proj")):
            return None
        if name.endswith(("q_proj", "k_proj")):
            return packing.int_quantized(weight)
        if name.endswith("o_proj") or name == "model.layers.0.mlp.down_proj":
            return packing.pack_quantized(weight)
        return packing.float_quantized(weight)

    quantized = make_quantized(tmp_path, pack, settings)
    assert_reads(generate(make_llm(tmp_path)), quantized.model)


def test_biases_of_zeros_that_the_model_lacks(tmp_path):
    quantized = make_quantized(tmp_path, only_blocks(pack_small), SMALL)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    biases = {f"{name}.bias": torch.zeros(len(quantized.model.get_submodule(name).weight)) for name in quantized.names}
    save_file(tensors | biases, path)
    assert_reads(generate(make_llm(tmp_path)), quantized.model)
    biases["model.layers.1.mlp.up_proj.bias"][3] = 1
    save_file(tensors | biases, path)
    with pytest.raises(ValueError, match="has unexpected weights: model.layers.1.mlp.up_proj.bias"):
        make_llm(tmp_path)


def test_new_weights_for_a_quantised_model(tmp_path):
    quantized = make_quantized(tmp_path, only_blocks(pack_small), SMALL)
    llm = make_llm(tmp_path)
    model = llm.llm_engine.engine_core.executor.worker.model_runner.model
    with pytest.raises(ValueError, match="load_weights: q_proj/k_proj/v_proj is quantised in the checkpoint"):
        model.load_weights([("model.layers.0.self_attn.q_proj.weight", torch.zeros(128, 128))])
    norm = torch.linspace(0.5, 1.5, 128)
    llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights([("model.norm.weight", norm)]))
    former = quantized.model.model.norm.weight.data.clone()
    quantized.model.model.norm.weight.data.copy_(norm)
    assert_reads(generate(llm), quantized.model)
    llm.collective_rpc("reload_weights")
    quantized.model.model.norm.weight.data.copy_(former)
    assert_reads(generate(llm), quantized.model)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    assert_reads(generate(llm), quantized.model)


def test_a_module_in_two_files(tmp_path):
    quantized = make_quantized(tmp_path, only_blocks(pack_small), SMALL)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    where = {name: files[name.endswith(("scales", "g_idx"))] for name in tensors}
    for file in files:
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_reads(generate(make_llm(tmp_path)), quantized.model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype, tmp_path):
    quantized = make_quantized(tmp_path, all_but_head, SMALL)
    outputs = generate(make_llm(tmp_path, dtype=dtype))
    differences = [
        error for pair in zip(outputs, PROMPTS, strict=True) for error in errors(pair[0], quantized.model, pair[1])
    ]
    # Activations have 8 or 11 bits; the logits of this model are up to 10.
    assert sum(differences) / len(differences) < (0.3 if dtype == "bfloat16" else 0.05)
