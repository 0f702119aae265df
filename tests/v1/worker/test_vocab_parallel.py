"""Slices of the vocabulary give what whole rows give: SlicedVocab against WholeVocab, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from memory_group import run_ranks
from torch import Tensor

from vllm.distributed.communicator import Communicator, split_vocab
from vllm.ops.token_readings import RowReadings
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of

T = TypeVar("T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def on_ranks(world_size: int, logits: Tensor, run: Callable[[WholeVocab, Tensor], T]) -> list[T]:
    """Each rank's result, given its slice of whole rows."""
    vocab_size = logits.shape[1]

    def one(group: Communicator) -> T:
        own = split_vocab(vocab_size, group.world_size)[group.rank]
        return run(vocab_of(vocab_size, group), logits[:, own.start : own.stop])

    return run_ranks(world_size, one)


def same_on_all(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The ranks' common result, bit by bit."""
    first, *others = results
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert one.dtype == two.dtype and one.shape == two.shape
            assert one.numpy().tobytes() == two.numpy().tobytes()
    return first


def make_logits(draw: st.DrawFn, num_rows: int, vocab_size: int) -> Tensor:
    """Rows of one kind each: normal, with ties, with much or everything at -inf, peaked, of one value."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(num_rows, vocab_size, generator=generator) * draw(st.sampled_from([0.1, 4.0]))
    for row in rows:
        kind = draw(st.sampled_from(["normal", "ties", "some -inf", "half -inf", "all -inf", "peak", "level"]))
        if kind == "ties":
            row.copy_(torch.randint(-2, 3, row.shape, generator=generator))
        elif kind == "some -inf":
            row[torch.rand(row.shape, generator=generator) < draw(st.sampled_from([0.5, 0.99]))] = -torch.inf
        elif kind == "half -inf":  # whole slices
            row[: (vocab_size + 1) // 2] = -torch.inf
        elif kind == "all -inf":
            row.fill_(-torch.inf)
        elif kind == "peak":
            row[draw(st.integers(0, vocab_size - 1))] = 50.0
        elif kind == "level":
            row.fill_(0.25)
    return rows.to(draw(st.sampled_from(FLOATS)))


@st.composite
def reading_cases(draw: st.DrawFn) -> tuple[int, Tensor, Tensor, int, Tensor | None]:
    """World size, whole rows [R, V], columns int32 [R, 1 + K + M], K, valid columns."""
    world_size = draw(st.integers(1, 4))
    # Few ids: whole rows travel. Many: they do not.
    vocab_size = draw(st.one_of(st.integers(1, 12), st.integers(60, 400), st.integers(6000, 6010)))
    num_rows = draw(st.integers(1, 4))
    num_topk = draw(st.integers(0, min(vocab_size, 100)))
    width = draw(st.one_of(st.integers(0, 12), st.sampled_from([70, 300])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    columns = torch.randint(vocab_size, (num_rows, 1 + num_topk + width), generator=generator, dtype=torch.int32)
    # Ids at the slices' ends, and some twice.
    bounds = [id for own in split_vocab(vocab_size, world_size) if own for id in (own.start, own.stop - 1)]
    named = columns[:, 1 + num_topk :]
    for column, token_id in enumerate((bounds * 2)[: min(width, 16)]):
        named[:, column] = token_id
    num_valid = None
    if draw(st.booleans()):
        num_named = torch.randint(width + 1, (num_rows,), generator=generator, dtype=torch.int32)
        num_valid = num_named + 1 + num_topk
    return world_size, make_logits(draw, num_rows, vocab_size), columns, num_topk, num_valid


def assert_near(got: Tensor | None, wanted: Tensor | None) -> None:
    """Off by no more than a few float32 roundings: those of the slices' sums and of their join."""
    assert got is not None and wanted is not None
    torch.testing.assert_close(got, wanted, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(reading_cases(), st.booleans(), st.booleans())
def test_reading(case, entropy: bool, greedy: bool) -> None:
    world_size, logits, columns, num_topk, num_valid = case

    def read(vocab: WholeVocab, part: Tensor) -> tuple[Tensor, ...]:
        given = columns.clone()
        readings = vocab.read(part, columns, num_topk, num_valid, entropy, None if greedy else columns[:, 0])
        assert torch.equal(columns, given)
        return (readings.token_ids, *(each for each in readings[:6] if each is not None))

    got_columns, *got = same_on_all(on_ranks(world_size, logits, read))
    columns_wanted, *wanted = read(WHOLE, logits)
    assert torch.equal(got_columns, columns_wanted)
    got_readings, readings = RowReadings(*got), RowReadings(*wanted)
    assert torch.equal(got_readings.logits, readings.logits)
    assert torch.equal(got_readings.ranks, readings.ranks)
    assert torch.equal(got_readings.argmax, readings.argmax)
    assert torch.equal(got_readings.max, readings.max)
    assert [part.dtype for part in got] == [part.dtype for part in wanted]
    assert_near(got_readings.lse, readings.lse)
    if entropy:
        assert_near(got_readings.entropy, readings.entropy)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.one_of(st.integers(1, 12), st.integers(2000, 2009)))
def test_most_likely_and_maxima(data: st.DataObject, world_size: int, vocab_size: int) -> None:
    logits = data.draw(st.composite(make_logits)(3, vocab_size))
    token_ids, lse = same_on_all(on_ranks(world_size, logits, lambda vocab, part: vocab.most_likely(part)))
    wanted_ids, wanted_lse = WHOLE.most_likely(logits)
    assert torch.equal(token_ids, wanted_ids)
    assert_near(lse, wanted_lse)
    floats = logits.float()
    (highest,) = same_on_all(on_ranks(world_size, floats, lambda vocab, part: (vocab.highest(vocab.workspace(part)),)))
    assert torch.equal(highest, floats.amax(dim=-1))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("spoiler", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab_size", [12, 3000])
def test_spoilt_rows_are_known_on_all_ranks(world_size: int, spoiler: float, vocab_size: int) -> None:
    """Wherever it stands: no finite lse, no entropy, some id as argmax, and the other row is right."""
    torch.manual_seed(0)
    logits = torch.randn(2, vocab_size)
    clean = logits[1:].clone()
    columns = torch.tensor([[1, 2, 3, vocab_size - 1]] * 2, dtype=torch.int32)
    for at in (0, vocab_size // 2, vocab_size - 1):
        logits[0] = clean[0]
        logits[0, at] = spoiler

        def read(vocab: WholeVocab, part: Tensor) -> RowReadings:
            return vocab.read(part, columns, 2, None, True, columns[:, 0])

        got = on_ranks(world_size, logits, read)[0]
        assert got.entropy is not None
        assert not got.lse[0].isfinite() and got.entropy[0].isnan()
        assert 0 <= got.argmax[0] < vocab_size
        wanted = WHOLE.read(clean, columns[1:], 2, None, True, columns[1:, 0])
        assert torch.equal(got.logits[1:], wanted.logits) and torch.equal(got.ranks[1:], wanted.ranks)
        for found in on_ranks(world_size, logits, lambda vocab, part: vocab.highest(vocab.workspace(part))):
            assert not found[0].isfinite() and found[1].isfinite()


# -- what is cut, and draws ----------------------------------------------------------------------------------


def whole_again(world_size: int, logits: Tensor, change: Callable[[WholeVocab, Tensor], None]) -> Tensor:
    """Rows whose slices were changed in workspaces, joined; nothing may be left in the other ranks' column."""

    def one(vocab: WholeVocab, part: Tensor) -> tuple[Tensor, Tensor]:
        rows = vocab.workspace(part.clone())
        change(vocab, rows)
        return rows[:, : part.shape[1]], rows[:, part.shape[1] :]

    parts, strangers = zip(*on_ranks(world_size, logits, one), strict=True)
    assert all((column == -torch.inf).all() for column in strangers)
    return torch.cat(parts, dim=1)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 5, 300, 3001]))
