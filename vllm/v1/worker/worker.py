"""A worker: one device with its model runner and KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.communicator import ALONE, Communicator
from vllm.distributed.parallel_state import tensor_parallel
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput, PendingStep
from vllm.v1.worker import memory
from vllm.v1.worker.gpu.kv_swap import STAGING_BYTES
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = init_logger(__name__)

# The other half of the free memory is for activations and the caller's data. VLLM_CPU_KVCACHE_SPACE overrides both.
_CPU_CACHE_LIMIT_BYTES = 4 * 2**30
_CPU_CACHE_FRACTION = 0.5


class Worker:
    """Runs one device's share of a model; `group` holds the ranks that share it."""

    def __init__(self, config: VllmConfig, group: Communicator = ALONE) -> None:
        self.config = config
        self.group = group
        self.device = worker_device(config, group.rank)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        self.model_runner: GPUModelRunner
        self._memory_at_start: memory.DeviceMemory | None = None

    def load_model(self, use_tqdm: bool = False) -> None:
        """Load this rank's weights and build the runner. Raises ValueError: see `check_free_memory`."""
        cache = self.config.cache_config
        if self.device.type == "cuda" and cache.num_blocks is None:
            self._memory_at_start = memory.device_memory(self.device, begin_peak=True)
            memory.check_free_memory(self._memory_at_start, cache.gpu_memory_utilization)
        with tensor_parallel(self.group):
            model = get_model(self.config.model_config, self.device, use_tqdm=use_tqdm and not self.group.rank)
            self.model_runner = GPUModelRunner(self.config, model, self.device)

    def determine_num_blocks(self) -> int:
        """How many KV blocks the pool gets: cache_config.num_blocks, else what the memory budget holds, at most what
        max_num_seqs requests of max_model_len can use. ValueError: the budget does not hold one such request."""
        cache, model = self.config.cache_config, self.config.model_config
        if cache.num_blocks is not None:
            return cache.num_blocks
        blocks_per_request = -(-model.max_model_len // cache.block_size)
        most = blocks_per_request * self.config.scheduler_config.max_num_seqs
        block_bytes = memory.kv_block_bytes(self.config, self.group) + memory.hidden_block_bytes(self.config)
        if self.device.type == "cuda":
            staging_bytes = STAGING_BYTES if cache.swap_space else 0
            return min(memory.device_block_count(self.config, self._profile_memory(), block_bytes, staging_bytes), most)
        budget = self._cpu_cache_bytes()
        if budget < blocks_per_request * block_bytes:
            per_request_gib = blocks_per_request * block_bytes / 2**30
            raise ValueError(
                f"The KV cache budget of {budget / 2**30:.2f} GiB does not hold one request of "
                f"max_model_len={model.max_model_len} ({per_request_gib:.2f} GiB). Lower max_model_len, or raise "
                "VLLM_CPU_KVCACHE_SPACE."
            )
        return min(budget // block_bytes, most)

    def determine_num_host_blocks(self) -> int:
        """How many host blocks `swap_space` holds. Raises ValueError: see `host_block_count`."""
        block_bytes = memory.kv_block_bytes(self.config, self.group)
        return memory.host_block_count(self.config, block_bytes, memory.available_host_bytes())

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache and the host blocks of its offload."""
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, self.config.cache_config.block_size)
        self.model_runner.initialize_kv_cache(num_blocks, num_host_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute_model(scheduler_output).result()

    def begin_step(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Dispatch a step; its results may still be on the device."""
        return self.model_runner.execute_model(scheduler_output)

    @property
    def can_schedule_ahead(self) -> bool:
        """Whether a step may be dispatched before the last one's tokens are known."""
        return not self.model_runner.sampler.is_followed

    def _cpu_cache_bytes(self) -> int:
        world_size = self.group.world_size  # the ranks share the host's memory
        asked = envs.cpu_kvcache_space_bytes()
        if asked is not None:
            return asked // world_size
        free = max(memory.available_host_bytes() - world_size * self.model_runner.max_logits_bytes(), 0)
        share = _CPU_CACHE_FRACTION / self.config.parallel_config.data_parallel_size
        return min(_CPU_CACHE_LIMIT_BYTES, int(free * share)) // world_size

    def _profile_memory(self) -> memory.MemoryProfile:
        assert self._memory_at_start is not None
        loaded = memory.device_memory(self.device, begin_peak=True)
        memory.run_largest_steps(self.model_runner, self.config)
        stepped = memory.device_memory(self.device)
        profile = memory.MemoryProfile(self._memory_at_start, loaded, stepped)
        gib, used_gib = stepped.total / 2**30, profile.engine_bytes / 2**30
        logger.info("GPU memory: %.2f GiB, of which weights, the largest steps and CUDA take %.2f GiB", gib, used_gib)
        memory.device_memory(self.device, begin_peak=True)  # frees the steps' memory for the cache
        return profile


def call_worker(worker: Worker, method: str | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a worker's method by name, or a function with the worker as its first argument."""
    if isinstance(method, str):
        return getattr(worker, method)(*args, **kwargs)
    return method(worker, *args, **kwargs)


def worker_device(config: VllmConfig, rank: int) -> torch.device:
    """The CPU or this rank's CUDA device, modulo the visible ones: a Ray actor sees only its own."""
    kind, parallel = config.device_config.device, config.parallel_config
    if kind == "cpu" or parallel.tensor_parallel_size == parallel.data_parallel_size == 1:
        return torch.device(kind)
    return torch.device(kind, (parallel.first_device + rank) % torch.cuda.device_count())
