"""outlines over an engine of this process and over the server."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer

from vllm import LLM, SamplingParams

outlines = pytest.importorskip("outlines")

PROMPTS = ["the stop", "Hello there"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def chat(llm: LLM, text: str, params: SamplingParams = GREEDY) -> Any:
    """One answer with the model's chat template, which outlines uses where there is one."""
    (output,) = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
    return output.outputs


def test_offline(llm: LLM) -> None:
    model = outlines.from_vllm_offline(llm)
    expected = [chat(llm, text)[0].text for text in PROMPTS]
    assert model(PROMPTS[0], sampling_params=GREEDY, use_tqdm=False) == expected[0]
    assert model.batch(PROMPTS, sampling_params=GREEDY, use_tqdm=False) == [[text] for text in expected]
    conversation = outlines.inputs.Chat([{"role": "user", "content": PROMPTS[1]}])
    assert model(conversation, sampling_params=GREEDY, use_tqdm=False) == expected[1]


def test_several_samples(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=6)
    texts = outlines.from_vllm_offline(llm)(PROMPTS[0], sampling_params=params, use_tqdm=False)
    assert texts == [completion.text for completion in chat(llm, PROMPTS[0], params)]
    assert len(set(texts)) == 3


def test_over_the_server(server: LiveServer, llm: LLM) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    model = outlines.from_vllm(client, "tiny")
    assert model(PROMPTS[0], temperature=0, max_tokens=8) == chat(llm, PROMPTS[0])[0].text
    parts = list(model.stream(PROMPTS[0], temperature=0, max_tokens=8))
    assert "".join(parts) == chat(llm, PROMPTS[0])[0].text
