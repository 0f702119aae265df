"""OpenAI's question objects to Question, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.decisions.content import check_literal, check_object, check_text, content_text, is_list
from vllm.decisions.types import Option, Question
from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import wrong_type

MAX_QUESTIONS = 200
MIN_CHOICES, MAX_CHOICES = 2, 255
MIN_LEVELS, MAX_LEVELS = 2, 10
MAX_NAME = 256
"""Limits of the interface; the last in characters."""

_PARTS = ("input_text", "input_json")
_TYPES = ("predicate", "choice", "score")
_PREDICATE = (Option(True, "true"), Option(False, "false"))


def parse_questions(questions: Any, name: str = "questions") -> list[Question]:
    """1 to MAX_QUESTIONS questions, each a Question or an object as OpenAI's SDK sends it.

    Raises:
        VLLMValidationError: a malformed question; names its place, the value and the limit.
    """
    if isinstance(questions, (Question, Mapping)):
        questions = [questions]
    if not is_list(questions):
        raise wrong_type(name, questions, "a list of questions")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        least = f"at least 1 and at most {MAX_QUESTIONS}"
        raise VLLMValidationError(f"{name} must hold {least}, got {len(questions)}", name, len(questions))
    return [
        each if isinstance(each, Question) else parse_question(f"{name}[{index}]", each)
        for index, each in enumerate(questions)
    ]


def parse_question(place: str, value: Any) -> Question:
    """One question; `place` names it in errors."""
    if not isinstance(value, Mapping):
        raise wrong_type(place, value, "a question: an object with type and instructions")
    if "type" not in value:
        raise VLLMValidationError(f"{place}.type is required", f"{place}.type")
    kind = value["type"]
    check_literal(f"{place}.type", kind, _TYPES)
    options_key = {"choice": ("choices",), "score": ("levels",)}.get(kind, ())
    check_object(place, value, ("type", "instructions", *options_key), ("name",))
    instructions = content_text(f"{place}.instructions", value["instructions"], _PARTS)
    options: tuple[Option, ...] = _PREDICATE
    if kind == "choice":
        options = parse_choices(f"{place}.choices", value["choices"])
    elif kind == "score":
        options = parse_levels(f"{place}.levels", value["levels"])
    return Question(kind, instructions, options, _name(f"{place}.name", value))


def parse_choices(place: str, value: Any) -> tuple[Option, ...]:
    """MIN_CHOICES to MAX_CHOICES different values, texts or booleans."""
    choices = _list_of(place, value, MIN_CHOICES, MAX_CHOICES, "choices")
    values, descriptions = [], []
    for index, choice in enumerate(choices):
        own = f"{place}[{index}]"
        check_object(own, choice, ("value",), ("description",))
        values.append(_choice_value(f"{own}.value", choice["value"]))
        descriptions.append(_description(own, choice))
    return choice_options(place, values, descriptions)


def choice_options(place: str, values: Sequence[str | bool], descriptions: Sequence[str | None]) -> tuple[Option, ...]:
    """Options of checked values, which must differ; `True` and "true" do."""
    seen: dict[tuple[type, str | bool], int] = {}
    for index, value in enumerate(values):
        first = seen.setdefault((type(value), value), index)
        if first != index:
            raise VLLMValidationError(
                f"{place}[{first}] and {place}[{index}] have the same value {value!r}", place, value
            )
    booleans = {str(value).lower() for value in values if isinstance(value, bool)}
    # Beside the boolean of the same text, a text is shown in quotes, and so is then what has quotes of its own.
    has_twins = not booleans.isdisjoint(value for value in values if isinstance(value, str))
    options = []
    for value, description in zip(values, descriptions, strict=True):
        if isinstance(value, bool):
            text = str(value).lower()
        elif has_twins and (value in booleans or value.startswith('"')):
            text = json.dumps(value, ensure_ascii=False)
        else:
            text = value
        options.append(Option(value, text, description))
    return tuple(options)


def parse_levels(place: str, value: Any) -> tuple[Option, ...]:
    """MIN_LEVELS to MAX_LEVELS levels, lowest first; their labels may be equal."""
    levels = _list_of(place, value, MIN_LEVELS, MAX_LEVELS, "levels")
    options = []
    for index, level in enumerate(levels):
        own = f"{place}[{index}]"
        check_object(own, level, ("label",), ("description",))
        label = check_text(f"{own}.label", level["label"])
        if not label.strip():
            raise VLLMValidationError(f"{own}.label must not be empty", f"{own}.label", label)
        options.append(Option(index, label, _description(own, level)))
    return tuple(options)


def _list_of(place: str, value: Any, low: int, high: int, what: str) -> Sequence[Any]:
    if not is_list(value):
        raise wrong_type(place, value, f"a list of {low} to {high} {what}")
    if not low <= len(value) <= high:
        message = f"{place} must hold at least {low} and at most {high} {what}, got {len(value)}"
        raise VLLMValidationError(message, place, len(value))
    return value


def _choice_value(place: str, value: Any) -> str | bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise VLLMValidationError(f"{place} must be a string or a boolean, got {shown(value)}", place, value)
    check_text(place, value)
    if not value.strip():
        raise VLLMValidationError(f"{place} must not be empty", place, value)
    return value


def _description(place: str, value: Mapping[str, Any]) -> str | None:
    given = value.get("description")
    return None if given is None else check_text(f"{place}.description", given)


def _name(place: str, value: Mapping[str, Any]) -> str | None:
    if "name" not in value:
        return None
    name = value["name"]
    if not isinstance(name, str):
        raise VLLMValidationError(f"{place}: name must be a string, got {shown(name)}", place, name)
    check_text(place, name)
    if not name.strip():
        raise VLLMValidationError(f"{place} must not be empty", place, name)
    if len(name) > MAX_NAME:
        raise VLLMValidationError(f"{place} must have at most {MAX_NAME} characters, got {len(name)}", place, len(name))
    return name
