"""Environment variables that the engine reads, each in one place, read at the time of use. Upstream's names are
attributes for its callers, which vllm/upstream/env_table.py serves: `envs.VLLM_HOST_IP` is the variable's value."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

_MIN_LINK_SECONDS = 5.0  # ranks send once a second, and a lost packet is sent again after up to two


def logging_level() -> str | None:
    """VLLM_LOGGING_LEVEL: a level name such as INFO; None when unset."""
    level = os.environ.get("VLLM_LOGGING_LEVEL")
    return level.strip().upper() if level else None


def configures_logging() -> bool:
    """VLLM_CONFIGURE_LOGGING: whether the package sets up its logger; true when unset."""
    return _flag("VLLM_CONFIGURE_LOGGING", True)


def logging_config_path() -> str | None:
    """VLLM_LOGGING_CONFIG_PATH: a file of logging.config; None when unset."""
    return os.environ.get("VLLM_LOGGING_CONFIG_PATH") or None


def plugins() -> list[str] | None:
    """VLLM_PLUGINS: the plug-ins to load, by name, with commas between them; none when empty; None, all, when unset."""
    names = os.environ.get("VLLM_PLUGINS")
    return None if names is None else [name.strip() for name in names.split(",")]


def max_sequences() -> int:
    """VLLM_MAX_N_SEQUENCES: the most sequences that one request may ask for; 16384 when unset."""
    text = os.environ.get("VLLM_MAX_N_SEQUENCES")
    try:
        return int(text) if text else 16_384
    except ValueError:
        raise ValueError(f"VLLM_MAX_N_SEQUENCES must be a number, got {text!r}") from None


def allows_long_contexts() -> bool:
    """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1: max_model_len may exceed the model's context."""
    return _flag("VLLM_ALLOW_LONG_MAX_MODEL_LEN", False)


def allows_adapter_updates() -> bool:
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: the server has routes that load and unload adapters."""
    return _flag("VLLM_ALLOW_RUNTIME_LORA_UPDATING", False)


def adapter_folder() -> str | None:
    """VLLM_LORA_RESOLVER_CACHE_DIR: a folder of adapters that requests may name; None when unset."""
    return os.environ.get("VLLM_LORA_RESOLVER_CACHE_DIR") or None


def has_development_routes() -> bool:
    """VLLM_SERVER_DEV_MODE=1: the server has the routes of its development mode."""
    return _flag("VLLM_SERVER_DEV_MODE", False)


def profiler_folder() -> str | None:
    """VLLM_TORCH_PROFILER_DIR: where profiles are written; None when unset."""
    return os.environ.get("VLLM_TORCH_PROFILER_DIR") or None


def api_keys() -> list[str]:
    """VLLM_API_KEY: the key that `vllm serve` requires; empty when unset."""
    key = os.environ.get("VLLM_API_KEY")
    return [key] if key else []


def image_fetch_seconds() -> float:
    """VLLM_IMAGE_FETCH_TIMEOUT: how long fetching a picture may take, from looking its host up to the last byte; 5 s
    when unset."""
    return _positive("VLLM_IMAGE_FETCH_TIMEOUT", "seconds") or 5.0


def video_fetch_seconds() -> float:
    """VLLM_VIDEO_FETCH_TIMEOUT: the same of a video; 30 s when unset."""
    return _positive("VLLM_VIDEO_FETCH_TIMEOUT", "seconds") or 30.0


def follows_media_redirects() -> bool:
    """VLLM_MEDIA_URL_ALLOW_REDIRECTS: whether redirects to allowed hosts are followed; true when unset."""
    return _flag("VLLM_MEDIA_URL_ALLOW_REDIRECTS", True)


def media_loading_threads() -> int:
    """VLLM_MEDIA_LOADING_THREAD_COUNT: threads that decode pictures; 2 when unset."""
    return int(_positive("VLLM_MEDIA_LOADING_THREAD_COUNT", "threads") or 2)


def cache_root() -> Path:
    """VLLM_CACHE_ROOT, else `vllm` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    if root:
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm"


def packed_cache() -> Path | None:
    """VLLM_PACKED_CACHE: where packed weights are kept: "1", as when unset, is `packed` in `cache_root`, "0" is nowhere
    (None), and anything else is a folder."""
    value = os.environ.get("VLLM_PACKED_CACHE") or "1"
    if value.lower() in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(f"VLLM_PACKED_CACHE must be 0, 1 or a folder, got {value!r}")
    return {"0": None, "1": cache_root() / "packed"}.get(value, Path(value).expanduser())


def packed_cache_least_bytes() -> int:
    """VLLM_PACKED_CACHE_LEAST_MIB: how large a checkpoint must be for its packed weights to be kept, as bytes; unset,
    64 MiB, or 0 where VLLM_PACKED_CACHE asks for a cache."""
    value = os.environ.get("VLLM_PACKED_CACHE_LEAST_MIB", "")
    if not value:
        return 0 if os.environ.get("VLLM_PACKED_CACHE") else 2**26
    if value.strip() == "0":
        return 0
    return int((_positive("VLLM_PACKED_CACHE_LEAST_MIB", "MiB") or 0) * 2**20)


def kv_store() -> str:
    """VLLM_KV_STORE: folder of a store of KV blocks; "", none, when unset."""
    return os.environ.get("VLLM_KV_STORE", "")


def cpu_kvcache_space_bytes() -> int | None:
    """VLLM_CPU_KVCACHE_SPACE, in GiB, as bytes; None when unset."""
    gib = _positive("VLLM_CPU_KVCACHE_SPACE", "GiB")
    return None if gib is None else int(gib * 2**30)


