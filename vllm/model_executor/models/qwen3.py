"""Qwen3: Llama with each head's query and key normalised before they are rotated."""

from __future__ import annotations

from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM
from vllm.transformers_utils.config import HFConfig


class Qwen3ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def make_attention(config: HFConfig, rotary: RotaryEmbedding) -> LlamaAttention:
        bias = config.attention_bias
        return LlamaAttention(config, rotary, qkv_bias=bias, o_bias=bias, qk_norm=True)
