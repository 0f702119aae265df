"""The engine core: schedule, run, postprocess."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.guests import hooks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.whole_requests import WholeRequestScheduler
from vllm.v1.engine.calls import SLEEP_TAGS, check_sleep_level, check_sleep_tags
from vllm.v1.engine.steps import Steps, StepsAhead, StepsInStages
from vllm.v1.executor.abstract import make_executor
from vllm.v1.features.build import scheduler_guests
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request


class EngineCore:
    """A scheduler and its workers."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self.executor = make_executor(config, use_tqdm)
        self.make_guests = partial(scheduler_guests, config, self.collective_rpc)
        self._model_config = config.model_config
        scheduler = self._make_scheduler(config)
        self.steps = _kind_of_steps(config)(scheduler, self.executor)
        self._gate = Gate()

    @property
    def scheduler(self) -> Any:
        """The scheduler of the steps."""
        return self.steps.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.steps.scheduler = scheduler

    def _make_scheduler(self, config: VllmConfig) -> Scheduler | WholeRequestScheduler:
        if config.model_config.attn_type == "encoder_only":
            return WholeRequestScheduler(config.scheduler_config, self.make_guests)
        cache_config = replace(
            config.cache_config,
            num_blocks=self.executor.num_blocks,
            num_host_blocks=self.executor.num_host_blocks,
            group_windows=self.executor.worker.kv_group_windows,
            **self.executor.state_slots.cache_fields(),
        )
        return Scheduler(config.scheduler_config, cache_config, config.model_config.max_model_len, self.make_guests)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; errors as Scheduler.add_request."""
        fields = dict(vars(request))
        if request.pooling_params is not None:
            fields["sampling_params"] = reads_for(request.pooling_params, self._model_config)
        self.scheduler.add_request(Request(**fields))

    def has_request(self, request_id: str) -> bool:
        return bool(self.scheduler.has_request(request_id))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort_requests(list(request_ids))

    def step(self) -> list[EngineCoreOutput]:
        """Run one step of the batch; with async_scheduling begin the one after it before waiting for its results.
        Raises the worker's error, after ending the step's requests; EngineDeadError: a rank of several failed;
        RuntimeError: requests wait, but the engine sleeps or is paused (they stay), or none can ever be scheduled (they
        end)."""
        if not self._gate.opens(self.scheduler):
            return self._gate.take(self.scheduler)
        step = self.steps.schedule()
        output = self.steps.run(step)
        return self.steps.update(step, output)

    @property
    def weight_version(self) -> int | str:
        """The version of the weights that the last step's outputs are of."""
        return self.steps.weight_version

    def get_weight_version(self) -> int | str:
        """The version of the weights that the next outputs are of."""
        if not self._gate.asleep and self.steps.are_done:
            self.steps.check_weights()
        return self.steps.weight_version

    def has_work(self) -> bool:
        """Whether `step` has something to do: there are requests, and the engine is neither paused nor asleep."""
        return self._gate.has_work(self.scheduler)

    def pause(self, is_paused: bool = True) -> None:
        """Leave all requests as they are, until told to go on."""
        self._gate.is_paused = is_paused

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and the device's memory of the weights (on a CPU at level 2 only). Requests that are
        there begin anew after `wake_up`.

        Raises:
            ValueError: `level` is not 1 or 2.
        """
        check_sleep_level(level)
        if not self._gate.asleep:
            self.reset_prefix_cache(reset_running_requests=True)
        # Also when it sleeps: a deeper level frees more, and a part of it may be awake.
        self.executor.collective_rpc("sleep", (level,))
        self._gate.fall_asleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`, or, with `tags`, what concerns "weights" or "kv_cache".

        Raises:
            ValueError: another tag, or the KV cache before weights that were freed.
        """
        check_sleep_tags(tags)
        self.executor.collective_rpc("wake_up", (tags,))
        self._gate.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether any part of the engine sleeps."""
        return bool(self._gate.asleep)

    def sleep_level(self) -> int:
        """The deepest level of `sleep` since the engine was wholly awake; 0: it is."""
        return self._gate.sleep_level

    def check_awake(self) -> None:
        """RuntimeError: something of it sleeps."""
        self._gate.check_awake()

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    def stats(self) -> dict[str, Any]:
        """The fields of SchedulerStats; `weight_version` of the last step; `readings_seconds` spent on reading logits
        for logprobs since the start; `collective_bytes` and `collective_calls` of rank 0 since the start, by
        collective; `time`, when all this was taken, on the monotonic clock."""
        group = self.executor.group
        return {
            **vars(self.scheduler.stats()),
            "weight_version": self.weight_version,
            "readings_seconds": self.steps.readings_seconds,
            "collective_bytes": dict(group.num_bytes),
            "collective_calls": dict(group.num_calls),
            "time": time.monotonic(),
        }

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, and nothing done, when requests are running, unless these are to begin
        anew."""
        if reset_running_requests:
            # The next call of `step` gives these.
            self._gate.add(self.steps.settle())
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests))

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of this class or, of those that the scheduler's guests answer, theirs."""
        for guest in self.scheduler.guests:
            if (answer := guest.calls().get(method)) is not None:
                return answer(*arguments)
        return getattr(self, method)(*arguments)

    def check_health(self) -> None:
        self.executor.check_health()

    def shutdown(self) -> None:
        try:
            for closed in hooks(self.scheduler.guests, "closed"):
                closed()
        finally:
            self.executor.shutdown()

    def collective_rpc(self, method: str | bytes | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        """`method`: also the pickle of a function, from the process that started this one."""
        called = pickle.loads(method) if isinstance(method, bytes) else method
        return self.executor.collective_rpc(called, args, kwargs)


def _kind_of_steps(config: VllmConfig) -> type[Steps]:
    if config.model_config.attn_type == "encoder_only":
        return Steps
    if config.scheduler_config.num_steps_in_flight > 1:
        return StepsInStages
    return StepsAhead if config.scheduler_config.async_scheduling else Steps


def reads_for(params: PoolingParams, config: ModelConfig) -> SamplingParams:
    """The request of a generating model that computes what is pooled: nothing is sampled, and the last position is
    read, or all of them."""
    return _reading(config.pooling.reads_all_tokens(params.task), params.skip_reading_prefix_cache)


@cache
def _reading(all_tokens: bool, skips_cache: bool | None) -> SamplingParams:
    prompt_logprobs = 0 if all_tokens else None
    return SamplingParams(
        max_tokens=0, logprobs=0, prompt_logprobs=prompt_logprobs, skip_reading_prefix_cache=skips_cache
    )


class Gate:
    """Requests wait before it, in the scheduler's queues, and outputs that no step gives.

    Attributes:
        is_paused: all requests stay as they are.
        asleep: what sleeps, of SLEEP_TAGS.
        sleep_level: the deepest level of sleep since all was awake; 0: it is.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.asleep: set[str] = set()
        self.sleep_level = 0
        self._settled: list[EngineCoreOutput] = []

    def add(self, outputs: list[EngineCoreOutput]) -> None:
        """The next call of `take` gives these, too."""
        self._settled += outputs

    def fall_asleep(self, level: int) -> None:
        """All of the engine sleeps, at least at this level."""
        self.asleep, self.sleep_level = set(SLEEP_TAGS), max(self.sleep_level, level)

    def wake_up(self, tags: list[str] | None) -> None:
        """These parts are awake; None: all."""
        self.asleep -= set(tags or SLEEP_TAGS)
        if not self.asleep:
            self.sleep_level = 0

    def opens(self, scheduler: Any) -> bool:
        """Whether a step may begin; otherwise `take` what there is. RuntimeError: requests wait, but the engine sleeps
        or is paused."""
        if self._settled or scheduler.refused:
            return False
        if self.is_paused or self.asleep:
            if scheduler.has_unfinished_requests():
                self.check_awake()
                raise RuntimeError("the engine is paused: its requests wait until it goes on")
            return False
        return bool(scheduler.queue_prepared())

    def take(self, scheduler: Any) -> list[EngineCoreOutput]:
        """The outputs that are there without a step."""
        outputs: list[EngineCoreOutput] = self._settled + scheduler.refused
        self._settled, scheduler.refused = [], []
        return outputs

    def has_work(self, scheduler: Any) -> bool:
        """Whether a step has something to do, or outputs are there."""
        can_run = scheduler.has_unfinished_requests() or scheduler.is_transferring
        can_run = can_run and not (self.is_paused or self.asleep)
        return can_run or bool(self._settled) or bool(scheduler.refused)

    def check_awake(self) -> None:
        """RuntimeError: something of the engine sleeps."""
        if self.asleep:
            parts = " and ".join(part for part in SLEEP_TAGS if part in self.asleep)
            raise RuntimeError(f"the engine sleeps ({parts}): call wake_up() first")
