"""One truth through every door: completions, chat, messages and responses give what the engine gives offline.

A door is a row that says how it words a request's fields and its answer's parts; a test is a fact about all of them.
Facts of a single door are in its own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from asgi import AppThread
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""With it a conversation of one message is the prompt of completions."""

PROMPT = "the cat sat"
GREEDY = {"temperature": 0, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "c"]}},
    "required": ["a"],
    "additionalProperties": False,
}
READINGS = {"logprob_token_ids": [70, 71], "labels": ["a"], "logits_indices": [9]}

Part = Callable[[Any], Any]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Door:
    """How an endpoint words what all of them have."""

    prompt: Callable[[str], Fields]
    limit: str  # the field of most tokens
    stop: Callable[[str], Fields]
    form: Callable[[dict[str, Any]], Fields]
    kind: Fields  # fields of every answer
    name: str  # with which its id begins
    text: Part
    usage: Part  # (tokens of the prompt, of the answer)
    end: Part
    at_limit: Any  # `end` of an answer that max_tokens cut
    at_stop: Callable[[str], Any]  # `end` of one that a stop string ended
    readings: Part = lambda answer: answer


def _choice(answer: Any) -> Any:
    (choice,) = answer["choices"]
    return choice


def _counts(answer: Any) -> tuple[int, int]:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def _chat_form(schema: dict[str, Any]) -> Fields:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


def _messages(text: str) -> Fields:
    return {"messages": [{"role": "user", "content": text}]}


DOORS = {
    "/v1/completions": Door(
        prompt=lambda text: {"prompt": text},
        limit="max_tokens",
        stop=lambda stop: {"stop": stop},
        form=_chat_form,
        kind={"object": "text_completion"},
        name="cmpl-",
        text=lambda answer: _choice(answer)["text"],
        usage=_counts,
        end=lambda answer: [_choice(answer)[name] for name in ("finish_reason", "stop_reason")],
        at_limit=["length", None],
        at_stop=lambda stop: ["stop", stop],
        readings=_choice,
    ),
    "/v1/chat/completions": Door(
        prompt=_messages,
        limit="max_completion_tokens",
        stop=lambda stop: {"stop": [stop]},
        form=_chat_form,
        kind={"object": "chat.completion"},
        name="chatcmpl-",
        text=lambda answer: _choice(answer)["message"]["content"],
        usage=_counts,
        end=lambda answer: [_choice(answer)[name] for name in ("finish_reason", "stop_reason")],
        at_limit=["length", None],
        at_stop=lambda stop: ["stop", stop],
        readings=_choice,
    ),
    "/v1/messages": Door(
        prompt=_messages,
        limit="max_tokens",
        stop=lambda stop: {"stop_sequences": [stop]},
        form=lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        kind={"type": "message", "role": "assistant", "model": "tiny"},
        name="msg_",
        text=lambda answer: "".join(block["text"] for block in answer["content"]),
        usage=lambda answer: (
            answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"],
            answer["usage"]["output_tokens"],
        ),
        end=lambda answer: [answer[name] for name in ("stop_reason", "stop_sequence")],
        at_limit=["max_tokens", None],
        at_stop=lambda stop: ["stop_sequence", stop],
    ),
    "/v1/responses": Door(
        prompt=lambda text: {"input": text},
        limit="max_output_tokens",
        stop=lambda stop: {"stop": stop},
        form=lambda schema: {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
        },
        kind={"object": "response", "model": "tiny"},
        name="resp_",
        text=lambda answer: "".join(part["text"] for item in answer["output"] for part in item["content"]),
        usage=lambda answer: (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]),
        end=lambda answer: [
            *(answer.get(name) for name in ("status", "incomplete_details", "stop_reason")),
            *(item["status"] for item in answer["output"]),
        ],
        at_limit=["incomplete", {"reason": "max_output_tokens"}, None, "incomplete"],
        at_stop=lambda stop: ["completed", None, stop, "completed"],
    ),
}
EACH = pytest.mark.parametrize("path", DOORS)


@pytest.fixture(scope="module")
def llm(folder: Any) -> LLM:
    return make_tiny_llm(folder)


def ask(server: AppThread, path: str, max_tokens: int = 5, **fields: Any) -> Any:
    door = DOORS[path]
    answer = server.post(path, **{**door.prompt(PROMPT), door.limit: max_tokens, **GREEDY, **fields})
    assert {name: answer[name] for name in door.kind} == door.kind
    assert answer["id"].startswith(door.name)
    return answer


def offline(llm: LLM, **params: Any) -> Any:
    (output,) = llm.generate([PROMPT], SamplingParams(**{"max_tokens": 5, **GREEDY, **params}), use_tqdm=False)
    return output


@EACH
def test_text_and_usage(server: AppThread, llm: LLM, path: str) -> None:
    door, answer, want = DOORS[path], ask(server, path), offline(llm)
    assert door.text(answer) == want.outputs[0].text
    assert door.usage(answer) == (len(want.prompt_token_ids), 5)
    assert door.end(answer) == door.at_limit


@EACH
def test_a_stop_string_ends_the_text_and_is_named(server: AppThread, llm: LLM, path: str) -> None:
    door, text = DOORS[path], offline(llm, max_tokens=8).outputs[0].text
    stop = text[2:4]
    answer = ask(server, path, 8, **door.stop(stop))
    assert door.text(answer) == text[: text.index(stop)]
    assert door.end(answer) == door.at_stop(stop)


@EACH
def test_an_answer_has_the_form_that_is_asked_for(server: AppThread, llm: LLM, path: str) -> None:
    door, unforced = DOORS[path], {"ignore_eos": False}
    want = offline(llm, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA), **unforced)
    answer = ask(server, path, 60, **door.form(SCHEMA), **unforced)
    assert door.text(answer) == want.outputs[0].text
    assert json.loads(door.text(answer))["a"] in ("b", "c")


@EACH
def test_readings_of_ids_and_labels(server: AppThread, llm: LLM, path: str) -> None:
    a = llm.llm_engine.tokenizer.encode("a")[0]
    rows = offline(llm, logprob_token_ids=[70, 71, a]).outputs[0].logprobs
    answer = ask(server, path, **READINGS)
    found = DOORS[path].readings(answer)
    for reading, row in zip(found["readings"], rows, strict=True):
        assert {*reading["ids"]} == {"70", "71", str(a)}
        for token, entry in reading["ids"].items():
            assert entry["logprob"] == pytest.approx(row[int(token)].logprob, abs=1e-5)
            assert entry["rank"] == row[int(token)].rank
    chat = ask(server, "/v1/chat/completions", **READINGS)
    assert answer["labels"] == chat["labels"]
    for name in ("readings", "logits_values", "logits_values_per_token"):
        assert found[name] == _choice(chat)[name]