def layer_partition() -> tuple[int, ...] | None:
    """VLLM_PP_LAYER_PARTITION: how many layers each stage of pipeline_parallel_size has, with commas between the
    numbers; None when unset: stages of about the same size."""
    text = os.environ.get("VLLM_PP_LAYER_PARTITION", "").strip()
    if not text:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise ValueError(f"VLLM_PP_LAYER_PARTITION must be positive numbers with commas between them, got {text!r}")
    return tuple(map(int, numbers))


def worker_timeout_seconds() -> float:
    """VLLM_WORKER_TIMEOUT_S: how long a rank may compute between two collectives before it counts as hung; 600 when
    unset. A rank that is idle or has ended is detected within 10 s."""
    return _positive("VLLM_WORKER_TIMEOUT_S", "seconds") or 600.0


def worker_link_timeout_seconds() -> float:
    """VLLM_WORKER_LINK_TIMEOUT_S: how long nothing may come from a rank of distributed_executor_backend="ray", which
    may be on another machine, before it counts as lost; 60 when unset."""
    seconds = _positive("VLLM_WORKER_LINK_TIMEOUT_S", "seconds") or 60.0
    if seconds < _MIN_LINK_SECONDS:
        raise ValueError(f"VLLM_WORKER_LINK_TIMEOUT_S must be at least {_MIN_LINK_SECONDS:g} seconds, got {seconds:g}")
    return seconds


def engine_hang_timeout_seconds() -> float | None:
    """VLLM_ENGINE_HANG_TIMEOUT_S: an engine core process with requests that completes no step for this long counts as
    hung; 300 when unset. None (the variable is 0): no limit."""
    name = "VLLM_ENGINE_HANG_TIMEOUT_S"
    text = os.environ.get(name) or "300"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, or 0 for no limit, got {text!r}")
    return value or None


def ops_reference() -> bool:
    """VLLM_OPS=reference: every operation runs its PyTorch reference."""
    return _one_of("VLLM_OPS", ("reference",)) is not None


def use_triton() -> bool:
    """VLLM_USE_TRITON=0: operations on a GPU run their PyTorch references, which need no C compiler."""
    return _one_of("VLLM_USE_TRITON", ("0", "1")) != "0"


def cpu_isa(levels: tuple[str, ...]) -> str | None:
    """VLLM_CPU_ISA: the highest of the instruction-set `levels` to use; None when unset."""
    return _one_of("VLLM_CPU_ISA", levels)


def batch_invariant() -> bool:
    """VLLM_BATCH_INVARIANT=1: a request's results do not depend on the batch composition, bit for bit."""
    return _one_of("VLLM_BATCH_INVARIANT", ("0", "1")) == "1"


def cpu_int8_activations() -> bool:
    """VLLM_CPU_INT8_ACTIVATIONS=1: on the CPU, activations are rounded to 8 bits before products with quantised weights
    whose codes are integers."""
    return _one_of("VLLM_CPU_INT8_ACTIVATIONS", ("0", "1")) == "1"


def gguf_dequantize() -> bool:
    """VLLM_GGUF_DEQUANTIZE=1: the weights of a GGUF file are de-quantised when it is loaded, unless quantization="gguf"
    asks for its blocks."""
    return _one_of("VLLM_GGUF_DEQUANTIZE", ("0", "1")) == "1"


def quantized_activations() -> bool:
    """VLLM_QUANTIZED_ACTIVATIONS=1: activations are rounded as a compressed-tensors checkpoint says."""
    return _one_of("VLLM_QUANTIZED_ACTIVATIONS", ("0", "1")) == "1"


def cpu_gemm() -> str | None:
    """VLLM_CPU_GEMM: what multiplies bfloat16 on CPU: our kernel in float32 ("packed_f32"), by dot products
    ("packed_bf16_dot"; matrix tiles where there are) or in float16 ("packed_fp16"); None when unset. The former values
    "panels", "pairs" and "halves" mean these."""
    former = {"panels": "packed_f32", "pairs": "packed_bf16_dot", "halves": "packed_fp16"}
    layout = former.get(os.environ.get("VLLM_CPU_GEMM", ""))
    return layout or _one_of("VLLM_CPU_GEMM", tuple(former.values()))


def attention_backend() -> str | None:
    """VLLM_ATTENTION_BACKEND: what "auto" selects, by our name or upstream's; None when unset."""
    return os.environ.get("VLLM_ATTENTION_BACKEND") or None


def rounding() -> str:
    """VLLM_ROUNDING: what the engine's `rounding` of "auto" is; "vllm" when unset."""
    return os.environ.get("VLLM_ROUNDING") or "vllm"


def arithmetic() -> dict[str, Any]:
    """By name, the variables that are set so that a model computes other values than it usually does."""
    values = {
        "VLLM_CPU_GEMM": cpu_gemm(),
        "VLLM_CPU_INT8_ACTIVATIONS": cpu_int8_activations(),
        "VLLM_QUANTIZED_ACTIVATIONS": quantized_activations(),
        "VLLM_GGUF_DEQUANTIZE": gguf_dequantize(),
        "VLLM_BATCH_INVARIANT": batch_invariant(),
        "VLLM_ROUNDING": None if rounding() == "vllm" else rounding(),
    }
    return {name: value for name, value in values.items() if value}


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    if not text:
        return default
    if (lowered := text.strip().lower()) not in ("0", "1", "false", "true"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return lowered in ("1", "true")


def _positive(name: str, unit: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of {unit}, got {text!r}")
    return value


def _one_of(name: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(name) or None
    if value is not None and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value
