"""The examples that talk to a server run, and print what they promise."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from byte_tokenizer import byte_id
from live_server import ROOT, LiveServer
from served import API_KEY
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

READ = re.compile(r"  position (\d+)  id +(\d+)  logit +(\S+)")


def environment() -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


def test_a_server_of_its_own(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    prompts, indices = ["The sky is", "1"], [byte_id(65), 2, 7]
    done = run(
        "serve_with_logits_indices.py", "--model", folder, "--prompts", *prompts, "--indices", *indices,
        "--tensor-parallel-size", 2, "--max-tokens", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=indices)
    outputs = make_tiny_llm(folder).generate(prompts, params, use_tqdm=False)
    parts = done.stdout.split("\n\n")[1:]
    assert len(parts) == len(prompts)
    for output, part in zip(outputs, parts, strict=True):
        assert part.startswith(f"{output.prompt!r} -> {output.outputs[0].text!r}\n")
        expected = [
            (number, token_id, position[token_id].logit)
            for number, position in enumerate(output.outputs[0].logprobs)
            for token_id in indices
        ]
        found = [(int(number), int(token_id), float(logit)) for number, token_id, logit in READ.findall(part)]
        assert [each[:2] for each in found] == [each[:2] for each in expected]
        assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], abs=1e-3)


def test_a_server_that_cannot_start() -> None:
    done = run("serve_with_logits_indices.py", "--tensor-parallel-size", 64, "--prompts", "a")
    assert done.returncode == 1
    assert "tensor_parallel_size" in done.stderr
    assert done.stderr.splitlines()[-1] == "the server did not start"
    assert run("serve_with_logits_indices.py", "--tensor-parallel-size", 64).returncode == 2


def test_it_serves_until_it_is_stopped(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples" / "serve_with_logits_indices.py"), "--model", str(folder)]
    with subprocess.Popen([*command, "--port", str(port)], env=environment()) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            while not is_healthy(url):
                assert server.poll() is None
                time.sleep(0.1)
            body = {"prompt": "The sky is", "max_tokens": 1, "logits_indices": [5, 9]}
            for _ in range(2):
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
                assert list(answer["choices"][0]["logits_values"]) == ["5", "9"]
        finally:
            server.terminate()
    assert server.returncode == 0


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_curl_asks_the_same(live_server: LiveServer) -> None:
    done = run("serve_with_logits_indices.py", "--url", live_server.url, "--prompts", "it's", "--indices", 5, 9)
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[0]
    answer = json.loads(subprocess.run(["bash", "-c", f"{command} -sS"], stdout=subprocess.PIPE, check=True).stdout)
    values = answer["choices"][0]["logits_values"]
    assert READ.findall(done.stdout) == [("0", each, f"{values[each]:.4f}") for each in ("5", "9")]


def test_what_the_server_refuses(live_server: LiveServer) -> None:
    done = run("serve_with_logits_indices.py", "--url", live_server.url, "--indices", 10**7)
    assert done.returncode == 1
    assert done.stderr.startswith("logits_indices ")
    assert len(done.stderr.splitlines()) == 1


def test_the_reranker(live_server: LiveServer, llm: LLM) -> None:
    documents = ["Roses are red.", "A cat sleeps a lot.", "Cats purr when they are content."]
    done = run(
        "online_logprob_token_ids.py", "--url", live_server.url, "--query", "a cat's day", "--documents", *documents
    )
    assert done.returncode == 0, done.stderr
    rows = [re.match(r" *(\S+) +(\S+)   (.+)", line).groups() for line in done.stdout.splitlines()[1:4]]
    prompt = _prompt_of_the_example()
    for probability, mass, document in rows:
        result = llm.score_labels([prompt.format(query="a cat's day", document=document)], [" Yes", " No"])[0]
        (yes, no) = (math.exp(each) for each in result.logprobs)
        assert float(probability) == pytest.approx(yes / (yes + no), abs=6e-4)
        assert float(mass) == pytest.approx(yes + no, abs=6e-4)
    assert sorted(row[2] for row in rows) == sorted(documents)
    assert [float(row[0]) for row in rows] == sorted((float(row[0]) for row in rows), reverse=True)


def test_the_reranker_knows_its_examples(live_server: LiveServer) -> None:
    done = run("online_logprob_token_ids.py", "--url", live_server.url)
    assert "In most of Europe, cherry trees" in done.stdout.splitlines()[1]


def test_the_reranker_shows_its_key(guarded_server: LiveServer) -> None:
    done = run("online_logprob_token_ids.py", "--url", guarded_server.url)
    assert "AuthenticationError" in done.stderr
    done = run("online_logprob_token_ids.py", "--url", guarded_server.url, "--api-key", API_KEY)
    # The tiny model has no such tokens.
    assert "labels" in done.stderr.splitlines()[-1]


def _prompt_of_the_example() -> str:
    scope: dict[str, str] = {}
    exec(compile((ROOT / "examples/online_logprob_token_ids.py").read_text(), "example", "exec"), scope)
    return scope["PROMPT"]
