"""Phi-1, Phi-1.5 and Phi-2 (arXiv:2306.11644): attention and MLP of one norm in parallel, partial rotary positions."""

from __future__ import annotations

from vllm.models.checkpoint_names import MEGATRON, QK_LAYERNORMS, TWO_LAYERS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class PhiForCausalLM(DecoderForCausalLM):
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
