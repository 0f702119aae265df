"""Parsers of others: a class for our machine, and classes that override upstream's methods."""

from __future__ import annotations

from pathlib import Path

import pytest
from parsed_answers import parts

from vllm.answers.answer import AnswerFormat, AnswerParser
from vllm.answers.events import collect
from vllm.reasoning import ReasoningParserManager
from vllm.server.server_args import ServerArgs
from vllm.tool_parsers import ToolParserManager

OWN = """
from vllm.answers.syntax.json_calls import json_calls
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("own")
class OwnToolParser(ToolParser):
    begins = ("<call>",)

    def read_calls(self, reader, calls, marker):
        yield from json_calls(reader, calls)
        yield from reader.close("</call>")
"""
# As programs for upstream write them.
UPSTREAMS = """
import json

from vllm.entrypoints.openai.engine.protocol import (
    DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall, ToolCall,
)
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager


@ToolParserManager.register_module(["shout", "shout2"])
class ShoutToolParser(ToolParser):
    def extract_tool_calls(self, model_output, request):
        text, _, name = model_output.partition("!")
        if not name:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        call = ToolCall(type="function", function=FunctionCall(name=name, arguments=json.dumps({"a": 1})))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=text or None)

    def extract_tool_calls_streaming(
        self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids, request
    ):
        assert current_text == previous_text + delta_text
        assert current_token_ids == previous_token_ids + delta_token_ids
        if "!" in previous_text:
            return None
        text, mark, _ = delta_text.partition("!")
        if not mark:
            return DeltaMessage(content=text)
        function = DeltaFunctionCall(name="now", arguments='{"a": 1}')
        call = DeltaToolCall(index=0, id="x", type="function", function=function)
        return DeltaMessage(content=text, tool_calls=[call])


@ReasoningParserManager.register_module("dash")
class DashReasoningParser(ReasoningParser):
    def extract_reasoning(self, model_output, request):
        reasoning, _, content = model_output.partition("--")
        return reasoning, content

    def extract_reasoning_streaming(
        self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
    ):
        if "--" in previous_text:
            return DeltaMessage(content=delta_text)
        reasoning, _, content = delta_text.partition("--")
        return DeltaMessage(reasoning=reasoning or None, content=content or None)
"""


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "own.py").write_text(OWN)
    (folder / "upstreams.py").write_text(UPSTREAMS)
    ServerArgs(tool_parser_plugin=str(folder / "own.py"), tool_call_parser="own").check_parsers()
    ServerArgs(reasoning_parser_plugin=str(folder / "upstreams.py"), reasoning_parser="dash").check_parsers()
    return folder


def parse(pieces: list[str], tools: str | None, reasoning: str | None, is_streamed: bool) -> object:
    parser = AnswerParser(AnswerFormat.of(None, tools, reasoning), is_streamed=is_streamed)
    events = [event for piece in pieces for event in parser.feed(piece, [1])]
    return parts(collect(events + parser.finish()))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_class_for_our_machine(is_streamed):
    text = 'Yes.<call>{"name": "f", "arguments": {"a": 1}}</call>'
    assert parse(list(text), "own", None, is_streamed) == (None, "Yes.", [("f", '{"a": 1}')])


def test_classes_for_upstream_whole():
    assert parse(["Hm.--Yes.!now"], "shout", "dash", False) == ("Hm.", "Yes.", [("now", '{"a": 1}')])
    assert parse(["Yes."], "shout2", None, False) == (None, "Yes.", [])


def test_classes_for_upstream_streamed():
    pieces = ["H", "m.--", "Yes", ".!no", "w"]
    assert parse(pieces, "shout", "dash", True) == ("Hm.", "Yes.", [("now", '{"a": 1}')])


def test_what_is_not_there_is_an_error(plugins):
    assert {"own", "shout", "shout2"} <= set(ToolParserManager.list_registered())
    assert "dash" in ReasoningParserManager.list_registered()
    with pytest.raises(ValueError, match="tool parser 'nobody' is not known"):
        ServerArgs(tool_call_parser="nobody").check_parsers()
    with pytest.raises(ValueError, match="cannot be loaded"):
        ServerArgs(tool_parser_plugin=str(plugins / "none.py")).check_parsers()
    with pytest.raises(KeyError, match="registered already"):
        ToolParserManager.register_module("own", force=False, module=ToolParserManager.get_tool_parser("own"))
