"""Stages in Ray actors on two nodes: they compute what one process does, and a lost one ends the engine."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import rank_faults
from models_util import random_prompts
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.exceptions import EngineDeadError

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(100, (5, 40, 2, 90))]
PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


def readings(llm: LLM) -> list[Any]:
    return [
        (
            output.outputs[0].token_ids,
            output.outputs[0].logprobs.logprobs.tolist(),
            output.prompt_logprobs.logprobs.tolist(),
        )
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]


def node(worker: Any) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def cache_bytes(worker: Any) -> int:
    return worker._cpu_cache_bytes()


def test_stages_on_two_nodes(ray_cluster: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.125")
    llm = make_tiny_llm(folder, pipeline_parallel_size=2, distributed_executor_backend="ray")
    # Each has all CPUs of its node.
    assert len(set(llm.collective_rpc(node))) == 2
    assert llm.collective_rpc(cache_bytes) == [2**27, 2**27]
    assert readings(llm) == readings(make_tiny_llm(folder))
    own, actor = llm.collective_rpc(rank_faults.fail_in_step, args=(1, "killed"))
    assert own == os.getpid() != actor
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="^rank 1 has gone: its actor died"):
        readings(llm)
    assert time.monotonic() - began < 10.0
    llm.llm_engine.engine_core.shutdown()


def test_a_stages_ranks_are_on_one_node(ray_cluster: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.125")
    fields = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    llm = make_tiny_llm(folder, **fields)
    first, second, third, fourth = llm.collective_rpc(node)
    assert first == second != third == fourth
    assert llm.collective_rpc(cache_bytes) == [2**26] * 4
    wide = make_tiny_llm(folder, tensor_parallel_size=2)
    assert readings(llm) == readings(wide)
    for each in llm, wide:
        each.llm_engine.engine_core.shutdown()


def test_a_node_of_little_memory_gets_few_layers(
    ray_cluster: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from vllm.v1.executor import ray_executor

    here = ray.get_runtime_context().get_node_id()
    # Enough for the head and a layer.
    rooms = {node["NodeID"]: 250e3 if node["NodeID"] == here else 1e9 for node in ray.nodes()}
    monkeypatch.setattr(ray_executor, "node_memory", lambda: rooms)
    llm = make_tiny_llm(folder, pipeline_parallel_size=2, distributed_executor_backend="ray")
    assert llm.collective_rpc(rank_faults.layers_here) == [[3], [0, 1, 2]]
    llm.llm_engine.engine_core.shutdown()


def test_memory_of_a_node_is_shared_by_its_ranks() -> None:
    from vllm.v1.executor.ray_executor import _rooms

    memory = {"a": 80.0, "b": 20.0, "c": math.inf}
    assert _rooms(["a", "b", "a", "c"], memory, 1) == (math.inf, 40.0, 20.0, 40.0)
    assert _rooms(["a", "a", "b", "b"], memory, 2) == (10.0, 40.0)


def test_a_stage_that_no_node_holds(ray_cluster: str, folder: Path) -> None:
    """There are two nodes of two CPUs."""
    fields = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(ValueError, match="room for 0 actors of one CPU each, 4 of them on a node, not for 8"):
        make_tiny_llm(folder, **fields)
