"""Stages on two machines, whose link is slow and then cut, or one of which is lost: results are the same, and no
request hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models_util import random_prompts
from ray_cluster import DEAD_SOON, environment, join
from tiny_llm import make_tiny_llm, make_tiny_model
from two_machines import TwoMachines, two_machines

from vllm import SamplingParams
from vllm.cli.main import main
from vllm.scoring import batches

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

LINK_SECONDS, NOTICE_SECONDS = 6, 10.0
PROMPTS = random_prompts(100, (5, 40, 2, 30))
DRIVER = """
import json, sys, time
from pathlib import Path
from tiny_llm import make_tiny_llm
from vllm import SamplingParams

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = make_tiny_llm(Path(folder), pipeline_parallel_size=2, distributed_executor_backend="ray")
params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)

def generate():
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [[output.outputs[0].token_ids, output.outputs[0].logprobs.logprobs.tolist()] for output in outputs]

print("generated", json.dumps(generate()), flush=True)
input()
try:
    while True:
        began = time.monotonic()
        generate()
except Exception as error:
    print("ended", time.monotonic() - began, type(error).__name__, str(error), flush=True)
"""


# Waits after it has written a part of the output, until its input ends.
SCORING = """
import sys
from vllm.cli.main import main
from vllm.scoring import batches
from vllm.scoring.rows import PartFolder

def write(self, number, content):
    plain(self, number, content)
    print("part", flush=True)
    sys.stdin.read()

plain, PartFolder.write = PartFolder.write, write
batches.BATCH_ROWS = 8
print("exit status", main(sys.argv[1:]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[TwoMachines, dict[str, str]]]:
    """Two nodes, each of which has room for one stage, and the variables of their processes."""
    with two_machines() as machines:
        limits = environment(machines, VLLM_WORKER_LINK_TIMEOUT_S=str(LINK_SECONDS), **DEAD_SOON)
        for machine in range(2):
            join(machines, machine, 1, limits)
        yield machines, limits


def test_a_slow_link_and_one_that_is_cut(folder: Path, cluster: tuple[TwoMachines, dict[str, str]]) -> None:
    machines, limits = cluster
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    alone = make_tiny_llm(folder).generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    expected = [[each.outputs[0].token_ids, each.outputs[0].logprobs.logprobs.tolist()] for each in alone]
    machines.link(delay_seconds=0.02)
    command = machines.command(0, sys.executable, "-c", DRIVER, str(folder), json.dumps(PROMPTS))
    with subprocess.Popen(command, env=limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        said = next(line for line in driver.stdout if line.startswith("generated"))
        assert json.loads(said.removeprefix("generated")) == expected
        machines.link(is_cut=True)
        began = time.monotonic()
        driver.stdin.write("\n")
        driver.stdin.flush()
        said = next(line for line in driver.stdout if line.startswith("ended"))
        assert time.monotonic() - began < LINK_SECONDS + NOTICE_SECONDS
        assert "EngineDeadError rank 1 cannot be reached or hangs" in said
        assert f"VLLM_WORKER_LINK_TIMEOUT_S={LINK_SECONDS}" in said
        driver.kill()


def test_a_lost_machine_takes_no_rows_along(
    folder: Path, cluster: tuple[TwoMachines, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine whose stage was there is started again once there is room."""
    machines, limits = cluster
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the stop {row}"}) + "\n" for row in range(80)))
    command = ["score", str(texts), "--labels", "a", "b", "--quiet", "--model", str(folder), "--dtype", "float32"]
    with monkeypatch.context() as patch:
        patch.setattr(batches, "BATCH_ROWS", 8)
        assert main([*command, "--output", str(folder / "whole.jsonl"), "--no-picture"]) == 0
    machines.link()
    machines.kill(1)
    join(machines, 1, 1, limits)
    staged = ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "ray"]
    staged += ["--backend", "ray", "--replicas", "1", "--replica-cpus", "1", "--output", str(folder / "parts")]
    scoring = machines.command(0, sys.executable, "-c", SCORING, *command, *staged)
    with subprocess.Popen(scoring, env=limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        assert next(line for line in driver.stdout if line.startswith("part"))
        machines.kill(1)
        # The engine has at most two of the other nine parts.
        driver.stdin.close()
        join(machines, 1, 1, limits)
        assert "exit status 0\n" in driver.stdout.readlines()
    parts = sorted((folder / "parts").iterdir())
    assert len(parts) == 10
    assert b"".join(part.read_bytes() for part in parts) == (folder / "whole.jsonl").read_bytes()
