"""The input of a decision: OpenAI's messages and tool calls to the conversations that templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.decisions.content import (
    check_literal,
    check_nullable_text,
    check_object,
    check_text,
    content_text,
    is_list,
)
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import wrong_type

# The parts that each role's messages may hold.
_PARTS = {
    "user": ("input_text", "input_json"),
    "developer": ("input_text",),
    "system": ("input_text",),
    "assistant": ("output_text", "refusal"),
}
_STATUSES = (None, "in_progress", "completed", "incomplete")
# The key of a call's arguments.
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass(frozen=True)
class Turn:
    """One item of an input.

    Attributes:
        role: user, developer, system, assistant, call (of a tool) or output (of one).
        text: the message; a call's arguments.
        call_id, tool: of a call or an output.
    """

    role: str
    text: str
    call_id: str = ""
    tool: str = ""


def parse_input(value: Any, name: str = "input") -> list[Turn]:
    """The turns of a text or of a list of messages, calls and outputs; messages that say nothing are left out.

    Raises:
        VLLMValidationError: a malformed item, or an output without its call; names the place.
    """
    if isinstance(value, str):
        return [Turn("user", check_text(name, value))] if value else []
    if not is_list(value):
        raise wrong_type(name, value, "a text or a list of messages")
    turns: list[Turn] = []
    tools: dict[tuple[str, str], str] = {}
    for index, item in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(item, Mapping):
            raise wrong_type(place, item, "a message or a tool call: an object")
        kind = item.get("type", "message")
        check_literal(f"{place}.type", kind, ("message", *_CALLS, *_OUTPUTS))
        if kind == "message":
            turn = _message(place, item)
        elif kind in _CALLS:
            turn = _call(place, kind, item)
            tools[kind, turn.call_id] = turn.tool
        else:
            turn = _output(place, kind, item, tools)
        if turn.text or turn.role in ("call", "output"):
            turns.append(turn)
    return turns


def with_marks(value: Any, media: MarkedMedia) -> Any:
    """An input with marks in place of its pictures and videos, which `media` gets.

    Raises:
        VLLMValidationError: one that is malformed or cannot be read, or more than a prompt may have.
    """
    if not is_list(value):
        return value
    items = []
    for index, item in enumerate(value):
        # An assistant's message has none, and is refused by the type that the part has.
        may_have = isinstance(item, Mapping) and item.get("role") != "assistant"
        for key in ("content", "output"):
            parts: Any = item.get(key) if may_have else None
            if is_list(parts):
                marks = [media.part(f"input[{index}].{key}[{at}]", part) for at, part in enumerate(parts)]
                texts = [
                    part if mark is None else {"type": "input_text", "text": mark}
                    for part, mark in zip(parts, marks, strict=True)
                ]
                item = {**item, key: texts}
        items.append(item)
    media.check_count("input")
    return items


def _message(place: str, item: Mapping[str, Any]) -> Turn:
    role = item.get("role")
    if "role" not in item:
        raise VLLMValidationError(f"{place}.role is required", f"{place}.role")
    check_literal(f"{place}.role", role, tuple(_PARTS))
    assert isinstance(role, str)
    check_object(place, item, ("role", "content"), ("type", "phase") if role == "assistant" else ("type",))
    check_literal(f"{place}.phase", item.get("phase"), (None, "commentary", "final_answer"))
    return Turn(role, content_text(f"{place}.content", item["content"], _PARTS[role]))


def _call(place: str, kind: str, item: Mapping[str, Any]) -> Turn:
    key = _CALLS[kind]
    check_object(place, item, ("type", "call_id", "name", key), ("id", "namespace", "status"))
    _check_common(place, item)
    name = check_text(f"{place}.name", item["name"])
    if not name:
        raise VLLMValidationError(f"{place}.name must not be empty", f"{place}.name", name)
    space = check_nullable_text(f"{place}.namespace", item.get("namespace"))
    tool = f"{space}.{name}" if space else name
    return Turn("call", check_text(f"{place}.{key}", item[key]), item["call_id"], tool)


def _output(place: str, kind: str, item: Mapping[str, Any], tools: Mapping[tuple[str, str], str]) -> Turn:
    check_object(place, item, ("type", "call_id", "output"), ("id", "status"))
    _check_common(place, item)
    call_id = item["call_id"]
    tool = tools.get((kind.removesuffix("_output"), call_id))
    if tool is None:
        message = f"{place}.call_id {call_id!r} names no {kind.removesuffix('_output')} before it"
        raise VLLMValidationError(message, f"{place}.call_id", call_id)
    return Turn("output", content_text(f"{place}.output", item["output"], ("input_text",)), call_id, tool)


def _check_common(place: str, item: Mapping[str, Any]) -> None:
    call_id = check_text(f"{place}.call_id", item["call_id"])
    if not call_id:
        raise VLLMValidationError(f"{place}.call_id must not be empty", f"{place}.call_id", call_id)
    check_nullable_text(f"{place}.id", item.get("id"))
    check_literal(f"{place}.status", item.get("status"), _STATUSES)


def without_beginning(turns: Sequence[Turn], num_tokens: int, tokenizer: Tokenizer) -> list[Turn]:
    """The turns without their first `num_tokens` tokens of text; those of the system and the developer stay."""
    kept = []
    for turn in turns:
        if num_tokens > 0 and turn.role not in ("system", "developer"):
            ids = tokenizer.encode(turn.text, add_special_tokens=False)
            num_tokens -= len(ids)
            if num_tokens >= 0:
                continue
            # A cut may fall inside a character.
            turn = replace(turn, text=tokenizer.decode(ids[num_tokens:], skip_special_tokens=False).lstrip("\ufffd"))
        kept.append(turn)
    return kept


def conversations(turns: Sequence[Turn], question: str, has_developer: bool) -> Iterator[list[dict[str, Any]]]:
    """Ways to write turns and, at their end, the question as a user's message; the nearest to how models were trained
    first, the ones that any template takes last.

    Args:
        has_developer: the template has this role; else its messages are the system's.
    """
    yield _with_question(_native(turns, has_developer), question)
    plain = [Turn(*_plain(turn)) for turn in turns]
    yield _with_question(_merged(_native(plain, has_developer)), question)
    text = transcript(turns)
    yield [{"role": "user", "content": f"{text}\n\n{question}" if text else question}]


def after_examples(turns: Sequence[Turn], examples: Sequence[tuple[str, str]]) -> list[Turn]:
    """The turns with examples, each a user's text and its answer, behind what the system says first."""
    start = next((index for index, turn in enumerate(turns) if turn.role not in ("system", "developer")), len(turns))
    shown = [Turn(role, text) for pair in examples for role, text in zip(("user", "assistant"), pair, strict=True)]
    return [*turns[:start], *shown, *turns[start:]]


