"""How a format writes calls: what parsers of it say, and what prompts and grammars are made of."""

from __future__ import annotations

from typing import NamedTuple


class ArgumentText(NamedTuple):
    """How one argument is written: `before` name `between` value `after`, with `separator` to the next one.
    `between_text` stands in the place of `between` before texts. A value is JSON, a text as it is; with `is_python`
    texts are strings, and True, False and None what Python calls so; with `quote` texts on every level stand between
    such."""

    before: str
    between: str
    after: str
    between_text: str
    separator: str = ""
    is_python: bool = False
    quote: str = ""


class CallText(NamedTuple):
    """How a call is written: `before` name `between` arguments `after`. Calls have `separator` between them, and all of
    them stand between `first` and `last`. It begins with what `begins` of a parser has. Arguments are JSON, or written
    one by one as `arguments` says."""

    before: str
    between: str
    after: str
    separator: str = ""
    first: str = ""
    last: str = ""
    arguments: ArgumentText | None = None


ANY_NUMBER = "\0"
"""In a CallText: digits."""

ANY_WORD = "\1"
"""In a CallText: letters."""

PYTHON_ARGUMENTS = ArgumentText("", "=", "", "=", ", ", is_python=True)
"""Arguments of a call in Python."""
