"""outlines over an engine of this process and over the server."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel, ConfigDict

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


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["yes", "no"]
    sure: bool


@pytest.mark.parametrize("kind", [Literal["yes", "no"], Answer, outlines.types.Regex("[ab]{3}c")], ids=str)
def test_typed_outputs(llm: LLM, server: LiveServer, kind: Any) -> None:
    openai = pytest.importorskip("openai")
    params = SamplingParams(temperature=1, max_tokens=400, seed=1)
    offline = outlines.from_vllm_offline(llm)(PROMPTS[0], kind, sampling_params=params, use_tqdm=False)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    online = outlines.from_vllm(client, "tiny")(PROMPTS[0], kind, temperature=0, max_tokens=400)
    for text in (offline, online):
        if kind is Answer:
            assert Answer.model_validate_json(text)
        elif isinstance(kind, outlines.types.Regex):
            assert re.fullmatch(kind.pattern, text)
        else:
            assert text in ("yes", "no")
