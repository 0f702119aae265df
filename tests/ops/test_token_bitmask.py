"""keep_bits_ forbids what has no bit, and changes nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import backends, run, strided

from vllm.ops.token_bitmask import keep_bits_

BACKENDS = backends("keep_bits_")


def masks(rows: int, words: int, seed: int = 0) -> torch.Tensor:
    """Random bits, and rows with all and with none."""
    found = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
    found[1:2], found[2:3] = -1, 0
    return torch.from_numpy(found)


def expected(logits: torch.Tensor, mask: torch.Tensor, first: int, rows: list[int]) -> np.ndarray:
    found = logits.numpy().copy()
    bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)
    for row, allowed in zip(rows, bits, strict=True):
        found[row, ~allowed[first : first + found.shape[1]]] = -np.inf
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "first"),
    [(0, 5, 0), (1, 1, 0), (3, 7, 30), (4, 32, 0), (4, 64, 32), (4, 63, 33), (5, 1057, 1), (4, 5003, 777)],
)
def test_what_has_no_bit_is_forbidden(backend: str, num_rows: int, vocab_size: int, first: int) -> None:
    logits = strided(torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)))
    if num_rows:
        logits[0, 0], logits[-1, -1] = torch.nan, -torch.inf
    # No word more than is needed, and one more.
    for words in (-(-(first + vocab_size) // 32), -(-(first + vocab_size) // 32) + 1):
        mask = masks(num_rows, words)
        got = strided(logits)
        run(backend, keep_bits_, got, mask, first)
        np.testing.assert_array_equal(got.numpy(), expected(logits, mask, first, list(range(num_rows))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_mask_stay(backend: str) -> None:
    logits, rows = torch.randn(7, 100), [5, 0, 3]
    mask = masks(3, 4)
    got = strided(logits)
    run(backend, keep_bits_, got, mask, 0, torch.tensor(rows))
    np.testing.assert_array_equal(got.numpy(), expected(logits, mask, 0, rows))


def test_wrong_arguments() -> None:
    logits = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="logits must be float32"):
        keep_bits_(logits.double(), masks(2, 2))
    with pytest.raises(ValueError, match="bits up to 40"):
        keep_bits_(logits, masks(2, 1))
    with pytest.raises(ValueError, match="bits up to 70"):
        keep_bits_(logits, masks(2, 2), 30)
    with pytest.raises(ValueError, match="2] rows"):
        keep_bits_(logits, masks(3, 2))
    with pytest.raises(ValueError, match="rows be int64"):
        keep_bits_(logits, masks(2, 2), 0, torch.zeros(2, dtype=torch.int32))
