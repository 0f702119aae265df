"""Structural tags, free text and tags around forms, as a grammar of llguidance's Lark.

A tokenizer may have one token for a tag or a part of it, such as `<tool_call>`, which no text matches: it is named by
its id. So the tag goes as an object to where the tokenizer is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.v1.structured_output.exact_schemas import schema_expression
from vllm.v1.structured_output.expressions import between_slashes
from vllm.v1.structured_output.gbnf import lark_of

_HEADER = "%structural_tag "
_ANY = r"/(.|\n)*/"
_AT_END = ("",)
_TYPES = {str: "a text", list: "a list", dict: "an object"}


def tag_text(tag: Any, prepare: Callable[[Any], Any]) -> str:
    """A structural tag as a text for `split_tag`.

    Args:
        tag: {"format": {"type": ..., ...}}, or {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}:
            free text, but after a trigger one of the structures that begin with it.
        prepare: makes a schema, as it is given, the one that is compiled.

    Raises:
        ValueError: a format that is not known, or whose fields are wrong.
    """
    if not isinstance(tag, dict) or not ({"structures", "triggers"} <= tag.keys() or "format" in tag):
        raise ValueError('must be an object with "format", or with "structures" and "triggers"')
    form = tag["format"] if "format" in tag else _of_structures(tag)
    form = _prepared(form, prepare)
    lark_of_tag(form, {})
    return _HEADER + json.dumps(form)


def split_tag(text: str) -> Any | None:
    """The format that `tag_text` has made a text of; None: of something else."""
    return json.loads(text.removeprefix(_HEADER)) if text.startswith(_HEADER) else None


def lark_of_tag(form: Any, special: Mapping[str, int]) -> str:
    """The grammar of a format. `special`: the ids of tokens that no text matches, by what they stand for."""
    writer = _Writer(special)
    start = writer.write(form, _AT_END)
    options = {"no_forcing": True} if writer.grammars else {}
    lark = "\n".join([f"%llguidance {json.dumps(options)}", f"start: {start}", *writer.lines, ""])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *writer.grammars]}) if writer.grammars else lark


def _of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "begin": _field(each, "begin", str),
            "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
            "end": _field(each, "end", str),
        }
        for each in _field(tag, "structures", list)
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _prepared(form: Any, prepare: Callable[[Any], Any]) -> Any:
    if isinstance(form, list):
        return [_prepared(each, prepare) for each in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        return {**form, "json_schema": prepare(_field(form, "json_schema", (dict, bool)))}
    return {name: _prepared(each, prepare) for name, each in form.items()}


def _field(form: Any, name: str, kind: Any, default: Any = None) -> Any:
    owner = (form.get("type") or "tag") if isinstance(form, dict) else None
    if owner is None:
        raise ValueError(f"structural tags consist of objects, got {type(form).__name__}")
    value = form.get(name, default)
    if not isinstance(value, kind):
        raise ValueError(f"{owner} needs {name}, {_TYPES.get(kind, 'of another type')}")
    return value


def _texts(form: Any, name: str, default: Any = None) -> list[str]:
    values: list[Any] = _field(form, name, list, default)
    if not all(isinstance(each, str) for each in values):
        raise ValueError(f"{name} must be a list of texts")
    return values


def _escaped(text: str) -> str:
    return "".join(each if each.isascii() and each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _without(expression: str, excluded: Sequence[str]) -> str:
    if not excluded:
        return expression
    return f"({expression} & ~/(.|\\n)*({'|'.join(map(_escaped, excluded))})(.|\\n)*/)"


class _Writer:
    """Writes rules. What follows a format, `follow`, is one of several texts; ("",): the answer ends; None: something
    else, so that a format must tell its own end."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._makers: dict[str, Callable[[Any, Sequence[str] | None], str]] = {
            "any_text": lambda form, follow: self._free(_texts(form, "excludes", []), follow),
            "const_string": lambda form, follow: self._literal(_field(form, "value", str)) + self._tail(follow),
            "json_schema": self._of_schema,
            "grammar": self._of_grammar,
            "sequence": self._of_sequence,
            "or": lambda form, follow: self._one_of(
                [self.write(each, follow) for each in _field(form, "elements", list)]
            ),
            "tag": self._of_tag,
            "triggered_tags": self._of_triggered,
            "tags_with_separator": self._of_separated,
            **dict.fromkeys(("optional", "star", "plus", "repeat"), self._of_repeated),
        }

    def write(self, form: Any, follow: Sequence[str] | None) -> str:
        """An expression of the format together with what follows it."""
        regular = self._regular(form)
        if regular is not None:
            return self._one_of([self._closed(regular, end) for end in follow or _AT_END])
        kind = _field(form, "type", str)
        if kind not in self._makers:
            raise ValueError(f"format {kind!r} is not supported; {', '.join(sorted([*self._makers, 'regex']))} are")
        return self._makers[kind](form, follow)

    def _rule(self, body: str, name: str = "rule") -> str:
        """`name` in capitals makes one token of the lexer's of it."""
        label = f"{name}_{len(self.lines)}"
        self.lines.append(f"{label}: {body}")
        return label

    def _lazy(self, body: str) -> str:
        """A token of the lexer's that ends as soon as it can."""
        label = f"until_{len(self.lines)}"
        self.lines.append(f"{label}[lazy]: {body}")
        return label

    @staticmethod
    def _one_of(expressions: Sequence[str]) -> str:
        if not expressions:
            raise ValueError("a list of formats or texts is empty")
        return f"({' | '.join(expressions)})"

    def _pieces(self, text: str) -> list[str]:
        """Texts, and tokens between them: the first, the third and so on are texts."""
        if self._names is None:
            return [text]
        return re.split(f"({self._names.pattern})", text)

    def _literal(self, text: str) -> str:
        parts = [
            f"<[{self._special[each]}]>" if index % 2 else f"/{_escaped(each)}/"
            for index, each in enumerate(self._pieces(text))
            if each
        ]
        return " ".join(parts) or '""'

    def _tail(self, follow: Sequence[str] | None) -> str:
        return f" {self._one_of([self._literal(each) for each in follow])}" if follow and any(follow) else ""

    def _closed(self, expression: str, end: str, is_lazy: bool = False) -> str:
        """A token of the lexer's and then `end`, whose first text is a part of it: otherwise it could not end there."""
        first, *rest = self._pieces(end)
        body = f"{expression} /{_escaped(first)}/" if first else expression
        if is_lazy and not rest:
            return self._lazy(body)
        return f"{self._rule(body, 'TEXT')} {self._literal(end[len(first) :])}" if rest else self._rule(body, "TEXT")

    def _free(self, excluded: Sequence[str], follow: Sequence[str] | None) -> str:
        """Any text up to what follows."""
        expression = _without(_ANY, excluded)
        if follow is None or (len(follow) > 1 and "" in follow):
            raise ValueError("free text must be followed by a tag's end, or by nothing")
        return self._one_of([self._closed(expression, end, is_lazy=bool(end)) for end in follow])

    def _regular(self, form: Any) -> str | None:
        """An expression within a token of the lexer's, of a format that is one."""
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "regex":
            return _without(between_slashes(_field(form, "pattern", str)), _texts(form, "excludes", []))
        if kind == "const_string":
            value = _field(form, "value", str)
            return f"/{_escaped(value)}/" if len(self._pieces(value)) == 1 else None
        if kind in ("sequence", "or"):
            inner = [self._regular(each) for each in _field(form, "elements", list)]
            found = [each for each in inner if each is not None]
            return (
                None
                if len(found) < len(inner) or not found
                else f"({(' ' if kind == 'sequence' else ' | ').join(found)})"
            )
        if kind in ("optional", "star", "plus", "repeat"):
            content = self._regular(form.get("content"))
            return None if content is None else f"({content}){_count(form)}"
        return None

    def _of_schema(self, form: Any, follow: Sequence[str] | None) -> str:
        if form.get("style", "json") != "json":
            raise ValueError(f"json_schema of style {form['style']!r} is not supported")
        return self._rule(schema_expression(form["json_schema"])) + self._tail(follow)

    def _of_grammar(self, form: Any, follow: Sequence[str] | None) -> str:
        value = _field(form, "grammar", str)
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": lark_of(value)})
        return f"@{name}{self._tail(follow)}"

    def _of_sequence(self, form: Any, follow: Sequence[str] | None) -> str:
        *first, last = _field(form, "elements", list) or [{"type": "const_string", "value": ""}]
        return " ".join([*(self.write(each, None) for each in first), self.write(last, follow)])

    def _of_repeated(self, form: Any, follow: Sequence[str] | None) -> str:
        content = self.write(_field(form, "content", dict), None)
        return f"{self._rule(f'({content}){_count(form)}')}{self._tail(follow)}"

    def _of_tag(self, form: Any, follow: Sequence[str] | None) -> str:
        begin = _field(form, "begin", str)
        return f"{self._literal(begin)} {self._inside(form, follow)}"

    def _inside(self, tag: Any, follow: Sequence[str] | None) -> str:
        """A tag after its beginning."""
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else _texts(tag, "end")
        if not any(ends):
            return self.write(_field(tag, "content", dict), follow)
        return self.write(_field(tag, "content", dict), ends) + self._tail(follow)

    def _tags(self, form: Any) -> list[Any]:
        tags: list[Any] = _field(form, "tags", list)
        for each in tags:
            if _field(each, "type", str, "tag") != "tag":
                raise ValueError(f"tags must be of type tag, got {each['type']!r}")
        return tags

    def _of_triggered(self, form: Any, follow: Sequence[str] | None) -> str:
        tags, excluded = self._tags(form), _texts(form, "excludes", [])
        after: dict[str, list[str]] = {}
        for each in tags:
            begin = _field(each, "begin", str)
            trigger = next((one for one in _texts(form, "triggers") if one and begin.startswith(one)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins the structure {begin!r}")
            trigger = begin[: self._whole(begin, len(trigger))]
            after.setdefault(trigger, []).append(f"{self._literal(begin[len(trigger) :])} {self._inside(each, None)}")
        found = [f"{self._free(excluded, [trigger])} {self._one_of(rest)}" for trigger, rest in after.items()]
        dispatched = self._rule(self._one_of(found))
        first = (
            self._rule(self._one_of([self._of_tag(each, None) for each in tags])) if form.get("at_least_one") else ""
        )
        if not form.get("stop_after_first"):
            return f"{first} ({dispatched})* {self._free(excluded, follow)}"
        if first:
            return first + self._tail(follow)
        return self._one_of([dispatched + self._tail(follow), self._free(excluded, follow)])

    def _whole(self, text: str, place: int) -> int:
        """The end of the token that `place` would divide, or the place."""
        spans = [each.span() for each in self._names.finditer(text)] if self._names is not None else []
        return next((end for start, end in spans if start < place < end), place)

    def _of_separated(self, form: Any, follow: Sequence[str] | None) -> str:
        one = self._rule(self._one_of([self._of_tag(each, None) for each in self._tags(form)]))
        separator = self._literal(_field(form, "separator", str))
        several = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several}){'' if form.get('at_least_one') else '?'}{self._tail(follow)}"


def _count(form: dict[str, Any]) -> str:
    """How often a format is repeated, as Lark writes it."""
    if form["type"] != "repeat":
        return {"optional": "?", "star": "*", "plus": "+"}[form["type"]]
    least, most = _field(form, "min", int, 0), _field(form, "max", int, -1)
    if least < 0 or -1 < most < least:
        raise ValueError(f"repeat needs 0 <= min <= max, got {least} and {most}")
    return f"{{{least},{'' if most < 0 else most}}}"
