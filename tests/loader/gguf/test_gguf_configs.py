"""A GGUF file whose header asks for what cannot be run is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.loader.gguf.convert import hf_config, weights

COMMON = {
    "block_count": 4,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}
GEMMA4 = COMMON | {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "rope.dimension_count_swa": 16,
    "feed_forward_length": [64, 64, 128, 128],
}
LATENT = COMMON | {"attention.kv_lora_rank": 16, "rope.dimension_count": 8, "attention.key_length": 24}
LATENT |= {"attention.value_length": 16, "expert_count": 384, "expert_used_count": 2, "expert_feed_forward_length": 16}
MIMO = COMMON | {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True, False]}
YARN = COMMON | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}

SSM = COMMON | {"ssm.inner_size": 64, "ssm.state_size": 16, "ssm.conv_kernel": 4, "ssm.time_step_rank": 2}


def file(arch: str, header: dict[str, Any], *tensors: str) -> Any:
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in header.items()}
    shapes = {
        name: SimpleNamespace(shape=(4, 48, 32) if "_exps" in name else (48, 32))
        for name in ("token_embd.weight", *tensors)
    }
    return SimpleNamespace(metadata=metadata, tensors=shapes, path=Path("m.gguf"))


@pytest.mark.parametrize(
    ("arch", "header", "tensor", "message"),
    [
        ("gemma4", GEMMA4, "blk.0.ffn_gate_inp.weight", "m.gguf has no gemma4.expert_count"),
        ("gemma4", GEMMA4 | {"rope.dimension_count_swa": 8}, "", "rope.dimension_count_swa must be .*=16, got 8"),
        ("gemma4", GEMMA4 | {"feed_forward_length": [64, 128, 64, 128]}, "", "or twice that in the last 2, got"),
        ("gemma4", GEMMA4 | {"attention.head_count_kv": [1, 1]}, "", "head_count_kv must have 4 values, got 2"),
        ("gemma3n", COMMON, "", "m.gguf has no gemma3n.activation_sparsity_scale"),
        (
            "rwkv7",
            {},
            "",
            "general.architecture=rwkv7 is not supported: its kind of recurrent state is not implemented",
        ),
        ("mamba2", SSM | {"ssm.time_step_rank": 0}, "", "ssm.time_step_rank must be a positive integer, got 0"),
        ("mamba2", SSM | {"ssm.time_step_rank": 3}, "", "ssm.inner_size must be a multiple of ssm.time_step_rank=3"),
        ("granitehybrid", SSM | {"ssm.inner_size": 48}, "", "must be a multiple of embedding_length=32, got 48"),
        ("granitehybrid", SSM | {"attention.head_count_kv": [0, 1, 2, 0]}, "", "the same in all layers that have any"),
        ("nemotron_h", SSM, "blk.0.ssm_in.weight", r"layers must have one of ssm_in, .*, got \[''\]"),
        ("kimi-linear", LATENT | {"expert_gating_func": 1}, "", "expert_gating_func must be 2, sigmoids"),
        ("llada", {}, "", "general.architecture=llada is not supported: it fills in masked tokens"),
        ("klingon", {}, "", "general.architecture must be one of afmoe, .*, xverse, got 'klingon'"),
        ("eurobert", COMMON, "cls.output.weight", "cls.output.weight of eurobert is not supported"),
        ("afmoe", COMMON, "", "afmoe.expert_weights_norm must be true"),
        ("bailingmoe", COMMON, "", "bailingmoe.expert_weights_norm must be true"),
        ("mimo2", MIMO | {"attention.head_count_kv": [1, 1, 2, 1]}, "", r"head_count_kv must be twice .*, got \[1, 1"),
        ("mistral4", LATENT | {"expert_gating_func": 2}, "", "mistral4 must have experts that softmax chooses"),
        (
            "mistral4",
            LATENT | {"attention.temperature_scale": 0.1, "attention.temperature_length": 16},
            "",
            "temperature_length must be rope.scaling.original_context_length=None",
        ),
        ("mistral3", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "", "yarn_ext_factor=0.5 is not supported"),
        ("llama", COMMON | {"rope.scaling.factor": -2.0}, "", "rope.scaling.factor must be a number of at least 0"),
        ("llama", COMMON | {"rope.scale_linear": "2"}, "", "rope.scale_linear must be a number of at least 0, got '2'"),
        ("llama", YARN, "rope_freqs.weight", "rope.scaling.type yarn beside the tensor rope_freqs.weight is not"),
    ],
)
def test_refusals(arch: str, header: dict[str, Any], tensor: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_config(file(arch, header, *filter(None, [tensor])), "float32")


MOE = COMMON | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
ROUTER = ("blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight")
NORMED = COMMON | {"attention.layer_norm_epsilon": 1e-5}
COHERE = NORMED | {"logit_scale": 0.1, "attention.sliding_window": 8}
Given = dict[str, Any]
UNREAD: list[tuple[str, Given, Given]] = [
    # llama.cpp reads these keys, which this architecture's model does not have.
    ("qwen2", COMMON, {"made_up": 1}),
    ("llama", COMMON, {"attention.sliding_window": 32}),
    ("llama", COMMON, {"logit_scale": 0.5}),
    ("gemma", COMMON, {"final_logit_softcapping": 30.0}),
    ("qwen3", YARN, {"rope.scaling.attn_factor": 1.2}),
    ("qwen3", COMMON, {"rope.scaling.yarn_beta_fast": 16.0}),
    ("hunyuan-dense", COMMON, {"rope.scaling.alpha": 1000.0}),
    ("gpt2", NORMED, {"rope.scaling.factor": 2.0}),
    ("nomic-bert", NORMED, {"rope.scaling.type": "yarn"}),
    ("nomic-bert", NORMED, {"rope.dimension_count": 8}),
    ("nomic-bert", NORMED, {"attention.causal": True}),
    ("cohere2", COHERE, {"rope.freq_base_swa": 5e5}),
    ("glm4", COMMON, {"rope.dimension_sections": [8, 12, 12, 0]}),
    ("llama", COMMON, {"tensor_data_layout": "rows"}),
    ("qwen3moe", MOE, {"expert_gating_func": 2}),
    ("qwen3moe", MOE, {"expert_weights_norm": False}),
    ("qwen3moe", MOE, {"expert_group_count": 4}),
]


@pytest.mark.parametrize(("arch", "header", "more"), UNREAD)
def test_what_nothing_reads(arch: str, header: Given, more: Given) -> None:
    tensors = ROUTER if header is MOE else ()
    hf_config(file(arch, header, *tensors), "float32")
    (key,) = more
    message = rf"m.gguf: entries of the header that are not supported: {arch}.{re.escape(key)}="
    with pytest.raises(ValueError, match=message):
        hf_config(file(arch, header | more, *tensors), "float32")


@pytest.mark.parametrize(
    ("arch", "header", "more"),
    [
        ("llama", COMMON, {"vocab_size": 48, "attention.value_length": 16, "rope.scaling.finetuned": True}),
        ("llama", COMMON, {"tensor_data_layout": "Meta AI original pth", "attention.sliding_window": 64}),
        ("llama", COMMON, {"expert_count": 0, "expert_used_count": 0, "logit_scale": 1.0}),
        ("llama", COMMON, {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5}),
        ("qwen2vl", COMMON, {"rope.dimension_sections": [8, 4, 4, 0]}),
        ("hunyuan-dense", COMMON, {"rope.scaling.type": "none", "rope.scaling.factor": 4, "rope.scaling.alpha": 0}),
        ("gpt2", NORMED, {"rope.scaling.factor": 1.0}),
        ("cohere2", COHERE, {"rope.freq_base_swa": 1e4}),
        ("qwen3moe", MOE, {"expert_gating_func": 1, "expert_weights_norm": True, "expert_group_count": 1}),
        ("nomic-bert", NORMED, {"attention.causal": False}),
    ],
)
def test_what_changes_no_number(arch: str, header: Given, more: Given) -> None:
    tensors = ROUTER if header is MOE else ()
    plain = hf_config(file(arch, header, *tensors), "float32")
    assert hf_config(file(arch, header | more, *tensors), "float32") == plain | (
        {"rms_norm_eps": 1e-5} if "attention.layer_norm_rms_epsilon" in more else {}
    )


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 0.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scale_linear": 4.0}, {"rope_type": "default"}),
    ],
)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_a_factor_without_a_type_is_linear(arch: str, more: dict[str, Any], scaling: dict[str, Any]) -> None:
    """As llama.cpp reads it."""
    rope = hf_config(file(arch, COMMON | more), "float32")["rope_parameters"]
    assert rope == {"rope_theta": 10000.0} | scaling


def test_a_factor_beside_those_of_frequencies() -> None:
    given = file("llama", COMMON | {"rope.scaling.factor": 4.0}, "rope_freqs.weight")
    given.dequantize = lambda name: np.arange(1.0, 9.0)
    rope = hf_config(given, "float32")["rope_parameters"]
    assert rope["factors"] == [4.0 * value for value in range(1, 9)]


def test_olmo_3_has_a_base_for_its_windows() -> None:
    given = COMMON | {"attention.sliding_window": 8, "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4}
    rope = hf_config(file("olmo2", given), "float32")["rope_parameters"]
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (5e5, 1e4)


def test_widths_that_tensors_tell() -> None:
    """Granite's converter writes no expert_feed_forward_length."""
    given = COMMON | SSM | {"expert_count": 4, "expert_used_count": 2}
    tensors = ("blk.0.ffn_up_shexp.weight", "blk.0.ffn_up_exps.weight")
    assert hf_config(file("granitehybrid", given, *tensors), "float32")["intermediate_size"] == 48


