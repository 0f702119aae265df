"""smolagents' VLLMModel: an engine of this process behind its messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm import LLM, SamplingParams

smolagents = pytest.importorskip("smolagents")


def test_offline(tiny_model: Path, llm: LLM) -> None:
    model = smolagents.VLLMModel(str(tiny_model))
    parts = [{"type": "text", "text": "Hello there"}]
    message = model.generate([{"role": "user", "content": parts}])
    params = SamplingParams(temperature=0, max_tokens=2048)
    (expected,) = llm.chat([{"role": "user", "content": "Hello there"}], params, use_tqdm=False)
    assert message.content == expected.outputs[0].text
    assert message.token_usage.input_tokens == len(expected.prompt_token_ids)
    model.cleanup()
