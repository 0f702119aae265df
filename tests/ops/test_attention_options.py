"""The options of paged_attention (window, chunks, soft-cap, ALiBi, sinks) against float64, over poisoned caches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, remembered, run, weights_rounding, with_dtypes
from test_paged_attention import RAGGED, Batch, make_batch
from torch import Tensor

from vllm.ops.kv_cache import cache_rows
from vllm.ops.paged_attention import paged_attention

BACKENDS = backends("paged_attention")
COMPILED = [backend for backend in BACKENDS if backend.startswith("cpp")]
HEADS = (6, 2)


def make_options(names: str, heads: int = HEADS[0], window: int = 7) -> dict[str, Any]:
    """Options by their names, of sizes that change results."""
    values = {
        "window": window,
        "chunk": window,
        "softcap": 1.5,
        "alibi_slopes": -torch.linspace(-1.0, 0.3, heads),
        "sinks": torch.linspace(-2.0, 4.0, heads),
    }
    return {name: values[name] for name in names.split()}


SETS = [
    "window",
    "softcap",
    "alibi_slopes",
    "sinks",
    "window sinks",
    "window softcap",
    "window softcap alibi_slopes sinks",
    "chunk sinks",
]


@remembered
def attend(batch: Batch, dtype: torch.dtype, **options: Any) -> Tensor:
    """Softmax over all scores, written out, in the given dtype."""
    out = torch.empty(batch.q.shape, dtype=dtype)
    starts = batch.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        q = batch.q[starts[row] : starts[row + 1]].to(dtype)
        group = q.shape[1] // keys.shape[1]
        keys, values = (part.to(dtype).repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * batch.scale
        position = len(keys) - len(q) + torch.arange(len(q))
        distance = torch.arange(len(keys)) - position[:, None]
        if "softcap" in options:
            scores = options["softcap"] * (scores / options["softcap"]).tanh()
        if "alibi_slopes" in options:
            scores = scores + options["alibi_slopes"].to(dtype)[:, None, None] * distance
        scores.masked_fill_((distance > 0) | (distance <= -options.get("window", len(keys))), -torch.inf)
        if "chunk" in options:
            hidden = torch.arange(len(keys)) // options["chunk"] != position[:, None] // options["chunk"]
            scores.masked_fill_(hidden, -torch.inf)
        if "sinks" in options:
            column = options["sinks"].to(dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        out[starts[row] : starts[row + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def call(batch: Batch, backend: str, options: dict[str, Any]) -> Tensor:
    caches = batch.k_cache, batch.v_cache
    if backend == "triton":
        caches = tuple(rows.contiguous() for rows in cache_rows(*caches, batch.q.shape[2]))
    order = ("window", "softcap", "alibi_slopes", "sinks")
    arguments = batch.block_table, batch.query_start_loc, batch.seq_lens, batch.scale, None, None, None
    given = *(options.get(name) for name in order), 1.0, 1.0, options.get("chunk")
    return run(backend, paged_attention, batch.q, *caches, *arguments, *given)


def forget_passed_blocks(batch: Batch, options: dict[str, Any], block_size: int) -> None:
    """Make the table's entries of blocks that no query sees lead nowhere, as those of freed blocks may."""
    starts = batch.query_start_loc.tolist()
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        position = seq_len - (starts[row + 1] - starts[row])
        if "chunk" in options:
            first = position // options["chunk"] * options["chunk"]
        else:
            first = max(position - options.get("window", seq_len) + 1, 0)
        batch.block_table[row, : first // block_size] = 2**30


def check(backend: str, batch: Batch, options: dict[str, Any], slack: float = 4e-6) -> None:
    truth = attend(batch, torch.float64, **options)
    got = call(batch, backend, options)
    assert got.dtype == batch.q.dtype
    assert_accurate(backend, got, truth, slack=max(slack, weights_rounding(backend, got.dtype)))


@pytest.mark.parametrize(("backend", "dtype"), with_dtypes(BACKENDS), ids=str)
@pytest.mark.parametrize("names", SETS)
def test_ragged_batch(backend: str, dtype: torch.dtype, names: str) -> None:
    block_size = 5 if "softcap" in names else 16
    batch, options = make_batch(RAGGED, dtype, block_size=block_size), make_options(names)
    forget_passed_blocks(batch, options, block_size)
    check(backend, batch, options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "window"), [*(("window", tokens) for tokens in (1, 16, 33, 1000)), ("chunk", 1), ("chunk", 33)]
)
@pytest.mark.parametrize("block_size", [16, 5])
def test_windows_and_chunks(backend: str, name: str, window: int, block_size: int) -> None:
    batch, options = make_batch(RAGGED, torch.float32, block_size=block_size), make_options(name, window=window)
    forget_passed_blocks(batch, options, block_size)
    check(backend, batch, options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((6, 3), 64),
        ((7, 1), 80),
        ((4, 4), 96),
        ((2, 1), 112),
        ((2, 1), 128),
        ((2, 1), 192),
        ((2, 2), 256),
        ((3, 1), 33),
    ],
)
def test_heads(backend: str, heads: tuple[int, int], head_dim: int) -> None:
    batch = make_batch([(1, 37), (12, 12), (2, 3)], torch.float32, heads, head_dim)
    check(backend, batch, {})
    check(backend, batch, make_options("window softcap alibi_slopes sinks", heads[0]))


