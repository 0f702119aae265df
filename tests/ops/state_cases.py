"""Rows of tokens with states, for tests of the operations that keep one: ragged, in parts, and alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from backends import run
from torch import Tensor

# Slack for float32 sums and exponentials over many tokens, relative to the greatest value.
SLACK = 1e-5

Operation = Callable[..., Tensor]


@dataclass(frozen=True)
class Rows:
    """The tokens that each row has, and those before them."""

    lengths: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_slots(self) -> int:
        return len(self.lengths) + 2

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """state_slots, query_start_loc and seq_lens; slots are in another order, and there are some that no row has."""
        slots = torch.arange(len(self.lengths)).flip(0) + 1
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        return slots, starts, torch.tensor(self.lengths, dtype=torch.int32) + torch.tensor(self.before).int()


def ragged(backend: str) -> Rows:
    """New sequences and others, of one token and of more than any kernel takes at a time."""
    # The interpreter takes milliseconds a token.
    lengths = (1, 4, 2) if backend == "triton" else (1, 3, 70, 2)
    return Rows(lengths, (0, 5, 0, 9)[: len(lengths)])


def pool_of(rows: Rows, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """States before, whose slots are apart; where a sequence begins they are NaN, and nobody may read them."""
    size = torch.Size(shape).numel()
    apart = torch.full((rows.num_slots, size + 3), torch.nan)
    pool = apart.to(dtype)[:, :size].unflatten(1, shape)
    slots, starts, seq_lens = rows.tensors()
    for slot, length, seq_len in zip(slots, starts.diff(), seq_lens, strict=True):
        if seq_len > length:
            pool[slot] = torch.randn(tuple(shape)).to(dtype)
    return pool


def copied(pool: Tensor) -> Tensor:
    """The same with the gaps."""
    length = pool.untyped_storage().nbytes() // pool.element_size()
    return pool.as_strided((length,), (1,), 0).clone().as_strided(pool.shape, pool.stride())


def check_parts(
    backend: str,
    operation: Operation,
    per_token: Sequence[Tensor],
    others: Sequence[Any],
    pool: Tensor,
    rows: Rows,
    *options: Any,
) -> None:
    """A row alone, and cut into parts, has the bits of all rows together, and so has its state; other slots stay."""
    if not backend.startswith("cpp") and per_token[0].dtype != torch.float32:
        return
    together = copied(pool)
    whole = run(backend, operation, *per_token, *others, together, *rows.tensors(), *options)
    slots, starts, seq_lens = rows.tensors()
    unused = [slot for slot in range(rows.num_slots) if slot not in slots.tolist()]
    assert together[unused].isnan().all()
    for row, (slot, first, last) in enumerate(
        zip(slots.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ):
        if row % 2 == 0 and last - first == 1:
            continue
        alone = copied(pool)
        for begin, end in _parts(first, last):
            tokens = [None if each is None else each[begin:end] for each in per_token]
            seq_len = (seq_lens[row] - (last - end)).reshape(1).int()
            where = torch.tensor([slot]), torch.tensor([0, end - begin]).int(), seq_len
            part = run(backend, operation, *tokens, *others, alone, *where, *options)
            _assert_same(backend, part, whole[begin:end])
        _assert_same(backend, alone[slot], together[slot])


def _assert_same(backend: str, got: Tensor, expected: Tensor) -> None:
    if backend != "reference":
        assert got.equal(expected)
        return
    # PyTorch's functions take the last values of a tensor another way than the others.
    most = SLACK * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(got.dtype).eps, atol=most)


def _parts(first: int, last: int) -> list[tuple[int, int]]:
    """One token, then a few, then the rest."""
    borders = sorted({first, min(first + 1, last), min(first + 4, last), last})
    return list(itertools.pairwise(borders))
