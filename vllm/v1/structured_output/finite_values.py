"""Which values a JSON schema leaves to a field, where they are finitely many, and how JSON writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_VALUES = 1000
"""A form that is read has at most so many choices, or values of one field."""

_OF_TYPE: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
_MAX_ALTERNATIVES = 64
_SCALARS = (str, int, float, bool, type(None))


def json_text(value: Any) -> str:
    """How an answer writes a scalar: characters as they are where JSON allows it, numbers without an exponent."""
    if isinstance(value, float):
        number = Decimal(repr(value))
        return format(number.to_integral_value() if number == number.to_integral_value() else number, "f")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class Schema:
    """A JSON schema at some place of an answer: the subschemas that all hold there, references followed."""

    def __init__(self, schema: Any, root: Any = None) -> None:
        self._root = schema if root is None else root
        self._parts = list(self._parts_of(schema, set()))

    def values(self) -> list[Any] | None:
        """The scalars that may stand here, in the schema's order; None: others may, too."""
        found: dict[str, Any] | None = None
        for values in (values for part in self._parts for values in self._values_of(part)):
            own = _distinct(values)
            found = own if found is None else {text: each for text, each in found.items() if text in own}
        if found is None:
            return None
        types = [part["type"] for part in self._parts if "type" in part]
        return [each for each in found.values() if all(_has_type(each, kind) for kind in types)]

    def alternatives(self, value: Any) -> list[Schema]:
        """The schema together with one alternative of each anyOf and oneOf, of those that do not rule out `value`,
        which need not be complete; at most _MAX_ALTERNATIVES."""
        found = [self._parts]
        for part in self._parts:
            for name in ("anyOf", "oneOf"):
                each = [Schema(one, self._root) for one in _list_of(part, name)]
                below = [parts for one in each if one._may_be(value) for parts in one.alternatives(value)]
                if below:
                    found = [[*own, *other._parts] for own in found for other in below][:_MAX_ALTERNATIVES]
        return [self._of(parts) for parts in found]

    def _of(self, parts: list[Mapping[str, Any]]) -> Schema:
        own = Schema(True, self._root)
        own._parts = parts
        return own

    def of_key(self, key: str) -> Schema:
        """The schema that holds for an object's value of this key."""
        below = []
        for part in self._parts:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                below.append(properties[key])
            elif isinstance(part.get("additionalProperties"), Mapping) and "patternProperties" not in part:
                below.append(part["additionalProperties"])
        return Schema({"allOf": below}, self._root)

    def of_item(self, index: int) -> Schema:
        """The schema that holds for an array's value at this index."""
        below = []
        for part in self._parts:
            first = _list_of(part, "prefixItems")
            if index < len(first):
                below.append(first[index])
            elif "items" in part:
                below.append(part["items"])
        return Schema({"allOf": below}, self._root)

    def _parts_of(self, schema: Any, seen: set[str]) -> Iterator[Mapping[str, Any]]:
        if not isinstance(schema, Mapping):
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            yield from self._parts_of(self._find(reference), {*seen, reference})
        for each in _list_of(schema, "allOf"):
            yield from self._parts_of(each, seen)

    def _find(self, reference: str) -> Any:
        found = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if reference.startswith("#") else None

    def _values_of(self, part: Mapping[str, Any]) -> Iterator[list[Any]]:
        """The lists of scalars that keywords of the part allow."""
        named = [[part["const"]]] if "const" in part else []
        named += [part["enum"]] if isinstance(part.get("enum"), list) else []
        for values in named:
            if all(isinstance(each, _SCALARS) for each in values):
                yield values
        kinds = part.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if all(kind in _OF_TYPE for kind in kinds):
            yield [value for kind in kinds for value in _OF_TYPE[kind]]
        for name in ("anyOf", "oneOf"):
            together = union([Schema(each, self._root).values() for each in _list_of(part, name)])
            if together is not None:
                yield together

    def _may_be(self, value: Any) -> bool:
        """Whether types and finite values allow it, or what there is of it."""
        if (values := self.values()) is not None:
            return isinstance(value, _SCALARS) and json_text(value) in map(json_text, values)
        if not all(_has_type(value, part["type"]) for part in self._parts if "type" in part):
            return False
        if not isinstance(value, dict):
            return True
        known = {key for part in self._parts for key in part.get("properties", ())}
        closed = any(part.get("additionalProperties") is False for part in self._parts)
        return all(
            (key in known or not closed) and ((own := self.of_key(key)).values() is None or own._may_be(each))
            for key, each in value.items()
        )


def longest_enum(schema: Any) -> int:
    """The most values that one `enum` of the schema names."""
    if isinstance(schema, list):
        return max(map(longest_enum, schema), default=0)
    if not isinstance(schema, Mapping):
        return 0
    own = len(schema["enum"]) if isinstance(schema.get("enum"), list) else 0
    return max([own, *map(longest_enum, schema.values())])


def _distinct(values: list[Any]) -> dict[str, Any]:
    """By their texts; of equal ones, the first."""
    found: dict[str, Any] = {}
    for each in values:
        found.setdefault(json_text(each), each)
    return found


def _list_of(part: Mapping[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []


_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null", float: "number"}


def _has_type(value: Any, kinds: Any) -> bool:
    is_integer = type(value) is int or (isinstance(value, float) and value.is_integer())
    names = {"integer", "number"} if is_integer else {_TYPES[type(value)]}
    return not names.isdisjoint(kinds if isinstance(kinds, list) else [kinds])


def union(lists: list[list[Any] | None]) -> list[Any] | None:
    """The scalars of all lists, each once; None: one of them is None, or there is none."""
    if not lists or None in lists:
        return None
    return list(_distinct([value for values in lists for value in values or ()]).values())
