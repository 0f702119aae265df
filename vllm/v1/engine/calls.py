"""The table of calls upon an engine that are no requests: memory, weights, adapters, profiles. Each is written once.

A row is a coroutine of `EngineCalls`: its name, arguments and docstring are the user's, its body says where it runs
(`_call` in every core, `_workers` in every worker), and `routed` gives it a route of the server's development mode.
`AsyncLLM` has the rows as they are, `LLM` and `LLMEngine` by `blocking`; serving/development.py makes the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import NOT_ENABLED, LoRARequest, given_lora_request
from vllm.utils.checks import MAX_INTEGER, check_integer, check_neutral
from vllm.v1.engine.weight_transfer import trainer_of, weights_of_update

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.metrics.loggers import StatLoggers

PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_TAGS = ("weights", "kv_cache")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Route:
    """A call's route.

    Attributes:
        reply: the name under which the result is given, or an answer that is always the same; None: an empty body.
    """

    method: Literal["GET", "POST"]
    path: str
    reply: str | Mapping[str, Any] | None = None


def routed(
    method: Literal["GET", "POST"], path: str, reply: str | Mapping[str, Any] | None = None
) -> Callable[[_Function], _Function]:
    """Give a call a route, whose query has the call's arguments."""

    def with_route(call: _Function) -> _Function:
        vars(call)["route"] = Route(method, path, reply)
        return call

    return with_route


