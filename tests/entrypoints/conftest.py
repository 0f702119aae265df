"""The embedded model, loaded once for the commands and examples that need a real one."""

from __future__ import annotations

import pytest

from vllm import LLM


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(max_model_len=256)
