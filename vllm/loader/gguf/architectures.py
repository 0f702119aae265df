"""GGUF's architectures: all that is known about one is its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm.loader.gguf import changes, dense, encoders, experts, gemma, hybrids, mla, names, states
from vllm.loader.gguf.changes import LATENT, ONE_PLUS, ROTARY, Change, Weight
from vllm.loader.gguf.config_parts import FULL, Config, activation, entries, every, partial_rope, with_head_dim
from vllm.loader.gguf.header import GGUFHeader
from vllm.loader.gguf.names import BOTH_NORMS, EXPERTS, FUSED_MLP, MODERN, ROUTED, Names


@dataclass(frozen=True)
class Architecture:
    """A name in `general.architecture`, as a model of transformers.

    Attributes:
        name: what config.json's `architectures` has.
        model_type: of config.json, too.
        config: from the header to the other entries; what it says of the two above counts more.
        names: the checkpoint's names of the file's tensors.
        changes: what was done to tensors, by their names in GGUF; "norm" stands for the weights of all norms.
        further: weights that are no tensors of the file.
        tokenizer: how many tokens stand between the texts of a pair, of encoders, whose texts stand between special
            tokens whether or not the file says so; 0: as the file says.
        is_causal: whether tokens see those before them alone, where the file does not say so.
        keeps_blocks: whether quantised weights may stay as they are.
    """

    name: str
    model_type: str
    config: Callable[[GGUFHeader], Config]
    names: Names = MODERN
    changes: dict[str, Change] = field(default_factory=dict)
    further: Callable[[GGUFHeader], Iterator[Weight]] | None = None
    tokenizer: int = 0
    is_causal: bool = True
    keeps_blocks: bool = True


_GRANITE = "attention_multiplier embedding_multiplier residual_multiplier logits_scaling"
_QWEN_MOE: Config = {"moe_intermediate_size": experts.width, "decoder_sparse_step": 1, "mlp_only_layers": []}
_LLAMA = Architecture("LlamaForCausalLM", "llama", dense.llama)
_ROTARY_LLAMA = Architecture("LlamaForCausalLM", "llama", dense.llama, changes=ROTARY)
_QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    entries("head_dim num_experts num_experts_per_tok", norm_topk_prob=True, **_QWEN_MOE),
    EXPERTS,
)

# One that is another's under other names is loaded as that one.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        "llama",
        dense.llama,
        # The first files of Mixtral have single experts.
        EXPERTS.but({f"ffn_{kind}.{{}}": f"mlp.experts.{{}}.{kind}_proj" for kind in ("gate", "up", "down")}),
        ROTARY,
    ),
    "internlm2": _ROTARY_LLAMA,
    "exaone": _LLAMA,
    "xverse": _ROTARY_LLAMA,
    "baichuan": Architecture("LlamaForCausalLM", "llama", dense.baichuan, changes=ROTARY),
    "qwen": Architecture(
        "Qwen2ForCausalLM", "qwen2", entries(intermediate_size=lambda h: h.rows("blk.0.ffn_up.weight"))
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", with_head_dim),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", with_head_dim, changes={"cls.output": changes.difference}),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        entries(
            "num_experts num_experts_per_tok qkv_bias",
            norm_topk_prob=False,
            shared_expert_intermediate_size=lambda h: h.rows("blk.0.ffn_up_shexp.weight"),
            **_QWEN_MOE,
        ),
        EXPERTS,
    ),
    "qwen3moe": _QWEN3_MOE,
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", with_head_dim),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", with_head_dim),
    "qwen3vlmoe": _QWEN3_MOE,
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        entries(
            "head_dim num_local_experts num_experts_per_tok sliding_window attention_bias",
            intermediate_size=experts.width,
            more=experts.gpt_oss,
        ),
        EXPERTS.but(
            {"attn_sinks.weight": "self_attn.sinks"},
            post_attention_norm="post_attention_layernorm",
            ffn_gate_inp="mlp.router",
        ),
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        entries(_GRANITE, more=experts.granite),
        names.GRANITE_EXPERTS,
        ROTARY | {"ffn_gate_shexp": changes.gate_and_up, "ffn_up_shexp": changes.read_with_another},
    ),
    "deepseek2": Architecture("DeepseekV3ForCausalLM", "deepseek_v3", mla.deepseek2, ROUTED.but(names.LATENT), LATENT),
    "dots1": Architecture(
        "Dots1ForCausalLM",
        "dots1",
        entries(
            f"head_dim {experts.ROUTED} attention_bias",
            sliding_window=None,
            layer_types=lambda h: [FULL] * h.layers,
            n_group=1,
            topk_group=1,
        ),
        ROUTED,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM", "glm4_moe", experts.glm4, ROUTED.but(post_attention_norm="post_attention_layernorm")
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        experts.ernie4_5,
        ROUTED.but({"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}),
        {"exp_probs_b": changes.as_row},
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        entries("head_dim num_experts moe_topk attention_bias", intermediate_size=experts.width),
        EXPERTS.but(
            attn_q_norm="self_attn.query_layernorm",
            attn_k_norm="self_attn.key_layernorm",
            ffn_gate_inp="mlp.gate.wg",
            ffn_gate_shexp="mlp.shared_mlp.gate_proj",
            ffn_up_shexp="mlp.shared_mlp.up_proj",
            ffn_down_shexp="mlp.shared_mlp.down_proj",
        ),
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        entries(
            "head_dim num_local_experts num_experts_per_tok",
            intermediate_size=experts.width,
            rope_parameters=partial_rope,
        ),
        EXPERTS.but({"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        "afmoe",
        experts.normalised(
            entries(
                "head_dim num_dense_layers num_experts num_experts_per_tok num_shared_experts moe_intermediate_size "
                "route_scale sliding_window",
                layer_types=every(4),
                mup_enabled=True,
            )
        ),
        ROUTED.but(
            {"exp_probs_b.bias": "mlp.expert_bias"},
            attn_gate="self_attn.gate_proj",
            post_attention_norm="post_attention_layernorm",
            ffn_norm="pre_mlp_layernorm",
            post_ffw_norm="post_mlp_layernorm",
            ffn_gate_inp="mlp.router.gate",
        ),
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        entries(
            "head_dim first_k_dense_replace num_experts num_experts_per_tok num_shared_experts moe_intermediate_size "
            "routed_scaling_factor norm_topk_prob n_group topk_group sliding_window",
            layer_types=every(4),
        ),
        ROUTED,
    ),
    "phimoe": Architecture("PhimoeForCausalLM", "phimoe", experts.phi, EXPERTS.but(ffn_gate_inp="mlp.router")),
    # Ling's first models, which are ERNIE 4.5's mixture of experts without a correction of its choice.
    "bailingmoe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        experts.normalised(experts.ernie4_5),
        ROUTED,
        further=changes.uncorrected,
    ),
    # Ling 2.0, which is GLM 4.5.
    "bailingmoe2": Architecture("Glm4MoeForCausalLM", "glm4_moe", experts.glm4, ROUTED),
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", experts.mimo2, ROUTED.but({"attn_sinks.weight": "self_attn.sinks"})
    ),
    "mistral4": Architecture("Mistral4ForCausalLM", "mistral4", mla.mistral4, ROUTED.but(names.LATENT), LATENT),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", "minicpm3", mla.minicpm3, MODERN.but(names.LATENT), LATENT),
    "pangu-embedded": _LLAMA,
    "paddleocr": _LLAMA,
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        entries("num_experts num_experts_per_tok clip_qkv", intermediate_size=experts.width, norm_topk_prob=False),
        EXPERTS,
    ),
    "minicpm": Architecture("GraniteForCausalLM", "granite", dense.minicpm, changes=ROTARY),
    "granite": Architecture("GraniteForCausalLM", "granite", entries(_GRANITE), changes=ROTARY),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        entries(no_rope_layers=lambda h: [int((index + 1) % 4 != 0) for index in range(h.layers)]),
        changes=ROTARY,
    ),
    "arcee": Architecture(
        "ArceeForCausalLM", "arcee", entries("head_dim attention_bias", activation="relu2"), changes=ROTARY
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        entries("head_dim attention_bias attention_out_bias"),
        MODERN.but(post_attention_norm="post_attention_layernorm"),
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", with_head_dim),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        with_head_dim,
        MODERN.but(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", gemma.gemma, changes=ONE_PLUS),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", gemma.gemma2, BOTH_NORMS, ONE_PLUS),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", gemma.gemma3, BOTH_NORMS, ONE_PLUS),
    "phi2": Architecture(
        "PhiForCausalLM",
        "phi",
        entries(norm="layer_norm_eps", activation="gelu_new", rope_parameters=partial_rope),
        MODERN.but(
            output_norm="model.final_layernorm", attn_output="self_attn.dense", ffn_up="mlp.fc1", ffn_down="mlp.fc2"
        ),
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", dense.phi3, FUSED_MLP.but(attn_qkv="self_attn.qkv_proj")),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        dense.gpt2,
        names.GPT2,
        dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), changes.transposed),
    ),
    "starcoder": Architecture("GPTBigCodeForCausalLM", "gpt_bigcode", dense.starcoder, names.GPT2),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", "gpt_neox", dense.gpt_neox, names.NEOX, {"attn_qkv": changes.by_head}
    ),
    "bloom": Architecture("BloomForCausalLM", "bloom", dense.bloom, names.BLOOM, {"attn_qkv": changes.by_head}),
    # The larger models have a norm for the MLP and one for attention.
    "falcon": Architecture(
        "FalconForCausalLM",
        "falcon",
        dense.falcon,
        names.BLOOM.but(attn_norm_2="ln_attn"),
        {
            "attn_qkv": changes.by_group,
            "attn_norm": changes.named("blk.0.attn_norm_2.weight", "input_layernorm", "ln_mlp"),
        },
    ),
    "mpt": Architecture("MptForCausalLM", "mpt", dense.mpt, names.MPT),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        entries(
            "use_bias",
            norm="norm_epsilon",
            activation="gelu_pytorch_tanh",
            sliding_window=lambda h: h.get("attention.sliding_window"),
        ),
        MODERN.but(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        "stablelm",
        entries(
            "use_qkv_bias qk_layernorm",
            norm="layer_norm_eps",
            rope_parameters=partial_rope,
            use_parallel_residual=lambda h: h.get("use_parallel_residual", False),
        ),
        MODERN.but(attn_q_norm="self_attn.q_layernorm.norms.{}", attn_k_norm="self_attn.k_layernorm.norms.{}"),
    ),
    "olmo": Architecture("OlmoForCausalLM", "olmo", entries("clip_qkv", norm=None), changes=ROTARY),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", dense.olmo2, BOTH_NORMS),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", entries("logit_scale use_qk_norm attention_bias", norm="layer_norm_eps")
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        entries("logit_scale sliding_window attention_bias", norm="layer_norm_eps", layer_types=every(4)),
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        dense.glm,
        FUSED_MLP.but(post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
    ),
    "chatglm": Architecture("GlmForCausalLM", "glm", dense.glm, FUSED_MLP),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", dense.exaone4, BOTH_NORMS),
    "nemotron": Architecture(
        "NemotronForCausalLM",
        "nemotron",
        entries("head_dim", norm="norm_eps", activation="relu2", rope_parameters=partial_rope),
        changes=ONE_PLUS,
    ),
    "apertus": Architecture(
        "ApertusForCausalLM",
        "apertus",
        entries("head_dim attention_bias qk_norm", activation="xielu"),
        MODERN.but(attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm"),
        further=changes.xielu,
    ),
    "jais2": Architecture(
        "Jais2ForCausalLM",
        "jais2",
        entries("head_dim attention_bias mlp_bias", norm="layer_norm_eps", activation="relu2"),
    ),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", dense.mistral3, changes=ROTARY),
    "bitnet": Architecture(
        "BitNetForCausalLM",
        "bitnet",
        # Files that do not name the activation are of the models before b1.58 2B4T.
        entries("head_dim", hidden_act=lambda h: activation(h, "silu")),
        MODERN.but(attn_sub_norm="self_attn.attn_sub_norm", ffn_sub_norm="mlp.ffn_sub_norm"),
    ),
    "gemma3n": Architecture("Gemma3nForCausalLM", "gemma3n_text", gemma.gemma3n, names.GEMMA3N),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", gemma.gemma4, names.GEMMA4),
    "bert": Architecture("BertModel", "bert", encoders.bert, names.BERT, tokenizer=2, is_causal=False),
    "nomic-bert": Architecture(
        "NomicBertModel", "nomic_bert", encoders.nomic_bert, names.NOMIC_BERT, tokenizer=2, is_causal=False
    ),
    # Files have the gate of the MLP alone, or together with what it is multiplied with.
    "jina-bert-v2": Architecture(
        "JinaBertModel",
        "bert",
        encoders.jina_bert,
        names.JINA_BERT,
        {"ffn_up": changes.named("blk.0.ffn_gate.weight", "mlp.gated_layers", "mlp.up_proj")},
        tokenizer=2,
        is_causal=False,
    ),
    "jina-bert-v3": Architecture(
        "XLMRobertaModel", "xlm-roberta", encoders.jina_roberta, names.JINA_ROBERTA, tokenizer=2, is_causal=False
    ),
    "modern-bert": Architecture(
        "ModernBertModel", "modernbert", encoders.modern_bert, names.MODERN_BERT, tokenizer=1, is_causal=False
    ),
    # A module of transformers, which has plain weights alone.
    "eurobert": Architecture(
        "EuroBertModel", "eurobert", encoders.euro_bert, names.EURO_BERT, is_causal=False, keeps_blocks=False
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", hybrids.lfm2, names.LFM2, {"shortconv.conv": changes.taps}),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM", "lfm2_moe", hybrids.lfm2_moe, names.LFM2, {"shortconv.conv": changes.taps}
    ),
    "mamba": Architecture("MambaForCausalLM", "mamba", hybrids.mamba, names.MAMBA, states.MAMBA),
    "mamba2": Architecture("Mamba2ForCausalLM", "mamba2", hybrids.mamba2, names.MAMBA2, states.MAMBA2),
    "jamba": Architecture("JambaForCausalLM", "jamba", hybrids.jamba, names.JAMBA, states.MAMBA),
    "falcon-h1": Architecture("FalconH1ForCausalLM", "falcon_h1", hybrids.falcon_h1, names.FALCON_H1, states.MAMBA2),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture("NemotronHForCausalLM", "nemotron_h", hybrids.nemotron_h, names.NEMOTRON_H, states.MAMBA2),
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        hybrids.granite,
        names.GRANITE_HYBRID,
        states.MAMBA2
        | ROTARY
        | dict.fromkeys(("ffn_gate", "ffn_gate_shexp"), changes.gate_and_up)
        | dict.fromkeys(("ffn_up", "ffn_up_shexp"), changes.read_with_another),
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", "qwen3_next", hybrids.qwen_next, names.QWEN_LINEAR, states.QWEN_NEXT
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", hybrids.qwen, names.QWEN_LINEAR, states.QWEN),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", hybrids.qwen_moe, names.QWEN_LINEAR, states.QWEN
    ),
    "kimi-linear": Architecture(
        "KimiLinearForCausalLM", "kimi_linear", hybrids.kimi, names.KIMI_LINEAR, LATENT | states.DELTA
    ),
    "gemma-embedding": Architecture(
        "Gemma3TextModel",
        "gemma3_text",
        lambda h: gemma.gemma3(h) | {"use_bidirectional_attention": True},
        BOTH_NORMS,
        ONE_PLUS,
        is_causal=False,
    ),
    "llama-embed": Architecture(
        "LlamaBidirectionalModel", "llama_bidirec", dense.llama, changes=ROTARY, is_causal=False
    ),
}

# Known ones without a model here.
REFUSED = {
    **dict.fromkeys(
        ("arwkv7", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7"), "its kind of recurrent state is not implemented"
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "it fills in masked tokens, and does not generate"),
    **dict.fromkeys(("clip", "wavtokenizer-dec"), "it is a part of a model, for images or sound"),
    **dict.fromkeys(("t5", "t5encoder"), "load the model's Hugging Face checkpoint"),
    "deci": "its layers have heads and widths of their own",
    "glm-dsa": "it chooses the tokens that it attends to",
    "llama4": "it attends in chunks",
    "nomic-bert-moe": "encoders with experts are not implemented",
}
