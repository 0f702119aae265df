"""Constraints on the form of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any

from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import asks_for_nothing, check_integer, wrong_type

BACKENDS = ("guidance",)
"""Names of what grammars run by."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


# The type of each kind's value, in words and as a test.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema: an object or a text", lambda value: isinstance(value, (str, dict, bool))),
    "regex": ("a text", lambda value: isinstance(value, str)),
    "choice": (
        "a list of one or more texts",
        lambda value: isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value),
    ),
    "grammar": ("a text", lambda value: isinstance(value, str)),
    "json_object": ("True", lambda value: value is True),
    "structural_tag": ("an object or a text of JSON", lambda value: isinstance(value, (str, dict))),
}


def _wrong_value(name: str, value: Any, expected: str) -> VLLMValidationError:
    error = wrong_type(f"structured_outputs.{name}", value, expected)
    return VLLMValidationError(error.args[0], "structured_outputs", value)


class OwnGrammar(str):
    """A grammar that this project has written. A search for what must follow ends in it, so that none of it is drawn.
    No body of a request becomes one."""


@dataclass
class Thinking:
    """Free text that an answer may hold before its form.

    Attributes:
        end: the text that ends it.
        begin: the text that begins it; an answer that begins otherwise has none. "": the prompt has begun it.
        budget: the most tokens that it may have, after which its end is forced; None: any number.
        also_ends: further texts that end it.
        excludes: texts that it does not hold where a form follows.

    Raises:
        VLLMValidationError: a value of the wrong type, no end, or a budget below 0.
    """

    end: str
    begin: str = ""
    budget: int | None = None
    also_ends: Sequence[str] = ()
    excludes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.end, str) or not self.end or not isinstance(self.begin, str):
            raise _wrong_value("thinking", self.end, "an end and a beginning that are texts")
        for more in (self.also_ends, self.excludes):
            if not isinstance(more, (list, tuple)) or not all(isinstance(each, str) and each for each in more):
                raise _wrong_value("thinking", more, "lists of texts for also_ends and excludes")
        if self.budget is not None:
            check_integer("structured_outputs.thinking.budget", self.budget, 0)


