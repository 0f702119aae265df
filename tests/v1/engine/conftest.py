"""An engine on the embedded model, for tests that only need some real one, and a tiny one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_llm import make_tiny_llm

from vllm import LLM
from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path


@pytest.fixture(scope="session")
def llm() -> LLM:
    if embedded_model_path() is None:
        pytest.skip(NO_EMBEDDED_MODEL)
    return LLM(dtype="float32", max_model_len=1024, max_logprobs=-1)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> LLM:
    return make_tiny_llm(folder, device="cpu")
