"""Checks of single values: each returns the value normalised, or raises an error with field, value and limit."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

MAX_LIST_LENGTH = 2**20
"""Longest accepted list: above any vocabulary and any context that fits into memory."""
MAX_ID_CELLS = 2**28
"""Most cells of a table of ids: its rows times its longest row."""
MAX_BIAS = 100.0
"""Largest bias of a logit, either way."""
MAX_INTEGER = 2**63 - 1
"""Limit of integers without a lower one."""
MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0, which is greedy."""


def wrong_type(name: str, value: Any, expected: str) -> VLLMValidationError:
    """The error for a value that is not `expected`."""
    return VLLMValidationError(f"{name} must be {expected}, got {type(value).__name__}", name, value)


def asks_for_nothing(value: Any) -> bool:
    """Whether a field of this value changes nothing, whatever its name: None, False, an empty text, list or object."""
    return value is None or value is False or (isinstance(value, (str, list, tuple, Mapping)) and not value)


def check_boolean(name: str, value: Any) -> None:
    """Python's and numpy's bools pass."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, value, "a bool")


def whole(value: Any) -> Any:
    """A float without a fraction as an integer; anything else as it is."""
    return int(value) if isinstance(value, (float, np.floating)) and float(value).is_integer() else value


def check_integer(name: str, value: Any, low: int, high: int = MAX_INTEGER) -> int:
    """An integer in [low, high], also from a float without a fraction; bools are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, value, "an integer")
    value = whole(value)
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong_type(name, value, "an integer") from None
    if not low <= number <= high:
        limits = f"between {low} and {high}"
        if number > high or high == MAX_INTEGER:
            limits = f"at most {high}" if number > high else f"at least {low}"
        raise VLLMValidationError(f"{name} must be {limits}, got {shown(number)}", name, value)
    return number


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """A finite number in [low, high], or (low, high] with `open_low`; bools are refused."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise wrong_type(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    too_low = number <= low if open_low else number < low
    if not math.isfinite(number) or too_low or number > high:
        left, right = "(" if open_low else "[", ")" if math.isinf(high) else "]"
        raise VLLMValidationError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {number:g}", name, value)
    return number


def raised_temperature(temperature: float) -> float:
    """0, or, as upstream, at least MIN_TEMPERATURE."""
    if not 0 < temperature < MIN_TEMPERATURE:
        return temperature
    warn_once(logger, "temperature=%s is raised to %s, the lowest above 0", temperature, MIN_TEMPERATURE)
    return MIN_TEMPERATURE


def check_list(name: str, values: Any, expected: str) -> list[Any]:
    """The elements of an iterable, at most MAX_LIST_LENGTH; those of arrays and tensors as Python types. Strings, dicts
    and 0-d arrays are refused."""
    elements = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(elements, (str, bytes, dict)) or not isinstance(elements, Iterable):
        raise wrong_type(name, values, expected)
    result = list(itertools.islice(elements, MAX_LIST_LENGTH + 1))  # an iterator may be infinite
    if len(result) > MAX_LIST_LENGTH:
        raise VLLMValidationError(f"{name} has more than {MAX_LIST_LENGTH} entries", name, type(values).__name__)
    return result


def check_token_ids(name: str, values: Any) -> list[int]:
    """Distinct non-negative Python ints in the order given, from any list of integers; None is an empty list."""
    if values is None:
        return []
    return list(dict.fromkeys(check_id_sequence(name, values)))


def check_id_sequence(name: str, values: Any) -> list[int]:
    """As `check_token_ids`; repeated ids are kept, and None is an error."""
    ids = [check_token_id(name, element) for element in check_list(name, values, "a list of integers")]
    if ids and min(ids) < 0:
        raise VLLMValidationError(f"{name} must not be negative, got {shown(min(ids))}", name, min(ids))
    return ids


def check_token_id_rows(name: str, values: Any) -> list[int] | list[list[int]] | np.ndarray | None:
    """One list of distinct ids, or rows of ids with -1 as padding: a list of lists, or, of a 2-d integer array, a copy
    as int32 [rows, ids]. None where there is nothing in it."""
    if getattr(values, "ndim", 1) == 2:
        return _check_id_table(name, values)
    elements = check_list(name, values, "a list of integers, or a list of such lists")
    if not any(isinstance(element, Iterable) and not isinstance(element, (str, bytes)) for element in elements):
        return check_token_ids(name, elements) or None
    rows = [_check_id_row(f"{name}[{index}]", element) for index, element in enumerate(elements)]
    longest = max(map(len, rows))
    if len(rows) * longest > MAX_ID_CELLS:
        found = f"{len(rows)} rows, the longest of {longest}"
        raise VLLMValidationError(f"{name} must have at most {MAX_ID_CELLS} cells, got {found}", name, len(rows))
    return rows


def _check_id_row(name: str, values: Any) -> list[int]:
    ids = [check_token_id(name, element) for element in check_list(name, values, "a list of integers")]
    if ids and min(ids) < -1:
        raise VLLMValidationError(f"{name} must be token ids or -1 (padding), got {shown(min(ids))}", name, min(ids))
    return ids


def _check_id_table(name: str, values: Any) -> np.ndarray | None:
    table = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    if table.dtype.kind not in "iu":
        found = f"an array of {table.dtype}"
        raise VLLMValidationError(f"{name} must hold integers, got {found}", name, found)
    if table.size > MAX_ID_CELLS:
        raise VLLMValidationError(f"{name} must have at most {MAX_ID_CELLS} cells, got {table.size}", name, table.size)
    if not table.size:
        return None
    low, high = int(table.min()), int(table.max())
    if low < -1 or high > np.iinfo(np.int32).max:
        worst = low if low < -1 else high
        raise VLLMValidationError(f"{name} must be token ids or -1 (padding), got {worst}", name, worst)
    return np.array(table, dtype=np.int32, order="C")


def check_texts(name: str, values: Any) -> list[str]:
    """A list of non-empty texts, also from a single string; None is an empty list."""
    if values is None:
        return []
    if isinstance(values, str):
        values = [values]
    texts = check_list(name, values, "a string or a list of strings")
    for text in texts:
        if not isinstance(text, str):
            raise wrong_type(name, text, "a string or a list of strings")
        if not text:
            raise VLLMValidationError(f"{name} cannot contain an empty string", name, text)
        check_encodable(name, text)
    return texts


def check_encodable(name: str, text: str) -> None:
    """Refuses lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(f"{name} holds a lone surrogate, which is not text", name, text) from None


