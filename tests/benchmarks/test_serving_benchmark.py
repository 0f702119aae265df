"""The benchmark of servers: its load, its table, its JSON line."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from byte_tokenizer import make_byte_tokenizer
from models_util import make_random_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serving")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "serving.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def _num_shared_words(texts: list[str]) -> int:
    columns = zip(*(text.split() for text in texts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda words: len(set(words)) == 1, columns))


def test_two_servers_get_the_same_load(tmp_path: Path) -> None:
    """Both servers run our code; only the way of starting is the other's."""
    # A context for prompts of one token a byte, a vocabulary with the labels' ids.
    model, _ = make_random_model(
        "llama", "small", tmp_path / "models" / "tiny", vocab_size=5000, max_position_embeddings=1024
    )
    make_byte_tokenizer(model)
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ntest -n "$VLLM_CPU_OMP_THREADS_BIND" || exit 3\n'
        f'PYTHONPATH={BENCHMARKS.parent} exec {sys.executable} -m vllm.cli.main "$@"\n'
    )
    program.chmod(0o755)
    flags = ["--rows", "score,decode", "--concurrency", "2", "--scale", "0.01", "--turns", "1", "--repeats", "1"]
    ran = _run("--model", str(model), "--upstream", str(tmp_path), *flags, "--threads", "1")
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr
    *table, last = ran.stdout.splitlines()
    result = json.loads(last)
    assert str(model.parent) not in ran.stdout
    ours, other = result["servers"]["ours"], result["servers"]["upstream"]
    assert ours["version"] == other["version"] and ours["check"] == other["check"] < 0
    cells = [(row["row"], row["server"], row["unit"], len(row["values"])) for row in result["results"]]
    assert cells == [
        ("score", "ours", "req/s", 1),
        ("decode", "ours", "tok/s", 1),
        ("score", "upstream", "req/s", 1),
        ("decode", "upstream", "tok/s", 1),
    ]
    for row in result["results"]:
        assert row["best"] == max(row["values"]) > 0
        assert ("first_token_seconds" in row["latencies"]) == (row["row"] == "decode")
    assert [line.split(" | ")[0] for line in table if line.startswith("| ")] == [
        "| row",
        "| ---",
        "| score",
        "| decode",
    ]
    assert table[-1].count("x |") == 1


def test_texts_are_seeded_distinct_and_share_what_they_should(serving: ModuleType) -> None:
    for row in serving.ROWS:
        prompts = serving.make_prompts(row, 64, random.Random("a"))
        assert prompts == serving.make_prompts(row, 64, random.Random("a"))
        assert len(set(prompts)) == 64
        other = serving.make_prompts(row, 64, random.Random("b"))
        shared = _num_shared_words(prompts)
        assert shared >= 450 if row == "score_prefix" else shared < 5
        assert _num_shared_words([*prompts, *other]) < 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "scores"], "an unknown row"),
        (["--repeats", "0"], "a number that is not above 0"),
        (["--upstream", "/nowhere"], "--upstream needs --model FOLDER"),
        (["--upstream", "/nowhere", "--model", "m"], "--upstream: there is no /nowhere/bin/vllm"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    ran = _run(*arguments)
    assert ran.returncode == 2 and message in ran.stderr and ran.stdout == ""


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    ran = _run("--model", str(tmp_path / "no-such-model"), "--scale", "0.01")
    assert ran.returncode == 1
    assert "ours does not start:" in ran.stderr and "no-such-model" in ran.stderr


def test_the_client_of_http_share_sends_every_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers in two pieces; no connection has two requests at once."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    http_share = importlib.import_module("http_share")
    received: list[bytes] = []
    connections: list[object] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connections.append(self)
            while request := self.request.recv(4096):
                received.append(request)
                self.request.sendall(b"HTTP/1.1 200 OK\r\nContent-")
                self.request.sendall(b"Length: 3\r\n\r\n{ }")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        requests = [b"%03d" % number for number in range(200)]
        http_share._load(server.server_address, requests)
        server.shutdown()
    assert sorted(received) == requests
    assert len(connections) == http_share.CONNECTIONS
