"""Two hundred clients at once, a third of which leave whenever they like: those that stay get what the offline engine
says, and nothing remains of any of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from real_sockets import PATIENCE, RawClient, listening
from tiny_llm import make_tiny_llm
from traffic import Case, draw, offline, put_together

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

NUM_CLIENTS = 200
NUM_SLOTS = 16
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def cases():
    rng = random.Random(20)
    return [draw(rng, kind) for kind in range(NUM_CLIENTS)]


@pytest.fixture(scope="module")
def expected(folder, cases):
    return offline(make_tiny_llm(folder), cases)


async def answer_of(client: httpx.AsyncClient, case: Case) -> dict[str, Any]:
    if not case.streams:
        response = await client.post(case.path, json=case.body)
        assert response.status_code == 200, response.text
        return response.json()
    async with client.stream("POST", case.path, json=case.body) as response:
        lines = [line async for line in response.aiter_lines() if line]
        assert response.status_code == 200, lines
    assert lines.pop() == "data: [DONE]"
    return put_together([json.loads(line.removeprefix("data: ")) for line in lines], case.path)


async def leave_somewhere(port: int, case: Case, rng: random.Random) -> None:
    """Begin a request and leave it at a random place in a random way."""
    share = rng.choice((0.0, 0.5, 1.0, 1.0, 1.0, 1.0))
    client = await RawClient.send(port, case.path, case.body, share)
    if share == 1.0 and case.streams and rng.random() < 0.7:
        await client.read_events(rng.randint(1, 4))
    else:
        await asyncio.sleep(rng.random() * 0.3)
    way = rng.randrange(3)
    if way == 0:
        await client.leave()
    elif way == 1:
        client.leave_abruptly()
    else:
        await client.fall_silent()


async def crowd(port: int, cases: list[Case]) -> list[dict[str, Any] | None]:
    """Every client's answer; None of those that left."""
    rng = random.Random(7)
    leavers = set(rng.sample(range(len(cases)), len(cases) // 3))
    own = [random.Random(index) for index in range(len(cases))]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=2 * PATIENCE) as client:

        async def one(index: int) -> dict[str, Any] | None:
            await asyncio.sleep(own[index].random() * 0.5)
            if index in leavers:
                return await leave_somewhere(port, cases[index], own[index])
            return await answer_of(client, cases[index])

        return await asyncio.gather(*map(one, range(len(cases))))


def check(answers: list[dict[str, Any] | None], cases: list[Case], expected: list[Any]) -> None:
    assert sum(answer is not None for answer in answers) == NUM_CLIENTS - NUM_CLIENTS // 3
    for case, answer, own in zip(cases, answers, expected, strict=True):
        if answer is not None:
            case.check(answer, own)


def test_every_block_is_free_afterwards(serve, folder, cases, expected):
    async def run():
        async with listening(app.engine) as server:
            answers = await crowd(server.port, cases)
            await server.empty()
            return answers

    app = serve({"max_num_seqs": NUM_SLOTS}, folder)
    check(app.run(run()), cases, expected)


def test_a_server_of_its_own_is_idle_afterwards(folder, cases, expected):
    with LiveServer(folder, "--max-num-seqs", str(NUM_SLOTS), "--max-model-len", "128") as server:
        check(asyncio.run(crowd(int(server.url.rpartition(":")[2]), cases)), cases, expected)
        for _ in range(int(PATIENCE / 0.05)):
            load = httpx.get(f"{server.url}/load").json()["server_load"]
            found = re.findall(r"^([\w:]+)\{.*\} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
            gauges = {name: float(value) for name, value in found if name in GAUGES}
            if not load and not any(gauges.values()):
                break
            asyncio.run(asyncio.sleep(0.05))
        assert load == 0 and gauges == dict.fromkeys(GAUGES, 0.0)
        assert "ERROR" not in server.log()
        assert server.stop() == 0
