"""Checks of single values: each gives the value in its normal form, or an error that names field, value and limit."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown

MAX_LIST_LENGTH = 2**20
"""Longest list that is looked at; no vocabulary is as large, and no context that memory holds."""

MAX_INTEGER = 2**63 - 1
"""Limit of integers that have no other."""


def wrong_type(name: str, value: Any, expected: str) -> VLLMValidationError:
    """The error of a value that is not `expected`."""
    return VLLMValidationError(f"{name} must be {expected}, got {type(value).__name__}", parameter=name, value=value)


def check_boolean(name: str, value: Any) -> None:
    """Accepts Python's and numpy's bools."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, value, "a bool")


def check_integer(name: str, value: Any, low: int, high: int = MAX_INTEGER) -> int:
    """An integer in [low, high]; bools are none."""
    if isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, value, "an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong_type(name, value, "an integer") from None
    if not low <= number <= high:
        limits = f"at least {low}" if high == MAX_INTEGER and number < low else f"between {low} and {high}"
        raise VLLMValidationError(f"{name} must be {limits}, got {shown(number)}", parameter=name, value=value)
    return number


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """A finite number in [low, high], or (low, high] with `open_low`; bools are none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    too_low = number <= low if open_low else number < low
    if math.isnan(number) or math.isinf(number) or too_low or number > high:
        left = "(" if open_low else "["
        right = ")" if math.isinf(high) else "]"
        raise VLLMValidationError(
            f"{name} must be in {left}{low:g}, {high:g}{right}, got {number:g}", parameter=name, value=value
        )
    return number


def check_list(name: str, values: Any, expected: str) -> list[Any]:
    """The elements of what is iterable, at most MAX_LIST_LENGTH; of arrays and tensors as Python's own types. Texts
    and dicts are no lists, nor are arrays without a dimension."""
    elements = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(elements, (str, bytes, dict)) or not isinstance(elements, Iterable):
        raise wrong_type(name, values, expected)
    # An iterator may have no end.
    result = list(itertools.islice(elements, MAX_LIST_LENGTH + 1))
    if len(result) > MAX_LIST_LENGTH:
        raise VLLMValidationError(
            f"{name} has more than {MAX_LIST_LENGTH} entries", parameter=name, value=type(values).__name__
        )
    return result


def check_token_ids(name: str, values: Any) -> list[int]:
    """A list of distinct non-negative Python ints in the order given. Lists, tuples, sets, ranges and one-dimensional
    integer arrays (or tensors) are accepted; bools, floats and strings are not, nor are such elements."""
    if values is None:
        return []
    return list(dict.fromkeys(check_id_sequence(name, values)))


def check_id_sequence(name: str, values: Any) -> list[int]:
    """The same with repeated ids kept, and None an error."""
    ids = [check_token_id(name, element) for element in check_list(name, values, "a list of integers")]
    if ids and min(ids) < 0:
        raise VLLMValidationError(f"{name} must not be negative, got {shown(min(ids))}", parameter=name, value=min(ids))
    return ids


def check_token_id_rows(name: str, values: Any) -> list[int] | list[list[int]]:
    """Either one list of ids, or a list of such lists. In a two-dimensional integer array -1 fills up short rows."""
    if getattr(values, "ndim", 1) == 2:
        values = [[element for element in row if element != -1] for row in values.tolist()]
    elements = check_list(name, values, "a list of integers, or a list of such lists")
    if not any(isinstance(element, Iterable) and not isinstance(element, (str, bytes)) for element in elements):
        return check_token_ids(name, elements)
    return [check_token_ids(f"{name}[{index}]", element) for index, element in enumerate(elements)]


def check_texts(name: str, values: Any) -> list[str]:
    """A list of non-empty texts; one string is a list of one."""
    if values is None:
        return []
    if isinstance(values, str):
        values = [values]
    texts = check_list(name, values, "a string or a list of strings")
    for text in texts:
        if not isinstance(text, str):
            raise wrong_type(name, text, "a string or a list of strings")
        if not text:
            raise VLLMValidationError(f"{name} cannot contain an empty string", parameter=name, value=text)
        check_encodable(name, text)
    return texts


def check_encodable(name: str, text: str) -> None:
    """The text has no lone surrogate, which UTF-8 could not write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(
            f"{name} holds a lone surrogate, which is not text", parameter=name, value=text
        ) from None


def check_processors(name: str, values: Any) -> list[Callable[..., Any]]:
    """A list of callables that take (logits), (output ids, logits) or (prompt ids, output ids, logits)."""
    processors = check_list(name, values, "a list of callables")
    for processor in processors:
        if not callable(processor):
            raise wrong_type(name, processor, "a list of callables")
        if num_arguments(processor) not in (1, 2, 3):
            raise VLLMValidationError(
                f"{name} must take (logits), (output_ids, logits) or (prompt_ids, output_ids, logits); "
                f"{processor!r} takes another number of arguments",
                parameter=name,
                value=repr(processor),
            )
    return processors


def num_arguments(function: Callable[..., Any]) -> int | None:
    """How many positional arguments the function needs, or 2 when it takes any number; None when it cannot be called
    with positional arguments alone or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    required = [item for item in parameters if item.default is kinds.empty]
    if any(item.kind is kinds.KEYWORD_ONLY for item in required):
        return None
    count = sum(item.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for item in required)
    takes_any = any(item.kind is kinds.VAR_POSITIONAL for item in required)
    return max(count, 2) if takes_any else count


def check_token_id(name: str, value: Any) -> int:
    """A Python or numpy integer, whatever its range."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise VLLMValidationError(f"{name} must hold integers, got bool {value!r}", parameter=name, value=value)
    try:
        return operator.index(value)
    except TypeError:
        raise VLLMValidationError(
            f"{name} must hold integers, got {type(value).__name__} {shown(value)}", parameter=name, value=value
        ) from None


def check_bias_key(key: Any) -> int:
    """A token id that is a key of `logit_bias`."""
    # JSON objects have string keys only, so digits are accepted as OpenAI's clients send them.
    # No id is longer, and Python reads no integer of some thousands of digits.
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20:
        return int(key)
    token_id = check_token_id("logit_bias", key)
    if token_id < 0:
        raise VLLMValidationError(
            f"logit_bias token ids must not be negative, got {shown(token_id)}", parameter="logit_bias", value=key
        )
    return token_id


def check_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    """All ids (none negative) are below `vocab_size`."""
    if not ids:
        return
    highest = max(ids)
    if highest >= vocab_size:
        raise VLLMValidationError(
            f"{name} must be in [0, {vocab_size}), the model's vocabulary; got {shown(highest)}",
            parameter=name,
            value=highest,
        )