def test_top_k(data: st.DataObject, world_size: int, vocab_size: int) -> None:
    logits = data.draw(st.composite(make_logits)(3, vocab_size)).float()
    k = data.draw(st.integers(0, min(vocab_size, 320)))
    values, token_ids = same_on_all(
        on_ranks(world_size, logits, lambda vocab, part: vocab.topk(vocab.workspace(part), k))
    )
    wanted_values, wanted_ids = WHOLE.topk(logits, k)
    assert torch.equal(values, wanted_values) and torch.equal(token_ids, wanted_ids)
    kept = whole_again(world_size, logits, lambda vocab, rows: vocab.keep_only_(rows, wanted_ids, wanted_values))
    wanted = logits.clone()
    WHOLE.keep_only_(wanted, wanted_ids, wanted_values)
    assert torch.equal(kept, wanted)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 4), st.sampled_from([7, 6000]), st.sampled_from([0.3, 3.0]))
def test_top_p(data: st.DataObject, world_size: int, vocab_size: int, scale: float) -> None:
    """Rows with a narrow nucleus, with one beyond what the ranks offer (at a small scale), and with all of it."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(4, vocab_size, generator=generator) * scale
    top_p = torch.tensor([0.2, 0.7, 0.95, 1.0])
    got = whole_again(world_size, logits, lambda vocab, rows: vocab.keep_top_p_(rows, top_p))
    probs = logits.double().softmax(dim=-1)
    for row, share in enumerate(top_p.tolist()):
        by_rank = probs[row].sort(descending=True, stable=True)
        before = by_rank.values.cumsum(dim=0) - by_rank.values
        # Where rounding decides, either is right.
        surely, never = before < share - 1e-6, before > share + 1e-6
        kept = got[row][by_rank.indices] > -torch.inf
        assert kept[surely].all() and not kept[never].any()
        assert torch.equal(got[row][by_rank.indices][kept], logits[row][by_rank.indices][kept])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 4), st.one_of(st.integers(1, 12), st.integers(1500, 1510)))
def test_draws(data: st.DataObject, world_size: int, vocab_size: int) -> None:
    logits = data.draw(st.composite(make_logits)(4, vocab_size)).float()
    temperature = torch.tensor([0.0, 1.0, 0.5, 20.0])
    seeds = torch.tensor([data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(4)])
    positions = torch.arange(4)

    def draw(vocab: WholeVocab, part: Tensor) -> tuple[Tensor, ...]:
        rows = vocab.workspace(part)
        drawn = vocab.draw(rows, temperature, seeds, positions, [rows.amax(dim=-1), -rows[:, 0]])
        return drawn.token_ids, drawn.logits, drawn.maxima[0]

    token_ids, drawn_logits, highest = same_on_all(on_ranks(world_size, logits, draw))
    wanted = draw(WHOLE, logits)
    assert torch.equal(token_ids, wanted[0])
    assert torch.equal(drawn_logits, wanted[1])
    assert torch.equal(highest, wanted[2])
