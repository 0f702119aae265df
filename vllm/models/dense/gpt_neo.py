"""GPT-Neo (github.com/EleutherAI/gpt-neo): GPT-2 whose scores are not scaled, with windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES, describe
from vllm.models.spec import DecoderSpec


class GPTNeoForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.attention\.([qkv]_proj)\.", r".self_attn.\1."),
            *GPT2_RENAMES,
        ),
        ignored=GPT2_MASKS,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        kinds = [kind for cycle, count in reader.get("attention_types") or () for kind in cycle * count]
        kinds = reader.get("attention_layers", default=kinds)
        if len(kinds) != reader.num_layers or set(kinds) - {"global", "local"}:
            raise reader.refuse("attention_types", f"they must name global or local for {reader.num_layers} layers")
        window = reader.integer("window_size", default=256)
        attention = reader.attention(rotary=False, bias=False, o_bias=True, scale=1.0)
        layers = [replace(attention, window=window if kind == "local" else None) for kind in kinds]
        return describe(reader, layers, default_positions=None)
