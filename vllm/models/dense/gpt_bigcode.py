"""GPT-BigCode, SantaCoder and StarCoder (arXiv:2301.03988): GPT-2 with one key/value head for all queries."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES, describe, scaled_layers
from vllm.models.spec import DecoderSpec


class GPTBigCodeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(GPT2_RENAMES, (split_grouped_qkv,), GPT2_MASKS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        kv_heads = 1 if reader.boolean("multi_query", default=True) else reader.num_heads
        attention = reader.attention(rotary=False, bias=True, num_kv_heads=kv_heads)
        return describe(reader, scaled_layers(reader, attention), "gelu_pytorch_tanh")
