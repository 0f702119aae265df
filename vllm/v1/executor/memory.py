"""How many KV blocks fit: on the device by gpu_memory_utilization, where the largest possible steps are run to measure
their memory, and in host memory by swap_space."""

from __future__ import annotations

import gc
import math
from typing import NamedTuple

import torch

from vllm.config import VllmConfig
from vllm.config.cache import Window
from vllm.layers.kv_cache_spec import KVCacheSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_groups import blocks_needed
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

# CUDA's memory for the nodes of captured graphs, beside their intermediates.
_GRAPH_BYTES = 256 * 2**20

_NUM_IDS = 20  # requested token ids of the largest steps


class DeviceMemory(NamedTuple):
    """A CUDA device's memory at one time, in bytes."""

    total: int
    free: int  # for any process
    reserved: int  # by this process's allocator
    peak_reserved: int  # since the last `device_memory` with `begin_peak`


def device_memory(device: torch.device, begin_peak: bool = False) -> DeviceMemory:
    """Measure a CUDA device. `begin_peak` first empties the allocator's cache and restarts its peak."""
    torch.cuda.synchronize(device)
    if begin_peak:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device))


class MemoryProfile(NamedTuple):
    """A CUDA device's memory before the weights were loaded, after, and after the largest steps."""

    start: DeviceMemory
    loaded: DeviceMemory
    stepped: DeviceMemory

    @property
    def step_bytes(self) -> int:
        """Memory that steps reserved beyond the weights, in bytes."""
        return self.stepped.peak_reserved - self.loaded.reserved

    @property
    def engine_bytes(self) -> int:
        """The engine's peak, with what CUDA, cuBLAS and NCCL keep outside of the allocator."""
        used = self.start.free - self.stepped.free
        return used - self.stepped.reserved + self.stepped.peak_reserved


def check_free_memory(memory: DeviceMemory, utilization: float) -> None:
    """Raises ValueError when less is free than the engine may use."""
    if memory.free < utilization * memory.total:
        share = memory.free / memory.total
        raise ValueError(
            f"gpu_memory_utilization={utilization:g} is {_gib(utilization * memory.total)} of the GPU's "
            f"{_gib(memory.total)}, but {_gib(memory.free)} are free: lower it to at most "
            f"{math.floor(share * 100) / 100:g}, or end what else uses the GPU"
        )


def device_block_count(
    config: VllmConfig,
    profile: MemoryProfile,
    block_bytes: int,
    staging_bytes: int = 0,
    windows: tuple[Window, ...] = (None,),
) -> int:
    """How many KV blocks of `block_bytes` fit into gpu_memory_utilization of a CUDA device, beside the profiled memory
    and `staging_bytes`. CUDA graphs keep their intermediates: the profiled step's size is reserved once more for them.
    ValueError: one request of max_model_len does not fit; the message says what to lower and to what."""
    model, cache = config.model_config, config.cache_config
    total, utilization = profile.start.total, cache.gpu_memory_utilization
    graph_bytes = 0 if model.enforce_eager else profile.step_bytes + _GRAPH_BYTES
    # One more block is for the padding rows of captured steps.
    taken = profile.engine_bytes + graph_bytes + staging_bytes + block_bytes
    budget = max(int(utilization * total) - taken, 0)
    num_blocks = budget // block_bytes
    needed = blocks_of_longest(config, windows)
    if num_blocks >= needed:
        return num_blocks
    weights = profile.engine_bytes - profile.step_bytes
    ways = []
    if num_blocks // len(windows):
        ways.append(f"lower max_model_len to at most {num_blocks // len(windows) * cache.block_size}")
    enough = (taken + needed * block_bytes) / total
    if enough <= 0.99:
        ways.append(f"raise gpu_memory_utilization to at least {math.ceil(enough * 100) / 100:g}")
    ways.append(
        f"lower max_num_batched_tokens={config.scheduler_config.max_num_batched_tokens} and "
        f"max_num_seqs={config.scheduler_config.max_num_seqs} (they make a step as large as it is)"
    )
    if graph_bytes:
        ways.append("set enforce_eager (no CUDA graphs)")
    raise ValueError(
        f"gpu_memory_utilization={utilization:g} of the GPU's {_gib(total)} is {_gib(utilization * total)}: the "
        f"weights take {_gib(weights)}, a step {_gib(profile.step_bytes)}, CUDA graphs {_gib(graph_bytes)}. The "
        f"{_gib(budget)} left do not hold the KV cache of one request of max_model_len={model.max_model_len}, "
        f"{_gib(needed * block_bytes)}; missing: {_gib(needed * block_bytes + taken - int(utilization * total))}. "
        f"Ways out: {'; '.join(ways)}."
    )


