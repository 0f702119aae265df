"""Engine arguments: one dataclass for `LLM(...)`, and the command-line flags made from it."""

from __future__ import annotations

import argparse
import os
import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from vllm import envs
from vllm.config import (
    ATTENTION_BACKENDS,
    LOAD_FORMATS,
    QUANTIZATIONS,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.logger import init_logger, warn_once
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS
from vllm.utils.device import resolve_device

if TYPE_CHECKING:
    from vllm.model_executor.model_loader import ResolvedModel

logger = init_logger(__name__)

# What a CPU keeps of finished requests, unless asked for more: the text of so many full steps.
_IDLE_STEPS = 4
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def _arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class EngineArgs:
    """Arguments of `LLM` and of the command line. Names and defaults are vLLM's unless the help says otherwise.

    `create_engine_config` resolves and checks them.
    """

    model: str | None = _arg(None, "model folder, .gguf file or hub name; the embedded small model when left out")
    tokenizer: str | None = _arg(None, "tokenizer folder or hub name; the model's when left out")
    tokenizer_mode: Literal["auto", "slow"] = _arg("auto", "auto: the fast tokenizer; slow: the Python one")
    skip_tokenizer_init: bool = _arg(False, "do without a tokenizer: prompts are token ids, outputs have no text")
    trust_remote_code: bool = _arg(False, "let the tokenizer's repository run its own code")
    tensor_parallel_size: int = _arg(1, "number of devices to split the model over")
    data_parallel_size: int = _arg(1, "replicas of the model behind one server, each with its own KV cache")
    dtype: str = _arg(
        "auto",
        "auto, float32, float16 (half) or bfloat16; auto is the checkpoint's own, or float16 on a GPU without bfloat16",
    )
    quantization: str | None = _arg(
        None, "int8: linear layers and head with 8-bit weights; gguf changes nothing: such files are always read"
    )
    load_format: Literal["auto", "dummy"] = _arg(
        "auto", "auto: the model's weights; dummy: random ones made up from the seed, for measuring"
    )
    revision: str | None = _arg(None, "revision of a hub model")
    tokenizer_revision: str | None = _arg(None, "revision of a hub tokenizer")
    seed: int = _arg(0, "seed of requests that bring none")
    device: Literal["auto", "cpu", "cuda"] = _arg("auto", "auto: cuda where there is a GPU that can be used, else cpu")
    gpu_memory_utilization: float = _arg(0.9, "fraction of the GPU's memory that the engine may use")
    swap_space: float = _arg(
        0.0, "GiB of host memory a device for KV blocks that make room for others, to copy back; pinned on cuda"
    )
    enforce_eager: bool = _arg(
        False, "never replay a recorded step: every module is called at every step, and so are its hooks"
    )
    attention_backend: Literal["auto", "paged", "varlen", "flashinfer"] = _arg(
        "auto",
        "paged: our own kernels; varlen: FlashAttention by way of torch; flashinfer: that package; auto: varlen where "
        "it serves, else paged",
    )
    max_context_len_to_capture: int | None = _arg(None, "older name of max_seq_len_to_capture")
    max_seq_len_to_capture: int | None = _arg(
        None, "on cuda: decode steps with longer contexts are not replayed from CUDA graphs; when left out, all are"
    )
    disable_custom_all_reduce: bool = _arg(False, "on CPU: ranks add up by gloo, not through shared memory")
    max_model_len: int | None = _arg(None, "longest prompt plus output, in tokens; the model's own when left out")
    max_num_seqs: int = _arg(256, "requests in a step")
    max_num_batched_tokens: int | None = _arg(None, "tokens in a step; 2048 when left out")
    enable_chunked_prefill: bool = _arg(True, "split a prompt over steps when it does not fit in one")
    scheduling_policy: Literal["fcfs", "priority"] = _arg("fcfs", "fcfs: first come; priority: lower value first")
    async_scheduling: bool | None = _arg(
        None, "begin a step while the one before it runs; when left out, on cuda with one device"
    )
    max_logprobs: int = _arg(20, "cap on logprobs; -1 = the vocabulary")
    max_logprob_token_ids: int = _arg(
        MAX_LOGPROB_TOKEN_IDS, "cap on the length of logprob_token_ids; -1 = the vocabulary"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = _arg(
        "raw_logprobs", "what readings are read from, for requests that name no mode"
    )
    logits_processors: list[str | type] | None = _arg(
        None, "custom logits processors, each as module.path:ClassName; classes are accepted offline"
    )
    block_size: int = _arg(16, "tokens a KV block")
    num_gpu_blocks_override: int | None = _arg(None, "KV blocks in the pool, instead of sizing it from memory")
    enable_prefix_caching: bool = _arg(True, "share KV blocks between prompts that begin alike")
    distributed_executor_backend: Literal["uni", "mp", "ray"] | None = _arg(
        None,
        "uni: one device, in the engine's process; mp: a process for each further one; ray: an actor for each, on any "
        "machine of a Ray cluster; uni or mp if left out",
    )
    hf_overrides: dict[str, Any] | None = _arg(None, "values to replace in the model's config.json")

    def create_engine_config(self) -> VllmConfig:
        """Find the model, read its configuration, check every argument.

        Raises:
            ValueError: an argument that cannot be honoured; the message names it, its value and the limit.
            FileNotFoundError: the model is not there.
        """
        # Needs torch; flags and checks elsewhere should not wait for it.
        from vllm.v1.sample.logits_processor import load_logits_processors

        self._check_supported()
        logits_processors = tuple(load_logits_processors(self.logits_processors))
        parallel_config = self.create_parallel_config()
        device = self._resolve_device(parallel_config)
        self._check_variables(device)
        source = self._find_model(device)
        max_model_len = self._resolve_max_model_len(source.hf_config.max_context_len)
        model_config = ModelConfig(
            model=self.model or source.name,
            path=str(source.path),
            tokenizer=self.tokenizer or str(source.path),
            hf_config=source.hf_config,
            dtype=source.dtype,
            max_model_len=max_model_len,
            tokenizer_mode=self.tokenizer_mode,
            skip_tokenizer_init=self.skip_tokenizer_init,
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
            tokenizer_revision=self.tokenizer_revision,
            seed=self.seed,
            max_logprobs=self.max_logprobs,
            max_logprob_token_ids=self.max_logprob_token_ids,
            logprobs_mode=self.logprobs_mode,
            enforce_eager=self.enforce_eager,
            quantization=self.quantization,
            load_format=self.load_format,
            logits_processors=logits_processors,
            max_seq_len_to_capture=self._max_seq_len_to_capture(),
            attention_backend=self._resolve_attention_backend(device, source),
        )
        scheduler_config = self._scheduler_config(max_model_len, device)
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
                num_blocks=self.num_gpu_blocks_override,
                # A GPU computes the tokens that this saves in less time than the launches of the copies take.
                shares_parts_of_blocks=device == "cpu",
                max_idle_tokens=self._max_idle_tokens(device, scheduler_config, max_model_len),
                gpu_memory_utilization=self.gpu_memory_utilization,
                swap_space=self.swap_space,
            ),
            scheduler_config=scheduler_config,
            parallel_config=parallel_config,
            device_config=DeviceConfig(device),
        )

    def _max_idle_tokens(self, device: str, scheduler_config: SchedulerConfig, max_model_len: int) -> int | None:
        """On a CPU, whose memory others want, too, a few steps' worth: unless somebody has said how much the cache is
        to take."""
        if device != "cpu" or self.num_gpu_blocks_override is not None or envs.cpu_kvcache_space_bytes() is not None:
            return None
        return max(_IDLE_STEPS * scheduler_config.max_num_batched_tokens, max_model_len)

    def _find_model(self, device: str) -> ResolvedModel:
        from vllm.model_executor.model_loader import resolve_model

        return resolve_model(
            self.model,
            requested_dtype=self._requested_dtype(),
            device=device,
            revision=self.revision,
            hf_overrides=self.hf_overrides,
            needs_weights=self.load_format != "dummy",
        )

    def create_parallel_config(self) -> ParallelConfig:
        """How many devices and processes there are to be; reads no model.

        Raises:
            ValueError: a size that cannot be honoured.
        """
        config = ParallelConfig(
            self.tensor_parallel_size,
            self.distributed_executor_backend,
            self.disable_custom_all_reduce,
            self.data_parallel_size,
        )
        num_cores = usable_cores()
        if config.data_parallel_size > num_cores:
            raise ValueError(
                f"data_parallel_size must be at most {num_cores}, the CPU cores that this process may use: every "
                f"replica's process needs one; got {config.data_parallel_size}"
            )
        return config

    def _scheduler_config(self, max_model_len: int, device: str) -> SchedulerConfig:
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = 2048 if self.enable_chunked_prefill else max(2048, max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_model_len={max_model_len} when chunked prefill is off, "
                f"got {budget}"
            )
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            async_scheduling=self._resolve_async_scheduling(device),
        )

    def _max_seq_len_to_capture(self) -> int | None:
        older, newer = self.max_context_len_to_capture, self.max_seq_len_to_capture
        if older is not None and newer is not None and older != newer:
            raise ValueError(
                f"max_context_len_to_capture={older} and max_seq_len_to_capture={newer} are one setting: give one"
            )
        return older if newer is None else newer

    def _resolve_async_scheduling(self, device: str) -> bool:
        if self.async_scheduling is not None:
            return self.async_scheduling
        return device == "cuda" and self.tensor_parallel_size == 1

    def _check_supported(self) -> None:
        if self.quantization not in QUANTIZATIONS:
            names = ", ".join(map(repr, QUANTIZATIONS))
            raise ValueError(f"quantization must be one of {names}, got {self.quantization!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer in [0, 2**63), got {self.seed!r}")
        if self.swap_space and not self.enable_prefix_caching:
            warn_once(logger, "swap_space has no effect without enable_prefix_caching: blocks are found by content")

    def _check_variables(self, device: str) -> None:
        from vllm.ops.cpu_kernels import check_batch_invariance, check_cpu_gemm

        if envs.batch_invariant():
            check_batch_invariance(device)
            if self.disable_custom_all_reduce and self.tensor_parallel_size > 2:
                raise ValueError(
                    "VLLM_BATCH_INVARIANT=1 rules out disable_custom_all_reduce: gloo adds in no one order"
                )
        if device == "cpu":
            check_cpu_gemm()

    def _requested_dtype(self) -> str:
        import torch

        dtype = str(self.dtype).removeprefix("torch.") if isinstance(self.dtype, torch.dtype) else self.dtype
        dtype = _DTYPE_ALIASES.get(dtype, dtype)
        if dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be one of auto, float32, float16 (half), bfloat16, got {self.dtype!r}")
        return dtype

    def _resolve_device(self, parallel_config: ParallelConfig) -> str:
        num_devices = parallel_config.data_parallel_size * parallel_config.tensor_parallel_size
        device = resolve_device(self.device, num_devices)
        if device == "cuda" and parallel_config.data_parallel_size > 1:
            import torch

            _check_device_count(parallel_config, torch.cuda.device_count())
        return device

    def _resolve_attention_backend(self, device: str, source: ResolvedModel) -> str:
        import torch

        from vllm.attention.select import check_backend

        name: str = self.attention_backend
        if name == "auto":
            name = envs.attention_backend(ATTENTION_BACKENDS) or name
        check_backend(name, device, getattr(torch, source.dtype), source.hf_config.head_dim)
        return name

    def _resolve_max_model_len(self, longest: int) -> int:
        if self.max_model_len is None:
            return longest
        if isinstance(self.max_model_len, bool) or not isinstance(self.max_model_len, int) or self.max_model_len < 1:
            raise ValueError(f"max_model_len must be a positive integer, got {self.max_model_len!r}")
        if self.max_model_len > longest:
            raise ValueError(
                f"max_model_len must be at most the model's max_position_embeddings={longest}, got {self.max_model_len}"
            )
        return self.max_model_len

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag a field to `parser`."""
        group = parser.add_argument_group("engine")
        hints = typing.get_type_hints(EngineArgs)
        for item in fields(EngineArgs):
            flag = "--" + item.name.replace("_", "-")
            default = None if item.default is MISSING else item.default
            group.add_argument(
                flag, dest=item.name, default=default, help=item.metadata["help"], **flag_options(hints[item.name])
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Read the flags back from a parsed command line."""
        return cls(**{item.name: getattr(args, item.name) for item in fields(cls)})


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM`: those of `LLM`."""


def flag_options(hint: Any) -> dict[str, Any]:
    """argparse options for a field's type."""
    # A Literal joined with None becomes a typing.Union, everything else a types.UnionType.
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    members = typing.get_args(hint) if union else (hint,)
    (kind,) = [member for member in members if member is not type(None)]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    if typing.get_origin(kind) is dict:
        return {"type": _json_object, "metavar": "JSON"}
    if typing.get_origin(kind) is list:
        return {"nargs": "+", "metavar": "NAME"}
    return {"type": kind, "metavar": kind.__name__.upper()}


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_device_count(config: ParallelConfig, found: int) -> None:
    """
    Raises:
        ValueError: there are fewer CUDA devices than the replicas need.
    """
    needed = config.data_parallel_size * config.tensor_parallel_size
    if needed > found:
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} with tensor_parallel_size={config.tensor_parallel_size} "
            f"needs {needed} CUDA devices, and there are {found}"
        )


def _json_object(text: str) -> dict[str, Any]:
    import json

    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
