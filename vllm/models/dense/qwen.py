"""Qwen: Llama with biases or with norms of heads."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.prediction_layers import MIMO
from vllm.models.spec import DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen1.5, Qwen2 and Qwen2.5 (arXiv:2407.10671): a bias on queries, keys and values."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(bias=False, qkv_bias=True)
        return reader.decoder(reader.windowed(attention, switch="use_sliding_window"), reader.mlp(), reader.norm())


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo (arXiv:2505.07608): Qwen2's, with a prediction layer."""

    names = CheckpointNames(ignored=r"model\.mtp_layers\..*")
    prediction = MIMO

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_nextn_predict_layers")
        reader.only("attention_bias", True)
        return super().describe(reader)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3 (arXiv:2505.09388): each head's query and key is normalised before it is rotated."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.integer("head_dim", default=128)
        attention = reader.attention(head_dim=head_dim, qk_norm=reader.norm())
        return reader.decoder(reader.windowed(attention, switch="use_sliding_window"), reader.mlp(), reader.norm())
