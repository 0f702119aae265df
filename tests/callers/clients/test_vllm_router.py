"""vllm-router before two of our servers, with its default flags and by its policies: it writes fields of its own into
every body, asks for the prompt's ids first, and tries a request again when a server has died."""

from __future__ import annotations

import collections
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer

pytest.importorskip("vllm_router")

ROUTER = Path(sys.executable).with_name("vllm-router")
POLICIES = ("cache_aware", "round_robin", "consistent_hash")
MESSAGES = [{"role": "user", "content": "hi"}]
SECONDS = 60


@pytest.fixture(scope="module")
def servers(tiny_model: Path, server_environment: dict[str, str]) -> Iterator[list[LiveServer]]:
    with ExitStack() as stack:
        # Both start at once.
        started = [LiveServer(tiny_model, env=server_environment, wait=False) for _ in range(2)]
        for each in started:
            stack.enter_context(each)
        for each in started:
            each.wait_until_ready()
        yield started


@contextmanager
def routed(servers: list[LiveServer], *flags: str) -> Iterator[httpx.Client]:
    """A client of a router before the servers."""
    port, metrics_port = free_ports()
    command = [str(ROUTER), "--port", str(port), "--prometheus-port", str(metrics_port), *flags]
    process = subprocess.Popen(
        [*command, "--worker-urls", *(each.url for each in servers)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
            wait_for(client)
            yield client
    finally:
        process.terminate()
        process.wait(SECONDS)


def free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (one, other)]


def wait_for(client: httpx.Client) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "the router is not ready"
        time.sleep(0.1)


@pytest.fixture(scope="module", params=POLICIES)
def router(request: pytest.FixtureRequest, servers: list[LiveServer]) -> Iterator[httpx.Client]:
    with routed(servers, "--policy", request.param) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def direct(server: LiveServer, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"model": "tiny", **body}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_are_those_of_a_server(router: httpx.Client, servers: list[LiveServer]) -> None:
    """Twice each, so that both servers may answer; readings and labels pass through."""
    reads = {"temperature": 0, "max_tokens": 4, "logprob_token_ids": [5, 7]}
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "hi", "labels": ["a", "b"]}),
        ("/v1/completions", {"prompt": [70, 71]}),
    ):
        expected = direct(servers[0], path, **body, **reads)["choices"]
        for _ in range(2):
            assert post(router, path, **body, **reads)["choices"] == expected


def test_a_stream_comes_piece_by_piece(router: httpx.Client, servers: list[LiveServer]) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    expected = direct(servers[0], "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    with router.stream("POST", "/v1/chat/completions", json={"model": "tiny", "stream": True, **body}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]" and len(events) > 1
    assert "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events) == expected


def test_other_doors(router: httpx.Client, servers: list[LiveServer]) -> None:
    """Reranking is asked for in the router's own shape, and answered in it."""
    documents = ["the cat", "a dog", "stop"]
    answer = post(router, "/v1/rerank", query="cat", documents=documents, top_k=2)
    expected = direct(servers[0], "/v1/rerank", query="cat", documents=documents)["results"]
    assert [each["index"] for each in answer["results"]] == [each["index"] for each in expected][
        : len(answer["results"])
    ]
    for each, own in zip(answer["results"], expected, strict=False):
        assert each["score"] == pytest.approx(own["relevance_score"], abs=1e-5)
        assert each["document"] == documents[each["index"]]
    scored = {"query": "cat", "items": documents, "label_token_ids": [5, 7]}
    assert [each["score"] for each in post(router, "/generative_scoring", **scored)["data"]] == [
        each["score"] for each in direct(servers[0], "/generative_scoring", **scored)["data"]
    ]
    assert post(router, "/v1/responses", input="hi", max_output_tokens=2)["object"] == "response"
    assert post(router, "/v1/messages", messages=MESSAGES, max_tokens=2)["type"] == "message"
    assert [each["id"] for each in router.get("/v1/models").json()["data"]] == ["tiny"]


def test_what_asks_for_something_is_still_refused(router: httpx.Client) -> None:
    body = {"model": "tiny", "messages": MESSAGES}
    for name in ("no_stop_trim", "return_hidden_states"):
        answer = router.post("/v1/chat/completions", json={**body, name: True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_no_request_is_lost_with_a_server(
    tiny_model: Path, servers: list[LiveServer], server_environment: dict[str, str]
) -> None:
    """With the router's default flags; the server is killed while it answers."""
    statuses: collections.Counter[int] = collections.Counter()
    begun = threading.Semaphore(0)

    def ask(client: httpx.Client, number: int) -> None:
        for turn in range(8):
            begun.release()
            body = {"model": "tiny", "prompt": f"{number} {turn}", "max_tokens": 40, "ignore_eos": True}
            statuses[client.post("/v1/completions", json=body).status_code] += 1

    with LiveServer(tiny_model, env=server_environment) as doomed, routed([servers[0], doomed]) as client:
        threads = [threading.Thread(target=ask, args=(client, number)) for number in range(4)]
        for each in threads:
            each.start()
        for _ in range(10):
            begun.acquire()
        doomed.process.send_signal(signal.SIGKILL)
        for each in threads:
            each.join()
    assert statuses == {200: 32}
