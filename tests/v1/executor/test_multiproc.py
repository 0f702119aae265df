"""Ranks in processes of their own: what they compute, and what becomes of the engine when one of them fails."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_faults
import torch
from models_util import random_prompts
from preloaded import FORKED
from processes import is_running
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.config import ParallelConfig
from vllm.exceptions import EngineDeadError
from vllm.v1.executor import multiproc, worker_monitor

ROOT = Path(__file__).parents[3]
PROMPTS = random_prompts(100, (5, 40, 2))
pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
_NOTICE_SECONDS = 10.0


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = make_tiny_llm(folder, tensor_parallel_size=2)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + _NOTICE_SECONDS
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.05)


def test_processes_compute_what_one_does(llm, folder):
    assert generate(llm) == generate(make_tiny_llm(folder))
    stats = llm.llm_engine.engine_core.stats()
    assert stats["collective_calls"]["all_reduce"] > 0
    assert stats["collective_bytes"]["all_reduce"] > stats["collective_calls"]["all_reduce"]


def test_a_call_reaches_every_rank(llm):
    assert llm.collective_rpc(rank_faults.raise_on, args=(2,)) == [0, 1]
    assert len(set(llm.collective_rpc("determine_num_blocks"))) == 1
    seen, own = llm.collective_rpc(rank_faults.tokens_seen)
    assert seen == own


def test_functions_that_ranks_cannot_import_reach_them_by_value(llm, monkeypatch):
    # The name of an attribute says nothing of a global.
    monkeypatch.setitem(globals(), "rank", threading.Lock())

    def factorial(number, offset=0):
        return offset + (math.prod(range(1, number + 1)) if number < 3 else number * factorial(number - 1))

    assert llm.collective_rpc(lambda worker, offset: factorial(worker.rank + 3, offset), args=(1,)) == [7, 25]


def test_a_call_that_raises_ends_nothing(llm):
    with pytest.raises(AttributeError, match="no_such_method"):
        llm.collective_rpc("no_such_method")
    with pytest.raises(ValueError, match="not on rank 0"):
        llm.collective_rpc(rank_faults.raise_on, args=(0,))
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 raised:.*in raise_on.*ValueError: not on rank 1"):
        llm.collective_rpc(rank_faults.raise_on, args=(1,))
    with pytest.raises(ValueError, match="collective_rpc cannot send this to other processes"):
        llm.collective_rpc(lambda worker, lock: None, args=(threading.Lock(),))
    assert llm.collective_rpc(rank_faults.raise_on, args=(2,)) == [0, 1]


@pytest.mark.parametrize(
    ("rank", "kind", "message"),
    rank_faults.ending_faults("tensor-parallel "),
    ids=lambda value: str(value) if len(str(value)) < 10 else "",
)
def test_a_rank_that_fails_ends_its_engine(rank, kind, message, folder, llm, monkeypatch):
    monkeypatch.setattr(worker_monitor, "_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(worker_monitor, "_STALL_SECONDS", 4.0)
    shared_memory = set(os.listdir("/dev/shm"))
    # gloo's connections, too, must let go of who waits for a process that does nothing.
    by_gloo = {"disable_custom_all_reduce": kind == "stopped"}
    broken = make_tiny_llm(folder, tensor_parallel_size=2, **by_gloo)
    expected = generate(broken)
    own, other = broken.collective_rpc(rank_faults.fail_in_step, args=(rank, kind))
    assert own == os.getpid() != other
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=message):
        generate(broken)
    assert time.monotonic() - began < _NOTICE_SECONDS
    assert not is_running(other)
    with pytest.raises(EngineDeadError, match=message):
        generate(broken)
    with pytest.raises(EngineDeadError, match=message):
        broken.collective_rpc("determine_num_blocks")
    assert set(os.listdir("/dev/shm")) <= shared_memory
    # Another engine of the process does not mind.
    assert generate(llm) == expected


def test_an_idle_engine_notices(folder):
    broken = make_tiny_llm(folder, tensor_parallel_size=2)
    _, pid = broken.collective_rpc(rank_faults.fail_in_step, args=(2, ""))
    broken.llm_engine.engine_core.check_health()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _NOTICE_SECONDS
    with pytest.raises(EngineDeadError, match="rank 1 has gone"):
        while time.monotonic() < deadline:
            broken.llm_engine.engine_core.check_health()
            time.sleep(0.05)


def test_an_engine_that_nobody_holds_ends_its_workers(folder):
    threads = torch.get_num_threads()
    forgotten = make_tiny_llm(folder, tensor_parallel_size=2)
    _, pid = forgotten.collective_rpc(rank_faults.fail_in_step, args=(2, ""))
    del forgotten
    gc.collect()
    assert_ends(pid)
    assert torch.get_num_threads() == threads


def test_a_model_that_cannot_be_loaded(tmp_path):
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nothing of use")
    with pytest.raises(ValueError, match=r"model.safetensors is not a usable safetensors file"):
        make_tiny_llm(folder, tensor_parallel_size=2)


def test_threads_are_shared_out(monkeypatch):
    """Over the ranks of all replicas, of which each has its share of them already."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(multiproc, "_NUM_THREADS", 16)
    for num_ranks, num_replicas in (2, 1), (2, 2), (4, 4), (8, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=16 // num_replicas: own)
        parallel = ParallelConfig(num_ranks, data_parallel_size=num_replicas)
        assert multiproc._threads_per_rank(parallel) == max(16 // (num_ranks * num_replicas), 1)


def test_a_timeout_that_is_none(folder, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="VLLM_WORKER_TIMEOUT_S must be a positive number of seconds, got 'soon'"):
        make_tiny_llm(folder, tensor_parallel_size=2)


def test_workers_end_with_a_script_that_is_killed(folder):
    """A plain script, whose workers must not run it again."""
    script = f"""
import os, rank_faults
from tiny_llm import make_tiny_llm
llm = make_tiny_llm({str(folder)!r}, tensor_parallel_size=2)
print(llm.collective_rpc(rank_faults.fail_in_step, args=(2, ""))[1], flush=True)
os.kill(os.getpid(), 9)
"""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", FORKED + script],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL
    assert_ends(int(done.stdout))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_a_scripts_group_are_the_scripts(folder, signum):
    """Ctrl-C in a terminal is the script's KeyboardInterrupt, and no worker complains or stays."""
    script = f"""
import os
from processes import children
from tiny_llm import make_tiny_llm
from vllm import SamplingParams
llm = make_tiny_llm({str(folder)!r}, tensor_parallel_size=2)
(worker,) = children(os.getpid())
try:
    print(worker, flush=True)
    while True:
        llm.generate(["a"] * 8, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    # The engine is whole: its step was not cut.
    print(len(llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=False)), flush=True)
    raise
"""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED + script],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        os.killpg(process.pid, signum)
        answer, complaints = process.communicate()
    assert process.returncode == -signum
    assert_ends(worker)
    assert (answer.strip(), complaints.count("KeyboardInterrupt")) == (("1", 1) if signum == signal.SIGINT else ("", 0))
