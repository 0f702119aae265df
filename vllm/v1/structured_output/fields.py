"""Fields of a JSON answer whose values are finitely many: where each stands, and what may stand there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.structured_output.finite_values import Schema, json_text, union

_MAX_DEPTH = 100

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORD = re.compile(rb"[-+.0-9A-Za-z]+")
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class Field:
    """A place of an answer.

    Attributes:
        path: as JSONPath writes it: `$.items[0].kind`; a key that is no name is quoted, `$["a b"]`.
        start: byte of the answer where the value begins.
        values: the scalars that the schema allows there.
        chosen: the index of what the answer has; None: it breaks off before the value is complete.
    """

    path: str
    start: int
    values: list[Any]
    chosen: int | None


def finite_fields(schema: Any, answer: bytes) -> list[Field]:
    """The fields of an answer, which may break off anywhere, whose values a JSON schema counts; in their order."""
    root, _ = _scan(answer, _skip(answer, 0), 0)
    return [] if root is None else list(_fields([Schema(schema)], root, "$"))


def _fields(schemas: list[Schema], node: _Node, path: str) -> Iterator[Field]:
    """`schemas`: one of them holds here, as far as the text before tells."""
    values = union([each.values() for each in schemas])
    if values:
        texts = [json_text(each) for each in values]
        own = json_text(node.value) if node.is_complete and not node.below else None
        yield Field(path, node.start, values, texts.index(own) if own in texts else None)
        return
    before: Any = {} if isinstance(node.value, dict) else []
    for key, each in node.below:
        holding = [one for schema in schemas for one in schema.alternatives(before)]
        if isinstance(key, int):
            yield from _fields([one.of_item(key) for one in holding], each, f"{path}[{key}]")
            continue
        name = f".{key}" if _NAME.fullmatch(key) else f"[{json.dumps(key, ensure_ascii=False)}]"
        yield from _fields([one.of_key(key) for one in holding], each, path + name)
        before[key] = each.value


@dataclass
class _Node:
    """A value as far as it goes."""

    start: int
    value: Any = None
    is_complete: bool = False
    below: list[tuple[str | int, _Node]] = field(default_factory=list)


def _skip(data: bytes, at: int) -> int:
    found = _SPACE.match(data, at)
    return at if found is None else found.end()


def _scan(data: bytes, start: int, depth: int) -> tuple[_Node | None, int]:
    """The value that begins at `start`, and where it ends; None: none begins there."""
    first = data[start : start + 1]
    if not first or depth > _MAX_DEPTH:
        return None, start
    node = _Node(start)
    if first in (b"{", b"["):
        return node, _scan_inside(data, node, first == b"{", depth)
    found = (_STRING if first == b'"' else _WORD).match(data, start)
    if found is None:
        return node, len(data)
    # The next byte after a word, if there is one, ends it.
    is_ended = first == b'"' or depth == 0 or found.end() < len(data)
    if is_ended:
        try:
            node.value, node.is_complete = json.loads(found[0]), True
        except ValueError:
            return node, len(data)
    return node, found.end()


def _scan_inside(data: bytes, node: _Node, is_object: bool, depth: int) -> int:
    """Read an object's or array's values into `node`; returns its end, or that of the data."""
    node.value = {} if is_object else []
    at, closing = _skip(data, node.start + 1), b"}" if is_object else b"]"
    while at < len(data) and data[at : at + 1] != closing:
        key: str | int = len(node.below)
        if is_object:
            name = _STRING.match(data, at)
            at = len(data) if name is None else _skip(data, name.end())
            if name is None or data[at : at + 1] != b":":
                return len(data)
            key, at = json.loads(name[0]), _skip(data, at + 1)
        each, at = _scan(data, at, depth + 1)
        if each is None:
            return len(data)
        node.below.append((key, each))
        at = _skip(data, at)
        if data[at : at + 1] == b",":
            at = _skip(data, at + 1)
    node.is_complete = at < len(data)
    return at + 1
