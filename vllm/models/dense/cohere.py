"""Command R (huggingface.co/CohereForAI/c4ai-command-r-v01) and Command R7B: attention and MLP in parallel, interleaved
rotary positions, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, rotating_in_windows


class CohereForCausalLM(DecoderForCausalLM):
    rope_theta: ClassVar[float] = 500000.0

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.layer_norm(bias=False)
        qk_norm = norm if reader.boolean("use_qk_norm", default=False) else None
        rotary = reader.rotary(reader.head_dim, interleaved=True, theta=cls.rope_theta)
        return reader.decoder(
            reader.attention(rotary=rotary, qk_norm=qk_norm, qk_norm_over="heads"),
            reader.mlp(bias=False),
            norm,
            tied=True,
            block="parallel",
            max_positions=reader.integer("model_max_length", "max_position_embeddings"),
            logits_scale=reader.number("logit_scale", default=0.0625),
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Layers with a window have rotary positions, the others none."""

    rope_theta = 10000.0

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        spec = super().describe(reader)
        reader.ignore("order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing")
        reader.ignore("use_gated_activation", "use_parallel_block", "use_parallel_embedding")
        pattern = reader.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
        reader.only("layer_switch", pattern)
        kinds = reader.every_nth_full(pattern)
        layers = reader.windowed(spec.attentions[0], default_window=4096, default_kinds=kinds)
        return replace(spec, layers=rotating_in_windows(layers))
