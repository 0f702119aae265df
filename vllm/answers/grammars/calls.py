"""Grammars of answers that hold calls: those that must, and those whose arguments must fit their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.answers.grammars.arguments import ArgumentGrammar
from vllm.answers.syntax.call_text import ANY_NUMBER, ANY_WORD, ArgumentText, CallText
from vllm.answers.syntax.channels import CALL, CHANNEL, END, MESSAGE, RETURN, START
from vllm.params.structured import OwnGrammar
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.structured_output.grammar import WHITE_SPACE
from vllm.v1.structured_output.schemas import closed_schema, compilable

FREE_TEXT = r"/(.|\n)*/"
"""Any text without tokens of their own, as a regular expression."""


class CallableFunction(NamedTuple):
    """A function that an answer may call."""

    name: str
    schema: dict[str, Any]  # of its arguments
    is_bound: bool = True  # to the schema; otherwise its arguments are any object


def bound_schema(function: CallableFunction) -> dict[str, Any]:
    """The schema that a function's arguments fit where a grammar holds."""
    if not function.is_bound:
        return {"type": "object"}
    return closed_schema({**compilable(function.schema), "type": "object"})


class CallGrammar:
    """Writes grammars in Lark's dialect, for one tokenizer and one way to write calls."""

    def __init__(self, tokenizer: Tokenizer, text: CallText, begins: Iterable[str], frames: Iterable[str] = ()) -> None:
        """`begins`: the markers that calls begin with, of a parser; `frames`: its markup around the content."""
        self._text = text
        added = tokenizer.backend.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        # Others are texts like any.
        self._frames = [each for each in frames if self._has_token(each)]
        begin = text.first or text.before
        self._marker = next((each for each in sorted(begins, key=len, reverse=True) if begin.startswith(each)), "")

    def forced(self, functions: Sequence[CallableFunction], many: bool) -> str:
        """An answer of one call, or of one or more."""
        rules = ["start: calls", *self._calls(functions, many, "")]
        return grammar_of([*rules, *self._functions(functions)])

    def free(self, functions: Sequence[CallableFunction], many: bool, schema: dict[str, Any] | bool | None) -> str:
        """An answer of text with calls in it, or, with a schema, either JSON of that schema or calls."""
        if schema is not None:
            rules = [f"start: form | calls\nform: %json {schema_text(schema)}", *self._calls(functions, many, "")]
        elif self._marker:
            rules = [
                f"start: {'(before calls)*' if many else '(before calls)?'} rest",
                *self._up_to(self._marker, "before"),
                *self._free_text("rest", "REST"),
                *self._calls(functions, bool(self._text.first) and many, self._marker),
            ]
        else:
            first = re.escape((self._text.first or self._text.before)[0])
            rules = [
                f"start: calls | rest?\nrest: REST\nREST: /[^{first}](.|\\n)*/",
                *self._calls(functions, many, ""),
            ]
        return grammar_of([*rules, *self._functions(functions)])

    def _up_to(self, marker: str, rule: str) -> list[str]:
        """The rule of a text up to and with the marker."""
        if self._has_token(marker):
            text = f"{rule}_text"
            return [f"{rule}: {text} {self._literal(marker)}", *self._free_text(text, text.upper())]
        return [f"{rule}[suffix={json.dumps(marker)}]: {FREE_TEXT}"]

    def _free_text(self, name: str, terminal: str) -> list[str]:
        """The rule `name`: any text, and markup around it."""
        if not self._frames:
            return [f"{name}: {terminal}\n{terminal}: {FREE_TEXT}"]
        frames = " | ".join(map(self._literal, self._frames))
        return [f"{name}: ({terminal} | {frames})*\n{terminal}: {FREE_TEXT.replace('*', '+')}"]

    def _has_token(self, text: str) -> bool:
        return self._tokens is not None and self._tokens.search(text) is not None

    def _calls(self, functions: Sequence[CallableFunction], many: bool, without: str) -> list[str]:
        """The rules `calls` and `call`, `without` a marker that stands before."""
        text = self._text
        first, before = text.first, text.before
        if without:
            first, before = (first.removeprefix(without), before) if first else ("", before.removeprefix(without))
        between = " ".join(part for part in (self._literal(text.separator), "call") if part)
        parts = [self._literal(first), "call", f"({between})*" if many else "", self._literal(text.last)]
        after = "" if text.arguments is not None else self._literal(text.after)
        choice = " | ".join(f"call_{index}" for index in range(len(functions)))
        return [
            "calls: " + " ".join(part for part in parts if part),
            "call: " + " ".join(part for part in (self._literal(before), f"({choice})", after) if part),
        ]

    def _functions(self, functions: Sequence[CallableFunction]) -> list[str]:
        rules = []
        for index, each in enumerate(functions):
            if self._text.arguments is not None:
                rules += self._one_by_one(index, each, self._text.arguments)
                continue
            arguments = schema_text(bound_schema(each))
            name = self._spelled(each.name) + self._text.between
            rules.append(f"call_{index}: {self._literal(name)} %json {arguments}")
        return rules

    def _spelled(self, name: str) -> str:
        """A name as a call has it, which may be a string of JSON."""
        is_json = self._text.before.endswith('"') and self._text.between.startswith('"')
        return json.dumps(name, ensure_ascii=False)[1:-1] if is_json else name

    def _one_by_one(self, index: int, function: CallableFunction, text: ArgumentText) -> list[str]:
        """The rules of a call and of its arguments, with the call's end."""
        grammar, name = ArgumentGrammar(text, self._literal, schema_text, self._ids), f"arguments_{index}"
        end = self._text.after
        if function.is_bound:
            rules = grammar.bound(name, bound_schema(function))
        else:
            rules, end = grammar.unbound(name, end)
        return [
            *rules,
            f"call_{index}: {self._literal(function.name + self._text.between)} {name} {self._literal(end)}",
        ]

    def _literal(self, text: str) -> str:
        """The text, with tokens of their own by their ids, and what ANY_NUMBER and ANY_WORD stand for."""
        for sign, pattern in ((ANY_NUMBER, "/[0-9]+/"), (ANY_WORD, "/[a-z]+/")):
            if sign in text:
                return f" {pattern} ".join(map(self._literal, text.split(sign)))
        parts: list[str] = []
        start = 0
        for found in self._tokens.finditer(text) if self._tokens is not None else ():
            parts += [json.dumps(text[start : found.start()], ensure_ascii=False)] if found.start() > start else []
            parts.append(f"<[{self._ids[found[0]]}]>")
            start = found.end()
        parts += [json.dumps(text[start:], ensure_ascii=False)] if start < len(text) else []
        return " ".join(parts)


