"""Ranks in Ray actors on two nodes: they compute what one process does, and none outlives another."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_faults
from models_util import random_prompts
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.exceptions import EngineDeadError

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(100, (5, 40, 2))]
PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
_NOTICE_SECONDS = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path, ray_cluster: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        llm = make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    yield llm
    llm.llm_engine.engine_core.shutdown()


def readings(llm: LLM) -> list[tuple[list[int], list[float]]]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [
        (
            list(output.token_ids),
            [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)],
        )
        for output in outputs
    ]


def node(worker: Any) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def test_two_nodes_compute_what_one_process_does(llm: LLM, folder: Path) -> None:
    first, second = llm.collective_rpc(node)
    assert first != second
    for (tokens, logprobs), (own_tokens, own) in zip(readings(make_tiny_llm(folder)), readings(llm), strict=True):
        assert tokens == own_tokens
        # float32 sums, in another order.
        assert logprobs == pytest.approx(own, abs=1e-4)


def test_no_room_is_an_error(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import ray_executor

    monkeypatch.setattr(ray_executor, "_ROOM_SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"the cluster had no room for 2 times \{'CPU': 2.0\} within"):
        make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_a_killed_actor_ends_the_engine_and_leaves_its_room(llm: LLM, folder: Path) -> None:
    own, actor = llm.collective_rpc(rank_faults.fail_in_step, (2, ""))
    assert own == os.getpid() != actor
    llm.collective_rpc(rank_faults.fail_in_step, (1, "killed"))
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 has gone: its actor died"):
        readings(llm)
    assert time.monotonic() - began < _NOTICE_SECONDS
    llm.llm_engine.engine_core.shutdown()

    # All CPUs of both nodes are needed again.
    again = make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    _, actor = again.collective_rpc(rank_faults.fail_in_step, (2, ""))
    os.kill(actor, signal.SIGKILL)
    deadline = time.monotonic() + _NOTICE_SECONDS
    with pytest.raises(EngineDeadError, match="rank 1 has gone"):
        while time.monotonic() < deadline:
            again.llm_engine.engine_core.check_health()
            time.sleep(0.05)
    again.llm_engine.engine_core.shutdown()


def test_without_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="Ray is not installed; the extra brings it"):
        make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
