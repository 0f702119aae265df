"""Agents of others over /v1/responses and /v1/messages: a call, its result, the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from scripted_calls import ANSWER, RESULT, TEMPLATE

openai = pytest.importorskip("openai")

SUPPORT = Path(__file__).parents[1] / "support"
QUESTION = "What is the weather in Oslo?"
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    assert city == "Oslo"
    return RESULT


@pytest.fixture(scope="module")
def agent_server(tiny_model: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    """The tiny model, which calls `weather` of Oslo, and answers when it has the result."""
    flags = ("--logits-processors", "scripted_calls:ScriptedCalls", "--chat-template", TEMPLATE)
    environment = {**server_environment, "PYTHONPATH": str(SUPPORT)}
    with LiveServer(tiny_model, *flags, env=environment) as server:
        yield server


@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents(agent_server: LiveServer, streams: bool) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{agent_server.url}/v1", api_key="unused", max_retries=0)
    model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(weather)])
    if not streams:
        assert agents.Runner.run_sync(agent, QUESTION).final_output == ANSWER
        return

    async def run() -> Any:
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    import asyncio

    assert asyncio.run(run()) == ANSWER


def test_openai_by_ids_alone(agent_server: LiveServer) -> None:
    """The call's result alone follows the response that has the call."""
    client = openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="unused", max_retries=0)
    tools = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]
    first = client.responses.create(model="tiny", input=QUESTION, tools=tools)
    (call,) = (item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
    second = client.responses.create(model="tiny", input=[output], tools=tools, previous_response_id=first.id)
    assert second.output_text == ANSWER and second.status == "completed"


def test_pydantic_ai(agent_server: LiveServer) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{agent_server.url}/v1", api_key="unused")
    agent = pydantic_ai.Agent(OpenAIResponsesModel("tiny", provider=provider), tools=[weather])
    assert agent.run_sync(QUESTION).output == ANSWER


def test_langchain(agent_server: LiveServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    url = f"{agent_server.url}/v1"
    chat = langchain_openai.ChatOpenAI(
        model="tiny", base_url=url, api_key="unused", max_retries=0, use_responses_api=True
    )
    bound = chat.bind_tools([weather])
    first = bound.invoke(QUESTION)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert bound.invoke([HumanMessage(QUESTION), first, result]).text == ANSWER
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == {"city": "Oslo"}


def test_litellm(agent_server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "name": "weather", "parameters": CITY}
    response = litellm.responses(
        model="openai/tiny", input=QUESTION, tools=[tool], api_base=f"{agent_server.url}/v1", api_key="unused"
    )
    (call,) = (item for item in response.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo"}


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic(agent_server: LiveServer, streams: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=agent_server.url, api_key="unused", max_retries=0)
    own = {"model": "tiny", "max_tokens": 300, "tools": [{"name": "weather", "input_schema": CITY}]}

    def ask(messages: list[Any]) -> Any:
        if not streams:
            return client.messages.create(messages=messages, **own)
        with client.messages.stream(messages=messages, **own) as stream:
            return stream.get_final_message()

    history: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(history)
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = ask(history)
    assert ("".join(block.text for block in last.content if block.type == "text"), last.stop_reason) == (
        ANSWER,
        "end_turn",
    )
