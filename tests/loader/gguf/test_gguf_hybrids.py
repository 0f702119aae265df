"""GGUF files of models with recurrent states, written as llama.cpp's converter writes them, against the models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from quantized_models import assert_reads, generate, make_llm
from test_gguf_architectures import COMMON, GROUPS, HEADS, SIZE, VOCAB, WIDTH, make, neighbours, rope, write
from test_gguf_experts import PROMPTS, round_to, rounded, stacks
from torch import Tensor

Q8_0 = gguf.GGMLQuantizationType.Q8_0
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = [LINEAR, FULL, LINEAR]
SIZES = COMMON | {"num_hidden_layers": len(KINDS)}
BARE = {"hidden_size": SIZE, "vocab_size": VOCAB, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
BARE |= {"pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS_HEADER = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
KV = {"attention.head_count_kv": [GROUPS * (kind == FULL) for kind in KINDS]}
SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
NO_HEADS = {"attention.head_count": 0, "feed_forward_length": 0, "block_count": 2}
NO_HEADS |= {"attention.layer_norm_rms_epsilon": 1e-5}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
MAMBA2_HEADER = SSM | {"ssm.time_step_rank": 8, "ssm.group_count": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
DELTA |= {"linear_value_head_dim": 32, "layer_types": KINDS, "head_dim": WIDTH} | rope(20000.0, 0.5)
DELTA_HEADER = {"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4}
DELTA_HEADER |= {"ssm.inner_size": 128, "full_attention_interval": 2, "rope.dimension_count": WIDTH // 2}
SHARED = {"shared_expert_intermediate_size": 64}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
GRANITE_HEADER = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
# Factors that are powers of two: a product's rounding is the product of what was rounded.
FACTORS = {"key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 0.25}
FACTORS |= {"ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5]}
FACTORS |= {"mlp_multipliers": [0.5, 2.0], "embedding_multiplier": 4.0, "lm_head_multiplier": 0.5}
NEMOTRON = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
NEMOTRON |= {"intermediate_size": 96, "head_dim": WIDTH, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
NEMOTRON |= {"ssm_state_size": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.7}
ROUTED |= {"moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
ROUTED_HEADER = {"expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.7}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64}
LATENT |= {"q_lora_rank": None, "num_key_value_heads": HEADS}
LATENT_HEADER = {"attention.kv_lora_rank": 32, "rope.dimension_count": 16, "attention.key_length": 48}
LATENT_HEADER |= {"attention.value_length": 32, "attention.key_length_mla": 48, "attention.value_length_mla": 64}
FACTOR_OF = {
    "q_proj": 2.0,
    "k_proj": 1.0,
    "v_proj": 2.0,
    "o_proj": 0.25,
    "out_proj": 0.5,
    "gate_proj": 0.5,
    "down_proj": 2.0,
    "embed_tokens": 4.0,
    "lm_head": 0.5,
}
# GGUF's name: transformers' class, its options, and the header beside the usual.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mamba": (
        "mamba",
        "MambaForCausalLM",
        BARE | {"state_size": 16, "time_step_rank": 32, "tie_word_embeddings": True},
        NO_HEADS | SSM | {"ssm.time_step_rank": 32},
    ),
    "falcon-mamba": (
        "mamba",
        "FalconMambaForCausalLM",
        BARE | {"state_size": 16, "time_step_rank": 32, "tie_word_embeddings": False, "mixer_rms_eps": 1e-6},
        NO_HEADS | SSM | {"ssm.time_step_rank": 32, "ssm.dt_b_c_rms": True},
    ),
    "mamba2": (
        "mamba2",
        "Mamba2ForCausalLM",
        BARE | {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "tie_word_embeddings": False},
        NO_HEADS | MAMBA2_HEADER,
    ),
    "jamba": (
        "jamba",
        "JambaForCausalLM",
        SIZES
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 32}
        | {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        KV | SSM | EXPERTS_HEADER | {"ssm.time_step_rank": 32, "expert_feed_forward_length": 96},
    ),
    "falcon-h1": (
        "falcon-h1",
        "FalconH1ForCausalLM",
        SIZES
        | rope()
        | MAMBA2
        | FACTORS
        | {"head_dim": WIDTH, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        MAMBA2_HEADER,
    ),
    "falcon-h1-plain": (
        "falcon-h1",
        "FalconH1ForCausalLM",
        SIZES | rope() | MAMBA2 | {"head_dim": WIDTH, "mamba_d_ssm": 128, "mamba_rms_norm": False} | FACTORS,
        MAMBA2_HEADER,
    ),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        NEMOTRON | {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "mlp"]},
        MAMBA2_HEADER
        | {"block_count": 5, "attention.head_count_kv": [0, 0, GROUPS, 0, 0]}
        | {"feed_forward_length": [0, 96, 0, 0, 96], "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        NEMOTRON | ROUTED | {"layers_block_type": [LINEAR, "moe", FULL, "moe"]},
        MAMBA2_HEADER
        | EXPERTS_HEADER
        | ROUTED_HEADER
        | {"block_count": 4, "attention.head_count_kv": [0, 0, GROUPS, 0], "feed_forward_length": [0, 32, 0, 32]}
        | {"expert_shared_feed_forward_length": 64, "expert_group_count": 1}
        | {"attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "granitehybrid": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        SIZES
        | MAMBA2
        | GRANITE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 64}
        | {"layer_types": KINDS, "position_embedding_type": "nope"},
        KV
        | MAMBA2_HEADER
        | EXPERTS_HEADER
        | GRANITE_HEADER
        | {"rope.scaling.finetuned": False, "expert_shared_feed_forward_length": 64},
    ),
    "granitehybrid-dense": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        SIZES
        | rope()
        | MAMBA2
        | GRANITE
        | {"num_local_experts": 0, "shared_intermediate_size": 96, "layer_types": KINDS}
        | {"position_embedding_type": "rope"},
        KV | MAMBA2_HEADER | GRANITE_HEADER | {"rope.scaling.finetuned": True},
    ),
    "qwen3next": (
        "qwen3next",
        "Qwen3NextForCausalLM",
        SIZES | DELTA | EXPERTS | SHARED,
        DELTA_HEADER | EXPERTS_HEADER | {"expert_shared_feed_forward_length": 64},
    ),
    "qwen3next-grouped": (
        "qwen3next",
        "Qwen3NextForCausalLM",
        SIZES | DELTA | EXPERTS | SHARED,
        DELTA_HEADER | EXPERTS_HEADER | {"expert_shared_feed_forward_length": 64},
    ),
    "qwen35": (
        "qwen35",
        "Qwen3_5ForCausalLM",
        SIZES | DELTA,
        DELTA_HEADER | {"rope.dimension_sections": [2, 1, 1, 0]},
    ),
    # A block of the file has values of two heads.
    "qwen35-narrow": (
        "qwen35",
        "Qwen3_5ForCausalLM",
        SIZES | DELTA | {"linear_value_head_dim": 16},
        DELTA_HEADER | {"ssm.inner_size": 64},
    ),
    "qwen35moe": (
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        SIZES | DELTA | EXPERTS | SHARED,
        DELTA_HEADER
        | EXPERTS_HEADER
        | {"rope.dimension_sections": [2, 1, 1, 0], "expert_shared_feed_forward_length": 64},
    ),
    "kimi-linear": (
        "kimi-linear",
        "KimiLinearForCausalLM",
        SIZES
        | EXPERTS
        | LATENT
        | {"layer_types": KINDS, "linear_num_heads": HEADS, "linear_head_dim": 32, "pad_token_id": 0}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "n_group": 1, "topk_group": 1},
        LATENT_HEADER
        | EXPERTS_HEADER
        | {"attention.head_count_kv": [int(kind == FULL) for kind in KINDS], "kda.head_dim": 32}
        | {"ssm.conv_kernel": 4, "expert_weights_scale": 1.7, "expert_gating_func": 2, "expert_shared_count": 1}
        | {"leading_dense_block_count": 1},
    ),
}


def _in_turn(value: Tensor) -> Tensor:
    """Rows of heads of values (two of each of two heads of keys), one of each head of keys after another."""
    return value.unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(0, 2)


def _delta(case: str, name: str, value: Tensor) -> dict[str, Tensor]:
    """Qwen's tensors."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: value + 1}
    if name.endswith("in_proj_qkvz.weight"):
        if case.endswith("grouped"):
            return {name: value}
        q, k, v, z = (part.flatten(0, 1) for part in value.unflatten(0, (2, -1)).split([32, 32, 64, 64], 1))
        stem = name.removesuffix("qkvz.weight")
        return {f"{stem}qkv.weight": torch.cat((q, k, v)), f"{stem}z.weight": z}
    own = name.rpartition(".linear_attn.")[2]
    if case.startswith("qwen35") and own != name:
        if own in ("in_proj_qkv.weight", "conv1d.weight"):
            value = torch.cat((value[:128], _in_turn(value[128:])))
        elif own in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            value = _in_turn(value)
        elif own == "out_proj.weight":
            value = _in_turn(value.T).T
    return {name: value}


