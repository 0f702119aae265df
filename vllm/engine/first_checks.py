"""Checks that refuse arguments at once, without torch and without loading anything."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import MODEL_IMPLS, CacheConfig, SchedulerConfig
from vllm.config.attention import AttentionConfig
from vllm.config.cache import FLOAT8_DTYPES
from vllm.config.checkpoint.config import CONFIG_FORMATS, load_sampling_defaults, read_config
from vllm.config.checkpoint.hub import fetch
from vllm.config.checkpoint.local_model import check_gguf_file, check_hub_name, is_gguf_name, local_model
from vllm.config.checkpoint.overrides import Overrides
from vllm.config.checkpoint.sentence_files import MODULES, first_module
from vllm.config.checkpoint.shards import shard_files
from vllm.config.load import OTHER_FORMATS, reads_folder, resolve_load_format
from vllm.config.model import check_limits
from vllm.config.pooler import PoolerConfig, asked_runner
from vllm.config.quantization import (
    QUANTIZATIONS,
    canonical_quantization,
    check_gguf_quantization,
    quantization_error,
)
from vllm.config.structured_outputs import as_structured_outputs_config
from vllm.config.unserved import as_config
from vllm.engine.arguments import passed_on
from vllm.exceptions import shown
from vllm.logger import init_logger, warn_once
from vllm.sampling_params import MODEL_DEFAULTS
from vllm.tracing import check_endpoint
from vllm.utils.device import check_device_name
from vllm.utils.plugins import DEFAULT_PLUGINS_GROUP
from vllm.v1.engine.weight_transfer import check_weight_transfer_config

logger = init_logger(__name__)

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_DTYPES = ("auto", "float32", "float16", "bfloat16")


def check_first(args: Any) -> None:
    """Check of EngineArgs what takes no time: values, and that files are there; `create_engine_config` checks the rest.

    Raises:
        ValueError: an argument that cannot be honoured; the message names it, its value and the limit.
        FileNotFoundError: the model, the tokenizer or a draft model is not there.
    """
    check_values(args)
    _check_quantization_name(args.quantization)
    check_device_name(args.device)
    _check_step(args)
    _check_environment()
    asked_runner(args)
    as_config("pooler_config", PoolerConfig, args.pooler_config)
    as_config("attention_config", AttentionConfig, args.attention_config)
    args.create_lora_config()
    args.create_parallel_config()
    args.create_kv_events_config()
    args.create_kv_transfer_config()
    speculative = args.create_speculative_config(args.tensor_parallel_size)
    for spec in args.logits_processors if isinstance(args.logits_processors, list | tuple) else ():
        _check_package(f"logits processor {spec!r}", spec)
    _check_package(f"worker_extension_cls={args.worker_extension_cls!r}", args.worker_extension_cls)
    raw = _check_model(args, args.model, args.revision, args.hf_overrides)
    _check_length(args, raw)
    if args.tokenizer and not args.skip_tokenizer_init:
        _check_tokenizer(args.tokenizer)
    if speculative is not None and speculative.method in ("draft_model", "eagle", "eagle3"):
        try:
            _check_model(args, speculative.model or "", speculative.revision, None)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"speculative_config: {error}") from error


def check_values(args: Any) -> None:
    """Check the arguments that have limits of their own.

    Raises:
        ValueError: see `check_first`.
    """
    args.check_neutral()
    check_weight_transfer_config(args.weight_transfer_config)
    resolve_load_format(args.load_format)
    if args.model_loader_extra_config and args.load_format not in OTHER_FORMATS:
        raise ValueError(
            f"model_loader_extra_config={shown(args.model_loader_extra_config)} is not supported: load_format="
            f"{args.load_format!r} has no options; a loader that register_model_loader has been given may have"
        )
    requested_dtype(args.dtype)
    if not isinstance(args.hf_overrides, dict | None) and not callable(args.hf_overrides):
        kind = type(args.hf_overrides).__name__
        raise ValueError(f"hf_overrides must be a dict of entries that replace those of config.json, got a {kind}")
    if args.otlp_traces_endpoint:
        check_endpoint(args.otlp_traces_endpoint)
    if args.model_impl not in MODEL_IMPLS:
        raise ValueError(f"model_impl must be one of {', '.join(MODEL_IMPLS)}, got {args.model_impl!r}")
    if args.config_format not in ("auto", "hf", *CONFIG_FORMATS):
        others = "".join(f", {name!r}" for name in sorted(CONFIG_FORMATS))
        raise ValueError(
            f"config_format must be 'auto' or 'hf' (config.json){others}, got {args.config_format!r}; "
            "register_config_parser adds others"
        )
    if args.config_format in CONFIG_FORMATS and callable(args.hf_overrides):
        raise ValueError(
            f"hf_overrides must be a dict with config_format={args.config_format!r}, whose parser can change the "
            "configuration itself"
        )
    if isinstance(args.seed, bool) or not isinstance(args.seed, int) or not 0 <= args.seed < 2**63:
        raise ValueError(f"seed must be an integer in [0, 2**63), got {args.seed!r}")
    if args.host_gib() and not args.enable_prefix_caching:
        warn_once(logger, "swap_space has no effect without enable_prefix_caching: blocks are found by content")
    check_limits(args)
    check_generation_config(args)
    length = args.max_model_len
    if length not in (None, -1, "auto") and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ValueError(f"max_model_len must be a positive integer, got {length!r}")


def requested_dtype(dtype: Any) -> str:
    """The name of a dtype, "auto" or torch's. ValueError: it is none that models run in."""
    name = str(dtype).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of auto, float32, float16 (half), bfloat16, got {dtype!r}")
    return name


