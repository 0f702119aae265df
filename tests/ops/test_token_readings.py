"""token_readings against float64: lse and entropy near, chosen logits, ranks, argmax and maximum exact."""

from __future__ import annotations

import mmap
from functools import partial

import pytest
import torch
from backends import DTYPES, backends, remembered, run, strided, with_dtypes
from torch import Tensor

from vllm.ops.token_readings import RowReadings, token_readings

BACKENDS = backends("token_readings")
TWIN_DTYPES = with_dtypes(BACKENDS)

with_entropy = partial(token_readings, entropy=True)


def outputs(readings: RowReadings) -> list[Tensor]:
    """All that was computed, but for the logprobs, which follow: the entropy only if it was asked for."""
    return [part for part in readings[:6] if part is not None]


def rows_of(readings: RowReadings, rows: slice) -> RowReadings:
    return RowReadings(*(part[rows].cpu() for part in outputs(readings)))


@remembered
def truth(logits: Tensor, token_ids: Tensor, num_token_ids: Tensor | None) -> tuple[Tensor, ...]:
    """float64 chosen logits, int ranks, float64 lse, argmax, maximum."""
    values = logits.double()
    columns = torch.arange(token_ids.shape[1]).expand(token_ids.shape)
    is_asked = columns >= 0 if num_token_ids is None else columns < num_token_ids[:, None]
    chosen = values.gather(1, token_ids.long().where(is_asked, 0))
    num_greater = values.shape[1] - torch.searchsorted(values.sort(dim=1).values, chosen, right=True)
    ranks = (1 + num_greater).where(is_asked, 0).int()
    chosen = chosen.where(is_asked, 0.0)
    highest = values.amax(dim=-1)
    first = torch.tensor([int((row == top).nonzero()[0, 0]) for row, top in zip(values, highest, strict=True)])
    return chosen, ranks, values.logsumexp(dim=-1), first.to(torch.int32), highest


def assert_true(got: RowReadings, logits: Tensor, ids: Tensor, num_ids: Tensor | None = None) -> None:
    chosen, ranks, lse, argmax, highest = truth(logits, ids, num_ids)
    assert got.entropy is None
    assert [part.dtype for part in outputs(got)] == [
        torch.float32,
        torch.int32,
        torch.float32,
        torch.int32,
        torch.float32,
    ]
    assert torch.equal(got.logits.double(), chosen)
    assert torch.equal(got.ranks, ranks)
    assert_logprobs(got, num_ids)
    assert torch.equal(got.argmax, argmax)
    assert torch.equal(got.max.double(), highest)
    infinite = lse.isinf()
    assert torch.equal(got.lse.double()[infinite], lse[infinite])
    got_lse, lse = got.lse.double()[~infinite], lse[~infinite]
    plain = logits.float().logsumexp(dim=-1).double()[~infinite]
    assert not got_lse.isnan().any()
    allowed = (plain - lse).abs() + 4 * torch.finfo(torch.float32).eps * lse.abs().clamp(min=1)
    assert ((got_lse - lse).abs() <= allowed).all()


def assert_logprobs(got: RowReadings, num_ids: Tensor | None) -> None:
    """Where a backend computes them, they are what its caller would make of the rest."""
    if got.logprobs is None:
        return
    expected = got.logits - got.lse[:, None]
    if num_ids is not None:
        expected[torch.arange(expected.shape[1]) >= num_ids[:, None]] = 0.0
    torch.testing.assert_close(got.logprobs, expected, rtol=0, atol=0, equal_nan=True)


def assert_entropy(got: Tensor | None, logits: Tensor) -> None:
    """Off by no more than a plain float32 computation and a few roundings."""
    assert got is not None and got.dtype == torch.float32 and got.shape == logits.shape[:1]
    entropy = torch.special.entr(logits.double().softmax(dim=-1)).sum(dim=-1)
    undefined = entropy.isnan()
    assert torch.equal(got.isnan(), undefined)
    got, entropy, plain = got[~undefined], entropy[~undefined], logits[~undefined].float()
    assert (got >= 0).all()
    plain = torch.special.entr(plain.softmax(dim=-1)).sum(dim=-1)
    allowed = (plain.double() - entropy).abs() + 8 * torch.finfo(torch.float32).eps * entropy.clamp(min=1)
    assert ((got.double() - entropy).abs() <= allowed).all()


