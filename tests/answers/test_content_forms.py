"""Contents in the form that a chat template reads, in the manner of templates that models come with."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from byte_tokenizer import make_byte_tokenizer

from vllm import logger as vllm_logger
from vllm.answers.prompts import render_texts, written_conversations
from vllm.answers.prompts.content_forms import FORMS, formed, words_of_medium
from vllm.exceptions import VLLMValidationError
from vllm.inputs.images import ReadMedia
from vllm.pooling.score_templates import ScoreTemplate, pairs_of
from vllm.renderers.hf import resolve_chat_template_content_format

EACH = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}"
SHOW = "{% macro show(c, role) %}BODY{% endmacro %}{% for m in messages %}{{ show(m['content'], m.role) }}{% endfor %}"
LOOP = "{% for p in m.content %}{{ p.text }}{% endfor %}"

TEXTS = {
    "plain": EACH.replace("BODY", "{{ m.content }}"),
    "sum": EACH.replace("BODY", "{{ '(' + m['content'] + ')' }}"),
    "trimmed": EACH.replace("BODY", "{{ m.content | trim }}"),
    "json": EACH.replace("BODY", "{{ m.content | tojson }}"),
    "upper": EACH.replace("BODY", "{{ m.content | upper }}"),
    # One that reads both is given texts.
    "is string": EACH.replace(
        "BODY",
        "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
    ),
    "is no string": EACH.replace(
        "BODY",
        "{% if m.content is iterable and m.content is not string %}{{ m.content | map(attribute='text') | join }}"
        "{% else %}{{ m.content }}{% endif %}",
    ),
    "macro of both": SHOW.replace(
        "BODY",
        "{% if c is string %}{{ c }}{% elif c is sequence %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}",
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content if messages[0].content "
        "is string else messages[0].content[0].text %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}"
        "{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns alternate') }}{% endif %}[{{ m.role }}]{{ first if loop.first else '' }}"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}"
        "{% endfor %}{% endif %}{% endfor %}"
    ),
}
PARTS = {
    "loop": EACH.replace(
        "BODY", "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    ),
    "selectattr": EACH.replace("BODY", "{{ (m.content | selectattr('type', 'equalto', 'text') | list)[0].text }}"),
    "map": EACH.replace("BODY", "{{ m.content | map(attribute='text') | join(' ') }}"),
    "first": EACH.replace("BODY", "{{ m['content'][0]['text'] }}"),
    "sum of the first": EACH.replace("BODY", "{{ 'x' + m['content'][0]['text'] + 'y' }}"),
    "filter first": EACH.replace("BODY", "{{ (m.content | first).text }}"),
    "get": EACH.replace(
        "BODY", "{% set c = m.get('content') %}{% set d = c | list %}{% for p in d %}{{ p.text }}{% endfor %}"
    ),
    "macro": SHOW.replace("BODY", "{{ role }}{% for p in c %}{{ p.text }}{% endfor %}"),
    "recursive": EACH.replace("BODY", "{% for p in m.content recursive %}{{ p.text }}{% endfor %}"),
    "namespace": EACH.replace(
        "BODY",
        "{% set ns = namespace(text='') %}{% for p in m.content %}{% set ns.text = ns.text + (p.text or '') %}"
        "{% endfor %}{{ ns.text }}",
    ),
    "items": "{% for m in messages %}{% for key, value in m.items() %}{% if key == 'content' %}{{ value[-1].text }}"
    "{% endif %}{% endfor %}{% endfor %}",
    "raises": EACH.replace(
        "BODY", "{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}{{ m.content[0].text }}"
    ),
    "iterable": EACH.replace("BODY", "{% if m.content is iterable %}" + LOOP + "{% endif %}"),
    "smolvlm": (
        "{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' %}<image>{% endif %}"
        "{% endfor %}<end>{% endfor %}"
    ),
}
MIXED = {
    "system as text": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}{% if m.role == 'tool' or m.role == 'assistant' %}{{ m.content + '' }}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    ),
    "user as text": EACH.replace("BODY", "{{ m.content if m.role == 'user' else m.content[0].text }}"),
}
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where am I?"},
    {"role": "assistant", "content": "I look."},
    {"role": "user", "content": [{"type": "text", "text": "Thank you"}, {"type": "input_text", "text": "so much."}]},
]
TOOL = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "seen"}]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    made = make_byte_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return made


def rendered(tokenizer, template, messages, **options):
    (text,) = render_texts(messages, tokenizer, chat_template=template, **options)
    return text


@pytest.mark.parametrize("name", [*TEXTS, *PARTS, *MIXED])
def test_all_words_reach_the_prompt(tokenizer, name):
    template = {**TEXTS, **PARTS, **MIXED}[name]
    text = rendered(tokenizer, template, TALK).casefold()
    for words in ("be kind.", "where am i?", "i look."):
        assert text.count(words) == 1
    # A text that came in two parts may be two parts, or one.
    assert "thank you" in text and ("so much." in text or name == "selectattr")
    assert "'type'" not in text and '"type"' not in text
    if name != "gemma":
        assert "seen" in rendered(tokenizer, template, TOOL).casefold()


@pytest.mark.parametrize("name", [*TEXTS, *PARTS, *MIXED])
def test_upstreams_name_says_the_same(tokenizer, name):
    template = {**TEXTS, **PARTS, **MIXED}[name]
    expected = "string" if name in TEXTS or name == "user as text" else "openai"
    given = (template, None, "auto", tokenizer.hf_tokenizer)
    assert resolve_chat_template_content_format(*given, model_config=None) == expected


def test_the_template_of_the_tools_counts(tokenizer):
    hf = tokenizer.hf_tokenizer
    hf.chat_template = {"default": TEXTS["plain"], "tool_use": PARTS["first"]}
    try:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        assert resolve_chat_template_content_format(None, tools, "auto", hf, model_config=None) == "openai"
        assert resolve_chat_template_content_format(None, None, "auto", hf, model_config=None) == "string"
        assert rendered(tokenizer, None, TALK[1:2], tools=tools) == "<user>Where am I?"
        assert rendered(tokenizer, None, TALK[1:2]) == "<user>Where am I?"
    finally:
        hf.chat_template = None


def test_a_template_that_asks_for_more_than_a_conversation(tokenizer):
    asks = (
        "{% if not region %}{{ raise_exception('!') }}{% endif %}{% for m in messages %}{% if m.content is string %}"
        "{{ raise_exception('parts') }}{% endif %}{{ m.content[0]['source'] }}:{{ m.content[0]['text'] }}{% endfor %}"
    )
    part = {"type": "text", "source": "de", "text": "Guten Tag"}
    messages = [{"role": "user", "content": [part]}]
    assert rendered(tokenizer, asks, messages, chat_template_kwargs={"region": "x"}) == "de:Guten Tag"
    with pytest.raises(VLLMValidationError, match="failed: !"):
        rendered(tokenizer, asks, messages)
    assert resolve_chat_template_content_format(asks, None, "auto", tokenizer, model_config=None) == "openai"


def test_a_template_for_tools_alone(tokenizer):
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + PARTS["sum of the first"]
    options = (tokenizer.hf_tokenizer,)
    assert resolve_chat_template_content_format(template, None, "auto", *options, model_config=None) == "openai"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert rendered(tokenizer, template, TALK[1:2], tools=tools) == "f<user>xWhere am I?y"


def test_a_template_that_begins_with_the_system(tokenizer):
    begins = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    for body in ("loop", "sum of the first"):
        assert "Where am I?" in rendered(tokenizer, begins + PARTS[body], TALK[:2])


def test_the_given_format_holds(tokenizer):
    plain, parts = TEXTS["plain"], PARTS["loop"]
    message = [{"role": "user", "content": "Hi"}]
    assert rendered(tokenizer, plain, message, content_format="string") == "<user>Hi"
    assert "'text': 'Hi'" in rendered(tokenizer, plain, message, content_format="openai")
    assert rendered(tokenizer, parts, message, content_format="openai") == "<user>Hi"
    with pytest.raises(VLLMValidationError, match=r"messages\[0\].content is lost.*content_format='string'"):
        rendered(tokenizer, parts, message, content_format="string")
    with pytest.raises(VLLMValidationError, match="must be one of auto, string, openai"):
        rendered(tokenizer, plain, message, content_format="text")


def test_a_template_that_never_reads_what_users_say(tokenizer):
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(VLLMValidationError, match=r"messages\[1\].content is lost"):
        rendered(tokenizer, template, TALK[:2])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content | replace('Where', 'Here') }}{% endfor %}",
        "{{ mood | default('-') }}",
    ],
)
def test_words_that_a_template_changes_or_does_not_take_are_logged(tokenizer, template, caplog, monkeypatch):
    monkeypatch.setattr(vllm_logger, "_seen", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    rendered(tokenizer, template, TALK[:2])
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "does not hold the last user's text" in caplog.text


def test_white_space_and_case_are_a_templates_own(tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    message = [{"role": "user", "content": "  Where\n am I? "}]
    assert rendered(tokenizer, TEXTS["upper"], message) and rendered(tokenizer, TEXTS["trimmed"], message)
    assert not caplog.records


@pytest.mark.parametrize(
    "body", ["{{ m.content }}", "{{ m.content[0].text }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"]
)
def test_messages_of_score_templates(body):
    template = ScoreTemplate("{% for m in messages %}[" + body + "]{% endfor %}")
    assert template.render("a", "b") == "[a][b]"


def test_a_content_without_parts_has_an_empty_one():
    assert [formed([], form) for form in FORMS] == ["", [{"type": "text", "text": ""}], [{"type": "text", "text": ""}]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_pictures_in_templates_of_texts(tokenizer, interleaved):
    """They stand before the text, or where they are; where a template could write one itself, as that does."""
    media = ReadMedia({"image": "<pad>"}, interleaved=interleaved)
    picture = {"type": "image_pil", "image_pil": np.zeros((4, 4, 3), np.uint8)}
    content = [{"type": "text", "text": "a"}, picture, {"type": "text", "text": "b"}]
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<begin><pad><end>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    lines = "a\n{}\nb" if interleaved else "{}\na\nb"
    for template, form, expected in (
        (texts, "auto", lines.format("<pad>")),
        (parts, "string", lines.format("<begin><pad><end>")),
        (parts, "auto", "a<begin><pad><end>b"),
    ):
        options = {"chat_template": template, "content_format": form, "media": media}
        (written,) = written_conversations([{"role": "user", "content": content}], tokenizer, **options)
        assert written.text == expected


def test_words_for_a_picture_in_a_template_for_tools_alone():
    body = "{% for p in m.content %}{% if p.type == 'image' %}<img>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    template = "{% if not tools %}{{ raise_exception('tools') }}{% endif %}" + EACH.replace("BODY", body)
    assert words_of_medium(template, "image") == "<img>"


@pytest.mark.parametrize("text", ["a\ue0020\ue003", {"text": "a\ue0020\ue003"}])
def test_a_document_that_looks_like_anothers_picture(text):
    with pytest.raises(VLLMValidationError, match="documents.*U.E002"):
        pairs_of("q", [text], ("query", "documents"))
