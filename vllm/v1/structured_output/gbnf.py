"""GBNF, the EBNF of llama.cpp and xgrammar, as a grammar of llguidance's Lark.

Every terminal becomes one character: a longer one would take what another could begin with, as Lark's do, where GBNF
tries all ways.
"""

from __future__ import annotations

import json
import re
from typing import Any

from vllm.v1.structured_output.exact_schemas import schema_expression
from vllm.v1.structured_output.expressions import CLASSES, ascii_classes_in_lark
from vllm.v1.structured_output.schemas import compilable

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<is>::=)|(?P<name>[A-Za-z0-9_][\w-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<characters>\[(?:[^\]\\]|\\.)*\])|(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<mark>[()|.])""",
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
_RULE = re.compile(r"^\s*[A-Za-z0-9_][\w-]*\s*::=", re.MULTILINE)
_ROOTS = ("root", "start")


def is_gbnf(grammar: str) -> bool:
    """Whether it has a rule of GBNF: Lark's have one colon."""
    return _RULE.search(grammar) is not None


def lark_of(grammar: str) -> str:
    """A grammar of either dialect in Lark's, with the classes of its expressions as callers mean them."""
    return lark_of_gbnf(grammar) if is_gbnf(grammar) else ascii_classes_in_lark(grammar, _expression)


def _expression(schema: Any) -> str:
    return schema_expression(compilable(schema))


def lark_of_gbnf(grammar: str) -> str:
    """The same language in Lark. ValueError: what is wrong, and in which line."""
    tokens = _tokens(grammar)
    heads = [index for index, (kind, _, _) in enumerate(tokens[1:]) if kind == "is"]
    if heads[:1] != [0] or any(tokens[index][0] != "name" for index in heads):
        raise ValueError("a grammar consists of rules, name ::= ...")
    names: dict[str, str] = {}
    for index in heads:
        name, line = tokens[index][1:]
        if name in names:
            raise ValueError(f"line {line}: {name} has a rule already")
        names[name] = f"rule_{len(names)}"
    root = next((name for name in _ROOTS if name in names), None)
    if root is None:
        raise ValueError("no rule is called root")
    lines = ["%llguidance {}", f"start: {names[root]}"]
    for index, end in zip(heads, [*heads[1:], len(tokens)], strict=True):
        lines.append(f"{names[tokens[index][1]]}: {_body(tokens[index + 2 : end], names)}")
    return "\n".join([*lines, ""])


def _tokens(grammar: str) -> list[tuple[str, str, int]]:
    """Kinds, texts and lines, without white space and remarks."""
    found = []
    place = 0
    while place < len(grammar):
        match = _TOKEN.match(grammar, place)
        line = grammar.count("\n", 0, place) + 1
        if match is None:
            rest = grammar[place:].partition("\n")[0]
            raise ValueError(f"line {line}: {rest[:40]!r} is nothing that GBNF has")
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[0], line))
        place = match.end()
    return found


def _body(tokens: list[tuple[str, str, int]], names: dict[str, str]) -> str:
    """A rule's right side."""
    parts: list[str] = []
    open_lines: list[int] = []
    is_whole = False  # whether the last part can be repeated
    for kind, text, line in tokens:
        if kind == "repeat":
            if not is_whole:
                raise ValueError(f"line {line}: nothing stands before {text}")
            parts.append("".join(text.split()))
            is_whole = False
            continue
        if text == ")":
            if not open_lines:
                raise ValueError(f"line {line}: ) closes nothing")
            open_lines.pop()
            parts.append('"" )' if parts[-1] in ("(", "|") else ")")
        elif text in ("(", "|"):
            is_empty = text == "|" and (not parts or parts[-1] in ("(", "|"))
            parts += ['""', "|"] if is_empty else [text]
            open_lines += [line] if text == "(" else []
        else:
            parts.append(_one(kind, text, line, names))
        is_whole = text not in ("(", "|")
    if open_lines:
        raise ValueError(f"line {open_lines[-1]}: ( is not closed")
    return " ".join([*parts, '""'] if not parts or parts[-1] == "|" else parts)


def _one(kind: str, text: str, line: int, names: dict[str, str]) -> str:
    if kind == "name":
        if text not in names:
            raise ValueError(f"line {line}: {text} has no rule")
        return names[text]
    if kind == "text":
        characters = [json.dumps(each) for each, _, _ in _characters(text[1:-1])]
        return characters[0] if len(characters) == 1 else f"({' '.join(characters)})" if characters else '""'
    if kind == "characters":
        return _class(text, line)
    return "/(?s:.)/"


def _class(text: str, line: int) -> str:
    inner = text[1:-1]
    is_negated = inner.startswith("^")
    characters = _characters(inner[is_negated:])
    if not characters:
        raise ValueError(f"line {line}: {text} has no characters")
    spans = []
    index = 0
    while index < len(characters):
        first, _, letter = characters[index]
        index += 1
        if letter in CLASSES:
            spans.append(CLASSES[letter])
            continue
        last = first
        if index + 1 < len(characters) and characters[index][:2] == ("-", False):
            after, _, letter = characters[index + 1]
            # A class ends no range.
            last, index = (first, index) if letter in CLASSES else (after, index + 2)
        if last < first:
            raise ValueError(f"line {line}: {first}-{last} in {text} ends before it begins")
        spans.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
    return f"/[{'^' if is_negated else ''}{''.join(spans)}]/"


def _characters(text: str) -> list[tuple[str, bool, str]]:
    """Characters, whether each was escaped, and the letter that was."""
    found = []
    for match in _CHARACTER.finditer(text):
        *codes, escaped, plain = match.groups()
        code = next((each for each in codes if each is not None), None)
        if code is not None and not int(code, 16) < 0x110000:
            raise ValueError(f"\\U{code} is no character")
        character = chr(int(code, 16)) if code is not None else _ESCAPES.get(escaped, escaped) if escaped else plain
        found.append((character, plain is None, escaped or ""))
    return found
