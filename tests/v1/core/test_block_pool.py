"""How much memory the pool touches: what is in use, and a bounded rest of what was; and what is hashed for it."""

from __future__ import annotations

import random

import pytest
from core_harness import BLOCK_SIZE, FakeRunner, make_request, make_scheduler, run_step
from tiny_llm import make_tiny_model

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import block_pool
from vllm.v1.core.block_pool import BlockPool, hash_full_blocks


def serve_for_a_while(pool: BlockPool) -> tuple[int, int]:
    """Requests that come and go, each with content of its own; the most blocks owned at a time, and those touched."""
    generator = random.Random(0)
    owned: list[list[int]] = []
    most, touched = 0, set()
    for number in range(400):
        blocks = pool.allocate(generator.randint(1, 4))
        touched.update(blocks)
        for index, block in enumerate(blocks):
            pool.register(block, f"{number}/{index}".encode())
        owned.append(blocks)
        most = max(most, sum(map(len, owned)))
        while len(owned) > generator.randint(0, 5):
            pool.release(owned.pop(generator.randrange(len(owned))))
    return most, len(touched)


@pytest.mark.parametrize("max_evictable_blocks", [0, 1, 8, 40])
def test_idle_content_makes_room_before_untouched_memory_does(max_evictable_blocks: int) -> None:
    most, num_touched = serve_for_a_while(BlockPool(1000, max_evictable_blocks))
    assert (
        most <= num_touched <= most + max_evictable_blocks + 4
    )  # the blocks of the request that comes are not owned yet


def test_without_a_bound_content_stays_while_there_is_room() -> None:
    pool = BlockPool(500)
    _, num_touched = serve_for_a_while(pool)
    assert num_touched == 500


def test_the_latest_content_is_what_stays() -> None:
    scheduler, runner = make_scheduler(num_blocks=1000, idle=3 * BLOCK_SIZE), FakeRunner(4)
    pool = scheduler.kv.pool
    for number in range(20):
        scheduler.add_request(make_request(f"r{number}", [number % 7, *range(8)], max_tokens=1))
        while scheduler.has_unfinished_requests():
            run_step(scheduler, runner)
    assert len(pool._block_of) <= 3 + 3
    scheduler.add_request(make_request("r20", [19 % 7, *range(8)], max_tokens=1))
    step = scheduler.schedule()
    assert step.scheduled_new_reqs[0].num_computed_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("fields", "space", "expected"),
    [
        ({"max_num_batched_tokens": 512}, None, 2048),
        ({"max_num_batched_tokens": 16, "max_model_len": 128}, None, 128),
        ({"num_gpu_blocks_override": 64}, None, None),
        ({}, "0.5", None),
    ],
)
def test_a_cpu_bounds_it_unless_the_cache_was_given_its_size(tmp_path, monkeypatch, fields, space, expected) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    folder = make_tiny_model(tmp_path)
    config = EngineArgs(model=str(folder), device="cpu", **fields).create_engine_config()
    assert config.cache_config.max_idle_tokens == expected


def test_what_begins_as_the_content_before_is_hashed_from_where_it_differs(monkeypatch):
    chain, hashed = block_pool._chain, []

    def note(content, size, parent):
        hashed.append(len(content) // size)
        return chain(content, size, parent)

    monkeypatch.setattr(block_pool, "_chain", note)
    first = list(range(1, 34))
    others = [first[:20] + [7] * 20, first[:20] + [7] * 25, first[:3], first, [9, *first], first]
    found = [hash_full_blocks(tokens, 4, None, []) for tokens in (first, *others)]
    assert hashed[1:] == [5, 1, 3, 8, 8]
    for tokens, hashes in zip((first, *others), found, strict=True):
        monkeypatch.setattr(block_pool, "_latest", block_pool._LatestContent())
        assert hash_full_blocks(tokens, 4, None, []) == hashes
    # Another salt, adapter or block size is another beginning.
    salted = [
        hash_full_blocks(first, size, salt, [], number)
        for size, salt, number in ((4, "a", 0), (4, None, 1), (8, None, 0))
    ]
    assert len({each[0] for each in (*salted, found[0])}) == 4
