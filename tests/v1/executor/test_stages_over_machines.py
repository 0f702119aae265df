"""Stages on two machines, whose link is slow and then cut: results are the same, and no request hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models_util import random_prompts
from ray_cluster import DEAD_SOON, environment, join
from tiny_llm import make_tiny_llm, make_tiny_model
from two_machines import two_machines

from vllm import SamplingParams

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


def test_a_slow_link_and_one_that_is_cut(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_hidden_layers=4)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    alone = make_tiny_llm(folder).generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
    expected = [[each.outputs[0].token_ids, each.outputs[0].logprobs.logprobs.tolist()] for each in alone]
    with two_machines() as machines:
        limits = environment(machines, VLLM_WORKER_LINK_TIMEOUT_S=str(LINK_SECONDS), **DEAD_SOON)
        # Each has room for one stage.
        for machine in range(2):
            join(machines, machine, 1, limits)
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
