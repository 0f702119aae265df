"""langchain-openai against the server. Values are those of the same model offline."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel, ConfigDict

from vllm import LLM, SamplingParams

openai = pytest.importorskip("openai")
langchain_openai = pytest.importorskip("langchain_openai")

MODEL = "tiny"

QUESTION = "Is the sun hot? Yes or No."
GREEDY = {"temperature": 0, "max_tokens": 8}


def chat_of(server: LiveServer, **options: Any) -> Any:
    own = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "unused", "max_retries": 0}
    return langchain_openai.ChatOpenAI(**{**own, **GREEDY, **options})


def offline(llm: LLM, question: str = QUESTION, **params: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    (output,) = llm.chat([messages], SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return output


def test_invoke_stream_and_a_chain(server: LiveServer, llm: LLM) -> None:
    chat = chat_of(server)
    expected = offline(llm)
    answer = chat.invoke(QUESTION)
    assert answer.content == expected.outputs[0].text
    assert answer.response_metadata["finish_reason"] == expected.outputs[0].finish_reason
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["input_tokens"] == len(expected.prompt_token_ids)
    assert answer.usage_metadata["output_tokens"] == len(expected.outputs[0].token_ids)

    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    (whole, *more) = chunks
    for chunk in more:
        whole += chunk
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert whole.usage_metadata[name] == answer.usage_metadata[name]

    from langchain_core.prompts import ChatPromptTemplate

    chain = ChatPromptTemplate.from_messages([("user", "Is the {thing} hot? Yes or No.")]) | chat
    assert chain.invoke({"thing": "sun"}).content == answer.content


def test_batch(server: LiveServer, llm: LLM) -> None:
    questions = [f"What is {number} plus {number}?" for number in range(6)]
    answers = chat_of(server).batch(questions)
    assert [answer.content for answer in answers] == [offline(llm, question).outputs[0].text for question in questions]


def test_logprobs_and_labels(server: LiveServer, llm: LLM) -> None:
    labels = ["the", "stop"]
    ids = [llm.get_tokenizer().encode(label)[0] for label in labels]
    expected = offline(llm, logprobs=2, logprob_token_ids=ids).outputs[0]
    chat = chat_of(server, extra_body={"labels": labels}).bind(logprobs=True, top_logprobs=2)
    answer = chat.invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    for entry, token_id, position in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert (entry["token_id"], entry["logprob"]) == (token_id, position[token_id].logprob)
        by_id = {top["token_id"]: (top["logprob"], top["rank"]) for top in entry["top_logprobs"]}
        assert by_id == {i: (each.logprob, each.rank) for i, each in position.items() if i in by_id}
        assert set(ids) <= set(by_id)

    streamed = list(chat.stream(QUESTION))
    parts = [part for chunk in streamed for part in chunk.response_metadata.get("logprobs", {}).get("content", [])]
    assert [part["logprob"] for part in parts] == [entry["logprob"] for entry in content]


def test_completions(server: LiveServer, llm: LLM) -> None:
    prompts = ["The capital of France is", "One, two,"]
    model = langchain_openai.OpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="unused", max_retries=0, **GREEDY)
    outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    assert [model.invoke(prompt) for prompt in prompts] == expected
    assert model.batch(prompts) == expected
    assert "".join(model.stream(prompts[0])) == expected[0]
    assert model.invoke(prompts[1], stop=[expected[1][2]]) == expected[1][: expected[1].index(expected[1][2])]

    result = model.generate(prompts, logprobs=2)
    for output, (generation,) in zip(outputs, result.generations, strict=True):
        logprobs = generation.generation_info["logprobs"]
        assert logprobs["token_ids"] == output.outputs[0].token_ids
        assert "".join(logprobs["tokens"]) == output.outputs[0].text


def test_tools_are_refused_by_name(server: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat_of(server).bind_tools([tool]).invoke(QUESTION)
    assert caught.value.param == "tools"


class Label(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["yes", "no"]
    sure: bool


def test_structured_output(server: LiveServer) -> None:
    chat = chat_of(server, max_tokens=120).with_structured_output(Label, method="json_schema")
    assert isinstance(chat.invoke(QUESTION), Label)
