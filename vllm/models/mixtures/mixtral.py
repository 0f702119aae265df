"""Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from vllm.models.checkpoint_names import BLOCK_SPARSE, CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class MixtralForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(BLOCK_SPARSE, (split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("router_jitter_noise")
        rotary = reader.rotary(reader.head_dim, theta=1000000.0)
        layers = reader.windowed(reader.attention(bias=False, rotary=rotary))
        mixture = reader.mixture(reader.integer("intermediate_size", default=14336), 8, 2, renormalised=True)
        return reader.decoder(layers, mixture, reader.norm(eps=1e-5))