@pytest.mark.parametrize("backend", ["reference", *COMPILED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", ["window", "window sinks", "softcap alibi_slopes sinks", "chunk"])
def test_long_contexts(backend: str, dtype: torch.dtype, names: str) -> None:
    # Windows that begin in another segment of 256 tokens than the query, on and off the borders of chunks.
    for window in (64, 300):
        batch, options = make_batch([(1, 700), (90, 513), (1, 256)], dtype, (3, 1)), make_options(names, 3, window)
        forget_passed_blocks(batch, options, 16)
        check(backend, batch, options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_peaked_scores(backend: str) -> None:
    batch = make_batch(RAGGED, torch.float32, sharpness=30.0)
    # A score of 100 is known to 1e-5, and so is its exponential.
    check(backend, batch, make_options("window sinks"), slack=2e-5)
    check(backend, batch, make_options("sinks") | {"softcap": 50.0}, slack=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_that_outweighs_all_keys(backend: str) -> None:
    batch = make_batch(RAGGED, torch.float32)
    check(backend, batch, {"sinks": torch.tensor([200.0, -200.0, 0.0, 30.0, 88.0, -88.0])})


@pytest.mark.parametrize("backend", COMPILED)
def test_requests_that_share_a_prefix(backend: str) -> None:
    batch = make_batch([(1, 300), (20, 310), (1, 290), (50, 330), (1, 30)], torch.float32, HEADS)
    batch.share_prefix([0, 1, 2, 3], 17, 16)
    for names in ("window", "window sinks", "chunk", "alibi_slopes", "softcap"):
        check(backend, batch, make_options(names, window=100))


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("names", ["window", "window softcap alibi_slopes sinks", "chunk", "alibi_slopes", "sinks"])
def test_a_row_does_not_depend_on_its_batch_or_cut(backend: str, names: str) -> None:
    batch, options = (
        make_batch([(600, 650), (1, 400), (30, 90)], torch.bfloat16, HEADS, 48),
        make_options(names, window=77),
    )
    together, starts = call(batch, backend, options), batch.query_start_loc.tolist()
    for row in range(3):
        assert torch.equal(call(batch.part(row), backend, options), together[starts[row] : starts[row + 1]])
    cuts = [0, 1, 4, 77, 206, 207, 462, 599, 600]
    pieces = [call(batch.part(0, first, last), backend, options) for first, last in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), together[:600])
