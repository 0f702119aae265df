"""instructor over the server: a schema as response_format, and as a call of /v1/responses. (Its mode JSON only tells
the model of the schema, to which a random one does not keep.)"""

from __future__ import annotations

from typing import Literal

import pytest
from live_server import LiveServer
from pydantic import BaseModel, ConfigDict

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")


class Label(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["yes", "no"]
    sure: bool


def test_an_answer_is_an_object(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    bound = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    answer = bound.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Is the sun hot?"}],
        response_model=Label,
        max_tokens=120,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(answer, Label)


def test_a_forced_call_beside_a_form(server: LiveServer) -> None:
    """The mode sends a named `tool_choice` and a `text.format` of one schema."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    bound = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    for _ in range(2):
        answer = bound.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Is the sun hot?"}],
            response_model=Label,
            max_tokens=200,
            max_retries=0,
        )
        assert isinstance(answer, Label)
