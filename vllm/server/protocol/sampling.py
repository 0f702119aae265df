"""SamplingParams in bodies: models with the fields that an endpoint takes, made of their rows, and other names of the
form of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, create_model

from vllm.exceptions import VLLMValidationError, shown
from vllm.params.sampling_fields import At, SamplingField
from vllm.params.structured import KINDS, RepetitionDetectionParams, StructuredOutputsParams, plain_json
from vllm.sampling_params import FIELDS, SamplingParams
from vllm.server.protocol.base import (
    UNREAD,
    UNREAD_LIST,
    IdRows,
    LogitBias,
    Object,
    RequestModel,
    Text,
    TokenId,
)
from vllm.utils.checks import check_token_ids
from vllm.utils.npy import array_of_npy

_TABLE = Sequence[int | list[int]] | None
_TABLES = frozenset(name for name in FIELDS if SamplingParams.__annotations__[name] == _TABLE)
"""Fields whose arrays may also come as .npy files."""


class RepetitionDetection(RequestModel):
    """When a sequence that repeats itself is to end: a pattern of so many tokens, so many times in a row."""

    ACCEPTED: ClassVar[tuple[str, ...]] = ()

    max_pattern_size: int | None = Field(None, ge=0, le=2**31 - 1, description="0: never.")
    min_pattern_size: int | None = Field(None, ge=0, le=2**31 - 1)
    min_count: int | None = Field(None, ge=0, le=2**31 - 1)


def _json_types(row: SamplingField) -> dict[Any, Any]:
    """JSON's types for some of Python. SamplingParams checks the values."""
    texts = Text | Annotated[list[Text], Field(max_length=row.most)] | None
    ids = Annotated[list[TokenId], Field(min_length=row.least), UNREAD_LIST]
    return {
        str | list[str] | None: Annotated[texts, UNREAD],
        list[str] | None: Annotated[texts, UNREAD],
        list[int] | None: ids | None,
        _TABLE: IdRows | None,
        dict[int, float] | None: LogitBias | None,
        dict[str, Any] | None: Object | None,
        bool | Literal["never"]: Annotated[bool | Literal["never"] | None, UNREAD],
        RepetitionDetectionParams | None: RepetitionDetection | None,
        StructuredOutputsParams | None: Object | None,
    }


def _field(row: SamplingField, default: Any) -> Any:
    options = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**options, description=row.about)


class SamplingBody(RequestModel):
    """Base of the models. Fields left out have the model's defaults, or else vLLM's."""

    SAMPLING_FIELDS: ClassVar[tuple[str, ...]] = ()
    ALIASES: ClassVar[Mapping[str, str]] = {}

    def sampling_fields(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """SamplingParams' fields as given; `defaults` are those of fields left out. Stop tokens of both count."""
        fields = dict(defaults)
        for name in self.SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                fields[name] = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
                if name in _TABLES and isinstance(value, str):
                    fields[name] = array_of_npy(name, value)
        for alias, name in self.ALIASES.items():
            value, other = getattr(self, alias), getattr(self, name)
            if value is not None:
                if other not in (None, value):
                    raise VLLMValidationError(f"{alias}={value} contradicts {name}={other}", alias, value)
                fields[name] = value
        if defaults.get("stop_token_ids"):
            given = check_token_ids("stop_token_ids", fields["stop_token_ids"])
            fields["stop_token_ids"] = [*given, *defaults["stop_token_ids"]]
        return fields


def sampling_body(name: str, at: At, **defaults: Any) -> Any:
    """A SamplingBody with the fields that an endpoint takes; their default is None, or what `defaults` have or make."""
    types = SamplingParams.__annotations__
    rows = {name: row for name, row in FIELDS.items() if at in row.at}
    fields: dict[str, Any] = {
        name: (_json_types(row).get(types[name], types[name] | None), _field(row, defaults.get(name)))
        for name, row in rows.items()
    }
    aliases = {row.alias: name for name, row in rows.items() if row.alias is not None}
    for alias, own in aliases.items():
        fields[alias] = (fields[own][0], Field(None, description=f"Another name of {own}."))
    body: Any = create_model(name, __base__=SamplingBody, __module__=__name__, **fields)
    body.SAMPLING_FIELDS = tuple(rows)
    body.ALIASES = aliases
    return body


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

    @contextmanager
    def named_form(self) -> Iterator[None]:
        """Errors about structured_outputs as those of the field that says what it is."""
        try:
            yield
        except VLLMValidationError as error:
            names = [name for name in (*GUIDED, "response_format") if getattr(self, name) is not None]
            if error.parameter != "structured_outputs" or len(names) != 1 or getattr(self, "structured_outputs", None):
                raise
            (name,) = names
            kind = "json" if name == "response_format" else GUIDED[name]
            place = "response_format.json_schema.schema" if name == "response_format" else name
            # A grammar of calls is of the tools, not of this field.
            said = f"structured_outputs.{kind}"
            if said not in error.args[0]:
                raise
            raise VLLMValidationError(error.args[0].replace(said, place, 1), name, error.value) from None


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
