"""Tools told in the prompt's own words where a template ignores them, as the answer's parser reads calls."""

from __future__ import annotations

import json

import pytest
from byte_tokenizer import make_byte_tokenizer
from parsed_answers import TOOLS

from vllm.answers.answer import AnswerFormat, AnswerParser
from vllm.answers.events import collect
from vllm.answers.prompts import render_texts
from vllm.answers.prompts.tool_prompts import ToolPrompt, call_texts, shows_tools
from vllm.tool_parsers import ToolParserManager

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
PARTS = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) "
    "%}{{ raise_exception('users and assistants take turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NATIVE = "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}" + CHATML
CALLS = [
    ("weather", {"city": "Oslo", "days": 2, "exact": True, "place": {"a": [1, None, "x"]}, "tags": ["a"]}),
    ("now", {}),
]
NAMES = [each for each in ToolParserManager.list_registered() if ToolParserManager.get_tool_parser(each).call_text]
USER = {"role": "user", "content": "Weather?"}
HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def render(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = make_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    def render(template, messages, name="hermes", tools=TOOLS):
        parser = ToolParserManager.get_tool_parser(name)
        prompt = ToolPrompt(parser.call_text, tools)
        (text,) = render_texts(messages, tokenizer, chat_template=template, tools=tools or None, tool_prompt=prompt)
        return text

    return render


def parsed(name: str, text: str) -> list[tuple[str, dict]]:
    parser = AnswerParser(AnswerFormat.of(None, name, None), None, TOOLS)
    answer = collect([*parser.feed(text), *parser.finish()])
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_written_as_they_are_read(name):
    text = ToolParserManager.get_tool_parser(name).call_text
    assert text is not None
    assert parsed(name, call_texts(text, CALLS)) == CALLS
    assert parsed(name, call_texts(text, CALLS[1:])) == CALLS[1:]


def test_whether_a_template_shows_tools():
    assert shows_tools(NATIVE)
    assert not any(map(shows_tools, (CHATML, PARTS, "{% if tools %}{% endif %}{{ messages[0].content }}")))
    assert shows_tools("{{ raise_exception('no region') if not region }}{{ tools }}")
    assert shows_tools(NATIVE.replace("<{{ m.role }}>{{ m.content }}", "{{ m.content[0].text }}"))


@pytest.mark.parametrize("template", [CHATML, PARTS])
@pytest.mark.parametrize("name", NAMES)
def test_tools_are_told_to_the_system(render, template, name):
    text = render(template, [{"role": "system", "content": "Be kind."}, USER], name)
    system, _, rest = text.partition("<user>")
    assert system.startswith("<system>Be kind.\n\n") and rest == "Weather?<assistant>"
    for tool in TOOLS:
        function = tool["function"]
        assert f'"name": "{function["name"]}"' in system
        assert json.dumps(function["parameters"]) in system
    call = ToolParserManager.get_tool_parser(name).call_text
    assert call_texts(call, [("FUNCTION", {"ARGUMENT": "VALUE"})]) in system
    assert render(template, [USER], name).startswith("<system>You can call functions.")


def test_tools_are_told_to_the_user_where_there_is_no_system(render):
    text = render(STRICT, [USER])
    assert text.startswith("<user>You can call functions.") and text.endswith("\n\nWeather?")


def test_a_template_that_shows_tools_does_so_alone(render):
    assert render(NATIVE, [USER]) == "weathernow<user>Weather?<assistant>"


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "glm45", "mistral"])
def test_earlier_calls_and_their_results_are_words(render, name):
    for template in (CHATML, STRICT):
        text = render(template, HISTORY, name)
        _, _, answer = text.partition("<assistant>")
        call, _, result = answer.partition("<user>")
        assert parsed(name, call) == [("now", {})]
        assert result.startswith("Result of now:\nnoon\n\nAnd now?")


def test_without_tools_nothing_is_told(render):
    assert render(CHATML, [USER], tools=[]) == "<user>Weather?<assistant>"
