"""Phi-3, Phi-3.5 and Phi-4 (arXiv:2404.14219): Llama with fused weights, LongRoPE and, in some, a window."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_gate_up, split_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Phi3ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(transforms=(split_qkv, split_gate_up))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        rotary = reader.rotary(reader.head_dim, partial=1.0)
        if rotary.rope.rope_type == "longrope":
            reader.need("original_max_position_embeddings")
        attention = reader.windowed(reader.attention(bias=False, rotary=rotary))
        return reader.decoder(attention, reader.mlp(bias=False), reader.norm(eps=1e-5))
