"""Prompt templates: a text with {fields} of the input in it."""

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

# A small model needs examples to answer with a label; one of each favours neither.
_SENTIMENT = (
    "Review: It works perfectly and I use it every day.\nSentiment: positive\n\n"
    "Review: It fell apart after a week.\nSentiment: negative\n\n"
    "Review: {text}\nSentiment:"
)


class Template:
    """A prompt with {fields} in it. {text} is the text, whatever its field is called; {{ is a plain brace."""

    def __init__(self, source: str) -> None:
        """
        Raises:
            CliError: unbalanced braces, an empty field, a format or conversion, or no field at all.
        """
        try:
            parts = list(Formatter().parse(source))
        except ValueError as error:
            raise CliError(f"template: {error}; write {{{{ and }}}} for plain braces") from None
        self.source = source
        self._parts: list[tuple[str, str | None]] = []
        for literal, name, form, conversion in parts:
            if name == "" or form or conversion:
                raise CliError(
                    "template: a field is a name in braces, such as {text}; write {{ and }} for plain braces"
                )
            self._parts.append((literal, name))
        if all(name is None for _, name in self._parts):
            raise CliError("template: it has no field, so that every prompt would be the same; {text} is the text")

    @classmethod
    def unescaped(cls, argument: str) -> Template:
        r"""From a command-line argument, in which \n is a line break, \t a tab and \\ a backslash."""
        return cls(re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], argument))

    @classmethod
    def default(cls, labels: Sequence[str]) -> Template:
        """For positive and negative two examples of sentiment; else a question naming the labels if few."""
        names = [label.strip() for label in labels]
        if {name.lower() for name in names} <= {"positive", "negative"}:
            return cls(_SENTIMENT)
        if len(names) > _MAX_LISTED:
            return cls("Text: {text}\nLabel:")
        listed = ", ".join(names).replace("{", "{{").replace("}", "}}")
        return cls(f"Choose the label that fits the text best: {listed}.\n\nText: {{text}}\nLabel:")

    def fields(self) -> set[str]:
        """The fields it needs beside the text."""
        return {name for _, name in self._parts if name is not None and name != _TEXT}

    def render(self, name: str, item: Item) -> str:
        """The prompt of one text. Its braces, and those of other fields, stay as they are.

        Args:
            name: the input file's name, for the message.
            item: the text and its fields.

        Raises:
            CliError: a field that this line does not have; names the line and the field.
        """
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
