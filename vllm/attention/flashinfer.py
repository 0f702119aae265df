"""The FlashInfer backend. Its plan, once a step, reads lengths and block tables on the host: the step waits for the
device before its first layer, and cannot be captured in a CUDA graph."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata, KVCache, TokenMajorBackend
from vllm.attention.options import AttentionOptions

# What FlashInfer's documentation recommends.
_WORKSPACE_BYTES = 128 * 2**20
_HEAD_DIMS = (64, 128, 256)


class FlashInferAttention(TokenMajorBackend):
    """Attention by FlashInfer's wrappers for paged caches; their workspace is on `device`."""

    name = "flashinfer"
    options = frozenset({"window", "softcap"})
    can_be_captured = False

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        # The planned step, by identity, and what else a plan depends on.
        self._step: AttentionMetadata | None = None
        self._plan_key: tuple = ()

    def _attend(
        self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor | None
    ) -> Tensor:
        wrapper = self._decode if attn.max_query_len == 1 else self._prefill
        key = (q.shape[1], kv_cache[0].shape, q.dtype, options.scale, options.window, options.softcap)
        if self._step is not attn or self._plan_key != key:
            self._plan(wrapper, q, kv_cache[0], attn, options)
            self._step, self._plan_key = attn, key
        got = wrapper.run(q.contiguous(), kv_cache)
        return got if out is None else out.copy_(got)

    def _plan(
        self, wrapper: Any, q: Tensor, k_cache: Tensor, attn: AttentionMetadata, options: AttentionOptions
    ) -> None:
        block_size, kv_heads, head_dim = k_cache.shape[1:]
        num_blocks = (attn.seq_lens + block_size - 1) // block_size
        column = torch.arange(attn.block_table.shape[1], device=q.device)
        indptr = torch.zeros(len(num_blocks) + 1, dtype=torch.int32, device=q.device)
        indptr[1:] = num_blocks.cumsum(0)
        used, in_last = attn.block_table[column < num_blocks[:, None]], (attn.seq_lens - 1) % block_size + 1
        pages = indptr, used, in_last, q.shape[1], kv_heads, head_dim, block_size
        model: dict[str, Any] = {"sm_scale": options.scale, "q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
        if options.window is not None:
            model["window_left"] = options.window - 1  # tokens before the query
        if options.softcap is not None:
            model["logits_soft_cap"] = options.softcap
        if wrapper is self._decode:
            wrapper.plan(*pages, **model)
        else:
            wrapper.plan(attn.query_start_loc, *pages, causal=True, **model)


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot be used; None if it can. It takes every block size."""
    if device.type != "cuda":
        return f"it runs on CUDA only, and the device is {device.type}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        sizes = ", ".join(map(str, _HEAD_DIMS))
        return f"it takes heads of {sizes}, and the model's head_dim is {head_dim}"
    return None
