"""pydantic-ai over the server: its native output is a schema as response_format."""

from __future__ import annotations

from typing import Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel, ConfigDict

pydantic_ai = pytest.importorskip("pydantic_ai")


class Label(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["yes", "no"]
    sure: bool


def test_native_output(server: LiveServer) -> None:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="unused"))
    settings = {"temperature": 0.0, "max_tokens": 120}
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Label), model_settings=settings)
    assert isinstance(agent.run_sync("Is the sun hot?").output, Label)
