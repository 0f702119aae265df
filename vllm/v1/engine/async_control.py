"""The cores of an `AsyncLLM`: their life, pauses, memory, workers, profiles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from vllm.engine.weight_transfer import trainer_of, weights_of_update
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.lora.request import NOT_ENABLED, LoRARequest, given_lora_request
from vllm.v1.engine.core_process.client import CoreClient
from vllm.v1.engine.replica import Replica
from vllm.v1.engine.replica_router import ReplicaRouter
from vllm.v1.engine.upstream_calls import (
    check_pause_mode,
    check_profile_limits,
    check_sleep_level,
    check_sleep_tags,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.tracing import RequestTracer
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.messages import EngineCoreOutput

_PAUSE_POLL_SECONDS = 0.01


class AsyncEngineControl:
    """The part of `AsyncLLM` that is not about requests."""

    vllm_config: VllmConfig
    replicas: list[Replica]
    input_processor: InputProcessor
    tracer: RequestTracer | None
    _router: ReplicaRouter | None
    _receivers: list[asyncio.Task[None]]
    _adapters: dict[int, str]  # paths of those that were loaded, by id; they may have been evicted since
    _resumed: asyncio.Event | None = None  # set while it is not paused; None = it never was

    async def abort(
        self, request_id: str | Iterable[str], internal: bool = False, *, with_output: bool = False
    ) -> None:
        """Drop requests; unknown ids are ignored. Their streams end without a finished output, or, `with_output`, by
        one that holds what there is and has "abort" as finish reason. `internal` changes nothing."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for replica in self.replicas:
            replica.abort(request_ids, with_output)
        if self._router is not None:
            self._router.end(request_ids)

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is dead."""
        self._check_alive()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes requests."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is dead."""
        return self.errored

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead; None: it is not."""
        errors = (replica.core.dead_error for replica in self.replicas)
        return next((error for error in errors if error is not None), None)

    @property
    def num_unfinished_sequences(self) -> int:
        """Number of unfinished sequences; a request may have several."""
        return sum(replica.num_unfinished_sequences for replica in self.replicas)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead; returns the cause."""
        self._start_receiving()
        done, _ = await asyncio.wait(self._receivers, return_when=asyncio.FIRST_COMPLETED)
        for receiver in done:
            receiver.result()  # raises any other error that ended it
        assert self.dead_error is not None
        return self.dead_error

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the engine cores, one a replica."""
        return [replica.core.pid for replica in self.replicas]

    def shutdown(self, timeout: float | None = None) -> None:
        """End the cores' processes; open streams get EngineDeadError. `timeout` has no effect: a core that does not
        end when it is asked to is killed."""
        for receiver in self._receivers:
            receiver.cancel()
        close_cores([replica.core for replica in self.replicas])
        for replica in self.replicas:
            if replica.core.dead_error is None:
                replica.core.dead_error = EngineDeadError("the engine was shut down")
            self._fail(replica, replica.core.dead_error)
        if self.tracer is not None:
            self.tracer.shutdown()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose last output has not been produced."""
        return sum(replica.output_processor.num_unfinished_requests for replica in self.replicas)

    def get_num_unfinished_requests(self) -> int:
        """`num_unfinished_requests`."""
        return self.num_unfinished_requests

    @property
    def output_processor(self) -> Self:
        """Itself: upstream's engine counts its requests in another object."""
        return self

    @property
    def request_states(self) -> dict[str, Any]:
        """The ids of unfinished requests; their values say nothing."""
        return dict.fromkeys(each for own in self.replicas for each in own.output_processor.unfinished_request_ids)

    @property
    def _is_paused(self) -> bool:
        return self._resumed is not None and not self._resumed.is_set()

    async def _wait_while_paused(self) -> None:
        """Until requests go on, or the engine is dead."""
        while self._resumed is not None and not self._resumed.is_set():
            await self._resumed.wait()
            self._check_alive()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; False while requests run, and nothing done on the replicas where they do, unless
        these are to begin anew. There is no connector to reset."""
        if self._router is not None:
            self._router.forget_prefixes()
        return all(await self._call("reset_prefix_cache", reset_running_requests))

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Take no further requests: those that come wait for `resume_generation`.

        Args:
            mode: "abort" ends the requests that are there, with an output of finish reason "abort"; "wait" runs them to
                their ends; "keep" leaves them as they are, to go on later.
            wait_for_inflight_requests: older form of mode="wait".
            clear_cache: forget cached prefixes, too; what is kept then begins anew.

        Raises:
            VLLMValidationError: another mode, or "wait" for requests that were kept when the engine fell asleep.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        check_pause_mode(mode)
        if mode == "wait" and self.num_unfinished_requests:
            if await self.is_sleeping():
                message = 'mode must not be "wait": requests wait themselves until a sleeping engine wakes up'
                raise VLLMValidationError(message, "mode", mode)
            # Those that were kept run, too.
            await self._call("pause", False)
        if self._resumed is None:
            self._resumed = asyncio.Event()
        self._resumed.clear()
        if mode == "keep":
            await self._call("pause")
        elif mode == "abort":
            await self.abort(self.request_states, with_output=True)
        while mode == "wait" and self.num_unfinished_requests:
            self._check_alive()
            await asyncio.sleep(_PAUSE_POLL_SECONDS)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Until no request is unfinished.

        Args:
            drain_timeout: seconds.

        Raises:
            TimeoutError: some are after that time.
        """
        deadline = time.monotonic() + drain_timeout
        while count := self.num_unfinished_requests:
            self._check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} requests were not finished after {drain_timeout} s")
            await asyncio.sleep(_PAUSE_POLL_SECONDS)

    async def resume_generation(self) -> None:
        """Undo `pause_generation`. While the engine sleeps requests wait on, for `wake_up`."""
        if await self.is_sleeping():
            return
        await self._call("pause", False)
        if self._resumed is not None:
            self._resumed.set()

    async def is_paused(self) -> bool:
        """Whether pause_generation was called, and resume_generation was not since."""
        return self._is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: see EngineCore.sleep. Requests that come wait for `wake_up`.

        Args:
            level: 1 keeps the weights (of a GPU in the host's memory), 2 frees them.
            mode: what becomes of requests; see `pause_generation`.
        """
        check_sleep_level(level)
        await self.pause_generation(mode=mode)
        await self._call("sleep", level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, or, with `tags`, what concerns "weights" or "kv_cache"; whether all of it is awake. Requests
        go on then."""
        check_sleep_tags(tags)
        await self._call("wake_up", tags)
        await self.resume_generation()
        return not await self.is_sleeping()

    async def is_sleeping(self) -> bool:
        """Whether any part of the engine sleeps."""
        return any(await self._call("is_sleeping"))

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it.

        Raises:
            ValueError: skip_tokenizer_init left it out.
        """
        return self.input_processor.hf_tokenizer()

    async def get_model_config(self) -> ModelConfig:
        """`model_config`, to be awaited, as upstream once had it."""
        return self.vllm_config.model_config

    async def get_vllm_config(self) -> VllmConfig:
        """`vllm_config`, to be awaited, as upstream once had it."""
        return self.vllm_config

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return self.vllm_config.model_config.supported_tasks

    async def is_tracing_enabled(self) -> bool:
        """Whether requests are traced: otlp_traces_endpoint was given."""
        return self.tracer is not None

    async def do_log_stats(self) -> None:
        """Nothing: the engine logs no statistics by itself."""

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """See LLMEngine.start_profile."""
        check_profile_limits(delay_iterations, max_iterations, profiler_kwargs)
        await self.collective_rpc("profile", args=(True, profile_prefix))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See LLMEngine.add_lora; every replica loads it, or none."""
        request = given_lora_request(lora_request, self.vllm_config.lora_config is not None)
        error = next(filter(None, await self._call("try_add_lora", dict(vars(request)))), None)
        if error is not None:
            if len(self.replicas) > 1 and request.lora_int_id not in self._adapters:
                await self._call("remove_lora", request.lora_int_id)
            raise VLLMValidationError(error, "lora_request", request.lora_name)
        self._adapters[request.lora_int_id] = request.lora_path
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """See LLMEngine.remove_lora."""
        self._check_adapters()
        self._adapters.pop(lora_id, None)
        return any(await self._call("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """The ids of the adapters that every replica holds."""
        self._check_adapters()
        return set.intersection(*map(set, await self._call("list_loras")))

    async def pin_lora(self, lora_id: int) -> bool:
        """See LLMEngine.pin_lora."""
        if lora_id not in await self.list_loras():
            raise VLLMValidationError(f"no adapter has the id {lora_id}", "lora_id", lora_id)
        try:
            return all(await self._call("pin_lora", lora_id))
        except RuntimeError as error:
            raise VLLMValidationError(str(error).partition(": ")[2], "lora_id", lora_id) from None

    def _check_adapters(self) -> None:
        if self.vllm_config.lora_config is None:
            raise VLLMValidationError(NOT_ENABLED, "lora_id")

    async def stop_profile(self) -> None:
        """See LLMEngine.stop_profile."""
        await self.collective_rpc("profile", args=(False,))

    async def init_weight_transfer_engine(self, request: Any = None) -> None:
        """See LLMEngine.init_weight_transfer_engine."""
        if (trainer := trainer_of(request)) is not None:
            await self.collective_rpc("meet_trainer", kwargs=trainer)

    async def start_weight_update(self) -> None:
        """See LLMEngine.start_weight_update."""
        await self.collective_rpc("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        """See LLMEngine.update_weights; not by tensors. RuntimeError: one does not fit; none is taken."""
        method, arguments = weights_of_update(request)
        if method == "update_weights":
            message = "weights must be a file's path, or what a trainer sends: the engine is in another process"
            raise VLLMValidationError(message, "update_info", None)
        await self.collective_rpc(method, args=arguments)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See LLMEngine.finish_weight_update. RuntimeError: a tensor does not fit; none is taken."""
        await self.collective_rpc("finish_weight_update", args=(weight_version,))

    async def get_weight_version(self) -> int | str:
        """Of the weights that the next outputs are of; of the first replica, if there are several."""
        version: int | str = (await self._call("get_weight_version"))[0]
        return version

    async def reset_mm_cache(self) -> None:
        """Nothing: inputs are text, and no other is cached."""

    async def reset_encoder_cache(self) -> None:
        """Nothing, as `reset_mm_cache`."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker of every replica by name; arguments and results are what msgpack can hold.
        `timeout`: see LLMEngine.collective_rpc."""
        results = await self._call("collective_rpc", method, args, kwargs)
        return [each for replica in results for each in replica]

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all replicas; one result a replica."""
        self._check_alive()
        return await asyncio.gather(*(replica.core.call(method, *arguments) for replica in self.replicas))

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        self._start_receiving()

    def _start_receiving(self) -> None:
        if not self._receivers:
            self._receivers = [asyncio.create_task(self._receive(replica)) for replica in self.replicas]

    async def _receive(self, replica: Replica) -> None:
        try:
            await replica.core.receive(partial(self._take, replica), partial(self._is_busy, replica))
        except EngineDeadError as error:
            self._fail(replica, error)

    def _is_busy(self, replica: Replica) -> bool:
        """Whether outputs are expected."""
        return bool(replica.num_unfinished_sequences) and not self._is_paused

    def _take(self, replica: Replica, outputs: list[EngineCoreOutput], stats: dict[str, Any]) -> None:
        processed = replica.take(outputs, stats)
        if self._router is not None:
            self._router.begin(processed.begun)
            self._router.end(processed.ended)

    def _fail(self, replica: Replica, error: EngineDeadError) -> None:
        lost = replica.fail(error)
        if self._resumed is not None:
            self._resumed.set()
        if self._router is not None:
            self._router.end(lost)


def close_cores(cores: Sequence[CoreClient]) -> None:
    """End the cores in parallel."""
    for core in cores:
        core.ask_to_stop()
    for core in cores:
        core.close()
