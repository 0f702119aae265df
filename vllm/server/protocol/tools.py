"""Fields of requests about tools."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


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
