"""EXAONE 4 (arXiv:2507.11407): norms of what attention and MLP give and of heads; where some layers have a window, the
others have no positions."""

from __future__ import annotations

from vllm.models.checkpoint_names import OUTPUT_NORMS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AttentionSpec, DecoderSpec, NormSpec, rotating_in_windows


def exaone_layers(reader: ConfigReader, norm: NormSpec) -> tuple[AttentionSpec, ...]:
    """The attention of each layer."""
    attention = reader.attention(bias=False, qk_norm=norm)
    pattern = reader.get("sliding_window_pattern", default=4) or 1
    if isinstance(pattern, str):
        # "LLLG": local and global layers.
        kind_of = {True: "sliding_attention", False: "full_attention"}
        kinds = [kind_of[pattern[index % len(pattern)] == "L"] for index in range(reader.num_layers)]
    else:
        kinds = reader.every_nth_full(pattern)
    layers = reader.windowed(attention, default_window=4096, default_kinds=kinds)
    if reader.config.raw.get("sliding_window", 4096) is not None:
        layers = rotating_in_windows(layers)
    return layers


class Exaone4ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(OUTPUT_NORMS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        return reader.decoder(exaone_layers(reader, norm), reader.mlp(bias=False), norm, block="output")