def assert_same_bits(got: RowReadings, wanted: RowReadings) -> None:
    """All but the entropy; NaN equals NaN."""
    for one, other in zip(got[:5], wanted[:5], strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def interpretable(backend: str, width: int, limit: int = 20) -> int:
    """Not as many ids where each takes the interpreter milliseconds a chunk; of very many the ranks come from a
    sort."""
    interprets = backend == "triton" and not torch.cuda.is_available()
    return min(width, limit) if interprets and width <= 256 else width


def ids_for(num_rows: int, vocab_size: int, width: int) -> Tensor:
    return torch.randint(0, vocab_size, (num_rows, width), dtype=torch.int32)


@pytest.mark.parametrize(("backend", "dtype"), TWIN_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "width"),
    [
        (0, 5, 2),
        (1, 1, 0),
        (1, 1, 3),
        (3, 7, 7),
        (1, 4096, 1),
        (2, 4097, 9),
        (2, 12345, 64),
        (2, 601, 65),
        (2, 601, 257),
    ],
)
def test_shapes(backend: str, dtype: torch.dtype, num_rows: int, vocab_size: int, width: int) -> None:
    torch.manual_seed(width)
    width = interpretable(backend, width, 34 if vocab_size < 1000 else 3)
    logits = torch.randn(num_rows, vocab_size).mul_(4).to(dtype)
    ids = ids_for(num_rows, vocab_size, width)
    got = run(backend, token_readings, logits, ids, None)
    assert_true(got, logits, ids)
    asked = run(backend, with_entropy, logits, ids, None)
    assert_entropy(asked.entropy, logits)
    assert_same_bits(asked, got)


def _normal() -> Tensor:
    return torch.randn(4, 4099) * 3


def _peaked() -> Tensor:
    logits = _normal()
    logits[:, 4098] = 60.0
    return logits


def _ties() -> Tensor:
    return torch.randint(-2, 3, (4, 4099)).float()


def _all_equal() -> Tensor:
    return torch.full((4, 4099), 0.1)


def _some_minus_infinity() -> Tensor:
    logits = _normal()
    return logits.masked_fill_(torch.rand(logits.shape) < 0.5, -torch.inf)


def _ruled_out() -> Tensor:
    """Whole rows, whole chunks, and all but one token."""
    logits = _normal()
    logits[0] = -torch.inf
    logits[1, :4096] = -torch.inf
    logits[2, 4096:] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 7] = -1e4
    return logits


def _large() -> Tensor:
    return _normal() + torch.tensor([6e4, -6e4, 1e4, -1e4])[:, None]


def _wide_range() -> Tensor:
    """Differences up to the widest of the narrowest dtype, of which nearly all have an exponential of 0."""
    return torch.linspace(-6e4, 6e4, 4099)[torch.stack([torch.randperm(4099) for _ in range(4)])]


HOSTILE = [_normal, _peaked, _ties, _all_equal, _some_minus_infinity, _ruled_out, _large, _wide_range]


@pytest.mark.parametrize(
    ("backend", "dtype", "width"),
    [(*each, width) for each in TWIN_DTYPES for width in (20, 70) if width == interpretable(each[0], width)],
    ids=str,
)
@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_values(backend: str, dtype: torch.dtype, make, width: int) -> None:
    torch.manual_seed(0)
    width = interpretable(backend, width, 20 if make is _normal else 5)
    logits = strided(make().to(dtype))
    ids = ids_for(4, 4099, width)
    ids[:, 0], ids[:, 1] = 4098, 4098
    num_ids = torch.tensor([width, 0, 5, 1], dtype=torch.int32)
    # Padding columns must not be looked at.
    for row, count in enumerate(num_ids.tolist()):
        ids[row, count:] = -1 if row % 2 else 2**31 - 1
    got = run(backend, token_readings, logits, strided(ids), num_ids)
    assert_true(got, logits, ids, num_ids)
    asked = run(backend, with_entropy, logits, strided(ids), num_ids)
    assert_entropy(asked.entropy, logits)
    assert_same_bits(asked, got)


