"""The engine core: schedule, run, postprocess."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduling import StepInFlight, can_schedule_ahead, complete, discard, dispatch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.whole_requests import WholeRequestScheduler
from vllm.v1.engine.calls import SLEEP_TAGS, check_sleep_level, check_sleep_tags
from vllm.v1.executor.select import make_executor
from vllm.v1.features.adapters.scheduler import pool_of
from vllm.v1.features.build import scheduler_guests
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest
from vllm.v1.outputs import ModelRunnerOutput, PendingStep
from vllm.v1.request import Request


class EngineCore:
    """A scheduler and its workers."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self.executor = make_executor(config, use_tqdm)
        self.make_guests = partial(scheduler_guests, config, self.collective_rpc)
        self.scheduler: Any = self._make_scheduler(config)
        self._model_config = config.model_config
        self._readings_seconds = 0.0
        self._runs_ahead = config.scheduler_config.async_scheduling and isinstance(self.scheduler, Scheduler)
        self._in_flight: tuple[StepInFlight, PendingStep] | None = None
        self._weights_version = self.executor.worker.weights_version
        self._num_updates = 0
        self.weight_version: int | str = 0
        self._asleep: set[str] = set()
        self._sleep_level = 0
        self._settled: list[EngineCoreOutput] = []
        self.is_paused = False

    def _make_scheduler(self, config: VllmConfig) -> Scheduler | WholeRequestScheduler:
        if config.model_config.attn_type == "encoder_only":
            return WholeRequestScheduler(config.scheduler_config, self.make_guests)
        cache_config = replace(
            config.cache_config,
            num_blocks=self.executor.num_blocks,
            num_host_blocks=self.executor.num_host_blocks,
            group_windows=self.executor.worker.kv_group_windows,
            num_states=self.executor.state_slots.num_requests or None,
            num_snapshots=self.executor.state_slots.num_snapshots,
            snapshot_interval=self.executor.state_slots.snapshot_interval or None,
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
        if self._settled or self.scheduler.refused:
            return self._take_settled()
        if self._is_at_rest() or not self.scheduler.queue_prepared():
            return self._take_settled()
        if self._runs_ahead:
            return self._step_ahead()
        self._check_weights()
        scheduler_output = self._schedule()
        runner_output = self._run(scheduler_output)
        outputs: list[EngineCoreOutput] = self.scheduler.update_from_output(scheduler_output, runner_output)
        return outputs

    def _take_settled(self) -> list[EngineCoreOutput]:
        """The outputs that are there without a step."""
        settled, self._settled, self.scheduler.refused = self._settled + self.scheduler.refused, [], []
        return settled

    def _is_at_rest(self) -> bool:
        """Whether the engine sleeps or is paused. RuntimeError: it does, and requests wait."""
        if not (self.is_paused or self._asleep):
            return False
        if self.has_unfinished_requests():
            self.check_awake()
            raise RuntimeError("the engine is paused: its requests wait until it goes on")
        return True

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        try:
            output = self.executor.execute_model(step)
        except BaseException:
            self.scheduler.discard_step(step)
            raise
        self._readings_seconds += output.readings_seconds
        return output

    def _schedule(self) -> SchedulerOutput:
        """Schedule a step while none is in flight: RuntimeError if it is empty, since the next ones would be, too."""
        step = self.scheduler.schedule()
        # What a preempted request gave up is for the next step.
        if self.scheduler.has_unfinished_requests() and not (step.num_scheduled_tokens or step.preempted_req_ids):
            stuck = list(self.scheduler.requests)
            self.scheduler.discard_step(step)
            self.scheduler.abort_requests(stuck)
            raise RuntimeError(f"none of {len(stuck)} unfinished requests can ever be scheduled; they were aborted")
        return step

    def _step_ahead(self) -> list[EngineCoreOutput]:
        last = self._in_flight
        if last is None or last[0].is_over(self.scheduler):
            if last is None:
                self._check_weights()
            self._in_flight = self._begin_step(self._schedule())
            if last is not None:
                # All its requests have ended since.
                self._readings_seconds += last[1].result().readings_seconds
        assert self._in_flight is not None
        step, pending = self._in_flight
        # If this raises, the next call takes the results of the step in flight.
        may_dispatch = (
            not self._weights_changed and self.executor.worker.can_schedule_ahead and can_schedule_ahead(self.scheduler)
        )
        self._in_flight = self._begin_step(self.scheduler.schedule()) if may_dispatch else None
        try:
            runner_output = pending.result()
        except BaseException:
            discard(self.scheduler, step)
            if self._in_flight is not None:
                # It reads what the failed step was to write.
                step, pending = self._in_flight
                self._in_flight = None
                discard(self.scheduler, step)
                # Wait until the device has finished with it; the first error is the one to raise.
                with contextlib.suppress(Exception):
                    pending.result()
            raise
        self._readings_seconds += runner_output.readings_seconds
        return complete(self.scheduler, step, runner_output)

    def _begin_step(self, scheduler_output: SchedulerOutput) -> tuple[StepInFlight, PendingStep]:
        try:
            pending = self.executor.begin_step(scheduler_output)
        except BaseException:
            self.scheduler.discard_step(scheduler_output)
            raise
        return dispatch(self.scheduler, scheduler_output), pending

    @property
    def _weights_changed(self) -> bool:
        return self.executor.worker.weights_version != self._weights_version

    def _check_weights(self) -> None:
        """After a change of weights nothing is kept of what others computed: running requests begin anew."""
        worker = self.executor.worker
        if self._weights_changed:
            self._weights_version = worker.weights_version
            self._num_updates += 1
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        named = worker.weight_version
        self.weight_version = self._num_updates if named is None else named

    def get_weight_version(self) -> int | str:
        """Of the weights that the next outputs are of."""
        if not self._asleep and self._in_flight is None:
            self._check_weights()
        return self.weight_version

    def has_work(self) -> bool:
        """Whether `step` has something to do: there are requests, and the engine is neither paused nor asleep."""
        can_run = self.has_unfinished_requests() and not self.is_paused and not self._asleep
        return can_run or bool(self._settled) or bool(self.scheduler.refused)

    def pause(self, is_paused: bool = True) -> None:
        """Leave all requests as they are, until told to go on."""
        self.is_paused = is_paused

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and the device's memory of the weights (on a CPU at level 2 only). Requests that are
        there begin anew after `wake_up`.

        Raises:
            ValueError: `level` is not 1 or 2.
        """
        check_sleep_level(level)
        if not self._asleep:
            self._settle()
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        # Also when it sleeps: a deeper level frees more, and a part of it may be awake.
        self.executor.collective_rpc("sleep", (level,))
        self._asleep = set(SLEEP_TAGS)
        self._sleep_level = max(self._sleep_level, level)

    def _settle(self) -> None:
        """Take the results of a step in flight; the next call of `step` gives them."""
        if self._in_flight is not None:
            (step, pending), self._in_flight = self._in_flight, None
            runner_output = pending.result()
            self._readings_seconds += runner_output.readings_seconds
            self._settled += complete(self.scheduler, step, runner_output)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`, or, with `tags`, what concerns "weights" or "kv_cache".

        Raises:
            ValueError: another tag, or the KV cache before weights that were freed.
        """
        check_sleep_tags(tags)
        self.executor.collective_rpc("wake_up", (tags,))
        self._asleep -= set(tags) if tags else self._asleep
        self._sleep_level = self._sleep_level if self._asleep else 0

    def is_sleeping(self) -> bool:
        """Whether any part of the engine sleeps."""
        return bool(self._asleep)

    def sleep_level(self) -> int:
        """The deepest level of `sleep` since the engine was wholly awake; 0: it is."""
        return self._sleep_level

    def check_awake(self) -> None:
        """RuntimeError: something of it sleeps."""
        if self._asleep:
            parts = " and ".join(part for part in SLEEP_TAGS if part in self._asleep)
            raise RuntimeError(f"the engine sleeps ({parts}): call wake_up() first")

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
            "readings_seconds": self._readings_seconds,
            "collective_bytes": dict(group.num_bytes),
            "collective_calls": dict(group.num_calls),
            "time": time.monotonic(),
        }

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, and nothing done, when requests are running, unless these are to begin
        anew."""
        if reset_running_requests:
            self._settle()
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """See AdapterPool.add; VLLMValidationError: adapters are not enabled."""
        return pool_of(self.scheduler.guests).add(lora_request)

    def try_add_lora(self, fields: dict[str, Any]) -> str:
        """`add_lora` for another process: a LoRARequest's fields in, what is wrong with it out; "" = it is loaded."""
        try:
            self.add_lora(LoRARequest(**fields))
        except ValueError as error:
            return str(error.args[0])
        return ""

    def remove_lora(self, lora_id: int) -> bool:
        """See AdapterPool.remove."""
        return pool_of(self.scheduler.guests).remove(lora_id)

    def list_loras(self) -> set[int]:
        """See AdapterPool.loaded_ids."""
        return pool_of(self.scheduler.guests).loaded_ids()

    def pin_lora(self, lora_id: int) -> bool:
        """See AdapterPool.pin."""
        return pool_of(self.scheduler.guests).pin(lora_id)

    def check_health(self) -> None:
        self.executor.check_health()

    def shutdown(self) -> None:
        self.executor.shutdown()

    def collective_rpc(self, method: str | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        return self.executor.collective_rpc(method, args, kwargs)


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