def check_processors(name: str, values: Any) -> list[Callable[..., Any]]:
    """Callables of one to three arguments: (logits), (output ids, logits) or (prompt ids, output ids, logits)."""
    processors = check_list(name, values, "a list of callables")
    for processor in processors:
        if not callable(processor):
            raise wrong_type(name, processor, "a list of callables")
        if num_arguments(processor) not in (1, 2, 3):
            expected = "(logits), (output_ids, logits) or (prompt_ids, output_ids, logits)"
            found = f"{processor!r} takes another number of arguments"
            raise VLLMValidationError(f"{name} must take {expected}; {found}", name, repr(processor))
    return processors


def num_arguments(function: Callable[..., Any]) -> int | None:
    """The number of required positional arguments, at least 2 with *args; None if keyword arguments are required or
    there is no signature."""
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
    """An integer of any range, not a bool."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise VLLMValidationError(f"{name} must hold integers, got bool {value!r}", name, value)
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise VLLMValidationError(f"{name} must hold integers, got {kind} {shown(value)}", name, value) from None


def check_bias_key(key: Any) -> int:
    """A token id as a key of `logit_bias`; JSON objects have string keys, so digits are accepted."""
    # Bounded, as int() refuses thousands of digits with another error.
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 20:
        return int(key)
    token_id = check_token_id("logit_bias", key)
    if token_id < 0:
        raise VLLMValidationError(
            f"logit_bias token ids must not be negative, got {shown(token_id)}", "logit_bias", key
        )
    return token_id


def check_logit_bias(values: Any) -> dict[int, float] | None:
    """The biases by token id, cut to +-MAX_BIAS; None where there are none. NaN is refused."""
    if values is None:
        return None
    if not isinstance(values, dict):
        raise wrong_type("logit_bias", values, "a dict of token id to bias")
    return {check_bias_key(key): _check_bias(value) for key, value in values.items()} or None


def _check_bias(value: Any) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number:
        raise wrong_type("logit_bias", value, "a number")
    if value != value:
        raise VLLMValidationError("logit_bias must be a number, got nan", "logit_bias", value)
    return float(min(max(value, -MAX_BIAS), MAX_BIAS))


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Non-negative ids must be below `vocab_size`."""
    highest = max(ids, default=-1)
    if highest >= vocab_size:
        limits = f"in [0, {vocab_size}), the model's vocabulary"
        raise VLLMValidationError(f"{name} must be {limits}; got {shown(highest)}", name, highest)


def check_neutral(name: str, value: Any, advice: str) -> None:
    """An argument of upstream's that only says nothing: None, False, 0, something empty, or a list of such."""
    values = value if isinstance(value, (list, tuple)) else [value]
    for each in values:
        if each is not None and not (isinstance(each, (bool, int, float, str, Mapping)) and not each):
            raise VLLMValidationError(f"{name} is not supported: {advice}", name, value)
