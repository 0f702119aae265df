"""Stands where upstream's tests expect their helpers (`tests.utils`): servers of ours, marks, small functions."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from live_server import LiveServer

VLLM_PATH = Path(__file__).parents[1]
_DROPPED_FLAGS: dict[str, int] = json.loads(os.environ["UPSTREAM_DROPPED_FLAGS"])
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENGINE_KWARGS: dict[str, Any] = {}


class RemoteOpenAIServer:
    """`vllm serve` of a model, until the context is left."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        **ignored: Any,
    ) -> None:
        # Pictures are fetched from this machine.
        media = ["--allowed-media-domains", "127.0.0.1"] if (Path(model) / "preprocessor_config.json").is_file() else []
        self._server = LiveServer(None, model, "--seed", str(seed), *media, *_kept(vllm_serve_args), env=env_dict)
        self.host, port = self._server.url.removeprefix("http://").rsplit(":", 1)
        self.port, self.proc, self.url_root = int(port), self._server.process, self._server.url

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.lstrip("/") for part in parts)])

    def get_client(self, **fields: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client(fields))

    def get_async_client(self, **fields: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client(fields))

    def _client(self, fields: dict[str, Any]) -> dict[str, Any]:
        usual = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60}
        return {**usual, **fields}


def _kept(flags: list[str]) -> list[str]:
    """Without the flags of DROPPED_FLAGS and their values."""
    kept, dropped = [], 0
    for flag in flags:
        name, _, value = flag.partition("=")
        if dropped and not flag.startswith("--"):
            dropped -= 1
            continue
        dropped = _DROPPED_FLAGS.get(name, 0) if not value else 0
        if name not in _DROPPED_FLAGS:
            kept.append(flag)
    return kept


class RemoteOpenAIServerCustom(RemoteOpenAIServer):
    """A server that a function of the test's own starts: not done here."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        pytest.skip("a server started by a function of the test's own")


def create_new_process_for_each_test(method: str | None = None) -> Callable[[Any], Any]:
    """Runs here: one process is enough for the engine."""
    return lambda function: function


def requires_spawn_multiprocessing() -> bool:
    return False


def large_gpu_mark(min_gb: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not torch.cuda.is_available(), reason=f"a GPU with {min_gb} GB")


def large_gpu_test(*, min_gb: int) -> Callable[[Any], Any]:
    return large_gpu_mark(min_gb)


def multi_gpu_only(*, num_gpus: int = 2) -> Callable[[Any], Any]:
    return pytest.mark.skipif(torch.cuda.device_count() < num_gpus, reason=f"{num_gpus} GPUs")


def multi_gpu_test(*, num_gpus: int) -> Callable[[Any], Any]:
    return multi_gpu_only(num_gpus=num_gpus)


def requires_fp8(function: Any) -> Any:
    return pytest.mark.skip(reason="float8 arithmetic")(function)


def set_random_seed(seed: int | None) -> None:
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def wait_for_memory_to_settle(**fields: Any) -> None:
    """A GPU's."""


def get_open_port() -> int:
    from vllm.utils.network_utils import get_open_port as open_port

    return open_port()


def flat_product(*iterables: Any) -> Any:
    import itertools

    for parts in itertools.product(*iterables):
        flat = [each if isinstance(each, tuple) else (each,) for each in parts]
        yield tuple(itertools.chain.from_iterable(flat))


def multi_process_parallel(*args: Any, **fields: Any) -> None:
    pytest.skip("several devices")


os.environ.setdefault("OMP_NUM_THREADS", "1")