def schema_text(schema: dict[str, Any] | bool) -> str:
    """A schema as a grammar has it."""
    own = schema if isinstance(schema, dict) else {}
    return json.dumps({**own, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def grammar_of(rules: Iterable[str]) -> str:
    """A grammar's text."""
    return OwnGrammar("\n".join(["%llguidance {}", *rules, ""]))


_TYPE = f" <|constrain|>json{MESSAGE}"


class ChannelGrammar(CallGrammar):
    """See CallGrammar. An answer follows the text `<|start|>assistant`, and its messages have that between them."""

    thinks = True
    """Whether answers may hold reasoning; without, it comes before them."""

    def forced(self, functions: Sequence[CallableFunction], many: bool) -> str:
        """See CallGrammar.forced."""
        return grammar_of(["start: step* calls", *self._steps(), *self._to_functions(functions, many)])

    def free(self, functions: Sequence[CallableFunction], many: bool, schema: dict[str, Any] | bool | None) -> str:
        """See CallGrammar.free."""
        header = " | ".join(self._literal(f"{CHANNEL}final{kind}") for kind in (MESSAGE, _TYPE))
        content = "rest" if schema is None else f"%json {schema_text(schema)}"
        return grammar_of(
            [
                "start: step* (calls | final)",
                *self._steps(),
                f"final: ({header}) {content} {self._optional(RETURN)}",
                f"rest: REST\nREST: {FREE_TEXT}",
                *self._to_functions(functions, many),
            ]
        )

    def _steps(self) -> list[str]:
        """The rule `step`: a message that another one follows."""
        kinds = ["analysis", "commentary"] if self.thinks else ["commentary"]
        headers = " | ".join(self._literal(f"{CHANNEL}{kind}{MESSAGE}") for kind in kinds)
        return [f"step: ({headers}) body {self._literal(f'{START}assistant')}", *self._up_to(END, "body")]

    def _to_functions(self, functions: Sequence[CallableFunction], many: bool) -> list[str]:
        """The rule `calls`. Recipients stand in the role or in the channel, as models and templates write them."""
        choice = " | ".join(f"call_{index}" for index in range(len(functions)))
        more = f" ({self._literal(f'{CALL}{START}assistant')} ({choice}))*" if many else ""
        types = " | ".join(map(self._literal, (MESSAGE, _TYPE, _TYPE.strip(), f" json{MESSAGE}")))
        rules = [f"calls: ({choice}){more} {self._optional(CALL)}", f"type: {types}"]
        for index, each in enumerate(functions):
            to = f" to=functions.{each.name}"
            headers = " | ".join(map(self._literal, (f"{to}{CHANNEL}commentary", f"{CHANNEL}commentary{to}")))
            rules.append(f"call_{index}: ({headers}) type %json {schema_text(bound_schema(each))}")
        return rules

    def _optional(self, marker: str) -> str:
        return f"({self._literal(marker)})?"
