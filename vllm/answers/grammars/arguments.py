"""Grammars of arguments that a format writes one by one, by their JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from vllm.answers.syntax.call_text import ArgumentText
from vllm.answers.syntax.schemas import ArgumentSchema, resolved
from vllm.answers.syntax.typed_values import dumps
from vllm.exceptions import shown

_ANY_TEXT, EMPTY = r"/(.|\n)*/", '""'
# Templates write them as JSON or as Python does.
_BOOLEANS = '("true" | "false" | "True" | "False")'
_PYTHON_STRING = r"""('([^'\\\n]|\\['"\\nrt])*'|"([^"\\\n]|\\['"\\nrt])*")"""
# Keywords that bind a text beyond its type, and cannot be kept where it stands without quotes.
_BOUNDS = ("pattern", "format", "minLength", "maxLength")
_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "minProperties", "maxProperties")


class UnwritableSchema(ValueError):
    """A schema that arguments cannot be bound to in a format."""


class ArgumentGrammar:
    """Writes the rules of functions' arguments, in Lark's dialect."""

    def __init__(
        self,
        text: ArgumentText,
        literal: Callable[[str], str],
        write_schema: Callable[[Any], str],
        ids: Mapping[str, int],
    ) -> None:
        """
        Args:
            text: how an argument is written.
            literal: a text as a grammar has it.
            write_schema: a schema as a grammar has it.
            ids: of the tokenizer's added tokens, by their texts.
        """
        self._text, self._literal, self._write_schema, self._ids = text, literal, write_schema, ids
        self._open: list[Mapping[str, Any]] = []  # schemas that hold the one that is being written

    def bound(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """The rule `name`, and those that it needs: arguments in the schema's order, those that it does not require
        left out or not.

        Raises:
            UnwritableSchema: it says more than which properties there are.
        """
        return self._fields(name, schema, schema)

    def _fields(
        self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], is_nested: bool = False
    ) -> list[str]:
        found = next((each for each in _COMBINED if each in schema), "$ref" if "$ref" in schema else None)
        if found is not None:
            raise UnwritableSchema(f"{found} of several arguments")
        if schema.get("additionalProperties"):
            raise UnwritableSchema("additionalProperties")
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        missing = [each for each in required if each not in properties]
        if missing:
            raise UnwritableSchema(f"required arguments that no property describes ({', '.join(missing)})")
        rules = [f"{name}: {name}_n0"]
        separator = self._literal(self._text.separator)
        for index, (key, own) in enumerate(properties.items()):
            one, later = f"{name}_v{index}", f"{name}_s{index + 1}"
            write = self._entry if is_nested else self._argument
            rules.append(f"{one}: {write(key, resolved(own, root), root, one, rules)}")
            # Without and with an argument before it.
            left_out = () if key in required else (f" | {name}_n{index + 1}", f" | {later}")
            rules.append(f"{name}_n{index}: {one} {later}{''.join(left_out[:1])}")
            rules.append(f"{name}_s{index}: {separator} {one} {later}{''.join(left_out[1:])}")
        end = len(properties)
        return [*rules, f'{name}_n{end}: ""', f'{name}_s{end}: ""']

    def unbound(self, name: str, call_end: str) -> tuple[list[str], str]:
        """The rule `name` of any arguments, and what of the call's end is still to come behind it."""
        if self._text.is_python:
            return [f"{name}: /([^()'\"]|{_PYTHON_STRING}|\\(([^()'\"]|{_PYTHON_STRING})*\\))*/"], call_end
        rules: list[str] = []
        if self._text.quote in self._ids:
            rules.append(f"{name}_text: {name.upper()}_TEXT\n{name.upper()}_TEXT: {_ANY_TEXT}")
            pieces = f"({name}_text | {self._literal(self._text.quote)})*"
            return [*rules, f"{name}: {pieces} {self._literal(call_end.lstrip('}'))}"], ""
        if self._text.quote:
            rest = self._until(call_end, name, rules)
            return [*rules, f"{name}: {rest}"], ""
        text, one = self._text, f"{name}_v"
        between = " | ".join(map(self._literal, dict.fromkeys((text.between, text.between_text))))
        value = self._until(text.after, one, rules)
        key = f'{name}_key: /[^<>"\\n]+/'
        return [
            *rules,
            key,
            f"{one}: {self._literal(text.before)} {name}_key ({between}) {value}",
            f"{name}: {one}*",
        ], call_end

    def _argument(self, key: str, schema: Any, root: Mapping[str, Any], rule: str, rules: list[str]) -> str:
        text, own = self._text, schema if isinstance(schema, Mapping) else {}
        whole = ArgumentSchema(own, root)
        of_text, other = (self._literal(text.before + key + each) for each in (text.between_text, text.between))
        if text.is_python or text.quote:
            return f"{other} {self._nested(key, own, root, rule, rules)}"
        after = self._literal(text.after)
        choices = whole.allowed.values
        if choices is not None:
            plain = [(of_text, each) if isinstance(each, str) else (other, dumps(each)) for each in choices]
            found = {head: [self._literal(each) or EMPTY for own, each in plain if own == head] for head, _ in plain}
            return " | ".join(f"{head} ({' | '.join(each)}) {after}" for head, each in found.items()).join("()")
        if whole.allowed.types == {"boolean"}:
            return f"{other} {_BOOLEANS} {after}"
        if not whole.may_be_text:
            return f"{other} {self._json(own, root)} {after}"
        _check_unbound(key, whole)
        any_text = f"{of_text} {self._until(text.after, rule, rules)}"
        if whole.is_text or of_text == other:
            return any_text
        return f"({any_text} | {other} {self._json(own, root)} {after})"

    def _entry(self, key: str, schema: Any, root: Mapping[str, Any], rule: str, rules: list[str]) -> str:
        """A key of an object in an argument, and its value."""
        if not self._text.is_python:
            return self._argument(key, schema, root, rule, rules)
        return f'({self._python_texts([key])}) ": " {self._nested(key, schema, root, rule, rules)}'

    def _nested(self, key: str, schema: Any, root: Mapping[str, Any], rule: str, rules: list[str]) -> str:
        """A value that is written in the format's own way on every level; in Python JSON is one, too."""
        own = resolved(schema, root)
        own = own if isinstance(own, Mapping) else {}
        mark, depth = len(rules), len(self._open)
        try:
            if any(each is own for each in self._open):
                raise UnwritableSchema(f"{key}, which holds its like")
            self._open.append(own)
            return self._own_value(key, own, root, rule, rules)
        except UnwritableSchema:
            if not self._text.is_python:
                raise
            del rules[mark:]
            return self._json(own, root)
        finally:
            del self._open[depth:]

    def _own_value(self, key: str, own: Mapping[str, Any], root: Mapping[str, Any], rule: str, rules: list[str]) -> str:
        choices = ArgumentSchema(own, root).allowed.values
        several, kind = own.get("anyOf") or own.get("oneOf"), own.get("type")
        if choices is not None:
            return f"({' | '.join(map(self._constant, choices))})"
        if several:
            found = [self._nested(key, each, root, f"{rule}_{index}", rules) for index, each in enumerate(several)]
            return f"({' | '.join(found)})"
        if isinstance(kind, list):
            found = [
                self._nested(key, {**own, "type": each}, root, f"{rule}_{index}", rules)
                for index, each in enumerate(kind)
            ]
            return f"({' | '.join(found)})"
        if kind == "string":
            _check_unbound(key, ArgumentSchema(own, root))
            if self._text.is_python:
                return f"/{_PYTHON_STRING}/"
            return f"{self._literal(self._text.quote)} {self._until(self._text.quote, rule, rules)}"
        if kind == "object":
            rules += self._fields(f"{rule}_o", own, root, is_nested=True)
            return f'"{{" {rule}_o "}}"'
        if kind == "array" and isinstance(own.get("items"), Mapping) and not {"minItems", "maxItems"} & own.keys():
            rules.append(f"{rule}_i: {self._nested(key, own['items'], root, f'{rule}_i', rules)}")
            return f'"[" ({rule}_i ({self._literal(self._text.separator)} {rule}_i)*)? "]"'
        if kind in ("boolean", "null"):
            return " | ".join(map(self._constant, [True, False] if kind == "boolean" else [None])).join("()")
        if kind in ("integer", "number"):
            return self._json(own, root)
        raise UnwritableSchema(f"the type of {key}, {shown(kind)}")

    def _constant(self, value: Any) -> str:
        quote = self._text.quote
        if isinstance(value, str):
            return self._python_texts([value]) if self._text.is_python else self._literal(f"{quote}{value}{quote}")
        is_name = self._text.is_python and (value is None or isinstance(value, bool))
        return self._literal(str(value) if is_name else dumps(value))

    def _python_texts(self, values: list[str]) -> str:
        """Each with either quotes."""
        return " | ".join(
            self._literal(each) for value in values for each in dict.fromkeys((repr(value), dumps(value)))
        )

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """A value of JSON, whose schema may refer to the root's definitions."""
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"%json {self._write_schema({**schema, **definitions})}"

    def _until(self, end: str, rule: str, rules: list[str]) -> str:
        """Any text up to and with `end`."""
        tokens = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))
        found = re.search(tokens, end) if tokens else None
        if found is None:
            rules.append(f"{rule}_text[suffix={json.dumps(end)}]: {_ANY_TEXT}")
            return f"{rule}_text"
        # A text has no tokens of their own, so that it ends at the first of them.
        first = re.sub(r"[^\w\s]", r"\\\g<0>", end[: found.start()]).replace("\n", "\\n")
        rules.append(f"{rule.upper()}_TEXT: {_ANY_TEXT[:-1]}{first}/")
        return f"{rule.upper()}_TEXT {self._literal(end[found.start() :])}"


def _check_unbound(key: str, schema: ArgumentSchema) -> None:
    bound = next((each for each in _BOUNDS if each in schema.keywords), None)
    if bound is not None:
        raise UnwritableSchema(f"{bound} of the text {key}")
