"""MPT (huggingface.co/mosaicml/mpt-7b): ALiBi, LayerNorm without bias, plain MLP."""

from __future__ import annotations

from vllm.models.alibi import mpt_slopes
from vllm.models.checkpoint_names import CheckpointNames, split_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MlpSpec


class MPTForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^transformer\.", ""),
            (r"^blocks\.", "model.layers."),
            (r"^wte\.", "model.embed_tokens."),
            (r"^norm_f\.", "model.norm."),
            (r"\.norm_1\.", ".input_layernorm."),
            (r"\.norm_2\.", ".post_attention_layernorm."),
            (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.", ".mlp."),
        ),
        (split_qkv,),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("init_device", "learned_pos_emb", "embedding_fraction", "norm_type", "attn_config")
        options = reader.get("attn_config", default={})
        needed = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "alibi": True}
        needed["attn_uses_sequence_id"] = False
        for name, value in needed.items():
            if options.get(name, value) != value:
                raise reader.refuse("attn_config", f"{name} must be {value!r}")
        if not reader.boolean("no_bias", default=True):
            raise reader.refuse("no_bias", "there are no biases")
        if reader.get("logit_scale") not in (None, 1.0):
            raise reader.refuse("logit_scale", "logits are not scaled")
        slopes = mpt_slopes(reader.num_heads, options.get("alibi_bias_max", 8))
        attention = reader.attention(
            rotary=False,
            bias=False,
            alibi_slopes=slopes,
            scale=options.get("softmax_scale"),
            clip=options.get("clip_qkv"),
        )
        size = reader.integer("expansion_ratio", default=4) * reader.hidden_size
        return reader.decoder(
            attention,
            MlpSpec(size, "gelu", gated=False),
            reader.layer_norm(bias=False),
            tied=True,
        )
