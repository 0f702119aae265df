"""Parsers of calls: their base class, and the names that they are chosen by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from vllm.answers.deltas import DeltaMessage, ExtractedToolCallInformation, as_delta, extracted
from vllm.answers.events import collect
from vllm.answers.reader import Machine, Reader, Step
from vllm.answers.registry import ParserManager, Registry
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls, argument_schemas, content_and_calls, random_id


class ToolParser:
    """Reads one answer. A format says what calls begin with, and reads what follows (`read_calls`); classes that others
    have written override `extract_tool_calls` and `extract_tool_calls_streaming` instead.

    Attributes:
        names: that --tool-call-parser knows it by.
        begins: markers that begin a call, or several.
        begins_at_start: further ones, which begin a call only where the answer begins.
        frames: markup around the content, which is left out of it.
        begins_unread: further ones, which `read_calls` reads itself, as it does those of the answer's beginning.
        template_marks: texts that chat templates of such models hold, each of them; for the choice by template.
        calls_follow_reasoning: calls are marked as such, and reasoning is not marked as they are.
        has_channels: answers are messages in channels (vllm.answers.syntax.channels), reasoning among them.
        call_text: how grammars write calls; None: where a call is forced, the answer is JSON. So it is where arguments
            are not.
    """

    names: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[tuple[str, ...]] = ()
    begins_at_start: ClassVar[tuple[str, ...]] = ()
    begins_unread: ClassVar[tuple[str, ...]] = ()
    frames: ClassVar[tuple[str, ...]] = ()
    template_marks: ClassVar[tuple[str, ...]] = ()
    call_text: ClassVar[CallText | None] = None
    calls_follow_reasoning: ClassVar[bool] = True
    has_channels: ClassVar[bool] = False

    def __init__(self, tokenizer: Any = None, tools: list[Any] | None = None) -> None:
        """
        Args:
            tokenizer: of the model; formats here do without.
            tools: of the request, as chat has them.
        """
        self.model_tokenizer = tokenizer
        self.tools = tools or []
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self._machine: Machine | None = None

    @property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's vocabulary."""
        return self.model_tokenizer.get_vocab()

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as dictionaries."""
        return [dict(each) if isinstance(each, Mapping) else each.model_dump() for each in self.tools]

    def make_id(self, name: str, index: int) -> str:
        """The id of a call that has none in the text."""
        return random_id(name, index)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        """Read what follows `marker`, to the end of the call or calls that it begins. Raises NotACall for another text:
        what was read since the last call, and the marker, are content then."""
        raise NotImplementedError

    def read(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer: content and calls."""
        calls = Calls(reader, argument_schemas(self.plain_tools), self.make_id)
        return content_and_calls(
            reader, calls, self.begins, self.read_calls, self.begins_at_start, self.begins_unread, self.frames
        )

    def adjust_request(self, request: Any) -> Any:
        """The request as the parser wants it: markers that are special tokens must stand in the text."""
        calls_any = bool(getattr(request, "tools", None)) and getattr(request, "tool_choice", None) != "none"
        if calls_any and self.begins and getattr(request, "skip_special_tokens", None) is not False:
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls of a whole answer."""
        machine = self._new_machine(request)
        return extracted(collect([*machine.feed(model_output), *machine.finish()]))

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """The delta of the answer's next piece; None: nothing yet."""
        if self._machine is None or current_text == delta_text:
            self._machine = self._new_machine(request)
            if previous_text:
                self._machine.feed(previous_text)
        return as_delta(self._machine.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """The delta that was held back of an answer that has ended."""
        return None if self._machine is None else as_delta(self._machine.finish())

    def get_remaining_unstreamed_args(self) -> str:
        """Nothing: deltas have all of the arguments."""
        return ""

    def _new_machine(self, request: Any) -> Machine:
        if not self.tools:
            self.tools = getattr(request, "tools", None) or []
        return Machine(self.read)


class ToolParserManager(ParserManager[ToolParser]):
    """The parsers by name."""

    _registry: ClassVar[Registry[ToolParser]] = Registry("vllm.answers.tool_parsers", "ToolParser", "tool parser")

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """
        Raises:
            KeyError: no parser has the name; it says which names there are.
        """
        return cls._registry.get(name)

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> ModuleType:
        """Run a Python file that registers parsers.

        Raises:
            ValueError: it cannot be run.
        """
        return cls._registry.import_file(plugin_path)
