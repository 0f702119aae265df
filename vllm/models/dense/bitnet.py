"""BitNet b1.58 (arXiv:2402.17764), with unpacked weights: Llama with norms before the output projections and squared
ReLU."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class BitNetForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(((r"\.attn_sub_norm\.", ".sub_norm."), (r"\.ffn_sub_norm\.", ".sub_norm.")))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(rotary=reader.rotary(reader.head_dim, theta=500000.0), output_norm=norm)
        return reader.decoder(attention, reader.mlp("relu2", bias=False, inner_norm=norm), norm)
