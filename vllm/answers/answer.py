"""Answers to messages: the parts of a text that a model has generated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.answers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, as_content
from vllm.answers.reader import Machine, Reader, Step
from vllm.answers.reasoning import ReasoningParser, ReasoningParserManager
from vllm.answers.syntax.calls import random_id
from vllm.answers.tool_parsers import ToolParser, ToolParserManager
from vllm.logger import init_logger
from vllm.tokenizers.tokenizer import Tokenizer

logger = init_logger(__name__)

AUTO = "auto"
"""In place of a parser's name: the one whose marks the chat template has."""


@dataclass(frozen=True)
class AnswerFormat:
    """The parsers of a model's answers; None: that part is not looked for."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @classmethod
    def of(cls, template: str | None, tool_parser: str | None, reasoning_parser: str | None) -> AnswerFormat:
        """By the parsers' names, or "auto".

        Raises:
            ValueError: a name that no parser has.
        """
        tools, reasoning = None, None
        try:
            if tool_parser == AUTO:
                tools = ToolParserManager.of_template(template or "")
            elif tool_parser is not None:
                tools = ToolParserManager.get_tool_parser(tool_parser)
            if reasoning_parser == AUTO:
                reasoning = ReasoningParserManager.of_template(template or "")
            elif reasoning_parser is not None:
                reasoning = ReasoningParserManager.get_reasoning_parser(reasoning_parser)
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        return cls(tools, reasoning)

    @property
    def asks_tokenizer(self) -> bool:
        """Whether a parser is not one of ours, and may ask its tokenizer for anything."""
        return any(is_foreign(each) for each in (self.tools, self.reasoning) if each is not None)

    def has_special_markers(self, tokenizer: Tokenizer) -> bool:
        """Whether a marker is a special token, which texts leave out unless asked not to."""
        markers: list[str] = []
        if self.tools is not None:
            markers += [*self.tools.begins, *self.tools.begins_at_start]
        if self.reasoning is not None:
            markers += [*self.reasoning.begins, *self.reasoning.ends]
        # Others' parsers may look for anything.
        markers += ["<"] if self.asks_tokenizer else []
        special = [tokenizer.id_to_token(token_id) or "" for token_id in tokenizer.all_special_ids]
        return any(text and (text in marker or marker in text) for text in special for marker in markers)


def is_foreign(parser: type[ToolParser] | type[ReasoningParser]) -> bool:
    """Whether the class parses by upstream's methods, in place of a program for a Reader."""
    if issubclass(parser, ToolParser):
        return parser.read is ToolParser.read and parser.read_calls is ToolParser.read_calls
    return parser.extract_reasoning_streaming is not ReasoningParser.extract_reasoning_streaming


