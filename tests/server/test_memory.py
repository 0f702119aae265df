"""Memory stays as it is, however many requests come: objects are counted, and a server's own memory is measured."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import AppThread, make_engine
from live_server import LiveServer
from real_sockets import RawClient, listening
from tiny_llm import make_tiny_llm
from traffic import COMPLETIONS, Case, draw, offline

from vllm import SamplingParams

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

NUM_MIXED, NUM_SMALL = 60, 400
"""Requests of a round."""

NUM_SENT = 1500
GROWTH_KIB = 8192
"""Growth of a whole process over a thousand requests: allocators' own, with room. A leak of 8 KiB a request
shows; smaller ones show in the counts of objects."""


@pytest.fixture(scope="module")
def cases():
    rng = random.Random(3)
    return [draw(rng, kind) for kind in range(NUM_MIXED)]


def own_objects() -> Counter[type]:
    """How many objects there are of each of this package's classes."""
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(kind for kind in kinds if str(kind.__module__).startswith("vllm."))


def num_blocks() -> int:
    """Blocks that Python's allocator has given out, to anything."""
    gc.collect()
    return sys.getallocatedblocks()


def test_the_server_keeps_nothing_of_a_request(folder, cases):
    counts: list[Counter[type]] = []
    blocks: list[int] = []

    async def one(client: httpx.AsyncClient, port: int, number: int, case: Case) -> None:
        if number % 5 == 0:
            raw = await RawClient.send(port, case.path, case.body)
            await asyncio.sleep(0.002 * (number % 7))
            raw.leave_abruptly()
        else:
            response = await client.post(case.path, json=case.body)
            assert response.status_code == 200, response.text

    async def run() -> None:
        async with listening(app.engine) as server:
            url = f"http://127.0.0.1:{server.port}"
            for _ in range(3):
                async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                    await asyncio.gather(*(one(client, server.port, *each) for each in enumerate(cases)))
                await server.empty()
                counts.append(own_objects())
            for _ in range(3):
                await send(url, NUM_SMALL)
                await server.empty()
                blocks.append(num_blocks())

    with AppThread(make_engine(folder)) as app:
        app.run(run())
    assert counts[2] == counts[1]
    assert_flat(blocks)


def test_the_core_keeps_nothing_of_a_request(folder, cases):
    """The same core in this process, where its objects can be counted."""
    llm = make_tiny_llm(folder)
    counts, blocks = [], []
    for _ in range(3):
        offline(llm, cases)
        counts.append(own_objects())
    for _ in range(3):
        llm.generate([[5, 6, 7]] * NUM_SMALL, SamplingParams(max_tokens=1, logprobs=2), use_tqdm=False)
        blocks.append(num_blocks())
    assert counts[2] == counts[1]
    assert_flat(blocks)


def assert_flat(blocks: list[int]) -> None:
    """Three equal rounds leave nothing behind."""
    # One a request would be a leak. Free lists of libraries fill up slowly, and the loop's own objects come and go.
    assert min(blocks[1] - blocks[0], blocks[2] - blocks[1]) < NUM_SMALL / 2, blocks


def test_the_processes_do_not_grow(folder):
    with LiveServer(folder, "--max-model-len", "128", "--no-access-log") as server:
        pids = {"server": server.process.pid, "core": server.core_pids[0]}
        asyncio.run(send(server.url, NUM_SENT // 3))
        before = {name: resident_kib(pid) for name, pid in pids.items()}
        asyncio.run(send(server.url, NUM_SENT - NUM_SENT // 3))
        growth = {name: resident_kib(pid) - before[name] for name, pid in pids.items()}
    assert max(growth.values()) < GROWTH_KIB, growth


async def send(url: str, count: int) -> None:
    """Requests that have the most overhead for their size, over some connections."""
    numbers = iter(range(count))
    kinds: tuple[dict[str, Any], ...] = ({}, {"logprobs": 3}, {"stream": True}, {"logprob_token_ids": [7]})

    async def one_client() -> None:
        client = await RawClient.connect(int(url.rpartition(":")[2]))
        for number in numbers:
            body = {"model": "tiny", "prompt": [number % 250 + 3, 9], "max_tokens": 1, **kinds[number % len(kinds)]}
            await client.write(COMPLETIONS, body)
            await client.whole_answer()
        await client.leave()

    await asyncio.gather(*(one_client() for _ in range(32)))


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
