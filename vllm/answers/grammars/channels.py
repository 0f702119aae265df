"""Grammars of whole answers in channels (`syntax.channels`): reasoning, remarks, and calls or a text for a user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.answers.grammars.calls import FREE_TEXT, CallableFunction, CallGrammar, bound_schema, grammar_of, schema_text
from vllm.answers.syntax.channels import CALL, CHANNEL, END, MESSAGE, RETURN, START

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