def check_generation_config(args: Any) -> dict[str, Any]:
    """The sampling fields of a folder that generation_config names, and those that win over it.

    Raises:
        ValueError: there is no such folder, or a field is not known.
    """
    found: dict[str, Any] = {}
    if args.generation_config not in ("auto", "vllm"):
        found = load_sampling_defaults(Path(args.generation_config).expanduser())
    for name, value in (args.override_generation_config or {}).items():
        if name not in MODEL_DEFAULTS:
            raise ValueError(
                f"override_generation_config must hold fields of {', '.join(MODEL_DEFAULTS)}, got {name!r}"
            )
        found[MODEL_DEFAULTS[name]] = value
    return found


def _check_quantization_name(asked: str | None) -> None:
    """A name may be registered by what is loaded later."""
    may_be_registered = "vllm.quantization" in sys.modules or entry_points(group=DEFAULT_PLUGINS_GROUP)
    if canonical_quantization(asked) not in QUANTIZATIONS and not may_be_registered:
        raise quantization_error(asked)


def _check_step(args: Any) -> None:
    """Check what a step holds, and the cache; the limits do not depend on the model."""
    as_structured_outputs_config(
        args.structured_outputs_config, args.guided_decoding_backend, args.guided_decoding_disable_any_whitespace
    )
    given = {
        name: value for name in ("max_num_seqs", "max_num_batched_tokens") if (value := getattr(args, name)) is not None
    }
    SchedulerConfig(**passed_on(args, "scheduler_config"), **given)
    CacheConfig(**passed_on(args, "cache_config"))
    known = ("auto", *FLOAT8_DTYPES, "float32", "float16", "bfloat16")
    if args.kv_cache_dtype not in known:
        names = ", ".join(("auto", *FLOAT8_DTYPES))
        raise ValueError(f"kv_cache_dtype must be {names} or the model's dtype, got {shown(args.kv_cache_dtype)}")


def _check_environment() -> None:
    """Variables that the engine reads late."""
    envs.cpu_kvcache_space_bytes()
    envs.worker_timeout_seconds()
    envs.worker_link_timeout_seconds()
    envs.batch_invariant()
    envs.cpu_gemm()
    envs.rounding()


def _check_package(what: str, spec: Any) -> None:
    """That the package of a class that is named by text is installed; the class itself may need torch."""
    package = spec.partition(":")[0].partition(".")[0] if isinstance(spec, str) else ""
    if package.isidentifier() and package not in sys.modules and find_spec(package) is None:
        raise ValueError(f"{what}: there is no module {package!r}")


def _check_model(args: Any, model: str | None, revision: str | None, overrides: Overrides) -> dict[str, Any] | None:
    """Check config.json; None where it says nothing yet: a .gguf file, or overrides by a function."""
    found = local_model(model)
    if found is None:
        assert model is not None
        if is_gguf_name(model):
            return None  # large: it is for the load to fetch
        check_hub_name(model)
        if args.config_format in CONFIG_FORMATS:
            return None  # the parser knows which files it needs
        small = ["config.json", MODULES, "0_*/config.json"]
        found = first_module(fetch(model, small, revision, args.download_dir, args.hf_token))
    elif found.is_dir() and reads_folder(args.load_format):
        shard_files(found)
    if found.is_file():
        check_gguf_quantization(args.quantization, found)
        check_gguf_file(found)
        return None
    if callable(overrides) or args.config_format in CONFIG_FORMATS:
        return None
    return read_config(found, overrides)[0]


def _check_length(args: Any, raw: dict[str, Any] | None) -> None:
    """ValueError: more tokens than there are positions, where nothing computes further ones."""
    asked = args.max_model_len
    if raw is None or not isinstance(asked, int) or envs.allows_long_contexts():
        return
    longest = raw.get("max_position_embeddings")
    is_scaled = "factor" in str(raw.get("rope_scaling") or raw.get("rope_parameters"))
    if isinstance(longest, int) and not is_scaled and asked > longest:
        raise too_long(asked, longest)


def too_long(asked: int, longest: int) -> ValueError:
    """The error for a max_model_len beyond the model's."""
    return ValueError(
        f"max_model_len must be at most the model's max_position_embeddings={longest}, got {asked}"
        "; VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 allows more where positions are computed"
    )


def _check_tokenizer(name: str) -> None:
    if not Path(name).expanduser().exists():
        try:
            check_hub_name(name)
        except FileNotFoundError:
            raise FileNotFoundError(f"tokenizer {name!r} is neither a folder on this machine nor a hub name") from None
