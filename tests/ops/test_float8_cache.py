"""A key/value cache of 8-bit floats: what is written is the nearest of them, and attention reads exactly that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import DTYPES, backends, run, with_dtypes
from test_attention_options import attend as attend_with_options
from test_attention_options import make_options
from test_paged_attention import RAGGED, Batch, attend, make_batch
from test_rotary_and_cache import NUM_BLOCKS
from torch import Tensor

from vllm.ops.kv_cache import FLOAT8, as_cached, cache_rows, kv_cache_shape, reshape_and_cache_
from vllm.ops.paged_attention import paged_attention
from vllm.ops.rotary import rotary_and_cache_, rotary_embedding_

FLOATS = pytest.mark.parametrize("float8", FLOAT8, ids=str)


def nearest(x: Tensor, float8: torch.dtype) -> Tensor:
    """The codes, uint8, of the nearest finite values, by trying them all; of NaN, NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(float8).double()
    finite = codes[values.isfinite()]
    # Between two that are as near the even one, which is before the odd one here; a zero has the sign of x.
    finite = torch.cat([finite[finite % 2 == 0], finite[finite % 2 == 1]])
    distance = (x.double()[..., None] - finite.view(float8).double()).abs().nan_to_num(0.0, 0.0)
    found = finite[distance.argmin(-1)]
    most = torch.finfo(float8).max
    found = torch.where(x.abs() > most, torch.tensor(most).to(float8).view(torch.uint8), found)
    found = (found & 0x7F) | (x.signbit().to(torch.uint8) << 7)
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8), found)


def hostile(float8: torch.dtype) -> Tensor:
    """Every value, every middle of two, what lies beside these, and what has no code: float32 [16, 128]."""
    values = torch.arange(256, dtype=torch.uint8).view(float8).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(torch.inf)
    beside = torch.cat([torch.nextafter(middles, inf), torch.nextafter(middles, -inf)])
    others = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 1e-30, -1e-30, 0.0, -0.0])
    every = torch.cat([values, middles, beside, others])
    return torch.cat([every, torch.randn(16 * 128 - len(every))]).view(16, 128)


@pytest.mark.parametrize("backend", backends("reshape_and_cache_"))
@pytest.mark.parametrize("scale", [1.0, 0.37])
@FLOATS
def test_the_nearest_is_written(backend: str, scale: float, float8: torch.dtype) -> None:
    torch.manual_seed(0)
    x = hostile(float8).view(16, 2, 64)
    caches = [torch.zeros(kv_cache_shape(2, 16, 2, 64), dtype=float8) for _ in "kv"]
    slots = torch.arange(16) + 9
    slots[3] = -1
    run(backend, reshape_and_cache_, x, x.flip(0), *caches, slots, scale, 1.0)
    kept = torch.arange(16) != 3
    divided = x / torch.tensor(scale)
    for rows, wanted in zip(cache_rows(*caches, 64), (divided, x.flip(0)), strict=True):
        codes = rows.view(torch.uint8).transpose(1, 2).flatten(0, 1)
        expected = torch.zeros_like(codes)
        expected[slots[kept]] = nearest(wanted[kept], float8)
        is_nan = rows.float().isnan().transpose(1, 2).flatten(0, 1)
        # NaN has a sign that means nothing.
        assert torch.equal(torch.where(is_nan, codes & 0x7F, codes), expected)


