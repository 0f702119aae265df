"""The form that a request gives its answer, as a text that llguidance compiles: all kinds become one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.params.structured import OwnGrammar, StructuredOutputsParams
from vllm.v1.structured_output.exact_schemas import schema_expression
from vllm.v1.structured_output.expressions import ascii_classes
from vllm.v1.structured_output.gbnf import lark_of
from vllm.v1.structured_output.schemas import check_multiples, closed_schema, compilable
from vllm.v1.structured_output.structural_tags import tag_text
from vllm.v1.structured_output.thinking import with_thinking

MAX_GRAMMAR_CHARS = 2**19
"""Limit of a schema, regular expression or grammar: a larger one would take seconds to compile."""

WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Between JSON's parts, unless a request says otherwise: a blank, or the end of a line and an indentation. Without a
bound small models fill their answers with it."""

_INVALID = {
    "grammar": "Invalid grammar specification: ",
    "structural_tag": "Invalid structured_outputs structural_tag: ",
}

_OPTIONS = "%llguidance"  # and an object: the first line of a grammar


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar of the answers that `params` allow; whether it compiles is not known yet.

    Raises:
        VLLMValidationError: a form that cannot be read, that is too long or that this engine does not know.
    """
    kind, value = params.kind
    if kind == "thinking":
        return with_thinking(params.thinking, "")
    try:
        text = _MAKERS[kind](value, params)
    except (ValueError, RecursionError) as error:
        if isinstance(error, VLLMValidationError):
            raise
        raise wrong_form(kind, f": {error}", value) from None
    if len(text) > MAX_GRAMMAR_CHARS:
        message = f"structured_outputs.{kind} must have at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}"
        raise VLLMValidationError(message, "structured_outputs", len(text))
    return with_thinking(params.thinking, text)


def wrong_form(kind: str, reason: str, value: Any = None) -> VLLMValidationError:
    """The error of a form that cannot be honoured, with the words that callers look for."""
    if re.search("recursion (depth|limit)", reason):
        reason, value = ": it is nested too deeply", None
    message = f"{_INVALID.get(kind, '')}structured_outputs.{kind}{reason}"
    return VLLMValidationError(message, "structured_outputs", value)


def schema_of(params: StructuredOutputsParams) -> Any:
    """The JSON schema of a form of that kind. ValueError: it is a text that is no JSON."""
    return compilable(json.loads(params.json) if isinstance(params.json, str) else params.json)


def _of_schema(value: Any, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema = json.loads(value) if isinstance(value, str) else value
    found = schema_expression(_schema(schema, params))
    if found.startswith("%json"):
        return LLMatcher.grammar_from_json_schema(found.removeprefix("%json"))
    return LLMatcher.grammar_from_lark(f"start: {found}")


def _schema(schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
    """The schema as llguidance is to compile it."""
    schema = compilable(schema)
    check_multiples(schema)
    if params.disable_additional_properties:
        schema = closed_schema(schema)
    pattern = WHITE_SPACE if params.whitespace_pattern is None else ascii_classes(params.whitespace_pattern)
    # An empty one asks for none.
    is_tight = params.disable_any_whitespace or not pattern
    return {**schema, "x-guidance": {"whitespace_flexible": False} if is_tight else {"whitespace_pattern": pattern}}


def _of_object(value: Any, params: StructuredOutputsParams) -> str:
    return _of_schema({"type": "object"}, params)


def _of_regex(value: str, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(ascii_classes(value))


def _of_choice(value: list[str], params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    # Lark's strings cannot hold all characters.
    choices = "|".join("".join(map(_literal, each)) for each in value)
    return LLMatcher.grammar_from_regex(f"({choices})")


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _of_grammar(value: str, params: StructuredOutputsParams) -> str:
    """Lark's dialect, or EBNF as GBNF has it."""
    from llguidance import LLMatcher

    lark = lark_of(value)
    return LLMatcher.grammar_from_lark(lark if isinstance(value, OwnGrammar) else _unforced(lark))


def _unforced(lark: str) -> str:
    """Without a search for what must follow: it does not end where only more of the same can (`A A "b"`, `A: /a+/`)."""
    options: dict[str, Any] = {}
    first, _, rest = lark.partition("\n")
    if first.startswith(_OPTIONS):
        options, lark = json.loads(first.removeprefix(_OPTIONS)), rest
        if not isinstance(options, dict):
            raise ValueError(f"{_OPTIONS} must be followed by an object, got {first}")
    return f"{_OPTIONS} {json.dumps(options | {'no_forcing': True})}\n{lark}"


def _of_tags(value: Any, params: StructuredOutputsParams) -> str:
    tag = json.loads(value) if isinstance(value, str) else value
    return tag_text(tag, lambda schema: _schema(schema, params))


_MAKERS: dict[str, Callable[[Any, StructuredOutputsParams], str]] = {
    "json": _of_schema,
    "json_object": _of_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "structural_tag": _of_tags,
}
