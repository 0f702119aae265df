"""Prompt templates: a text with {fields} of the input."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from string import Formatter
from typing import Any

from vllm.exceptions import CliError
from vllm.scoring.files import Item

_TEXT = "text"
_MAX_LISTED = 20
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}

# A small model needs examples to answer with a label; one of each keeps the balance.
_SENTIMENT = (
    "Review: It works perfectly and I use it every day.\nSentiment: positive\n\n"
    "Review: It fell apart after a week.\nSentiment: negative\n\n"
    "Review: {text}\nSentiment:"
)


class Template:
    """A prompt with {fields}. {text} is the text, whatever its field is called; {{ is a plain brace."""

    def __init__(self, source: str) -> None:
        plain = "write {{ and }} for plain braces"
        try:
            parts = list(Formatter().parse(source))
        except ValueError as error:
            raise CliError(f"template: {error}; {plain}") from None
        if any(name == "" or form or conversion for _, name, form, conversion in parts):
            raise CliError(f"template: a field is a name in braces, such as {{text}}; {plain}")
        self.source = source
        self._parts = [(literal, name) for literal, name, _, _ in parts]
        if all(name is None for _, name in self._parts):
            raise CliError("template: it has no field, so that every prompt would be the same; {text} is the text")

    @classmethod
    def unescaped(cls, argument: str) -> Template:
        r"""From a command-line argument, in which \n is a line break, \t a tab and \\ a backslash."""
        return cls(re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], argument))

    @classmethod
    def default(cls, labels: Sequence[str]) -> Template:
        """Two examples for positive and negative; else a question, with the labels unless they are many."""
        names = [label.strip() for label in labels]
        if {name.lower() for name in names} <= {"positive", "negative"}:
            return cls(_SENTIMENT)
        if len(names) > _MAX_LISTED:
            return cls("Text: {text}\nLabel:")
        listed = ", ".join(names).replace("{", "{{").replace("}", "}}")
        return cls(f"Choose the label that fits the text best: {listed}.\n\nText: {{text}}\nLabel:")

    def fields(self) -> set[str]:
        return {name for _, name in self._parts if name is not None and name != _TEXT}

    def count(self, field: str | None) -> int:
        """How often a field is there."""
        return sum(name is not None and name == field for _, name in self._parts)

    def render(self, name: str, item: Item) -> str:
        """The prompt of one text; braces in fields stay as they are. A CliError names the input file (`name`), the line
        and the field that it lacks."""
        pieces = []
        for literal, field in self._parts:
            pieces.append(literal)
            if field == _TEXT:
                pieces.append(item.text)
            elif field is not None:
                if field not in item.fields:
                    known = ", ".join(sorted({_TEXT, *item.fields}))
                    raise CliError(f"{name}:{item.line}: the template's field {field!r} is not there; known: {known}")
                pieces.append(_as_text(item.fields[field]))
        return "".join(pieces)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
