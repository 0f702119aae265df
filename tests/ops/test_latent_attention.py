"""latent_attention, write_latent_ and head_linear against float64, over caches that are poisoned wherever no token was
written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, remembered, run
from torch import Tensor

from vllm.ops._dispatch import force
from vllm.ops.head_linear import head_linear, pack_heads
from vllm.ops.kv_cache import FLOAT8, as_cached
from vllm.ops.latent_attention import latent_attention, write_latent_

BACKENDS = backends("latent_attention")
RAGGED = [(1, 1), (5, 5), (0, 9), (1, 40), (20, 33), (3, 64), (1, 16), (2, 17)]


@dataclass
class Batch:
    """The arguments of a call, and every request's rows [tokens, width] in order."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    rows: list[Tensor]
    cache_scale: float = 1.0

    def run(self, backend: str) -> Tensor:
        requests = self.block_table, self.query_start_loc, self.seq_lens
        return run(
            backend, latent_attention, self.q_latent, self.q_rope, self.cache, *requests, self.scale, self.cache_scale
        )

    def part(self, row: int, first: int, last: int) -> Batch:
        """A batch of the queries first to last of one request, as if the later ones were not known yet."""
        start, end = self.query_start_loc[row : row + 2].tolist()
        tokens = int(self.seq_lens[row]) - (end - start) + last
        own = slice(start + first, start + last)
        return replace(
            self,
            q_latent=self.q_latent[own],
            q_rope=self.q_rope[own],
            block_table=self.block_table[row : row + 1],
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([tokens], dtype=torch.int32),
        )


def make_batch(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: int = 6,
    dims: tuple[int, int] = (20, 6),
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    cache_scale: float = 1.0,
) -> Batch:
    """A request for each (queries, tokens)."""
    torch.manual_seed(len(lengths))
    width, cache_dtype = sum(dims), cache_dtype or dtype
    blocks = [-(-tokens // block_size) for _, tokens in lengths]
    num_blocks = sum(blocks) + 2
    cache = torch.full((num_blocks, block_size, width), torch.nan).to(cache_dtype)
    # Entries past a request's blocks must not be followed.
    table = torch.full((len(lengths), max(blocks) + 1), 2**30, dtype=torch.int32)
    free, rows = torch.randperm(num_blocks).to(torch.int32), []
    for row, (_, tokens) in enumerate(lengths):
        table[row, : blocks[row]], free = free[: blocks[row]], free[blocks[row] :]
        own = torch.randn(tokens, width).to(dtype)
        position = torch.arange(tokens)
        slots = table[row, position // block_size].long() * block_size + position % block_size
        with force("reference"):
            write_latent_(*own.split(dims, dim=1), cache, slots, cache_scale)
        rows.append(as_cached(own, cache_dtype, cache_scale).double() * cache_scale)
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).to(torch.int32)
    # Views, as attention's layers give them.
    q = torch.randn(int(starts[-1]), heads, width + 3).to(dtype)[..., 3:]
    seq_lens = torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32)
    return Batch(*q.split(dims, dim=2), cache, table, starts, seq_lens, width**-0.5, rows, cache_scale)


@remembered
def attend(batch: Batch, dtype: torch.dtype = torch.float64) -> Tensor:
    """Softmax over all scores, in the given dtype."""
    out = torch.empty(batch.q_latent.shape, dtype=dtype)
    starts = batch.query_start_loc.tolist()
    for row, own in enumerate(batch.rows):
        keys = own.to(dtype)
        mine = slice(starts[row], starts[row + 1])
        q = torch.cat((batch.q_latent[mine], batch.q_rope[mine]), dim=-1).to(dtype)
        scores = torch.einsum("qhd,kd->hqk", q, keys) * batch.scale
        position = len(keys) - len(q) + torch.arange(len(q))
        scores.masked_fill_(torch.arange(len(keys)) > position[:, None], -torch.inf)
        out[mine] = torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, : out.shape[2]])
    return out


