"""Upstream's engine arguments that have one value here, and what becomes of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.engine.arguments import check_neutral, refused, unused

_LOG_REQUESTS = "--enable-log-requests of the server logs requests; nothing else does"
_ONE_WAY = "the engine has one way of doing it"
_OVERRIDE = "hf_overrides replaces values of config.json"
_ADAPTERS = "prompt adapters are not implemented"
_PROMPTS = "prompts are text or token ids"
_MEDIA = "pictures and videos are the other kinds of input, and are read as transformers reads them"
_TEXT_ONLY = "pictures and videos are read as transformers reads them, and nothing else is"
_LORA = "an adapter adds no words, and its scale is lora_alpha"
_DRAFTS = "CompletionOutput.spec_decode_metrics is there wherever tokens were drafted"
NO_SPECULATION = "processors see the right history of drafted tokens, too"
_SERVER_PARTS = "the server parts reasoning from answers: vllm serve --reasoning-parser"
_GRAMMARS = "the format that --reasoning-parser names says where thoughts begin and end"
_ONE_LIBRARY = "grammars are compiled by one library, llguidance"
_TP = "use tensor_parallel_size, or replicas by data_parallel_size"
_REPLICAS = "replicas are started by one server (data_parallel_size)"
_EXPERTS = "each rank has an equal part of a mixture's experts"
_EXPERTS_ONLY = "it is of mixtures of experts"
_ONE_MACHINE = "one machine has nothing to meet over, or the choice is made here"
_TIMEOUT = "VLLM_WORKER_TIMEOUT_S bounds how long ranks wait for each other"
_BIND = "bind the process from outside (numactl, taskset)"
_KV_DTYPE = "all layers' KV caches have one dtype, kv_cache_dtype"
_OFFLOAD = "weights stay on the device; use a smaller dtype, int8, or tensor_parallel_size"
_NO_OFFLOAD = "weights are not offloaded"
_SWAP = "swap_space keeps KV blocks in host memory"
_FOLDER = "give the model's own folder"
_SAFETENSORS = "safetensors files are mapped and read tensor by tensor"
_SCHEDULER = "the scheduler has no such option; max_num_seqs and max_num_batched_tokens bound a step"
_FIRST_CHUNK = "a prompt that has room for its first chunk is admitted"
_WORKER = "worker_extension_cls adds methods to the workers"
_COMPILE = "nothing is compiled; CUDA graphs follow enforce_eager and max_seq_len_to_capture"
_KERNELS = "kernels are chosen by what the device can do"
_LAYERS = "no model here has such layers"
_STATES = "recurrences are float32, convolutions of the model's dtype, and states are kept as mamba_block_size says"
_HASH = "blocks are hashed with SHA-256"
_MISSING = "not implemented"
_REPLAY = "requests may have trace_decode_token_ids in any case"
_LOGGING = "VLLM_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH set up the log"
_METRICS = "the server's /metrics has the counters there are"
_TRACES = "a request's span (otlp_traces_endpoint) has the times of its queue, prompt and output"
_STATISTICS = "the engine logs no statistics by itself"
_SLEEP = "sleep frees memory in one way"


@dataclass(kw_only=True)
class UpstreamArgs:
    """The arguments, with upstream's names and defaults: those that are refused at another value, and those that only
    change nothing. docs/migration.md lists them."""

    # Arguments of former versions.
    # On the command line it is --no-enable-log-requests.
    disable_log_requests: bool = unused(False, _LOG_REQUESTS, flag=False)
    use_v2_block_manager: bool = unused(True, _ONE_WAY)
    num_scheduler_steps: int = unused(1, _ONE_WAY)
    multi_step_stream_outputs: bool = unused(True, _ONE_WAY)
    num_lookahead_slots: int = unused(0, _ONE_WAY)
    disable_async_output_proc: bool = unused(False, _ONE_WAY)
    preemption_mode: str | None = unused(None, _ONE_WAY)
    scheduler_delay_factor: float = unused(0.0, _ONE_WAY)
    max_num_partial_prefills: int = unused(1, _ONE_WAY)
    cuda_graph_sizes: list[int] | None = unused(None, _ONE_WAY)
    full_cuda_graph: bool = unused(False, _ONE_WAY)
    tokenizer_pool_size: int = unused(0, _ONE_WAY)
    tokenizer_pool_type: str = unused("ray", _ONE_WAY)
    tokenizer_pool_extra_config: dict[str, Any] | None = unused(None, _ONE_WAY)
    worker_use_ray: bool = refused(False, 'distributed_executor_backend="ray" does it')
    guided_decoding_disable_fallback: bool = unused(False, _ONE_LIBRARY)
    enable_reasoning: bool = unused(False, "a reasoning parser alone turns it on")
    disable_mm_preprocessor_cache: bool = unused(False, _TEXT_ONLY)
    calculate_kv_scales: bool = refused(False, "scales of an 8-bit KV cache are the checkpoint's, or 1")
    rope_scaling: dict[str, Any] | None = refused(None, _OVERRIDE)
    rope_theta: float | None = refused(None, _OVERRIDE)
    enable_prompt_adapter: bool = refused(False, _ADAPTERS)
    max_prompt_adapters: int = unused(1, _ADAPTERS)
    max_prompt_adapter_token: int = unused(0, _ADAPTERS)
    lora_extra_vocab_size: int = unused(256, _LORA)
    long_lora_scaling_factors: list[float] | None = refused(None, _LORA)
    speculative_model: str | None = refused(None, "spec_model is its name")
    num_speculative_tokens: int | None = refused(None, "spec_tokens is its name")
    override_neuron_config: dict[str, Any] | None = unused(None, "it is of another device")
    override_pooler_config: dict[str, Any] | None = refused(None, "pooler_config is its name")

    io_processor_plugin: str | None = refused(None, _PROMPTS)

    mm_encoder_only: bool = refused(False, _MEDIA)
    mm_encoder_attn_backend: str | None = refused(None, _MEDIA)
    mm_encoder_attn_dtype: str | None = refused(None, _MEDIA)
    mm_encoder_fp8_scale_path: str | None = refused(None, _MEDIA)
    mm_encoder_fp8_scale_save_path: str | None = refused(None, _MEDIA)
    video_pruning_rate: float | None = refused(None, _MEDIA)
    enable_mm_processor_stats: bool = refused(False, _MEDIA)
    ec_transfer_config: dict[str, Any] | None = refused(None, _MEDIA)
    ec_manager_config: dict[str, Any] | None = refused(None, _MEDIA)

    mm_processor_cache_gb: float = unused(4, _TEXT_ONLY)
    mm_processor_cache_type: str | None = unused("lru", _TEXT_ONLY)
    mm_hasher_algorithm: str = unused("blake3", _TEXT_ONLY)
    mm_shm_cache_max_object_size_mb: int = unused(128, _TEXT_ONLY)
    mm_encoder_tp_mode: str = unused("weights", _TEXT_ONLY)
    mm_encoder_fp8_scale_save_margin: float = unused(1.5, _TEXT_ONLY)
    skip_mm_profiling: bool = unused(False, _TEXT_ONLY)
    video_pruning_method: str = unused("evs", _TEXT_ONLY)
    mm_tensor_ipc: str = unused("direct_rpc", _TEXT_ONLY)
    mm_processor_device: str = unused("auto", _TEXT_ONLY)
    mm_ipc_gpu_memory_gb: float = unused(0, _TEXT_ONLY)
    mm_device_do_normalize: bool | None = unused(True, _TEXT_ONLY)
    disable_chunked_mm_input: bool = unused(False, _TEXT_ONLY)
    renderer_num_workers: int = unused(1, _TEXT_ONLY)

    per_request_spec_decode_metrics: str = unused("none", _DRAFTS)

    reasoning_parser: str = unused("", _SERVER_PARTS, flag=False)
    reasoning_parser_plugin: str | None = unused(None, _SERVER_PARTS, flag=False)
    reasoning_config: dict[str, Any] | None = refused(None, _GRAMMARS)

    prefill_context_parallel_size: int = refused(1, _TP)
    decode_context_parallel_size: int = refused(1, _TP)
    dcp_comm_backend: str | None = refused(None, _TP)
    dcp_q_replicate: bool | None = refused(None, _TP)
    nnodes: int = refused(1, _TP)
    node_rank: int = refused(0, _TP)
    device_ids: list[str] | None = refused(None, _TP)
    enable_hc_sp: bool = refused(False, _TP)
    enable_batch_sharded_sampling: bool | None = refused(None, _TP)
    enable_dbo: bool = refused(False, _TP)
    ubatch_size: int = refused(0, _TP)

    data_parallel_rank: int | None = refused(None, _REPLICAS)
    data_parallel_start_rank: int | None = refused(None, _REPLICAS)
    data_parallel_size_local: int | None = refused(None, _REPLICAS)
    data_parallel_address: str | None = refused(None, _REPLICAS)
    data_parallel_rpc_port: int | None = refused(None, _REPLICAS)
    data_parallel_hybrid_lb: bool = refused(False, _REPLICAS)
    data_parallel_external_lb: bool = refused(False, _REPLICAS)
    data_parallel_multi_port_external_lb: bool = refused(False, _REPLICAS)
    enable_fault_tolerance: bool = refused(False, _REPLICAS)
    fault_tolerance_config: dict[str, Any] | None = refused(None, _REPLICAS)

    enable_expert_parallel: bool = unused(False, "every rank computes its part of all experts")
    enable_ep_weight_filter: bool = refused(False, _EXPERTS)
    enable_elastic_ep: bool = refused(False, _EXPERTS)
    elastic_ep_max_dp_size: int | None = refused(None, _EXPERTS)
    enable_eplb: bool = refused(False, _EXPERTS)
    eplb_config: dict[str, Any] | None = refused(None, _EXPERTS)
    enable_return_routed_experts: bool = refused(False, "nothing reads which experts a token had")

    expert_placement_strategy: str = unused("linear", _EXPERTS_ONLY)
    all2all_backend: str = unused("allgather_reducescatter", _EXPERTS_ONLY)
    moe_backend: str = unused("auto", _EXPERTS_ONLY)

    master_addr: str = unused("127.0.0.1", _ONE_MACHINE)
    master_port: int = unused(29501, _ONE_MACHINE)
    data_parallel_backend: str = unused("mp", _ONE_MACHINE)
    dp_sync_interval: int = unused(16, _ONE_MACHINE)
    disable_nccl_for_dp_synchronization: bool | None = unused(None, _ONE_MACHINE)
    dbo_decode_token_threshold: int = unused(32, _ONE_MACHINE)
    dbo_prefill_token_threshold: int = unused(512, _ONE_MACHINE)
    dcp_kv_cache_interleave_size: int = unused(1, _ONE_MACHINE)
    cp_kv_cache_interleave_size: int | None = unused(None, _ONE_MACHINE)
    enable_shm_tensor_arena: bool = unused(False, _ONE_MACHINE)
    enable_nccl_comm_suspend: bool = unused(False, _ONE_MACHINE)

    distributed_timeout_seconds: int | None = refused(None, _TIMEOUT)
    cpu_distributed_timeout_seconds: int | None = refused(None, _TIMEOUT)

    numa_bind: bool = refused(False, _BIND)
    numa_bind_nodes: list[str] | None = refused(None, _BIND)
    numa_bind_cpus: list[str] | None = refused(None, _BIND)

    kv_cache_dtype_skip_layers: list[str] | None = refused(None, _KV_DTYPE)

    cpu_offload_gb: float = refused(0, _OFFLOAD)
    cpu_offload_params: list[str] | None = refused(None, _OFFLOAD)
    offload_group_size: int = refused(0, _OFFLOAD)
    offload_params: list[str] | None = refused(None, _OFFLOAD)

    offload_backend: str = unused("auto", _NO_OFFLOAD)
    offload_num_in_group: int = unused(1, _NO_OFFLOAD)
    offload_prefetch_step: int = unused(1, _NO_OFFLOAD)

    model_weights: str = refused("", _FOLDER)
    hf_config_path: str | None = refused(None, _FOLDER)
    code_revision: str | None = refused(None, _FOLDER)
    model_class_overrides: dict[str, str] | None = refused(None, _FOLDER)
    quantization_config: dict[str, Any] | None = refused(None, _FOLDER)

    safetensors_load_strategy: str | None = unused(None, _SAFETENSORS)
    safetensors_prefetch_num_threads: int | None = unused(None, _SAFETENSORS)
    safetensors_prefetch_block_size: int | None = unused(None, _SAFETENSORS)
    max_parallel_loading_workers: int | None = unused(None, _SAFETENSORS)
    ignore_patterns: list[str] | None = unused(None, _SAFETENSORS)
    pt_load_map_location: str = unused("cpu", _SAFETENSORS)
    allow_deprecated_quantization: bool = unused(False, _SAFETENSORS)

    max_num_scheduled_tokens: int | None = refused(None, _SCHEDULER)
    long_prefill_token_threshold: int = refused(0, _SCHEDULER)
    long_prefill_token_threshold_adaptive: bool = refused(False, _SCHEDULER)
    max_num_active_seqs: int | None = refused(None, _SCHEDULER)
    max_num_queued_tokens: int | None = refused(None, _SCHEDULER)
    prefill_schedule_interval: int = refused(1, _SCHEDULER)
    watermark: float = refused(0.0, _SCHEDULER)
    scheduler_cls: str | type | None = refused(None, _SCHEDULER)
    stream_interval: int = refused(1, _SCHEDULER)
    prefix_cache_retention_interval: int | None = refused(None, _SCHEDULER)
    prefix_match_unit: int | None = refused(None, _SCHEDULER)

    scheduler_reserve_full_isl: bool = unused(True, _FIRST_CHUNK)

    worker_cls: str = refused("auto", _WORKER)

    compilation_config: int | dict[str, Any] | None = unused(None, _COMPILE, "-cc")
    cudagraph_capture_sizes: list[int] | None = unused(None, _COMPILE)
    max_cudagraph_capture_size: int | None = unused(None, _COMPILE)
    optimization_level: int | str | None = unused(None, _COMPILE, "-O")
    performance_mode: str = unused("balanced", _COMPILE)

    kernel_config: dict[str, Any] | None = unused(None, _KERNELS)
    ir_op_priority: dict[str, Any] | None = unused(None, _KERNELS)
    linear_backend: str = unused("auto", _KERNELS)
    sparse_indexer_topk_backend: str = unused("auto", _KERNELS)
    enable_flashinfer_autotune: bool | None = unused(None, _KERNELS)
    monokernel: bool = unused(False, _KERNELS)
    disable_cascade_attn: bool | None = unused(None, _KERNELS)
    gdn_prefill_backend: str | None = unused(None, _KERNELS)
    kda_prefill_backend: str | None = unused(None, _KERNELS)
    kda_decode_backend: str | None = unused(None, _KERNELS)
    use_fp64_gumbel: bool = unused(False, _KERNELS)

    disable_hybrid_kv_cache_manager: bool | None = unused(None, _LAYERS)
    mamba_config: dict[str, Any] | None = unused(None, _STATES)
    mamba_cache_dtype: str = unused("auto", _STATES)
    mamba_ssm_cache_dtype: str = unused("auto", _STATES)
    mamba_cache_mode: str | None = unused(None, _STATES)
    enable_mamba_shared_prefix_checkpoint: bool = unused(False, _STATES)
    replayssm_buffer_len: int = unused(16, _STATES)
    use_replayssm: bool = unused(False, _STATES)
    mamba_backend: str = unused("triton", _STATES)
    mamba_ssu_algorithm: str | None = unused(None, _STATES)
    enable_mamba_cache_stochastic_rounding: bool = unused(False, _STATES)
    mamba_cache_philox_rounds: int = unused(0, _STATES)
    kv_sharing_fast_prefill: bool = unused(False, _LAYERS)
    swa_bounded_replay: bool = unused(True, _LAYERS)
    engram_config: dict[str, Any] | None = unused(None, _LAYERS)

    prefix_caching_hash_algo: str = unused("sha256", _HASH)

    return_sampling_mask: bool = refused(False, _MISSING)
    enable_trace_replay: bool = unused(False, _REPLAY)
    watermark_config: dict[str, Any] | None = refused(None, _MISSING)
    diffusion_config: dict[str, Any] | None = refused(None, _MISSING)
    aux_output_config: dict[str, Any] | None = refused(None, _MISSING)
    tokens_only: bool = refused(False, _MISSING)
    additional_config: dict[str, Any] | None = refused(None, _MISSING)
    watchdog_config: dict[str, Any] | None = refused(None, _MISSING)

    logging_config: dict[str, Any] | None = refused(None, _LOGGING)
    log_level: str | None = unused(None, _LOGGING)
    log_config_file: str | None = unused(None, _LOGGING)

    show_hidden_metrics_for_version: str | None = refused(None, _METRICS)
    collect_detailed_traces: list[str] | None = refused(None, _TRACES)
    kv_cache_metrics: bool = refused(False, _METRICS)
    custom_histogram_buckets: dict[str, Any] | None = refused(None, _METRICS)
    cudagraph_metrics: bool = refused(False, _METRICS)
    enable_layerwise_nvtx_tracing: bool = refused(False, _METRICS)
    enable_mfu_metrics: bool = refused(False, _METRICS)
    enable_logging_iteration_details: bool = refused(False, _METRICS)

    aggregate_engine_logging: bool = unused(False, _STATISTICS)
    kv_cache_metrics_sample: float = unused(0.01, _STATISTICS)
    jit_monitor_mode: str = unused("warn", _STATISTICS)
    jit_monitor_verbose: bool = unused(False, _STATISTICS)
    ray_workers_use_nsight: bool = unused(False, _STATISTICS)
    fail_on_environ_validation: bool = unused(False, _STATISTICS)

    sleep_mode_backend: str = unused("cumem", _SLEEP)
    sleep_mode_offload_cudagraph: bool = unused(False, _SLEEP)
    sleep_preserve_parameter_names: list[str] | None = unused(None, _SLEEP)
    enable_cumem_allocator: bool = unused(False, _SLEEP)

    def check_neutral(self) -> None:
        """
        Raises:
            ValueError: an argument asks for what is not done; names it, its value and what to do instead.
        """
        check_neutral(self, UpstreamArgs)
