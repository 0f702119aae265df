"""Tools for models whose chat template ignores them: the prompt's own words tell of them, and how calls are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm.answers.prompts.content_forms import PROBE_TOOL, Message, formed, forms_of_template, probed, variables
from vllm.answers.prompts.conversations import headed, joined
from vllm.answers.syntax.call_text import ANY_NUMBER, ANY_WORD, ArgumentText, CallText

_TOLD = """\
You can call functions. Each line is one of them, with the JSON schema of its arguments:
{functions}

To call a function, write its name and its arguments exactly so:
{example}
The result is in the next message. Answer without a call where no function helps."""


@dataclass(frozen=True)
class ToolPrompt:
    """The tools that a prompt tells of where the template ignores them.

    Attributes:
        text: how calls are written, so that the answer's parser reads them.
        tools: that answers may call, in chat's form.
    """

    text: CallText
    tools: Sequence[Mapping[str, Any]] = ()


@lru_cache(maxsize=64)
def shows_tools(template: str) -> bool:
    """Whether a chat template writes the tools of a request."""
    if "tools" not in variables(template):
        return False
    messages = [{"role": "user", "content": formed("x", forms_of_template(template).get("user", "text"))}]
    try:
        return PROBE_TOOL["function"]["name"] in probed(template, messages, [PROBE_TOOL])
    except Exception:  # it asks for more than a conversation
        return True


def with_told_tools(messages: Sequence[Message], prompt: ToolPrompt, has_system: bool) -> list[Message]:
    """Messages that a template without tools can write: the tools in the system's words, or, where the template has no
    such role, in the first user's; earlier calls as texts, and their results as the user's words."""
    result: list[Message] = []
    names: dict[Any, str] = {}
    follows_result = False
    for message in messages:
        calls = [(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ()]
        names |= {call_id: str(function.get("name")) for call_id, function in calls}
        if calls:
            functions = [(str(function.get("name")), function.get("arguments")) for _, function in calls]
            written = call_texts(prompt.text, functions)
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            result.append({**rest, "content": joined(message["content"], written)})
            follows_result = False
            continue
        is_result = message["role"] in ("tool", "function")
        if is_result:
            name = names.get(message.get("tool_call_id")) or message.get("name") or "the function"
            message = {"role": "user", "content": headed(f"Result of {name}:\n", message["content"])}
        if message["role"] == "user" and (is_result or follows_result) and result and result[-1]["role"] == "user":
            # Many templates refuse two in a row.
            message = {**message, "content": joined(result.pop()["content"], message["content"])}
        result.append(dict(message))
        follows_result = is_result
    if prompt.tools:
        _tell(result, _described(prompt), has_system)
    return result


def call_texts(text: CallText, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as `text` says, each a name and arguments, an object."""
    written = text.separator.join(
        text.before + _call(text, name, arguments if isinstance(arguments, Mapping) else {})
        for name, arguments in calls
    )
    return (text.first + written + text.last).replace(ANY_NUMBER, "0").replace(ANY_WORD, "string")


def _call(text: CallText, name: str, arguments: Mapping[str, Any]) -> str:
    form = text.arguments
    if form is None:
        return name + text.between + json.dumps(arguments, ensure_ascii=False) + text.after
    one_by_one = form.separator.join(
        form.before
        + key
        + (form.between_text if isinstance(value, str) else form.between)
        + _value(value, form)
        + form.after
        for key, value in arguments.items()
    )
    return name + text.between + one_by_one + text.after


def _value(value: Any, form: ArgumentText) -> str:
    if form.is_python:
        return repr(value)
    if isinstance(value, str):
        return form.quote + value + form.quote
    if form.quote and isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(each, form)}" for key, each in value.items()) + "}"
    if form.quote and isinstance(value, list):
        return "[" + ",".join(_value(each, form) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _described(prompt: ToolPrompt) -> str:
    functions = [tool.get("function") or tool for tool in prompt.tools]
    known = ("name", "description", "parameters")
    lines = [
        json.dumps({name: each[name] for name in known if each.get(name)}, ensure_ascii=False) for each in functions
    ]
    example = call_texts(prompt.text, [("FUNCTION", {"ARGUMENT": "VALUE"})])
    return _TOLD.format(functions="\n".join(lines), example=example)


def _tell(messages: list[Message], told: str, has_system: bool) -> None:
    """Put the words into the messages, in place."""
    first = messages[0]
    if first["role"] in ("system", "developer"):
        messages[0] = {**first, "content": joined(first["content"], told)}
    elif has_system:
        messages.insert(0, {"role": "system", "content": told})
    else:
        index = next((at for at, each in enumerate(messages) if each["role"] == "user"), None)
        if index is None:
            messages.insert(0, {"role": "user", "content": told})
        else:
            user = messages[index]
            messages[index] = {**user, "content": joined(told, user["content"])}
