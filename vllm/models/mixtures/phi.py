"""Phi-3.5-MoE (arXiv:2404.14219): two experts by SparseMixer, LayerNorms."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import BLOCK_SPARSE, CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


def _with_factor(reader: ConfigReader, rope: RopeConfig) -> RopeConfig:
    """With the factor of contexts that are no longer than those of training."""
    params = dict(rope.params)
    short, _ = params.pop("short_mscale", None), params.pop("long_mscale", None)
    if rope.rope_type == "default":
        return RopeConfig(rope.rope_type, rope.theta, params)
    if rope.rope_type != "longrope" or short is None:
        raise reader.refuse("rope_parameters", "the type must be longrope, with short_mscale")
    return RopeConfig(rope.rope_type, rope.theta, params | {"attention_factor": short})


class PhimoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames((*BLOCK_SPARSE, (r"\.mlp\.router\.", ".mlp.gate.")), (split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("input_jitter_noise")
        norm = reader.norm("layer", reader.number("rms_norm_eps", default=1e-5), bias=True)
        rotary = reader.rotary(reader.head_dim, theta=1000000.0, parameters=("short_mscale", "long_mscale"))
        rotary = replace(rotary, rope=_with_factor(reader, rotary.rope))
        layers = reader.windowed(reader.attention(rotary=rotary))
        within = reader.number("router_jitter_noise", default=0.01)
        mixture = reader.mixture(reader.integer("intermediate_size", default=6400), 16, 2, mixes_within=within)
        return reader.decoder(layers, mixture, norm, head_bias=reader.boolean("lm_head_bias", default=False))
