r"""Regular expressions as callers mean them: `\d`, `\w` and `\s` are ASCII's unless `(?u)` asks for Unicode's.

ECMA 262, RE2 and PCRE mean [0-9] and [A-Za-z0-9_]; llguidance's expressions are Rust's, which take any digit or letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any


def _with_complements(classes: dict[str, str]) -> dict[str, str]:
    return {name.upper() if sign else name: f"[{sign}{each}]" for name, each in classes.items() for sign in ("", "^")}


CLASSES = _with_complements({"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t-\r "})
r"""`\d`, `\D`, `\w`, `\W`, `\s` and `\S` by their letters: each a class, which may stand in another one."""
# With (?u). They are spelled out, too: in a schema's pattern llguidance takes the escapes for ASCII's.
_UNICODE = _with_complements(
    {"d": r"\p{Nd}", "w": r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}", "s": r"\p{White_Space}"}
)

_FLAGS = re.compile(r"\(\?([A-Za-z]*)(?:-([A-Za-z]*))?([:)])")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
# Where white space and remarks are left out; and what is in a class, whose hyphen before a class is no range's.
_REMARK = re.compile(r"#[^\n]*")
_HYPHEN = re.compile(r"-(?=\\[dDwWsS])")

# Parts of Lark's text: what holds no expression, an expression with its flags, and keywords that objects of JSON
# follow.
_LARK = re.compile(
    r'(?P<other>(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*")|/(?P<pattern>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)'
    r"|(?P<keyword>%(?:json|regex|llguidance))\s*",
    re.DOTALL,
)


def ascii_classes(pattern: str, flags: str = "") -> str:
    """The regular expression with its classes spelled out. `flags`: letters that hold from its beginning."""
    return _Reader(pattern, set(flags)).read()


def ascii_classes_in_lark(grammar: str, write_schema: Callable[[Any], str]) -> str:
    """A grammar of Lark's dialect with the classes of its expressions spelled out, and its schemas, `%json` and an
    object, as `write_schema` has them."""
    parts: list[str] = []
    place = 0
    while (found := _LARK.search(grammar, place)) is not None:
        parts.append(grammar[place : found.start()])
        place, text = found.end(), found[0]
        if found["pattern"] is not None:
            text = f"/{ascii_classes(found['pattern'], found['flags'])}/{found['flags']}"
        elif found["keyword"] == "%json":
            try:
                schema, place = json.JSONDecoder().raw_decode(grammar, place)
            except ValueError as error:
                raise ValueError(f"{found['keyword']} is followed by no JSON: {error}") from None
            text = write_schema(schema)
        elif found["keyword"] is not None and grammar.startswith("{", place):
            # The compiler refuses what is no JSON.
            place = _end_of_json(grammar, place)
            text = grammar[found.start() : place]
        parts.append(text)
    return "".join([*parts, grammar[place:]])


def between_slashes(pattern: str) -> str:
    """A regular expression as Lark has it, with its classes spelled out."""
    spelled = ascii_classes(pattern)
    inner = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], spelled, flags=re.DOTALL)
    return f"/{inner}/".replace("\n", "\\n")


def _end_of_json(text: str, place: int) -> int:
    try:
        return json.JSONDecoder().raw_decode(text, place)[1]
    except ValueError:
        return place


class _Reader:
    """Follows an expression of Rust's syntax from left to right."""

    def __init__(self, pattern: str, flags: set[str]) -> None:
        self._pattern, self._flags = pattern, flags
        self._place = 0

    def read(self) -> str:
        """All of it, spelled out."""
        parts: list[str] = []
        outer: list[set[str]] = []  # flags that hold again behind a group
        while self._place < len(self._pattern):
            first = self._pattern[self._place]
            found = _FLAGS.match(self._pattern, self._place)
            if first == "\\":
                parts.append(self._escaped(in_class=False))
            elif first == "[":
                parts.append(self._class())
            elif first == "#" and "x" in self._flags:
                parts.append(self._take(_REMARK))
            elif found is not None:
                if found[3] == ":":
                    outer.append(self._flags)
                self._flags = (self._flags | set(found[1])) - set(found[2] or "")
                parts.append(self._take(_FLAGS))
            else:
                outer += [self._flags] if first == "(" else []
                self._flags = outer.pop() if first == ")" and outer else self._flags
                parts.append(first)
                self._place += 1
        return "".join(parts)

    def _take(self, what: re.Pattern[str]) -> str:
        found = what.match(self._pattern, self._place)
        assert found is not None
        self._place = found.end()
        return found[0]

    def _escaped(self, in_class: bool) -> str:
        text = self._pattern[self._place : self._place + 2]
        self._place += 2
        spelled = (_UNICODE if "u" in self._flags else CLASSES).get(text[1:])
        if spelled is None:
            # As everywhere else, it is a backspace.
            return r"\x08" if in_class and text == r"\b" else text
        # In any case of letters, K would be the sign for Kelvin, too.
        return f"(?-i:{spelled})" if not in_class and "i" in self._flags else spelled

    def _class(self) -> str:
        """A class in brackets, with those in it."""
        start, depth, parts = self._place, 0, [""]
        while self._place < len(self._pattern):
            first = self._pattern[self._place]
            if first == "\\":
                parts.append(self._escaped(in_class=True))
            elif first == "[" and depth and _POSIX.match(self._pattern, self._place):
                parts.append(self._take(_POSIX))
            elif first == "[":
                depth += 1
                # A bracket that closes it is none at its beginning.
                parts.append(self._take(re.compile(r"\[\^?-*\]?")))
            elif first == "#" and "x" in self._flags:
                parts.append(self._take(_REMARK))
            elif first == "-" and parts[-1] != "-" and _HYPHEN.match(self._pattern, self._place):
                parts.append(r"\-")
                self._place += 1
            else:
                parts.append(first)
                self._place += 1
                depth -= first == "]"
            if not depth:
                break
        text = "".join(parts)
        given = self._pattern[start : self._place]
        has_words = re.search(r"\\[wW]", given)
        has_letters = any(each.isalpha() for each in re.sub(r"\\.", "", given))
        return f"(?-i:{text})" if "i" in self._flags and has_words and not has_letters else text
