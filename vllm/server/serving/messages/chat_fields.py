"""A body of /v1/messages as one of chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vllm.answers.prompts.conversations import content_text, has_pictures, picture_part
from vllm.exceptions import VLLMValidationError, shown
from vllm.server.errors import ApiError
from vllm.server.protocol.generation import GenerationFields
from vllm.server.protocol.messages import MessagesCountRequest
from vllm.utils.checks import asks_for_nothing

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
}
"""The names that fields of chat have here, for errors."""

# Fields of chat that have another name here, or do not occur: those values that ask for nothing, and why.
_OTHERWISE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "a message is one answer"),
    "best_of": ((1,), "a message is one answer"),
    "use_beam_search": ((False,), "a message is one answer; /v1/chat/completions searches"),
    "stop": (([],), "it is stop_sequences here"),
    "response_format": ((), "it is output_config.format here"),
    "kv_transfer_params": (({},), "a message has none; completions and chat answer with them"),
}
_NOT_PASSED = (*_OTHERWISE, "stream_options", "request_id", "model", "max_tokens")
_OWN = ("logprobs", "top_logprobs", "chat_template", "stream")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Block = dict[str, Any]


def chat_fields(body: MessagesCountRequest) -> dict[str, Any]:
    """The fields of a ChatCompletionRequest. Raises ApiError for what cannot be honoured."""
    for name, (neutral, reason) in _OTHERWISE.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} cannot be honoured: {reason}; got {shown(value)}", name, "unsupported_field")
    messages = _messages(body)
    fields = {name: getattr(body, name) for name in GenerationFields.model_fields if name not in _NOT_PASSED}
    fields |= {name: getattr(body, name) for name in _OWN}
    fields |= {
        "messages": messages,
        "stop": body.stop_sequences,
        "max_completion_tokens": body.max_tokens,
        "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        **_tool_choice(body.tool_choice),
        **_output_fields(body),
        **_thinking_fields(body),
    }
    if messages[-1]["role"] == "assistant":
        # Its text is the beginning of the answer.
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return {name: value for name, value in fields.items() if value is not None}


def _messages(body: MessagesCountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None and (text := _texts(body.system, "system")):
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(body.messages):
        place, role = f"messages[{index}]", message.get("role")
        if not isinstance(role, str) or role not in _ADDERS:
            raise _bad(f"{place}.role", f"must be one of {', '.join(_ADDERS)}, got {shown(role)}")
        content: Any = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise _bad(f"{place}.content", f"must be a text or a list of blocks, got {shown(content)}")
        _ADDERS[role](messages, blocks, f"{place}.content")
    if not messages or all(message["role"] == "system" for message in messages):
        raise _bad("messages", "must have a message of the user's")
    return messages


def _add_user(messages: list[dict[str, Any]], blocks: list[Block], place: str) -> None:
    """Results of tools are messages of their own, before the user's text."""
    parts: list[Block] = []
    for index, block in enumerate(blocks):
        where = f"{place}[{index}]"
        if block.get("type") == "tool_result":
            call_id = _text(block, "tool_use_id", where)
            content = "" if block.get("content") is None else _content(block["content"], f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            parts.append(_part(block, where))
    if parts or not blocks:
        messages.append({"role": "user", "content": _joined(parts)})


def _add_assistant(messages: list[dict[str, Any]], blocks: list[Block], place: str) -> None:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where, kind = f"{place}[{index}]", block.get("type")
        if kind == "thinking":
            thoughts.append(_text(block, "thinking", where))
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise _bad(f"{where}.input", f"must be an object, got {shown(given)}")
            function = {"name": _text(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": _text(block, "id", where), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # nobody but who wrote it can read it
            texts.append(_block_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message |= dict.fromkeys(("reasoning", "reasoning_content"), "\n".join(thoughts))
    if calls:
        message["tool_calls"] = calls
    messages.append(message)


def _add_system(messages: list[dict[str, Any]], blocks: list[Block], place: str) -> None:
    messages.append({"role": "system", "content": _texts(blocks, place)})


_ADDERS: dict[str, Callable[[list[dict[str, Any]], list[Block], str], None]] = {
    "user": _add_user,
    "assistant": _add_assistant,
    "system": _add_system,
}


def _texts(content: Any, place: str) -> str:
    """A text, or that of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _bad(place, f"must be a text or a list of blocks, got {shown(content)}")
    return "\n".join(_block_text(block, f"{place}[{index}]") for index, block in enumerate(content))


def _content(content: Any, place: str) -> str | list[Block]:
    """As `_texts`; with pictures a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _bad(place, f"must be a text or a list of blocks, got {shown(content)}")
    return _joined([_part(block, f"{place}[{index}]") for index, block in enumerate(content)])


def _joined(parts: list[Block]) -> str | list[Block]:
    """Parts, or their texts if they are nothing else."""
    return parts if has_pictures(parts) else content_text(parts)


def _part(block: Block, place: str) -> Block:
    """A block as chat has it: a text, or a picture."""
    if block.get("type") == "image":
        try:
            picture = picture_part(place, block)
        except VLLMValidationError as error:
            raise ApiError(400, str(error.args[0]), "messages", "invalid_value") from None
        assert picture is not None
        return picture
    return {"type": "text", "text": _block_text(block, place)}


def _block_text(block: Block, place: str) -> str:
    if block.get("type") != "text":
        problem = f"is of type {shown(block.get('type'))}, and only texts and pictures are read here"
        raise _bad(place, problem, "unsupported_value")
    return _text(block, "text", place)


def _text(block: Block, name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(f"{place}.{name}", f"must be a text, got {shown(value)}")
    return value


def _chat_tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _bad(place, f"must be an object, got {shown(tool)}")
    if tool.get("type", "custom") not in ("custom", None):
        problem = f"is of type {shown(tool['type'])}: give tools with an input_schema, which the client calls"
        raise _bad(place, problem, "unsupported_value")
    if not isinstance(tool.get("input_schema"), dict):
        raise _bad(f"{place}.input_schema", f"must be a JSON schema, got {shown(tool.get('input_schema'))}")
    function = {"name": _text(tool, "name", place), "parameters": tool["input_schema"]}
    more = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **more}}


def _tool_choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        named = {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}
        return {"tool_choice": named, **fields}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise _bad("tool_choice.type", f"must be auto, any, tool or none, got {shown(kind)}")
    return {"tool_choice": _CHOICES[kind], **fields}


def _output_fields(body: MessagesCountRequest) -> dict[str, Any]:
    config = body.output_config or {}
    unknown = next(
        (name for name, each in config.items() if name not in ("effort", "format") and not asks_for_nothing(each)), None
    )
    if unknown is not None:
        raise _bad(f"output_config.{unknown}", "is no field that is known here", "unknown_field")
    form = config.get("format", body.output_format)
    fields: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    if form is not None:
        is_schema = (
            isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("schema"), dict)
        )
        if not is_schema:
            raise _bad("output_config.format", f"must be of type json_schema, with a schema, got {shown(form)}")
        schema = {"name": "output", "schema": form["schema"], "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _thinking_fields(body: MessagesCountRequest) -> dict[str, Any]:
    """The template's variable, by the name that most have for it, and the budget."""
    given, variables = body.thinking, dict(body.chat_template_kwargs or {})
    fields: dict[str, Any] = {}
    if given is not None:
        kind = given.get("type")
        if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
            raise _bad("thinking.type", f"must be enabled, adaptive, between_tools or disabled, got {shown(kind)}")
        variables.setdefault("enable_thinking", kind != "disabled")
        if kind == "enabled":
            budget = given.get("budget_tokens")
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                raise _bad("thinking.budget_tokens", f"must be a positive integer, got {shown(budget)}")
            fields["thinking_token_budget"] = budget
    return {**fields, "chat_template_kwargs": variables or None}


def _bad(place: str, problem: str, code: str = "invalid_value") -> ApiError:
    """An error of what is at `place`, as messages[0].content; the field is what stands before the first bracket."""
    return ApiError(400, f"{place} {problem}", place.partition("[")[0], code)
