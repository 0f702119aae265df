"""The FlashInfer backend: the library attends for requests with several queries, our kernels for the others.

How the library divides its work is planned on the host, once a step and KV group, from arrays that are there: nothing
waits for the device. A step that has a plan is captured in pieces at most, between which attention runs. Steps of
decodes alone, which are captured whole, need no plan, since our kernels divide contexts on the device. Both read the
same cache, so layers and variants that the library lacks, or gets wrong, are left to ours, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata, HostStep, KVCache, PagedAttention
from vllm.attention.options import AttentionOptions, LayerKind
from vllm.attention.trial import are_close, random_step
from vllm.logger import init_logger

logger = init_logger(__name__)

# Parts of long contexts, of up to 16 query heads a key head, for two programs a processor.
_WORKSPACE_BYTES = 256 * 2**20
_HEAD_DIMS = (64, 128, 256)
_LEAST_CAPABILITY = 8
# The layout is [num_blocks, num_kv_heads, block_size, head_dim].
_LAYOUT = "HND"


class _Plan(NamedTuple):
    wrapper: Any
    decodes: AttentionMetadata | None  # the first requests, which our kernels attend for; None: there are none


class _Planner:
    """Plans for one kind of layers and KV group. The library's wrapper plans into pinned memory, from which the device
    copies when it comes to it: two wrappers take turns, so that the host seldom waits for that."""

    def __init__(self, flashinfer: Any, workspace: Tensor) -> None:
        self._turns: list[tuple[Any, torch.cuda.Event]] = [
            (flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT), torch.cuda.Event()) for _ in range(2)
        ]
        self._attn: AttentionMetadata | None = None
        self._planned: _Plan

    def plan(self, attn: AttentionMetadata, q: Tensor, k_cache: Tensor, options: AttentionOptions) -> _Plan:
        """The step's plan, made at its first layer."""
        if self._attn is attn:
            return self._planned
        assert attn.host is not None and options.scale is not None
        self._turns.reverse()
        wrapper, copied = self._turns[0]
        if not copied.query():
            copied.synchronize()
        num_kv_heads, block_size, head_dim = k_cache.shape[1:]
        first = attn.num_decodes or 0
        arrays = _requests(attn.host, first, block_size, options.window)
        starts, indptr, pages, in_last, lengths = _pinned(arrays, q.device)
        limits: dict[str, Any] = {}
        if options.window is not None:
            limits["window_left"] = options.window - 1  # tokens before the query
        if options.softcap is not None:
            limits["logits_soft_cap"] = options.softcap
        wrapper.plan(
            starts,
            indptr,
            pages,
            in_last,
            q.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=options.scale,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
            seq_lens=lengths,
            **limits,
        )
        copied.record()
        self._attn, self._planned = attn, _Plan(wrapper, _decodes(attn) if first else None)
        return self._planned


