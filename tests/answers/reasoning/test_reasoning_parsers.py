"""Each mark of reasoning: whole, and cut at every character; with calls after it; what prompts begin."""

from __future__ import annotations

import pytest
from call_texts import FORMATS
from parsed_answers import parse, parse_cut

from vllm.answers.answer import AnswerFormat, AnswerParser
from vllm.answers.events import Content, Reasoning
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.tool_parsers import ToolParserManager

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "olmo3": ("<think>", "</think>"),
    "kimi_k2": ("<think>", "</think>"),
    "minimax_m2": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "ernie45": ("<think>", "</think>"),
    "hy_v3": ("<think>", "</think>"),
    "step3": ("<think>", "</think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "k2_horizon": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
}
EACH = pytest.mark.parametrize("name", MARKS)
IMPLICIT = ("deepseek_r1", "olmo3", "minimax_m2", "step3")


@EACH
def test_reasoning_and_content(name):
    begin, end = MARKS[name]
    text = f'{begin}\nLet me < see:\n{{"a"}}\n{end}\n\nYes < no.\n'
    assert parse(text, None, name) == ('\nLet me < see:\n{"a"}\n', "\n\nYes < no.\n", [])
    parse_cut(text, None, name)


@EACH
def test_reasoning_that_never_ends(name):
    begin, _ = MARKS[name]
    assert parse(f"{begin}Let me see", None, name) == ("Let me see", None, [])


@EACH
def test_an_answer_without_marks(name):
    text = "Yes <b>no</b>."
    expected = (text, None, []) if name in IMPLICIT else (None, text, [])
    assert parse(text, None, name) == expected


@EACH
def test_a_prompt_that_begins_or_ends_it(name):
    begin, end = MARKS[name]
    for prompt in (f"user: x\nassistant: {begin}\n", f"{begin}a{end} user: x\nassistant: {begin}I go on"):
        assert parse(f"Hm.{end}Yes.", None, name, prompt=prompt) == ("Hm.", "Yes.", [])
    prompt = f"user: x\nassistant: {begin}\n\n{end}\n\n"
    assert parse("Yes.", None, name, prompt=prompt) == (None, "Yes.", [])
    parser = ReasoningParserManager.get_reasoning_parser(name)
    assert parser.begins_inside("user: x\nassistant: ") is None


def test_a_mark_in_the_users_text_is_none():
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")
    prompt = "<|im_start|>user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n"
    assert parser.begins_inside(prompt) is None


@pytest.mark.parametrize("name", ["qwen3", "glm45", "deepseek_r1"])
def test_calls_after_reasoning(name):
    text = f"<think>Hm.</think>\n\n{CALL}"
    assert parse(text, "hermes", name) == ("Hm.", None, [("now", {})])
    assert parse(f"<think>{CALL}</think>x{CALL}", "hermes", "deepseek_r1") == (CALL, "x", [("now", {})])


def test_calls_in_reasoning_end_it_where_models_leave_the_end_out():
    assert parse(f"<think>Hm.\n{CALL}", "hermes", "qwen3") == ("Hm.\n", None, [("now", {})])
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    text = f"<think>Hm.{section}<|tool_call_end|><|tool_calls_section_end|>"
    assert parse(text, "kimi_k2", "kimi_k2") == ("Hm.", None, [("now", {})])


