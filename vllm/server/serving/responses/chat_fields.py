"""A response's body as one of chat."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import shown
from vllm.server.errors import ApiError
from vllm.server.protocol.generation import GenerationFields
from vllm.server.protocol.responses import ResponsesRequest
from vllm.server.serving.responses.input_items import check_returned

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
"""The names that fields of chat have here, for errors."""

# OpenAI's `include`: values for items that do not occur here change nothing.
_INCLUDABLE = frozenset(
    "message.output_text.logprobs reasoning.encrypted_content file_search_call.results web_search_call.results "
    "web_search_call.action.sources message.input_image.image_url computer_call_output.output.image_url "
    "code_interpreter_call.outputs".split()
)

# Fields of chat that a response has by another name, or not at all: those values that ask for nothing, and why.
_OTHERWISE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "a response is one answer"),
    "best_of": ((1,), "a response is one answer"),
    "use_beam_search": ((False,), "a response is one answer; /v1/chat/completions searches"),
    "max_tokens": ((), "it is max_output_tokens here"),
    "response_format": ((), "it is text.format here"),
    "kv_transfer_params": (({},), "a response has none; completions and chat answer with them"),
}
# Tools that clients run, whose calls are texts or actions.
_CLIENTS_TOOLS = ("custom", "local_shell", "shell", "apply_patch", "computer", "computer_use_preview")
_NOT_PASSED = (*_OTHERWISE, "stream_options", "request_id", "model")
_OWN = ("parallel_tool_calls", "chat_template", "chat_template_kwargs", "stream")


def check_fields(body: ResponsesRequest) -> None:
    """Raises ApiError for a field that asks for what a response is not."""
    for name, (neutral, reason) in _OTHERWISE.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} cannot be honoured: {reason}; got {shown(value)}", name, "unsupported_field")
    for index, name in enumerate(body.include or ()):
        if not isinstance(name, str) or name not in _INCLUDABLE:
            message = f"include[{index}] must be one of {', '.join(sorted(_INCLUDABLE))}, got {shown(name)}"
            raise ApiError(400, message, "include", "invalid_value")
    for name in ("instructions", "metadata", "tools", "tool_choice", "text", "reasoning"):
        value = getattr(body, name)
        if value is not None:
            check_returned(name, value)


def chat_fields(body: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a ChatCompletionRequest for `messages`; ApiError as `check_fields`."""
    names = [name for name in GenerationFields.model_fields if name not in _NOT_PASSED]
    text, reasoning = body.text, body.reasoning
    fields = {name: getattr(body, name) for name in (*names, *_OWN)}
    fields |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if body.num_topk is not None else None,
        "top_logprobs": body.top_logprobs,
        "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _chat_choice(body.tool_choice),
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "verbosity": None if text is None else text.verbosity,
        "response_format": None if text is None else _chat_format(text.format),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _chat_tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise ApiError(400, f"{place} must be an object, got {shown(tool)}", "tools", "invalid_type")
    if tool.get("type") != "function":
        message = f"{place} is of type {shown(tool.get('type'))}: {_instead_of(tool.get('type'))}"
        raise ApiError(400, message, "tools", "unsupported_value")
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, f"{place}.name must be a text, got {shown(tool.get('name'))}", "tools", "invalid_type")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _instead_of(kind: Any) -> str:
    """The advice for a tool that is no function."""
    if kind in _CLIENTS_TOOLS:
        return "its calls are no JSON, as those made here are; give a function with a text as its argument"
    return "this server runs no tools; give functions, which the client calls"


def _chat_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ApiError(400, f"tool_choice.tools must be a list of tools, got {shown(tools)}", "tool_choice")
        named = [{"type": tool.get("type"), "function": {"name": tool.get("name")}} for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    message = f"tool_choice cannot be honoured: {_instead_of(choice.get('type'))}; got {shown(choice)}"
    raise ApiError(400, message, "tool_choice", "unsupported_value")


def _chat_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("schema"), dict):
        message = f"text.format.schema must be a JSON schema, got {shown(given.get('schema'))}"
        raise ApiError(400, message, "text.format", "invalid_value")
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}
