"""JSON schemas of arguments: the kinds of values that they allow, and the schemas of what these hold."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

_NUMBERS = frozenset({"integer", "number"})
_KINDS: dict[type, frozenset[str]] = {
    str: frozenset({"string"}), bool: frozenset({"boolean"}), int: _NUMBERS, float: frozenset({"number"}),
    dict: frozenset({"object"}), list: frozenset({"array"}), type(None): frozenset({"null"}),
}  # fmt: skip


def kinds_of(value: Any) -> frozenset[str]:
    """JSON Schema's names of a value's type."""
    return _KINDS.get(type(value), frozenset())


@dataclass(frozen=True)
class Allowed:
    """The values that a schema allows.

    Attributes:
        types: JSON Schema's names; None: any.
        values: the only ones; None: any of the types.
    """

    types: frozenset[str] | None = None
    values: tuple[Any, ...] | None = None

    def __and__(self, other: Allowed) -> Allowed:
        types = self.types if other.types is None else other.types
        if self.types is not None and other.types is not None:
            types = self.types & other.types
        values = self.values if self.values is not None else other.values
        if values is not None:
            if self.values is not None and other.values is not None:
                values = tuple(each for each in values if has_value(other.values, each))
            values = tuple(each for each in values if types is None or kinds_of(each) & types)
            types = frozenset().union(*map(kinds_of, values))
        return Allowed(types, values)

    def __or__(self, other: Allowed) -> Allowed:
        types = None if self.types is None or other.types is None else self.types | other.types
        values = None if self.values is None or other.values is None else self.values + other.values
        return Allowed(types, values)


def has_value(values: tuple[Any, ...], value: Any) -> bool:
    """Whether it is one of them; True is not 1."""
    return any(each == value and isinstance(each, bool) == isinstance(value, bool) for each in values)


_ANY = Allowed()
_NOTHING = Allowed(frozenset(), ())


class ArgumentSchema:
    """A schema, with the one that its references point into."""

    def __init__(self, schema: Any, root: Any = None) -> None:
        """`schema`: an object, True or False; anything else says nothing. `root`: `schema` itself, if it is None."""
        self.schema = schema
        self.root = schema if root is None else root

    @cached_property
    def allowed(self) -> Allowed:
        """The values that it allows, by references and by all of its parts."""
        try:
            return self._allowed(self.schema, {}) or _ANY
        except RecursionError:
            return _ANY

    @property
    def is_text(self) -> bool:
        """Whether all values that it allows are texts."""
        return self.allowed.types == {"string"}

    @property
    def may_be_text(self) -> bool:
        """Whether some value that it allows is a text."""
        return self.allowed.types is None or "string" in self.allowed.types

    @property
    def keywords(self) -> set[str]:
        """The words of all its parts."""
        try:
            return {str(name) for each in self._flat(self.schema, set()) for name in each}
        except RecursionError:
            return set()

    @cached_property
    def property_names(self) -> frozenset[str]:
        """The properties that it describes."""
        try:
            parts = [each.get("properties") for each in self._flat(self.schema, set())]
        except RecursionError:
            parts = []
        return frozenset(str(name) for each in parts if isinstance(each, Mapping) for name in each)

    def property(self, name: str) -> ArgumentSchema:
        """The schema of one property of its objects."""
        return self._inner(lambda schema: _property(schema, name))

    @cached_property
    def items(self) -> ArgumentSchema:
        """The schema of what its lists hold."""
        return self._inner(lambda schema: schema.get("items"))

    def target(self, reference: Any) -> Any:
        """The schema that a reference within the document points to; None: there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self.root
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, (list, tuple)) and key.isdecimal() and len(key) < 10 and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _inner(self, pick: Callable[[Mapping[str, Any]], Any]) -> ArgumentSchema:
        try:
            return ArgumentSchema(self._picked(self.schema, pick, {}), self.root)
        except RecursionError:
            return ArgumentSchema({}, self.root)

    def _picked(self, schema: Any, pick: Callable[[Mapping[str, Any]], Any], known: dict[int, Any]) -> Any:
        """All that `pick` finds in a schema and its parts, as one schema; None: nothing. `known`: of schemas by their
        `id`, None of those that are being read."""
        if not isinstance(schema, Mapping) or id(schema) in known:
            return known.get(id(schema))
        known[id(schema)] = None
        found = [pick(schema)]
        found += [self._picked(each, pick, known) for each in self._all_of(schema)]
        for parts in _either(schema):
            several = [each for part in parts if (each := self._picked(part, pick, known)) is not None]
            found += [{"anyOf": several}] if len(several) > 1 else several
        found = [each for each in found if each is not None]
        known[id(schema)] = {"allOf": found} if len(found) > 1 else (found or [None])[0]
        return known[id(schema)]

    def _allowed(self, schema: Any, known: dict[int, Allowed | None]) -> Allowed | None:
        """None: of a schema that is being read. `known` as of `_picked`."""
        if not isinstance(schema, Mapping):
            return _NOTHING if schema is False else _ANY
        if id(schema) in known:
            return known[id(schema)]
        known[id(schema)] = None
        found = _own(schema)
        beside = [self._allowed(each, known) for each in self._all_of(schema)]
        if found == _ANY and beside and not any(beside) and not any(_either(schema)):
            return None
        for each in beside:
            found &= each or _ANY
        for parts in _either(schema):
            # A part that holds its whole adds nothing to what else there is.
            several = [each for part in parts if (each := self._allowed(part, known)) is not None]
            if several:
                found &= functools.reduce(Allowed.__or__, several)
        if schema.get("nullable") is True and found != _ANY:
            found |= _of_values([None])
        known[id(schema)] = found
        return found

    def _all_of(self, schema: Mapping[str, Any]) -> list[Any]:
        """The schemas that hold beside a schema's own words."""
        return [*([self.target(schema["$ref"])] if "$ref" in schema else []), *_list(schema, "allOf")]

    def _flat(self, schema: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
        """A schema, and those that it is made of, each once."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        seen.add(id(schema))
        yield schema
        for each in (*self._all_of(schema), *itertools.chain(*_either(schema))):
            yield from self._flat(each, seen)


UNKNOWN = ArgumentSchema({})


def resolved(schema: Any, root: Any) -> Any:
    """A schema in the place of one that says nothing else: by a reference, or as the only part of `allOf`."""
    view, seen = ArgumentSchema(schema, root), set()
    while isinstance(schema, Mapping) and id(schema) not in seen:
        seen.add(id(schema))
        own = schema.keys() - _REMARKS
        if own == {"$ref"}:
            found = view.target(schema["$ref"])
        elif own == {"allOf"} and len(_list(schema, "allOf")) == 1:
            (found,) = schema["allOf"]
        else:
            break
        if found is None:
            break
        schema = found
    return schema


_REMARKS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs",
    "definitions", "$id", "$schema", "$anchor",
}  # fmt: skip


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return list(value) if isinstance(value, (list, tuple)) else []


def _either(schema: Mapping[str, Any]) -> list[list[Any]]:
    return [_list(schema, name) for name in ("anyOf", "oneOf")]


def _own(schema: Mapping[str, Any]) -> Allowed:
    """The values that a schema's own words allow."""
    types = _types(schema)
    found = Allowed(types, (None,) if types == {"null"} else None)
    if "const" in schema:
        found &= _of_values([schema["const"]])
    if isinstance(schema.get("enum"), (list, tuple)):
        found &= _of_values(schema["enum"])
    return found


def _types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    own = schema.get("type")
    names = [own] if isinstance(own, str) else [each for each in own if isinstance(each, str)] if own else []
    if not names:
        return None
    # Every integer is a number.
    return frozenset(names) | (_NUMBERS if "number" in names else frozenset())


def _of_values(values: Any) -> Allowed:
    return Allowed(frozenset().union(*map(kinds_of, values)), tuple(values))


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    # Which of the patterns holds is left open: a search could take any time.
    patterns, more = schema.get("patternProperties"), schema.get("additionalProperties")
    further = [*(patterns.values() if isinstance(patterns, Mapping) else ()), *([more] if more is not False else [])]
    further = [each for each in further if each is not None]
    return {"anyOf": further} if len(further) > 1 else (further or [None])[0]
