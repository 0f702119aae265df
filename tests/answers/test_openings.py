"""The end of a prompt that belongs to the answer alone decides whether it begins within a thought."""

# ruff: noqa: RUF001  # markers of DeepSeek

from __future__ import annotations

from typing import Any

import pytest
from byte_tokenizer import make_byte_tokenizer

from vllm.answers.prompts import written_conversations
from vllm.reasoning import ReasoningParserManager

# In the manner of templates that models come with: how a turn and the beginning of an answer are written.
TURNS = {
    "chatml": ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
    "glm": ("<|{{ m.role }}|>\n{{ m.content }}", "<|assistant|>"),
    "deepseek": ("{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content }}", "<｜Assistant｜>"),
    "granite": ("<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}\n", "<|start_of_role|>assistant"),
    "minimax": ("]~b]{{ m.role }}\n{{ m.content }}[e~[\n", "]~b]ai\n"),
    "trimmed": ("{{ m.role }}: {{ m.content | trim }}\n", "assistant:"),
    "plain": ("{{ m.content }}\n", ""),
    "parts": ("<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}\n", "<assistant>"),
    "first": ("<{{ m.role }}>{{ m.content[0].text }}\n", "<assistant>"),
}
BEGIN = "{% if begin is defined %}{{ begin }}{% endif %}"


def template(name: str, always: bool = False) -> str:
    turn, answer = TURNS[name]
    begins = answer + BEGIN
    last = begins if always else "{% if add_generation_prompt %}" + begins + "{% endif %}"
    return "{% for m in messages %}" + turn + "{% endfor %}" + last


USER = {"role": "user", "content": "What is <think>?"}
CUT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>I was cut"}]
ALL = pytest.mark.parametrize("name", TURNS)


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openings")
    tokenizer = make_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')

    def inside(
        source: str, *messages: dict[str, Any], parser: str = "qwen3", begin: str = "", **options
    ) -> bool | None:
        variables = {"begin": begin} if begin else {}
        (own,) = written_conversations(
            list(messages), tokenizer, chat_template=source, chat_template_kwargs=variables, **options
        )
        kind = ReasoningParserManager.get_reasoning_parser(parser)
        return kind.begins_inside(own.opening((*kind.begins, *kind.ends)))

    return inside


@pytest.mark.parametrize("always", [False, True])
@ALL
def test_words_of_turns_say_nothing(inside, name, always):
    source = template(name, always)
    assert inside(source, USER) is None
    assert inside(source, {"role": "user", "content": "It ends so: <think>"}) is None
    assert inside(source, {"role": "user", "content": "and so: </think>"}) is None
    assert inside(source, {"role": "system", "content": "Begin with <think>"}, USER) is None
    assert inside(source, *CUT, {"role": "user", "content": "Go on"}) is None
    assert inside(source, *CUT, USER, add_generation_prompt=False) is None


@pytest.mark.parametrize("always", [False, True])
@ALL
def test_what_the_template_begins_counts(inside, name, always):
    source = template(name, always)
    for begin, expected in (
        ("<think>", True),
        ("<think>\n", True),
        ("<think>\nOkay, ", True),
        ("<think></think>", False),
        ("<think>\n\n</think>\n\n", False),
        ("</think>", False),
    ):
        assert inside(source, USER, begin=begin) is expected
        assert inside(source, *CUT, {"role": "user", "content": "Go </think> on"}, begin=begin) is expected


@ALL
def test_a_message_that_goes_on(inside, name):
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for text, expected in (
        ("<think>Let me", True),
        ("<think>", True),
        ("<think>Hm.</think>", False),
        ("It is", None),
    ):
        answer = {"role": "assistant", "content": text}
        assert inside(template(name), USER, answer, **options) is expected
        assert inside(template(name), *CUT, {"role": "user", "content": "x"}, answer, **options) is expected
        assert inside(template(name), answer, **options) is expected


@pytest.mark.parametrize("name", ["chatml", "glm", "plain"])
def test_after_an_answer_or_the_result_of_a_call(inside, name):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "<think>"}'}}
    written = template(name).replace(
        "{% endfor %}", "{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}", 1
    )
    turns = [USER, {"role": "assistant", "content": "<think>", "tool_calls": [call]}]
    for begin, expected in (("", None), ("<think>\n", True)):
        assert inside(written, *turns, begin=begin) is expected
        assert inside(written, *turns, {"role": "tool", "content": "<think>"}, begin=begin) is expected


def test_markers_of_words(inside):
    """Granite's are a sentence, which anybody may say."""
    says = {"role": "user", "content": "Here is my thought process: I am lost."}
    assert inside(template("granite"), says, parser="granite") is None
    assert inside(template("granite"), says, parser="granite", begin="Here is my thought process:") is True


def test_a_template_that_ends_turns_only_without_an_answer(inside):
    source = "{% for m in messages %}{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}<think>{% else %}</s>{% endif %}"
    )
    assert inside(source, USER) is True
    assert inside(source, {"role": "user", "content": "<think>"}, add_generation_prompt=False) is None
