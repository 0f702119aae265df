"""guidance over the server: its grammars go to vLLM by two names."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer

guidance = pytest.importorskip("guidance")


@pytest.fixture
def model(server: LiveServer) -> Any:
    from guidance.models.experimental import VLLMModel

    return VLLMModel("tiny", base_url=f"{server.url}/v1", api_key="unused", echo=False)


def test_captures_are_what_their_grammars_say(model: Any) -> None:
    with guidance.user():
        model += "Is the sun hot?"
    with guidance.assistant():
        model += guidance.select(["yes", "no"], name="answer") + ", by " + guidance.gen("share", regex="[1-9][0-9]%")
    assert model["answer"] in ("yes", "no")
    assert model["share"][:-1].isdigit() and model["share"].endswith("%")


def test_json(model: Any) -> None:
    # Closed, as a random model would write properties of its own until it is cut.
    closed: dict[str, Any] = {"required": ["sure"], "additionalProperties": False}
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, **closed}
    with guidance.user():
        model += "Are you sure?"
    with guidance.assistant():
        model += guidance.json(name="said", schema=schema, max_tokens=60)
    assert model["said"].replace(" ", "") in ('{"sure":true}', '{"sure":false}')
