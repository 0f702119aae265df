"""ChatGLM2 and ChatGLM3 (arXiv:2103.10360, huggingface.co/THUDM/chatglm3-6b): half of each head rotates, in pairs;
fused weights; options with names of their own."""

from __future__ import annotations

from torch import Tensor

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import (
    MEGATRON,
    CheckpointNames,
    Parts,
    split_gate_up,
    split_grouped_qkv,
    split_qkv,
)
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MlpSpec, RotarySpec


def split_query_key_value(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Head by head, unless key heads are shared: then all queries, all keys, all values."""
    is_shared = spec.cached[0].num_kv_heads < spec.cached[0].num_heads
    return (split_qkv if is_shared else split_grouped_qkv)(name, tensor, spec)


class ChatGLMForConditionalGeneration(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
            (r"^transformer\.encoder\.final_layernorm\.", "model.norm."),
            (r"^transformer\.encoder\.", "model."),
            (r"^transformer\.output_layer\.", "lm_head."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
            *MEGATRON,
        ),
        (split_query_key_value, split_gate_up),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        # Ways to compute the same.
        reader.ignore("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion")
        for name, needed in (("rmsnorm", True), ("post_layer_norm", True), ("original_rope", True)):
            if reader.boolean(name, default=needed) != needed:
                raise reader.refuse(name, f"it must be {str(needed).lower()}")
        num_kv_heads = reader.num_heads
        if reader.boolean("multi_query_attention", default=False):
            num_kv_heads = reader.integer("multi_query_group_num", default=1)
        reader.ignore("multi_query_group_num")
        bias = reader.boolean("add_bias_linear", default=False)
        qkv_bias = reader.boolean("add_qkv_bias", default=False) or bias
        theta = 10000.0 * reader.number("rope_ratio", default=1.0)
        rotary = RotarySpec(reader.head_dim // 2, RopeConfig("default", theta), interleaved=True)
        attention = reader.attention(rotary, bias=False, num_kv_heads=num_kv_heads, qkv_bias=qkv_bias, o_bias=bias)
        size = reader.integer("ffn_hidden_size", "intermediate_size")
        return reader.decoder(attention, MlpSpec(size, "silu", up_bias=bias, down_bias=bias), reader.norm(eps=1e-5))
