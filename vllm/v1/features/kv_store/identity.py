"""The name under which an engine's blocks are kept: all that their bytes depend on beside their tokens."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.config.checkpoint.mapped_tensors import stored_files
from vllm.config.checkpoint.shards import shard_files
from vllm.config.load import reads_folder
from vllm.loader.identity import model_identity

FORMAT = 2
"""The version of the blocks' bytes; a change of what they mean raises it."""

# The code that decides what keys and values are.
_ROOMS = ("attention", "config/checkpoint", "distributed", "layers", "loader", "lora", "models", "ops", "quantization")
_FILES = ("v1/worker/gpu", "v1/features")


@cache
def _code_digest() -> str:
    """A digest of that code's bytes, so that equal installations share blocks."""
    root = Path(__file__).parents[3]
    files = [path for room in (*_ROOMS, *_FILES) for path in (root / room).rglob("*.py")]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([*files, *root.glob("_cpu_ops*")]):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def problem_of(config: VllmConfig) -> str | None:
    """Why an engine runs without a store; None: nothing keeps it from one."""
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off: blocks are found by content"
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        return "with distributed_executor_backend='external_launcher' every rank would look there for itself"
    if config.device_config.device != "cpu":
        return "on a GPU nothing is written to disk; swap_space keeps blocks in host memory"
    if config.model_config.rounding == "autocast":
        return "with rounding='autocast' hidden states have another dtype than the model"
    load_format = config.model_config.load_format
    if load_format != "dummy" and not reads_folder(load_format):
        return f"load_format={load_format!r} does not say which weights it loads"
    return None


def shelf_of(config: VllmConfig, layout: list[Any]) -> str:
    """The name of all that an engine's blocks depend on. `layout`: see `whole_layout`. OSError: the model's files
    cannot be read."""
    model = config.model_config
    files: list[Path] = []
    if reads_folder(model.load_format):
        files = [path.resolve() for path in stored_files(shard_files(Path(model.path)))]
    depends_on = {
        "format": FORMAT,
        "code": _code_digest(),
        "seed": None if files else model.seed,
        "adapters": repr(config.lora_config),
        "drafts": _drafts_from(config),
        "layout": [config.cache_config.block_size, config.kv_cache_dtype, layout],
        **model_identity(model, files),
    }
    text = json.dumps(depends_on, sort_keys=True, default=str).encode()
    return hashlib.sha256(text).hexdigest()[:32]


def _drafts_from(config: VllmConfig) -> list[Any] | None:
    """The method and files that say which hidden states of the target a block has for drafts; None: there are none."""
    speculative = config.speculative_config
    if speculative is None or speculative.method not in ("mtp", "eagle", "eagle3"):
        return None
    files: list[Path] = []
    if speculative.method != "mtp":
        files = [path.resolve() for path in stored_files(shard_files(Path(speculative.draft_model_config.path)))]
    return [speculative.method, [[str(path), path.stat().st_mtime_ns] for path in files]]


def about(config: VllmConfig) -> dict[str, Any]:
    """The same for people."""
    model = config.model_config
    return {
        "model": model.model,
        "dtype": config.kv_cache_dtype,
        "quantization": model.quantization,
        "block_size": config.cache_config.block_size,
    }