def blocks_of_longest(config: VllmConfig, windows: tuple[Window, ...]) -> int:
    """The most blocks that a request of max_model_len has, in KV groups with these windows."""
    step_tokens = config.scheduler_config.max_num_batched_tokens
    return blocks_needed(config.model_config.max_model_len, step_tokens, windows, config.cache_config.block_size)


def kv_block_bytes(config: VllmConfig, caches: list[KVCacheSpec]) -> int:
    """Bytes of this rank's keys and values in a block."""
    width = sum(spec.values_per_token for spec in caches)
    return width * config.cache_config.block_size * getattr(torch, config.kv_cache_dtype).itemsize


def host_block_count(config: VllmConfig, block_bytes: int, available_bytes: int, num_devices: int) -> int:
    """How many host blocks of `block_bytes` a rank gets by `swap_space`. ValueError: the `num_devices` ranks of all
    replicas on the host together need more than `available_bytes`, or swap_space is below one block."""
    cache = config.cache_config
    if not cache.swap_space or not cache.enable_prefix_caching or not block_bytes:
        return 0
    asked_gib, available_gib = num_devices * cache.swap_space, available_bytes / 2**30
    if asked_gib > available_gib:
        raise ValueError(
            f"swap_space={cache.swap_space:g} GiB for each of {num_devices} devices is {asked_gib:g} GiB, and "
            f"{available_gib:.2f} GiB of the host's memory are available: lower it to at most "
            f"{available_gib / num_devices:.2f}"
        )
    num_blocks = int(cache.swap_space * 2**30) // block_bytes
    if not num_blocks:
        raise ValueError(
            f"swap_space={cache.swap_space:g} GiB does not hold one KV block of {block_bytes / 2**30:.3g} GiB: raise "
            "it, or set it to 0 to do without"
        )
    return num_blocks


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def run_largest_steps(runner: GPUModelRunner, config: VllmConfig) -> None:
    """Run max_num_seqs requests with every filter of sampling and readings of generated and of prompt positions: once
    with max_num_batched_tokens of prompts, once each at the end of the longest context. Leaves the runner unchanged."""
    longest, scheduler = config.model_config.max_model_len, config.scheduler_config
    num_tokens = scheduler.max_num_batched_tokens
    num_requests = min(scheduler.max_num_seqs, num_tokens)
    shares = [num_tokens // num_requests + (index < num_tokens % num_requests) for index in range(num_requests)]
    # Custom processors must see users' requests only.
    custom, runner.sampler.custom = runner.sampler.custom, None
    try:
        with runner.scratch_cache():
            params = [_demanding_params(config)] * num_requests
            run_requests(runner, config, [min(share, longest) for share in shares], 0, params)
            run_requests(runner, config, [longest] * num_requests, longest - 1, params)
    finally:
        runner.sampler.custom = custom


def run_requests(
    runner: GPUModelRunner, config: VllmConfig, lengths: list[int], computed: int, params: list[SamplingParams]
) -> None:
    """In a `scratch_cache`, a step of requests whose prompts have these lengths, of which `computed` tokens each are
    done, and whose results are discarded."""
    new: list[NewRequestData] = []
    for index, (length, own) in enumerate(zip(lengths, params, strict=True)):
        # All write to the scratch cache's only block.
        blocks = ([0] * -(-length // config.cache_config.block_size),) * len(runner.block_tables)
        first_row = 0 if own.reads_prompt and not computed and length > 1 else None
        request = f"warm-up-{index}", [0] * length, length, own, blocks, computed, first_row
        new.append(NewRequestData(*request))
    counts = {each.req_id: each.num_prompt_tokens - computed for each in new}
    # Backwards, so that low slots are free first again.
    ended = [each.req_id for each in reversed(new)]
    try:
        runner.execute_model(SchedulerOutput(new, CachedRequestData(), counts, sum(counts.values()), [], [])).result()
    finally:
        runner.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, ended, [])).result()


def _demanding_params(config: VllmConfig) -> SamplingParams:
    model, vocab_size = config.model_config, config.model_config.vocab_size
    ids = list(range(min(_NUM_IDS, vocab_size)))
    return SamplingParams(
        max_tokens=1,
        temperature=0.9,
        top_p=0.9,
        top_k=min(50, vocab_size),
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logprobs=vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size),
        logprob_token_ids=ids,
        prompt_logprob_token_ids=ids,
    )
