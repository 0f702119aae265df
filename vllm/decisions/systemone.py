"""Questions in the shape of /v1/systemone: an object of them by id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.decisions.content import check_text, is_list
from vllm.decisions.questions import MAX_LEVELS, choice_options
from vllm.decisions.types import Option, Question
from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import asks_for_nothing, wrong_type

MAX_QUESTIONS, MAX_OPTIONS = 64, 26
"""Limits of this interface; /v1/decisions takes more of both."""

_FIELDS = ("type", "instructions", "criteria")


def parse_systemone(questions: Any, name: str = "questions") -> list[Question]:
    """1 to MAX_QUESTIONS questions, named by their ids. A noul is a predicate.

    Raises:
        VLLMValidationError: a malformed question; names its id.
    """
    if not isinstance(questions, Mapping):
        raise wrong_type(name, questions, "an object of questions by id")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        message = f"{name} must hold at least 1 and at most {MAX_QUESTIONS} questions, got {len(questions)}"
        raise VLLMValidationError(message, name, len(questions))
    return [_question(name, key, value) for key, value in questions.items()]


def _question(name: str, key: Any, value: Any) -> Question:
    if not isinstance(key, str) or not key:
        raise VLLMValidationError(f"{name}: a question's id must be a non-empty string", name, key)
    place = f"{name}.{check_text(name, key)}"
    if not isinstance(value, Mapping):
        raise wrong_type(place, value, "a question: an object with type, instructions and criteria")
    unknown = sorted(str(field) for field, each in value.items() if field not in _FIELDS and not asks_for_nothing(each))
    if unknown:
        message = f"{place} has unknown field(s) {', '.join(unknown)}; known: {', '.join(_FIELDS)}"
        raise VLLMValidationError(message, name, unknown[0])
    kind, criteria = value.get("type"), value.get("criteria")
    if not isinstance(kind, str) or kind not in _READERS:
        message = f"{place}.type: unknown question type {shown(kind)}; one of {', '.join(_READERS)}"
        raise VLLMValidationError(message, f"{place}.type", kind)
    instructions = value.get("instructions")
    text = "" if instructions is None else check_text(f"{place}.instructions", instructions)
    options = _READERS[kind](f"{place}.criteria", criteria)
    return Question("predicate" if kind == "noul" else kind, text, options, key)  # type: ignore[arg-type]


def _choices(place: str, criteria: Any) -> tuple[Option, ...]:
    if not isinstance(criteria, Mapping) or not criteria:
        raise VLLMValidationError(f"{place} must map option names to descriptions or null", place, criteria)
    if len(criteria) > MAX_OPTIONS:
        message = f"{place} has {len(criteria)} options; a choice has at most {MAX_OPTIONS} options here"
        raise VLLMValidationError(f"{message}; /v1/decisions takes more", place, len(criteria))
    names = [check_text(place, option) for option in criteria]
    if not all(option.strip() for option in names):
        raise VLLMValidationError(f"{place} has an option without a name", place, "")
    described = [_description(f"{place}.{option}", text) for option, text in criteria.items()]
    return choice_options(place, names, described)


def _noul(place: str, criteria: Any) -> tuple[Option, ...]:
    if criteria is None:
        criteria = {}
    if not isinstance(criteria, Mapping) or set(criteria) - {"true", "false"}:
        message = f"{place} must be an object with descriptions of true and false at most, or null"
        raise VLLMValidationError(message, place, criteria)
    true, false = (_description(f"{place}.{side}", criteria.get(side)) for side in ("true", "false"))
    return Option(True, "yes", true), Option(False, "no", false)


def _levels(place: str, criteria: Any) -> tuple[Option, ...]:
    if not is_list(criteria) or len(criteria) < 2:
        raise VLLMValidationError(f"{place} must be an ordered list of levels, two or more", place, criteria)
    if len(criteria) > MAX_LEVELS:
        message = f"{place} has {len(criteria)} levels; a score has at most {MAX_LEVELS}"
        raise VLLMValidationError(message, place, len(criteria))
    names = [check_text(f"{place}[{index}]", level) for index, level in enumerate(criteria)]
    if not all(level.strip() for level in names):
        raise VLLMValidationError(f"{place} has a level without a name", place, "")
    return tuple(Option(index, level) for index, level in enumerate(names))


def _description(place: str, value: Any) -> str | None:
    return None if value is None else check_text(place, value)


_READERS = {"choice": _choices, "noul": _noul, "score": _levels}
