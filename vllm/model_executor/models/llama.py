"""Llama, SmolLM2, Mistral: pre-norm blocks, rotary positions, grouped-query attention, gated MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import GatedLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.weight_update import UpdatableModel
from vllm.ops.rms_norm import AddedNorm
from vllm.transformers_utils.config import HFConfig


class LlamaAttention(nn.Module):
    """Self-attention; with `qk_norm` each head's query and key are normalised before they are rotated (Qwen3)."""

    def __init__(
        self, config: HFConfig, rotary: RotaryEmbedding, qkv_bias: bool, o_bias: bool, qk_norm: bool = False
    ) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.head_dim, heads, kv_heads, qkv_bias)
        self.o_proj = RowParallelLinear(heads * self.head_dim, config.hidden_size, o_bias, "o_proj")
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.attn = Attention(self.head_dim, rotary=rotary)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        norm: AddedNorm | None,
    ) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H], or [L, H] for the tokens in `rows`."""
        heads = self.qkv_proj(hidden, norm).view(hidden.shape[0], -1, self.head_dim)
        q, k, v = heads.split(self.qkv_proj.head_counts, dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(self.attn(q, k, v, kv_cache, attn, rows, positions))


class LlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = GatedLinear(hidden, inner, config.mlp_bias, config.hidden_act)
        self.down_proj = RowParallelLinear(inner, hidden, config.mlp_bias, "down_proj")

    def forward(self, x: Tensor, norm: AddedNorm) -> Tensor:
        return self.down_proj(self.gate_up_proj(x, norm))


class LlamaDecoderLayer(nn.Module):
    """One block. Its output and its attention's are added to the residual stream by the next norm, which the following
    product applies: one operation for all three."""

    def __init__(self, config: HFConfig, attention: LlamaAttention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(output not yet added, residual), both [T, H], or [L, H] for the tokens in `rows`."""
        norm = None
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            norm = self.input_layernorm.adding_to(residual)
        hidden = self.self_attn(positions, hidden, kv_cache, attn, rows, norm)
        if rows is not None:
            residual = residual.index_select(0, rows)
        return self.mlp(hidden, self.post_attention_layernorm.adding_to(residual)), residual


class LlamaModel(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, config: HFConfig, attentions: list[LlamaAttention]) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, attention) for attention in attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, ids: Tensor, positions: Tensor, kv_caches: list[KVCache], attn: AttentionMetadata, rows: Tensor | None
    ) -> Tensor:
        hidden = self.embed_tokens(ids)
        residual: Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            layer_rows = rows if index == last else None
            hidden, residual = layer(positions, hidden, residual, kv_caches[index], attn, layer_rows)
        assert residual is not None
        return self.norm.adding_to(residual)(hidden)


class CausalLM(UpdatableModel):
    """A `model`, which gives hidden states, and its `lm_head`."""

    model: Any
    lm_head: ParallelLMHead

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        attn: AttentionMetadata,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states of T tokens, [T, H]; their keys and values are written to the caches.

        Args:
            input_ids: int32 or int64 [T].
            positions: int64 [T].
            kv_caches: key and value cache of each layer.
            attn: the tokens' requests and blocks.
            logits_rows: int64 [L], increasing: tokens whose result is returned, [L, H]; the last block computes no
                others. None = all.
        """
        if logits_rows is not None and logits_rows.shape[0] == input_ids.shape[0]:
            logits_rows = None
        return self.model(input_ids, positions, kv_caches, attn, logits_rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> this rank's logits, float32 [L, V_rank], those of `lm_head.vocab_range`."""
        return self.lm_head(hidden)


class LlamaForCausalLM(CausalLM):
    """The architecture of Llama, SmolLM2 and Mistral; Qwen2 and Qwen3 differ from it in their attention only.
    `max_model_len` is the longest sequence."""

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__()
        rotary = RotaryEmbedding(config.head_dim, max_model_len, config.rope)
        self.model = LlamaModel(config, [self.make_attention(config, rotary) for _ in range(config.num_hidden_layers)])
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied_to)

    @staticmethod
    def make_attention(config: HFConfig, rotary: RotaryEmbedding) -> LlamaAttention:
        """The attention of one block."""
        return LlamaAttention(config, rotary, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
