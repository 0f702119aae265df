"""fill_logprob_token_ids is exact and touches nothing but its own columns."""

from __future__ import annotations

import pytest
import torch
from backends import backends, run, strided

from vllm.ops.fill_token_ids import fill_logprob_token_ids

BACKENDS = backends("fill_logprob_token_ids")
POISON = -7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mapping_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "first_column", "width", "stored_width"),
    [
        (0, 1, 4, 16),
        (1, 0, 1, 1),
        (4, 1, 3, 16),
        (9, 5, 16, 16),
        (6, 2, 40, 16),
        (6, 1, 130, 256),
        (3, 2, 0, 16),
    ],
)
def test_fills_rows_from_their_slots(
    backend: str, mapping_dtype: torch.dtype, num_rows: int, first_column: int, width: int, stored_width: int
) -> None:
    torch.manual_seed(width)
    num_slots, num_lists = 7, 5
    token_ids = torch.randint(1, 2**31 - 1, (num_lists, stored_width), dtype=torch.int32)
    list_idx = torch.randint(0, num_lists, (num_slots,), dtype=torch.int32)
    counts = torch.randint(0, min(width, stored_width) + 1, (num_slots,), dtype=torch.int32)
    counts[0], counts[1] = 0, min(width, stored_width)
    slots = torch.randint(0, num_slots, (num_rows,)).to(mapping_dtype)
    columns = strided(torch.full((num_rows, first_column + width), POISON, dtype=torch.int32))
    got = run(backend, fill_logprob_token_ids, columns, first_column, slots, strided(token_ids), list_idx, counts)
    assert got.dtype == torch.int32 and got.tolist() == [int(counts[slot]) for slot in slots]
    for row, slot in enumerate(slots.tolist()):
        count = int(counts[slot])
        ids = token_ids[list_idx[slot], :count].tolist()
        assert columns[row].tolist() == [POISON] * first_column + ids + [0] * (width - count)
    beyond = columns.as_strided((num_rows, 3), (columns.stride(0), 1), first_column + width)
    assert (beyond == 2**31 - 1).all()
