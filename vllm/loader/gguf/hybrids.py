"""Entries of config.json of decoders with recurrent states."""

from __future__ import annotations

from vllm.loader.gguf.config_parts import FULL, Config, partial_rope, pick, rope_parameters
from vllm.loader.gguf.experts import width
from vllm.loader.gguf.header import GGUFHeader
from vllm.loader.gguf.mla import latent

_LINEAR = "linear_attention"
_SIGMOID = 2
_GRANITE = "attention_multiplier embedding_multiplier residual_multiplier logits_scaling"


def _kinds(h: GGUFHeader, tensor: str, other: str) -> list[str]:
    """Layers that have a tensor see all that is before them; the `other` ones do not."""
    return [FULL if has else other for has in h.having(tensor)]


def _mixer(h: GGUFHeader, eps: str) -> Config:
    """The entries that models have in common."""
    return {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        eps: h.get("attention.layer_norm_rms_epsilon", 1e-5),
    }


def _attention(h: GGUFHeader) -> Config:
    return {
        "num_attention_heads": h.heads,
        "num_key_value_heads": h.kv_heads,
        "max_position_embeddings": h.context,
        "head_dim": h.head_dim,
    }


def _expansion(h: GGUFHeader) -> int:
    """Channels of a state for each one of the model."""
    inner = h.size("ssm.inner_size")
    if inner % h.hidden:
        raise h.wrong("ssm.inner_size", f"must be a multiple of embedding_length={h.hidden}, got {inner}")
    return inner // h.hidden


def _head_dim(h: GGUFHeader) -> int:
    """Channels of a head of a state."""
    inner, heads = h.size("ssm.inner_size"), h.size("ssm.time_step_rank")
    if inner % heads:
        raise h.wrong("ssm.inner_size", f"must be a multiple of ssm.time_step_rank={heads}, got {inner}")
    return inner // heads


