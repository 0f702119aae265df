"""packed_attention against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, remembered, run, weights_rounding
from layouts import needs_kernels
from torch import Tensor

from vllm.ops._dispatch import cpu_ops
from vllm.ops.packed_attention import packed_attention

# On CUDA PyTorch's attention runs, as in the reference.
BACKENDS = [each for each in backends("packed_attention") if each != "triton"]
LENGTHS = [1, 63, 64, 65, 3, 7, 7, 130]
WINDOWS = [(0, 0), (3, 3), (64, 64), (0, 5), (70, 1), (600, 600)]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def rows_of(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as one product gives them, with NaN behind each row."""
    counts = [heads[0], heads[1], heads[1]]
    width = sum(counts) * dim
    wide = torch.full((tokens, width + 8), torch.nan, dtype=dtype)
    # Peaked scores: some keys get nearly all of the weight.
    wide[:, :width] = 2 * torch.randn(tokens, width)
    return list(wide[:, :width].view(tokens, -1, dim).split(counts, 1))


@remembered
def truth(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, dtype: Any = torch.float64, **options: Any):
    parts = []
    lengths = starts.diff().tolist()
    for queries, keys, values in zip(*(each.to(dtype).split(lengths) for each in (q, k, v)), strict=True):
        keys, values = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        distances = torch.arange(len(keys)) - torch.arange(len(keys))[:, None]
        if "softcap" in options:
            scores = options["softcap"] * (scores / options["softcap"]).tanh()
        if "alibi_slopes" in options:
            scores = scores - options["alibi_slopes"].to(dtype)[:, None, None] * distances.abs()
        hidden = torch.zeros_like(distances, dtype=torch.bool)
        if "window" in options:
            before, after = options["window"]
            hidden |= (distances < -before) | (distances > after)
        if "seqused_k" in options:
            hidden |= torch.arange(len(keys)) >= options["seqused_k"][len(parts)]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts)


def check(backend: str, rows: list[Tensor], lengths: list[int], **options: Any) -> None:
    starts, scale = starts_of(lengths), rows[0].shape[2] ** -0.5
    attend = partial(packed_attention, **options)
    got = run(backend, attend, *rows, starts, scale)
    assert got.dtype == rows[0].dtype and got.is_contiguous()
    plain = truth(*rows, starts, scale, torch.float32, **options).to(got.dtype)
    # The reference rounds weights to the working dtype, as PyTorch's attention does.
    rounding = torch.finfo(got.dtype).eps if backend == "reference" else weights_rounding(backend, got.dtype)
    # Scores reach 30, of which float32 has the sixth digit, and weights are their exponentials.
    slack = 4e-6 + 2 * rounding
    assert_accurate(backend, got, truth(*rows, starts, scale, **options), plain, slack)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim"), [((2, 2), 32), ((3, 3), 64), ((6, 2), 96), ((8, 1), 128), ((2, 2), 8), ((2, 1), 33), ((1, 1), 1)]
)
def test_ragged_texts(backend: str, dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    torch.manual_seed(dim)
    lengths = [1, 64, 513, 7]
    check(backend, rows_of(sum(lengths), heads, dim, dtype), lengths)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(backend: str, dtype: torch.dtype, window: tuple[int, int]) -> None:
    torch.manual_seed(1)
    check(backend, rows_of(sum(LENGTHS), (4, 2), 32, dtype), LENGTHS, window=window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": (20, 20)}, {"softcap": 3.0, "window": (5, 70)}])
def test_alibi_and_softcap(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    slopes = torch.tensor([0.5, 0.25, 0.01, 0.0])
    rows = rows_of(sum(LENGTHS), (4, 2), 32, dtype)
    check(backend, rows, LENGTHS, alibi_slopes=slopes, **options)
    if "softcap" in options:
        check(backend, rows, LENGTHS, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (20, 3)}, {"window": (5, 0), "softcap": 3.0}])
def test_keys_that_nobody_sees(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(4)
    rows = rows_of(sum(LENGTHS), (2, 1), 48, dtype)
    seen = torch.tensor([1, 30, 0, 64, 2, 7, 3, 65], dtype=torch.int32)
    check(backend, rows, LENGTHS, seqused_k=seen, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_texts_and_empty_ones(backend: str) -> None:
    none = [each[:0] for each in rows_of(1, (2, 1), 8, torch.float32)]
    assert run(backend, packed_attention, *none, starts_of([]), 1.0).shape == (0, 2, 8)
    check(backend, rows_of(5, (2, 1), 8, torch.float32), [0, 2, 0, 0, 3, 0])


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each != "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (9, 80)}, {"alibi_slopes": torch.tensor([0.3, 0.1, 0.0])}])
def test_a_text_does_not_depend_on_the_others(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Not even on whether they hold what is no number."""
    torch.manual_seed(3)
    rows = rows_of(sum(LENGTHS), (3, 1), 48, dtype)
    attend = partial(packed_attention, **options)
    together = run(backend, attend, *rows, starts_of(LENGTHS), 0.2)
    end = 0
    for length in LENGTHS:
        start, end = end, end + length
        alone = run(backend, attend, *(each[start:end] for each in rows), starts_of([length]), 0.2)
        assert torch.equal(alone, together[start:end])
        others = [each.clone() for each in rows]
        for each in others:
            each[:start] = each[end:] = torch.nan
        assert torch.equal(run(backend, attend, *others, starts_of(LENGTHS), 0.2)[start:end], alone)


@needs_kernels
@pytest.mark.parametrize(
    ("starts", "options", "problem"),
    [
        ([0, 3], {}, "cu_seqlens must ascend from 0 to q's 4 tokens"),
        ([0, 5, 4], {}, "cu_seqlens must ascend"),
        ([1, 4], {}, "cu_seqlens must ascend"),
        ([], {}, r"cu_seqlens must have shape \[texts \+ 1\]"),
        (
            [0, 4],
            {"window": (-2, 1)},
            "window must be of at least 0 tokens.*, got -2 and 1",
        ),
        ([0, 4], {"seqused_k": torch.tensor([5]).int()}, "seqused_k must be between 0 and a text's length, 4, got 5"),
        ([0, 4], {"softcap": -1.0}, "softcap must be positive"),
        ([0, 4], {"alibi_slopes": torch.zeros(3)}, "alibi_slopes must have size 2"),
    ],
)
def test_arguments_that_are_refused(starts: list[int], options: dict[str, Any], problem: str) -> None:
    assert cpu_ops() is not None
    rows = rows_of(4, (2, 1), 8, torch.float32)
    with pytest.raises(RuntimeError, match=problem):
        packed_attention(*rows, torch.tensor(starts, dtype=torch.int32), 1.0, **options)
