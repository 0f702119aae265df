"""Arguments that are written as plain texts, as JSON by their schemas."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.answers.syntax.schemas import UNKNOWN, ArgumentSchema, kinds_of

_MOST_DIGITS = 4000
"""Python reads and writes no integers of 4300 digits."""

_MOST_LEVELS, _TOO_DEEP = 200, "it is nested too deeply"

_NUMBERS = {"integer", "number"}


def dumps(value: Any) -> str:
    """As JSON, with characters as they are."""
    return scalars(json.dumps(value, ensure_ascii=False))


def json_object(values: Mapping[str, str]) -> str:
    """An object of values that are JSON."""
    return f"{{{', '.join(f'{dumps(name)}: {value}' for name, value in values.items())}}}"


def scalars(text: str) -> str:
    """A text of JSON whose halves of characters, which no encoding has, stand as escapes."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def whole_characters(text: str) -> str:
    """A text whose halves of characters are joined, and replaced where one is alone."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def in_string(text: str) -> str:
    """The text within a string of JSON, without its quotes."""
    return dumps(text)[1:-1]


def parsed_python(text: str) -> ast.expr:
    """An expression of Python, without warnings: a model wrote it. Raises SyntaxError or ValueError if it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text.strip(), mode="eval").body


def as_json(text: str, schema: ArgumentSchema = UNKNOWN) -> str:
    """The value that `text` stands for, as JSON: a text where the schema wants one, else what JSON or Python reads.
    What neither reads, or a type that the schema does not allow, is a text."""
    if schema.is_text:
        return dumps(text)
    allowed, stripped = schema.allowed, text.strip()
    types = allowed.types or frozenset()
    if allowed.values is not None and (chosen := _chosen(text, allowed.values)) is not None:
        return chosen
    if _NUMBERS & types and re.fullmatch(r"-?0\d+", stripped) and len(stripped) < _MOST_DIGITS:
        return str(int(stripped))
    for read in (read_json, read_python):
        try:
            written, kinds = read(stripped)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if "string" in types and not kinds & types:
            break
        return written
    lowered = stripped.lower()
    if lowered in ("true", "false") and "boolean" in types:
        return lowered
    if lowered in ("null", "none") and "null" in types:
        return "null"
    return dumps(text)


def _chosen(text: str, values: Sequence[Any]) -> str | None:
    """The one of `values` that is written so, as JSON."""
    for each in values:
        if isinstance(each, str):
            spellings: tuple[str, ...] = (each,)
        elif each is None or isinstance(each, bool):
            spellings = (str(each), str(each).lower(), *(["null"] if each is None else []))
        else:
            spellings = (dumps(each),)
        if text in spellings or text.strip() in spellings:
            return dumps(each)
    return None


def read_json(text: str) -> tuple[str, frozenset[str]]:
    """A text of JSON, and JSON Schema's names of its value's type. Numbers that Python does not hold stand as they are
    written. Raises ValueError or RecursionError for another text."""
    exact = False

    def number(own: str) -> Any:
        nonlocal exact
        value = float(own) if any(char in own for char in ".eE") else int(own) if len(own) < _MOST_DIGITS else 0
        exact = exact or len(own) >= _MOST_DIGITS or not math.isfinite(value)
        return value

    value = json.loads(text, parse_int=number, parse_float=number, parse_constant=_refuse)
    return (scalars(text) if exact else dumps(value)), kinds_of(value)


def loaded(text: str) -> Any:
    """The value of a text of JSON. Numbers that Python does not hold, and NaN, are texts as they are written, halves of
    characters are replaced. Raises ValueError for another text, and for more than 200 levels."""

    def number(own: str) -> Any:
        if len(own) >= _MOST_DIGITS:
            return own
        value = float(own) if any(char in own for char in ".eE") else int(own)
        return value if math.isfinite(value) else own

    try:
        value = json.loads(text, parse_int=number, parse_float=number, parse_constant=str)
        if "\\u" in text:
            value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value] if _holds(value) else []
    for _ in range(_MOST_LEVELS):
        level = [own for each in level for own in (each.values() if isinstance(each, dict) else each) if _holds(own)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def read_python(text: str) -> tuple[str, frozenset[str]]:
    """A literal of Python as JSON, as `read_json`. Raises ValueError, SyntaxError, MemoryError or RecursionError for
    another text, and for numbers that JSON does not have."""
    value = ast.literal_eval(parsed_python(text))
    # Sets and bytes are no JSON, nor are infinities.
    json.dumps(value, allow_nan=False)
    return dumps(value), kinds_of(value)