def transcript(turns: Sequence[Turn]) -> str:
    """All turns as one text; a single user's message as it is."""
    if all(turn.role == "user" for turn in turns):
        return "\n\n".join(turn.text for turn in turns)
    return "\n\n".join(f"{role.capitalize()}: {text}" for role, text in map(_plain, turns))


def _plain(turn: Turn) -> tuple[str, str]:
    """(role, text) without calls and outputs."""
    if turn.role == "call":
        return "assistant", f"{turn.tool}({turn.text})"
    if turn.role == "output":
        return "user", f"{turn.tool} returned:\n{turn.text}"
    return turn.role, turn.text


def _native(turns: Sequence[Turn], has_developer: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.role == "call":
            call = {
                "id": turn.call_id,
                "type": "function",
                "function": {"name": turn.tool, "arguments": _arguments(turn)},
            }
            if messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif turn.role == "output":
            messages.append({"role": "tool", "tool_call_id": turn.call_id, "name": turn.tool, "content": turn.text})
        else:
            role = "system" if turn.role == "developer" and not has_developer else turn.role
            messages.append({"role": role, "content": turn.text})
    return messages


def _arguments(turn: Turn) -> dict[str, Any]:
    """As an object, which templates print; what is none, such as a custom tool's text, under one key."""
    try:
        arguments = json.loads(turn.text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"input": turn.text}


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role as one message."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] += "\n\n" + message["content"]
        else:
            merged.append(dict(message))
    return merged


def _with_question(messages: list[dict[str, Any]], question: str) -> list[dict[str, Any]]:
    if messages and messages[-1]["role"] == "user":
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{question}"}]
    return [*messages, {"role": "user", "content": question}]
