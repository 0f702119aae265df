"""The Triton backend's own: layouts of the cache, splits of a context, and what a row's bits depend on."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_paged_attention import RAGGED, check, make_batch
from triton.runtime.interpreter import InterpretedFunction

from vllm.ops.kv_cache import cache_rows
from vllm.ops.triton import paged_decode

# Contexts of one and of several splits, with whole and partial tiles, decoded and prefilled.
LONG = [(1, 700), (1, 512), (3, 513), (1, 1), (0, 600), (1, 513)]


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than are added up at once, of few tokens."""
    monkeypatch.setattr(paged_decode, "_SPLIT_TOKENS", 64)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"),
    [
        (torch.float32, (3, 1), 64, 16),
        (torch.bfloat16, (2, 2), 80, 32),
        (torch.bfloat16, (5, 1), 128, 5),
        (torch.float16, (4, 2), 128, 16),
        (torch.float32, (1, 1), 256, 16),
    ],
    ids=str,
)
def test_long_contexts(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    check("triton", make_batch(LONG, dtype, heads, head_dim, block_size))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_more_splits_than_are_added_up_at_once(dtype: torch.dtype) -> None:
    check("triton", make_batch([(1, 700), (1, 130), (1, 64)], dtype, (6, 2), 24, sharpness=3.0), slack=4e-6)


@pytest.mark.usefixtures("short_splits")
def test_a_decoded_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(1, 300), (4, 90), (1, 64), (1, 65), (1, 200)]
    batch = make_batch(lengths, torch.bfloat16, (4, 2), 24)
    together, starts = batch.run("triton"), batch.query_start_loc.tolist()
    for row in range(len(lengths)):
        assert torch.equal(batch.part(row).run("triton"), together[starts[row] : starts[row + 1]])
    # One program for all splits of a request, as where there are many requests.
    monkeypatch.setattr(paged_decode, "_DECODE_PROGRAMS", 1)
    assert torch.equal(batch.run("triton"), together)


@pytest.fixture
def products_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles by NumPy's library, which on some CPUs adds a row's products in an order that
    follows the row's place in the tile. Rounded from float64, they are the same wherever it stands."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype or np.result_type(a, b))

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.usefixtures("products_in_float64")
def test_a_prefilled_row_does_not_depend_on_how_its_prompt_was_cut() -> None:
    batch = make_batch([(60, 90)], torch.float32, (6, 2), 24)
    whole = batch.run("triton")
    pieces = [batch.part(0, first, last).run("triton") for first, last in pairwise([0, 2, 37, 60])]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(
    ("lengths", "launched"),
    [
        ([(1, 40), (1, 16), (1, 3)], ["_decode_kernel"]),
        ([(3, 40), (0, 700), (70, 70)], ["_prefill_kernel"]),
        ([(1, 40), (1, 16), (33, 40), (0, 9), (17, 520)], ["_decode_kernel", "_prefill_kernel"]),
        ([(1, 700), (1, 16), (3, 9)], ["_decode_kernel", "_merge_splits_kernel", "_prefill_kernel"]),
    ],
    ids=["decodes", "prompts", "both", "long decodes"],
)
def test_only_what_there_is_is_launched(
    lengths: list[tuple[int, int]], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(lengths, torch.float32)
    expected, names, sizes = batch.run("triton"), [], []
    launch = InterpretedFunction.run

    def counting(self: InterpretedFunction, *args: object, grid: tuple[int, ...], **kwargs: object) -> None:
        names.append(self.__name__)
        sizes.append(math.prod(grid))
        launch(self, *args, grid=grid, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counting)
    decodes = [context for queries, context in lengths if queries == 1]
    assert torch.equal(batch.run("triton", None, len(decodes), max(decodes, default=0)), expected)
    assert names == launched
    told, names[:], sizes[:] = sum(sizes), [], []
    assert torch.equal(batch.run("triton"), expected)
    # Rows of the one kind take no program of the other kind's kernel.
    assert told < sum(sizes) and len(names) == 3 if max(context for _, context in lengths) > 512 else 2


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_every_layout_of_the_cache(backend: str) -> None:
    batch = make_batch(RAGGED[:5], torch.float32)
    expected = batch.run(backend)
    rows = cache_rows(batch.k_cache, batch.v_cache, batch.q.shape[2])
    token_major = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in rows)
    cells = batch.k_cache, batch.v_cache
    for caches in (cells, token_major, tuple(each.contiguous() for each in rows)):
        assert torch.equal(batch.run_over(caches, backend), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((9, 3), 64), ((8, 8), 256), ((28, 4), 80)])
def test_real_sizes_on_a_device(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    lengths = [(1, 9000), (300, 300), (64, 700), (513, 2000), *[(1, 50 + 61 * row) for row in range(40)]]
    check("triton", make_batch(lengths, dtype, heads, head_dim))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_real_sizes_on_a_device(dtype: torch.dtype) -> None:
    lengths = [(1, 9000), (1300, 1500), (1, 700), (1, 512), (900, 900)]
    batch = make_batch(lengths, dtype, (16, 8), 128)
    together, starts = batch.run("triton"), batch.query_start_loc.tolist()
    for row in range(len(lengths)):
        assert torch.equal(batch.part(row).run("triton"), together[starts[row] : starts[row + 1]])
    pieces = [batch.part(1, first, last).run("triton") for first, last in pairwise([0, 2, 77, 700, 1300])]
    assert torch.equal(torch.cat(pieces), together[starts[1] : starts[2]])
