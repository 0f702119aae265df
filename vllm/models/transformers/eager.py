"""Rounding wherever transformers does: its own modules and eager attention, PyTorch's products."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.layers.linear_method import LinearMethod
from vllm.models.transformers.layers import PagedLayer
from vllm.ops.kv_cache import cache_rows
from vllm.ops.packed_linear import PackedLinear, take_packed_rows
from vllm.ops.rms_norm import AddedNorm

# A vector holds so many float32 numbers: PyTorch adds those of a softmax that fill none in another order.
_VECTOR = 16
# PyTorch adds in another order in products of a single row, or of few numbers, which a trainer's forward has none of.
FEWEST_ROWS = 16
"""Products get so many rows, or more."""


def _pack(weight: Tensor, bias: Tensor | None, float_out: bool = False, gated: bool = False) -> PackedLinear:
    return PackedLinear(weight, bias, "plain", (weight.shape[0], weight.shape[1]))


def _apply(x: Tensor, packed: PackedLinear, float_out: bool = False, norm: AddedNorm | None = None) -> Tensor:
    """In x's dtype, logits too."""
    x = x if norm is None else norm(x)
    count = x.shape[0]
    if 0 < count < FEWEST_ROWS:
        x = torch.cat((x, x[-1:].expand(FEWEST_ROWS - count, -1)))
    return F.linear(x, packed.weight, packed.bias)[:count]


PRODUCTS = LinearMethod(_pack, _apply, take_packed_rows)
"""PyTorch's own, rounded to the activations' dtype."""


def eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The eager attention of the file that a module's class is in. ValueError: there is none."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(f"rounding needs an eager_attention_forward, which the file of {type(module).__name__} lacks")
    return function


class EagerLayer(PagedLayer):
    """A layer whose attention is transformers', request by request, over the keys and values in the paged cache."""

    is_eager = True

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
        """[1, Hq, T, Dk], [1, Hkv, T, Dk] and [1, Hkv, T, Dv] -> [1, T, Hq, Dv]. `arguments`: what `module` gives its
        attention beside them and a mask."""
        attn = self.step.attn
        assert attn is not None
        if self.attn.kv_group:
            attn = attn.groups[self.attn.kv_group - 1]
        kv_cache = self.step.kv_caches[self.index]
        # In the cache's dtype, which may be the wider one: no value changes.
        k, v = (F.pad(x[0].transpose(0, 1), (0, self.width - x.shape[-1])).to(kv_cache[0].dtype) for x in (key, value))
        self.attn.backend.write_kv(k, v, kv_cache, attn, self.attn.options)
        keys, values = cache_rows(*kv_cache, self.width)
        function, starts, out = eager_attention(module), attn.query_start_loc.tolist(), []
        for row, seq_len in enumerate(attn.seq_lens.tolist()):
            own = query[:, :, starts[row] : starts[row + 1]]
            count = own.shape[2]
            first = 0 if self.call.window is None else max(seq_len - count - self.call.window + 1, 0)
            blocks = attn.block_table[row]
            seen_keys = _gather(keys, blocks, first, seq_len)[..., : self.call.key_dim]
            seen_values = _gather(values, blocks, first, seq_len)[..., : self.call.value_dim]
            mask = _mask(count, seq_len, self.call.window, query.dtype)
            if count < FEWEST_ROWS:
                # More of the last one's.
                more = -1, -1, FEWEST_ROWS - count, -1
                own = torch.cat((own, own[:, :, -1:].expand(*more)), dim=2)
                mask = torch.cat((mask, mask[:, :, -1:].expand(*more)), dim=2)
            attended, _ = function(module, own, seen_keys, seen_values, mask, **arguments)
            out.append(attended[:, :count])
        return torch.cat(out, dim=1)


def _gather(rows: Tensor, blocks: Tensor, first: int, seq_len: int) -> Tensor:
    """[1, Hkv, S, D] of the tokens from `first` on, in their places: sums are added in the order of places. What is
    before them, maybe another request's by now, is zeros, and so is what fills up a last vector of sums."""
    block_size = rows.shape[2]
    skipped = first // block_size
    found = rows[blocks[skipped : -(-seq_len // block_size)]].transpose(0, 1).flatten(1, 2)
    found = found[:, first - skipped * block_size : seq_len - skipped * block_size]
    return F.pad(found, (0, 0, first, -seq_len % _VECTOR))[None]


def _mask(count: int, seq_len: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[1, 1, count, S] of the last `count` queries: 0, and the dtype's least number for what one does not see."""
    filled = seq_len + -seq_len % _VECTOR
    distance = torch.arange(seq_len - count, seq_len)[:, None] - torch.arange(filled)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    zeros = torch.zeros(1, 1, count, filled, dtype=dtype)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)
