"""The choice of an engine's attention backend."""

from __future__ import annotations

from typing import Any

import torch

from vllm import envs
from vllm.attention import flashinfer, varlen
from vllm.attention.backend import AttentionBackend, PagedAttention
from vllm.attention.flashinfer import FlashInferAttention
from vllm.attention.varlen import VarlenAttention
from vllm.config import ATTENTION_BACKENDS
from vllm.logger import init_logger, warn_once
from vllm.ops.kv_cache import FLOAT8

logger = init_logger(__name__)

_ALIASES = {"flash_attn": "varlen", "flashinfer": "flashinfer", "triton_attn": "paged"}


def backend_name(given: Any, device: str) -> str:
    """The backend that an `attention_backend` or, where that is "auto", VLLM_ATTENTION_BACKEND names; of another
    engine's, with a warning, ours that is nearest to it."""
    name, asked = str(getattr(given, "name", given)).lower(), "attention_backend"
    if name == "auto":
        given, asked = envs.attention_backend() or name, "VLLM_ATTENTION_BACKEND"
        name = given.lower()
    if name in ATTENTION_BACKENDS:
        return name
    chosen = _ALIASES.get(name, "auto") if device == "cuda" else "auto"
    warn_once(logger, "%s=%s is another engine's: taken as %s", asked, given, chosen)
    return chosen


def select_backend(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The backend of an `attention_backend`: "auto" (varlen on a CUDA device where a trial call of it works, with the
    newest FlashAttention that is installed for it; else paged), "paged", "varlen" or "flashinfer". `dtype` is that of
    activations, and of the cache unless `kv_dtype` is another; `block_size` the tokens of a KV block. ValueError if the
    backend named cannot be used here, with the reason."""
    device = torch.device(device)
    if name == "auto" and (kv_dtype in FLOAT8 or envs.batch_invariant()):
        name = "paged"
    activated = name in ("auto", "varlen") and varlen.activate_newer(device)
    if name != "auto":
        check_backend(name, device, dtype, head_dim, kv_dtype)
    if name == "flashinfer":
        return FlashInferAttention(device)
    if name == "varlen" or (name == "auto" and device.type == "cuda"):
        backend, reason = _try_varlen(device, dtype, head_dim, block_size)
        if backend is not None:
            return backend
        if name == "varlen":
            raise _unusable(name, reason)
        if activated:
            varlen.deactivate()
        logger.debug("Attention runs on our own kernels, not on varlen_attn: %s", reason)
    return PagedAttention(device)


def check_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None
) -> None:
    """Refuse a backend that does not exist or cannot be used, as far as is known without running it: a ValueError that
    says why. Arguments: `select_backend`."""
    if name in ("auto", "paged"):
        return
    unsupported = {"varlen": varlen.unsupported, "flashinfer": flashinfer.unsupported}.get(name)
    if unsupported is None:
        raise ValueError(f"attention_backend must be one of auto, paged, varlen, flashinfer, got {name!r}")
    reason = unsupported(torch.device(device), dtype, head_dim)
    if reason is None and envs.batch_invariant():
        reason = "VLLM_BATCH_INVARIANT=1 needs attention_backend='paged', whose sums do not depend on the batch"
    if reason is None and kv_dtype in FLOAT8:
        reason = "its KV cache has the model's dtype; kv_cache_dtype='fp8' needs attention_backend='paged'"
    if reason is not None:
        raise _unusable(name, reason)


def _try_varlen(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[VarlenAttention | None, str]:
    varlen_attn = varlen.find_varlen_attn()
    reason = varlen.unsupported(device, dtype, head_dim) or varlen.unreadable_pages(block_size)
    if reason is not None or varlen_attn is None:
        return None, reason or ""
    backend = VarlenAttention(varlen_attn)
    reason = backend.trial(device, dtype, head_dim, block_size)
    return (backend, "") if reason is None else (None, reason)


def _unusable(name: str, reason: str) -> ValueError:
    return ValueError(f"attention_backend={name!r} cannot be used: {reason}")
