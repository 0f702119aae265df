"""Engine arguments: one dataclass for `LLM(...)`, and the command-line flags made from it."""

from __future__ import annotations

import argparse
import math
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from vllm import envs
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.attention import AttentionConfig
from vllm.config.cache import FLOAT8_DTYPES, resolve_cache_dtype
from vllm.config.checkpoint.overrides import Overrides, extended
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import reads_folder, resolve_load_format
from vllm.config.lora import LoRAConfig
from vllm.config.model import one_capture_length
from vllm.config.pooler import runner_fields
from vllm.config.profiler import ProfilerConfig
from vllm.config.quantization import QUANTIZATIONS, canonical_quantization, quantization_error
from vllm.config.scheduler import default_step_sizes
from vllm.config.speculative import SpeculativeConfig, as_speculative_config
from vllm.config.structured_outputs import StructuredOutputsConfig, as_structured_outputs_config
from vllm.config.unserved import as_config
from vllm.config.usage import UsageContext
from vllm.engine.arguments import add_flags, arg, is_neutral, passed_on
from vllm.engine.first_checks import check_generation_config, check_values, requested_dtype, too_long
from vllm.engine.speculation import with_model_and_schedule
from vllm.engine.upstream_args import UpstreamArgs
from vllm.exceptions import shown
from vllm.logger import init_logger, warn_once
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, MODEL_DEFAULTS
from vllm.utils.checks import check_number
from vllm.utils.device import device_bytes, resolve_device, usable_cores
from vllm.utils.plugins import load_general_plugins

if TYPE_CHECKING:
    from vllm.loader import ResolvedModel

logger = init_logger(__name__)

# Full steps whose tokens a CPU keeps in the prefix cache after their requests, unless asked for more.
_IDLE_STEPS = 4
# More processes than these a core gain nothing, and are rather a slip.
_REPLICAS_A_CORE = 8