def _factored(name: str, value: Tensor, config: Any) -> Tensor:
    """Falcon-H1's, with the factors that its converter multiplies with."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer == "in_proj":
        factors = config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers)
        return value * factors.repeat_interleave(torch.tensor([128, 128, 32, 32, 8]))[:, None]
    return value * FACTOR_OF.get(layer, 1.0)


def converted(case: str, model: Any) -> SimpleNamespace:
    """The model with the tensors that llama.cpp's converter makes of its own, by names that gguf-py knows."""
    arch, stacked = CASES[case][0], stacks(model, splits_latent=case == "kimi-linear")

    def state_dict() -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, value in stacked.state_dict().items():
            parts = _delta(case, name, value) if arch.startswith("qwen3") else {name: value}
            if arch == "kimi-linear" and name.endswith("conv1d.weight"):
                parts = {
                    name.replace("conv1d", f"{part}_conv1d"): rows
                    for part, rows in zip("qkv", value.chunk(3), strict=True)
                }
            for own, part in parts.items():
                changed = _factored(own, part, model.config) if arch == "falcon-h1" else part
                if arch == "granitehybrid":
                    changed = neighbours(own, changed, model.config)
                if own.endswith("A_log"):
                    changed = -changed.exp()
                if own.endswith(("A_log", ".D")) and changed.dim() == 1 and not arch.startswith("qwen3"):
                    changed = changed[:, None] if case != "jamba" and arch != "mamba" else changed
                if own.endswith("conv1d.weight"):
                    changed = changed.squeeze(1) if arch != "kimi-linear" else changed[None]
                if own.endswith(("mamba.norm.weight", "mixer.norm.weight")):
                    changed = changed.unflatten(0, (2, -1))
                if case == "granitehybrid-dense":
                    own = own.replace("mlp.shared_mlp.", "mlp.").replace("shared_mlp.output_linear", "mlp.down_proj")
                state[_named(arch, own)] = changed.contiguous()
        return state

    return SimpleNamespace(config=model.config, state_dict=state_dict)


