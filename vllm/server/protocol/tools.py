"""Fields of requests about tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from vllm.server.protocol.base import UNREAD, UNREAD_LIST


class FunctionDefinition(BaseModel):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatCompletionToolsParam(BaseModel):
    """A tool."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(BaseModel):
    """A function by its name."""

    name: str


class ChatCompletionNamedToolChoiceParam(BaseModel):
    """The one tool that is to be called."""

    function: ChatCompletionNamedFunction
    type: Literal["function"] = Field(default="function")


class ToolFields(BaseModel):
    """A part of a body: what an answer may call."""

    tools: Annotated[list[dict[str, Any]], UNREAD_LIST] | None = Field(
        None, description='Functions that the model may call: {"type": "function", "function": {name, parameters ...}}.'
    )
    tool_choice: Annotated[Literal["none", "auto", "required"] | dict[str, Any] | None, UNREAD] = Field(
        None, description="Whether it calls some; an object names the one that it must call, or those it may."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")
    functions: Annotated[list[dict[str, Any]], UNREAD_LIST] | None = Field(None, description="An older name of tools.")
    function_call: Annotated[Literal["none", "auto"] | dict[str, Any] | None, UNREAD] = Field(
        None, description="An older name of tool_choice."
    )
