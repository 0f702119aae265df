"""Qwen2: Llama with a bias on the query, key and value projections."""

from __future__ import annotations

from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM
from vllm.transformers_utils.config import HFConfig


class Qwen2ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def make_attention(config: HFConfig, rotary: RotaryEmbedding) -> LlamaAttention:
        return LlamaAttention(config, rotary, qkv_bias=True, o_bias=False)
