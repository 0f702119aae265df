"""GPT-BigCode, SantaCoder and StarCoder (arXiv:2301.03988): GPT-2 with one key/value head for all queries."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES, attention_scales
from vllm.models.spec import DecoderSpec, PositionSpec


class GPTBigCodeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(GPT2_RENAMES, (split_grouped_qkv,), GPT2_MASKS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        kv_heads = 1 if reader.boolean("multi_query", default=True) else reader.num_heads
        attention = reader.attention(rotary=False, bias=True, num_kv_heads=kv_heads)
        num_positions = reader.integer("n_positions", "max_position_embeddings", default=1024)
        return reader.decoder(
            [replace(attention, scale=scale) for scale in attention_scales(reader)],
            reader.mlp("gelu_pytorch_tanh", bias=True, gated=False, size=4 * reader.hidden_size),
            reader.layer_norm(),
            tied=True,
            max_positions=num_positions,
            positions=PositionSpec("learned", num_positions),
        )