@pytest.mark.parametrize("key", ["hidden_activation", "hidden_act"])
def test_an_activation_by_name(key: str) -> None:
    given = NORMED | {"attention.sliding_window": 8, key: "silu"}
    assert hf_config(file("modern-bert", given), "float32")["hidden_activation"] == "silu"


def test_layers_at_no_one_distance() -> None:
    tensors = [f"blk.{index}.attn_q.weight" for index in (0, 1, 3)]
    with pytest.raises(ValueError, match=r"attn_layers must follow each other at one distance, got \[0, 1, 3\]"):
        hf_config(file("jamba", SSM, *tensors), "float32")


def test_heads_and_widths_by_layer() -> None:
    heads = {"attention.head_count_kv": [2, 1, 2, 1]}
    values = [f"blk.{layer}.attn_v.weight" for layer in (0, 2)]
    config = hf_config(file("gemma4", GEMMA4 | heads, *values), "float32")
    names = "num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim", "intermediate_size"
    assert [config[name] for name in names] == [2, 1, 16, 32, 64]
    assert config["attention_k_eq_v"] and config["use_double_wide_mlp"]


def test_yarn_is_read_of_every_architecture() -> None:
    betas = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_attn_factor": 1.5}
    rope = hf_config(file("qwen3", YARN | betas), "float32")["rope_parameters"]
    assert rope == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 16.0, "attention_factor": 1.5
    }  # fmt: skip


