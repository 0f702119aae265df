"""JSON schemas as they are compiled: what means nothing left out, expressions spelled out, objects closed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from math import lcm
from typing import Any
from urllib.parse import unquote

from vllm.v1.structured_output.expressions import ascii_classes

_MAX_REMAINDERS = 100_000
"""Limit of the least common multiple of a schema's `multipleOf`: automata grow with it, and their time faster."""

_MAX_MERGED = 2000
"""Limit of the schemas that are made of others to close them: alternatives multiply."""

# Objects of a schema whose values are schemas, and its keys whose value is a schema or a list of them.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf"),
    *("not", "if", "then", "else"),
)
# Keys that say something with null; others are left out with it.
_MAY_BE_NULL = ("const", "default")
# Values of "format" whose texts are bound.
_FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()
REMARKS = ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "$defs")
"""Keys that bind nothing."""
DEFINITIONS = ("$defs", "definitions")
"""Keys of a root whose schemas others refer to."""
_DEFINED = re.compile(r"#/(\$defs|definitions)/[^/]+")
_MAX_DEPTH = 8  # of references that are followed to learn what a schema is of
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties")
_CHOICES = ("anyOf", "oneOf")
_LARGEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def compilable(schema: Any) -> dict[str, Any]:
    r"""The schema, an object or a boolean, as an object without what says nothing: keys with null, and formats that
    llguidance does not know, which are remarks, as JSON Schema says of all. `\d` and its like are ASCII's.

    Raises:
        ValueError: another type.
    """
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
    return changed({} if schema is True else {"not": {}} if schema is False else schema, _spell_out)


def check_multiples(schema: Any) -> None:
    """ValueError: the automata of its `multipleOf` would take too long to make."""
    found: set[int] = set()

    def note(part: dict[str, Any]) -> None:
        value = part.get("multipleOf")
        if isinstance(value, (int, float)) and 0 < value < float("inf"):
            # Zeros at its end are remainders of digits, not of the number.
            found.add(int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))))

    changed(schema, note)
    if lcm(*found) > _MAX_REMAINDERS:
        raise ValueError(f"multipleOf: the least common multiple of all must have at most {_MAX_REMAINDERS} remainders")


def closed_schema(schema: Any) -> Any:
    """The schema with no further properties where an object does not say whether it has any. What several parts say of
    an object (`allOf`, a `$ref` or alternatives beside others) becomes one part, as each would forbid the others'.

    Raises:
        ValueError: the alternatives are too many.
    """
    closer = _Closer(schema)
    return closer.closed(closer.root)


