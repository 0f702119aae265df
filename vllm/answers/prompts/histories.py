"""Earlier answers in conversations, as a chat template reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.answers.prompts.conversations import content_text
from vllm.answers.syntax.channels import CHANNEL, MESSAGE, START

_FIELDS = ("reasoning", "reasoning_content", "thinking")

Message = dict[str, Any]


def fitted(messages: Sequence[Message], template: str) -> list[Message]:
    """Messages for a template: the reasoning of the assistant's by every name that templates have for it, and in
    templates of channels one call a message, followed by its result."""
    found = [_with_reasoning(each, bool(re.search(r"\bthinking\b", template))) for each in messages]
    if all(marker in template for marker in (START, CHANNEL, MESSAGE)):
        return _one_by_one([_thought_before_calls(each) for each in found])
    return found


def _with_reasoning(message: Message, has_thinking: bool) -> Message:
    text = next((each for name in _FIELDS if isinstance(each := message.get(name), str) and each), None)
    if message["role"] != "assistant" or text is None:
        return message
    names = _FIELDS if has_thinking else _FIELDS[:-1]
    return {**message, **{name: text for name in names if not message.get(name)}}


def _thought_before_calls(message: Message) -> Message:
    """Templates take one of reasoning and content beside a call, and write either as reasoning."""
    if not message.get("tool_calls") or not message.get("thinking") or not message["content"]:
        return message
    thought = f"{message['thinking']}\n\n{content_text(message['content'])}"
    return {**message, **dict.fromkeys(_FIELDS, thought), "content": ""}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Templates know the last call alone, which a result belongs to."""
    result: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        outputs: list[Message] = []
        while rest and rest[0]["role"] == "tool":
            outputs.append(rest.pop(0))
        for index, call in enumerate(calls):
            head = message if not index else {"role": message["role"], "content": ""}
            own = [each for each in outputs if _id(call) is not None and each.get("tool_call_id") == _id(call)]
            outputs = [each for each in outputs if each not in own]
            result += [{**head, "tool_calls": [call]}, *own]
        result += outputs
    return result


def _id(call: Any) -> Any:
    return call.get("id") if isinstance(call, Mapping) else None
