"""OLMoE (arXiv:2409.02060) and FlexOlmo (arXiv:2507.07024): norms over the whole width of queries and keys; the latter
with norms after attention and mixture."""

from __future__ import annotations

from vllm.models.checkpoint_names import OUTPUT_NORMS, CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MoeSpec


def _mixture(reader: ConfigReader, size: int, experts: int, chosen: int) -> MoeSpec:
    renormalised = reader.boolean("norm_topk_prob", default=False)
    return reader.mixture(reader.integer("intermediate_size", default=size), experts, chosen, renormalised=renormalised)


class OlmoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(transforms=(split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(
            qk_norm=norm, qk_norm_over="width", clip=reader.optional_number("clip_qkv"), clip_after_norm=True
        )
        return reader.decoder(attention, _mixture(reader, 2048, 64, 8), norm)


class FlexOlmoForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(OUTPUT_NORMS, (split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm()
        rotary = reader.rotary(reader.head_dim, theta=500000.0)
        attention = reader.attention(rotary=rotary, qk_norm=norm, qk_norm_over="width")
        return reader.decoder(attention, _mixture(reader, 11008, 7, 5), norm, block="output")
