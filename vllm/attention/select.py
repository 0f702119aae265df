"""The choice of an engine's attention backend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

import vllm.attention.flashinfer as flashinfer
import vllm.attention.varlen as varlen
from vllm import envs
from vllm.attention.backend import AttentionBackend, PagedAttention
from vllm.attention.flashinfer import FlashInferAttention
from vllm.attention.options import AttentionOptions, LayerKind
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
    layers: Collection[LayerKind] = (),
) -> AttentionBackend:
    """The backend of an `attention_backend`: "auto", "paged", "varlen" or "flashinfer". "auto" is on a CUDA device the
    first of these that is installed for it, and of which a trial call works: varlen with the newest FlashAttention,
    flashinfer; else, and with VLLM_BATCH_INVARIANT=1 or a cache of 8-bit floats, paged. `dtype` is that of activations,
    and of the cache unless `kv_dtype` is another; `block_size` the tokens of a KV block; `layers` the model's, for the
    trial. ValueError if the backend named cannot be used here, with the reason."""
    device = torch.device(device)
    if name == "auto" and (kv_dtype in FLOAT8 or envs.batch_invariant()):
        name = "paged"
    if name != "auto":
        check_backend(name, device, dtype, head_dim, kv_dtype)
    if device.type == "cuda" and name in ("auto", "varlen"):
        backend = _find_varlen(name, device, dtype, head_dim, block_size)
        if backend is not None:
            return backend
    if device.type == "cuda" and name in ("auto", "flashinfer"):
        layers = layers or [LayerKind(4, 2, head_dim, AttentionOptions())]
        found = _find_flashinfer(name, device, dtype, head_dim, block_size, layers)
        if found is not None:
            return found
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


def _find_varlen(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> VarlenAttention | None:
    """None where "auto" does without it."""
    activated = varlen.activate_newer(device)
    varlen_attn = varlen.find_varlen_attn()
    reason = varlen.unsupported(device, dtype, head_dim) or varlen.unreadable_pages(block_size)
    if reason is None and varlen_attn is not None:
        backend = VarlenAttention(varlen_attn)
        reason = backend.trial(device, dtype, head_dim, block_size)
        if reason is None:
            return backend
    if name != "auto":
        raise _unusable(name, reason or "")
    if activated:
        varlen.deactivate()
    logger.debug("Attention does not run on varlen_attn: %s", reason)
    return None


def _find_flashinfer(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    layers: Collection[LayerKind],
) -> FlashInferAttention | None:
    """None where "auto" does without it."""
    reason = flashinfer.unsupported(device, dtype, head_dim)
    if reason is not None:
        logger.debug("Attention does not run on FlashInfer: %s", reason)
        return None
    try:
        backend = FlashInferAttention(device)
        reason = backend.trial(device, dtype, layers, block_size)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        reason = f"the package cannot be imported: {error}"
    if reason is None:
        return backend
    if name != "auto":
        raise _unusable(name, reason)
    logger.warning("FlashInfer is installed, and attention runs on our own kernels all the same: %s", reason)
    return None


def _unusable(name: str, reason: str) -> ValueError:
    return ValueError(f"attention_backend={name!r} cannot be used: {reason}")
