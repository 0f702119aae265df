"""The varlen backend: FlashAttention through torch.nn.attention.varlen, over a paged cache.

The process runs FlashAttention 2 unless another version was activated. Whether pages, and small ones, are accepted
depends on the version, so `trial` tries it on the device. For the arguments see Torch's documentation of `varlen_attn`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from vllm.attention.backend import AttentionMetadata, KVCache, TokenMajorBackend
from vllm.attention.options import AttentionOptions
from vllm.attention.trial import are_close, random_step
from vllm.logger import init_logger
from vllm.ops.paged_attention import paged_attention_reference

logger = init_logger(__name__)

# FlashAttention 2 reads pages in whole tiles of keys.
_FA2_PAGE_TOKENS = 256
# Each newer implementation's module, and the major capability that it is for.
_NEWER = {"FA3": ("flash_attn_interface", 9), "FA4": ("flash_attn.cute", 10)}


class VarlenAttention(TokenMajorBackend):
    """Attention by torch's function, see `find_varlen_attn`. Layers with a window are left to our kernels: a request
    may have no blocks before it, and FlashAttention reads them at the window's edge."""

    name = "varlen"

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self._varlen_attn = varlen_attn

    def _attend(
        self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor | None
    ) -> Tensor:
        k_cache, v_cache = kv_cache
        lengths = attn.query_start_loc, None, attn.max_query_len, attn.max_seq_len
        pages: dict[str, Any] = {"seqused_k": attn.seq_lens, "block_table": attn.block_table}
        # The last query sees the last key, and all before it.
        causal = {"window_size": (-1, 0)}
        grouped = q.shape[1] != k_cache.shape[2]
        scale = options.scale
        got = self._varlen_attn(q, k_cache, v_cache, *lengths, scale=scale, enable_gqa=grouped, **causal, **pages)
        return got if out is None else out.copy_(got)

    def trial(self, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """Attend for one request that decodes and one that continues its prompt; returns the error, None if none."""
        try:
            with torch.inference_mode():
                return _trial(self, device, dtype, head_dim, block_size)
        except Exception as error:  # the caller has another backend, or reports it
            return f"a trial call failed: {error}"


def find_varlen_attn() -> Callable[..., Any] | None:
    """torch's varlen_attn; None where this version has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot be used, as far as is known without running it; None if it may."""
    varlen_attn = find_varlen_attn()
    if device.type != "cuda":
        return f"it runs on CUDA only, and the device is {device.type}"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    parameters = inspect.signature(varlen_attn).parameters
    missing = [name for name in ("seqused_k", "block_table", "enable_gqa", "window_size") if name not in parameters]
    if missing:
        return f"varlen_attn of torch {torch.__version__} has no {', '.join(missing)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention takes bfloat16 and float16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 256:
        return f"FlashAttention takes heads of a multiple of 8 up to 256, and the model's head_dim is {head_dim}"
    return None


def unreadable_pages(block_size: int) -> str | None:
    """Why the active FlashAttention cannot read blocks of this size; None if it may."""
    if block_size % _FA2_PAGE_TOKENS == 0 or _active() is not None:
        return None
    return (
        f"FlashAttention 2 reads pages of a multiple of {_FA2_PAGE_TOKENS} tokens, and block_size is {block_size}; a "
        "later one, which takes any, is not installed for this device or not activated"
    )


def activate_newer(device: torch.device) -> bool:
    """Activate, for the whole process, the FlashAttention for this device that is newer than torch's own, if it is
    installed and none has been activated. Returns whether it has."""
    if device.type != "cuda" or _active() is not None:
        return False
    activate = getattr(attention, "activate_flash_attention_impl", None)
    major = torch.cuda.get_device_capability(device)[0]
    for name, (module, needed) in _NEWER.items():
        if activate is not None and major == needed and _is_installed(module):
            try:
                activate(name)
            except Exception as error:  # another build than torch expects
                logger.warning("%s is installed and cannot be used: %s", name, error)
                return False
            return True
    return False


def deactivate() -> None:
    """Undo `activate_newer`."""
    restore = getattr(attention, "restore_flash_attention_impl", None)
    if restore is not None:
        restore()


def _active() -> str | None:
    """The activated FlashAttention; None for torch's version 2."""
    current = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _trial(
    backend: VarlenAttention, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> str | None:
    q, cache, attn = random_step(backend, device, dtype, 4, 2, head_dim, block_size)
    got = backend.attend(q, cache, attn, AttentionOptions(head_dim**-0.5))
    keys, values = backend._of_operations(cache)
    requests = attn.block_table, attn.query_start_loc, attn.seq_lens
    expected = torch.empty_like(q, dtype=torch.float32)
    paged_attention_reference(q.float(), keys.float(), values.float(), *requests, head_dim**-0.5, expected)
    return None if are_close(got, expected) else "a trial call gave wrong results"
