"""OPT: learned positions, LayerNorm before or after each part of a block, plain MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import Embedding, ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import CausalLM
from vllm.transformers_utils.config import HFConfig

# Row p + 2 of the position table belongs to position p.
_POSITION_OFFSET = 2


class OPTAttention(nn.Module):
    """Self-attention without rotary positions; every head has its own key and value."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        heads, self.head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, heads, heads, config.enable_bias)
        self.out_proj = RowParallelLinear(config.hidden_size, config.hidden_size, config.enable_bias, "out_proj")
        self.attn = Attention(self.head_dim)

    def forward(self, hidden: Tensor, kv_cache: KVCache, attn: AttentionMetadata, rows: Tensor | None) -> Tensor:
        """[T, H] -> [T, H], or [L, H] for the tokens in `rows`."""
        heads = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        q, k, v = heads.split(self.qkv_proj.head_counts, dim=1)
        return self.out_proj(self.attn(q, k, v, kv_cache, attn, rows))


class OPTDecoderLayer(nn.Module):
    """One block, normalised before its parts, or, in the 350m model, after them."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        hidden, affine = config.hidden_size, config.layer_norm_elementwise_affine
        self.norm_before = config.do_layer_norm_before
        self.self_attn = OPTAttention(config)
        self.self_attn_layer_norm = LayerNorm(hidden, affine)
        self.fc1 = ColumnParallelLinear(hidden, config.intermediate_size, config.enable_bias, "fc1")
        self.fc2 = RowParallelLinear(config.intermediate_size, hidden, config.enable_bias, "fc2")
        self.final_layer_norm = LayerNorm(hidden, affine)
        self.act_fn = get_act_fn(config.hidden_act)

    def forward(self, hidden: Tensor, kv_cache: KVCache, attn: AttentionMetadata, rows: Tensor | None) -> Tensor:
        """[T, H] -> [T, H], or [L, H] for the tokens in `rows`."""
        normed = self.self_attn_layer_norm(hidden) if self.norm_before else hidden
        attended = self.self_attn(normed, kv_cache, attn, rows)
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        hidden = hidden + attended
        if self.norm_before:
            return hidden + self.fc2(self.act_fn(self.fc1(self.final_layer_norm(hidden))))
        hidden = self.self_attn_layer_norm(hidden)
        return self.final_layer_norm(hidden + self.fc2(self.act_fn(self.fc1(hidden))))


class OPTDecoder(nn.Module):
    """Embeddings, blocks, final norm."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        hidden, embed = config.hidden_size, config.word_embed_proj_dim
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, embed)
        self.embed_positions = Embedding(config.max_position_embeddings + _POSITION_OFFSET, hidden)
        self.project_in: ReplicatedLinear | None = None
        self.project_out: ReplicatedLinear | None = None
        if embed != hidden:
            self.project_in = ReplicatedLinear(embed, hidden, False, "project_in")
            self.project_out = ReplicatedLinear(hidden, embed, False, "project_out")
        self.layers = nn.ModuleList(OPTDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm: LayerNorm | None = None
        if config.do_layer_norm_before and not config.remove_final_layer_norm:
            self.final_layer_norm = LayerNorm(hidden, config.layer_norm_elementwise_affine)

    def forward(
        self, ids: Tensor, positions: Tensor, kv_caches: list[KVCache], attn: AttentionMetadata, rows: Tensor | None
    ) -> Tensor:
        hidden = self.embed_tokens(ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.embed_positions(positions + _POSITION_OFFSET)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, kv_caches[index], attn, rows if index == last else None)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


class OPTModel(nn.Module):
    """Holds the decoder under the name that checkpoints use."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config)

    def forward(self, *step: Any) -> Tensor:
        return self.decoder(*step)


class OPTForCausalLM(CausalLM):
    """OPT with its head. ValueError if `max_model_len`, the longest sequence, exceeds the learned positions."""

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__()
        if max_model_len > config.max_position_embeddings:
            limit = f"max_position_embeddings={config.max_position_embeddings}"
            raise ValueError(
                f"max_model_len must be at most the number of learned positions, {limit}; got {max_model_len}"
            )
        self.model = OPTModel(config)
        tied_to = self.model.decoder.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.word_embed_proj_dim, tied_to)
