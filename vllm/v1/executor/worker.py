"""A worker: one device with its model runner and KV cache."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.config.cache import Window
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.distributed.communicator import ALONE, Communicator
from vllm.distributed.parallel_state import tensor_parallel
from vllm.distributed.stages import WHOLE, Stage, building_stage, get_stage
from vllm.distributed.trainer_group import TrainerGroup, join_trainer, receive_tensors
from vllm.layers.state import state_bytes
from vllm.layers.weight_update import HEAD, move_weights
from vllm.loader import get_model
from vllm.loader.packed_weights import Plan, drop_pages
from vllm.logger import init_logger, timed
from vllm.lora.request import LoRARequest
from vllm.ops.gpu_kernels import compiles_while_running
from vllm.quantization.settings import find_settings
from vllm.utils.forked_threads import check_threads
from vllm.utils.host_memory import available_bytes, return_freed_memory
from vllm.utils.plugins import load_general_plugins
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import memory
from vllm.v1.executor.warm_up import warm_up
from vllm.v1.features.adapters.manager import AdapterManager
from vllm.v1.features.adapters.runner import Adapters
from vllm.v1.features.build import encoder_guests, runner_guests
from vllm.v1.features.states.memory import NO_STATES, StateSlots, plan_states
from vllm.v1.features.swap.runner import STAGING_BYTES
from vllm.v1.outputs import ModelRunnerOutput, PendingStep
from vllm.v1.worker.gpu.guests import CacheSizes, hooks
from vllm.v1.worker.gpu.model_runner import GPUModelRunner, StageRunner
from vllm.v1.worker.gpu.pool.decoder_runner import PoolingModelRunner
from vllm.v1.worker.gpu.pool.encoder_runner import EncoderRunner

logger = init_logger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The other half of the free memory is for activations and the caller's data. VLLM_CPU_KVCACHE_SPACE overrides both.
_CPU_CACHE_LIMIT_BYTES = 4 * 2**30
_CPU_CACHE_FRACTION = 0.5


def _on_host(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, for which tensors without a device are the host's, whatever its caller has set as default."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.empty(0).is_cpu:
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call


class Worker:
    """Runs one device's share of a model; `group` holds the ranks that share its layers, `stage` says which of the
    model's these are. `num_here` ranks share the machine's memory; None: all do."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        group: Communicator = ALONE,
        stage: Stage = WHOLE,
        num_here: int | None = None,
    ) -> None:
        check_threads()
        config = self.config = self.vllm_config = vllm_config
        # Extensions of callers read these.
        self.model_config, self.parallel_config = config.model_config, config.parallel_config
        self.cache_config, self.scheduler_config = config.cache_config, config.scheduler_config
        self.group, self.stage = group, stage
        self._num_here = num_here or self.parallel_config.world_size
        if stage.is_last and config.speculative_config is not None:
            stage.embeds |= config.speculative_config.method in ("mtp", "eagle", "eagle3")
        # The last stage has the first ranks: it samples, in the caller's process.
        self.rank = self.local_rank = (stage.size - 1 - stage.index) * group.world_size + group.rank
        self.device = worker_device(config, group.rank)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        self._runner: GPUModelRunner | None = None
        self._memory_at_start: memory.DeviceMemory | None = None
        self._cache_sizes = CacheSizes()
        self._state_slots = NO_STATES
        self._asleep: set[str] = set()  # of "weights", "kv_cache"
        self._num_reloads = 0
        self._staged: list[tuple[str, torch.Tensor]] | None = None  # None: no update has begun
        self._trainer: TrainerGroup | None = None
        self._named_version: tuple[int, str] | None = None  # of the weights of a weights_version
        self._adapters: dict[int, LoRARequest] = {}  # loaded ones, by number
        self._kept_steps: deque[PendingStep] = deque()
        self._profiler: Any = None
        self._profile_prefix = ""

    @_on_host
    def load_model(self, use_tqdm: bool = False, plans: Mapping[int, Plan] = MappingProxyType({})) -> None:
        """Load this rank's weights and build the runner; for `plans`, by the numbers of stages, see `get_model`. Raises
        ValueError: see `check_free_memory`."""
        cache = self.config.cache_config
        if self.device.type == "cuda" and cache.num_blocks is None and self._has_cache:
            self._memory_at_start = memory.device_memory(self.device, begin_peak=True)
            memory.check_free_memory(self._memory_at_start, cache.gpu_memory_utilization)
        with tensor_parallel(self.group), building_stage(self.stage):
            shows = use_tqdm and not self.group.rank
            takes_adapters = self.config.lora_config is not None
            is_first = not self.group.rank
            with timed(logger, "weights read and packed") if is_first else contextlib.nullcontext():
                own = self.config.model_config
                plan = plans.get(self.stage.index)
                model = get_model(own, self.device, shows, takes_adapters, engine=self.config, plan=plan)
            self._runner = _make_runner(self.config, model, self.device)
            _share_loading(model, hooks(self._runner.guests, "load_weights"))
            for request in self._adapters.values():
                self.adapters.add(request)

    def determine_num_blocks(self) -> int:
        """How many KV blocks the pool gets: cache_config.num_blocks, else what the memory budget holds, at most what
        max_num_seqs requests of max_model_len can use; 0 without a cache. ValueError: the budget does not hold one
        such request."""
        cache = self.config.cache_config
        if not self._has_cache:
            return 0
        if cache.num_blocks is not None:
            return cache.num_blocks
        most = self._blocks_of_longest * self.config.scheduler_config.max_num_seqs
        guests = self.model_runner.guests
        block_bytes = self._kv_block_bytes() + sum(guest.block_bytes for guest in guests)
        reserved = self._state_slots.num_bytes(self._state_bytes) + sum(guest.own_bytes for guest in guests)
        if not block_bytes:
            return most
        if cache.memory_bytes is not None:
            return min(self._blocks_within(cache.memory_bytes - reserved, block_bytes), most)
        if self.device.type == "cuda":
            staging_bytes = reserved + (STAGING_BYTES if cache.swap_space else 0)
            sizes = block_bytes, staging_bytes, self.kv_group_windows
            return min(memory.device_block_count(self.config, self._profile_memory(), *sizes), most)
        return min(self._blocks_within(self._cpu_cache_bytes() - reserved, block_bytes), most)

    def determine_state_slots(self) -> StateSlots:
        """How many states and snapshots of them there are; none where the model has no states. Before the number of
        blocks is determined, which get the rest of the memory. ValueError: see `plan_states`."""
        cache = self.config.cache_config
        if not self._has_cache or not self._state_bytes or cache.num_blocks is not None:
            budget = 0
        elif cache.memory_bytes is not None:
            budget = cache.memory_bytes
        elif self._memory_at_start is not None:
            taken = self._memory_at_start.free - memory.device_memory(self.device).free
            budget = max(int(cache.gpu_memory_utilization * self._memory_at_start.total) - taken, 0)
        else:
            budget = self._cpu_cache_bytes()
        if self._has_cache:
            self._state_slots = plan_states(self.config, self._state_bytes, budget, self._kv_block_bytes())
        return self._state_slots

    @property
    def _state_bytes(self) -> int:
        return state_bytes(self.model_runner.model)

    def _blocks_within(self, budget: int, block_bytes: int) -> int:
        """How many blocks `budget` bytes hold; at least those of one request of max_model_len."""
        max_model_len = self.config.model_config.max_model_len
        needed = self._blocks_of_longest * block_bytes
        if budget < needed:
            raise ValueError(
                f"The KV cache budget of {budget / 2**30:.2f} GiB does not hold one request of "
                f"max_model_len={max_model_len} ({needed / 2**30:.2f} GiB). Lower max_model_len, or raise "
                "kv_cache_memory_bytes or VLLM_CPU_KVCACHE_SPACE."
            )
        return budget // block_bytes

    def determine_num_host_blocks(self) -> int:
        """How many host blocks `swap_space` holds. Raises ValueError: see `host_block_count`."""
        if not self._has_cache:
            return 0
        block_bytes = self._kv_block_bytes() + sum(guest.host_block_bytes for guest in self.model_runner.guests)
        num_devices = self._num_here * self.parallel_config.data_parallel_size
        return memory.host_block_count(self.config, block_bytes, available_bytes(), num_devices)

    @property
    def _has_cache(self) -> bool:
        return self.model_config.attn_type != "encoder_only"

    @property
    def kv_group_windows(self) -> tuple[Window, ...]:
        """Tokens that the layers of each KV group see; None = all."""
        return self.model_runner.kv_layout.windows

    @property
    def _blocks_of_longest(self) -> int:
        return memory.blocks_of_longest(self.config, self.kv_group_windows)

    def _kv_block_bytes(self) -> int:
        return memory.kv_block_bytes(self.config, self.model_runner.kv_layout.caches)

    @_on_host
    def initialize_kv_cache(
        self, num_blocks: int, num_host_blocks: int = 0, state_slots: StateSlots = NO_STATES
    ) -> None:
        """Allocate the KV cache, the host blocks of its offload, and the states."""
        if not self._has_cache:
            return
        logger.info("KV cache: %d blocks of %d tokens", num_blocks, self.config.cache_config.block_size)
        if state_slots.num_requests:
            logger.info("States: of %d requests, and %d snapshots, every %d tokens", *state_slots[:3])
        self._cache_sizes = CacheSizes(num_blocks, num_host_blocks, state_slots)
        if compiles_while_running(self.device):
            warm_up(self.model_runner, self.config)
        self.model_runner.initialize_kv_cache(self._cache_sizes)

    @_on_host
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        check_threads()
        return self.model_runner.execute_model(scheduler_output).result()

    @_on_host
    def begin_step(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Dispatch a step; its results may still be on the device. Errors as `check_threads`."""
        check_threads()
        return self.model_runner.execute_model(scheduler_output)

    def begin_kept_step(self, scheduler_output: SchedulerOutput) -> None:
        """As begin_step; the worker keeps the step for end_kept_step."""
        self._kept_steps.append(self.begin_step(scheduler_output))

    def end_kept_step(self) -> None:
        """Wait for the first step that is kept, and take its tokens."""
        self._kept_steps.popleft().result()

    @property
    def can_schedule_ahead(self) -> bool:
        """Whether a step may be dispatched before the last one's tokens are known."""
        return not self.model_runner.sampler.is_followed

    # -- weights and memory while the engine lives ------------------------------------------------------------

    @property
    def model_runner(self) -> GPUModelRunner:
        """The model runner. RuntimeError: `sleep` has freed it."""
        if self._runner is None:
            raise RuntimeError("the weights were freed by sleep(level=2): call wake_up(tags=['weights']) first")
        return self._runner

    def get_model(self) -> torch.nn.Module:
        """The model that runs. RuntimeError: `sleep` has freed it."""
        return self.model_runner.model

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """New values for weights, by their checkpoint names; see WeightUpdater.update."""
        self.get_model().load_weights(weights)  # type: ignore[operator]

    def start_weight_update(self) -> None:
        """Keep what `update_weights` brings, until `finish_weight_update` takes all of it at once."""
        self._staged = []

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As load_weights; after start_weight_update a part of what is taken in the end."""
        if self._staged is None:
            self.load_weights(weights)
            return
        # The caller may reuse its memory.
        self._staged += [(name, tensor.detach().clone()) for name, tensor in list(weights)]

    def update_weights_from_file(self, path: str) -> None:
        """`update_weights` of a safetensors file's; one in /dev/shm is memory that processes share.

        Raises:
            ValueError: it is no such file.
        """
        file = Path(path)
        if file.suffix != ".safetensors" or not file.is_file():
            raise ValueError(f"update_weights: {path} is not a safetensors file on the engine's machine")
        self.update_weights(iterate_tensors([file]))

    def meet_trainer(self, address: str, port: int, world_size: int, rank_offset: int) -> None:
        """Meet the trainer that `receive_weights` is to receive from, and the other workers of its engines.

        Args:
            address, port: where the trainer is.
            world_size: trainer and workers.
            rank_offset: the rank there of the first replica's first worker.
        """
        self._trainer = None
        parallel = self.parallel_config
        rank = rank_offset + parallel.data_parallel_rank * parallel.world_size + self.rank
        self._trainer = join_trainer(address, port, rank, world_size)

    def receive_weights(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """`update_weights` of what the trainer sends: tensors of these checkpoint names, dtypes and shapes, in order.

        Raises:
            ValueError: others come; the trainer must be met again.
        """
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            raise ValueError("update_weights: no trainer was met, or it was lost: call init_weight_transfer_engine")
        forms = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        received = list(zip(names, receive_tensors(trainer, forms), strict=True))
        self._trainer = trainer
        if self._staged is None:
            self.load_weights(received)
        else:
            self._staged += received

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Take what has come since start_weight_update, if anything has, all or, on a ValueError, none. Results of the
        weights that there are then are of `weight_version`."""
        staged, self._staged = self._staged, None
        if staged:
            self.load_weights(staged)
        self._named_version = None if weight_version is None else (self.weights_version, weight_version)

    @property
    def weight_version(self) -> str | None:
        """The name that finish_weight_update gave the weights; None: they have no name."""
        if self._named_version is None or self._named_version[0] != self.weights_version:
            return None
        return self._named_version[1]

    def reload_weights(self) -> None:
        """The checkpoint's weights again. A quantised one is read as at the start, and the KV cache is emptied."""
        config = self.config.model_config
        if find_settings(Path(config.path), config.hf_config.raw) is None:
            # They fit: there is no need to hold all of them before the first one is taken.
            # A head that is tied to the embedding comes after it.
            heads = []
            for name, tensor in iterate_tensors(shard_files(Path(config.path))):
                if name.endswith(HEAD):
                    heads.append((name, tensor))
                else:
                    self.load_weights([(name, tensor)])
            if heads:
                self.load_weights(heads)
            return
        awake = {"kv_cache"} - self._asleep
        self.sleep(level=2)
        self.wake_up(["weights", *awake])

    @property
    def weights_version(self) -> int:
        """Changes whenever the weights do."""
        return self._num_reloads + self.model_runner.model.weight_updater.version

    @property
    def adapters(self) -> AdapterManager:
        """The adapters of its model. ValueError: the engine was started without them."""
        found = next((guest for guest in self.model_runner.guests if isinstance(guest, Adapters)), None)
        if found is None:
            raise ValueError("adapters are served with enable_lora=True")
        return found.manager

    def add_lora(self, request: LoRARequest) -> bool:
        """Read an adapter into memory; see AdapterManager.add. Those that are loaded stay so through `sleep`."""
        is_new = self.adapters.add(request)
        self._adapters[request.lora_int_id] = request
        return is_new

    def remove_lora(self, lora_id: int) -> bool:
        """Free an adapter's memory. False: it was not loaded."""
        was_loaded = self._adapters.pop(lora_id, None) is not None
        if self._runner is not None:
            self.adapters.remove(lora_id)
        return was_loaded

    def list_loras(self) -> set[int]:
        """The numbers of loaded adapters."""
        return set(self._adapters)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache; at level 1 move a GPU's weights to the host, or give back the memory of weights that a CPU
        maps, which the next step reads again; at level 2 free the weights, too. What sleeps already stays so; level 2
        after level 1 frees the weights."""
        if self._runner is None:
            return
        if "kv_cache" not in self._asleep:
            self.model_runner.release_kv_cache()
            self._asleep.add("kv_cache")
        if level == 2:
            self._num_reloads = self.weights_version + 1
            former, self._runner = self._runner.model, None
            # Trainers keep `model_runner.model`.
            former.retire(self.get_model)
            self._asleep.add("weights")
        elif self.device.type == "cuda" and "weights" not in self._asleep:
            self._move_weights(torch.device("cpu"))
            self._asleep.add("weights")
        elif self.device.type == "cpu":
            for model in self._models():
                drop_pages(model)
        return_freed_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo `sleep`, or, with `tags`, the part of it that concerns "weights" or "kv_cache". Weights that were freed
        are the checkpoint's again."""
        woken = self._asleep & (set(tags) if tags else self._asleep)
        if "weights" in woken:
            if self._runner is None:
                self.load_model()
            else:
                self._move_weights(self.device)
        if "kv_cache" in woken:
            if self._runner is None:
                raise ValueError("wake_up: the weights, which sleep(level=2) freed, must come before kv_cache")
            self._runner.initialize_kv_cache(self._cache_sizes)
        self._asleep -= woken

    def _move_weights(self, device: torch.device) -> None:
        for model in self._models():
            move_weights(model, device)

    def _models(self) -> list[Any]:
        """The model and those of guests."""
        runner = self.model_runner
        return [runner.model, *(model for guest in runner.guests for model in guest.models())]

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Begin to record operators and kernels, or end it and write a trace into the profiler's folder; its
        name begins with the prefix.

        Raises:
            ValueError: no folder was named.
        """
        folder = self.config.torch_profiler_dir or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        if not folder:
            raise ValueError(
                "profiling needs a folder for its traces: profiler_config={'profiler': 'torch', 'torch_profiler_dir': "
                "FOLDER}, or VLLM_TORCH_PROFILER_DIR"
            )
        if is_start and self._profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            self._profile_prefix = profile_prefix or "vllm"
        elif not is_start and self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            os.makedirs(folder, exist_ok=True)
            name = f"{self._profile_prefix}-rank{self.rank}-{time.time_ns()}.pt.trace.json.gz"
            profiler.export_chrome_trace(os.path.join(folder, name))

    def _cpu_cache_bytes(self) -> int:
        asked = envs.cpu_kvcache_space_bytes()
        if asked is not None:
            return asked // self._num_here
        free = max(available_bytes() - self._num_here * self.model_runner.max_logits_bytes(), 0)
        share = _CPU_CACHE_FRACTION / self.config.parallel_config.data_parallel_size
        return min(_CPU_CACHE_LIMIT_BYTES, int(free * share)) // self._num_here

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


def _make_runner(config: VllmConfig, model: Any, device: torch.device) -> Any:
    if not get_stage().is_last:
        return StageRunner(config, model, device, runner_guests)
    if config.model_config.attn_type == "encoder_only":
        return EncoderRunner(config, model, device, encoder_guests)
    runner = PoolingModelRunner if config.model_config.runner_type == "pooling" else GPUModelRunner
    return runner(config, model, device, runner_guests)


def _share_loading(model: Any, loads: Sequence[Callable[[Any], None]]) -> None:
    """Have guests get what the model is given to load, also by callers who know the model alone."""
    if not loads:
        return
    own = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        # Each takes its own.
        weights = list(weights)
        loaded = own(weights)
        for load in loads:
            load(weights)
        return loaded

    model.load_weights = load_weights


def make_worker(
    config: VllmConfig, group: Communicator = ALONE, stage: Stage = WHOLE, num_here: int | None = None
) -> Worker:
    """A worker, which also has the methods of `worker_extension_cls`. Runs the general plug-ins first.

    Raises:
        ValueError: the class is not there, or has a name that workers have themselves.
    """
    load_general_plugins()
    extension = config.parallel_config.worker_extension_cls
    if not extension:
        return Worker(config, group, stage, num_here)
    if isinstance(extension, str):
        module_name, _, class_name = extension.replace(":", ".").rpartition(".")
        try:
            extension = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"worker_extension_cls={extension!r} is not a class that can be imported: {error}"
            ) from error
    for name in vars(extension):
        if not name.startswith("__") and hasattr(Worker, name):
            raise ValueError(f"worker_extension_cls: {extension.__name__}.{name} would hide the worker's own {name}")
    # By name, as upstream does: an extension may have a __new__ that looks at the configuration.
    kind = type("ExtendedWorker", (Worker, extension), {})
    return kind(vllm_config=config, group=group, stage=stage, num_here=num_here)


def call_worker(worker: Worker, method: str | Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a worker's method by name, or a function with the worker as its first argument."""
    if isinstance(method, str):
        return _on_host(getattr(worker, method))(*args, **kwargs)
    return method(worker, *args, **kwargs)


def worker_device(config: VllmConfig, rank: int) -> torch.device:
    """The CPU or this rank's CUDA device, modulo the visible ones: a Ray actor sees only its own."""
    kind, parallel = config.device_config.device, config.parallel_config
    if kind == "cpu" or parallel.tensor_parallel_size == parallel.data_parallel_size == 1:
        return torch.device(kind)
    return torch.device(kind, (parallel.first_device + rank) % torch.cuda.device_count())
