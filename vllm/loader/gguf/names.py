"""Checkpoints' names of what a GGUF file's tensors hold."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """A checkpoint's names of GGUF's tensors.

    Attributes:
        layer: what the names of block `{}` begin with.
        parts: by GGUF's names without their block, both without their ending ".weight" or ".bias". A name with `{}` is
            that of several weights (changes.py), a key with it that of a single expert, and a key with its ending (a
            dot alone where there is none) has a name that is whole.
    """

    layer: str
    parts: dict[str, str]

    def but(self, *others: dict[str, str], **parts: str) -> Names:
        """Names of which these are others, or more."""
        return Names(self.layer, functools.reduce(operator.or_, others, self.parts) | parts)

    def find(self, layer: str | None, part: str, expert: str | None, ending: str | None) -> str | None:
        """The checkpoint's name of a tensor; None: it has no such."""
        prefix = "" if layer is None else self.layer.format(layer)
        key = part if expert is None else f"{part}.{{}}"
        if (whole := self.parts.get(f"{key}.{ending or ''}")) is not None:
            return prefix + whole
        if key not in self.parts or ending not in ("weight", "bias"):
            return None
        name = self.parts[key] if expert is None else self.parts[key].format(expert)
        return f"{prefix}{name}.{ending}"


MODERN = Names(
    "model.layers.{}.",
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "cls.output": "score",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.{}_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
GPT2 = Names(
    "transformer.h.{}.",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)
NEOX = Names(
    "gpt_neox.layers.{}.",
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
BLOOM = Names(
    "transformer.h.{}.",
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
MPT = Names(
    "transformer.blocks.{}.",
    {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)


BOTH_NORMS = MODERN.but(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)


def _stacks(experts: str) -> dict[str, str]:
    """The matrices that the file stacks, where the module of experts is called `experts`."""
    kinds = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
    return {part: f"{experts}.{{}}.{kind}" for part, kind in (kinds | {"ffn_gate_up_exps": "{}_proj"}).items()}


EXPERTS = MODERN.but(
    _stacks("mlp.experts"),
    ffn_gate_inp="mlp.gate",
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
# DeepSeek's, and those of models of its kind.
ROUTED = EXPERTS.but(
    {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ffn_gate_shexp="mlp.shared_experts.gate_proj",
    ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
)
GRANITE_EXPERTS = MODERN.but(
    _stacks("block_sparse_moe.experts"),
    ffn_gate_inp="block_sparse_moe.router",
    ffn_gate_shexp="shared_mlp.input_linear",
    ffn_up_shexp="shared_mlp.input_linear",
    ffn_down_shexp="shared_mlp.output_linear",
)
# Tensors of layers with latent attention.
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
LFM2 = MODERN.but(
    {
        f"ffn_{kind}_exps": f"feed_forward.experts.{{}}.{name}"
        for kind, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    {"exp_probs_b.bias": "feed_forward.expert_bias", "shortconv.conv": "conv.conv"},
    {"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"},
    token_embd_norm="model.embedding_norm",
    attn_norm="operator_norm",
    attn_output="self_attn.out_proj",
    attn_q_norm="self_attn.q_layernorm",
    attn_k_norm="self_attn.k_layernorm",
    ffn_norm="ffn_norm",
    ffn_gate="feed_forward.w1",
    ffn_up="feed_forward.w3",
    ffn_down="feed_forward.w2",
    ffn_gate_inp="feed_forward.gate",
)


def _mamba(module: str) -> dict[str, str]:
    """Tensors of Mamba 1 and 2, in a module of this name."""
    matrices = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_out": "out_proj", "ssm_norm": "norm"}
    return {part: f"{module}.{name}" for part, name in (matrices | {"ssm_a.": "A_log", "ssm_d.": "D"}).items()}


def _mamba1(module: str) -> dict[str, str]:
    return _mamba(module) | {"ssm_x": f"{module}.x_proj", "ssm_dt": f"{module}.dt_proj"}


def _mamba2(module: str) -> dict[str, str]:
    return _mamba(module) | {"ssm_dt.bias": f"{module}.dt_bias"}


_BACKBONE = Names(
    "backbone.layers.{}.",
    {
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        "attn_norm": "norm",
    },
)
MAMBA = _BACKBONE.but(_mamba1("mixer"))
MAMBA2 = _BACKBONE.but(_mamba2("mixer"))
NEMOTRON_H = MAMBA2.but(
    {f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    attn_output="mixer.o_proj",
    ffn_up="mixer.up_proj",
    ffn_down="mixer.down_proj",
    ffn_gate_inp="mixer.gate",
    ffn_up_exps="mixer.experts.{}.up_proj",
    ffn_down_exps="mixer.experts.{}.down_proj",
    ffn_up_shexp="mixer.shared_experts.up_proj",
    ffn_down_shexp="mixer.shared_experts.down_proj",
)
GRANITE_HYBRID = GRANITE_EXPERTS.but(
    _mamba2("mamba"),
    ffn_gate="shared_mlp.input_linear",
    ffn_up="shared_mlp.input_linear",
    ffn_down="shared_mlp.output_linear",
)
_FEED_FORWARD = MODERN.but(
    {f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")},
    output_norm="model.final_layernorm",
    ffn_norm="pre_ff_layernorm",
)
# The norm before the MLP has no ending in its files.
FALCON_H1 = _FEED_FORWARD.but(_mamba2("mamba"), {"ffn_norm.": "pre_ff_layernorm.weight"})
JAMBA = _FEED_FORWARD.but(
    _mamba1("mamba"),
    {f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    _stacks("feed_forward.experts"),
    ffn_gate_inp="feed_forward.router",
)
QWEN_LINEAR = EXPERTS.but(
    {"ssm_a.": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    attn_qkv="linear_attn.in_proj_qkv",
    attn_gate="linear_attn.in_proj_z",
    post_attention_norm="post_attention_layernorm",
    ssm_in="linear_attn.in_proj_qkvz",
    ssm_ba="linear_attn.in_proj_ba",
    ssm_beta="linear_attn.in_proj_b",
    ssm_alpha="linear_attn.in_proj_a",
    ssm_conv1d="linear_attn.conv1d",
    ssm_norm="linear_attn.norm",
    ssm_out="linear_attn.out_proj",
)
KIMI_LINEAR = ROUTED.but(
    LATENT,
    {f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    {f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    {"ssm_a.": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias"},
    ssm_beta="self_attn.b_proj",
    ssm_norm="self_attn.o_norm",
)
FUSED_MLP = MODERN.but(ffn_up="mlp.gate_up_proj")
GEMMA4 = BOTH_NORMS.but(
    _stacks("experts"),
    {
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "layer_output_scale.weight": "layer_scalar",
    },
    per_layer_token_embd="model.embed_tokens_per_layer",
    per_layer_model_proj="model.per_layer_model_projection",
    per_layer_proj_norm="model.per_layer_projection_norm",
    inp_gate="per_layer_input_gate",
    proj="per_layer_projection",
    post_norm="post_per_layer_input_norm",
    ffn_gate_inp="router.proj",
    pre_ffw_norm_2="pre_feedforward_layernorm_2",
    post_ffw_norm_1="post_feedforward_layernorm_1",
    post_ffw_norm_2="post_feedforward_layernorm_2",
)
GEMMA3N = GEMMA4.but(
    {"altup_correct_scale.weight": "altup.correct_output_scale"},
    altup_proj="model.altup_projections.{}",
    altup_unembd_proj="model.altup_unembed_projections.{}",
    altup_correct_coef="altup.correction_coefs",
    altup_predict_coef="altup.prediction_coefs",
    altup_router="altup.modality_router",
    altup_router_norm="altup.router_norm",
    laurel_l="laurel.linear_left",
    laurel_r="laurel.linear_right",
    laurel_post_norm="laurel.post_laurel_norm",
)
BERT = Names(
    "encoder.layer.{}.",
    {
        "token_embd": "embeddings.word_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "cls": "pooler.dense",
        "cls.output": "classifier",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
)
NOMIC_BERT = Names(
    "encoder.layers.{}.",
    BERT.parts
    | {
        "token_embd_norm": "emb_ln",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
)
JINA_ROBERTA = NOMIC_BERT.but(
    {"cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    attn_qkv="mixer.Wqkv",
    attn_output="mixer.out_proj",
    ffn_up="mlp.fc1",
)
MODERN_BERT = Names(
    "layers.{}.",
    {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
)
EURO_BERT = Names("layers.{}.", MODERN.parts | {"token_embd": "embed_tokens", "output_norm": "norm"})
JINA_BERT = BERT.but(
    ffn_down="mlp.wo", layer_output_norm="mlp.layernorm", ffn_gate="mlp.gate_proj", ffn_up="mlp.gated_layers"
)
