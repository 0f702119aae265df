"""A server whose model is split over two ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer
from processes import children, is_running
from tiny_llm import make_tiny_llm

from vllm import SamplingParams

_NOTICE_SECONDS = 10.0


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    flags = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp", "--max-model-len", "128")
    with LiveServer(folder, *flags, env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


def worker_pid(server: LiveServer) -> int:
    (core,) = server.core_pids
    (worker,) = children(core)
    return worker


def complete(server: LiveServer) -> httpx.Response:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_answers_metrics_and_the_end_with_a_worker(server: LiveServer, folder: Path) -> None:
    (choice,) = complete(server).json()["choices"]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (expected,) = make_tiny_llm(folder).generate(["abc"], params, use_tqdm=False)
    assert choice["text"] == expected.outputs[0].text

    metrics = httpx.get(f"{server.url}/metrics").text
    moved = re.search(r'vllm:tp_collective_bytes_total\{collective="all_reduce".*\} (\S+)', metrics)
    assert moved is not None and float(moved[1]) > 0

    worker, began = worker_pid(server), time.monotonic()
    os.kill(worker, signal.SIGKILL)
    assert server.process.wait(_NOTICE_SECONDS) != 0
    assert time.monotonic() - began < _NOTICE_SECONDS
    assert "tensor-parallel rank 1 has gone: its process ended with signal 9" in server.log()


def test_no_orphans_when_the_core_is_killed(server: LiveServer) -> None:
    (core,), worker = server.core_pids, worker_pid(server)
    os.kill(core, signal.SIGKILL)
    server.process.wait(_NOTICE_SECONDS)
    deadline = time.monotonic() + _NOTICE_SECONDS
    while is_running(worker):
        assert time.monotonic() < deadline, "the worker goes on"
        time.sleep(0.05)
