"""A checkpoint's names for those of a GGUF file's tensors, by architecture."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.loader.gguf import experts, mla


@dataclass(frozen=True)
class Names:
    """A checkpoint's names for GGUF's, without their ending ".weight" or ".bias"; `{}` is a layer's number."""

    top: dict[str, str]
    layer: str
    block: dict[str, str]


MODERN = Names(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "cls.output": "score"},
    "model.layers.{}.",
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
_GPT2 = Names(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.{}.",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)
_NEOX = Names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "gpt_neox.layers.{}.",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
_BLOOM = Names(
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.{}.",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
_MPT = Names(
    {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
    "transformer.blocks.{}.",
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)


def _with(names: Names, top: dict[str, str] | None = None, **block: str) -> Names:
    return Names(names.top | (top or {}), names.layer, names.block | block)


_BOTH_NORMS = _with(
    MODERN,
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_EXPERTS = _with(MODERN, None, **experts.NAMES)
_ROUTED = _with(_EXPERTS, None, **experts.ROUTED_NAMES)
_FUSED_MLP = _with(MODERN, ffn_up="mlp.gate_up_proj")
# Falcon's larger models have a norm each for the MLP and for attention.
FALCON_TWO_NORMS = _with(_BLOOM, attn_norm="ln_mlp", attn_norm_2="ln_attn")
_PLAIN_MLP = _with(MODERN, ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
_PHI = _with(
    MODERN,
    {"output_norm": "model.final_layernorm"},
    attn_output="self_attn.dense",
    ffn_up="mlp.fc1",
    ffn_down="mlp.fc2",
)

_GEMMA4 = _with(
    _BOTH_NORMS,
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    inp_gate="per_layer_input_gate",
    proj="per_layer_projection",
    post_norm="post_per_layer_input_norm",
    layer_output_scale="layer_scalar",
    ffn_gate_inp="router.proj",
    pre_ffw_norm_2="pre_feedforward_layernorm_2",
    post_ffw_norm_1="post_feedforward_layernorm_1",
    post_ffw_norm_2="post_feedforward_layernorm_2",
    **experts.stack_names("experts"),
)
_GEMMA3N = _with(
    _GEMMA4,
    {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
    altup_correct_coef="altup.correction_coefs",
    altup_correct_scale="altup.correct_output_scale",
    altup_predict_coef="altup.prediction_coefs",
    altup_router="altup.modality_router",
    altup_router_norm="altup.router_norm",
    laurel_l="laurel.linear_left",
    laurel_r="laurel.linear_right",
    laurel_post_norm="laurel.post_laurel_norm",
)
# Those that have no ending in the checkpoint.
BARE = ("layer_output_scale", "altup_correct_scale", "attn_sinks", "exp_probs_b")

_BERT = Names(
    {
        "token_embd": "embeddings.word_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "cls": "pooler.dense",
        "cls.output": "classifier",
    },
    "encoder.layer.{}.",
    {
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
_NOMIC_BERT = Names(
    _BERT.top | {"token_embd_norm": "emb_ln"},
    "encoder.layers.{}.",
    {
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "attn_output_norm": "norm1",
        "ffn_up": "mlp.fc11",
        "ffn_gate": "mlp.fc12",
        "ffn_down": "mlp.fc2",
        "layer_output_norm": "norm2",
    },
)
_JINA_ROBERTA = Names(
    _NOMIC_BERT.top | {"cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    _NOMIC_BERT.layer,
    _NOMIC_BERT.block | {"attn_qkv": "mixer.Wqkv", "attn_output": "mixer.out_proj", "ffn_up": "mlp.fc1"},
)
_MODERN_BERT = Names(
    {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
    "layers.{}.",
    {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
)
# Files of Jina's BERT have the gate of the MLP alone, or together with what it is multiplied with.
_JINA_BERT = _with(_BERT, ffn_down="mlp.wo", layer_output_norm="mlp.layernorm", ffn_gate="gate_proj", ffn_up="up_proj")
JINA_BERT_FUSED = _with(_JINA_BERT, ffn_up="mlp.gated_layers")

NAMES: dict[str, Names] = {
    "bert": _BERT,
    "nomic-bert": _NOMIC_BERT,
    "jina-bert-v2": _JINA_BERT,
    "jina-bert-v3": _JINA_ROBERTA,
    "modern-bert": _MODERN_BERT,
    "eurobert": Names({"token_embd": "embed_tokens", "output_norm": "norm"}, "layers.{}.", MODERN.block),
    "gemma-embedding": _BOTH_NORMS,
    "apertus": _with(MODERN, attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm"),
    "bitnet": _with(MODERN, attn_sub_norm="self_attn.attn_sub_norm", ffn_sub_norm="mlp.ffn_sub_norm"),
    "llama": _EXPERTS,
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "qwen3vlmoe": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _with(_EXPERTS, ffn_gate_inp="mlp.router"),
    "afmoe": _with(
        _ROUTED,
        attn_gate="self_attn.gate_proj",
        post_attention_norm="post_attention_layernorm",
        ffn_norm="pre_mlp_layernorm",
        post_ffw_norm="post_mlp_layernorm",
        ffn_gate_inp="mlp.router.gate",
        exp_probs_b="mlp.expert_bias",
    ),
    "exaone-moe": _ROUTED,
    "bailingmoe": _ROUTED,
    "bailingmoe2": _ROUTED,
    "mimo2": _with(_ROUTED, attn_sinks="self_attn.sinks"),
    "mistral4": _with(_ROUTED, None, **mla.NAMES),
    "minicpm3": _with(MODERN, None, **mla.NAMES),
    "gpt-oss": _with(
        _EXPERTS,
        attn_sinks="self_attn.sinks",
        post_attention_norm="post_attention_layernorm",
        ffn_gate_inp="mlp.router",
    ),
    "granitemoe": _with(
        MODERN,
        None,
        ffn_gate_inp="block_sparse_moe.router",
        ffn_gate_shexp="shared_mlp.input_linear",
        ffn_down_shexp="shared_mlp.output_linear",
        **experts.stack_names("block_sparse_moe.experts"),
    ),
    "deepseek2": _with(_ROUTED, None, **mla.NAMES),
    "dots1": _ROUTED,
    "glm4moe": _with(_ROUTED, post_attention_norm="post_attention_layernorm"),
    "ernie4_5-moe": _with(_ROUTED, exp_probs_b="mlp.moe_statics.e_score_correction_bias"),
    "minimax-m2": _with(_EXPERTS, exp_probs_b="mlp.e_score_correction_bias"),
    "hunyuan-moe": _with(
        _EXPERTS,
        attn_q_norm="self_attn.query_layernorm",
        attn_k_norm="self_attn.key_layernorm",
        ffn_gate_inp="mlp.gate.wg",
        ffn_gate_shexp="mlp.shared_mlp.gate_proj",
        ffn_up_shexp="mlp.shared_mlp.up_proj",
        ffn_down_shexp="mlp.shared_mlp.down_proj",
    ),
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma2": _BOTH_NORMS,
    "gemma3": _BOTH_NORMS,
    "olmo2": _BOTH_NORMS,
    "exaone4": _BOTH_NORMS,
    "seed_oss": _with(MODERN, post_attention_norm="post_attention_layernorm"),
    "hunyuan-dense": _with(MODERN, attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
    "glm4": _with(_FUSED_MLP, post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
    "chatglm": _FUSED_MLP,
    "phi2": _PHI,
    "phi3": _with(_FUSED_MLP, attn_qkv="self_attn.qkv_proj"),
    "starcoder2": _PLAIN_MLP,
    "stablelm": _with(MODERN, attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm"),
    "gpt2": _GPT2,
    "starcoder": _GPT2,
    "gptneox": _NEOX,
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "mpt": _MPT,
}
