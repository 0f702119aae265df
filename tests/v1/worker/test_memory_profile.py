"""How many KV blocks a GPU gets: the arithmetic, and the steps that are measured. The GPU's own figures are made up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models_util import random_prompts
from thread_ranks import ThreadExecutor
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.v1.engine import core
from vllm.v1.executor import worker
from vllm.v1.executor.memory import (
    DeviceMemory,
    MemoryProfile,
    check_free_memory,
    device_block_count,
    run_largest_steps,
)
from vllm.v1.sample.logits_processor import LogitsProcessor

GIB = 2**30
BLOCK_BYTES = 16 * 4 * (2 * 2 * 2 * 16 + 64)  # keys and values of two layers and two heads of 16; hidden states of 64
# 80 GiB, of which others have 2; 10 GiB of weights, 3 GiB more at the height of the step, 0.5 GiB outside of the
# allocator.
PROFILE = MemoryProfile(
    start=DeviceMemory(80 * GIB, 78 * GIB, 0, 0),
    loaded=DeviceMemory(80 * GIB, 67 * GIB + GIB // 2, 10 * GIB, 10 * GIB),
    stepped=DeviceMemory(80 * GIB, 65 * GIB + GIB // 2, 12 * GIB, 13 * GIB),
)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_tiny_llm(folder)


def config_of(llm: LLM, **fields):
    """With these fields of the cache, and graphs unless `enforce_eager`."""
    config = llm.llm_engine.vllm_config
    model = replace(config.model_config, enforce_eager=fields.pop("enforce_eager", False))
    return replace(config, model_config=model, cache_config=replace(config.cache_config, **fields))


def test_what_the_engine_takes():
    assert PROFILE.step_bytes == 3 * GIB
    assert PROFILE.engine_bytes == 13 * GIB + GIB // 2


@pytest.mark.parametrize(("utilization", "enforce_eager"), [(0.5, True), (0.5, False), (0.9, False)])
def test_the_rest_is_blocks(llm, utilization, enforce_eager):
    config = config_of(llm, gpu_memory_utilization=utilization, enforce_eager=enforce_eager)
    count = device_block_count(config, PROFILE, BLOCK_BYTES, staging_bytes=GIB)
    taken = 13.5 * GIB + GIB + (0 if enforce_eager else 3 * GIB + 0.25 * GIB)
    # All, and one for the padding, are within the share, and another one is not.
    assert taken + (count + 1) * BLOCK_BYTES <= utilization * 80 * GIB < taken + (count + 2) * BLOCK_BYTES


def test_the_errors_ways_out_lead_out(llm):
    """Each is taken, and is as short as it gets."""
    block_bytes = GIB  # a request of 128 tokens needs 8 of them
    config = config_of(llm, gpu_memory_utilization=0.3)
    with pytest.raises(ValueError) as raised:
        device_block_count(config, PROFILE, block_bytes)
    message = str(raised.value)
    assert "gpu_memory_utilization=0.3 of the GPU's 80.00 GiB is 24.00 GiB" in message
    assert "the weights take 10.50 GiB, a step 3.00 GiB, CUDA graphs 3.25 GiB" in message
    assert "The 6.25 GiB left do not hold the KV cache of one request of max_model_len=128, 8.00 GiB; missing: 1.75 GiB"
    length = int(re.search(r"lower max_model_len to at most (\d+)", message)[1])
    share = float(re.search(r"raise gpu_memory_utilization to at least ([\d.]+)", message)[1])

    def fits(length: int, share: float, enforce_eager: bool = False) -> bool:
        changed = config_of(llm, gpu_memory_utilization=share, enforce_eager=enforce_eager)
        changed = replace(changed, model_config=replace(changed.model_config, max_model_len=length))
        try:
            return device_block_count(changed, PROFILE, block_bytes) > 0
        except ValueError:
            return False

    assert fits(length, 0.3) and not fits(length + 16, 0.3)
    assert fits(128, share) and not fits(128, share - 0.01)
    assert "set enforce_eager" in message and fits(128, 0.3, enforce_eager=True)


def test_when_nothing_fits_at_all(llm):
    config = config_of(llm, gpu_memory_utilization=0.1)
    with pytest.raises(ValueError, match=r"0\.00 GiB left do not hold") as raised:
        device_block_count(config, PROFILE, 100 * GIB)
    message = str(raised.value)
    assert "lower max_num_batched_tokens=2048 and max_num_seqs=256" in message
    assert "lower max_model_len" not in message and "raise gpu_memory_utilization" not in message


def test_others_on_the_gpu():
    start = DeviceMemory(80 * GIB, 61 * GIB, 0, 0)
    check_free_memory(start, 0.75)
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization=0\.9 is 72\.00 GiB of the GPU's 80\.00 GiB, but"
    ) as e:
        check_free_memory(start, 0.9)
    assert "61.00 GiB are free: lower it to at most 0.76" in str(e.value)
    check_free_memory(start, 0.76)


def test_a_worker_measures_the_largest_steps(folder, monkeypatch):
    """On a GPU that is made up: the step itself runs on the CPU."""
    llm = make_tiny_llm(folder, num_gpu_blocks_override=8)
    own = llm.llm_engine.engine_core.executor.worker
    own.config = config_of(llm, num_blocks=None, gpu_memory_utilization=0.5)
    own.device = torch.device("cuda")
    looks = [PROFILE.start._replace(free=39 * GIB), PROFILE.start, PROFILE.loaded, PROFILE.stepped, PROFILE.stepped]
    seen = []
    monkeypatch.setattr(
        worker.memory, "device_memory", lambda device, begin_peak=False: seen.append(begin_peak) or looks.pop(0)
    )
    monkeypatch.setattr(worker, "get_model", lambda *args, **kwargs: own.model_runner.model)
    monkeypatch.setattr(worker, "GPUModelRunner", lambda *args: own.model_runner)
    with pytest.raises(ValueError, match=r"39\.00 GiB are free"):
        own.load_model()
    own.load_model()
    assert own.determine_num_blocks() == 256 * 8, "all that 256 requests of 128 tokens can use"
    assert seen == [True, True, True, False, True] and not looks
    own.config = config_of(llm, num_blocks=77)
    assert own.determine_num_blocks() == 77, "nothing is measured"


@pytest.mark.parametrize("fields", [{}, {"max_num_batched_tokens": 50, "max_num_seqs": 7}, {"max_num_seqs": 2}])
def test_the_largest_steps_are_that_and_leave_nothing(folder, monkeypatch, fields):
    llm = make_tiny_llm(folder, **fields)
    engine = llm.llm_engine.engine_core
    own, scheduler = engine.executor.worker, llm.llm_engine.vllm_config.scheduler_config
    runner = own.model_runner
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(90, (5, 40, 2))]
    params = SamplingParams(max_tokens=5, temperature=1, seed=3, logprobs=2, prompt_logprobs=1)
    before = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.engine_core.step()  # the slots of those requests are free from here on
    num_tokens, num_rows, longest = [], [], []
    forward, compute_logits = type(runner.model).forward, runner.model.compute_logits

    def counting_forward(self, input_ids, positions, caches, attn, *args):
        num_tokens.append(len(input_ids))
        longest.append(attn.max_seq_len)
        return forward(self, input_ids, positions, caches, attn, *args)

    monkeypatch.setattr(type(runner.model), "forward", counting_forward)
    monkeypatch.setattr(runner.model, "compute_logits", lambda rows: num_rows.append(len(rows)) or compute_logits(rows))
    run_largest_steps(runner, llm.llm_engine.vllm_config)
    most = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * 128)
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    assert num_tokens == [most, rows]
    assert num_rows[0] == num_rows[-1] == rows
    assert sum(num_rows[1:-1]) == most - rows, "every other position is read as a prompt's"
    assert longest == [-(-most // rows), 128]
    monkeypatch.undo()
    assert is_empty(llm)
    after = llm.generate(prompts, params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in after] == [each.outputs[0].token_ids for each in before]


def test_a_users_processors_do_not_hear_of_it(folder):
    class Listener(LogitsProcessor):
        def __init__(self, *args):
            pass

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            updates.append(batch_update)

        def apply(self, logits):
            return logits

    updates: list[object] = []
    llm = make_tiny_llm(folder, logits_processors=[Listener])
    own = llm.llm_engine.engine_core.executor.worker
    run_largest_steps(own.model_runner, llm.llm_engine.vllm_config)
    assert not updates
    llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert updates


def test_ranks_run_them_together(folder, monkeypatch):
    class Idle(LogitsProcessor):
        def __init__(self, *args):
            pass

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            raise AssertionError("told of a step that nobody asked for")

        def apply(self, logits):
            return logits

    monkeypatch.setattr(core, "make_executor", ThreadExecutor)
    llm = make_tiny_llm(folder, tensor_parallel_size=2, max_num_seqs=5, logits_processors=[Idle])
    executor = llm.llm_engine.engine_core.executor
    executor.collective_rpc(lambda own: run_largest_steps(own.model_runner, own.config))
    for own in executor.workers:
        assert not own.model_runner.states.req_id_to_slot


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(folder):
    """Nothing made up: the engine starts, stays within its share, and says what does not fit."""
    free, total = torch.cuda.mem_get_info()
    llm = make_tiny_llm(folder, device="cuda", gpu_memory_utilization=0.25, swap_space=0.25)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(90, (5, 40, 2) * 100)]
    params = SamplingParams(max_tokens=40, temperature=1, seed=3, logprobs=2, prompt_logprobs=1)
    assert all(len(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False))
    assert free - torch.cuda.mem_get_info()[0] < 0.25 * total
    with pytest.raises(ValueError, match=r"left do not hold the KV cache of one request of max_model_len=128"):
        make_tiny_llm(folder, device="cuda", gpu_memory_utilization=1e-4)
