"""The plan of the answers to a request: which tools they may or must call, and how they are bound and parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from vllm.answers.answer import AUTO, AnswerFormat, AnswerParser, ContentPlaces
from vllm.answers.grammars.arguments import UnwritableSchema
from vllm.answers.grammars.calls import CallableFunction, CallGrammar, ChannelGrammar
from vllm.answers.prompts.tool_prompts import ToolPrompt
from vllm.answers.tool_parsers import ToolParser, ToolParserManager
from vllm.exceptions import UnservedFieldError, VLLMValidationError, shown
from vllm.params.structured import StructuredOutputsParams, Thinking, plain_json
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import wrong_type

_ANY_CALL = "required"
_MODES = ("none", "auto", _ANY_CALL)


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may call.

    Attributes:
        mode: "none", "auto" or "required".
        tools: those that it may call, in chat's form; of "none" all of the request's.
        most: calls; None: any number.
        field, choice_field: names of the request's fields, for errors.
    """

    mode: str = "none"
    tools: tuple[dict[str, Any], ...] = ()
    most: int | None = None
    field: str = "tools"
    choice_field: str = "tool_choice"

    @classmethod
    def of(cls, request: Any) -> ToolChoice:
        """
        Args:
            request: has chat's fields.

        Raises:
            VLLMValidationError: a tool or a choice that cannot be honoured, or a field of a wrong type.
        """
        is_older = bool(request.functions) and not request.tools
        field, choice_field = ("functions", "function_call") if is_older else ("tools", "tool_choice")
        given: Any = (request.functions if is_older else request.tools) or []
        if not all(isinstance(each, dict) for each in given):
            raise wrong_type(field, given, "a list of objects")
        choice: Any = request.function_call if is_older else request.tool_choice
        if choice is None and not is_older and request.function_call is not None:
            choice, choice_field = request.function_call, "function_call"
        tools = [{"type": "function", "function": each} for each in given] if is_older else list(given)
        most = 1 if is_older or request.parallel_tool_calls is False else None
        own = cls("auto" if tools else "none", tuple(tools), most, field, choice_field)
        return own._chosen(choice)

    def _chosen(self, choice: Any) -> ToolChoice:
        if choice == "none" or (choice in (None, "auto") and not self.tools):
            return replace(self, mode="none")
        mode, names = self._read(choice)
        if not self.tools:
            message = f"{self.choice_field}={shown(choice)} needs {self.field}"
            raise VLLMValidationError(message, self.choice_field)
        known = [self._check(index, tool) for index, tool in enumerate(self.tools)]
        for name in names or ():
            if name not in known:
                message = f"{self.choice_field} names {shown(name)}, and {self.field} have {', '.join(known)}"
                raise VLLMValidationError(message, self.choice_field)
        tools = self.tools if names is None else tuple(t for t in self.tools if t["function"]["name"] in names)
        is_named = isinstance(choice, dict) and choice.get("type") != "allowed_tools"
        return replace(self, mode=mode, tools=tools, most=1 if is_named else self.most)

    def _read(self, choice: Any) -> tuple[str, list[Any] | None]:
        """The mode, and the names of the tools that it leaves; None: all."""
        if choice is None or choice in _MODES:
            return choice or "auto", None
        if isinstance(choice, dict):
            kind = choice.get("type", "function")
            if kind == "function":
                inner = choice.get("function", choice)
                name = inner.get("name") if isinstance(inner, dict) else None
                if isinstance(name, str):
                    return _ANY_CALL, [name]
            elif kind == "allowed_tools":
                allowed = choice.get("allowed_tools", choice)
                mode, tools = (
                    (allowed.get("mode", "auto"), allowed.get("tools")) if isinstance(allowed, dict) else ("", 0)
                )
                if mode in ("auto", _ANY_CALL) and isinstance(tools, list) and tools:
                    return mode, [self._allowed_name(each) for each in tools]
        message = (
            f'{self.choice_field} must be "none", "auto", "required", an object with a function\'s name, or '
            f"allowed_tools with a mode and a list of functions, got {shown(choice)}"
        )
        raise VLLMValidationError(message, self.choice_field)

    @staticmethod
    def _allowed_name(tool: Any) -> Any:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        return inner.get("name") if isinstance(inner, dict) else None

    def _check(self, index: int, tool: dict[str, Any]) -> str:
        """The name of a tool that can be called."""
        place = f"{self.field}[{index}]"
        if tool.get("type") != "function":
            kind = shown(tool.get("type"))
            message = f"{place}.type cannot be honoured: give a function with a schema of its arguments; got {kind}"
            raise UnservedFieldError(message, self.field)
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name.strip():
            raise VLLMValidationError(f"{place} has no function with a name", self.field)
        assert isinstance(function, dict)
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict):
            raise VLLMValidationError(f"{place}.function.parameters must be a JSON schema", self.field)
        kind = schema.get("type") or "object"
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            message = f"{place}.function.parameters must be the schema of an object, got the type {shown(kind)}"
            raise VLLMValidationError(message, self.field)
        return name

    @property
    def functions(self) -> list[CallableFunction]:
        """The functions that may be called, all bound to their schemas if calls are forced; else those that are
        `strict`."""
        is_forced = self.mode == _ANY_CALL
        functions = [each["function"] for each in self.tools]
        return [
            CallableFunction(each["name"], each.get("parameters") or {}, is_forced or bool(each.get("strict")))
            for each in functions
        ]