@pytest.mark.parametrize(
    ("name", "thoughts", "answer"),
    [
        ("cohere_command3", "<|START_THINKING|>{}<|END_THINKING|>\n", "<|START_RESPONSE|>{}<|END_RESPONSE|>"),
        ("cohere_command4", "<|START_THINKING|>{}<|END_THINKING|>", "<|START_TEXT|>{}<|END_TEXT|>"),
        ("ernie45", "<think>{}</think>\n\n\n", "<response>{}</response>"),
        ("kimi_k3", "<|open|>think<|sep|>{}<|close|>think<|sep|>", "<|open|>response<|sep|>{}<|close|>response<|sep|>"),
        ("muse", " to=self<|message|>{}<|eom|>", "<|start|>assistant to=user<|message|>{}<|eot|>"),
        (
            "inkling",
            "<|content_thinking|>{}<|end_message|>",
            "<|message_model|><|content_text|>{}<|end_message|>",
        ),
    ],
)
def test_markup_around_the_content(name, thoughts, answer):
    """It is left out, with and without calls and reasoning."""
    thought, written = thoughts.format("Hm. <"), answer.format("I look: <a>.")
    call = FORMATS[{"cohere_command4": "cohere_command3"}.get(name, name)][0](("now", {}))
    assert parse(thought + written, None, name) == ("Hm. <", "I look: <a>.", [])
    assert parse(thought + written + call, name, name) == ("Hm. <", "I look: <a>.", [("now", {})])
    assert parse(thought + call, name, name) == ("Hm. <", None, [("now", {})])
    parse_cut(thought + written + call, name, name)


def test_forced_calls_have_a_form_of_their_own_after_the_reasoning():
    call = '[{"name": "now", "parameters": {}}]'
    assert parse(f" to=self<|message|>Hm.<|eom|>{call}", "json_array", "muse") == ("Hm.", None, [("now", {})])
    thought = "<|content_thinking|>Hm.<|end_message|>"
    assert parse(thought + call, "json_array", "inkling") == ("Hm.", None, [("now", {})])


def test_a_prompt_says_which_of_several_pairs_an_answer_has():
    parser = ReasoningParserManager.get_reasoning_parser("k2_horizon")
    assert parser.pair_of("user: x\nassistant: <ifm|think_faster>")[1] == "</ifm|think_faster>"
    assert parser.pair_of("user: x") == ("<ifm|think>", "</ifm|think>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think>{}</think>", "qwen3"),
        ("<think>{}</think><response>", "ernie45"),
        ("<think></think><tool_calls><tool_call><tool_sep><arg_key><arg_value>", "hy_v3"),
        ("<think></think><minimax:tool_call>", "minimax_m2"),
        ("<mm:think>", "minimax_m3"),
        ("<ifm|think><ifm|think_fast>", "k2_horizon"),
        ("<|open|>think<|sep|>{}<|close|>think<|sep|>", "kimi_k3"),
        ("<|START_THINKING|><|START_ACTION|>", "cohere_command3"),
        ("{{ '<|plamo:begin_think:plamo|>' }}", "plamo3"),
        ("<|message_model|><|content_thinking|>", "inkling"),
        ("<|start|>assistant<|message|><atem:function_calls>", "muse"),
        ("<seed:think><seed:tool_call>", "seed_oss"),
    ],
)
def test_a_template_chooses_the_parser(template, name):
    expected = ReasoningParserManager.get_reasoning_parser(name)
    assert ReasoningParserManager.of_template(template) is expected


def test_modes_where_no_prompt_is_known():
    def of(name, **switches):
        return ReasoningParserManager.get_reasoning_parser(name)(None, chat_template_kwargs=switches)

    assert of("hy_v3", reasoning_effort="high").extract_reasoning("a</think>b", None) == ("a", "b")
    assert of("hy_v3", reasoning_effort="no_think").extract_reasoning("b", None) == (None, "b")
    assert of("minimax_m3", thinking_mode="enabled").extract_reasoning("a", None) == ("a", None)
    assert of("minimax_m3").extract_reasoning("</mm:think>b", None) == (None, "b")
    assert of("granite_thinking_parser").extract_reasoning("<think>a</think>\n\nb\n", None) == ("a", "b\n")
    assert of("k2_horizon", reasoning_effort="low").end_token == "</ifm|think_faster>"
    with pytest.raises(ValueError, match="Unsupported reasoning_effort 'none'; there are high, medium, low"):
        of("k2_horizon", reasoning_effort="none")


