"""An engine that computes prompts and one that goes on with them: over a store of blocks, and what a connector says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi import AppThread

PROMPT = [3 + number * 7 % 200 for number in range(101)]
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 3, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "x" * 90}],
    "chat_template": "{{ messages[0].content }}",
    "max_tokens": 2,
    "temperature": 0,
}
CONNECTORS = Path(__file__).parents[1] / "v1/features"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def prefill(serve, folder, store) -> AppThread:
    return serve({"kv_store": str(store)}, folder)


@pytest.fixture(scope="module")
def decode(serve, folder, store) -> AppThread:
    return serve({"kv_store": str(store)}, folder)


@pytest.fixture(scope="module")
def connected(serve, folder, tmp_path_factory) -> Iterator[AppThread]:
    config = {"kv_connector": "FileConnector", "kv_connector_module_path": "file_connector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"folder": str(tmp_path_factory.mktemp("blocks"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CONNECTORS))
        yield serve({"kv_transfer_config": config}, folder)


def send(server: AppThread, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = server.request("POST", path, json={**body, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_a_second_engine_computes_the_last_block_alone(prefill, decode, path, body):
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = send(prefill, path, body, max_tokens=1, kv_transfer_params=asked)
    assert first["kv_transfer_params"] == {"do_remote_prefill": True, "do_remote_decode": False}
    second = send(decode, path, body, kv_transfer_params=first["kv_transfer_params"])
    num_tokens = second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_tokens - 1) // 16 * 16 > 64
    assert "kv_transfer_params" not in second
    whole = send(prefill, path, body)
    assert second["choices"] == whole["choices"]


def test_what_a_connector_says_comes_with_the_answer(connected):
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        answer = send(connected, path, body, kv_transfer_params={"some": {"thing": [1]}})
        assert answer["kv_transfer_params"] == {
            "num_blocks": 7 if body is BODY else 6,
            "asked": {"some": {"thing": [1]}},
        }
        text = connected.request("POST", path, json={**body, "stream": True}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = [event for event in events if "kv_transfer_params" in event]
        assert [event["choices"] for event in said] == [[]] and said == events[-1:]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}),
        ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]]}),
    ],
)
def test_answers_that_have_none_refuse_them(prefill, path, body):
    answer = prefill.request("POST", path, json={**body, "kv_transfer_params": {"do_remote_decode": True}})
    assert answer.status_code == 400 and "kv_transfer_params cannot be honoured" in answer.text


def test_others_than_objects_are_refused(prefill):
    answer = prefill.request("POST", "/v1/completions", json={**BODY, "vllm_xargs": {"kv_transfer_params": 5}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs")


def test_without_either_they_are_refused(serve, folder):
    server = serve({}, folder)
    for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
        given = {"kv_transfer_params": {"do_remote_decode": True}}
        for fields in (given, {"vllm_xargs": given}):
            answer = server.request("POST", path, json={**body, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kv_transfer_params")
        assert server.request("POST", path, json={**body, "kv_transfer_params": {}}).status_code == 200
