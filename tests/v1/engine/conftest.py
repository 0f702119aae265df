"""One engine on the embedded model for the tests that only need some real engine."""

from __future__ import annotations

import pytest

from vllm import LLM
from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path


@pytest.fixture(scope="session")
def llm() -> LLM:
    if embedded_model_path() is None:
        pytest.skip(NO_EMBEDDED_MODEL)
    return LLM(dtype="float32", max_model_len=1024, max_logprobs=-1)
