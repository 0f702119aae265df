"""StableLM (huggingface.co/stabilityai/stablelm-2-1_6b): LayerNorm, partial rotary positions, gated MLP."""

from __future__ import annotations

from vllm.models.checkpoint_names import QK_LAYERNORMS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class StableLmForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(QK_LAYERNORMS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.layer_norm()
        qk_norm = reader.layer_norm(bias=False) if reader.boolean("qk_layernorm", default=False) else None
        attention = reader.attention(
            bias=False,
            qkv_bias=reader.boolean("use_qkv_bias", default=False),
            rotary=reader.rotary(reader.head_dim, partial=0.25, share_names=("partial_rotary_factor", "rope_pct")),
            qk_norm=qk_norm,
            qk_norm_over="norms",
        )
        is_parallel = reader.boolean("use_parallel_residual", default=False)
        return reader.decoder(attention, reader.mlp(bias=False), norm, block="parallel" if is_parallel else "pre")