class FlashInferAttention(PagedAttention):
    """Attention by FlashInfer's wrapper for paged caches; its workspace is on `device`."""

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        super().__init__("cuda")
        import flashinfer

        self._flashinfer: Any = flashinfer
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planners: dict[tuple[Any, ...], _Planner] = {}
        self._is_on = True

    def _attend(
        self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor | None
    ) -> Tensor:
        plan = self._plan(q, kv_cache[0], attn, options)
        if plan is None:
            return super()._attend(q, kv_cache, attn, options, out)
        out = q.new_empty(q.shape) if out is None else out
        first = 0
        if plan.decodes is not None:
            first = len(plan.decodes.seq_lens)
            super()._attend(q[:first], kv_cache, plan.decodes, options, out[:first])
        plan.wrapper.run(q[first:], kv_cache, out=out[first:])
        return out

    def _plan(self, q: Tensor, k_cache: Tensor, attn: AttentionMetadata, options: AttentionOptions) -> _Plan | None:
        """None: our kernels attend for the whole step."""
        if not self._is_on or attn.max_query_len == 1 or not _has(q.shape[2], options):
            return None
        key = (attn.group, q.shape[1:], k_cache.shape[1], options.scale, options.window, options.softcap)
        try:
            if key not in self._planners:
                self._planners[key] = _Planner(self._flashinfer, self._workspace)
            return self._planners[key].plan(attn, q, k_cache, options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a step that the trial was not like; nothing has been launched
            logger.warning("FlashInfer cannot plan a step, and our own kernels attend from here on: %s", error)
            self._is_on = False
            return None

    def trial(
        self, device: torch.device, dtype: torch.dtype, layers: Collection[LayerKind], block_size: int
    ) -> str | None:
        """Attend for random requests as each kind of `layers` does, and as our kernels do; returns what is wrong, None
        if nothing is. Kernels that the library has not compiled before are compiled here."""
        kinds = {(*kind[:3], *_limits(kind.options)): kind for kind in layers if _has(kind.head_dim, kind.options)}
        if not kinds:
            return "no layer of the model has attention as it has"
        try:
            with torch.inference_mode():
                for kind in kinds.values():
                    reason = self._try(device, dtype, kind, block_size)
                    if reason is not None:
                        return reason
        except Exception as error:  # the caller has another backend, or reports it
            return f"a trial call failed: {error}"
        return None

    def _try(self, device: torch.device, dtype: torch.dtype, kind: LayerKind, block_size: int) -> str | None:
        q, cache, attn = random_step(self, device, dtype, *kind[:3], block_size)
        # So short that pages before it are left out.
        window = None if kind.options.window is None else min(kind.options.window, max(block_size // 2, 1))
        options = replace(kind.options, window=window, scale=kind.options.scale or kind.head_dim**-0.5)
        planner = _Planner(self._flashinfer, self._workspace)
        plan = planner.plan(attn, q, cache[0], options)
        first = attn.num_decodes or 0
        got = plan.wrapper.run(q[first:], cache, out=q.new_empty(q.shape)[first:])
        if not are_close(got, super()._attend(q, cache, attn, options, None)[first:]):
            return f"a trial call gave other results than our own kernels, with {_described(kind)}"
        return None


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot be used, as far as is known without running it; None if it may. It takes every block
    size."""
    if device.type != "cuda":
        return f"it runs on CUDA only, and the device is {device.type}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        sizes = ", ".join(map(str, _HEAD_DIMS))
        return f"it takes heads of {sizes}, and the model's head_dim is {head_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _LEAST_CAPABILITY:
        return f"it needs compute capability {_LEAST_CAPABILITY}.0, and the device has {major}.{minor}"
    return None


def _has(head_dim: int, options: AttentionOptions) -> bool:
    """Whether the library has a layer's attention."""
    return head_dim in _HEAD_DIMS and options.given() <= {"window", "softcap"}


def _limits(options: AttentionOptions) -> tuple[float | None, ...]:
    return options.scale, options.window, options.softcap


def _described(kind: LayerKind) -> str:
    scale, window, softcap = _limits(kind.options)
    return f"heads of {kind.head_dim}, scale={scale}, window={window} and softcap={softcap}"


def _requests(host: HostStep, first: int, block_size: int, window: int | None) -> list[np.ndarray]:
    """The plan of the requests from `first` on, all int32: where their queries begin [R + 1] and their pages [R + 1],
    the pages, the tokens in the last page [R] and in all [R]. Pages before the first key that a query sees are left
    out: with a window they may be none, and masks are counted from the sequences' ends."""
    starts, slots = host.query_start_loc[first:] - host.query_start_loc[first], host.slots[first:]
    lengths = host.seq_lens[first:].astype(np.int32)
    skipped = np.zeros_like(lengths)
    if window is not None:
        skipped = np.maximum(lengths - np.diff(starts) - window + 1, 0) // block_size
        lengths = lengths - skipped * block_size
    counts = -(-lengths // block_size)
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    # A page's place in its request's row.
    place = np.arange(indptr[-1]) + np.repeat(skipped - indptr[:-1], counts)
    pages = host.block_table[np.repeat(slots, counts), place]
    return [starts, indptr, pages, (lengths - 1) % block_size + 1, lengths]


def _pinned(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """int32 tensors in one piece of host memory, from which a copy to `device` does not wait."""
    sizes = [len(array) for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=staged.numpy())
    return list(staged.split(sizes))


def _decodes(attn: AttentionMetadata) -> AttentionMetadata:
    """The requests with one query."""
    assert attn.num_decodes is not None and attn.max_decode_len is not None
    count = attn.num_decodes
    return replace(
        attn,
        block_table=attn.block_table[:count],
        query_start_loc=attn.query_start_loc[: count + 1],
        seq_lens=attn.seq_lens[:count],
        max_query_len=1,
        max_seq_len=attn.max_decode_len,
    )
