"""litellm's provider "vllm": an LLM of the process's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm import LLM, SamplingParams

litellm = pytest.importorskip("litellm")

MESSAGES = [{"role": "user", "content": "the stop"}]


def test_completion(tiny_model: Path, llm: LLM) -> None:
    answer = litellm.completion(f"vllm/{tiny_model}", MESSAGES, temperature=0, max_tokens=8)
    (sent,) = [answer.usage.prompt_tokens]
    text = answer.choices[0].message.content
    prompts = [f"the stop{end}" for end in ("", " ", "\n")] + ["user: the stop\nassistant:"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert text in [output.outputs[0].text for output in outputs if len(output.prompt_token_ids) == sent]
