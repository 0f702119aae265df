"""Rows of the table: each attention backend against torch's flash attention and the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.paged_batch import BACKENDS, PagedBatch, find_backend, make_batch
from gpu.setting import Case, Setting, make_row
from gpu.timing import time_in_turns
from vllm.ops._dispatch import force

_DTYPE = torch.bfloat16


def make_cases(setting: Setting) -> dict[str, Case]:
    """Prefill and decode by backend; an unavailable one gives its reason and has no row. FlashInfer's decodes are those
    of our kernels."""
    cases: dict[str, Case] = {}
    for name in BACKENDS:
        for kind, measure in (("prefill", _prefill), ("decode", _decode)):
            if (name, kind) == ("flashinfer", "decode"):
                continue
            cases[f"{kind} {name}"] = lambda name=name, measure=measure: _measure(setting, name, measure)
    cases["decode from a cache of 8 bits"] = lambda: _measure(setting, "paged", _decode_float8)
    return cases


@torch.inference_mode()
def _measure(setting: Setting, name: str, measure: Callable[[Setting, str, Any], dict[str, Any]]) -> dict[str, Any]:
    try:
        backend = find_backend(name, setting.sizes.shape, _DTYPE, setting.device)
    except ValueError as error:
        return {"not_here": str(error)}
    with force("triton"):
        return measure(setting, name, backend)


def _prefill(setting: Setting, name: str, backend: Any) -> dict[str, Any]:
    num_seqs, length = setting.sizes.prefill
    batch, caches = _random_batch(setting, backend, ((length, length),) * num_seqs)
    shape, device = setting.sizes.shape, setting.device
    q, k, v = (
        torch.randn(num_seqs, heads, length, shape.head_dim, device=device, generator=setting.generator()).to(_DTYPE)
        for heads in (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    )
    seconds = time_in_turns(
        {
            name: [lambda: backend.attend(batch.q, caches, batch.metadata, batch.options)],
            "flash": [lambda: _flash(q, k, v)],
        },
        device,
        setting.sizes.repeats,
        graphs=False,
    )
    # Half of the scores are masked; scores and their products with the values.
    flops = 2 * num_seqs * shape.num_attention_heads * length * length * shape.head_dim
    return {
        **{f"{each}_seconds": value for each, value in seconds.items()},
        "flops_per_second": flops / seconds[name],
        "rows": [
            make_row(
                f"prefill_{name}",
                f"causal attention of {num_seqs} x {length:,} tokens, against torch's flash attention",
                seconds["flash"] / seconds[name],
                0.8,
                "x",
            )
        ],
    }


def _decode(setting: Setting, name: str, backend: Any) -> dict[str, Any]:
    num_seqs, context = setting.sizes.decode
    batch, caches = _random_batch(setting, backend, ((1, context),) * num_seqs)
    shape = setting.sizes.shape
    seconds = time_in_turns(
        {name: [lambda: backend.attend(batch.q, caches, batch.metadata, batch.options)]},
        setting.device,
        setting.sizes.repeats,
        backend.can_be_captured,
    )[name]
    num_bytes = 2 * num_seqs * context * shape.num_key_value_heads * shape.head_dim * _DTYPE.itemsize
    return {
        "seconds": seconds,
        "bytes": num_bytes,
        "rows": [
            make_row(
                f"decode_{name}",
                f"attention of {num_seqs} sequences over {context:,} tokens each, keys and values read once",
                num_bytes / seconds / setting.rates["copy_bytes_per_second"],
                0.8,
                "of copy bandwidth",
            )
        ],
    }


def _decode_float8(setting: Setting, name: str, backend: Any) -> dict[str, Any]:
    """Keys and values in 8 bits against 16."""
    num_seqs, context = setting.sizes.decode
    batch, caches = _random_batch(setting, backend, ((1, context),) * num_seqs)
    small = tuple(cache.to(torch.float8_e4m3fn) for cache in caches)
    calls: dict[str, list[Callable[[], object]]] = {
        kind: [lambda cache=cache: backend.attend(batch.q, cache, batch.metadata, batch.options)]
        for kind, cache in (("fp8", small), ("bf16", caches))
    }
    seconds = time_in_turns(calls, setting.device, setting.sizes.repeats)
    work = f"attention of {num_seqs} sequences over {context:,} tokens each in a cache of 8 bits, against bfloat16"
    row = make_row("decode_float8", work, seconds["fp8"] / seconds["bf16"], 0.7, "x", at_least=False)
    return {f"{kind}_seconds": value for kind, value in seconds.items()} | {"rows": [row]}


def _random_batch(
    setting: Setting, backend: Any, lengths: tuple[tuple[int, int], ...]
) -> tuple[PagedBatch, tuple[Tensor, Tensor]]:
    """A batch with random contents of the cache, whose layout depends on the backend."""
    shape, generator = setting.sizes.shape, setting.generator()
    batch = make_batch(lengths, shape, _DTYPE, BACKENDS[backend.name], generator)
    size = backend.kv_cache_shape(batch.num_blocks, batch.block_size, shape.num_key_value_heads, shape.head_dim)
    keys, values = (
        torch.empty(size, dtype=_DTYPE, device=setting.device).normal_(generator=generator) for _ in range(2)
    )
    return batch, (keys, values)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
