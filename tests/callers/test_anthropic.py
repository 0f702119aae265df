"""The anthropic package over the server: create, stream, tools, count_tokens, errors."""

from __future__ import annotations

import pytest
from live_server import LiveServer

anthropic = pytest.importorskip("anthropic")

TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: LiveServer):
    with anthropic.Anthropic(base_url=server.url, api_key="unused") as client:
        yield client


def test_create_and_stream(client) -> None:
    own = {
        "model": "tiny", "messages": USER, "max_tokens": 8, "system": "Be brief.",
        "extra_body": {"ignore_eos": True, "temperature": 0.0},
    }  # fmt: skip
    message = client.messages.create(**own)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    with client.messages.stream(**own) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        final = stream.get_final_message()
    assert final.content[0].text == message.content[0].text
    assert final.stop_reason == "max_tokens"


def test_a_tool_is_called_and_its_result_read(client) -> None:
    own = {"model": "tiny", "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
    message = client.messages.create(messages=USER, **own)
    (call,) = message.content
    assert (message.stop_reason, call.name) == ("tool_use", "weather")
    assert call.input["city"] in ("Oslo", "Rome")
    with client.messages.stream(messages=USER, **own) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "cold"}
    history = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model="tiny", max_tokens=4, messages=history)
    assert after.usage.output_tokens <= 4


def test_count_tokens(client) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=USER)
    usage = client.messages.create(model="tiny", messages=USER, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="only texts") as error:
        client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": [image]}])
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=4, messages=USER)