def test_the_first_files_of_kimi_k2() -> None:
    yarn = {key: value for key, value in YARN.items() if key.startswith("rope.")}
    given = LATENT | yarn | {"expert_gating_func": 2}
    fast = hf_config(file("deepseek2", given), "float32")["rope_parameters"]["beta_fast"]
    later = hf_config(file("deepseek2", given | {"rope.scaling.yarn_beta_fast": 32.0}), "float32")
    assert (fast, later["rope_parameters"]["beta_fast"]) == (1.0, 32.0)
    assert "beta_fast" not in hf_config(file("deepseek2", given | {"expert_count": 8}), "float32")["rope_parameters"]


def test_what_widens_keys_and_values_twice() -> None:
    """Whole and in parts, as some files have it: the whole is read."""
    given = file("deepseek2", LATENT, *(f"blk.0.attn_{part}.weight" for part in ("k_b", "kv_b", "v_b")))
    names = [(weight.name, weight.tensor) for weight in weights(given) if "kv_b" in weight.name]
    assert names == [("model.layers.0.self_attn.kv_b_proj.weight", "blk.0.attn_kv_b.weight")]


def test_a_shared_expert_of_two_types() -> None:
    """Gate and up in one matrix: in the file's blocks if both have the same."""
    gate, up = (f"blk.0.ffn_{part}_shexp.weight" for part in ("gate", "up"))
    given = file("granitemoe", COMMON, gate, up)
    rows = {gate: np.zeros((48, 32), np.float32), up: np.ones((48, 32), np.float32)}
    given.dequantize = given.blocks = rows.__getitem__
    given.tensors[gate].ggml_type, given.tensors[up].ggml_type = 8, 8
    weight = list(weights(given))[-1]
    assert (weight.name, weight.shape) == ("model.layers.0.shared_mlp.input_linear.weight", (96, 32))
    assert np.array_equal(weight.blocks(given), np.concatenate(list(rows.values()))) and weight.keeps_rows
    given.tensors[up].ggml_type = 0
    assert not list(weights(given))[-1].keeps_rows
    given.tensors[up].shape = (48, 64)
    with pytest.raises(ValueError, match=r"gate_shexp.weight and .*up_shexp.weight have shapes \(48, 32\) and"):
        list(weights(given))
    del given.tensors[up]
    with pytest.raises(ValueError, match="m.gguf has no tensor blk.0.ffn_up_shexp.weight"):
        list(weights(given))


