"""choice_readings and field_readings over HTTP: values are those offline, in whole answers and with a stream's end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer

from vllm import LLM, SamplingParams
from vllm.outputs import ValueReadings

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "Question: Is the sun hot? Answer:"
CHOICES = [" Yes", " No", " Not at all"]
SCHEMA = {
    "type": "object",
    "properties": {"hot": {"type": "boolean"}, "sky": {"enum": ["blue", "grün", "gray"]}},
    "required": ["hot", "sky"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": {"choice": CHOICES}, "choice_readings": True},
    "fields": {"structured_outputs": {"json": SCHEMA}, "field_readings": True},
}
SAMPLING = {"temperature": 1, "top_p": 1, "seed": 3, "n": 2, "max_tokens": 40}


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live_server.url, timeout=60) as client:
        yield client


def choices_of(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By index, the fields of a choice's last part."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return {choice["index"]: choice for choice in answer.json()["choices"]}
    found: dict[int, dict[str, Any]] = {}
    for line in answer.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            assert "field_readings" not in found.get(choice["index"], {})
            found[choice["index"]] = choice
    return found


def check(entries: list[dict[str, Any]], expected: ValueReadings) -> None:
    assert [each["value"] for each in entries] == expected.values
    assert [each["text"] for each in entries] == expected.texts
    assert [each["token_ids"] for each in entries] == expected.token_ids
    assert [each["logprob"] for each in entries] == pytest.approx(expected.logprobs.tolist(), abs=1e-4)
    assert [each["share"] for each in entries] == pytest.approx(expected.shares.tolist(), abs=1e-4)
    assert [each["chosen"] for each in entries] == [index == expected.chosen for index in range(len(entries))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_readings_equal_those_offline(client: httpx.Client, llm: LLM, path: str, form: str, stream: bool) -> None:
    params = SamplingParams(**SAMPLING, **FORMS[form])
    messages = [{"role": "user", "content": PROMPT}]
    is_chat = "chat" in path
    (expected,) = llm.chat([messages], params, use_tqdm=False) if is_chat else llm.generate(PROMPT, params)
    if "generate" in path:
        ids = expected.prompt_token_ids
        body = {"token_ids": ids, "sampling_params": {**SAMPLING, **FORMS[form]}, "stream": stream}
    else:
        given = {"messages": messages} if is_chat else {"prompt": PROMPT}
        body = {**given, **SAMPLING, **FORMS[form], "stream": stream}
    found = choices_of(client, path, body)
    assert sorted(found) == [0, 1]
    for completion in expected.outputs:
        own = found[completion.index]
        assert own["finish_reason"] == completion.finish_reason == "stop"
        if form == "choice":
            check(own["choice_readings"], completion.choice_readings)
            assert "field_readings" not in own
        else:
            assert list(own["field_readings"]) == list(completion.field_readings) == ["$.hot", "$.sky"]
            for name, entries in own["field_readings"].items():
                check(entries, completion.field_readings[name])


def test_what_cannot_be_read_is_refused(client: httpx.Client) -> None:
    for form, says in (
        ({"choice_readings": True}, "choice_readings need structured_outputs.choice"),
        ({"field_readings": True, "structured_outputs": {"choice": ["a"]}}, "need structured_outputs.json"),
        ({"choice_readings": True, "structured_outputs": {"choice": [""]}}, "an empty choice"),
    ):  # fmt: skip
        answer = client.post("/v1/completions", json={"prompt": "x", **form})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] in form
