"""Schemas with numbers that llguidance's JSON cannot hold exactly, as grammars of its Lark.

Rules are written for what leads to such a number, and all else stays JSON of a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from vllm.v1.structured_output.expressions import between_slashes
from vllm.v1.structured_output.numbers import (
    is_empty,
    is_large,
    is_number,
    multiple_digits,
    needs_expressions,
    number_expressions,
)
from vllm.v1.structured_output.schemas import DEFINITIONS, REMARKS, Parts, TooManyParts, changed

_TYPES = ("null", "boolean", "number", "string", "array", "object")
# No rules are written of what these bind.
_UNREAD = frozenset(
    """not if then else contains minContains maxContains uniqueItems propertyNames dependencies dependentRequired
    dependentSchemas unevaluatedItems unevaluatedProperties patternProperties minProperties maxProperties multipleOf
    additionalItems""".split()
)
# JSON's marks, with white space where there is a "_".
_MARKS = {
    **{"OPEN": r"\{_", "CLOSE": r"_\}", "COLON": "_:_", "COMMA": "_,_", "LIST": r"\[_", "END": r"_\]"},
    **{"NO_FIELDS": r"\{_\}", "NO_ITEMS": r"\[_\]"},
}
_ANY_SPACE = r"[ \t\n\r]+"
_OPTIONS = "x-guidance"


class _Unwritable(Exception):
    """A schema that no rules are written of."""


def schema_expression(schema: dict[str, Any]) -> str:
    """The expression that stands for JSON of a schema in a grammar of Lark. ValueError: a bound of too many digits."""
    schema = changed(schema, _spread_multiples)
    json_text = f"%json {json.dumps(schema)}"
    if not any(map(_is_inexact, _schemas_of(schema))):
        return json_text
    if any("oneOf" in each for each in _schemas_of(schema)) and not _is_disjoint(schema):
        return json_text
    try:
        writer = _Writer(schema)
        return writer.grammar() if writer.is_inexact(_without(schema)) else json_text
    except (_Unwritable, TooManyParts, RecursionError):
        return json_text


def _spread_multiples(schema: dict[str, Any]) -> None:
    """Multiples of 0.25 are those of 0.25 that have two decimals, of 0.5 with one, and of 1: llguidance's have as many
    decimals as their unit, or none."""
    unit: Any = schema.get("multipleOf")
    if not is_number(unit) or not 0 < unit < float("inf"):
        return
    numerator, places = multiple_digits(unit)
    if places > 1:
        del schema["multipleOf"]
        units = [Decimal(lcm(numerator, 10 ** (places - each))).scaleb(-places) for each in range(1, places + 1)]
        spread = {"anyOf": [{"multipleOf": float(each)} for each in units]}
        schema["allOf"] = [*(schema.get("allOf") or ()), spread]


def _is_disjoint(schema: dict[str, Any]) -> bool:
    """Whether llguidance takes the schema, of which no two branches of a oneOf may hold then."""
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def _schemas_of(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(each, (dict, list)):
            yield from _schemas_of(each)


def _is_inexact(schema: dict[str, Any]) -> bool:
    return needs_expressions(schema) or _has_large([schema.get("const"), schema.get("enum")])


def _has_large(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return is_large(value) or any(map(_has_large, inner))


class _Writer:
    """Writes the rules of a schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._parts = Parts(root)
        self._root = root
        self._lines: list[str] = []
        self._options = root.get(_OPTIONS) or {}
        self._defined = {name: root[name] for name in DEFINITIONS if name in root}
        self._names: dict[str, str] = {}
        self._inexact = self._inexact_references()

    def grammar(self) -> str:
        """All of them, in one expression."""
        start = self._names["#"] = "value"
        body = self._merged(self._parts.merged(self._root, is_whole=True))
        if body is None:
            raise ValueError("Unsatisfiable schema: no value is within its bounds")
        self._lines.append(f"{start}: {body}")
        has_space = self._options.get("whitespace_flexible", True)
        # It is a part of the marks: what Lark ignores is not where JSON of a schema begins.
        space = f"({self._options.get('whitespace_pattern', _ANY_SPACE)})?" if has_space else ""
        self._lines += [f"{name}: {between_slashes(mark.replace('_', space))}" for name, mark in _MARKS.items()]
        return "%lark {\n" + "\n".join([f"start: {start}", *self._lines]) + "\n}"

    def _rule(self, name: str, body: str) -> str:
        label = f"{name}_{len(self._lines)}"
        self._lines.append(f"{label}: {body}")
        return label

    def _value(self, schema: Any) -> str | None:
        """An expression of a value; None: there is none."""
        if not isinstance(schema, dict) or not self.is_inexact(schema):
            return self._json(schema)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._names:
            return self._names[reference]
        parts = self._parts.merged(schema, is_whole=True)
        if isinstance(reference, str) and schema.keys() == {"$ref"}:
            # It may hold itself.
            label = self._names[reference] = f"defined_{len(self._names)}"
            body = self._merged(parts)
            self._lines.append(f"{label}: {body or self._nothing()}")
            return label
        return self._merged(parts)

    def _inexact_references(self) -> set[str]:
        """References to what holds a number of those, or refers to it."""
        given = {each["$ref"] for each in _schemas_of(self._root) if isinstance(each.get("$ref"), str)}
        inside = {each: list(_schemas_of(self._parts.find(each))) for each in given}
        found = {each for each, schemas in inside.items() if any(map(_is_inexact, schemas))}
        left = given - found
        while more := {each for each in left if any(one.get("$ref") in found for one in inside[each])}:
            found, left = found | more, left - more
        return found

    def is_inexact(self, value: Any) -> bool:
        """Whether a number of those is in a schema, or in the values of a part of one."""
        return any(_is_inexact(each) or each.get("$ref") in self._inexact for each in _schemas_of(value))

    def _json(self, schema: Any) -> str | None:
        if schema is False:
            return None
        own = {} if schema is True else _without(schema)
        defined = self._defined if any("$ref" in each for each in _schemas_of(own)) else {}
        return f"%json {json.dumps({**own, **defined, _OPTIONS: self._options})}"

    @staticmethod
    def _nothing() -> str:
        raise _Unwritable

    def _merged(self, parts: list[dict[str, Any]]) -> str | None:
        for part in parts:
            for name in ("anyOf", "oneOf"):
                if name in part:
                    rest = [each for each in (_without(one, name if one is part else "") for one in parts) if each]
                    return _one_of([self._value({"allOf": [*rest, each]} if rest else each) for each in part[name]])
        if len(parts) > 1:
            raise _Unwritable
        schema = _without(parts[0])
        if not _UNREAD.isdisjoint(schema):
            raise _Unwritable
        if "enum" in schema or "const" in schema:
            return self._choice(schema)
        found = []
        for kind in self._types(schema):
            if kind in ("number", "integer") and needs_expressions({**schema, "type": kind}):
                found.append(self._number(schema, kind == "integer"))
            elif kind == "object" and self._is_inside(
                schema, ("properties", "additionalProperties", "patternProperties")
            ):
                found.append(self._object(schema))
            elif kind == "array" and self._is_inside(schema, ("items", "prefixItems")):
                found.append(self._array(schema))
            else:
                found.append(self._json({**schema, "type": kind}))
        return _one_of(found)

    @staticmethod
    def _types(schema: Mapping[str, Any]) -> list[str]:
        types = schema.get("type", list(_TYPES))
        types = types if isinstance(types, list) else [types]
        return [each for each in types if each != "integer" or "number" not in types]

    def _is_inside(self, schema: Mapping[str, Any], names: tuple[str, ...]) -> bool:
        return any(self.is_inexact(schema[name]) for name in names if name in schema)

    def _number(self, schema: Mapping[str, Any], is_integer: bool) -> str | None:
        if is_empty(schema, is_integer):
            return None
        found = number_expressions(schema, is_integer)
        return self._rule("NUMBER", " & ".join(f"/{each}/" for each in found))

    def _choice(self, schema: dict[str, Any]) -> str | None:
        rest = {name: value for name, value in schema.items() if name not in ("enum", "const")}
        if rest.keys() - {"type"}:
            raise _Unwritable
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "const" in schema and "enum" in schema:
            values = [each for each in values if each in schema["enum"]]
        types = self._types(schema)
        found: list[str | None] = []
        for value in values:
            if is_large(value):
                found.append(json.dumps(str(value)) if {"number", "integer"} & set(types) else None)
            elif isinstance(value, dict) and _has_large(value):
                fields = {name: {"const": each} for name, each in value.items()}
                whole = {"properties": fields, "required": list(value), "additionalProperties": False}
                found.append(self._object(whole) if "object" in types else None)
            elif isinstance(value, list) and _has_large(value):
                items = {"prefixItems": [{"const": each} for each in value], "minItems": len(value), "items": False}
                found.append(self._array(items) if "array" in types else None)
            else:
                found.append(self._json({**rest, "const": value}))
        return _one_of(found)

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        more, required = schema.get("additionalProperties", True), schema.get("required") or ()
        properties = dict(schema.get("properties") or {})
        properties |= {name: more for name in required if name not in properties}
        fields = []
        for name, each in properties.items():
            value = self._value(each)
            if value is None and name in required:
                return None
            if value is not None:
                fields.append((f"{_quoted(_quoted(name))} COLON {value}", name in required))
        if (value := self._value(more)) is not None:
            pair = self._rule("pair", f"{self._other_keys(list(properties))} COLON {value}")
            fields.append((f"{pair} (COMMA {pair})*", False))
        # From each field on: where it is the first of all, and where one is before it.
        first, later = "", '""'
        for field, is_required in reversed(fields):
            one = self._rule("field", field)
            others = ("", "") if is_required else (f" | {first}" if first else "", f" | {later}")
            first, later = (
                self._rule("first", f"{one} {later}{others[0]}"),
                self._rule("later", f"COMMA {one} {later}{others[1]}"),
            )
        some = f"OPEN {first} CLOSE"
        return (
            some if any(is_required for _, is_required in fields) else f"(NO_FIELDS | {some})" if first else "NO_FIELDS"
        )

    def _other_keys(self, names: list[str]) -> str:
        texts = ["".join(map(_escaped, _quoted(name))) for name in names]
        other = f" & ~/({'|'.join(texts)})/" if texts else ""
        key = r"""/"(\\(["\\\/bfnrt]|u[0-9a-fA-F]{4})|[^"\\\x00-\x1f\x7f])*"/"""
        return self._rule("KEY", f"{key}{other}")

    def _array(self, schema: Mapping[str, Any]) -> str | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = [self._value(each) for each in schema.get("prefixItems") or ()]
        count = len(items) if most is None else min(len(items), most)
        possible = next((index for index, each in enumerate(items[:count]) if each is None), count)
        more = self._value(schema.get("items", True)) if possible == len(items) else None
        if least > (possible if more is None else least) or (most is not None and most < least):
            return None
        if most == 0 or (possible == 0 and more is None):
            return "NO_ITEMS"
        one = "" if more is None else self._rule("item", more)
        if possible == 0:
            some = f"{one} {_repeated(f'COMMA {one}', max(least - 1, 0), None if most is None else most - 1)}"
        else:
            left = None if most is None else most - possible
            some = _repeated(f"COMMA {one}", max(least - possible, 0), left) if one else '""'
            for index in range(possible - 1, 0, -1):
                body = f"(COMMA {items[index]} {some})"
                some = body if index < least else f"{body}?"
            some = f"{items[0]} {some}"
        return f"LIST {some} END" if least else f"(NO_ITEMS | LIST {some} END)"


def _repeated(expression: str, least: int, most: int | None) -> str:
    return '""' if most == 0 else f"({expression}){{{least},{'' if most is None else most}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(schema: Mapping[str, Any], more: str = "") -> dict[str, Any]:
    """The schema without what only a root has, without remarks, and without one more key."""
    return {name: value for name, value in schema.items() if name not in (*DEFINITIONS, *REMARKS, _OPTIONS, more)}


def _one_of(expressions: list[str | None]) -> str | None:
    found = [each for each in expressions if each is not None]
    return f"({' | '.join(found)})" if found else None


def _escaped(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