@pytest.mark.parametrize("backend", backends("rotary_and_cache_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FLOATS
def test_rotated_keys_are_written(backend: str, dtype: torch.dtype, float8: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv, table = torch.randn(5, 7, 10).mul_(3).to(dtype), torch.randn(20, 6)
    positions, slots = torch.tensor([3, 9, 0, 0, 19]), torch.tensor([7, -1, 8, 9, 20])
    caches = [torch.zeros(kv_cache_shape(NUM_BLOCKS, 4, 2, 10), dtype=float8) for _ in "kv"]
    q, k, v = qkv.clone().split([3, 2, 2], dim=1)
    run(backend, rotary_and_cache_, positions, q, k, v, table, *caches, slots, 0.5, 2.0)
    expected = [torch.zeros_like(cache) for cache in caches]
    q, k, v = qkv.split([3, 2, 2], dim=1)
    run(backend, rotary_embedding_, positions, q, k, table)
    run("reference", reshape_and_cache_, k, v, *expected, slots, 0.5, 2.0)
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))


def quantised(batch: Batch, float8: torch.dtype, scales: tuple[float, float]) -> tuple[Batch, Batch]:
    """The batch over caches of 8 bits, and with the keys and values that these stand for; unwritten slots are NaN."""
    caches = [as_cached(x, float8, scale) for x, scale in zip((batch.k_cache, batch.v_cache), scales, strict=True)]
    keys, values = (
        [as_cached(x, float8, scale).double() * scale for x in own]
        for own, scale in zip((batch.keys, batch.values), scales, strict=True)
    )
    return replace(batch, k_cache=caches[0], v_cache=caches[1]), replace(batch, keys=keys, values=values)


def run_quantised(backend: str, batch: Batch, scales: tuple[float, float], **options: Any) -> Tensor:
    caches = batch.k_cache, batch.v_cache
    if backend == "triton":
        caches = tuple(rows.contiguous() for rows in cache_rows(*caches, batch.q.shape[2]))
    arguments = batch.block_table, batch.query_start_loc, batch.seq_lens, batch.scale, None, None, None
    given = [options.get(name) for name in ("window", "softcap", "alibi_slopes", "sinks")]
    return run(backend, paged_attention, batch.q, *caches, *arguments, *given, *scales)


CASES = [(RAGGED, (6, 2), 16, 16), (RAGGED, (4, 1), 40, 4), ([(70, 200), (1, 600)], (3, 3), 64, 16)]


@pytest.mark.parametrize(("backend", "dtype"), with_dtypes(backends("paged_attention")), ids=str)
@FLOATS
def test_attention(backend: str, dtype: torch.dtype, float8: torch.dtype) -> None:
    for (lengths, heads, head_dim, block_size), scales in zip(CASES, [(1.0, 1.0), (0.3, 2.5), (4.0, 0.1)], strict=True):
        stored, meant = quantised(make_batch(lengths, dtype, heads, head_dim, block_size), float8, scales)
        got, wanted = run_quantised(backend, stored, scales), attend(meant)
        # A weight is off by a rounding of its score, which may be 30 here; results, and weights in the interpreter, are
        # rounded to 16 bits where that is the dtype.
        slack = (32 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
        assert (got.double() - wanted).abs().max() <= slack * wanted.abs().max()


@pytest.mark.parametrize("backend", backends("paged_attention"))
@pytest.mark.parametrize("names", ["softcap sinks", "window", "alibi_slopes"])
def test_attention_with_options(backend: str, names: str) -> None:
    scales, options = (0.3, 2.5), make_options(names)
    stored, meant = quantised(make_batch(RAGGED, torch.float32), torch.float8_e4m3fn, scales)
    got, wanted = (
        run_quantised(backend, stored, scales, **options),
        attend_with_options(meant, torch.float64, **options),
    )
    assert (got.double() - wanted).abs().max() <= 16 * torch.finfo(torch.float32).eps * wanted.abs().max()


@pytest.mark.parametrize("backend", backends("paged_attention"))
def test_nan_stays(backend: str) -> None:
    batch, _ = quantised(make_batch([(1, 9), (3, 9)], torch.float32), torch.float8_e4m3fn, (1.0, 1.0))
    rows = cache_rows(batch.k_cache, batch.v_cache, 16)[0].view(torch.uint8)
    rows[batch.block_table[1, 0], :, 0] = 0xFF
    got = run_quantised(backend, batch, (1.0, 1.0))
    assert got[1:].isnan().all() and got[0].isfinite().all()
