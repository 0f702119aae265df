"""Jamba (arXiv:2403.19887): Mamba in most layers, attention without positions in the others, and some mixtures."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.weights import MAMBA_RENAMES, split_mamba
from vllm.models.spec import AnyMixer, DecoderSpec
from vllm.models.states.specs import MambaSpec

_RENAMES = (
    *MAMBA_RENAMES,
    (r"\.feed_forward\.router\.", ".mlp.gate."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.final_layernorm\.", ".norm."),
)


class JambaForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_mamba, split_experts()))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
        reader.ignore("layer_types", "layers_block_type", "layers_num_experts")
        reader.only("hidden_act", "silu")
        reader.only("mamba_inner_layernorms", True)
        attention = reader.attention(rotary=False, bias=False)
        rank = reader.get("mamba_dt_rank", default="auto")
        mamba = MambaSpec(
            reader.integer("mamba_expand", default=2) * reader.hidden_size,
            reader.integer("mamba_d_state", default=16),
            -(-reader.hidden_size // 16) if rank == "auto" else reader.integer("mamba_dt_rank"),
            reader.integer("mamba_d_conv", default=4),
            reader.norm(),
            conv_bias=reader.boolean("mamba_conv_bias", default=True),
            bias=reader.boolean("mamba_proj_bias", default=False),
        )
        every, first = _every(reader, "attn_layer", 8, 4)
        is_attention = [index % every == first for index in range(reader.num_layers)]
        layers: list[AnyMixer] = [attention if own else mamba for own in is_attention]
        mlp = reader.mlp(bias=False, size=14336)
        if reader.integer("num_experts", default=16) == 1:
            reader.ignore("num_experts_per_tok", "expert_layer_period", "expert_layer_offset")
            return reader.decoder(layers, mlp, reader.norm())
        every, first = _every(reader, "expert_layer", 2, 1)
        mixture = reader.mixture(mlp.intermediate_size, 16, 2)
        mlps = [mixture if index % every == first else mlp for index in range(reader.num_layers)]
        return reader.decoder(layers, mlps, reader.norm())


def _every(reader: ConfigReader, name: str, period: int, offset: int) -> tuple[int, int]:
    """(period, offset): of each `period` layers the one at `offset` is different."""
    return reader.integer(f"{name}_period", default=period), reader.count(f"{name}_offset", default=offset)
