"""linear_readings against a float64 product: logits and lse near, ranks exact wherever no other logit is too near."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from backends import backends, run, strided
from layouts import ON_CUDA
from pretend_cuda import pretending
from torch import Tensor

from vllm.ops._dispatch import force
from vllm.ops.float_linear import float_linear
from vllm.ops.linear_readings import linear_readings
from vllm.ops.token_readings import RowReadings, token_readings
from vllm.ops.triton import descriptors
from vllm.ops.triton import linear_readings as kernels

BACKENDS = backends("linear_readings")


def matrices(num_rows: int, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(num_rows, hidden_size).to(dtype)
    return hidden, (torch.randn(vocab_size, hidden_size) / hidden_size**0.5).to(dtype)


def integers(num_rows: int, vocab_size: int, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Whose products are exact however they are added up, and often equal."""
    hidden = torch.randint(-2, 3, (num_rows, hidden_size)).to(torch.bfloat16)
    return hidden, torch.randint(-2, 3, (vocab_size, hidden_size)).to(torch.bfloat16)


class Launches(descriptors.Variant):
    """Fails where another kernel would be taken instead, and counts."""

    count = 0

    def launch(self, launch: Callable[[], object]) -> bool:
        launch()
        self.count += 1
        return True


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Triton's kernel is given descriptors, as on a Hopper, where matrices are aligned."""
    if torch.cuda.is_available():
        pytest.skip("there the device decides")
    launches = Launches("counted")
    monkeypatch.setattr(descriptors, "are_fetched", lambda: True)
    monkeypatch.setattr(kernels, "_DESCRIBED", launches)
    return launches


def ids_for(num_rows: int, vocab_size: int, width: int) -> Tensor:
    return torch.randint(0, vocab_size, (num_rows, width), dtype=torch.int32)