def _writes_json(parser: type[ToolParser]) -> bool:
    return parser.call_text is not None and parser.call_text.arguments is None


class AnswerPlan:
    """How the answers to a request are bound and parsed.

    Attributes:
        choice: which tools they may call.
        format: the parsers.
        is_older: the request has `functions`, and answers have `function_call`.
    """

    def __init__(
        self,
        request: Any,
        tokenizer: Tokenizer,
        format: AnswerFormat,
        template: str,
        *,
        tells_tools: bool = False,
        hides_tools: bool = True,
        parts_reasoning: bool = False,
    ) -> None:
        """
        Args:
            request: has chat's fields.
            tokenizer: of the model.
            format: the parsers of the model's answers.
            template: the chat template's text.
            tells_tools: the prompt tells of tools where the template ignores them.
            hides_tools: with tool_choice "none" the template gets no tools.
            parts_reasoning: reasoning that the template shows is parted, though `format` has no parser of it.

        Raises:
            VLLMValidationError: as ToolChoice.of, and where calls cannot be parsed.
        """
        self._request, self._tokenizer, self._configured = request, tokenizer, format
        self._tells_tools, self._hides_tools = tells_tools, hides_tools
        self.choice = choice = ToolChoice.of(request)
        self.is_older = choice.field == "functions"
        self._holds_calls = False  # the form of answers
        self._marker = ""  # of a thought that may stand before JSON
        budget = request.thinking_token_budget
        self._budget = None if budget in (None, -1) else budget
        if format.reasoning is None:
            own = AnswerFormat.of(template, None, AUTO).reasoning
            if own is not None and (parts_reasoning or own.has_channels):
                format = replace(format, reasoning=own)
        if choice.mode == "none":
            format = replace(format, tools=None)
        elif format.tools is None and choice.mode == "auto":
            message = (
                f"{choice.field}: the chat template does not show how this model writes calls; have it told by "
                "--tool-prompt generic, or name its format by --tool-call-parser: "
                f"{', '.join(ToolParserManager.list_registered())}"
            )
            raise UnservedFieldError(message, choice.field)
        elif choice.mode == _ANY_CALL and (format.tools is None or not _writes_json(format.tools)):
            format = replace(format, tools=ToolParserManager.get_tool_parser("json_array"))
        self.format = format

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """For the chat template."""
        is_hidden = self.choice.mode == "none" and self._hides_tools
        return None if is_hidden else list(self.choice.tools) or None

    @property
    def tool_prompt(self) -> ToolPrompt | None:
        """The text that tells of the tools where the template ignores them; None: nothing does."""
        parser = self.format.tools or self._configured.tools
        if not self._tells_tools or parser is None or parser.call_text is None:
            return None
        return ToolPrompt(parser.call_text, () if self.choice.mode == "none" else self.choice.tools)

    def structured_outputs(self, given: Any, may_be_arguments: bool = True) -> Any:
        """The form of answers: `given`, the one of the request's other fields, or a grammar of calls.
        `may_be_arguments`: `given` may be meant for the arguments of a forced call; otherwise it is of the text.

        Raises:
            VLLMValidationError: both are asked for, and cannot be had at once.
        """
        choice, parser = self.choice, self.format.tools
        functions = choice.functions if choice.mode != "none" else []
        needs_grammar = choice.mode == _ANY_CALL or given is not None or any(each.is_bound for each in functions)
        if not functions or not needs_grammar:
            return given
        many = choice.most is None
        self._holds_calls = True
        if choice.mode == _ANY_CALL:
            if given is not None and not self._leaves_calls(given, functions, may_be_arguments):
                message = f"{choice.choice_field} and the form of the answer exclude each other: give one of them"
                raise VLLMValidationError(message, choice.choice_field)
            return {"grammar": self._grammar(parser).forced(functions, many)}
        if parser is None or parser.call_text is None or not (parser.calls_follow_reasoning or parser.has_channels):
            if given is None:
                message = (
                    f"{choice.field}: strict cannot be kept for this model's format of calls with tool_choice auto; "
                    "leave it out, or force a call"
                )
                raise UnservedFieldError(message, choice.field)
            message = f"{choice.field} and the form of the answer exclude each other for this model's format of calls"
            raise UnservedFieldError(message, choice.field)
        try:
            return {"grammar": self._grammar(parser).free(functions, many, self._schema(given))}
        except UnwritableSchema as error:
            message = f"{choice.field}: strict cannot be kept for this model's format of calls: {error}"
            raise UnservedFieldError(message, choice.field) from None

    @staticmethod
    def _leaves_calls(given: Any, functions: Sequence[CallableFunction], may_be_arguments: bool) -> bool:
        """Whether a form does not say that the answer is no call. One of the text does not, as a forced call has none;
        another may be that of the only function's arguments."""
        if not may_be_arguments:
            return True
        is_schema = given.keys() == {"json"} and len(functions) == 1
        return is_schema and plain_json(given["json"]) == plain_json(functions[0].schema)

    @contextmanager
    def named_schemas(self) -> Iterator[None]:
        """Errors about the grammar as those of the tools whose schemas it is made of."""
        try:
            yield
        except VLLMValidationError as error:
            if not self._holds_calls or error.parameter != "structured_outputs":
                raise
            reason = error.args[0].rpartition("structured_outputs.grammar ")[2]
            message = f"{self.choice.field}: a schema cannot be kept as a grammar, which {reason}"
            raise VLLMValidationError(message, self.choice.field) from None

    def after_reasoning(self, form: StructuredOutputsParams | None, opening: str) -> StructuredOutputsParams | None:
        """The form of answers, which begins after their reasoning; with the budget of that, if any. `opening`: what the
        prompt has of the answer.

        Raises:
            VLLMValidationError: a budget that cannot be kept.
        """
        budget, reasoning = self._budget, self.format.reasoning
        if budget is not None and (reasoning is None or not reasoning.ends):
            message = f"thinking_token_budget={budget} needs --reasoning-parser: the server does not know where it ends"
            raise UnservedFieldError(message, "thinking_token_budget")
        is_bound = form is not None or budget is not None
        if reasoning is None or not reasoning.ends or not is_bound:
            return form
        parser = self.format.tools if self._holds_calls else None
        if (
            parser is not None
            and not parser.calls_follow_reasoning
            and not (parser.has_channels and budget is not None)
        ):
            return form
        is_inside = reasoning.begins_inside(opening)
        if is_inside is False:
            return form
        begin, end = reasoning.pair_of(opening)
        more = [each for each in reasoning.ends if each != end]
        if reasoning.ends_before_any and (form is None or self._holds_calls):
            end, more = reasoning.ends_before_any, []
        has_begun = is_inside or reasoning.is_implicit
        if form is not None and not has_begun and form.kind[0] in ("json", "json_object"):
            self._marker = begin
        # Other ends, as the answer's reader knows them: there a form could not begin.
        excluded = () if form is None or reasoning.has_channels else reasoning.also_ends
        if form is None:
            more += reasoning.also_ends
        thinking = Thinking(end, "" if has_begun else begin, budget, more, excluded)
        return StructuredOutputsParams(thinking=thinking) if form is None else replace(form, thinking=thinking)

    def _schema(self, given: Any) -> dict[str, Any] | bool | None:
        if given is None:
            return None
        if given.keys() == {"json_object"}:
            return {"type": "object"}
        if given.keys() == {"json"} and isinstance(given["json"], (dict, bool)):
            return given["json"]
        message = f"beside {self.choice.field} the form of an answer may be a JSON schema alone, got {shown(given)}"
        raise UnservedFieldError(message, self.choice.field)

    def _grammar(self, parser: type[ToolParser] | None) -> CallGrammar:
        assert parser is not None and parser.call_text is not None
        kind = ChannelGrammar if parser.has_channels else CallGrammar
        made = kind(self._tokenizer, parser.call_text, (*parser.begins, *parser.begins_unread), parser.frames)
        if isinstance(made, ChannelGrammar):
            made.thinks = self._budget is None
        return made

    @property
    def skip_special_tokens(self) -> bool | None:
        """Whether the engine leaves special tokens out: those that mark parts stay in the text."""
        given = self._request.skip_special_tokens
        if given is None and self.format.has_special_markers(self._tokenizer):
            return False
        return given

    def content_of(self, opening: str) -> Callable[[], ContentPlaces] | None:
        """A maker of readers of where the content of a choice stands; None: all is content."""
        if self.format.tools is None and self.format.reasoning is None:
            return None

        def made() -> ContentPlaces:
            parser = self.parser(opening, is_streamed=True)
            assert parser is not None
            return ContentPlaces(parser)

        return made

    def parser(self, opening: str, is_streamed: bool | None = None) -> AnswerParser | None:
        """A parser of one choice of the answer; None: all is content. `opening`: what the prompt has of the answer.
        `is_streamed`: the text comes in pieces; None: if the answer does."""
        if self.format.tools is None and self.format.reasoning is None:
            return None
        tokenizer: Any = self._tokenizer
        if self.format.asks_tokenizer:
            tokenizer = getattr(tokenizer, "hf_tokenizer", None)
        tools = [dict(each) for each in self.choice.tools]
        wants_pieces = bool(self._request.stream) if is_streamed is None else is_streamed
        only_calls = self.choice.mode == _ANY_CALL
        request = self._request
        sizes = self.choice.most, request, only_calls, self._marker
        return AnswerParser(self.format, tokenizer, tools, opening, wants_pieces, *sizes)
