"""What a request says of its answer's form, as a text that llguidance compiles: all kinds become one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from math import lcm
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.params.structured import OwnGrammar, StructuredOutputsParams
from vllm.v1.structured_output.gbnf import is_gbnf, lark_of_gbnf
from vllm.v1.structured_output.structural_tags import tag_text
from vllm.v1.structured_output.thinking import with_thinking

MAX_GRAMMAR_CHARS = 2**19
"""Limit of a schema, regular expression or grammar: a larger one would take seconds to compile."""

WHITE_SPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Between JSON's parts, unless a request says otherwise: a blank, or the end of a line and an indentation. Without a
bound small models fill their answers with it."""

_MAX_REMAINDERS = 100_000
"""Limit of the least common multiple of a schema's `multipleOf`: automata grow with it, and their time faster."""

# Objects of a schema whose values are schemas, and its keys whose value is a schema or a list of them.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "if", "then", "else")


_INVALID = {
    "grammar": "Invalid grammar specification: ",
    "structural_tag": "Invalid structured_outputs structural_tag: ",
}

_OPTIONS = "%llguidance"  # and an object: the first line of a grammar

# Values of "format" whose texts are bound.
_FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()


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
    """What is said of a form that cannot be honoured, with the words that callers look for."""
    if re.search("recursion (depth|limit)", reason):
        reason, value = ": it is nested too deeply", None
    message = f"{_INVALID.get(kind, '')}structured_outputs.{kind}{reason}"
    return VLLMValidationError(message, "structured_outputs", value)


def schema_of(params: StructuredOutputsParams) -> Any:
    """The JSON schema of a form of that kind. ValueError: it is a text that is no JSON."""
    return json.loads(params.json) if isinstance(params.json, str) else params.json


def _of_schema(value: Any, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema = json.loads(value) if isinstance(value, str) else value
    return LLMatcher.grammar_from_json_schema(json.dumps(_schema(schema, params)))


def _schema(schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
    """The schema as llguidance is to compile it."""
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
    schema = known_formats(schema)
    _check_multiples(schema)
    if params.disable_additional_properties:
        schema = closed_schema(schema)
    options: Any = {"whitespace_pattern": params.whitespace_pattern or WHITE_SPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return {**schema, "x-guidance": options}


def _changed(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of the schema with `change` made, in place, to it and to all schemas in it."""
    if isinstance(schema, list):
        return [_changed(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for name in _MAPS:
        if isinstance(changed.get(name), dict):
            changed[name] = {key: _changed(each, change) for key, each in changed[name].items()}
    changed |= {name: _changed(changed[name], change) for name in _INNER if name in changed}
    change(changed)
    return changed


def known_formats(schema: Any) -> Any:
    """The schema as an object without formats that llguidance does not know: those are remarks, as JSON Schema says of
    all."""
    return _changed({} if schema is True else {"not": {}} if schema is False else schema, _drop_format)


def _check_multiples(schema: Any) -> None:
    found: set[int] = set()

    def note(part: dict[str, Any]) -> None:
        value = part.get("multipleOf")
        if isinstance(value, (int, float)) and 0 < value < float("inf"):
            # Zeros at its end are remainders of digits, not of the number.
            found.add(int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits))))

    _changed(schema, note)
    if lcm(*found) > _MAX_REMAINDERS:
        raise ValueError(f"multipleOf: the least common multiple of all must have at most {_MAX_REMAINDERS} remainders")


def closed_schema(schema: Any) -> Any:
    """The schema with no further properties where an object does not say whether it has any."""
    return _changed(schema, _close)


def _close(schema: dict[str, Any]) -> None:
    if "properties" in schema or schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)


def _drop_format(schema: dict[str, Any]) -> None:
    if schema.get("format") not in (None, *_FORMATS):
        del schema["format"]


def _of_object(value: Any, params: StructuredOutputsParams) -> str:
    return _of_schema({"type": "object"}, params)


def _of_regex(value: str, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(value)


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

    if isinstance(value, OwnGrammar):
        return LLMatcher.grammar_from_lark(value)
    return LLMatcher.grammar_from_lark(_unforced(lark_of_gbnf(value) if is_gbnf(value) else value))


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
