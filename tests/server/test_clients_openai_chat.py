"""The openai SDK against a live server: chat, its stream helper, and readings. Values are those of LLM.chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from live_server import LiveServer
from pydantic import BaseModel
from served import MODEL

from vllm import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

MESSAGES: list[Any] = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Is the sun hot? Yes or No."},
]
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def offline(llm: LLM, **params: Any) -> RequestOutput:
    (output,) = llm.chat([MESSAGES], SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return output


def test_message(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    expected = offline(llm)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_contents_and_options_that_the_sdk_sends(client: openai.OpenAI, llm: LLM) -> None:
    expected = offline(llm, seed=5, temperature=1.0, n=2, stop=["."]).outputs
    parts: list[Any] = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=parts, temperature=1.0, max_completion_tokens=8, n=2, seed=5, stop=".",
        user="somebody", metadata={"key": "value"}, store=False, service_tier="auto", tool_choice="none",
        response_format={"type": "text"}, parallel_tool_calls=True, prompt_cache_key="key",
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == [output.text for output in expected]


def test_an_answer_goes_back_as_it_came(client: openai.OpenAI, llm: LLM) -> None:
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY).choices[0].message
    again: Any = {"role": "user", "content": "And the moon?"}
    plain: list[Any] = [*MESSAGES, {"role": "assistant", "content": first.content}, again]
    (expected,) = llm.chat([plain], SamplingParams(**GREEDY), use_tqdm=False)
    # The SDK's own object, whose further fields are null.
    for message in (first, first.model_dump()):
        history: list[Any] = [*MESSAGES, message, again]
        answer = client.chat.completions.create(model=MODEL, messages=history, **GREEDY)
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_logprobs_have_the_true_top_then_the_ids(client: openai.OpenAI, llm: LLM) -> None:
    ids = [9230, 2838]
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, extra_body={"logprob_token_ids": ids}, **GREEDY
    )
    expected = offline(llm, logprobs=3, logprob_token_ids=ids).outputs[0]
    (choice,) = answer.choices
    content = choice.logprobs.content
    # The token that ends an answer was read, too, and is no part of its text.
    end = "<|im_end|>" if choice.finish_reason == "stop" else ""
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content + end
    for entry, token_id, position in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert (entry.token_id, entry.logprob) == (token_id, position[token_id].logprob)
        assert entry.token == position[token_id].decoded_token
        top = [(top.token_id, top.token, top.logprob, top.rank, top.logit) for top in entry.top_logprobs]
        wanted = [i for i, reading in position.items() if reading.rank <= 3]
        assert top == [
            (i, position[i].decoded_token, position[i].logprob, position[i].rank, position[i].logit)
            for i in sorted(wanted, key=lambda i: position[i].rank) + [i for i in ids if i not in wanted]
        ]


def test_labels_with_and_without_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    labels = ["Yes", "No"]
    ids = [llm.get_tokenizer().encode(label)[0] for label in labels]
    (position,) = offline(llm, max_tokens=1, logprob_token_ids=ids).outputs[0].logprobs
    for more in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 0}):
        request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 1, **more}
        answer = client.chat.completions.create(**request, extra_body={"labels": labels})
        assert answer.labels == [{"label": text, "token_id": i} for text, i in zip(labels, ids, strict=True)]
        (reading,) = answer.choices[0].readings
        shares = position.softmax(ids)
        for label, token_id in zip(labels, ids, strict=True):
            entry = reading["ids"][str(token_id)]
            assert (entry["label"], entry["token"]) == (label, label)
            assert (entry["logprob"], entry["rank"]) == (position[token_id].logprob, position[token_id].rank)
            assert entry["probability"] == pytest.approx(shares[token_id])
        assert reading["mass"] == pytest.approx(position.mass(ids))


def test_chunks_are_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 12,
        "logprobs": True, "top_logprobs": 2, "extra_body": {"labels": ["Yes", "No"], "logits_indices": [30]},
    }  # fmt: skip
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].labels == whole.labels
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        joined = [entry for part in parts for entry in part.logprobs.content]
        assert [entry.model_dump() for entry in joined] == [entry.model_dump() for entry in choice.logprobs.content]
        for name in ("readings", "logits_values_per_token"):
            assert [value for part in parts for value in getattr(part, name, [])] == getattr(choice, name)


def test_the_stream_helper(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "stop": ["."]}
    whole = client.chat.completions.create(**request, logprobs=True, top_logprobs=1)
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        **request, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == whole.choices[0].message.content
    assert [event.content for event in events if event.type == "content.done"] == [whole.choices[0].message.content]
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage == whole.usage
    assert [entry.logprob for entry in final.choices[0].logprobs.content] == [
        entry.logprob for entry in whole.choices[0].logprobs.content
    ]


class Weather(BaseModel):
    hot: bool
    sky: Literal["blue", "grey"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_parse_helper_gives_an_object(client: openai.OpenAI, temperature: int) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, temperature=temperature, max_tokens=60, seed=1
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == Weather.model_validate_json(choice.message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_the_allowed_mass_comes_with_each_token(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    extra = {"structured_outputs": {"choice": ["Yes", "No"]}, "grammar_readings": True}
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, **GREEDY, extra_body=extra, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    expected = offline(llm, **extra).outputs[0]
    masses = [mass for choice in choices for mass in getattr(choice, "allowed_mass", None) or ()]
    assert masses == pytest.approx(expected.allowed_mass, abs=1e-6)
    assert choices[-1].allowed_mass_total == pytest.approx(expected.allowed_mass_total, abs=1e-5)


def test_a_streamed_answer_has_the_form(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Weather, temperature=0, max_tokens=60
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