def test_divisors_of_frequencies() -> None:
    for arch, more in (("qwen3", {}), ("qwen3moe", {"expert_count": 4, "expert_used_count": 2})):
        given = file(arch, COMMON | more, "rope_freqs.weight", "blk.0.ffn_up_exps.weight")
        given.tensors["blk.0.ffn_up_exps.weight"].shape = (4, 16, 32)
        given.dequantize = lambda name: np.arange(1, 9, dtype=np.float32)
        rope = hf_config(given, "float32")["rope_parameters"]
        assert rope["rope_type"] == "factors" and rope["factors"] == list(range(1, 9))


def test_windows_of_olmo2_are_olmo3s() -> None:
    assert hf_config(file("olmo2", COMMON), "float32")["architectures"] == ["Olmo2ForCausalLM"]
    config = hf_config(file("olmo2", COMMON | {"attention.sliding_window": 8}), "float32")
    assert config["architectures"] == ["Olmo3ForCausalLM"] and config["sliding_window"] == 8


def test_apertus_needs_its_activations() -> None:
    with pytest.raises(ValueError, match=r"m.gguf: xielu.alpha_p must have 4 values, got \[0.5\]"):
        given = file("apertus", COMMON)
        given.metadata["xielu.alpha_p"] = [0.5]
        list(weights(given))


def test_stacked_matrices_are_rows_of_their_blocks() -> None:
    """Gemma 3n's projections of streams, as values and as bytes."""
    stack = np.arange(3 * 32 * 32, dtype=np.float32).reshape(3, 32, 32)
    given = file("gemma3n", COMMON)
    given.tensors["altup_proj.weight"] = SimpleNamespace(shape=stack.shape)
    given.dequantize, given.blocks = lambda name: stack, lambda name: stack.reshape(96, 32)
    _, *projections = weights(given)
    assert len(projections) == 3
    for index, weight in enumerate(projections):
        assert weight.name == f"model.altup_projections.{index}.weight"
        assert np.array_equal(weight.load(given), stack[index]) and np.array_equal(weight.blocks(given), stack[index])
