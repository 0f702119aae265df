"""The core of an engine whose model is an encoder, or a decoder without a causal mask: requests need no cache, and each
is complete after one step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import SchedulerStats
from vllm.v1.engine.core import EngineCore
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest
from vllm.v1.worker.gpu.pool.encoder_runner import EncoderRunner


class _Executor:
    """Stands where an executor's counts are read."""

    num_blocks = num_host_blocks = 0

    def __init__(self, runner: EncoderRunner) -> None:
        self.model_runner = runner
        self.driver_worker = self


class PoolingCore:
    """Steps of at most max_num_batched_tokens and max_num_seqs; methods as EngineCore's. A step takes requests in their
    order of arrival, and at least one."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self.runner = EncoderRunner(config, use_tqdm)
        self.executor: Any = _Executor(self.runner)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.scheduler = self
        self._limits = config.scheduler_config
        self.is_paused = False

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. ValueError: its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
        self.requests[request.request_id] = request

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self.requests.pop(request_id, None)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.requests

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def has_work(self) -> bool:
        return bool(self.requests) and not self.is_paused

    def pause(self, is_paused: bool = True) -> None:
        """Leave all requests as they are, until told to go on."""
        self.is_paused = is_paused

    def step(self) -> list[EngineCoreOutput]:
        """Run the next requests; an error ends these."""
        batch = self._next_batch()
        if not batch:
            return []
        now = time.monotonic()
        results = self.runner.run(batch)
        return [
            EngineCoreOutput(
                request.request_id, [], finish_reason="stop", scheduled_time=now, pooling_output=result.contiguous()
            )
            for request, result in zip(batch, results, strict=True)
        ]

    def _next_batch(self) -> list[EngineCoreRequest]:
        """By length: neighbours of equal length are attended together."""
        budget = self._limits.max_num_batched_tokens
        batch: list[EngineCoreRequest] = []
        for request in self.requests.values() if not self.is_paused else ():
            budget -= len(request.prompt_token_ids)
            if batch and (budget < 0 or len(batch) == self._limits.max_num_seqs):
                break
            batch.append(request)
        self.abort_requests([request.request_id for request in batch])
        return sorted(batch, key=lambda request: len(request.prompt_token_ids))

    def stats(self) -> dict[str, Any]:
        """As EngineCore.stats; there is no cache to count."""
        stats = SchedulerStats(0, len(self.requests), 0.0, 0, 0, 0, 0, 0, 0.0)
        return {
            **vars(stats),
            "readings_seconds": 0.0,
            "collective_bytes": {},
            "collective_calls": {},
            "time": time.monotonic(),
        }

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True

    def is_sleeping(self) -> bool:
        return False

    def sleep(self, level: int = 1) -> None:
        raise ValueError("sleep is not supported for encoders: they have no KV cache")

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def collective_rpc(self, method: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> list[Any]:
        raise ValueError("collective_rpc is not supported for encoders: there is one worker, in the engine's process")

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def make_core(config: VllmConfig, use_tqdm: bool = False) -> EngineCore | PoolingCore:
    """The core of the configuration's model."""
    sees_all = config.model_config.attn_type == "encoder_only"
    return PoolingCore(config, use_tqdm) if sees_all else EngineCore(config, use_tqdm)
