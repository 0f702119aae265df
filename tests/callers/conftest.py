"""A tiny model as programs of others want one, with special tokens and a chat template, and a server of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import LiveServer
from tiny_llm import make_tiny_model

from vllm import LLM

_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "chat_template": (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder: 1024 tokens of context, float32."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
    return folder


@pytest.fixture(scope="session")
def server_environment() -> dict[str, str]:
    """Variables of a server whose log says where it listens: trl, once imported, turns logs off."""
    return {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> LLM:
    """It, offline."""
    return LLM(str(tiny_model), max_logprobs=-1)


@pytest.fixture(scope="session")
def server(tiny_model: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    """It, served as "tiny"."""
    with LiveServer(tiny_model, env=server_environment) as server:
        yield server


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Any:
    """It, by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Computing in the tests' own process leaves servers a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def environment() -> Iterator[None]:
    """A trainer says in the environment how processes find each other; before and after a test nothing is said."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.pop(name, None) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