def check(backend: str, batch: Batch) -> None:
    got, truth = batch.run(backend), attend(batch)
    assert got.dtype == batch.q_latent.dtype and got.is_contiguous()
    plain = attend(batch, batch.q_latent.dtype)
    # Kernels for 16 bits may round the softmax to them before it meets the values.
    slack = 2e-6 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    assert_accurate(backend, got, truth, plain, slack)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 5])
def test_ragged_batch(backend: str, dtype: torch.dtype, block_size: int) -> None:
    check(backend, make_batch(RAGGED, dtype, block_size=block_size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "dims"), [(1, (1, 1)), (17, (33, 5)), (32, (16, 16)), (5, (7, 2)), (16, (512, 64))], ids=str
)
def test_heads_and_widths(backend: str, heads: int, dims: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(backend, make_batch([(1, 70), (9, 40), (3, 3)], dtype, heads, dims))


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_contexts_of_several_segments(backend: str) -> None:
    check(backend, make_batch([(1, 700), (40, 530), (1, 257)], torch.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache_dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_of_eight_bits(backend: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check(backend, make_batch(RAGGED, dtype, cache_dtype=cache_dtype, cache_scale=0.37))


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "reference"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_row_does_not_depend_on_its_batch(backend: str, dtype: torch.dtype) -> None:
    # Matrix tiles take latents of a multiple of 16.
    for dims in ((20, 6), (32, 6)) if backend.startswith("cpp") else ((20, 6),):
        batch = make_batch([(1, 300), (20, 290), (2, 64), (1, 5)], dtype, dims=dims)
        whole = batch.run(backend)
        starts = batch.query_start_loc.tolist()
        for row, first, last in ((0, 0, 1), (1, 0, 20), (1, 0, 3), (1, 19, 20), (1, 3, 15), (3, 0, 1)):
            alone = batch.part(row, first, last).run(backend)
            assert torch.equal(alone, whole[starts[row] + first : starts[row] + last]), (row, first, last)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_the_same_blocks(backend: str) -> None:
    batch = make_batch([(1, 200), (1, 230), (3, 210)], torch.float32)
    for row in (1, 2):
        batch.block_table[row, :9] = batch.block_table[0, :9]
        batch.rows[row] = torch.cat([batch.rows[0][:144], batch.rows[row][144:]])
    check(backend, batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_request_stays_in_it(backend: str) -> None:
    batch = make_batch([(1, 40), (20, 33), (1, 16)], torch.float32)
    batch.q_latent[0, 1] = torch.nan
    got = batch.run(backend)
    assert got[0, 1].isnan().all()
    got[0, 1] = 0
    assert got.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8], ids=str)
def test_written_rows(backend: str, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    rows = torch.randn(9, 21).to(dtype)
    latent, rope = rows[:, 1:14], rows[:, 15:21]
    scale = 1.0 if cache_dtype is None else 0.3
    cache = torch.full((4, 5, 19), 7.0).to(cache_dtype or dtype)
    slots = torch.tensor([3, 19, -1, 0, 7, 8, 9, -1, 10])
    expected = cache.clone().view(-1, 19)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            own = as_cached(torch.cat((latent[row], rope[row])), cache.dtype, scale)
            expected.view(torch.uint8)[slot] = own.view(torch.uint8)
    run(backend, write_latent_, latent, rope, cache, slots, scale)
    assert torch.equal(cache.view(-1, 19).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads", "columns", "width"), [(1, 3, 5, 7), (70, 2, 40, 16), (3, 17, 33, 24)])
def test_head_linear(backend: str, dtype: torch.dtype, rows: int, heads: int, columns: int, width: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, heads, width + 2).to(dtype)[..., 2:]
    weight = torch.randn(heads, columns, width).to(dtype)

    def multiply(x: Tensor) -> Tensor:
        return head_linear(x, pack_heads(weight))

    got = run(backend, multiply, x)
    truth = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert_accurate(backend, got, truth, torch.einsum("thk,hnk->thn", x, weight), 2e-6)
    if rows > 1 and backend.startswith("cpp"):
        assert torch.equal(run(backend, multiply, x[1:2]), got[1:2])
