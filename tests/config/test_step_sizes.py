"""How large a step is by default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_cuda import pretending
from tiny_llm import make_tiny_model

from vllm import AsyncEngineArgs, EngineArgs
from vllm.config.scheduler import SchedulerConfig
from vllm.usage.usage_lib import UsageContext

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def sizes(config: SchedulerConfig) -> tuple[int, int]:
    return config.max_num_batched_tokens, config.max_num_seqs


@pytest.mark.parametrize(
    ("num_gib", "offline", "server"), [(24, (8192, 256), (2048, 256)), (80, (16384, 1024), (8192, 1024))]
)
def test_by_the_gpus_memory(folder: str, monkeypatch: Any, num_gib: int, offline: Any, server: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("pretends another GPU")
    with pretending():
        properties = SimpleNamespace(total_memory=num_gib * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        args = EngineArgs(folder, device="cuda")
        assert sizes(args.create_engine_config(UsageContext.LLM_CLASS).scheduler_config) == offline
        config = AsyncEngineArgs(folder, device="cuda").create_engine_config(UsageContext.OPENAI_API_SERVER)
        assert sizes(config.scheduler_config) == server
        asked = EngineArgs(folder, device="cuda", max_num_seqs=7, max_num_batched_tokens=99).create_engine_config()
        assert sizes(asked.scheduler_config) == (99, 7)


def test_on_a_cpu(folder: str) -> None:
    for usage in (None, UsageContext.LLM_CLASS):
        assert sizes(EngineArgs(folder, device="cpu").create_engine_config(usage).scheduler_config) == (2048, 256)
