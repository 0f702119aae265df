"""Rows of the table: the nucleus of top-p, and blocks that are swapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu.setting import Setting, make_row
from gpu.timing import time_in_turns
from vllm.ops._dispatch import force
from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.ops.top_p import keep_top_p_

_BLOCK_SIZE = 16


@torch.inference_mode()
def measure_top_p(setting: Setting) -> dict[str, Any]:
    """Without top-k: the threshold that is searched for, against a sort of whole rows. Both begin with a copy."""
    sizes, generator = setting.sizes, setting.generator()
    logits = torch.randn(sizes.reading_rows, sizes.shape.vocab_size, device=setting.device, generator=generator) * 4
    top_p, kept = torch.full((len(logits),), 0.9, device=setting.device), torch.empty_like(logits)
    calls = {
        "search": [lambda: keep_top_p_(kept.copy_(logits), top_p)],
        "sort": [lambda: _keep_by_sort(kept.copy_(logits), top_p)],
    }
    with force("triton"):
        seconds = time_in_turns(calls, setting.device, sizes.repeats)
    work = f"top-p of [{len(logits)}, {sizes.shape.vocab_size:,}] float32 without top-k, against a sort"
    return {**seconds, "rows": [make_row("top_p", work, seconds["sort"] / seconds["search"], 3.0, "x")]}


def _keep_by_sort(logits: Tensor, top_p: Tensor) -> None:
    values, ids = logits.sort(dim=-1, descending=True)
    probs = values.softmax(dim=-1)
    values.masked_fill_(probs.cumsum(dim=-1) - probs >= top_p[:, None], -torch.inf)
    logits.scatter_(1, ids, values)


@torch.inference_mode()
def measure_swap(setting: Setting) -> dict[str, Any]:
    """Blocks of all layers' keys and values, gathered by one kernel over a table of addresses."""
    sizes, shape = setting.sizes, setting.sizes.shape
    width, count = _BLOCK_SIZE * shape.num_key_value_heads * shape.head_dim, sizes.reading_rows
    layers = [
        torch.zeros(2 * count, width, dtype=torch.bfloat16, device=setting.device)
        for _ in range(2 * shape.num_hidden_layers)
    ]
    staged = [torch.empty_like(layer[:count]) for layer in layers]
    source, target = block_parts(layers), block_parts(staged)
    order = torch.randperm(2 * count, device=setting.device, generator=setting.generator())[:count]
    places = torch.arange(count, device=setting.device)
    with force("triton"):
        calls = {"copy": [lambda: copy_blocks_(order, places, source, target)]}
        seconds = time_in_turns(calls, setting.device, sizes.repeats)["copy"]
    num_bytes = 2 * sum(part.nbytes for part in staged)
    share = num_bytes / seconds / setting.rates["copy_bytes_per_second"]
    work = f"{count} blocks of {len(layers)} caches gathered by one kernel, read and written"
    return {"seconds": seconds, "rows": [make_row("swap_blocks", work, share, 0.6, "of copy bandwidth")]}