def changed(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of the schema with `change` made, in place, to it and to all schemas in it."""
    if isinstance(schema, list):
        return [changed(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = _with_inner(schema, partial(changed, change=change))
    change(copy)
    return copy


def _with_inner(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy with its schemas changed. No calls are between those of `change`: schemas are nested deeply."""
    copy = dict(schema)
    for name in _MAPS:
        if isinstance(copy.get(name), dict):
            copy[name] = dict(zip(copy[name], map(change, copy[name].values()), strict=True))
    for name in _INNER:
        if name in copy:
            value = copy[name]
            copy[name] = list(map(change, value)) if isinstance(value, list) else change(value)
    return copy


def _spell_out(schema: dict[str, Any]) -> None:
    for name in [name for name, value in schema.items() if value is None and name not in _MAY_BE_NULL]:
        del schema[name]
    if schema.get("format") not in (None, *_FORMATS):
        del schema["format"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = ascii_classes(schema["pattern"])
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        schema["patternProperties"] = {}
        for pattern, each in patterns.items():
            _add(schema["patternProperties"], ascii_classes(pattern), each)


def _add(schemas: dict[str, Any], name: str, schema: Any) -> None:
    """Bind `name` to a schema, too."""
    schemas[name] = _both(schemas[name], schema) if name in schemas else schema


def _both(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    if first == second or second in (True, {}):
        return first
    return second if first in (True, {}) else {"allOf": [first, second]}


class TooManyParts(ValueError):
    """Schemas whose parts would take too long to be made one."""


class Parts:
    """Parts of the schemas of one root, as one."""

    def __init__(self, root: Any) -> None:
        self._root, self._num_merged = root, 0

    def find(self, reference: str) -> Any:
        """The schema that a reference into the root is to; None: it is none, or to nothing."""
        return _find(self._root, reference)

    def merged(self, schema: dict[str, Any], is_whole: bool = False) -> list[dict[str, Any]]:
        """One schema of all its parts, and what must stand beside it. `is_whole`: a reference is a part, even where
        nothing stands beside it."""
        merged: list[dict[str, Any]] = [{}]
        for part in self._parts(schema, frozenset(), is_whole):
            self._num_merged += bool(merged[0])
            if self._num_merged > _MAX_MERGED:
                raise TooManyParts("the parts of its allOf, anyOf and oneOf make too many alternatives")
            merged += _merge(merged[0], part)
        return merged

    def _parts(self, schema: Any, seen: frozenset[str], is_whole: bool) -> Iterator[dict[str, Any]]:
        """The parts of a schema, without allOf. `seen`: references that have led here."""
        if schema is False:
            yield {"not": {}}
        if not isinstance(schema, dict):
            return
        own = dict(schema)
        parts = own.pop("allOf", None) or []
        says_more = any(name not in ("$ref", *REMARKS, *DEFINITIONS) for name in own)
        reference, found = own.get("$ref"), None
        if isinstance(reference, str) and (is_whole or parts or says_more):
            found = self.find(reference)
            if found is not None:
                del own["$ref"]
        if own:
            yield own
        if found is not None and reference not in seen:
            yield from self._parts(found, seen | {str(reference)}, True)
        # A reference that is all that a schema says stays one.
        is_alone = not is_whole and len(parts) == 1 and not says_more and "$ref" not in schema
        for each in parts:
            yield from self._parts(each, seen, not is_alone)


def _find(root: Any, reference: str) -> Any:
    found = root
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


class _Closer:
    """Closes the objects of a schema."""

    def __init__(self, root: Any) -> None:
        self._given = root
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}
        self.root = changed(root, self._name_target)
        if self._definitions:
            targets = {name: changed(each, self._name_target) for name, each in list(self._definitions.items())}
            self.root["$defs"] = {**(self.root.get("$defs") or {}), **targets}
        self._parts = Parts(self.root)

    def closed(self, schema: Any) -> Any:
        """A copy of a schema in the root, or of the root."""
        if not isinstance(schema, dict):
            return schema
        parts = self._parts.merged(schema)
        choice = self._choice_of_objects(parts)
        if choice is not None:
            # Each alternative with what stands beside it.
            index, name = choice
            alternatives = parts[index].pop(name)
            kept = {each: parts[0].pop(each) for each in DEFINITIONS if each in parts[0]}
            parts = [{name: [{"allOf": [*parts, each]} for each in alternatives], **kept}]
        merged = {**parts[0], "allOf": parts[1:]} if len(parts) > 1 else parts[0]
        closed = _with_inner(merged, self.closed)
        if "properties" in closed or "object" in _listed(closed.get("type")):
            closed.setdefault("additionalProperties", False)
        return closed

    def _name_target(self, schema: dict[str, Any]) -> None:
        """Let a reference to a place that merging may move be to a copy of it."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and not _DEFINED.fullmatch(reference):
            found = _find(self._given, reference)
            if found is not None:
                name = self._names.setdefault(reference, f"place_{len(self._names)}_of_this_schema")
                schema["$ref"] = f"#/$defs/{name}"
                self._definitions[name] = found

    def _choice_of_objects(self, parts: list[dict[str, Any]]) -> tuple[int, str] | None:
        """Alternatives that say something of an object of which other parts say something, too."""
        if not any(map(_says_of_objects, parts)):
            return None
        places = [(index, name) for index, part in enumerate(parts) for name in _CHOICES if name in part]
        return next((place for place in places if any(map(self._may_be_object, parts[place[0]][place[1]]))), None)

    def _may_be_object(self, schema: Any, depth: int = 0) -> bool:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return False
        parts = self._parts.merged(schema, is_whole=True)
        inner = [each for part in parts for name in _CHOICES for each in part.get(name) or ()]
        return any(map(_says_of_objects, parts)) or any(self._may_be_object(each, depth + 1) for each in inner)


def _says_of_objects(schema: dict[str, Any]) -> bool:
    return any(name in schema for name in _OF_OBJECTS) or "object" in _listed(schema.get("type"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _merge(merged: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a part, in place; what of it must stand beside the others."""
    for one, other in ((merged, part), (part, merged)):
        if "patternProperties" in one and other.get("additionalProperties", True) not in (True, {}):
            raise ValueError("patternProperties beside another part's additionalProperties is not supported")
    rest: dict[str, Any] = {}
    properties = _all_properties(merged, part)
    for name, value in part.items():
        if name not in merged:
            merged[name] = value
        elif merged[name] == value or name in REMARKS:
            continue
        elif name == "required":
            merged[name] = list(dict.fromkeys([*merged[name], *value]))
        elif name in ("additionalProperties", "items"):
            merged[name] = _both(merged[name], value)
        elif name == "patternProperties":
            merged[name] = dict(merged[name])
            for pattern, each in value.items():
                _add(merged[name], pattern, each)
        elif name in _LARGEST or name in _SMALLEST:
            merged[name] = (max if name in _LARGEST else min)(merged[name], value)
        elif name == "type" and (types := _common_types(merged[name], value)):
            merged[name] = types[0] if len(types) == 1 else types
        elif name != "properties":
            rest[name] = value
    if properties:
        merged["properties"] = properties
    return [rest] if rest else []


def _all_properties(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The properties of both, each bound by what the other says of properties that it does not name."""
    found: dict[str, Any] = {}
    for own, other in ((first, second), (second, first)):
        for name, schema in (own.get("properties") or {}).items():
            _add(found, name, schema)
            if name not in (other.get("properties") or {}):
                _add(found, name, other.get("additionalProperties", True))
    return found


def _common_types(first: Any, second: Any) -> list[Any]:
    one, two = _listed(first), _listed(second)
    both = [each for each in one if each in two or (each == "integer" and "number" in two)]
    return both + [each for each in two if each == "integer" and "number" in one and each not in both]
