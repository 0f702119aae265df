"""Upstream's environment variables that callers read as attributes of `vllm.envs`, with upstream's types and defaults.
Those that the engine reads have functions of their own in vllm/envs.py; the others change nothing."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _flag(default: bool) -> Callable[[str, str | None], bool]:
    def read(name: str, text: str | None) -> bool:
        if not text:
            return default
        lowered = text.strip().lower()
        if lowered not in ("0", "1", "false", "true"):
            raise ValueError(f"{name} must be 0 or 1, got {text!r}")
        return lowered in ("1", "true")

    return read


def _number(kind: type[int] | type[float], default: float | None) -> Callable[[str, str | None], Any]:
    def read(name: str, text: str | None) -> Any:
        if not text:
            return default
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a number, got {text!r}")
        return value

    return read


def _text(default: str | None) -> Callable[[str, str | None], str | None]:
    return lambda name, text: default if text is None else text


def _names() -> Callable[[str, str | None], list[str] | None]:
    return lambda name, text: None if text is None else text.split(",")


def _folder(of: str, default: str) -> Callable[[str, str | None], str]:
    """A folder in the user's cache or configuration."""

    def read(name: str, text: str | None) -> str:
        root = os.environ.get(f"XDG_{of}_HOME") or f"~/.{of.lower()}"
        return str(Path(text or f"{root}/{default}").expanduser())

    return read


_READERS: dict[str, Callable[[str, str | None], Any]] = {
    # Places.
    "VLLM_CACHE_ROOT": _folder("CACHE", "vllm"),
    "VLLM_CONFIG_ROOT": _folder("CONFIG", "vllm"),
    "VLLM_ASSETS_CACHE": _folder("CACHE", "vllm/assets"),
    "VLLM_XLA_CACHE_PATH": _folder("CACHE", "vllm/xla_cache"),
    "VLLM_RPC_BASE_PATH": lambda name, text: text or tempfile.gettempdir(),
    "VLLM_TORCH_PROFILER_DIR": _text(None),
    "VLLM_NCCL_SO_PATH": _text(None),
    "LD_LIBRARY_PATH": _text(None),
    # Addresses and ranks.
    "VLLM_HOST_IP": _text(""),
    "VLLM_PORT": _number(int, None),
    "VLLM_LOOPBACK_IP": _text(""),
    "VLLM_DP_RANK": _number(int, 0),
    "VLLM_DP_RANK_LOCAL": _number(int, 0),
    "VLLM_DP_SIZE": _number(int, 1),
    "VLLM_DP_MASTER_IP": _text("127.0.0.1"),
    "VLLM_DP_MASTER_PORT": _number(int, 0),
    "LOCAL_RANK": _number(int, 0),
    "CUDA_VISIBLE_DEVICES": _text(None),
    "VLLM_RAY_BUNDLE_INDICES": _text(""),
    "VLLM_RAY_PER_WORKER_GPUS": _number(float, 1.0),
    # Logging and usage.
    "VLLM_CONFIGURE_LOGGING": _flag(True),
    "VLLM_LOGGING_LEVEL": lambda name, text: (text or "INFO").upper(),
    "VLLM_LOGGING_PREFIX": _text(""),
    "VLLM_LOGGING_CONFIG_PATH": _text(None),
    "VLLM_LOGGING_STREAM": _text("ext://sys.stdout"),
    "VLLM_LOG_STATS_INTERVAL": _number(float, 10.0),
    "VLLM_LOG_BATCHSIZE_INTERVAL": _number(float, -1.0),
    "VLLM_TRACE_FUNCTION": _number(int, 0),
    "VLLM_NO_USAGE_STATS": _flag(False),
    "VLLM_DO_NOT_TRACK": _flag(False),
    "VLLM_USAGE_SOURCE": _text("production"),
    "VLLM_PROCESS_NAME_PREFIX": _text("VLLM"),
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": _flag(False),
    # The server.
    "VLLM_API_KEY": _text(None),
    "VLLM_SERVER_DEV_MODE": _flag(False),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": _flag(False),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": _number(int, 5),
    "VLLM_RPC_TIMEOUT": _number(int, 10_000),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _flag(False),
    "VLLM_LORA_RESOLVER_CACHE_DIR": _text(None),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": _flag(False),
    "VLLM_MAX_N_SEQUENCES": _number(int, 16_384),
    # The engine.
    "VLLM_TARGET_DEVICE": lambda name, text: (text or "cuda").lower(),
    "VLLM_USE_V1": _flag(True),
    "VLLM_ENABLE_V1_MULTIPROCESSING": _flag(True),
    "VLLM_WORKER_MULTIPROC_METHOD": _text("fork"),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": _number(int, 60),
    "VLLM_ENGINE_READY_TIMEOUT_S": _number(int, 600),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": _number(int, 300),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _flag(False),
    "VLLM_ATTENTION_BACKEND": _text(None),
    "VLLM_USE_FLASHINFER_SAMPLER": _flag(False),
    "VLLM_BATCH_INVARIANT": _flag(False),
    "VLLM_COMPUTE_NANS_IN_LOGITS": _flag(False),
    "VLLM_DISABLE_COMPILE_CACHE": _flag(False),
    "VLLM_SKIP_P2P_CHECK": _flag(True),
    "VLLM_CPU_KVCACHE_SPACE": _number(int, 0),
    "VLLM_CPU_OMP_THREADS_BIND": _text("auto"),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": _number(int, None),
    # Models and plug-ins.
    "VLLM_USE_MODELSCOPE": _flag(False),
    "VLLM_PLUGINS": _names(),
    "VLLM_IMAGE_FETCH_TIMEOUT": _number(int, 5),
    "VLLM_VIDEO_FETCH_TIMEOUT": _number(int, 30),
    "VLLM_AUDIO_FETCH_TIMEOUT": _number(int, 10),
    "VLLM_MEDIA_LOADING_THREAD_COUNT": _number(int, 8),
    "S3_ACCESS_KEY_ID": _text(None),
    "S3_SECRET_ACCESS_KEY": _text(None),
    "S3_ENDPOINT_URL": _text(None),
}


def _reader(name: str) -> Callable[[], Any]:
    read = _READERS[name]
    return lambda: read(name, os.environ.get(name))


environment_variables: dict[str, Callable[[], Any]] = {name: _reader(name) for name in _READERS}
"""How each of them is read: by its name, at the time of the call."""


def is_set(name: str) -> bool:
    """Whether the variable is in the environment.

    Raises:
        AttributeError: upstream has no such variable.
    """
    if name not in _READERS:
        raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
    return name in os.environ


__all__ = ["environment_variables", "is_set", *_READERS]


def __getattr__(name: str) -> Any:
    # No constants: a variable may be set after the import.
    if name not in _READERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return environment_variables[name]()
