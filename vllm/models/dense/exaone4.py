"""EXAONE 4 (arXiv:2507.11407): norms of what attention and MLP give and of heads; where some layers have a window, the
others have no positions."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Exaone4ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.post_attention_layernorm\.", ".attention_output_norm."),
            (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(bias=False, qk_norm=norm)
        pattern = reader.get("sliding_window_pattern", default=4) or 1
        if isinstance(pattern, str):
            # "LLLG": local and global layers.
            is_local = [pattern[index % len(pattern)] == "L" for index in range(reader.num_layers)]
        else:
            is_local = [(index + 1) % pattern != 0 for index in range(reader.num_layers)]
        kinds = ["sliding_attention" if local else "full_attention" for local in is_local]
        layers = reader.windowed(attention, default_window=4096, default_kinds=kinds)
        if reader.config.raw.get("sliding_window", 4096) is not None:
            layers = tuple(layer if layer.window else replace(layer, rotary=None) for layer in layers)
        return reader.decoder(layers, reader.mlp(bias=False), norm, block="output")
