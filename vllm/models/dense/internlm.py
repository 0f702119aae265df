"""InternLM, InternLM2 (arXiv:2403.17297) and InternLM3: Llama with biases or names of its own."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class InternLMForCausalLM(DecoderForCausalLM):
    """The first one: biases on all projections of the attention."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        bias = reader.boolean("bias", default=True)
        return reader.decoder(reader.attention(bias=bias), reader.mlp(bias=False), reader.norm())


class InternLM2ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^model\.tok_embeddings\.", "model.embed_tokens."),
            (r"^output\.", "lm_head."),
            (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attention\.wo\.", ".self_attn.o_proj."),
            (r"\.attention_norm\.", ".input_layernorm."),
            (r"\.ffn_norm\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
            (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
            (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        ),
        (split_grouped_qkv,),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        bias = reader.boolean("bias", default=True)
        return reader.decoder(reader.attention(bias=bias), reader.mlp(bias=False), reader.norm())


class InternLM3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        bias = reader.boolean("bias", default=False)
        qkv_bias = reader.boolean("qkv_bias", default=False)
        attention = reader.attention(bias=False, qkv_bias=qkv_bias, o_bias=bias)
        return reader.decoder(attention, reader.mlp(bias=bias), reader.norm())
