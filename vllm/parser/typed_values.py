"""Arguments that are written as plain texts, as JSON by their schemas."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any


def dumps(value: Any) -> str:
    """As JSON, with characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def in_string(text: str) -> str:
    """The text within a string of JSON, without its quotes."""
    return dumps(text)[1:-1]


def parsed_python(text: str) -> ast.expr:
    """An expression of Python, without warnings: a model wrote it. Raises SyntaxError or ValueError if it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text.strip(), mode="eval").body


def _literal(text: str) -> Any:
    return ast.literal_eval(parsed_python(text))


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema in the place of a reference to a definition."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and schema.keys() == {"$ref"} and schema["$ref"] not in seen:
        seen.add(schema["$ref"])
        found: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            break
        schema = found
    return schema


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    own = schema.get("type")
    yield from [own] if isinstance(own, str) else own or ()
    for name in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(name) or ():
            if isinstance(each, Mapping):
                yield from _types(each)
    if not own:
        for value in schema.get("enum") or ():
            yield "string" if isinstance(value, str) else "other"


def is_text(schema: Mapping[str, Any] | None) -> bool:
    """Whether all values that the schema allows are texts."""
    types = set(_types(schema)) if schema else set()
    return types == {"string"}


def may_be_text(schema: Mapping[str, Any] | None) -> bool:
    """Whether some value that the schema allows is a text."""
    types = set(_types(schema)) if schema else set()
    return not types or "string" in types


def as_json(text: str, schema: Mapping[str, Any] | None) -> str:
    """The value that `text` stands for, as JSON: a text where the schema wants one, else what JSON or Python reads.
    What neither reads, or a type that the schema does not allow, is a text."""
    if is_text(schema):
        return dumps(text)
    types = set(_types(schema)) if schema else set()
    if types & {"integer", "number"} and re.fullmatch(r"-?0\d+", text.strip()):
        return str(int(text))
    for read in (json.loads, _literal):
        try:
            value = read(text.strip())
            # Sets and bytes are no JSON, nor are infinities.
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if "string" in types and not _fits(value, types):
            break
        return written
    lowered = text.strip().lower()
    if lowered in ("true", "false") and "boolean" in types:
        return lowered
    if lowered in ("null", "none") and "null" in types:
        return "null"
    return dumps(text)


def _fits(value: Any, types: set[str]) -> bool:
    kinds: dict[type, set[str]] = {
        bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, dict: {"object"}, list: {"array"},
        type(None): {"null"}, str: {"string"},
    }  # fmt: skip
    return bool(kinds.get(type(value), set()) & types)
