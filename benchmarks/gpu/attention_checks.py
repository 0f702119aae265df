"""Cache writes and attention of each available backend, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from bounds import ModelShape
from torch import Tensor

from gpu.paged_batch import BACKENDS, PagedBatch, dense_attention, empty_caches, find_backend, make_batch
from gpu.setting import Setting
from vllm.ops.latent_attention import latent_attention, write_latent_

_NUM_POSITIONS = 8192


def attention_checks(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Ragged batches of prefills and decodes, and of decodes alone."""
    sizes, shape = setting.sizes, setting.sizes.shape
    decodes = tuple((1, tokens) for _, tokens in sizes.ragged)
    for name, dtype in product(BACKENDS, sizes.ragged_dtypes):
        for kind, lengths in (("ragged", sizes.ragged), ("decode", decodes)):
            arguments = (name, getattr(torch, dtype), lengths)
            yield f"attention {name} {kind} {dtype}", lambda args=arguments: _check(setting, shape, *args)


def _check(
    setting: Setting, shape: ModelShape, name: str, dtype: torch.dtype, lengths: tuple[tuple[int, int], ...]
) -> dict[str, str]:
    generator = setting.generator()
    try:
        backend = find_backend(name, shape, dtype, setting.device)
    except ValueError as error:
        return {"not_here": str(error)}
    batch = make_batch(lengths, shape, dtype, BACKENDS[name], generator)
    size = (len(batch.slots), shape.num_key_value_heads, shape.head_dim)
    keys, values = (torch.randn(size, device=setting.device, generator=generator).to(dtype) for _ in range(2))
    caches = empty_caches(backend, batch, shape)
    everything = replace(batch.metadata, slot_mapping=batch.slots)
    backend.write_kv(keys, values, caches, everything)
    _assert_near(backend.attend(batch.q, caches, batch.metadata, batch.options), batch, keys, values)

    # The same with rotary keys.
    caches = empty_caches(backend, batch, shape)
    angles = torch.randn(_NUM_POSITIONS, shape.head_dim // 2, device=setting.device, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.cat([torch.arange(tokens) for _, tokens in lengths]).to(setting.device)
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = keys.double().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(dtype)
    q = torch.zeros(len(keys), shape.num_attention_heads, shape.head_dim, dtype=dtype, device=setting.device)
    backend.rotate_and_write_kv(positions, q, keys, values, table, caches, everything)
    _assert_near(backend.attend(batch.q, caches, batch.metadata, batch.options), batch, rotated, values)
    return {}


def latent_checks(setting: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    """Rows of latents as DeepSeek's, written and attended to, in the same batches."""
    sizes = setting.sizes
    decodes = tuple((1, tokens) for _, tokens in sizes.ragged)
    for kind, lengths in (("ragged", sizes.ragged), ("decode", decodes)):
        for dtype in sizes.ragged_dtypes:
            arguments = getattr(torch, dtype), lengths
            yield f"latent_attention {kind} {dtype}", lambda args=arguments: _check_latent(setting, *args)


def _check_latent(setting: Setting, dtype: torch.dtype, lengths: tuple[tuple[int, int], ...]) -> None:
    generator, shape = setting.generator(), setting.sizes.shape
    parts = (512, 64) if shape.hidden_size > 512 else (32, 16)
    batch = make_batch(lengths, shape, dtype, 16, generator)
    attn, heads = batch.metadata, shape.num_attention_heads

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=setting.device, generator=generator).to(dtype)

    rows, q = normal(len(batch.slots), sum(parts)), normal(len(batch.q), heads, sum(parts))
    cache = torch.empty(batch.num_blocks, batch.block_size, sum(parts), dtype=dtype, device=setting.device)
    write_latent_(*rows.split(parts, dim=1), cache, batch.slots)
    requests = attn.block_table, attn.query_start_loc, attn.seq_lens
    got = latent_attention(*q.split(parts, dim=2), cache, *requests, batch.scale)
    _assert_near(got, replace(batch, q=q), rows[:, None], rows[:, None, : parts[0]])


def _assert_near(got: Tensor, batch: PagedBatch, keys: Tensor, values: Tensor) -> None:
    """Probabilities are rounded to the dtype before they multiply the values, and the result once more; weighted means
    of values that are not far from 1."""
    truth = dense_attention(batch, keys, values)
    assert got.shape == truth.shape
    allowed = 4 * torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 1e-5
    off = (got.double() - truth).abs().max().item()
    assert off <= allowed * max(1.0, truth.abs().max().item()), f"off by {off}"
