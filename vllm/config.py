"""The engine's configuration: one frozen dataclass a concern, derived values as properties."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.checks import check_number
from vllm.sampling_params import LOGPROBS_MODES, MAX_LOGPROB_TOKEN_IDS

if TYPE_CHECKING:
    from vllm.transformers_utils.config import HFConfig

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = (None, "gguf", "int8")
LOAD_FORMATS = ("auto", "dummy")
EXECUTOR_BACKENDS = ("uni", "mp", "ray")
POLICIES = ("fcfs", "priority")
ATTENTION_BACKENDS = ("auto", "paged", "varlen", "flashinfer")


@dataclass(frozen=True)
class ModelConfig:
    """The model, its tokenizer and the limits that follow from them.

    Attributes:
        model: what the user named.
        path: the local folder that holds config.json and the weights (a GGUF file's converted copy).
        tokenizer: folder of the tokenizer.
        dtype: "float32", "bfloat16" or "float16": weights and activations; logits are read in float32.
        attention_backend: "paged" (our kernels), "varlen" (FlashAttention by way of torch), "flashinfer" or "auto".
        quantization: "int8" multiplies with 8-bit weights (docs/quantization.md); None and "gguf" as `dtype` says.
        load_format: "auto" loads the folder's weights, "dummy" makes random ones up.
        max_model_len: longest prompt plus output, in tokens.
        max_logprobs: cap on `logprobs`; -1 = the vocabulary.
        max_logprob_token_ids: cap on the length of `logprob_token_ids`; -1 = the vocabulary.
        logprobs_mode: the mode of requests that name none.
        logits_processors: classes of custom logits processors, loaded.
        max_seq_len_to_capture: CUDA graphs are for decode steps whose longest context has at most so many tokens;
            None: for all.
    """

    model: str
    path: str
    tokenizer: str
    hf_config: HFConfig
    dtype: str
    max_model_len: int
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    seed: int = 0
    max_logprobs: int = 20
    max_logprob_token_ids: int = MAX_LOGPROB_TOKEN_IDS
    logprobs_mode: str = "raw_logprobs"
    enforce_eager: bool = False
    quantization: str | None = None
    load_format: str = "auto"
    logits_processors: tuple[type, ...] = ()
    max_seq_len_to_capture: int | None = None
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("tokenizer_mode", self.tokenizer_mode, ("auto", "slow"))
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _at_least("max_model_len", self.max_model_len, 1)
        if self.max_seq_len_to_capture is not None:
            _at_least("max_seq_len_to_capture", self.max_seq_len_to_capture, 1)
        _at_least("max_logprobs", self.max_logprobs, -1)
        _at_least("max_logprob_token_ids", self.max_logprob_token_ids, -1)

    @property
    def vocab_size(self) -> int:
        """Number of logits a row has."""
        return self.hf_config.vocab_size


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block.
        enable_prefix_caching: keep full blocks of finished requests and share them by content.
        num_blocks: blocks in the pool; None = sized from memory when the engine starts.
        shares_parts_of_blocks: whether a cached prefix may end inside a block, of which its new owner gets a copy.
        max_idle_tokens: tokens whose keys and values are kept for requests to come before memory that was not used yet
            is; None = as many as the pool holds. It is the memory in use that this bounds, not the pool.
        gpu_memory_utilization: fraction of the device's memory that the engine may use (CUDA).
        swap_space: GiB of host memory, for each device, that keep the KV blocks of preempted requests and of prefixes
            that had to make room, so that they are copied back instead of computed again; needs prefix caching.
        num_host_blocks: how many blocks that is, on every rank; set when the engine starts.
    """

    block_size: int = 16
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    shares_parts_of_blocks: bool = True
    max_idle_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0.0
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            _at_least("num_gpu_blocks_override", self.num_blocks, 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        check_number("swap_space", self.swap_space, 0, math.inf)


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share a step.

    Attributes:
        max_num_seqs: requests in a step, and slots of the model runner.
        max_num_batched_tokens: tokens in a step.
        enable_chunked_prefill: split a prompt over steps when it does not fit.
        policy: "fcfs" or "priority" (lower value first).
        async_scheduling: begin a step before the results of the one before it are known; results are the same.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _one_of("scheduling_policy", self.policy, POLICIES)


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices, and who drives them.

    Attributes:
        tensor_parallel_size: N, ranks that one replica of the model is split over.
        distributed_executor_backend: "uni": a worker in the engine's process; "mp": a process for each further rank;
            "ray": a Ray actor for each, on any machine of a cluster; None: "uni" or "mp", whichever fits.
        disable_custom_all_reduce: ranks of one machine's CPU are connected by gloo, not by shared memory.
        data_parallel_size: replicas behind one server, each an engine core with a KV cache of its own.
        data_parallel_rank: which of them this configuration is for, in [0, data_parallel_size).
    """

    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    disable_custom_all_reduce: bool = False
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("data_parallel_size", self.data_parallel_size, 1)
        _at_least("data_parallel_rank", self.data_parallel_rank, 0)
        backend, size = self.distributed_executor_backend, self.tensor_parallel_size
        if backend is not None:
            _one_of("distributed_executor_backend", backend, EXECUTOR_BACKENDS)
        if backend == "uni" and size > 1:
            raise ValueError(
                f"distributed_executor_backend='uni' drives one device, but tensor_parallel_size is {size}"
            )

    def check_divides(self, hf: HFConfig) -> None:
        """
        Raises:
            ValueError: a dimension of the model cannot be split over the ranks; names it, its size and their number.
        """
        size = self.tensor_parallel_size
        for name, value in (
            ("num_attention_heads", hf.num_attention_heads),
            ("num_key_value_heads", hf.num_key_value_heads),
            ("intermediate_size", hf.intermediate_size),
        ):
            # A rank may share its key and value heads with others.
            if value % size and not (name == "num_key_value_heads" and not size % value):
                rule = "one must be a multiple of the other" if name == "num_key_value_heads" else "it must divide them"
                raise ValueError(f"tensor_parallel_size={size} does not fit the model's {name}={value}: {rule}")
        if hf.vocab_size < size:
            raise ValueError(f"tensor_parallel_size={size} exceeds the model's vocab_size={hf.vocab_size}")

    @property
    def first_device(self) -> int:
        """Number of the replica's first device: replica r of T devices each has r * T .. r * T + T - 1."""
        return self.data_parallel_rank * self.tensor_parallel_size


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs: "cpu" or "cuda"."""

    device: str = "cpu"

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("cpu", "cuda"))


@dataclass(frozen=True)
class VllmConfig:
    """Everything an engine is built from."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        self.parallel_config.check_divides(self.model_config.hf_config)
        num_ranks = self.parallel_config.tensor_parallel_size
        if self.scheduler_config.async_scheduling and num_ranks > 1:
            raise ValueError(f"async_scheduling=True needs tensor_parallel_size=1, got {num_ranks}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
