"""Phi: attention and MLP in parallel, or Llama with fused weights."""

from __future__ import annotations

from vllm.models.checkpoint_names import MEGATRON, QK_LAYERNORMS, TWO_LAYERS, CheckpointNames, split_gate_up, split_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class PhiForCausalLM(DecoderForCausalLM):
    """Phi-1, Phi-1.5 and Phi-2 (arXiv:2306.11644): attention and MLP of one norm in parallel, partial rotary
    positions."""

    names = CheckpointNames((*MEGATRON, *QK_LAYERNORMS, *TWO_LAYERS, (r"^(model\.)?final_layernorm\.", "model.norm.")))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.layer_norm()
        qk_norm = norm if reader.boolean("qk_layernorm", default=False) else None
        rotary = reader.rotary(reader.head_dim, partial=0.5)
        return reader.decoder(
            reader.attention(bias=True, rotary=rotary, qk_norm=qk_norm),
            reader.mlp("gelu_new", bias=True, gated=False),
            norm,
            block="parallel",
            head_bias=True,
        )


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3, Phi-3.5 and Phi-4 (arXiv:2404.14219): Llama with fused weights, LongRoPE and, in some, a window."""

    names = CheckpointNames(transforms=(split_qkv, split_gate_up))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        rotary = reader.rotary(reader.head_dim, partial=1.0)
        if rotary.rope.rope_type == "longrope":
            reader.need("original_max_position_embeddings")
        attention = reader.windowed(reader.attention(bias=False, rotary=rotary))
        return reader.decoder(attention, reader.mlp(bias=False), reader.norm(eps=1e-5))
