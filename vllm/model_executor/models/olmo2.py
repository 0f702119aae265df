"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms of what attention and MLP give, and of all queries and keys together;
OLMo 3 has windows."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vllm.model_executor.models.checkpoint_names import CheckpointNames
from vllm.model_executor.models.config_reader import ConfigReader
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.spec import DecoderSpec


class Olmo2ForCausalLM(DecoderForCausalLM):
    rotates_alike: ClassVar[bool] = True
    names = CheckpointNames(
        (
            (r"\.post_attention_layernorm\.", ".attention_output_norm."),
            (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(rotary=cls.rotates_alike, qk_norm=norm, qk_norm_over="width")
        return reader.decoder(attention, reader.mlp(bias=False), norm, block="output")


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Layers of each kind rotate by options of their own."""

    rotates_alike = False

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        spec = super().describe(reader)
        kinds = ["full_attention" if index % 4 == 3 else "sliding_attention" for index in range(reader.num_layers)]
        return replace(spec, layers=reader.by_kind(spec.layers[0], kinds, default_window=4096))
