"""llama-index's vLLM wrappers: the engine in this process, and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

from vllm import LLM, SamplingParams

wrappers = pytest.importorskip("llama_index.llms.vllm")

PROMPT = "the stop"


@pytest.fixture(scope="module")
def wrapped(tiny_model: Path) -> Any:
    return wrappers.Vllm(
        model=str(tiny_model), dtype="float32", max_new_tokens=8, temperature=0, vllm_kwargs={"max_model_len": 128}
    )


def text(llm: LLM, prompt: str, **params: Any) -> str:
    (output,) = llm.generate([prompt], SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}), use_tqdm=False)
    return output.outputs[0].text


def test_offline(wrapped: Any, llm: LLM) -> None:
    from llama_index.core.llms import ChatMessage

    assert wrapped.complete(PROMPT).text == text(llm, PROMPT)
    own = {"temperature": 0.8, "seed": 3, "top_k": 5, "max_tokens": 5}
    assert wrapped.complete(PROMPT, **own).text == text(llm, PROMPT, **own)
    messages = [ChatMessage(role="user", content=PROMPT)]
    assert wrapped.chat(messages).message.content == text(llm, wrapped.messages_to_prompt(messages))


def test_over_the_server(server: LiveServer, llm: LLM) -> None:
    client = wrappers.VllmServer(
        model="tiny",
        api_url=f"{server.url}/v1/chat/completions",
        openai_like=True,
        temperature=0,
        max_new_tokens=8,
    )
    (output,) = llm.chat(
        [{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    assert client.complete(PROMPT).text == output.outputs[0].text
    assert [part.text for part in client.stream_complete(PROMPT)][-1] == output.outputs[0].text