class AnswerParser:
    """Parses one choice of an answer, as its text comes."""

    def __init__(
        self,
        form: AnswerFormat,
        tokenizer: Any = None,
        tools: list[dict[str, Any]] | None = None,
        prompt: str | None = None,
        is_streamed: bool = True,
        most_calls: int | None = None,
        request: Any = None,
        only_calls: bool = False,
        marker: str = "",
    ) -> None:
        """
        Args:
            form: what is looked for.
            tokenizer: of the model, for parsers of others.
            tools: of the request, in chat's form; their schemas say which arguments are texts.
            prompt: what the prompt has of the answer (`Written.opening`), which may have begun its reasoning.
            is_streamed: events are wanted as the text comes, which parsers of others need to know.
            most_calls: further calls are left out.
            request: for parsers of others.
            only_calls: a form binds the answer to calls: what else its end may look like is a call that was cut.
            marker: begins a thought before a form that nothing of it begins: a part of it is no content.
        """
        self.num_calls = 0
        self._only_calls, self._marker = only_calls, marker
        self._most_calls = most_calls
        self._tools = None if form.tools is None else form.tools(tokenizer, tools)
        self._reasoning = None
        self._foreign_reasoning = None
        if form.reasoning is not None and is_foreign(form.reasoning):
            self._foreign_reasoning = _ForeignReasoning(form.reasoning(tokenizer), request, is_streamed)
        elif form.reasoning is not None:
            self._reasoning = form.reasoning(tokenizer)
        self._is_inside = None if form.reasoning is None or prompt is None else form.reasoning.begins_inside(prompt)
        self._foreign = None
        if form.tools is not None and is_foreign(form.tools):
            assert self._tools is not None
            self._foreign = _ForeignTools(self._tools, request, is_streamed)
        self._machine = Machine(self._read)
        self._parts: list[tuple[int, str]] = []  # (offset of its end, part), ascending
        self._reasoning_end = 0  # offset behind its marker, once it is known
        self._content_ends: list[int] = []  # offsets, of the last events
        self._is_finished = False

    @property
    def call_end(self) -> str:
        """The text behind a call's arguments; "": there are no calls, or it is not known."""
        text = None if self._tools is None else self._tools.call_text
        return "" if text is None else text.after + text.last

    @property
    def num_read(self) -> int:
        """How many characters of the text are in events, with the markers before these."""
        return self._parts[-1][0] if self._parts else 0

    @property
    def content_ends(self) -> list[int] | None:
        """Offsets in the text at which the contents among the last events end; None: parsers of others do not say."""
        has_foreign = self._foreign is not None or self._foreign_reasoning is not None
        return None if has_foreign else self._content_ends

    def part_at(self, offset: int) -> str | None:
        """The part that the character there belongs to: "reasoning", "content" or "tool_call", markers included; None:
        it is not known yet. After the end: the last part."""
        index = bisect_right(self._parts, offset, key=lambda each: each[0])
        if index < len(self._parts):
            return self._parts[index][1]
        if not self._is_finished:
            return None
        return self._parts[-1][1] if self._parts else "content"

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """The events of the next piece of the text; `token_ids` are its tokens, for parsers of others."""
        before: list[Event] = []
        self._content_ends = []
        if self._foreign_reasoning is not None:
            before, text = self._foreign_reasoning.split(text, token_ids)
        return before + self._counted(self._machine.feed(text), token_ids, is_last=False)

    def finish(self) -> list[Event]:
        """The last events: the text has ended."""
        self._is_finished = True
        before: list[Event] = []
        self._content_ends = []
        if self._foreign_reasoning is not None:
            before, text = self._foreign_reasoning.finish()
            before += self._counted(self._machine.feed(text), (), is_last=False)
        is_first = not self._parts
        last = self._counted(self._machine.finish(), (), is_last=True)
        text = "".join(event.text for event in last if isinstance(event, Content))
        if is_first and text and self._marker.startswith(text):
            last, self._content_ends = [], []
        if self._only_calls:
            calls: list[Event] = [event for event in last if not isinstance(event, Content)]
            is_cut, last = len(calls) < len(last), calls
            self._content_ends = []
            if is_cut and not self.num_calls and self._tools is not None and len(self._tools.plain_tools) == 1:
                # No other function can be meant.
                name = self._tools.plain_tools[0]["function"]["name"]
                last += [CallStart(0, self._tools.make_id(name, 0), name), CallEnd(0)]
                self.num_calls = 1
        return before + last

    def _read(self, reader: Reader) -> Iterator[Step]:
        # Calls that are forced may have another form than the model's own.
        whole = self._reasoning if self._tools is None else self._tools
        if whole is not None and hasattr(whole, "read_whole"):
            yield from whole.read_whole(reader)
            return
        if self._reasoning is not None:
            yield from self._reasoning.read_reasoning(reader, self._is_inside)
            self._reasoning_end = reader.place
        if self._tools is not None and self._foreign is None:
            yield from self._tools.read(reader)
        elif self._reasoning is not None and self._foreign is None:
            yield from self._reasoning.read_content(reader)
        else:
            yield from reader.text_until((), as_content)

    def _note_parts(self, events: Iterable[Event]) -> None:
        for event, place in zip(events, self._machine.places, strict=True):
            part = event.kind if isinstance(event, (Content, Reasoning)) else "tool_call"
            end, last = self._parts[-1] if self._parts else (0, part)
            if end < self._reasoning_end < place and part != "reasoning":
                last = "reasoning"
                self._parts.append((self._reasoning_end, last))
            if isinstance(event, Content):
                self._content_ends.append(place)
                if last != "content":
                    # The marker before it ended the other part.
                    self._parts.append((place - len(event.text), last))
            self._parts.append((place, part))

    def _counted(self, events: Iterable[Event], token_ids: Sequence[int], is_last: bool) -> list[Event]:
        self._note_parts(events)
        if self._foreign is not None:
            events = self._foreign.events(events, token_ids, is_last)
        kept = []
        for event in events:
            if not isinstance(event, (Content, Reasoning)) and event.index >= (self._most_calls or event.index + 1):
                continue
            self.num_calls += isinstance(event, CallStart)
            kept.append(event)
        return kept


class _ForeignReasoning:
    """Asks a parser that was written for upstream: deltas while the answer comes, or the whole text at its end."""

    def __init__(self, parser: ReasoningParser, request: Any, is_streamed: bool) -> None:
        self._parser, self._request, self._is_streamed = parser, request, is_streamed
        self._text = ""
        self._ids: list[int] = []

    def split(self, text: str, token_ids: Sequence[int]) -> tuple[list[Event], str]:
        """The reasoning in the next piece, and its content."""
        before, ids_before, ids = self._text, self._ids, list(token_ids)
        self._text, self._ids = before + text, ids_before + ids
        if not self._is_streamed or not text:
            return [], ""
        delta = self._parser.extract_reasoning_streaming(before, self._text, text, ids_before, self._ids, ids)
        if delta is None:
            return [], ""
        return [Reasoning(delta.reasoning)] if delta.reasoning else [], delta.content or ""

    def finish(self) -> tuple[list[Event], str]:
        """The events of a whole answer, and its content."""
        if self._is_streamed:
            return [], ""
        reasoning, content = self._parser.extract_reasoning(self._text, self._request)
        return [Reasoning(reasoning)] if reasoning else [], content or ""