def lfm2(h: GGUFHeader) -> Config:
    """LFM2. A layer without heads of keys is a convolution."""
    heads = h.by_layer("attention.head_count_kv")
    return _mixer(h, "norm_eps") | {
        "num_attention_heads": h.heads,
        "num_key_value_heads": h.of_some("attention.head_count_kv", h.heads),
        "intermediate_size": h.uniform("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": h.context,
        "rope_parameters": rope_parameters(h, 1000000.0),
        "conv_L_cache": h.need("shortconv.l_cache"),
        "layer_types": [FULL if count else "conv" for count in heads],
    }


def lfm2_moe(h: GGUFHeader) -> Config:
    """LFM2 with experts."""
    config = lfm2(h) | pick(h, "num_experts num_experts_per_tok moe_intermediate_size num_dense_layers")
    del config["block_auto_adjust_ff_dim"]
    # The file does not say so: all have it.
    return config | {"norm_topk_prob": True, "use_expert_bias": h.has(f"blk.{h.layers - 1}.exp_probs_b.bias")}


def mamba(h: GGUFHeader) -> Config:
    """Mamba, or Falcon Mamba where steps, B and C are normalised."""
    config = _mixer(h, "layer_norm_epsilon") | {
        "intermediate_size": h.size("ssm.inner_size"),
        "state_size": h.size("ssm.state_size"),
        "time_step_rank": h.size("ssm.time_step_rank"),
        "conv_kernel": h.size("ssm.conv_kernel"),
        "use_bias": h.has("blk.0.ssm_in.bias"),
        "use_conv_bias": h.has("blk.0.ssm_conv1d.bias"),
    }
    if h.get("ssm.dt_b_c_rms", False):
        config |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return config


def mamba2(h: GGUFHeader) -> Config:
    return _mixer(h, "layer_norm_epsilon") | {
        "expand": _expansion(h),
        "num_heads": h.size("ssm.time_step_rank"),
        "head_dim": _head_dim(h),
        "state_size": h.size("ssm.state_size"),
        "n_groups": h.get("ssm.group_count", 1),
        "conv_kernel": h.size("ssm.conv_kernel"),
        "use_bias": h.has("blk.0.ssm_in.bias"),
        "use_conv_bias": h.has("blk.0.ssm_conv1d.bias"),
    }


def _mamba2(h: GGUFHeader) -> Config:
    """Mamba 2 of models that have attention, too."""
    first = next((index for index, has in enumerate(h.having("ssm_in.weight")) if has), 0)
    return {
        "mamba_n_heads": h.size("ssm.time_step_rank"),
        "mamba_d_head": _head_dim(h),
        "mamba_d_state": h.size("ssm.state_size"),
        "mamba_n_groups": h.get("ssm.group_count", 1),
        "mamba_d_conv": h.size("ssm.conv_kernel"),
        "mamba_conv_bias": h.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": h.has(f"blk.{first}.ssm_in.bias"),
    }


def granite(h: GGUFHeader) -> Config:
    """Granite 4. Without experts all tokens' MLP is named as the only one."""
    config = _mixer(h, "rms_norm_eps") | _attention(h) | _mamba2(h) | pick(h, _GRANITE)
    del config["head_dim"]
    count = h.get("expert_count", 0)
    config |= {
        "mamba_expand": _expansion(h),
        "layer_types": _kinds(h, "attn_q.weight", _LINEAR),
        "num_local_experts": count,
        "shared_intermediate_size": h.rows(f"blk.0.{'ffn_up_shexp' if count else 'ffn_up'}.weight"),
        "attention_bias": False,
        # The file says by "fine-tuned" whether positions rotate.
        "position_embedding_type": "nope",
    }
    if count:
        config |= pick(h, "num_experts_per_tok") | {"intermediate_size": width(h)}
    if h.get("rope.scaling.finetuned", True):
        config |= {"position_embedding_type": "rope", "rope_parameters": rope_parameters(h)}
    return config


def falcon_h1(h: GGUFHeader) -> Config:
    """Its factors are on the file's weights."""
    return (
        _mixer(h, "rms_norm_eps")
        | _attention(h)
        | _mamba2(h)
        | {
            "intermediate_size": h.uniform("feed_forward_length"),
            "rope_parameters": rope_parameters(h),
            "mamba_d_ssm": h.size("ssm.inner_size"),
            "mamba_rms_norm": h.has("blk.0.ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "projectors_bias": h.has("blk.0.ssm_out.bias"),
            "attention_bias": False,
        }
    )


def nemotron_h(h: GGUFHeader) -> Config:
    """Nemotron-H, and Nemotron 3, which has experts. What a layer is, its tensors tell."""
    tensors = {_LINEAR: "ssm_in", FULL: "attn_q", "moe": "ffn_gate_inp", "mlp": "ffn_up"}
    columns = [[kind if has else "" for has in h.having(f"{part}.weight")] for kind, part in tensors.items()]
    kinds = ["".join(layer) for layer in zip(*columns, strict=True)]
    if wrong := set(kinds) - tensors.keys():
        raise h.error(f"layers must have one of {', '.join(tensors.values())}, got {sorted(wrong)}")
    own = _mamba2(h)
    config = _mixer(h, "layer_norm_epsilon") | _attention(h)
    config |= {
        "layers_block_type": kinds,
        "mamba_num_heads": own["mamba_n_heads"],
        "mamba_head_dim": own["mamba_d_head"],
        "ssm_state_size": own["mamba_d_state"],
        "n_groups": own["mamba_n_groups"],
        "conv_kernel": own["mamba_d_conv"],
        "use_conv_bias": own["mamba_conv_bias"],
        "use_bias": own["mamba_proj_bias"],
        "mlp_bias": any(h.having("ffn_up.bias")),
        "mlp_hidden_act": "relu2",
    }
    if "mlp" in kinds:
        config["intermediate_size"] = h.rows(f"blk.{kinds.index('mlp')}.ffn_up.weight")
    if "moe" in kinds:
        names = "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size routed_scaling_factor"
        config |= pick(h, f"{names} norm_topk_prob n_group topk_group")
        config["moe_shared_expert_intermediate_size"] = h.need("expert_shared_feed_forward_length")
        config["moe_latent_size"] = h.get("moe_latent_size")
    return config


def jamba(h: GGUFHeader) -> Config:
    has_experts = h.having("ffn_gate_inp.weight")
    config = _mixer(h, "rms_norm_eps") | _attention(h) | _mamba1(h)
    del config["head_dim"]
    config |= _period(h, "attn_layer", h.having("attn_q.weight"))
    if not any(has_experts):
        return config | {"num_experts": 1}
    config |= pick(h, "num_experts num_experts_per_tok")
    return config | _period(h, "expert_layer", has_experts)


def _mamba1(h: GGUFHeader) -> Config:
    """Jamba's Mamba 1."""
    first = next((index for index, has in enumerate(h.having("ssm_in.weight")) if has), 0)
    return {
        "intermediate_size": h.uniform("feed_forward_length"),
        "mamba_expand": _expansion(h),
        "mamba_d_state": h.size("ssm.state_size"),
        "mamba_d_conv": h.size("ssm.conv_kernel"),
        "mamba_dt_rank": h.size("ssm.time_step_rank"),
        "mamba_conv_bias": h.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": h.has(f"blk.{first}.ssm_in.bias"),
    }


def _period(h: GGUFHeader, name: str, chosen: list[bool]) -> Config:
    """Which layers are chosen, as the first one and the distance to the next."""
    indices = [index for index, is_chosen in enumerate(chosen) if is_chosen]
    first, *rest = indices or [h.layers]
    period = rest[0] - first if rest else h.layers + 1
    if [index for index in range(h.layers) if index % period == first] != indices:
        raise h.error(f"{name}s must follow each other at one distance, got {indices}")
    return {f"{name}_offset": first, f"{name}_period": period}


def _delta_rule(h: GGUFHeader) -> Config:
    """Linear attention of Qwen's models."""
    return _attention(h) | {
        "rope_parameters": partial_rope(h),
        "linear_num_key_heads": h.size("ssm.group_count"),
        "linear_num_value_heads": h.size("ssm.time_step_rank"),
        "linear_key_head_dim": h.size("ssm.state_size"),
        "linear_value_head_dim": _head_dim(h),
        "linear_conv_kernel_dim": h.size("ssm.conv_kernel"),
        "layer_types": _kinds(h, "attn_q.weight", _LINEAR),
    }


def qwen(h: GGUFHeader) -> Config:
    """Qwen3.5."""
    return _mixer(h, "rms_norm_eps") | _delta_rule(h) | {"intermediate_size": h.uniform("feed_forward_length")}


def qwen_moe(h: GGUFHeader) -> Config:
    """Qwen3.5 with experts."""
    config = _mixer(h, "rms_norm_eps") | _delta_rule(h)
    config |= pick(h, "num_experts num_experts_per_tok moe_intermediate_size")
    return config | {"shared_expert_intermediate_size": h.rows("blk.0.ffn_up_shexp.weight")}


def qwen_next(h: GGUFHeader) -> Config:
    """Qwen3-Next. Weights of experts are normalised, which the file does not say."""
    return qwen_moe(h) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def kimi(h: GGUFHeader) -> Config:
    """Kimi Linear. Weights of experts are normalised, whatever the file says."""
    if h.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise h.wrong("expert_gating_func", f"must be {_SIGMOID}, sigmoids")
    names = "num_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace routed_scaling_factor"
    config = latent(h) | pick(h, f"{names} n_group topk_group")
    # Positions do not rotate.
    del config["rope_parameters"]
    return config | {
        "v_head_dim": h.get("attention.value_length_mla") or h.need("attention.value_length"),
        "layer_types": _kinds(h, "attn_kv_a_mqa.weight", _LINEAR),
        "linear_num_heads": h.heads,
        "linear_head_dim": h.size("kda.head_dim"),
        "linear_conv_kernel_dim": h.size("ssm.conv_kernel"),
        "num_shared_experts": h.get("expert_shared_count", 0),
        "moe_renormalize": True,
    }
