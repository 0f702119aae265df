"""Where contents stand in texts of every format: pieces of the text itself, found as it comes."""

from __future__ import annotations

import pytest
from call_texts import FORMATS

from vllm.answers.answer import AnswerFormat, AnswerParser, ContentPlaces
from vllm.answers.deltas import DeltaMessage
from vllm.answers.events import Content
from vllm.reasoning import ReasoningParser

THOUGHTS = {
    "qwen3": "<think>{}</think>",
    "mistral": "[THINK]{}[/THINK]",
    "seed_oss": "<seed:think>{}</seed:think>",
    "cohere_command3": "<|START_THINKING|>{}<|END_THINKING|>",
    "gemma4": "<|channel>thought\n{}<channel|>",
    "muse": " to=self<|message|>{}<|eom|>",
    "inkling": "<|content_thinking|>{}<|end_message|>",
    "openai_gptoss": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>",
}


def places(form: AnswerFormat, pieces: list[str]) -> tuple[list[str], list[str]]:
    """The texts at the places of contents, in runs without a gap, and the contents that readers see, joined so, too."""
    found, shown = ContentPlaces(AnswerParser(form)), AnswerParser(form)
    runs: list[list[int]] = []
    contents: list[str] = []
    for piece in (*pieces, None):
        spans = found.finish() if piece is None else found.feed(piece)
        for start, end in spans:
            assert not runs or runs[-1][1] <= start < end
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        events = shown.finish() if piece is None else shown.feed(piece)
        contents += [event.text for event in events if isinstance(event, Content)]
        assert max((end for _, end in runs), default=0) <= found.num_read
    text = "".join(pieces)
    return [text[start:end] for start, end in runs], contents


def assert_found(text: str, tools: str | None, reasoning: str | None, expected: list[str]) -> None:
    form = AnswerFormat.of(None, tools, reasoning)
    for pieces in ([text], list(text)):
        runs, contents = places(form, pieces)
        assert runs == expected
        assert "".join(runs) == "".join(contents)


@pytest.mark.parametrize("name", THOUGHTS)
def test_after_thoughts(name):
    assert_found(THOUGHTS[name].format("Yes, I see: ") + "Yes, < I\n see.", None, name, ["Yes, < I\n see."])


@pytest.mark.parametrize("name", [name for name, (_, may_follow) in FORMATS.items() if may_follow])
def test_before_calls(name):
    call = FORMATS[name][0](("weather", {"city": "I look. I look"}))
    own = {"openai": "<|channel|>final<|message|>I look.<|end|>", "muse": "", "inkling": ""}.get(name, "I look.")
    runs, contents = places(AnswerFormat.of(None, name, None), list(own + call))
    assert "".join(runs) == "".join(contents)
    assert runs in (["I look."], [])


def test_between_and_after_calls():
    call = '<tool_call>{"name": "now", "arguments": {"a": "one"}}</tool_call>'
    assert_found(f"one {call}\n one {call}two\n", "hermes", "qwen3", ["one", "\n one", "two\n"])
    assert_found(f"<think>one</think>one{call}", "hermes", "qwen3", ["one"])


def test_what_is_no_call_is_content():
    text = "a <tool_call>no call</tool_call> b"
    assert_found(text, "hermes", None, [text])


def test_a_text_that_a_parser_puts_before_it():
    runs, contents = places(AnswerFormat.of(None, None, "minimax_m2_append_think"), list("Hm.</think>Yes"))
    assert runs == ["Hm.</think>Yes"] and "".join(contents) == "<think>Hm.</think>Yes"


class Dashes(ReasoningParser):
    """As others write them: deltas, and no word on places."""

    def extract_reasoning_streaming(self, previous, current, delta, *ids):
        if "--" in previous:
            return DeltaMessage(content=delta)
        return DeltaMessage(reasoning=delta) if "--" in current else None


class Fails(ReasoningParser):
    def extract_reasoning_streaming(self, previous, current, delta, *ids):
        raise RuntimeError("no")


def test_parsers_of_others():
    reader = ContentPlaces(AnswerParser(AnswerFormat(reasoning=Dashes)))
    pieces = ["Yes", "--", "Yes", " no"]
    assert [reader.feed(piece, [1]) for piece in pieces] == [[], [], [(5, 8)], [(8, 11)]]
    assert reader.num_read == 11


def test_a_parser_that_fails_leaves_all_as_content():
    reader = ContentPlaces(AnswerParser(AnswerFormat(reasoning=Fails)))
    assert [reader.feed("ab", [1]), reader.feed("c", [1]), reader.finish()] == [[(0, 2)], [(2, 3)], []]