class Characters:
    """A tokenizer whose ids are those of characters; it has no token for a marker."""

    def get_vocab(self):
        return {}

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def test_markers_in_pieces():
    def ids(text):
        return list(map(ord, text))

    parser = ReasoningParserManager.get_reasoning_parser("minimax_m3")(Characters())
    assert parser.is_reasoning_end(ids("<mm:think>a</mm:think>b"))
    assert not parser.is_reasoning_end(ids("</mm:think><mm:think>a"))
    ends = [
        parser.is_reasoning_end_streaming(ids(text), []) for text in ("", "<mm:", "<mm:think>a", "</mm:think>", "b")
    ]
    assert ends == [False, False, False, True, True]
    assert parser.extract_content_ids(ids("<mm:think>a</mm:think>b")) == ids("b")
    assert parser.extract_content_ids(ids("b")) == ids("b") and not parser.extract_content_ids(ids("<mm:think>a"))
    parser = ReasoningParserManager.get_reasoning_parser("kimi_k3")(Characters())
    begin, end = MARKS["kimi_k3"]
    assert parser.is_reasoning_end(ids(f"{begin}a{end}")) and not parser.is_reasoning_end(ids(f"{end}{begin}a"))
    assert parser.is_reasoning_end_streaming(ids(f"{begin}a{end}"), ids(end[-1]))
    for text, count in (
        (f"{begin}ab{end}c", 2),
        (f"ab{end}c", 2),
        (f"{begin}ab", 2),
        ("<|open|>response<|sep|>abc", 0),
    ):
        assert parser.count_reasoning_tokens(ids(text)) == count
    off = {"enable_thinking": False}
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")(Characters(), chat_template_kwargs=off)
    assert parser.is_reasoning_end(ids("a"))


def test_upstreams_methods():
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")(None)
    assert parser.extract_reasoning("<think>a</think>b", None) == ("a", "b")
    assert parser.extract_reasoning("a</think>b", None) == ("a", "b")
    assert parser.extract_reasoning("b", None) == ("b", None)
    pieces, text = [], ""
    for piece in ("<thi", "nk>a", "</think>", "b"):
        pieces.append(parser.extract_reasoning_streaming(text, text + piece, piece, [], [], []))
        text += piece
    assert [each and (each.reasoning, each.content) for each in pieces] == [None, ("a", None), None, (None, "b")]


def test_thinking_that_is_switched_off():
    kind = ReasoningParserManager.get_reasoning_parser("qwen3")
    off = {"enable_thinking": False}
    assert kind(None, chat_template_kwargs=off).extract_reasoning("b", None) == (None, "b")
    request = ChatCompletionRequest(messages=[], model="m", chat_template_kwargs=off)
    assert kind(None).extract_reasoning("b", request) == (None, "b")
    kind = ReasoningParserManager.get_reasoning_parser("deepseek_v3")
    assert kind(None).extract_reasoning("b", None) == (None, "b")
    assert kind(None, chat_template_kwargs={"thinking": True}).extract_reasoning("b", None) == ("b", None)


def test_a_stream_that_is_met_in_its_middle():
    parser = ReasoningParserManager.get_reasoning_parser("granite")(None)
    before = "Here is my thought process: a"
    delta = parser.extract_reasoning_streaming(before, before + " b", " b", [], [], [])
    assert delta.reasoning == " b"
    assert parser.extract_reasoning_streaming(None, "Here", "Here", [], [], []) is None


def test_answers_in_markers():
    text = "<think>\na\n</think>\n<answer>\nb\n</answer>"
    assert parse(text, None, "hunyuan_a13b") == ("a", "b", [])
    parse_cut(text, None, "hunyuan_a13b")
    assert parse("a</think>b", None, "minimax_m2_append_think") == (None, "<think>a</think>b", [])


class Words:
    """A tokenizer of four words."""

    def get_vocab(self):
        return {"<a>": 0, "</a>": 1, "x": 2, "y": 3}


