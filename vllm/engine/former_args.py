"""Engine arguments that upstream had before: callers still give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_LOG = "--enable-log-requests of the server logs requests; nothing else does"
_ONE_WAY = "the engine has one way of doing it"
_GRAMMARS = "requests with grammars are refused"
_MEDIA = "inputs are text only"
_OVERRIDE = "hf_overrides replaces values of config.json"
_ADAPTERS = "prompt adapters are not implemented"
_DRAFTS = "speculative decoding is not implemented"


def refused(default: Any, why: str) -> Any:
    """A field that is an error at any value but a neutral one."""
    return field(
        default=default, metadata={"why": why, "refused": True, "help": f"accepted at its default only: {why}"}
    )


def unused(default: Any, why: str, flag: bool = True) -> Any:
    """A field that can change no result here: at another value than its default, a warning. `flag`: whether the command
    line has it."""
    said = {"why": why, "refused": False, "help": f"changes nothing here: {why}", "flag": flag}
    return field(default=default, metadata=said)


@dataclass(kw_only=True)
class FormerArgs:
    """Each with the default that it had; see UpstreamArgs."""

    # On the command line it is --no-enable-log-requests.
    disable_log_requests: bool = unused(False, _LOG, flag=False)
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
    guided_decoding_backend: str = unused("auto", _GRAMMARS)
    guided_decoding_disable_fallback: bool = unused(False, _GRAMMARS)
    guided_decoding_disable_any_whitespace: bool = unused(False, _GRAMMARS)
    enable_reasoning: bool = unused(False, "a model's thoughts are not parted from its answer")
    disable_mm_preprocessor_cache: bool = unused(False, _MEDIA)
    calculate_kv_scales: bool = refused(False, "scales of an 8-bit KV cache are the checkpoint's, or 1")
    rope_scaling: dict[str, Any] | None = refused(None, _OVERRIDE)
    rope_theta: float | None = refused(None, _OVERRIDE)
    enable_prompt_adapter: bool = refused(False, _ADAPTERS)
    max_prompt_adapters: int = unused(1, _ADAPTERS)
    max_prompt_adapter_token: int = unused(0, _ADAPTERS)
    lora_extra_vocab_size: int = unused(256, "LoRA adapters are not implemented")
    long_lora_scaling_factors: list[float] | None = refused(None, "LoRA adapters are not implemented")
    speculative_model: str | None = refused(None, _DRAFTS)
    num_speculative_tokens: int | None = unused(None, _DRAFTS)
    override_neuron_config: dict[str, Any] | None = unused(None, "it is of another device")
    override_pooler_config: dict[str, Any] | None = refused(None, "pooler_config is its name")
