"""Upstream's paths to parsers, and those of former releases, lead to the modules of vllm.answers."""

from __future__ import annotations

import importlib

import pytest

import vllm.answers.tool_parsers

MODULES = {
    "vllm.tool_parsers.abstract_tool_parser": "vllm.answers.tool_parsers.abstract_tool_parser",
    "vllm.tool_parsers.hermes_tool_parser": "vllm.answers.tool_parsers.json_parsers",
    "vllm.entrypoints.openai.tool_parsers.glm4_moe_tool_parser": "vllm.answers.tool_parsers.tag_parsers",
    "vllm.reasoning.abs_reasoning_parsers": "vllm.answers.reasoning.abs_reasoning_parsers",
    "vllm.reasoning.basic_parsers": "vllm.upstream.basic_parsers",
    "vllm.parser.json_calls": "vllm.answers.syntax.json_calls",
    "vllm.parser.events": "vllm.answers.events",
    "vllm.parser.reader": "vllm.answers.reader",
    "vllm.parser.messages": "vllm.answers.deltas",
    "vllm.chat.answers": "vllm.answers.answer",
    "vllm.chat.messages": "vllm.answers.prompts.conversations",
    "vllm.chat.templates": "vllm.answers.prompts.writer",
}


@pytest.mark.parametrize(("former", "place"), MODULES.items())
def test_a_path_is_the_module(former, place):
    assert importlib.import_module(former) is importlib.import_module(place)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("vllm.tool_parsers", "ToolParserManager"),
        ("vllm.reasoning", "ReasoningParser"),
        ("vllm.chat", "render_texts"),
        ("vllm.entrypoints.chat", "normal_messages"),
    ],
)
def test_a_package_has_the_names(package, name):
    own = {"vllm.tool_parsers": "tool_parsers", "vllm.reasoning": "reasoning"}.get(package, "prompts")
    place = importlib.import_module(f"vllm.answers.{own}")
    assert getattr(importlib.import_module(package), name) is getattr(place, name)


def test_a_parser_that_is_registered_by_a_path_is_known_by_the_other():
    manager = importlib.import_module("vllm.tool_parsers").ToolParserManager

    @manager.register_module("by_the_former_path")
    class Mine(importlib.import_module("vllm.tool_parsers").ToolParser):  # type: ignore[misc]
        pass

    assert vllm.answers.tool_parsers.ToolParserManager.get_tool_parser("by_the_former_path") is Mine