@dataclass
class EngineArgs(UpstreamArgs):
    """Arguments of `LLM` and of the command line. Names and defaults are vLLM's unless the help says otherwise; None is
    the default of an argument. UpstreamArgs has the rows of upstream's arguments that this engine lacks.

    `create_engine_config` resolves and checks them.
    """

    model: str | None = arg(None, "model folder, .gguf file or hub name; the embedded small model when left out")
    served_model_name: str | list[str] | None = arg(None, "names of the model for requests", flag=False)
    runner: Literal["auto", "generate", "pooling"] = arg(
        "auto", "pooling for embeddings, classes and rewards; auto: by architecture and modules.json"
    )
    convert: str = arg("auto", "embed or classify: what a model is served as, if not as what its architecture says")
    task: str | None = arg(None, "an older name for both: generate, embed, classify, score or reward")
    pooler_config: Any = arg(None, "how a model pools: a PoolerConfig or a dict of its fields")
    config_format: str = arg(
        "auto", "format of the model's configuration: auto or hf (config.json), or one that a plug-in has registered"
    )
    tokenizer: str | None = arg(None, "tokenizer folder or hub name; the model's when left out")
    tokenizer_mode: Literal["auto", "slow"] = arg(
        "auto", "auto: the fast tokenizer; slow: the Python one", to="model_config"
    )
    skip_tokenizer_init: bool = arg(
        False, "do without a tokenizer: prompts are token ids, outputs have no text", to="model_config"
    )
    enable_prompt_embeds: bool = arg(
        False, "prompts may be embeddings, as prompt_embeds of /v1/completions and LLM.generate", to="model_config"
    )
    language_model_only: bool = arg(
        False, "run a model that reads pictures as its text decoder alone", to="model_config"
    )
    mmproj: str | None = arg(None, "the picture tower of a .gguf model: llama.cpp's mmproj file")
    limit_mm_per_prompt: dict[str, Any] | None = arg(
        None,
        'the most pictures and videos of a prompt, as {"image": 4, "video": 1}; 0 pictures: the decoder of text alone',
        to="model_config",
    )
    media_io_kwargs: dict[str, Any] | None = arg(
        None,
        'how many frames of a film are read: {"video": {"num_frames": 32, "fps": 2}}; at most fps a second',
        to="model_config",
    )
    mm_processor_kwargs: dict[str, Any] | None = arg(
        None, "options of the picture processor, beside the model's own, as JSON", to="model_config"
    )
    allowed_media_domains: list[str] | None = arg(
        None,
        "hosts from which pictures are fetched, and addresses or networks (10.0.0.0/8) of them that are not public",
        to="model_config",
    )
    allowed_local_media_path: str = arg(
        "", "folder below which requests may name pictures by file: URLs", to="model_config"
    )
    enable_mm_embeds: bool = arg(
        False, "pictures may come as the rows that the model's tower makes of them", to="model_config"
    )
    interleave_mm_strings: bool = arg(
        False,
        "chat templates of texts alone get pictures where the message has them, and not before its text",
        to="model_config",
    )
    trust_remote_code: bool = arg(
        False, "let the code in the model's and the tokenizer's repositories run", to="model_config"
    )
    tensor_parallel_size: int = arg(1, "number of devices to split the model over", to="parallel_config", short="-tp")
    pipeline_parallel_size: int = arg(
        1, "number of stages that the model's layers are shared out to", to="parallel_config", short="-pp"
    )
    data_parallel_size: int = arg(
        1, "replicas of the model behind one server, each with its own KV cache", to="parallel_config", short="-dp"
    )
    dtype: str = arg(
        "auto",
        "auto, float32, float16 (half) or bfloat16; auto is the checkpoint's own, or float16 on a GPU without bfloat16",
    )
    quantization: str | None = arg(
        None,
        "int8, int4 or fp8: round the weights of linear layers and head; a checkpoint's own format (gptq, awq ...) is "
        "found in its config.json",
    )
    load_format: str = arg(
        "auto",
        "auto (also safetensors, gguf, hf): the model's weights; dummy: random ones from the seed, for measuring; or "
        "the name of a registered loader",
    )
    model_loader_extra_config: dict[str, Any] | None = arg(
        None, "options of a registered loader (load_format), as JSON", to="model_config"
    )
    packed_cache_gib: float | None = arg(
        None,
        "GiB of disk for packed weights of all models together (VLLM_PACKED_CACHE: their folder); half of what is free "
        "when left out, and never the last tenth",
        to="model_config",
    )
    generation_config: str = arg(
        "auto",
        "sampling defaults of requests: auto = the model's generation_config.json, vllm = vLLM's, else a folder with "
        "that file",
        to="model_config",
    )
    override_generation_config: dict[str, Any] | None = arg(
        None, f"sampling defaults that win over it; any of {', '.join(MODEL_DEFAULTS)}", to="model_config"
    )
    download_dir: str | None = arg(None, "folder of the hub's cache; the hub's own default when left out")
    hf_token: bool | str | None = arg(None, "token for the hub; True or left out: the one of `hf auth login`")
    revision: str | None = arg(None, "revision of a hub model", to="model_config")
    tokenizer_revision: str | None = arg(None, "revision of a hub tokenizer", to="model_config")
    seed: int = arg(0, "seed of requests that bring none", to="model_config")
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "auto: cuda where there is a GPU that can be used, else cpu")
    gpu_memory_utilization: float = arg(0.9, "fraction of the GPU's memory that the engine may use", to="cache_config")
    kv_cache_memory_bytes: int | None = arg(
        None, "bytes of the KV cache, instead of sizing it from memory", to="cache_config.memory_bytes"
    )
    kv_cache_dtype: str = arg("auto", "auto: the model's dtype; fp8 (fp8_e4m3) or fp8_e5m2: 8 bits, twice the tokens")
    enable_sleep_mode: bool = arg(False, "LLM.sleep and wake_up work in any case; upstream asks for this before")
    swap_space: float = arg(
        0.0,
        "GiB of host memory a device for KV blocks that make room for others, to copy back; pinned on cuda",
        to="cache_config",
    )
    kv_offloading_size: float | None = arg(
        None, "upstream's name of swap_space: GiB of all devices of a replica together"
    )
    kv_offloading_backend: Literal["native"] = arg("native", "whose code that is: native, as swap_space's")
    kv_store: str | None = arg(
        None, "folder in which KV blocks are kept for later processes; VLLM_KV_STORE when left out, else none"
    )
    kv_store_gib: float | None = arg(
        None, "GiB that the folder may take, of all models; half of what is free when left out", to="cache_config"
    )
    kv_store_salted: bool = arg(
        False, "keep blocks of requests with a cache_salt there, too, for requests of the same salt", to="cache_config"
    )
    enforce_eager: bool = arg(
        False,
        "never replay a recorded step: every module is called at every step, and so are its hooks",
        to="model_config",
    )
    attention_backend: str | None = arg(
        "auto",
        "paged: our own kernels; varlen: FlashAttention by way of torch; flashinfer: that package, for "
        "prompts; auto: on a GPU the first of varlen and flashinfer that is installed and works, else paged",
    )
    attention_config: dict[str, Any] | AttentionConfig | None = arg(
        None, 'as {"backend": NAME}: another way to give attention_backend'
    )
    max_context_len_to_capture: int | None = arg(None, "older name of max_seq_len_to_capture")
    max_seq_len_to_capture: int | None = arg(
        None, "on cuda: decode steps with longer contexts are not replayed from CUDA graphs; when left out, all are"
    )
    disable_custom_all_reduce: bool = arg(
        False, "ranks add up by gloo (CPU) or NCCL, not through shared memory", to="parallel_config"
    )
    max_model_len: int | None = arg(
        None, "longest prompt plus output, in tokens; the model's own when left out or -1 (auto)"
    )
    disable_sliding_window: bool = arg(
        False, "contexts end at a model's attention window; they do in any case where windows are not implemented"
    )
    max_num_seqs: int | None = arg(None, "requests in a step; when left out 256, on cuda with 70 GiB 1024")
    max_num_batched_tokens: int | None = arg(
        None, "tokens in a step; when left out 2048, on cuda up to 16384: by its memory, half as many in a server"
    )
    enable_chunked_prefill: bool | None = arg(
        True, "split a prompt over steps when it does not fit in one", to="scheduler_config"
    )
    scheduling_policy: Literal["fcfs", "priority"] = arg(
        "fcfs", "fcfs: first come; priority: lower value first", to="scheduler_config.policy"
    )
    async_scheduling: bool | None = arg(
        None, "begin a step while the one before it runs; when left out, on cuda with one device"
    )
    max_logprobs: int = arg(20, "cap on logprobs; -1 = the vocabulary", to="model_config")
    max_logprob_token_ids: int = arg(
        MAX_LOGPROB_TOKEN_IDS, "cap on the length of logprob_token_ids; -1 = the vocabulary", to="model_config"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = arg(
        "raw_logprobs", "what readings are read from, for requests that name no mode", to="model_config"
    )
    logits_processors: list[str | type] | None = arg(
        None, "custom logits processors, each as module.path:ClassName; classes are accepted offline"
    )
    block_size: int | None = arg(16, "tokens a KV block", to="cache_config")
    num_gpu_blocks_override: int | None = arg(
        None, "KV blocks in the pool, instead of sizing it from memory", to="cache_config.num_blocks"
    )
    enable_prefix_caching: bool | None = arg(True, "share KV blocks between prompts that begin alike")
    mamba_block_size: int | None = arg(
        None,
        "tokens after which recurrent states are kept for prompts that begin alike, a multiple of block_size; by "
        "default the most of 512, a quarter of a step's, and as many as have keys and values of a state's size",
        to="cache_config.snapshot_interval",
    )
    cache_hidden_states: bool | None = arg(
        None, "read prompts that begin alike without computing them again, for 3 to 6 percent of the KV cache (CPU: on)"
    )
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] | None = arg(
        None,
        "uni: one device, in the engine's process; mp: a process for each further one; ray: an actor for each, on any "
        "machine of a Ray cluster; external_launcher: torchrun started a process for each; uni or mp if left out",
        to="parallel_config",
    )
    worker_extension_cls: str | type | None = arg(
        "",
        "module.path:ClassName (or with a dot), a class whose methods workers get, for collective_rpc",
        to="parallel_config",
    )
    hf_overrides: Overrides = arg(
        None, "values to replace in the model's config.json; in Python, a function of transformers' configuration, too"
    )
    structured_outputs_config: dict[str, Any] | StructuredOutputsConfig | None = arg(
        None, 'defaults of requests, as {"disable_any_whitespace": true, "disable_additional_properties": true}'
    )
    guided_decoding_backend: str = arg("auto", "older name of structured_outputs_config's backend")
    guided_decoding_disable_any_whitespace: bool = arg(False, "older name of its disable_any_whitespace")
    profiler_config: dict[str, Any] | ProfilerConfig | None = arg(
        None, 'as {"profiler": "torch", "torch_profiler_dir": FOLDER}: where LLM.start_profile writes traces'
    )
    weight_transfer_config: dict[str, Any] | None = arg(
        None, 'as {"backend": "nccl"}, or "ipc"; a trainer asks for it, and weights come either way: docs/training.md'
    )
    kv_events_config: dict[str, Any] | KVEventsConfig | None = arg(
        None, 'as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}: publish what the prefix cache has'
    )
    kv_transfer_config: dict[str, Any] | KVTransferConfig | None = arg(
        None, 'as {"kv_connector": CLASS, "kv_connector_module_path": MODULE, "kv_role": "kv_both"}: carry KV blocks'
    )
    disable_log_stats: bool = arg(False, "offline: keep no metrics, LLM's default; a server always keeps them")
    use_tqdm_on_load: bool = arg(True, "show a progress bar when loading takes longer than a moment")
    max_num_queued_reqs: int | None = arg(None, "the server's --max-num-queued-reqs", flag=False)
    shutdown_timeout: int = arg(0, "the server's --shutdown-timeout", flag=False)
    otlp_traces_endpoint: str | None = arg(
        None, "address of an OpenTelemetry collector that gets a span for each request; needs the extra otel"
    )

    _: KW_ONLY
    model_impl: Literal["auto", "vllm", "transformers"] = arg(
        "auto",
        "whose code runs the model: vllm's, transformers', or, with auto, vllm's where it has the architecture",
        to="model_config",
    )
    rounding: Literal["auto", "vllm", "transformers", "autocast"] = arg(
        "auto",
        "where values are rounded to half precision; transformers: wherever its modules with eager attention do; "
        "autocast: wherever these do under torch.autocast with bfloat16, of float32 weights. Slow, and of "
        "model_impl=transformers alone; auto: VLLM_ROUNDING, else vllm",
        to="model_config",
    )
    speculative_config: dict[str, Any] | SpeculativeConfig | None = arg(
        None, 'draft tokens that a step checks, as {"method": "ngram", "num_speculative_tokens": 8}'
    )
    spec_method: str | None = arg(None, "its method: ngram, suffix, draft_model, mtp, eagle or eagle3")
    spec_model: str | None = arg(None, "its model: the folder of a draft model")
    spec_tokens: int | None = arg(None, "its num_speculative_tokens")
    enable_lora: bool = arg(False, "serve LoRA adapters, which requests name by lora_request")
    max_loras: int = arg(1, "different adapters in a step; requests of others wait", to="lora_config")
    max_lora_rank: int = arg(16, "largest rank of an adapter", to="lora_config")
    max_cpu_loras: int | None = arg(
        None, "adapters kept in the host's memory, at least max_loras, its default", to="lora_config"
    )
    lora_dtype: str | None = arg("auto", "dtype of adapters; auto: the model's", to="lora_config")
    fully_sharded_loras: bool = arg(False, "changes nothing: adapters are split as their layers are", to="lora_config")
    lora_target_modules: list[str] | None = arg(
        None, "adapters' own target_modules say where they apply", to="lora_config.target_modules"
    )
    default_mm_loras: dict[str, Any] | None = arg(None, "inputs are text only", to="lora_config")
    enable_tower_connector_lora: bool = arg(False, "inputs are text only", to="lora_config")
    specialize_active_lora: bool = arg(False, "changes nothing", to="lora_config")
    enable_mixed_moe_lora_format: bool = arg(False, "changes nothing: an adapter's files say it", to="lora_config")
    enable_moe_shared_loras: bool = arg(False, "changes nothing: an adapter's files say it", to="lora_config")
    max_lora_cls_labels: int | None = arg(None, "changes nothing: an adapter's files say it", to="lora_config")

    def __post_init__(self) -> None:
        load_general_plugins()
        # None is upstream's word for "the default".
        for item in fields(self):
            if getattr(self, item.name) is None and item.default is not MISSING:
                setattr(self, item.name, item.default)

    def create_lora_config(self) -> LoRAConfig | None:
        """None without enable_lora.

        Raises:
            ValueError: an argument that cannot be honoured; the message names it.
        """
        config = LoRAConfig(**passed_on(self, "lora_config"))
        if self.enable_lora:
            return config
        for item in fields(self):
            is_about_adapters = item.metadata.get("to", "").partition(".")[0] == "lora_config"
            if is_about_adapters and not is_neutral(value := getattr(self, item.name), item.default):
                warn_once(logger, "%s=%s changes nothing without enable_lora", item.name, shown(value))
        return None

    def create_speculative_config(self, tensor_parallel_size: int = 1) -> SpeculativeConfig | None:
        """
        Raises:
            ValueError: a field that is not known, or a value that is not done; the message names what to do.
        """
        return as_speculative_config(
            self.speculative_config,
            tensor_parallel_size,
            method=self.spec_method,
            model=self.spec_model,
            num_speculative_tokens=self.spec_tokens,
        )

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> VllmConfig:
        """Find the model, read its configuration, check every argument. `usage_context` says who asks, and so
        how large a GPU's steps are by default; nothing is reported. `headless`: False; one server starts all replicas.

        Raises:
            ValueError: an argument that cannot be honoured; the message names it, its value and the limit.
            FileNotFoundError: the model is not there.
        """
        # Needs torch; flags and checks elsewhere should not wait for it.
        from vllm.models.splits import check_splits
        from vllm.v1.sample.logits_processor import load_logits_processors

        check_values(self)
        self._check_quantization()
        structured_outputs = as_structured_outputs_config(
            self.structured_outputs_config, self.guided_decoding_backend, self.guided_decoding_disable_any_whitespace
        )
        speculative = self.create_speculative_config(self.tensor_parallel_size)
        if headless:
            raise ValueError("headless=True is not supported: one server starts all replicas (data_parallel_size)")
        logits_processors = tuple(load_logits_processors(self.logits_processors))
        device = self._resolve_device(parallel_config := self.create_parallel_config())
        _check_variables(device, self.tensor_parallel_size, self.disable_custom_all_reduce)
        source = self._find_model(device, self.hf_overrides)
        max_model_len = self._resolve_max_model_len(source.longest_prompt(self.max_model_len))
        model_config = ModelConfig(
            **passed_on(self, "model_config"),
            model=self.model or source.name,
            path=str(source.path),
            tokenizer=self.tokenizer or str(source.path),
            hf_config=source.hf_config,
            dtype=source.dtype,
            max_model_len=max_model_len,
            quantization=source.quantization,
            load_format=resolve_load_format(self.load_format, source.quantization),
            logits_processors=logits_processors,
            max_seq_len_to_capture=one_capture_length(self.max_context_len_to_capture, self.max_seq_len_to_capture),
            attention_backend=self._resolve_attention_backend(device, source),
            served_model_name=self._served_names(),
            default_sampling_params=self._default_sampling_params(source),
            **runner_fields(self, source),
        )
        if self.pipeline_parallel_size > 1:
            check_splits(source.hf_config, self.model_impl)
        scheduler_config = self._scheduler_config(max_model_len, device, usage_context == UsageContext.LLM_CLASS)
        speculative, scheduler_config = with_model_and_schedule(speculative, self, model_config, scheduler_config)
        return VllmConfig(
            model_config=model_config,
            cache_config=self._cache_config(device, source, scheduler_config, model_config),
            scheduler_config=scheduler_config,
            parallel_config=parallel_config,
            device_config=DeviceConfig(device),
            torch_profiler_dir=self._profiler_dir(),
            weight_transfer_config=self.weight_transfer_config,
            otlp_traces_endpoint=self.otlp_traces_endpoint or None,
            structured_outputs_config=structured_outputs,
            lora_config=self.create_lora_config(),
            speculative_config=speculative,
            kv_events_config=self.create_kv_events_config(),
            kv_transfer_config=self.create_kv_transfer_config(),
        )

    def create_kv_events_config(self) -> KVEventsConfig | None:
        """None: nothing is published.

        Raises:
            ValueError: a field that is not known, or a value that is not done.
        """
        config = as_config("kv_events_config", KVEventsConfig, self.kv_events_config)
        return config if config is not None and config.is_served else None

    def create_kv_transfer_config(self) -> KVTransferConfig | None:
        """None: there is no connector.

        Raises:
            ValueError: a field that is not known, a value that is not done, or a connector that is not there.
        """
        config = as_config("kv_transfer_config", KVTransferConfig, self.kv_transfer_config)
        if config is None or config.is_neutral():
            return None
        config.check_is_done()
        from vllm.v1.features.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.get_connector_class(config)
        return config

    def create_model_config(self) -> ModelConfig:
        """The model's part of `create_engine_config`, with its checks and errors."""
        return self.create_engine_config().model_config

    def _profiler_dir(self) -> str:
        config = as_config("profiler_config", ProfilerConfig, self.profiler_config)
        if config is None:
            return ""
        for name, value in config.asked().items():
            if name != "torch_profiler_dir" and (name, value) != ("profiler", "torch"):
                raise ValueError(f"profiler_config: {ProfilerConfig.instead}, got {name}={shown(value)}")
        return config.torch_profiler_dir

    def _cache_config(
        self, device: str, source: ResolvedModel, scheduler_config: SchedulerConfig, model_config: ModelConfig
    ) -> CacheConfig:
        return CacheConfig(
            **{**passed_on(self, "cache_config"), "swap_space": self.host_gib()},
            kv_store=envs.kv_store() if self.kv_store is None else self.kv_store,
            cache_dtype=resolve_cache_dtype(self.kv_cache_dtype, source.dtype, source.is_encoder),
            # A token that sees those after it has no result that other prompts share.
            enable_prefix_caching=bool(self.enable_prefix_caching) and model_config.attn_type != "encoder_only",
            caches_hidden_states=device == "cpu" if self.cache_hidden_states is None else self.cache_hidden_states,
            # A GPU computes the tokens that this saves in less time than the launches of the copies take.
            shares_parts_of_blocks=device == "cpu",
            max_idle_tokens=self._max_idle_tokens(device, scheduler_config, model_config.max_model_len),
        )

    def host_gib(self) -> float:
        """GiB of host memory a device that keep KV blocks, by swap_space or kv_offloading_size.

        Raises:
            ValueError: both are given and differ, or kv_offloading_size or kv_offloading_backend is another value.
        """
        if self.kv_offloading_size is None:
            return self.swap_space
        check_number("kv_offloading_size", self.kv_offloading_size, 0, math.inf)
        if self.kv_offloading_backend not in (None, "auto", "native"):
            raise ValueError(
                f"kv_offloading_backend must be 'native', got {self.kv_offloading_backend!r}: kv_store keeps blocks on "
                "disk, and kv_transfer_config takes a connector"
            )
        share = self.kv_offloading_size / (self.tensor_parallel_size * self.pipeline_parallel_size)
        if self.swap_space not in (0, share):
            raise ValueError(
                f"kv_offloading_size={self.kv_offloading_size:g} is {share:g} GiB a device, and swap_space="
                f"{self.swap_space:g} asks for another size of the same: leave one out"
            )
        return share

    def _max_idle_tokens(self, device: str, scheduler_config: SchedulerConfig, max_model_len: int) -> int | None:
        """A few steps' worth on a CPU, whose memory others want, too, unless the cache's size was given."""
        if device != "cpu" or self.num_gpu_blocks_override is not None or envs.cpu_kvcache_space_bytes() is not None:
            return None
        return max(_IDLE_STEPS * scheduler_config.max_num_batched_tokens, max_model_len)

    def _find_model(self, device: str, overrides: Overrides) -> ResolvedModel:
        from vllm.loader import resolve_model

        source = resolve_model(
            self.model,
            requested_dtype=requested_dtype(self.dtype),
            device=device,
            revision=self.revision,
            hf_overrides=overrides,
            needs_weights=reads_folder(self.load_format),
            download_dir=self.download_dir,
            hf_token=self.hf_token,
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
            quantization=self.quantization,
            needs_tokenizer=not (self.tokenizer or self.skip_tokenizer_init),
            config_format=self.config_format,
            mmproj=self.mmproj,
        )
        asked, longest = self.max_model_len, source.longest_prompt(self.max_model_len)
        is_longer = isinstance(asked, int) and asked > longest and overrides is self.hf_overrides
        if not is_longer or not envs.allows_long_contexts():
            return source
        logger.warning("max_model_len=%d is beyond the %d tokens of the model", asked, longest)
        return self._find_model(device, extended(overrides, max_position_embeddings=asked))

    def _served_names(self) -> tuple[str, ...]:
        return tuple([names] if isinstance(names := self.served_model_name, str) else names or ())

    def _default_sampling_params(self, source: ResolvedModel) -> dict[str, Any]:
        defaults = dict(source.hf_config.default_sampling_params) if self.generation_config == "auto" else {}
        defaults |= check_generation_config(self)
        defaults = {name: value for name, value in defaults.items() if value is not None}
        if defaults:
            said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
            logger.info("requests sample by default with %s; --generation-config vllm: with vLLM's defaults", said)
        return defaults

    def create_parallel_config(self) -> ParallelConfig:
        """How many devices and processes there are to be; reads no model.

        Raises:
            ValueError: a size that cannot be honoured.
        """
        config = ParallelConfig(**passed_on(self, "parallel_config"))
        most = _REPLICAS_A_CORE * usable_cores()
        if config.data_parallel_size > most:
            raise ValueError(
                f"data_parallel_size must be at most {most}, {_REPLICAS_A_CORE} for each CPU core that this process "
                f"may use; got {config.data_parallel_size}"
            )
        return config

    def _scheduler_config(self, max_model_len: int, device: str, is_offline: bool) -> SchedulerConfig:
        num_tokens, num_seqs = default_step_sizes(device_bytes() if device == "cuda" else None, is_offline)
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = num_tokens if self.enable_chunked_prefill else max(num_tokens, max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_model_len={max_model_len} when chunked prefill is off, "
                f"got {budget}"
            )
        is_staged = self.pipeline_parallel_size > 1
        return SchedulerConfig(
            **passed_on(self, "scheduler_config"),
            max_num_seqs=num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=budget,
            # Steps in stages run ahead in their own way.
            async_scheduling=not is_staged
            and (device == "cuda" if self.async_scheduling is None else self.async_scheduling),
            num_steps_in_flight=self.pipeline_parallel_size,
            max_model_len=max_model_len,
        )

    def _check_quantization(self) -> None:
        from vllm.quantization import is_registered

        name = canonical_quantization(self.quantization)
        if name not in QUANTIZATIONS and not is_registered(name):
            raise quantization_error(self.quantization)

    def _resolve_device(self, parallel_config: ParallelConfig) -> str:
        num_devices = parallel_config.data_parallel_size * parallel_config.tensor_parallel_size
        device = resolve_device(self.device, num_devices)
        if device == "cuda" and parallel_config.data_parallel_size > 1:
            import torch

            parallel_config.check_devices(torch.cuda.device_count())
        return device

    def _resolve_attention_backend(self, device: str, source: ResolvedModel) -> str:
        import torch

        from vllm.attention.select import backend_name, check_backend

        config = as_config("attention_config", AttentionConfig, self.attention_config)
        name = backend_name(
            self.attention_backend if config is None or config.backend is None else config.backend, device
        )
        dtype, kv_dtype = (getattr(torch, FLOAT8_DTYPES.get(each, source.dtype)) for each in ("", self.kv_cache_dtype))
        check_backend(name, device, dtype, source.hf_config.head_dim, kv_dtype)
        return name

    def _resolve_max_model_len(self, longest: int) -> int:
        if not isinstance(self.max_model_len, int) or self.max_model_len == -1:
            return longest
        if self.max_model_len > longest:
            raise too_long(self.max_model_len, longest)
        return self.max_model_len

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag a field to `parser`."""
        return add_flags(parser, "engine", EngineArgs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Read the flags back from a parsed command line."""
        # An unused argument without a flag may be a flag of the server, which heeds it.
        own = [item for item in fields(cls) if item.metadata.get("flag", True) or "why" not in item.metadata]
        return cls(**{item.name: getattr(args, item.name) for item in own if hasattr(args, item.name)})


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of `AsyncLLM`: those of `LLM`, and whether each request is logged."""

    enable_log_requests: bool = arg(False, "log each request", flag=False)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """Add one flag a field to `parser`, or, with `async_args_only`, those that EngineArgs does not have."""
        if "--enable-log-requests" not in parser._option_string_actions:
            flag = argparse.BooleanOptionalAction
            parser.add_argument("--enable-log-requests", action=flag, default=False, help="log each request")
        return parser if async_args_only else EngineArgs.add_cli_args(parser)


def _check_variables(device: str, tensor_parallel_size: int, disable_custom_all_reduce: bool) -> None:
    """
    Raises:
        ValueError: a variable that cannot be honoured on the device, or with these arguments.
    """
    from vllm.ops.cpu_kernels import check_batch_invariance

    if envs.batch_invariant():
        check_batch_invariance(device)
        if tensor_parallel_size > 2 - (device == "cuda") and (device == "cuda" or disable_custom_all_reduce):
            asked = "tensor_parallel_size" if device == "cuda" else "disable_custom_all_reduce"
            raise ValueError(f"VLLM_BATCH_INVARIANT=1 rules out {asked}: gloo and NCCL add in no one order")
    if device == "cpu":
        envs.cpu_gemm()  # an error if it is no layout