def assert_near(got: RowReadings, hidden: Tensor, weight: Tensor, ids: Tensor, tolerance: float) -> None:
    """`tolerance` is how far a sum of products may be off; 0: ranks are exact, too."""
    logits = hidden.double() @ weight.double().t()
    chosen = logits.gather(1, ids.to(torch.int64))
    assert got.entropy is None
    dtypes = [part.dtype for part in got[:5]]
    assert dtypes == [torch.float32, torch.int32, torch.float32, torch.int32, torch.float32]
    assert ((got.logits.double() - chosen).abs() <= tolerance).all()
    assert (
        (got.lse.double() - logits.logsumexp(dim=1)).abs() <= tolerance + 1e-6 * (8 + logits.abs().amax(dim=1))
    ).all()
    assert ((got.max.double() - logits.amax(dim=1)).abs() <= tolerance).all()
    drawn = logits.gather(1, got.argmax[:, None].to(torch.int64))[:, 0]
    assert (logits.amax(dim=1) - drawn <= 2 * tolerance).all()
    most = 1 + (logits[:, None, :] > chosen[:, :, None] - 2 * tolerance).sum(dim=2)
    fewest = 1 + (logits[:, None, :] > chosen[:, :, None] + 2 * tolerance).sum(dim=2)
    assert ((fewest <= got.ranks) & (got.ranks <= most)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "hidden_size", "width"),
    [(1, 1, 8, 0), (3, 300, 64, 3), (130, 513, 100, 2), (0, 5, 8, 1)],
)
def test_shapes(backend: str, dtype: torch.dtype, num_rows: int, vocab_size: int, hidden_size: int, width: int) -> None:
    if backend == "triton" and dtype == torch.float32:
        pytest.skip("runs the reference")
    torch.manual_seed(width)
    hidden, weight = matrices(num_rows, vocab_size, hidden_size, dtype)
    ids = ids_for(num_rows, vocab_size, width)
    got = run(backend, linear_readings, strided(hidden), strided(weight, gap=5), ids, None)
    # Products of 16-bit numbers are exact in float32, their sums round at each step.
    assert_near(got, hidden, weight, ids, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_share_the_better_rank(backend: str) -> None:
    torch.manual_seed(0)
    hidden, weight = integers(5, 600, 32)
    weight[[7, 300, 599]] = weight[20].clone()
    ids = ids_for(5, 600, 4)
    ids[:, :2] = torch.tensor([300, 7])
    got = run(backend, linear_readings, hidden, weight, ids, None)
    assert_near(got, hidden, weight, ids, 0.0)
    assert torch.equal(got.ranks[:, 0], got.ranks[:, 1])
    logits = (hidden.float() @ weight.float().t()).numpy()
    assert got.argmax.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_ids_with_and_without_ranks(backend: str) -> None:
    """As many ids a row as a teacher is asked for, other ones in each row, twice the same among them."""
    torch.manual_seed(2)
    hidden, weight = integers(3, 700, 32)
    ids = ids_for(3, 700, 64)
    ids[:, 40] = ids[:, 3]
    ranked = run(backend, linear_readings, hidden, weight, ids, None)
    assert_near(ranked, hidden, weight, ids, 0.0)
    rankless = run(backend, partial(linear_readings, ranks=False), hidden, weight, ids, None)
    assert not rankless.ranks.any()
    for one, other in zip(rankless._replace(ranks=ranked.ranks)[:5], ranked[:5], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_not_looked_at(backend: str) -> None:
    torch.manual_seed(1)
    hidden, weight = integers(3, 70, 16)
    ids, counts = ids_for(3, 70, 3), torch.tensor([3, 0, 1], dtype=torch.int32)
    plain = run(backend, linear_readings, hidden, weight, ids, None)
    for row, count in enumerate(counts.tolist()):
        ids[row, count:] = 2**31 - 1
    got = run(backend, linear_readings, hidden, weight, ids, counts)
    valid = torch.arange(3) < counts[:, None]
    assert torch.equal(got.ranks, plain.ranks.masked_fill(~valid, 0))
    assert torch.equal(got.logits, plain.logits.masked_fill(~valid, 0.0))
    assert torch.equal(got.lse, plain.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_not_finite_marks_its_own_row_only(backend: str) -> None:
    torch.manual_seed(2)
    hidden, weight = integers(3, 300, 16)
    hidden[1, 3] = torch.nan
    hidden[2, 3] = torch.inf
    ids = ids_for(3, 300, 2)
    got = run(backend, linear_readings, hidden, weight, ids, None)
    assert got.lse.isfinite().tolist() == [True, False, False]
    assert ((got.argmax >= 0) & (got.argmax < 300)).all()
    assert_near(RowReadings(*(part[:1] for part in got[:5])), hidden[:1], weight, ids[:1], 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "hidden_size", "width"), [(1, 1, 8, 0), (3, 300, 64, 3), (130, 513, 104, 2)]
)
def test_tiles_that_descriptors_fetch_are_the_same(
    described: Launches, dtype: torch.dtype, num_rows: int, vocab_size: int, hidden_size: int, width: int
) -> None:
    torch.manual_seed(width)
    hidden, weight = matrices(num_rows, vocab_size, hidden_size, dtype)
    ids = ids_for(num_rows, vocab_size, width)
    # Between aligned rows lies NaN, which is not read, though it would fill the last tile.
    arguments = strided(hidden, gap=8), strided(weight, gap=16), ids, None
    got = run("triton", linear_readings, *arguments)
    assert described.count == 1
    assert_near(got, hidden, weight, ids, 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "are_fetched", lambda: False)
        plain = run("triton", linear_readings, *arguments)
    assert described.count == 1
    assert all(torch.equal(own, other) for own, other in zip(got[:5], plain[:5], strict=True))


@pytest.mark.parametrize(("hidden_gap", "weight_gap"), [(3, 8), (8, 4)])
def test_rows_that_are_not_aligned_have_no_descriptor(described: Launches, hidden_gap: int, weight_gap: int) -> None:
    torch.manual_seed(4)
    hidden, weight = matrices(3, 20, 16, torch.bfloat16)
    ids = ids_for(3, 20, 2)
    got = run("triton", linear_readings, strided(hidden, hidden_gap), strided(weight, weight_gap), ids, None)
    assert_near(got, hidden, weight, ids, 1e-5)
    assert described.count == 0


def test_a_matrix_that_starts_between_aligned_places_has_no_descriptor(described: Launches) -> None:
    torch.manual_seed(5)
    hidden, weight = matrices(3, 20, 16, torch.bfloat16)
    memory = torch.empty(4 + hidden.numel(), dtype=hidden.dtype)
    ids = ids_for(3, 20, 2)
    moved = memory[4:].view_as(hidden).copy_(hidden)
    assert_near(run("triton", linear_readings, moved, weight, ids, None), hidden, weight, ids, 1e-5)
    assert described.count == 0


def test_a_kernel_that_cannot_be_launched_is_given_up(
    monkeypatch: pytest.MonkeyPatch, described: Launches, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(6)
    hidden, weight = matrices(3, 20, 16, torch.bfloat16)
    ids = ids_for(3, 20, 2)
    tries = []

    def refuse(*args: object) -> None:
        tries.append(args)
        raise RuntimeError("PassManager::run failed\nat a great length")

    monkeypatch.setattr(kernels, "_DESCRIBED", descriptors.Variant("A fast kernel"))
    monkeypatch.setattr(descriptors, "describe", refuse)
    with caplog.at_level(logging.WARNING, descriptors.logger.name):
        for _ in range(2):
            assert_near(run("triton", linear_readings, hidden, weight, ids, None), hidden, weight, ids, 1e-5)
    assert len(tries) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "A fast kernel is not used, a slower kernel is: RuntimeError: PassManager::run failed"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_sizes_on_a_device(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    hidden, weight = matrices(300, 151936, 1024, dtype)
    weight[151935] = weight[5]
    ids = ids_for(300, 151936, 5)
    ids[:, 0], ids[:, 1] = 5, 151935
    hidden, weight, ids = hidden.cuda(), weight.cuda(), ids.cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = linear_readings(hidden, weight, ids)
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
    # The same weights give the same bits in another tile, and the own column never counts.
    assert torch.equal(got.ranks[:, 0], got.ranks[:, 1]) and torch.equal(got.logits[:, 0], got.logits[:, 1])
    assert_near(RowReadings(*(part[:40] for part in got[:5])), hidden[:40], weight, ids[:40], 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_size", [1000, 1024, 4096])
def test_descriptors_change_no_bit_on_a_device(monkeypatch: pytest.MonkeyPatch, hidden_size: int) -> None:
    torch.manual_seed(7)
    hidden, weight = (part.cuda() for part in matrices(300, 5003, hidden_size, torch.bfloat16))
    ids = ids_for(300, 5003, 3).cuda()
    got = linear_readings(hidden, weight, ids)
    assert kernels._DESCRIBED.is_on
    monkeypatch.setattr(descriptors, "are_fetched", lambda: False)
    plain = linear_readings(hidden, weight, ids)
    assert all(torch.equal(own, other) for own, other in zip(got[:5], plain[:5], strict=True))


@pytest.mark.parametrize(
    ("hidden", "weight", "ids", "counts", "field"),
    [
        (torch.zeros(2, 3).double(), torch.zeros(4, 3), torch.zeros(2, 1, dtype=torch.int32), None, "hidden"),
        (torch.zeros(3, 2).t(), torch.zeros(4, 3), torch.zeros(2, 1, dtype=torch.int32), None, "hidden"),
        (torch.zeros(2, 3), torch.zeros(4, 2), torch.zeros(2, 1, dtype=torch.int32), None, "weight"),
        (torch.zeros(2, 3), torch.zeros(0, 3), torch.zeros(2, 1, dtype=torch.int32), None, "weight"),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 1, dtype=torch.int64), None, "token_ids"),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2), "num_token_ids"),
    ],
)
def test_wrong_arguments_are_named(
    hidden: Tensor, weight: Tensor, ids: Tensor, counts: Tensor | None, field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        linear_readings(hidden, weight, ids, counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_a_position_reads_alike_as_a_prompts_and_as_an_outputs(device: str, dtype: torch.dtype) -> None:
    """A prompt's logits are not kept; an output's are in memory, in float32. Both sum the same products."""
    torch.manual_seed(0)
    hidden, weight = matrices(20, 261, 256, dtype)
    ids = ids_for(20, 261, 20)
    is_there = device == "cpu" or torch.cuda.is_available()
    with torch.inference_mode(), nullcontext() if is_there else pretending(interpreted=True), force("triton"):
        there = [part.to(device) for part in (hidden, weight, ids)]
        prompt, output = linear_readings(*there), token_readings(float_linear(*there[:2]), there[2])
        logprobs = [(each.logits - each.lse[:, None]).cpu() for each in (prompt, output)]
        ranks = [each.ranks.cpu() for each in (prompt, output)]
    # Float32 sums in two orders, of 256 products that sum to about 1.
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-5)
    # Where 16 bits would make many logits equal.
    assert (ranks[0] == ranks[1]).double().mean() > 0.99
