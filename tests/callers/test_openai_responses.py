"""The openai package's /v1/responses over the server: create, stream, parse, functions, conversations."""

from __future__ import annotations

from typing import Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel

openai = pytest.importorskip("openai")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": CITY, "strict": True, "description": "The weather."}


class Answer(BaseModel):
    label: Literal["yes", "no"]


@pytest.fixture
def client(server: LiveServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        yield client


def test_create_and_stream(client) -> None:
    own = {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "temperature": 0.0}
    response = client.responses.create(**own, instructions="Be brief.", extra_body={"ignore_eos": True})
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        max_tokens=8,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.output_tokens == 8 and response.incomplete_details.reason == "max_output_tokens"
    text, kinds = "", []
    for event in client.responses.create(**own, instructions="Be brief.", stream=True, extra_body={"ignore_eos": True}):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == response.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")


def test_the_stream_helper(client) -> None:
    stop = {"guided_choice": ["yes", "no"]}
    with client.responses.stream(model="tiny", input="Sure?", max_output_tokens=8, extra_body=stop) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text in ("yes", "no")


def test_parse(client) -> None:
    response = client.responses.parse(model="tiny", input="Is it?", text_format=Answer, max_output_tokens=100)
    assert response.output_parsed.label in ("yes", "no")


def test_logprobs(client) -> None:
    response = client.responses.create(
        model="tiny",
        input="Hello",
        max_output_tokens=2,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        extra_body={"logprob_token_ids": [70, 71], "ignore_eos": True},
    )
    for entry in response.output[0].content[0].logprobs:
        assert [each.token_id for each in entry.top_logprobs[3:]] or len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    assert [list(each["ids"]) for each in response.readings] == [["70", "71"]] * 2


def test_a_function_is_called_and_its_result_followed(client) -> None:
    first = client.responses.create(
        model="tiny", input="Weather?", tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200,
    )  # fmt: skip
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "weather")
    second = client.responses.create(
        model="tiny",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "cold"}],
        previous_response_id=first.id,
        max_output_tokens=4,
    )
    assert second.previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert client.responses.retrieve(first.id).output[0].arguments == call.arguments
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_conversations(client) -> None:
    conversation = client.conversations.create(metadata={"a": "b"})
    client.responses.create(model="tiny", input="Hello", conversation=conversation.id, max_output_tokens=4)
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant"]
    assert client.conversations.delete(conversation.id).deleted


def test_errors(client) -> None:
    with pytest.raises(openai.BadRequestError, match="background") as error:
        client.responses.create(model="tiny", input="Hello", background=True)
    assert error.value.param == "background"
