"""SmolLM3 (huggingface.co/HuggingFaceTB/SmolLM3-3B): Llama without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class SmolLM3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        interval = reader.integer("no_rope_layer_interval", default=4)
        # 1 for a layer with positions.
        flags = reader.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(reader.num_layers)]
        if not isinstance(flags, list) or len(flags) != reader.num_layers:
            raise reader.refuse("no_rope_layers", f"it must have {reader.num_layers} numbers, 0 or 1")
        rotary = reader.rotary(reader.head_dim, theta=2000000.0)
        kinds = ["full_attention" if flag else "sliding_attention" for flag in flags]
        layers = reader.windowed(reader.attention(rotary=rotary), switch="use_sliding_window", default_kinds=kinds)
        layers = tuple(
            layer if flag else replace(layer, rotary=None) for layer, flag in zip(layers, flags, strict=True)
        )
        return reader.decoder(layers, reader.mlp(), reader.norm(), tied=True)
