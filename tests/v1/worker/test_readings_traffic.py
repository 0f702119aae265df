"""Bytes that the readings of a decode step move between ranks, by the communicators' own count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sampling_harness import Harness
from thread_ranks import ThreadRanks

from vllm.distributed.communicator import ALONE
from vllm.sampling_params import SamplingParams

VOCAB, BATCH, NUM_IDS, WORLD_SIZE = 151936, 64, 20, 2

# A rank hands over this when logits are gathered: its slice of each row, in float32.
GATHERED_BYTES = BATCH * (VOCAB // WORLD_SIZE) * 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(WORLD_SIZE)
    yield ranks
    ranks.close()


def moved_bytes(ranks: ThreadRanks, num_calls: int, **fields: object) -> int:
    """Bytes that a rank hands over in a step whose rows all have these parameters, in so many collectives."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).expand(BATCH, VOCAB)

    def step(rank: int | None) -> list[int]:
        harness = Harness(VOCAB, group=ALONE if rank is None else ranks.groups[rank], max_num_reqs=BATCH)
        slots = [harness.add(SamplingParams(**fields), request_id=str(row)) for row in range(BATCH)]  # type: ignore[arg-type]
        return harness.step(logits, slots).sampled_token_ids.tolist()

    for group in ranks.groups:
        group.num_bytes.clear()
        group.num_calls.clear()
    assert ranks.run(step) == [step(None)] * WORLD_SIZE
    (total,) = {sum(group.num_bytes.values()) for group in ranks.groups}
    assert {group.total_calls for group in ranks.groups} == {num_calls}
    return total


def test_twenty_ids_move_less_than_a_five_hundredth_of_a_gather(ranks: ThreadRanks) -> None:
    ids = list(range(0, VOCAB, VOCAB // NUM_IDS))[:NUM_IDS]
    moved = moved_bytes(ranks, 2, temperature=0, logprob_token_ids=ids)
    assert 500 * moved < GATHERED_BYTES
    # Maximum, log-sum-exp and argmax, then each id's logit and count: 4 bytes each.
    assert moved == BATCH * (3 + 2 * NUM_IDS) * 4
    # A draw adds a collective, and the drawn token is read like an id.
    moved = moved_bytes(ranks, 3, temperature=1.0, logprob_token_ids=ids)
    assert 500 * moved < GATHERED_BYTES


@pytest.mark.parametrize(
    ("fields", "num_calls", "times_fewer"),
    [
        ({"temperature": 0}, 1, 20000),
        ({"temperature": 0, "logprobs": 5}, 1, 5000),
        ({"temperature": 0, "logprobs": 20, "logprob_token_ids": [1, 2], "logprob_entropy": True}, 2, 1500),
        ({"temperature": 0.7}, 1, 15000),
        ({"min_p": 0.1}, 2, 10000),
        ({"top_k": 50}, 2, 600),
        ({"top_k": 50, "top_p": 0.9}, 2, 600),
        # The nucleus of random logits at this temperature is within what the ranks offer.
        ({"top_p": 0.9, "temperature": 0.1}, 2, 140),
    ],
    ids=str,
)
def test_sampling_moves_little(ranks: ThreadRanks, fields: dict, num_calls: int, times_fewer: int) -> None:
    assert times_fewer * moved_bytes(ranks, num_calls, **fields) < GATHERED_BYTES