class _ForeignTools:
    """Asks a parser that was written for upstream: deltas while the answer comes, or the whole text at its end."""

    def __init__(self, parser: ToolParser, request: Any, is_streamed: bool) -> None:
        self._parser, self._request, self._is_streamed = parser, request, is_streamed
        self._text = ""
        self._ids: list[int] = []
        self._open: int | None = None

    def events(self, events: Iterable[Event], token_ids: Sequence[int], is_last: bool) -> Iterator[Event]:
        """The events that the content among `events` becomes."""
        for event in events:
            if not isinstance(event, Content):
                yield event
            elif not self._is_streamed:
                self._text += event.text
            else:
                yield from self._streamed(event.text, list(token_ids))
                token_ids = ()
        if is_last and not self._is_streamed:
            yield from self._whole()
        if is_last:
            yield from self._end()

    def _streamed(self, text: str, ids: list[int]) -> Iterator[Event]:
        before, ids_before = self._text, self._ids
        self._text, self._ids = before + text, ids_before + ids
        delta = self._parser.extract_tool_calls_streaming(
            before, self._text, text, ids_before, self._ids, ids, self._request
        )
        if delta is None:
            return
        if delta.content:
            yield Content(delta.content)
        for call in delta.tool_calls:
            function = call.function
            if function is not None and function.name:
                yield from self._end()
                self._open = call.index
                yield CallStart(call.index, call.id or random_id(function.name, call.index), function.name)
            if function is not None and function.arguments:
                yield CallArguments(call.index, function.arguments)

    def _whole(self) -> Iterator[Event]:
        found = self._parser.extract_tool_calls(self._text, self._request)
        if found.content:
            yield Content(found.content)
        for index, call in enumerate(found.tool_calls):
            yield from self._end()
            self._open = index
            yield CallStart(index, call.id, call.function.name)
            yield CallArguments(index, call.function.arguments)

    def _end(self) -> Iterator[Event]:
        if self._open is not None:
            yield CallEnd(self._open)
        self._open = None


class ContentPlaces:
    """Where the content of an answer stands in its text, as it comes: a `ContentReader` of stop strings
    (vllm/v1/engine/detokenizer.py)."""

    def __init__(self, parser: AnswerParser) -> None:
        self.num_read = 0
        self._parser = parser
        self._text = ""
        self._end = 0  # of the last content
        self._is_broken = False

    def ends_a_part(self, stop: str) -> bool:
        """See ContentReader: what stands behind a call's arguments, as agents stop at."""
        return any(letter.isalpha() for letter in stop) and stop in self._parser.call_end

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[tuple[int, int]]:
        """See ContentReader."""
        return self._taken(text, token_ids, is_last=False)

    def finish(self) -> list[tuple[int, int]]:
        """See ContentReader."""
        return self._taken("", (), is_last=True)

    def _taken(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[tuple[int, int]]:
        before = len(self._text)
        self._text += text
        if not self._is_broken:
            try:
                events = self._parser.finish() if is_last else self._parser.feed(text, token_ids)
            except Exception:  # others' parsers; the answer's own says so
                logger.exception("a parser fails: stop strings are looked for in all that follows")
                self._is_broken = True
        if self._is_broken:
            self.num_read = len(self._text)
            return [(before, len(self._text))] if text else []
        contents = [event.text for event in events if isinstance(event, Content)]
        ends = self._parser.content_ends
        self.num_read = len(self._text) if is_last or ends is None else self._parser.num_read
        found = [
            self._found(each) if ends is None else self._ending(each, ends[index])
            for index, each in enumerate(contents)
        ]
        return [(start, end) for start, end in found if start < end]

    def _ending(self, content: str, end: int) -> tuple[int, int]:
        """Where a content stands that ends there, as far as it is of the text: parsers may put something before it."""
        start = end
        while start > max(self._end, end - len(content)) and self._text[start - 1] == content[start - end - 1]:
            start -= 1
        self._end = end
        return start, end

    def _found(self, content: str) -> tuple[int, int]:
        """Where a content stands whose parser does not say it: the last such text."""
        start = self._text.rfind(content, self._end)
        if start >= 0:
            self._end = start + len(content)
        return start, start + len(content) if start >= 0 else start