def _named(arch: str, name: str) -> str:
    """As published checkpoints or the converter call it."""
    name = name.replace("dt_bias", "dt_proj.bias").replace("self_attn.forget_gate.", "self_attn.")
    if arch.startswith("nemotron"):
        name = name.replace("model.", "backbone.", 1)
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.").removesuffix(".weight") + ".weight"
    return name


@pytest.mark.parametrize("case", CASES)
def test_readings_equal_the_original(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, header = CASES[case]
    model = make(class_name, options)
    round_to(Q8_0, model, splits_latent=arch == "kimi-linear")
    if arch.startswith("qwen35"):
        for name, matrix in model.named_parameters():
            if name.endswith("linear_attn.out_proj.weight"):
                matrix.data.copy_(_in_turn(rounded(Q8_0, _in_turn(matrix.data.T).T).T).T)
    header = {"block_count": model.config.num_hidden_layers} | header
    write(tmp_path / "m.gguf", arch, converted(case, model), header, None, Q8_0)
    llm = make_llm(tmp_path / "m.gguf")
    config = llm.llm_engine.vllm_config.model_config.hf_config
    assert config.architectures == (class_name,)
    if arch.startswith("qwen35"):
        # The order of heads is no reason to give blocks up.
        heads = config.raw["quantization_config"]["input_heads"]
        assert heads == {f"model.layers.{index}.linear_attn.out_proj": [2, 2] for index in (0, 2)}
    assert_reads(generate(llm, PROMPTS), model, PROMPTS)


def test_rates_above_0(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files have A_log as it is."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, header = CASES["mamba2"]
    model = converted("mamba2", make(class_name, options))
    state = {name: -value if name.endswith("A_log") else value for name, value in model.state_dict().items()}
    model.state_dict = lambda: state
    write(tmp_path / "m.gguf", arch, model, header, None)
    with pytest.raises(ValueError, match=r"m.gguf: tensor blk.0.ssm_a must have no values above 0"):
        make_llm(tmp_path / "m.gguf")
