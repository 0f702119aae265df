"""Falcon (arXiv:2311.16867), with its older and newer decoder; the RW models have ALiBi."""

from __future__ import annotations

from vllm.models.alibi import bfloat16_slopes
from vllm.models.checkpoint_names import MEGATRON, CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import Block, DecoderSpec, RotarySpec


class FalconForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^transformer\.", ""),
            (r"^h\.", "model.layers."),
            (r"^word_embeddings\.", "model.embed_tokens."),
            (r"^ln_f\.", "model.norm."),
            (r"\.ln_attn\.", ".input_layernorm."),
            (r"\.ln_mlp\.", ".post_attention_layernorm."),
            *MEGATRON,
        ),
        (split_grouped_qkv,),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        is_new = reader.boolean("new_decoder_architecture", default=reader.config.model_type == "RefinedWeb")
        num_kv_heads = reader.integer("num_kv_heads", "n_head_kv", default=reader.num_heads)
        is_multi_query = reader.boolean("multi_query", default=True)
        if not is_new:
            num_kv_heads = 1 if is_multi_query else reader.num_heads
        reader.ignore("ff_factor")  # ffn_hidden_size counts
        num_norms = reader.integer("num_ln_in_parallel_attn", default=2 if is_new else 1)
        is_parallel = reader.boolean("parallel_attn", default=True) or is_new
        block: Block = "pre"
        if is_parallel:
            block = "parallel_two" if is_new and num_norms == 2 else "parallel"
        bias = reader.boolean("bias", default=False)
        rotary: RotarySpec | bool = False
        alibi = None
        if reader.boolean("alibi", default=False):
            reader.ignore("rope_theta", "rope_scaling", "rope_parameters")
            # The bias is added before the scores are scaled.
            alibi = tuple(slope * reader.head_dim**-0.5 for slope in bfloat16_slopes(reader.num_heads))
        else:
            rotary = reader.rotary(reader.head_dim)
        return reader.decoder(
            reader.attention(rotary=rotary, bias=bias, num_kv_heads=num_kv_heads, alibi_slopes=alibi),
            reader.mlp("gelu", bias, gated=False, size=4 * reader.hidden_size),
            reader.layer_norm(),
            tied=True,
            block=block,
            max_positions=reader.integer("max_position_embeddings", default=2048),
        )
