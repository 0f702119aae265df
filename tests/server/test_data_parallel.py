"""`vllm serve --data-parallel-size 2`: one server as clients see it, whatever happens behind it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from slow_processor import HANG
from test_launcher import NUM_TOKENS, PROMPT, InFlight, assert_gone, servers, wait_for

from vllm.utils.device import usable_cores

HANG_SECONDS = 3
"""Less than a request of the default length takes."""

FLAGS = ["--data-parallel-size", "2", "--max-num-seqs", "16", "--max-num-queued-reqs", "8"]
COMPLETION = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
BODIES = (
    ("/v1/completions", {**COMPLETION, "prompt": ["the cat", "sat", "on"], "logprob_token_ids": [5, 9], "logprobs": 3}),
    ("/v1/completions", {**COMPLETION, "prompt": "the cat sat", "prompt_logprobs": 1, "echo": True, "logprobs": 1}),
    ("/v1/completions", {**COMPLETION, "prompt": ["a", "on"], "n": 3, "temperature": 1, "seed": 4, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["a cat", "a dog"], "max_tokens": 0, "logprob_token_ids": [7], "logprobs": 1}),
    ("/v1/score", {"query": "it is", "items": ["a", "the", "on the mat"], "label_token_ids": [5, [6, 7]]}),
)


@pytest.fixture(scope="module")
def server(folder) -> Iterator[LiveServer]:
    """Its steps take a while. The last test ends it."""
    with servers(folder, FLAGS, env={"VLLM_ENGINE_HANG_TIMEOUT_S": str(HANG_SECONDS)}) as (started,):
        yield started


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Equal but for names, times and the number of replicas; float32 numbers as far as another batch composition may
    round them."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one.keys() - {"id", "created", "system_fingerprint"}:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, abs=1e-5), path
    else:
        assert one == other, path


def metric(server: LiveServer, name: str, more: str = "") -> list[float]:
    """Its value on each replica."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(rf'^vllm:{name}{{engine="(\d)",(?:{more},)?model_name="tiny"}} (\S+)$', text, re.MULTILINE)
    assert [replica for replica, _ in found] == ["0", "1"], found
    return [float(value) for _, value in found]


def test_answers_equal_those_of_one_engine(folder, server, serve):
    def ask(url: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(server.url + url, json={"model": "tiny", **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    single = serve({}, folder)
    with ThreadPoolExecutor(len(BODIES)) as pool:
        answers = [pool.submit(ask, url, body) for url, body in BODIES]
        for (url, body), answer in zip(BODIES, answers, strict=True):
            assert_same(single.post(url, **body), answer.result())
    assert min(metric(server, "prompt_tokens_total")) > 0
    assert metric(server, "num_requests_running") == metric(server, "num_requests_waiting") == [0, 0]


def test_a_scoring_request_may_fill_both_queues(server):
    """As any other may: so many sequences run at once, 16 on each replica, and 8 wait."""
    body = {"model": "tiny", "query": "it is", "label_token_ids": [[first, 6] for first in range(8)]}

    def ask(num_items: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/score", json={**body, "items": ["a"] * num_items}, timeout=60)

    fits, more = ask(4), ask(6)
    assert fits.status_code == 200, fits.text
    assert more.status_code == 400
    assert "take 48 sequences, more than the limit of 40" in more.json()["error"]["message"]


def test_clients_that_leave_are_forgotten_by_both(server):
    body = {**PROMPT, "max_tokens": 250, "stream": True, "n": 2, "temperature": 1}
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=body) as one,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body) as other,
    ):
        lines = one.iter_lines(), other.iter_lines()
        assert all("choices" in next(each) for each in lines)
        assert httpx.get(f"{server.url}/load").json()["server_load"] == 2
        wait_for(lambda: metric(server, "num_requests_running") == [2, 2])
    wait_for(lambda: metric(server, "num_requests_running") == [0, 0])
    wait_for(lambda: metric(server, "request_success_total", 'finished_reason="abort"') == [2, 2])


def test_a_replica_hangs(server):
    """It is found and ended: what it had gets an error, the other one's request its answer; then the server ends."""
    cores = server.core_pids
    assert len(cores) == 2
    in_flight = InFlight(server)
    wait_for(lambda: metric(server, "num_requests_running") == [1, 1])
    began = time.monotonic()
    lost = httpx.post(f"{server.url}/v1/completions", json={**PROMPT, **HANG, "max_tokens": 1}, timeout=20)
    assert time.monotonic() - began >= HANG_SECONDS
    assert lost.status_code == 503 and lost.json()["error"]["code"] == "engine_dead"
    with httpx.Client(base_url=server.url) as client:
        health, late = client.get("/health"), client.post("/v1/completions", json=PROMPT)
        assert health.status_code == late.status_code == 503
        assert health.json() == lost.json()
        wait_for(lambda: len(server.core_pids) == 1)
    in_flight.join()
    streamed = in_flight.num_tokens == NUM_TOKENS
    answered = in_flight.answer.status_code == 200
    assert streamed != answered, "one replica had one request"
    error = in_flight.events[-2]["error"] if answered else in_flight.answer.json()["error"]
    assert error["code"] == "engine_dead"
    assert in_flight.events[-1] == "[DONE]"
    assert server.process.wait(20) == 1
    assert_gone(server, cores)
    (cause,) = [line for line in server.log().splitlines() if line.startswith("ERROR")]
    assert re.search(rf"engine core [01] hangs: .* {HANG_SECONDS} s \(VLLM_ENGINE_HANG_TIMEOUT_S\)", cause), cause
    assert "Traceback" not in server.log()


def test_more_replicas_than_cores_take_turns(folder):
    count = usable_cores() + 1
    with servers(folder, ["--data-parallel-size", str(count)]) as (started,):
        text = httpx.get(f"{started.url}/metrics").text
        assert len(re.findall(r"^vllm:num_requests_running{", text, re.MULTILINE)) == count
        body = {"model": "tiny", "prompt": ["a"] * 8, "max_tokens": 1}
        answer = httpx.post(f"{started.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert f"{count} replicas share {count - 1} CPU cores" in started.log()
