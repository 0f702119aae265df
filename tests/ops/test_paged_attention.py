"""paged_attention against float64, over caches that are poisoned wherever no token was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, remembered, run, weights_rounding
from torch import Tensor

from vllm.ops._dispatch import force
from vllm.ops.kv_cache import cache_rows, kv_cache_shape, reshape_and_cache_
from vllm.ops.paged_attention import paged_attention

BACKENDS = backends("paged_attention")


@dataclass
class Batch:
    """The arguments of a call, and every request's keys and values [tokens, heads, dim] in order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    keys: list[Tensor]
    values: list[Tensor]

    def run(self, backend: str, out: Tensor | None = None, *decodes: int) -> Tensor:
        caches = self.k_cache, self.v_cache
        if backend == "triton":
            caches = tuple(rows.contiguous() for rows in cache_rows(*caches, self.q.shape[2]))
        return self.run_over(caches, backend, out, *decodes)

    def run_over(self, caches: tuple[Tensor, Tensor], backend: str, out: Tensor | None = None, *decodes: int) -> Tensor:
        """The same with the cache in another layout."""
        arguments = (self.block_table, self.query_start_loc, self.seq_lens, self.scale, out, *decodes)
        return run(backend, paged_attention, self.q, *caches, *arguments)

    def part(self, row: int, first: int = 0, last: int | None = None) -> Batch:
        """A batch of the queries first to last of one request, as if the later ones were not known yet."""
        start, end = self.query_start_loc[row : row + 2].tolist()
        last = end - start if last is None else last
        tokens = int(self.seq_lens[row]) - (end - start) + last
        return Batch(
            self.q[start + first : start + last],
            self.k_cache,
            self.v_cache,
            self.block_table[row : row + 1],
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([tokens], dtype=torch.int32),
            self.scale,
            [self.keys[row][:tokens]],
            [self.values[row][:tokens]],
        )

    def share_prefix(self, rows: list[int], blocks: int, block_size: int) -> None:
        """Give the rows the first blocks of rows[0]."""
        tokens = blocks * block_size
        for row in rows[1:]:
            self.block_table[row, :blocks] = self.block_table[rows[0], :blocks]
            self.keys[row] = torch.cat([self.keys[rows[0]][:tokens], self.keys[row][tokens:]])
            self.values[row] = torch.cat([self.values[rows[0]][:tokens], self.values[row][tokens:]])