@dataclass
class StructuredOutputsParams:
    """The shape of an answer: exactly one of json, regex, choice, grammar, json_object and structural_tag; or, with
    `thinking`, none of them.

    Attributes:
        json: a JSON schema, as a text or an object.
        regex: a regular expression that the whole answer matches.
        choice: the answers to choose from.
        grammar: a context-free grammar in EBNF.
        json_object: any JSON object.
        disable_any_whitespace: JSON without white space.
        disable_additional_properties: JSON objects have the schema's properties only.
        whitespace_pattern: a regular expression of the white space between JSON's parts.
        structural_tag: tags and the schemas of what they hold, as a text of JSON.
        thinking: what comes before the form; or its fields in a mapping.

    Raises:
        VLLMValidationError: none of the kinds, or several, or a value of the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        if isinstance(self.thinking, Mapping):
            if not {"end"} <= self.thinking.keys() <= {each.name for each in fields(Thinking)}:
                raise _wrong_value("thinking", self.thinking, "an object with end, begin and budget")
            self.thinking = Thinking(**self.thinking)
        if not isinstance(self.thinking, (Thinking, NoneType)):
            raise _wrong_value("thinking", self.thinking, "a Thinking")
        given = [name for name in KINDS if getattr(self, name) is not None]
        if not given and self.thinking is not None:
            return
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise VLLMValidationError(
                f"exactly one of {', '.join(KINDS)} must be given, got {found}", "structured_outputs"
            )
        self._check_types()

    def _check_types(self) -> None:
        if (make_schema := getattr(self.json, "model_json_schema", None)) is not None:
            self.json = make_schema()
        kind, value = self.kind
        expected, holds = _TYPES[kind]
        if not holds(value):
            raise _wrong_value(kind, value, expected)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_value(name, getattr(self, name), "True or False")
        if not isinstance(self.whitespace_pattern, (str, NoneType)):
            raise _wrong_value("whitespace_pattern", self.whitespace_pattern, "a text")

    @property
    def kind(self) -> tuple[str, Any]:
        """The kind of constraint that is set, and its value; "thinking" where there is no other."""
        kinds = (*KINDS, "thinking")
        return next((name, value) for name in kinds if (value := getattr(self, name)) is not None)

    def all_constraints_none(self) -> bool:
        """Whether no kind of constraint is set."""
        return all(getattr(self, name) is None for name in KINDS)

    def all_non_structural_tag_constraints_none(self) -> bool:
        """Whether no kind but, possibly, structural_tag is set."""
        return all(getattr(self, name) is None for name in KINDS if name != "structural_tag")


@dataclass
class GuidedDecodingParams:
    """StructuredOutputsParams under its older name, which may hold no kind at all, and a backend's name.

    Raises:
        VLLMValidationError: several kinds.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise VLLMValidationError(
                f"at most one of {', '.join(KINDS)} must be given, got {' and '.join(given)}", "guided_decoding"
            )

    def all_constraints_none(self) -> bool:
        """Whether no kind of constraint is set."""
        return all(getattr(self, name) is None for name in KINDS)

    @staticmethod
    def from_optional(
        json: dict[str, Any] | Any | str | None = None,
        regex: str | None = None,
        choice: list[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ) -> GuidedDecodingParams | None:
        """The parameters, or None when no kind is given. A pydantic class stands for its schema."""
        if all(kind is None for kind in (json, regex, choice, grammar, json_object, structural_tag)):
            return None
        schema = getattr(json, "model_json_schema", None)
        return GuidedDecodingParams(
            json=schema() if schema is not None else json,
            regex=regex,
            choice=choice,
            grammar=grammar,
            json_object=json_object,
            backend=backend,
            whitespace_pattern=whitespace_pattern,
            structural_tag=structural_tag,
        )


@dataclass
class RepetitionDetectionParams:
    """When a sequence that repeats itself is to end: a pattern of min_pattern_size to max_pattern_size tokens, so many
    times in a row. With max_pattern_size 0, never.

    Raises:
        VLLMValidationError: sizes in the wrong order, or a count below 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if self.max_pattern_size < 0 or not 0 <= self.min_pattern_size <= max(self.max_pattern_size, 0):
            raise VLLMValidationError(
                "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size",
                "min_pattern_size",
                self.min_pattern_size,
            )
        if self.max_pattern_size and self.min_count < 2:
            raise VLLMValidationError("min_count must be at least 2", "min_count", self.min_count)


def check_repetition_detection(value: Any) -> RepetitionDetectionParams | None:
    """The parameters, also from a mapping of their fields; None where nothing is to be found.

    Raises:
        VLLMValidationError: another type, an unknown field, a number that is none or out of range.
    """
    name = "repetition_detection"
    given = vars(value) if isinstance(value, RepetitionDetectionParams) else value
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise wrong_type(name, value, "a RepetitionDetectionParams")
    known = _known_names(name, given, RepetitionDetectionParams)
    numbers = {key: check_integer(key, each, 0, 2**31 - 1) for key, each in given.items() if key in known}
    params = RepetitionDetectionParams(**numbers)
    return params if params.max_pattern_size else None


def _known_names(name: str, given: Mapping[str, Any], kind: type) -> list[str]:
    """The fields of a class. VLLMValidationError: another one is given, and asks for something."""
    known = [item.name for item in fields(kind)]
    for key, each in given.items():
        if key not in known and not asks_for_nothing(each):
            raise VLLMValidationError(f"{name} has no field {shown(key)}; it has {', '.join(known)}", name, key)
    return known


def is_neutral(params: StructuredOutputsParams | GuidedDecodingParams | None) -> bool:
    """Whether no constraint is set."""
    return params is None or all(getattr(params, name) is None for name in KINDS)


def check_structured(name: str, value: Any) -> StructuredOutputsParams | None:
    """The parameters, also from a mapping of their fields or their older class; None where no kind is set.

    Raises:
        VLLMValidationError: another type, an unknown field, several kinds, or a value of the wrong type.
    """
    if isinstance(value, GuidedDecodingParams):
        if value.backend not in (None, "auto", *BACKENDS):
            raise VLLMValidationError(
                f"{name}.backend must be one of auto, {', '.join(BACKENDS)}, got {value.backend!r}", name, value.backend
            )
        known = {item.name for item in fields(StructuredOutputsParams)}
        value = {key: each for key, each in vars(value).items() if key in known}
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "a StructuredOutputsParams")
    names = _known_names(name, value, StructuredOutputsParams)
    given = {key: value[key] for key in names if value.get(key) is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    return StructuredOutputsParams(**given) if any(kind in given for kind in (*KINDS, "thinking")) else None


def plain_json(value: Any) -> str:
    """A value of JSON, or a text of one, as a text that is the same for equal values."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return json.dumps(value)
    return json.dumps(value, sort_keys=True)
