"""The engine's names at upstream's paths."""

from __future__ import annotations

import pytest

import vllm.exceptions as exceptions
from vllm import AsyncLLMEngine, LLMEngine
from vllm.engine.llm_engine import LLMEngine as SameEngine
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError


def test_one_class_at_both_paths():
    assert SameEngine is LLMEngine
    assert AsyncLLMEngine is AsyncLLM
    assert issubclass(AsyncLLM, EngineClient)
    assert EngineDeadError is exceptions.EngineDeadError
    with pytest.raises(TypeError, match="abstract"):
        EngineClient()  # type: ignore[abstract]


def test_what_an_engine_client_has_async_llm_has():
    assert all(hasattr(AsyncLLM, name) for name in EngineClient.__abstractmethods__)


def test_errors_are_sorted_by_fault():
    assert issubclass(VLLMValidationError, (exceptions.VLLMClientError, ValueError))
    assert issubclass(VLLMValidationError, ValueError)
    assert issubclass(EngineDeadError, exceptions.VLLMServerError) and issubclass(EngineDeadError, RuntimeError)
    assert issubclass(EngineGenerateError, exceptions.VLLMServerError)
    assert not issubclass(exceptions.VLLMClientError, exceptions.VLLMServerError)


def test_finish_reasons_are_numbers_with_words():
    assert [str(reason) for reason in FinishReason] == list(FINISH_REASON_STRINGS)
    assert (FinishReason.STOP, FinishReason.ABORT) == (0, 2)
