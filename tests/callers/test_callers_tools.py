"""Agents of others over the server's tools: a call, its result, the answer; and forced calls of a random model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel, ConfigDict
from scripted_calls import ANSWER, RESULT, TEMPLATE

openai = pytest.importorskip("openai")

SUPPORT = Path(__file__).parents[1] / "support"
QUESTION = "What is the weather in Oslo?"
USER = [{"role": "user", "content": QUESTION}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    assert city == "Oslo", repr(city)
    return RESULT


@pytest.fixture(scope="module")
def agent_server(tiny_model: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    """The tiny model, which calls `weather` of Oslo, and answers when it has the result."""
    flags: tuple[str, ...] = ("--logits-processors", "scripted_calls:ScriptedCalls", "--chat-template", TEMPLATE)
    flags += ("--served-model-name", "tiny", "gpt-4o-mini")
    environment = {**server_environment, "PYTHONPATH": str(SUPPORT)}
    with LiveServer(tiny_model, *flags, env=environment) as server:
        yield server


@pytest.fixture
def url(agent_server: LiveServer) -> str:
    return f"{agent_server.url}/v1"


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="unused", max_retries=0)


def test_openai(url: str) -> None:
    client = client_of(url)
    message = client.chat.completions.create(model="tiny", messages=USER, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    history = [*USER, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="tiny", messages=history, tools=[TOOL]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (ANSWER, "stop")
    with client.chat.completions.stream(model="tiny", messages=USER, tools=[TOOL]) as stream:
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, final.message.tool_calls[0].function.name) == ("tool_calls", "weather")


def test_pydantic_ai(url: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="unused"))
    agent = pydantic_ai.Agent(model, tools=[weather])
    assert agent.run_sync(QUESTION).output == ANSWER

    class Label(BaseModel):
        model_config = ConfigDict(extra="forbid")
        label: Literal["yes", "no"]

    forced = pydantic_ai.Agent(model, output_type=Label)  # by a tool that must be called
    assert isinstance(forced.run_sync(QUESTION).output, Label)


def test_langchain(url: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = langchain_openai.ChatOpenAI(model="tiny", base_url=url, api_key="unused", max_retries=0)
    bound = chat.bind_tools([weather])
    first = bound.invoke(QUESTION)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert bound.invoke([HumanMessage(QUESTION), first, result]).content == ANSWER
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == {"city": "Oslo"}
    (forced,) = chat.bind_tools([TOOL], tool_choice="weather").invoke(QUESTION).tool_calls
    assert forced["args"]["city"] in ("Oslo", "Rome")


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    for provider in ("hosted_vllm", "openai"):
        options = {"model": f"{provider}/tiny", "api_base": url, "api_key": "unused", "tools": [TOOL]}
        (call,) = litellm.completion(messages=USER, **options).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_tool_runner(agent_server: LiveServer, streams: bool) -> None:
    """It asks the server to keep the conversation, and sends all of it where that keeps none."""
    anthropic = pytest.importorskip("anthropic")
    calls: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        calls.append(city)
        return RESULT

    with anthropic.Anthropic(base_url=agent_server.url, api_key="unused", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=200, messages=USER, tools=[weather], stream=streams
        )
        turns = [each.get_final_message() if streams else each for each in runner]
    (first, last), (block,) = turns, turns[-1].content
    assert (calls, block.text, last.stop_reason) == (["Oslo"], ANSWER, "end_turn")
    lengths = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in turns]
    assert lengths[1] > lengths[0] + len(RESULT) and first.stop_reason == "tool_use"


def test_smolagents(url: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel("tiny", api_base=url, api_key="unused")
    message = model.generate(
        [{"role": "user", "content": QUESTION}], tools_to_call_from=[smolagents.tool(weather)], max_tokens=200
    )
    assert {call.function.name for call in message.tool_calls} == {"weather"}


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor")

    class Label(BaseModel):
        model_config = ConfigDict(extra="forbid")
        label: Literal["yes", "no"]

    bound = instructor.from_openai(client_of(url), mode=instructor.Mode.TOOLS)
    answer = bound.chat.completions.create(model="tiny", messages=USER, response_model=Label, max_retries=0)
    assert isinstance(answer, Label)


def test_llama_index(url: str) -> None:
    llama = pytest.importorskip("llama_index.llms.openai")
    from llama_index.core.agent.workflow import FunctionAgent

    # It asks a table of OpenAI's models what the model can do.
    llm = llama.OpenAI(model="gpt-4o-mini", api_base=url, api_key="unused")

    async def run() -> str:
        return str(await FunctionAgent(tools=[weather], llm=llm).run(QUESTION))

    assert asyncio.run(run()) == ANSWER


def test_inspect_ai(url: str) -> None:
    pytest.importorskip("inspect_ai")
    # It asks for a newer client than others here take: run it in an environment of its own.
    pytest.importorskip("openai", minversion="3.4")
    from inspect_ai.model import ChatMessageUser, execute_tools, get_model
    from inspect_ai.tool import ToolDef

    async def later(city: str) -> str:
        return weather(city)

    tool = ToolDef(later, name="weather", description="Of a city.", parameters={"city": "its name"})
    model = get_model("openai-api/tiny/tiny", base_url=url, api_key="unused")

    async def run() -> str:
        messages: list[Any] = [ChatMessageUser(content=QUESTION)]
        output = await model.generate(messages, tools=[tool.as_tool()])
        messages.append(output.message)
        messages += (await execute_tools(messages, [tool.as_tool()])).messages
        return (await model.generate(messages, tools=[tool.as_tool()])).completion

    assert asyncio.run(run()) == ANSWER


def test_openai_agents(url: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(weather)])
    assert agents.Runner.run_sync(agent, QUESTION).final_output == ANSWER