class TwoTokens(BaseThinkingReasoningParser):
    """A parser as plug-ins write it."""

    start_token, end_token = "<a>", "</a>"


class MissingTokens(TwoTokens):
    end_token = "</b>"


class EmptyTokens(TwoTokens):
    end_token = ""


def test_a_parser_of_two_tokens():
    parser = TwoTokens(Words())
    assert (parser.start_token_id, parser.end_token_id) == (0, 1)
    assert parser.extract_reasoning("<a>x</a>y", None) == ("x", "y")
    assert parser.extract_reasoning("x", None) == ("x", None)
    assert parser.extract_reasoning("", None) == ("", None)
    assert parser.is_reasoning_end([0, 2, 1]) and not parser.is_reasoning_end([1, 0, 2])
    assert parser.extract_content_ids([0, 2, 1, 3, 3]) == [3, 3]
    assert parser.count_reasoning_tokens([0, 2, 0, 3, 1, 2, 1, 3]) == 3
    assert parser.count_reasoning_tokens([2, 1, 3]) == 1
    for kind, tokenizer, error in (
        (TwoTokens, None, ValueError),
        (EmptyTokens, Words(), ValueError),
        (MissingTokens, Words(), RuntimeError),
    ):
        with pytest.raises(error):
            kind(tokenizer)


def test_a_parser_of_two_tokens_serves():
    form = AnswerFormat(reasoning=TwoTokens)
    parser = AnswerParser(form, Words(), prompt="user: x\nassistant: <a>")
    events = [*parser.feed("x</"), *parser.feed("a>y"), *parser.finish()]
    assert events == [Reasoning("x"), Content("y")]


TEMPLATES = {
    # what a published template holds: the parsers of calls and of reasoning
    '<tool_call>\\n{"name": <function-name>, "arguments": {}}\\n</tool_call> </think>': ("hermes", "qwen3"),
    "<tool_call>\n<function=example_function_name>\n<parameter=x>": ("qwen3_coder", None),
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> </think>": ("glm45", "qwen3"),
    '{"name": function name, "parameters": dictionary of argument name and its value}': ("llama3_json", None),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n <｜Assistant｜><think>\\n": (
        "deepseek_v3", "deepseek_r1",
    ),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> <｜tool▁sep｜>": ("deepseek_v31", None),
    "<|tool_calls_section_begin|> <think></think>": ("kimi_k2", "kimi_k2"),
    "<minimax:tool_call> <think> </think>": ("minimax_m2", "minimax_m2"),
    "<|tool|> <|/tool|>": ("phi4_mini_json", None),
    "<|tool_list_start|>[": ("lfm2", None),
    "<|tool_call>call: <|channel>thought": ("gemma4", "gemma4"),
    "<start_function_call>": ("functiongemma", None),
    "<|start|>assistant<|channel|>final<|message|>": ("openai", "openai_gptoss"),
    "<|tool_call|> granite": ("granite", None),
    "<function_calls>": ("olmo3", None),
    "{{ messages }}": (None, None),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_shows_the_format(template):
    form = AnswerFormat.of(template, "auto", "auto")
    tools, reasoning = TEMPLATES[template]
    assert form.tools is (None if tools is None else ToolParserManager.get_tool_parser(tools))
    assert form.reasoning is (None if reasoning is None else ReasoningParserManager.get_reasoning_parser(reasoning))


def test_a_class_that_is_registered_later_is_found_in_known_templates(monkeypatch):
    template = "<think> and <ponder-well>"
    assert ReasoningParserManager.of_template(template) is not Pondering
    registry = ReasoningParserManager._registry
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    ReasoningParserManager.register_module("pondering", module=Pondering)
    try:
        assert ReasoningParserManager.of_template(template) is Pondering
    finally:
        registry.of_template.cache_clear()


class Pondering(ReasoningParser):
    template_marks = ("<ponder-well>",)