class EngineCalls:
    """The calls, over `_call` and the few things that differ where the engine's cores are in other processes."""

    vllm_config: VllmConfig
    input_processor: InputProcessor
    stat_loggers: StatLoggers | None = None
    sleep_level: int = 0
    """The deepest level of `sleep` since the engine was wholly awake; 0: it is."""

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica's core; one result a replica."""
        raise NotImplementedError

    async def _quieten(self, mode: str) -> None:
        """Before `sleep`: do with unfinished requests what the mode says."""
        raise NotImplementedError

    async def _go_on(self) -> None:
        """After `wake_up`."""

    async def _load_adapter(self, request: LoRARequest) -> None:
        raise NotImplementedError

    def _forget_adapter(self, lora_id: int) -> None:
        """An adapter is about to be unloaded."""

    def _forget_prefixes(self) -> None:
        """Cached prefixes are about to be forgotten."""

    def _check_tensors(self) -> None:
        """VLLMValidationError: tensors of this process cannot be weights of the engine."""

    async def _workers(self, method: str | bytes, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; one result a worker."""
        results = await self._call("collective_rpc", method, args, kwargs)
        return [each for replica in results for each in replica]

    # Memory.

    @routed("POST", "/reset_prefix_cache", "success")
    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; False while requests run, and nothing done on the replicas where they do, unless
        these are to begin anew. There is no connector to reset."""
        self._forget_prefixes()
        return all(await self._call("reset_prefix_cache", reset_running_requests))

    async def reset_mm_cache(self) -> None:
        """Nothing: inputs are text, and no other is cached."""

    async def reset_encoder_cache(self) -> None:
        """Nothing, as `reset_mm_cache`."""

    @routed("POST", "/sleep")
    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the KV cache, and the device's memory of the weights (on a CPU at level 2 only). Until `wake_up`
        requests wait in an AsyncLLM; in an LLM whatever needs the model is a RuntimeError.

        Args:
            level: 1 keeps the weights (of a GPU in the host's memory), 2 frees them.
            mode: "abort" ends unfinished requests; "keep" lets them begin anew after `wake_up`; "wait" runs them to
                their ends, and an LLM loses their outputs.

        Raises:
            VLLMValidationError: another level or mode.
        """
        check_sleep_level(level)
        check_pause_mode(mode)
        await self._quieten(mode)
        await self._call("sleep", level)
        self.sleep_level = max(await self._call("sleep_level"))

    @routed("POST", "/wake_up")
    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, or, with `tags`, what concerns "weights" or "kv_cache"; whether all of it is awake. Requests
        go on then."""
        check_sleep_tags(tags)
        await self._call("wake_up", tags)
        self.sleep_level = max(await self._call("sleep_level"))
        await self._go_on()
        return not await self.is_sleeping()

    @routed("GET", "/is_sleeping", "is_sleeping")
    async def is_sleeping(self) -> bool:
        """Whether any part of the engine sleeps."""
        return any(await self._call("is_sleeping"))

    # Adapters.

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, unless it is loaded; with its `load_inplace` again. Every replica loads it, or none.

        Raises:
            VLLMValidationError: adapters are not enabled, or one's files, or its id; nothing has changed then.
        """
        await self._load_adapter(given_lora_request(lora_request, self.vllm_config.lora_config is not None))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter, now or once the running requests of it end; False: it is not loaded."""
        self._check_adapters()
        self._forget_adapter(lora_id)
        return any(await self._call("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """The ids of the adapters that are loaded, on every replica."""
        self._check_adapters()
        return set.intersection(*map(set, await self._call("list_loras")))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded whatever others come.

        Raises:
            VLLMValidationError: it is not loaded, or max_cpu_loras of them are pinned.
        """
        if lora_id not in await self.list_loras():
            raise VLLMValidationError(f"no adapter has the id {lora_id}", "lora_id", lora_id)
        try:
            return all(await self._call("pin_lora", lora_id))
        except RuntimeError as error:
            raise VLLMValidationError(str(error).partition(": ")[2], "lora_id", lora_id) from None

    def _check_adapters(self) -> None:
        if self.vllm_config.lora_config is None:
            raise VLLMValidationError(NOT_ENABLED, "lora_id")

    # Weights.

    async def init_weight_transfer_engine(self, request: Any = None) -> None:
        """Let every worker meet the trainer that the request's `init_info` names; nothing where it is empty.
        VLLMValidationError: see `trainer_of`."""
        if (trainer := trainer_of(request)) is not None:
            await self._workers("meet_trainer", **trainer)

    @routed("POST", "/start_weight_update", {"status": "started"})
    async def start_weight_update(self) -> None:
        """Keep what `update_weights` brings, until `finish_weight_update` takes all of it at once."""
        await self._workers("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        """New weights by their checkpoint names; see `weights_of_update` for the request. An AsyncLLM takes no tensors,
        as its cores are other processes.

        Raises:
            ValueError: one does not fit; none is taken. An AsyncLLM raises RuntimeError.
        """
        method, arguments = weights_of_update(request)
        if method == "update_weights":
            self._check_tensors()
        await self._workers(method, *arguments)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Take what has come since start_weight_update, all or, on an error as of `update_weights`, none. Outputs that
        follow are of `weight_version`; None: of the number of updates so far."""
        await self._workers("finish_weight_update", weight_version)

    @routed("GET", "/weight_version", "weight_version")
    async def get_weight_version(self) -> int | str:
        """The version of the weights that the next outputs are of, as in CompletionOutput.weight_versions; the first
        replica's, if there are several."""
        version: int | str = (await self._call("get_weight_version"))[0]
        return version

    # Profiles.

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begin to record operators and kernels on every worker, until stop_profile.

        Args:
            profile_prefix: of the traces' file names.

        Raises:
            ValueError: no folder was named: see `profiler_config`.
            VLLMValidationError: another argument is not None.
        """
        check_profile_limits(delay_iterations, max_iterations, profiler_kwargs)
        await self._workers("profile", True, profile_prefix)

    async def stop_profile(self) -> None:
        """End the recording; each worker writes a trace (for Perfetto, or chrome://tracing)."""
        await self._workers("profile", False)

    # The engine itself.

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it.

        Raises:
            ValueError: skip_tokenizer_init left it out.
        """
        return self.input_processor.hf_tokenizer()

    async def get_model_config(self) -> ModelConfig:
        """`model_config`."""
        return self.vllm_config.model_config

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """See ModelConfig.supported_tasks."""
        return self.vllm_config.model_config.supported_tasks

    async def do_log_stats(self) -> None:
        """Have `stat_loggers` say what has come; the engine logs no statistics by itself."""
        if self.stat_loggers is not None:
            self.stat_loggers.log()


def blocking(
    call: Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]], takes_turn: bool = True
) -> Callable[Concatenate[BlockingCalls, Arguments], Result]:
    """The call for an engine in this process, where nothing of it waits for another. `takes_turn`: it waits for calls
    of other threads that run the engine."""

    @wraps(call)
    def run(self: BlockingCalls, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.turn if takes_turn else nullcontext():
            running = call(self.engine_calls, *args, **kwargs)
            try:
                running.send(None)
            except StopIteration as end:
                result: Result = end.value
                return result
            raise AssertionError(f"{call.__name__} waits for something")

    return run


class BlockingCalls:
    """The calls as methods that block, for `LLM` and `LLMEngine`.

    Attributes:
        turn: held by a call that runs the engine, where threads share it.
    """

    turn: AbstractContextManager[Any] = nullcontext()

    @property
    def engine_calls(self) -> EngineCalls:
        """The engine's."""
        raise NotImplementedError

    reset_prefix_cache = blocking(EngineCalls.reset_prefix_cache)
    reset_mm_cache = blocking(EngineCalls.reset_mm_cache)
    reset_encoder_cache = blocking(EngineCalls.reset_encoder_cache)
    sleep = blocking(EngineCalls.sleep)
    wake_up = blocking(EngineCalls.wake_up)
    is_sleeping = blocking(EngineCalls.is_sleeping)
    add_lora = blocking(EngineCalls.add_lora)
    remove_lora = blocking(EngineCalls.remove_lora)
    list_loras = blocking(EngineCalls.list_loras)
    pin_lora = blocking(EngineCalls.pin_lora)
    init_weight_transfer_engine = blocking(EngineCalls.init_weight_transfer_engine)
    start_weight_update = blocking(EngineCalls.start_weight_update)
    update_weights = blocking(EngineCalls.update_weights)
    finish_weight_update = blocking(EngineCalls.finish_weight_update)
    get_weight_version = blocking(EngineCalls.get_weight_version)
    start_profile = blocking(EngineCalls.start_profile)
    stop_profile = blocking(EngineCalls.stop_profile)
    get_tokenizer = blocking(EngineCalls.get_tokenizer, takes_turn=False)
    get_model_config = blocking(EngineCalls.get_model_config, takes_turn=False)
    get_supported_tasks = blocking(EngineCalls.get_supported_tasks, takes_turn=False)
    do_log_stats = blocking(EngineCalls.do_log_stats)


def check_profile_limits(
    delay_iterations: int | None, max_iterations: int | None, profiler_kwargs: Mapping[str, Any] | None
) -> None:
    """
    Raises:
        VLLMValidationError: one of them asks for something.
    """
    given = {
        "delay_iterations": delay_iterations, "max_iterations": max_iterations, "profiler_kwargs": profiler_kwargs
    }  # fmt: skip
    for name, value in given.items():
        check_neutral(name, value, "profile around the calls of interest")


def check_pause_mode(mode: Any) -> None:
    """
    Raises:
        VLLMValidationError: `mode` is not one of PAUSE_MODES.
    """
    if mode not in PAUSE_MODES:
        raise VLLMValidationError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", "mode", mode)


def check_sleep_level(level: Any) -> None:
    """
    Raises:
        VLLMValidationError: `level` is not 1 or 2.
    """
    if check_integer("level", level, -MAX_INTEGER) not in (1, 2):
        message = f"level must be 1 or 2, got {level!r}; pause_generation (POST /pause) keeps the memory"
        raise VLLMValidationError(message, "level", level)


def check_sleep_tags(tags: Any) -> None:
    """
    Raises:
        VLLMValidationError: `tags` is neither None nor a list of SLEEP_TAGS.
    """
    for tag in tags or ():
        if tag not in SLEEP_TAGS:
            raise VLLMValidationError(f"tags must be of {', '.join(SLEEP_TAGS)}, got {tag!r}", "tags", tag)