@pytest.mark.parametrize(("backend", "dtype"), TWIN_DTYPES, ids=str)
def test_one_finite_logit_has_no_entropy(backend: str, dtype: torch.dtype) -> None:
    logits = torch.full((3, 8193), -torch.inf, dtype=dtype)
    logits[0, 0], logits[1, 8192], logits[2, 5000] = 0.0, -3e4, 6e4
    got = run(backend, with_entropy, logits, ids_for(3, 8193, 1), None)
    assert got.entropy.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [1, 2, 4096, 10001])
def test_equal_logits_have_the_greatest_entropy(backend: str, vocab_size: int) -> None:
    logits = torch.tensor([[0.0], [-1e30], [1e30]]).expand(3, vocab_size).contiguous()
    got = run(backend, with_entropy, logits, ids_for(3, vocab_size, 1), None)
    torch.testing.assert_close(got.entropy, torch.full((3,), vocab_size).log(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_as_far_apart_as_float32_reaches(backend: str) -> None:
    logits = torch.full((1, 9000), -3e38)
    logits[0, [3, 5000]] = 3e38
    got = run(backend, with_entropy, logits, ids_for(1, 9000, 1), None)
    torch.testing.assert_close(got.entropy, torch.tensor([2.0]).log(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 21, 230])
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
def test_the_first_column_becomes_the_argmax(backend: str, width: int, ragged: bool) -> None:
    torch.manual_seed(width)
    width = interpretable(backend, width, 40)
    logits = torch.randn(3, 4500).bfloat16().float()
    ids = torch.randint(0, 4500, (3, width), dtype=torch.int32)
    ids[:, 0] = -7  # not looked at
    counts = torch.tensor([1, width, (width + 1) // 2], dtype=torch.int32) if ragged else None
    got = run(backend, partial(token_readings, greedy=True), logits, ids, counts)
    assert got.token_ids is not None
    assert torch.equal(got.token_ids[:, 0], logits.argmax(dim=-1).to(torch.int32))
    assert torch.equal(got.token_ids[:, 1:], ids[:, 1:]) and (ids[:, 0] == -7).all()
    assert_true(got, logits, got.token_ids, counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_topk", "width"), [(1, 1), (3, 5), (20, 25), (40, 41), (260, 263), (1900, 2000)])
@pytest.mark.parametrize("greedy", [False, True], ids=["given", "greedy"])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_greatest_logits_have_columns(backend: str, num_topk: int, width: int, greedy: bool, num_rows: int) -> None:
    """Columns of a row that threads share, and of rows of their own; with ties, and with rows that are mostly -inf."""
    torch.manual_seed(width)
    if backend == "triton" and num_rows > 1:
        num_rows = 3
    logits = torch.randn(num_rows, 4500).bfloat16().float()
    logits[0, torch.randperm(4500)[:3000]] = -torch.inf
    ids = torch.randint(0, 4500, (num_rows, 1 + width), dtype=torch.int32)
    ids[:, 1 : 1 + num_topk] = -7  # not looked at
    if greedy:
        ids[:, 0] = -7
    counts = torch.randint(1 + num_topk, 2 + width, (num_rows,), dtype=torch.int32)
    reader = partial(token_readings, greedy=greedy, num_topk=num_topk)
    got = run(backend, reader, logits, ids, counts)
    assert got.token_ids is not None
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_topk].to(torch.int32)
    assert torch.equal(got.token_ids[:, 1 : 1 + num_topk], expected)
    first = expected[:, 0] if greedy else ids[:, 0]
    assert torch.equal(got.token_ids[:, 0], first)
    assert torch.equal(got.token_ids[:, 1 + num_topk :], ids[:, 1 + num_topk :])
    assert_true(got._replace(token_ids=None, table=None), logits, got.token_ids, counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_topk", "width"), [(0, 3), (0, 300), (5, 9), (60, 300)])
@pytest.mark.parametrize("greedy", [False, True], ids=["given", "greedy"])
def test_without_ranks_nothing_else_changes(backend: str, num_topk: int, width: int, greedy: bool) -> None:
    torch.manual_seed(width)
    logits, ids = torch.randn(3, 4500).bfloat16(), ids_for(3, 4500, width)
    counts = torch.tensor([width, 1 + num_topk, width], dtype=torch.int32)
    readers = (partial(token_readings, greedy=greedy, num_topk=num_topk, ranks=ranks) for ranks in (True, False))
    ranked, rankless = (run(backend, reader, logits, ids, counts) for reader in readers)
    assert not rankless.ranks.any() and ranked.ranks[:, 0].all()
    assert_same_bits(rankless._replace(ranks=ranked.ranks), ranked)


@pytest.mark.skipif("cpp" not in BACKENDS, reason="no kernel writes a table")
@pytest.mark.parametrize("greedy", [False, True], ids=["given", "greedy"])
@pytest.mark.parametrize("width", [1, 5, 300])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_table_holds_everything_else(greedy: bool, width: int, entropy: bool) -> None:
    """300 columns are ranked by a search."""
    torch.manual_seed(width)
    logits, ids = torch.randn(5, 9001).to(torch.bfloat16), ids_for(5, 9001, width)
    counts = torch.tensor([width, 1, width, (width + 1) // 2, width], dtype=torch.int32)
    got = run("cpp", partial(token_readings, greedy=greedy, entropy=entropy, table=True), logits, ids, counts)
    table = got.table
    assert table is not None and table.dtype == torch.int32 and table.shape == (5, 4 * width + 2)
    read = ids if got.token_ids is None else got.token_ids
    parts = (read, got.logprobs.view(torch.int32), got.logits.view(torch.int32), got.ranks, got.lse[:, None])
    assert torch.equal(table[:, :-1], torch.cat([part.view(torch.int32) for part in parts], dim=1))
    last = table[:, -1].contiguous().view(torch.float32)
    assert torch.equal(last, got.entropy) if got.entropy is not None else bool(last.isnan().all())
    assert_same_bits(
        got._replace(table=None),
        run("cpp", partial(token_readings, greedy=greedy, entropy=entropy), logits, ids, counts),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_token_of_the_vocabulary(backend: str) -> None:
    torch.manual_seed(1)
    logits = torch.randint(-50, 50, (2, 1000)).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(1000), torch.arange(1000)]).to(torch.int32)
    num_ids = torch.tensor([1000, 400], dtype=torch.int32)
    assert_true(run(backend, token_readings, logits, ids, num_ids), logits, ids, num_ids)


@pytest.mark.parametrize(("backend", "dtype"), TWIN_DTYPES, ids=str)
def test_nan_marks_its_own_row_only(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 4500).to(dtype)
    logits[0, 4499], logits[2, 0], logits[3] = torch.nan, torch.nan, torch.nan
    ids = ids_for(4, 4500, 3)
    got = run(backend, token_readings, logits, ids, None)
    assert got.lse.isnan().tolist() == [True, False, True, True]
    assert ((got.argmax >= 0) & (got.argmax < 4500)).all()
    assert_true(rows_of(got, slice(1, 2)), logits[1:2], ids[1:2])
    assert_entropy(run(backend, with_entropy, logits, ids, None).entropy, logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_plus_infinity_has_no_defined_entropy(backend: str) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, 3], logits[1, [0, 4999]] = torch.inf, torch.inf
    got = run(backend, with_entropy, logits, ids_for(3, 5000, 1), None)
    assert got.entropy.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [0, 300])
def test_asking_for_entropy_changes_nothing_else(backend: str, width: int) -> None:
    """Not in rows of -inf and NaN either, nor where the ranks come from a sort."""
    torch.manual_seed(8)
    logits, ids = torch.randn(4, 9001).mul_(5).to(torch.bfloat16), ids_for(4, 9001, width)
    logits[0, 8500], logits[2] = torch.nan, -torch.inf
    got = run(backend, token_readings, logits, ids, None)
    asked = run(backend, with_entropy, logits, ids, None)
    assert got.entropy is None
    assert_entropy(asked.entropy, logits)
    assert_same_bits(asked, got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    torch.manual_seed(3)
    logits, ids = torch.randn(5, 5003), ids_for(5, 5003, 6)
    together = run(backend, with_entropy, logits, ids, None)
    for row in range(5):
        alone = run(backend, with_entropy, logits[row : row + 1], ids[row : row + 1], None)
        for all_rows, one_row in zip(outputs(together), outputs(alone), strict=True):
            assert torch.equal(all_rows[row : row + 1], one_row)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_seen_as_many(backend: str) -> None:
    torch.manual_seed(4)
    logits, ids = torch.randn(1, 300).expand(3, 300), ids_for(3, 300, 2)
    assert_true(run(backend, token_readings, logits, ids, None), logits, ids)


@pytest.mark.parametrize(
    "backend", [backend for backend in BACKENDS if not (backend == "triton" and torch.cuda.is_available())]
)
def test_rows_further_apart_than_an_int32_counts(backend: str) -> None:
    torch.manual_seed(5)
    stride, vocab_size = 2**31 + 64, 500
    # Mapped, not allocated: only the pages of the two rows come to exist.
    memory = mmap.mmap(-1, 2 * (stride + vocab_size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((2, vocab_size), (stride, 1))
    logits.copy_(torch.randn(2, vocab_size))
    ids = ids_for(2, vocab_size, 4)
    assert_true(run(backend, token_readings, logits, ids, None), logits, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_sizes_on_a_device(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    logits = torch.randn(256, 151936, device="cuda").mul_(4).to(dtype)
    ids = ids_for(256, 151936, 20)
    with_kernels = with_entropy(logits, ids.cuda())
    expected = run("reference", with_entropy, logits, ids.cuda(), None)
    assert_same_bits(token_readings(logits, ids.cuda()), with_kernels)
    torch.testing.assert_close(with_kernels.entropy.cpu(), expected.entropy, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(with_kernels[:2], expected[:2], strict=True):
        assert torch.equal(got.cpu(), wanted)
    torch.testing.assert_close(with_kernels.lse.cpu(), expected.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_more_than_two_billion_logits_on_a_device() -> None:
    torch.manual_seed(7)
    num_rows, vocab_size = 2**31 // 151936 + 2, 151936
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    last = torch.randn(1, vocab_size).to(torch.bfloat16)
    logits[-1] = last
    ids = ids_for(num_rows, vocab_size, 4)
    got = token_readings(logits, ids.cuda())
    assert_true(rows_of(got, slice(-1, None)), last, ids[-1:])


@pytest.mark.parametrize(
    ("logits", "ids", "num_ids", "field"),
    [
        (torch.zeros(2, 0), torch.zeros(2, 1, dtype=torch.int32), None, "logits"),
        (torch.zeros(3, 2).t(), torch.zeros(2, 1, dtype=torch.int32), None, "logits"),
        (torch.zeros(2, 3).double(), torch.zeros(2, 1, dtype=torch.int32), None, "logits"),
        (torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64), None, "token_ids"),
        (torch.zeros(2, 3), torch.zeros(3, 1, dtype=torch.int32), None, "token_ids"),
        (torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2), "num_token_ids"),
    ],
)
def test_wrong_arguments_are_named(logits: Tensor, ids: Tensor, num_ids: Tensor | None, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        token_readings(logits, ids, num_ids)