def make_batch(
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    block_size: int = 16,
    sharpness: float = 1.0,
) -> Batch:
    """A request for each (queries, tokens)."""
    torch.manual_seed(len(lengths))
    q_heads, kv_heads = heads
    blocks = [-(-tokens // block_size) for _, tokens in lengths]
    num_blocks = sum(blocks) + 2
    shape = kv_cache_shape(num_blocks, block_size, kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in "kv"]
    # Entries past a request's blocks must not be followed.
    table = torch.full((len(lengths), max(blocks) + 1), 2**30, dtype=torch.int32)
    free, keys, values = torch.randperm(num_blocks).to(torch.int32), [], []
    for row, (_, tokens) in enumerate(lengths):
        table[row, : blocks[row]], free = free[: blocks[row]], free[blocks[row] :]
        keys.append(torch.randn(tokens, kv_heads, head_dim).to(dtype))
        values.append(torch.randn(tokens, kv_heads, head_dim).to(dtype))
        position = torch.arange(tokens)
        slots = table[row, position // block_size].long() * block_size + position % block_size
        with force("reference"):
            reshape_and_cache_(keys[row], values[row], *caches, slots)
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).to(torch.int32)
    qkv = torch.randn(int(starts[-1]), q_heads + 2 * kv_heads, head_dim).mul_(sharpness).to(dtype)
    seq_lens = torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32)
    return Batch(qkv[:, :q_heads], *caches, table, starts, seq_lens, head_dim**-0.5, keys, values)


@remembered
def attend(batch: Batch, dtype: torch.dtype = torch.float64) -> Tensor:
    """Softmax over all scores, in the given dtype."""
    out = torch.empty(batch.q.shape, dtype=dtype)
    starts = batch.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        q = batch.q[starts[row] : starts[row + 1]].to(dtype)
        group = q.shape[1] // keys.shape[1]
        keys, values = (part.to(dtype).repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * batch.scale
        position = len(keys) - len(q) + torch.arange(len(q))
        scores.masked_fill_(torch.arange(len(keys)) > position[:, None], -torch.inf)
        out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out


def check(backend: str, batch: Batch, slack: float = 2e-6) -> None:
    got, truth = batch.run(backend), attend(batch)
    assert got.dtype == batch.q.dtype
    plain = attend(batch, batch.q.dtype)
    assert_accurate(backend, got, truth, plain, max(slack, weights_rounding(backend, got.dtype)))


RAGGED = [(1, 1), (5, 5), (0, 9), (1, 40), (20, 33), (3, 64), (1, 16), (2, 17)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 5])
def test_ragged_batch(backend: str, dtype: torch.dtype, block_size: int) -> None:
    check(backend, make_batch(RAGGED, dtype, block_size=block_size))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((1, 1), 1), ((9, 3), 64), ((7, 1), 40), ((4, 4), 80), ((2, 1), 128), ((40, 1), 8)],
)
def test_heads(backend: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    check(backend, make_batch([(1, 37), (12, 12), (2, 3)], dtype, heads, head_dim))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_peaked_scores(backend: str, dtype: torch.dtype) -> None:
    # A score of 100 is known to 1e-5, and so is its exponential.
    check(backend, make_batch(RAGGED, dtype, sharpness=30.0), slack=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_request_alone(backend: str, dtype: torch.dtype) -> None:
    for queries, tokens in [(1, 1), (1, 200), (100, 130)]:
        check(backend, make_batch([(queries, tokens)], dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_where_it_is_told(backend: str) -> None:
    batch = make_batch(RAGGED, torch.float32)
    out = torch.full(batch.q.shape, torch.nan)
    result = batch.run(backend, out)
    assert torch.equal(out, result)
    assert_accurate(backend, out, attend(batch))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(backend: str, dtype: torch.dtype) -> None:
    batch = make_batch(RAGGED, dtype)
    together, starts = batch.run(backend), batch.query_start_loc.tolist()
    for row in range(len(RAGGED)):
        assert torch.equal(batch.part(row).run(backend), together[starts[row] : starts[row + 1]])


COMPILED = [backend for backend in BACKENDS if backend.startswith("cpp")]

# Contexts of one and of several segments of 256 tokens, ending on and off their borders.
LONG = [(1, 700), (1, 256), (300, 513), (2, 257), (70, 70), (1, 64)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 16), ((2, 2), 80, 32), ((8, 1), 96, 5), ((3, 1), 128, 48), ((4, 2), 40, 64), ((1, 1), 256, 16)],
)
def test_long_contexts(
    backend: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    check(backend, make_batch(LONG, dtype, heads, head_dim, block_size))


@pytest.mark.parametrize("backend", COMPILED)
def test_equal_values_are_the_result(backend: str) -> None:
    # Weights that are rounded are divided by their own sum.
    batch = make_batch(LONG, torch.bfloat16, (9, 3), 64)
    batch.v_cache.fill_(1.7)
    got = batch.run(backend)
    assert torch.equal(got, torch.full_like(got, 1.7))


@pytest.mark.parametrize("backend", COMPILED)
def test_peaks_late_in_a_long_context(backend: str) -> None:
    # Scores that grow along the context move each row's maximum again and again.
    batch = make_batch([(40, 900)], torch.float32, sharpness=3.0)
    for row, keys in enumerate(batch.keys):
        batch.keys[row] = keys * torch.linspace(0.1, 5, len(keys))[:, None, None]
        blocks = batch.block_table[row, :-1].long()
        slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()[: len(keys)]
        with force("reference"):
            reshape_and_cache_(batch.keys[row], batch.values[row], batch.k_cache, batch.v_cache, slots)
    check(backend, batch, slack=2e-5)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(24, 16), (48, 16), (48, 5)])
def test_a_row_does_not_depend_on_how_its_prompt_was_cut(
    backend: str, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    batch = make_batch([(600, 650)], dtype, (6, 2), head_dim, block_size)
    whole = batch.run(backend)
    cuts = [0, 1, 4, 77, 206, 207, 462, 599, 600]
    pieces = [batch.part(0, first, last).run(backend) for first, last in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("lengths", [[(1, 1500)], [(3, 300), (1, 900)], LONG], ids=["one", "two", "many"])
def test_a_row_does_not_depend_on_the_threads(backend: str, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(lengths, torch.bfloat16, (6, 2), 48)
    with threads(1):
        alone = batch.run(backend)
    for count in (2, 5):
        with threads(count):
            assert torch.equal(batch.run(backend), alone)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 5])
def test_requests_that_share_a_prefix(backend: str, dtype: torch.dtype, block_size: int) -> None:
    lengths = [(1, 300), (20, 310), (1, 290), (50, 330), (1, 281), (0, 281), (1, 400), (1, 30)]
    batch = make_batch(lengths, dtype, (3, 1), block_size=block_size)
    batch.share_prefix([0, 1, 2, 3, 4, 5], 280 // block_size, block_size)
    batch.share_prefix([2, 6], 80 // block_size, block_size)
    check(backend, batch)
    together, starts = batch.run(backend), batch.query_start_loc.tolist()
    for row in range(len(lengths)):
        assert torch.equal(batch.part(row).run(backend), together[starts[row] : starts[row + 1]])
