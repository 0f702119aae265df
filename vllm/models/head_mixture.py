"""A mixture of attention heads, as its HeadMixtureSpec says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.layers.attention import Attention, AttentionOptions
from vllm.layers.linear import RowParallelLinear, StackedLinear
from vllm.layers.router import Router
from vllm.models.attention import RotaryTables
from vllm.models.spec import HeadMixtureSpec
from vllm.ops.choose_experts import choose_experts
from vllm.ops.rms_norm import AddedNorm


class HeadMixture(nn.Module):
    """Self-attention with queries and outputs of the experts that each token takes.

    Both projections are one product over all experts, with those of one key head side by side, so that ranks share
    them by key heads: queries of others are dropped, and what others would project is 0. Checkpoints' names give their
    rows and columns in that order.
    """

    def __init__(self, spec: HeadMixtureSpec, hidden_size: int, tables: RotaryTables) -> None:
        super().__init__()
        self.choice, self.num_experts, self.head_dim = spec.choice, spec.num_experts, spec.head_dim
        self.gate = Router(hidden_size, spec.num_experts, False, "gate")
        width = spec.num_kv_heads * spec.head_dim
        sizes = {"q_proj": spec.num_experts * width, "k_proj": width, "v_proj": width}
        self.qkv_proj = StackedLinear(hidden_size, sizes, spec.qkv_bias)
        self.o_proj = RowParallelLinear(spec.num_experts * width, hidden_size, spec.o_bias, "o_proj")
        self.num_kv_heads = len(self.qkv_proj.parts["k_proj"].held) // spec.head_dim
        rotary = None if spec.rotary is None else tables.get(spec.rotary)
        options = AttentionOptions(spec.scale)
        self.attn = Attention(spec.head_dim, rotary=rotary, options=options, num_kv_heads=self.num_kv_heads)

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
        if norm is not None:
            hidden = norm(hidden)
        ids, weights = choose_experts(self.gate(hidden), self.choice)
        heads = self.qkv_proj(hidden).unflatten(1, (-1, self.head_dim))
        q, k, v = heads.split((self.num_kv_heads * self.num_experts, self.num_kv_heads, self.num_kv_heads), dim=1)
        # [T, Hkv, K, D]
        of_heads = ids.long()[:, None, :, None].expand(-1, self.num_kv_heads, -1, self.head_dim)
        chosen = q.unflatten(1, (self.num_kv_heads, self.num_experts)).gather(2, of_heads)
        out = self.attn(chosen.flatten(1, 2), k, v, kv_cache, attn, rows, positions)
        if rows is not None:
            of_heads, weights = of_heads.index_select(0, rows), weights.index_select(0, rows)
        weighed = (out.view(of_heads.shape) * weights[:, None, :, None]).to(out.dtype)
        spread = torch.zeros_like(weighed[:, :, :1]).repeat(1, 1, self.num_experts, 1)
        return self.o_proj(spread.scatter_(2, of_heads, weighed).flatten(1))
