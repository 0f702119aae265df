"""gumbel_sample against a float64 computation over independently computed Philox bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import backends, run, strided
from noise_kernel import gumbel_noise

from vllm.ops import gumbel_sample as operation
from vllm.ops.gumbel_sample import gumbel_sample

BACKENDS = backends("gumbel_sample")


def philox(seed: int, position: int, num_tokens: int) -> np.ndarray:
    """uint64 [num_tokens] with 32 random bits each, in NumPy's wrapping integers."""
    low = np.uint64(0xFFFFFFFF)
    groups = np.arange((num_tokens + 3) // 4, dtype=np.uint64)
    words = [groups, *(np.full_like(groups, each) for each in (position % 2**32, position >> 32, 0))]
    keys = [np.uint64(seed % 2**32), np.uint64(seed % 2**64 >> 32)]
    for _ in range(10):
        products = [words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)]
        words = [
            products[1] >> np.uint64(32) ^ words[1] ^ keys[0],
            products[1] & low,
            products[0] >> np.uint64(32) ^ words[3] ^ keys[1],
            products[0] & low,
        ]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(words, axis=1).reshape(-1)[:num_tokens]


def noise(bits: np.ndarray) -> np.ndarray:
    """float64 Gumbel noise of the bits, from the uniform number rounded to float32."""
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform.astype(np.float64)))


def assert_true(
    got: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """The token drawn scores as much as the best, but for float32 rounding; exactly if greedy."""
    token_ids, got_scores = got
    assert token_ids.dtype == torch.int32 and got_scores.dtype == torch.float32
    for row, slot in enumerate(slots.tolist()):
        scores = np.nan_to_num(logits[row].double().numpy(), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        warmth = float(temperature[slot])
        if warmth:
            scores = scores + warmth * noise(philox(int(seeds[slot]), int(positions[row]), len(scores)))
        token, best = int(token_ids[row]), scores.max()
        if not warmth or np.isinf(best):
            assert token == int(scores.argmax())
            assert float(got_scores[row]) == best
        else:
            rounding = 1e-6 * max(1.0, abs(best), warmth * 20)
            assert best - scores[token] <= rounding
            assert abs(float(got_scores[row]) - scores[token]) <= rounding


def test_known_bits() -> None:
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(0, 0, 4).tolist() == words
    zero = torch.zeros(1, dtype=torch.int64)
    assert operation._random_bits(zero, zero, 4)[0].tolist() == words


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 3), (1, 1), (2, 3), (4, 4), (9, 2048), (5, 2049), (3, 9001)])
def test_shapes(backend: str, num_rows: int, vocab_size: int) -> None:
    torch.manual_seed(num_rows)
    temperature = torch.tensor([0.7, 0.0, 1.0, 1e-6, 50.0])
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123456789012345])
    positions = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 17, 18, 19])[:num_rows]
    slots = (torch.arange(num_rows) % 5).to(torch.int32)
    logits = strided(torch.randn(num_rows, vocab_size) * 3)
    args = (logits, temperature, seeds, positions, slots)
    assert_true(run(backend, gumbel_sample, *args), *args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warmth", [0.0, 1.0])
def test_hostile_values(backend: str, warmth: float) -> None:
    torch.manual_seed(1)
    logits = torch.randint(-1, 2, (6, 2500)).float()
    logits[0] = -torch.inf
    logits[1, 1:] = -torch.inf
    logits[2, ::2] = torch.nan
    logits[3] = -torch.inf
    logits[3, 2499] = -1e30
    logits[4, :2400] = torch.nan
    logits[4, 2400:] = -torch.inf
    temperature, seeds = torch.tensor([warmth]), torch.tensor([42])
    args = (logits, temperature, seeds, torch.arange(6), torch.zeros(6, dtype=torch.int32))
    assert_true(run(backend, gumbel_sample, *args), *args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draw_depends_on_seed_and_position_alone(backend: str) -> None:
    torch.manual_seed(2)
    logits = torch.zeros(1, 3000).expand(4, 3000)
    temperature, seeds = torch.ones(3), torch.tensor([5, 6, 5])
    slots, positions = torch.tensor([0, 1, 2, 0], dtype=torch.int32), torch.tensor([9, 9, 9, 10])
    drawn = run(backend, gumbel_sample, logits, temperature, seeds, positions, slots)[0].tolist()
    assert drawn[0] == drawn[2]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [[1, 2, 3], [1023, 1024, 1026], [5, 2047, 2049, 4001], [1, 4999]])
def test_slices_draw_what_the_whole_row_draws(backend: str, cuts: list[int]) -> None:
    """The very same scores, wherever a slice begins: equals among them would be decided differently otherwise."""
    torch.manual_seed(sum(cuts))
    logits = torch.randn(6, 5000)
    logits[5] = -torch.inf
    temperature, seeds = torch.tensor([1.0, 0.0, 7.0]), torch.tensor([3, 4, -5])
    slots, positions = torch.tensor([0, 1, 2, 0, 2, 2], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 2**33, 5])
    others = (temperature, seeds, positions, slots)
    whole_ids, whole_scores = run(backend, gumbel_sample, logits, *others)
    best, token_ids = torch.full((6,), -torch.inf), torch.zeros(6, dtype=torch.int32)
    for first, end in zip([0, *cuts], [*cuts, 5000], strict=True):
        ids, scores = run(backend, gumbel_sample, logits[:, first:end], *others, first)
        assert ((ids >= first) & (ids < end)).all()
        better = scores > best
        best, token_ids = torch.where(better, scores, best), torch.where(better, ids, token_ids)
    assert torch.equal(token_ids, whole_ids)
    assert torch.equal(best, whole_scores)


def test_reference_noise_is_precise_in_both_tails() -> None:
    bits = np.array([0, 1, 2, 1000, 2**16, 2**31, 2**32 - 2**20, 2**32 - 1], dtype=np.uint64)
    got = operation._gumbel(torch.from_numpy(bits.astype(np.int64)))
    np.testing.assert_allclose(got.numpy(), noise(bits), rtol=3e-7, atol=3e-7)


def test_triton_noise_is_precise_in_both_tails() -> None:
    bits = np.array([0, 1, 2, 1000, 2**16, 2**31, 2**32 - 2**20, 2**32 - 1], dtype=np.uint64)
    np.testing.assert_allclose(gumbel_noise(bits), noise(bits), rtol=3e-7, atol=3e-7)
