"""Calls and deltas as objects, for parsers that others write."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from vllm.answers.events import Answer, CallArguments, CallStart, Content, Event, ParsedCall, Reasoning
from vllm.answers.syntax.calls import random_id


class FunctionCall(BaseModel):
    """A function's name and its arguments, a text of JSON."""

    name: str
    arguments: str
    id: str | None = None


class ToolCall(BaseModel):
    """A whole call."""

    id: str = Field(default_factory=lambda: random_id("", 0))
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaFunctionCall(BaseModel):
    """A delta's addition to a function's call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    """A delta's addition to the call of this index."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    """A delta's addition to a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(BaseModel):
    """A whole answer's calls and the text beside them."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


def extracted(answer: Answer) -> ExtractedToolCallInformation:
    """The answer's calls as an object."""
    calls = [
        ToolCall(id=each.id, function=FunctionCall(name=each.name, arguments=each.arguments)) for each in answer.calls
    ]
    return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=answer.content)


def whole_call(call: ParsedCall) -> dict[str, Any]:
    """Chat's entry of `tool_calls`."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def delta_fields(event: Event, include_reasoning: bool = True) -> dict[str, Any] | None:
    """Chat's delta for an event; None where it has none."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text} if include_reasoning else None
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def as_delta(events: list[Event]) -> DeltaMessage | None:
    """One delta of several events; None without any."""
    message = DeltaMessage()
    for event in events:
        if isinstance(event, Content):
            message.content = (message.content or "") + event.text
        elif isinstance(event, Reasoning):
            message.reasoning = (message.reasoning or "") + event.text
        elif isinstance(event, CallStart):
            function = DeltaFunctionCall(name=event.name, arguments="")
            message.tool_calls.append(DeltaToolCall(id=event.id, type="function", index=event.index, function=function))
        elif isinstance(event, CallArguments):
            last = message.tool_calls[-1] if message.tool_calls else None
            if last is None or last.index != event.index:
                last = DeltaToolCall(index=event.index, function=DeltaFunctionCall())
                message.tool_calls.append(last)
            assert last.function is not None
            last.function.arguments = (last.function.arguments or "") + event.text
    has_any = message.content or message.reasoning or message.tool_calls
    return message if has_any else None
