"""GPT-J (github.com/kingoflolz/mesh-transformer-jax): attention and MLP of one norm in parallel, interleaved rotary
positions."""

from __future__ import annotations

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES
from vllm.models.spec import DecoderSpec, RotarySpec


class GPTJForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            *GPT2_RENAMES,
            (r"\.attn\.([qkv]_proj)\.", r".self_attn.\1."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        ignored=GPT2_MASKS,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("rotary", "scale_attn_weights")
        rotary = RotarySpec(reader.integer("rotary_dim", default=reader.head_dim), RopeConfig(), interleaved=True)
        return reader.decoder(
            reader.attention(bias=False, rotary=rotary),
            reader.mlp("gelu_new", bias=True, gated=False, size=4 * reader.hidden_size),
            reader.layer_norm(),
            block="parallel",
            head_bias=True,
        )
