"""Fields of completions and chat that say the form of an answer: OpenAI's and vLLM's older ones. All of them become
SamplingParams.structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from vllm.exceptions import VLLMValidationError, shown
from vllm.params.structured import KINDS, plain_json
from vllm.server.protocol.base import UNREAD, UNREAD_LIST, Object

# Older names, and what each is of StructuredOutputsParams.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}


class FormFields(BaseModel):
    """A part of a body."""

    response_format: Object | None = Field(
        None, description='{"type": "text"}, "json_object", "json_schema" with `json_schema.schema`, "structural_tag".'
    )
    guided_json: Annotated[dict[str, Any] | str | None, UNREAD] = Field(None, description="structured_outputs.json")
    guided_regex: str | None = Field(None, description="structured_outputs.regex")
    guided_choice: Annotated[list[str], UNREAD_LIST] | None = Field(None, description="structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar")
    structural_tag: Annotated[dict[str, Any] | str | None, UNREAD] = Field(
        None, description="structured_outputs.structural_tag"
    )
    guided_whitespace_pattern: str | None = Field(None, description="structured_outputs.whitespace_pattern")

    def form(self, given: Any) -> Any:
        """The value of structured_outputs: `given`, its own value, or what the other fields say.

        Raises:
            VLLMValidationError: two of them say different things, or response_format is of no known type.
        """
        forms = {name: {kind: getattr(self, name)} for name, kind in GUIDED.items() if getattr(self, name) is not None}
        if self.response_format is not None and (form := _of_response_format(self.response_format)) is not None:
            forms["response_format"] = form
        if given:
            forms["structured_outputs"] = given
        if self.guided_whitespace_pattern is not None:
            if not forms:
                message = "guided_whitespace_pattern has no meaning without a schema"
                raise VLLMValidationError(message, "guided_whitespace_pattern", self.guided_whitespace_pattern)
            forms["guided_whitespace_pattern"] = {"whitespace_pattern": self.guided_whitespace_pattern}
        return _joined(forms) if len(forms) > 1 else next(iter(forms.values()), None)


def _joined(forms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Join the forms that fields give: clients of servers of several ages say one thing by each age's name of it."""
    joined: dict[str, Any] = {}
    said: dict[str, tuple[str, tuple[str, str]]] = {}
    for name, form in forms.items():
        for key, value in form.items():
            if value is None:
                continue
            mine = (key, plain_json(value))
            first, other = said.setdefault("kind" if key in KINDS else key, (name, mine))
            if other != mine and first != name:
                raise VLLMValidationError(f"{first} and {name} exclude each other: give one of them", name)
            joined[key] = value
    return joined


def _of_response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        described = value.get("json_schema")
        if described is None:
            message = "response_format.json_schema must be provided where its type is json_schema"
            raise VLLMValidationError(message, "response_format")
        schema = described.get("schema", described.get("json_schema")) if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            message = "response_format.json_schema.schema must be a JSON schema"
            raise VLLMValidationError(message, "response_format", described)
        return {"json": schema}
    if kind == "structural_tag":
        if not value.get("format") and "structures" not in value:
            message = "Invalid response_format structural_tag: it needs a format, or structures and triggers"
            raise VLLMValidationError(message, "response_format")
        return {"structural_tag": {name: each for name, each in value.items() if name != "type"}}
    message = f"response_format.type must be one of text, json_object, json_schema, structural_tag, got {shown(kind)}"
    raise VLLMValidationError(message, "response_format", kind)
