"""openai-agents over the server: a local tool is called by force and its result answered, by responses and by chat."""

from __future__ import annotations

from typing import Literal

import pytest
from live_server import LiveServer

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")


@pytest.mark.parametrize("model", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_local_tool(server: LiveServer, model: str, streams: bool) -> None:
    called = []

    @agents.function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "cold"

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused")
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200, temperature=1.0)
    agent = agents.Agent(
        name="a", instructions="Help.", tools=[weather], model=getattr(agents, model)("tiny", client),
        model_settings=settings, tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip
    if streams:

        async def run():
            result = agents.Runner.run_streamed(agent, "Weather?")
            return [event async for event in result.stream_events()], result

        import asyncio

        _, result = asyncio.run(run())
    else:
        result = agents.Runner.run_sync(agent, "Weather?")
    assert result.final_output == "cold"
    assert called and called[0] in ("Oslo", "Rome")
