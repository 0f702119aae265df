"""Chat templates at upstream's paths: which one is taken, what it is given, how it is loaded."""

from __future__ import annotations

import asyncio

import pytest
from byte_tokenizer import make_byte_tokenizer

from vllm.entrypoints import chat_utils
from vllm.exceptions import VLLMValidationError
from vllm.renderers import chat_utils as renderers_chat_utils
from vllm.renderers.hf import (
    resolve_chat_template,
    resolve_chat_template_content_format,
    resolve_chat_template_kwargs,
    safe_apply_chat_template,
)
from vllm.tokenizers import get_tokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood or '' }}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
PARTS_BY_NAME = (
    "{% for m in messages %}{% set c = m.content | list %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}"
)
CHAT = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.fixture
def tokenizer(tmp_path):
    make_byte_tokenizer(tmp_path)
    made = get_tokenizer(tmp_path)
    made.chat_template = None
    return made


def test_which_template_is_taken(tokenizer):
    assert resolve_chat_template(tokenizer, None, None, model_config=None) is None
    assert resolve_chat_template(tokenizer, PLAIN, None, model_config=None) == PLAIN
    tokenizer.chat_template = {"default": PLAIN, "tool_use": PARTS}
    assert resolve_chat_template(tokenizer, None, None, model_config=None) == PLAIN
    assert resolve_chat_template(tokenizer, None, [{"name": "f"}], model_config=None) == PARTS
    assert resolve_chat_template(tokenizer, "tool_use", None, model_config=None) == PARTS
    assert chat_utils.resolve_hf_chat_template(tokenizer, None, None, trust_remote_code=False) == PLAIN


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        (PLAIN, "auto", "string"),
        (PARTS, "auto", "openai"),
        (PARTS_BY_NAME, "auto", "openai"),
        (PARTS, "string", "string"),
    ],
)
def test_what_content_a_template_takes(tokenizer, template, given, expected):
    assert resolve_chat_template_content_format(template, None, given, tokenizer, model_config=None) == expected


def test_variables_of_a_template(tokenizer):
    given = {"mood": "!", "add_generation_prompt": True, "other": 1}
    assert resolve_chat_template_kwargs(tokenizer, PLAIN, given) == {"mood": "!", "add_generation_prompt": True}
    with pytest.raises(ValueError, match="chat_template"):
        resolve_chat_template_kwargs(tokenizer, PLAIN, {"chat_template": "x"})
    assert resolve_chat_template_kwargs(tokenizer, PLAIN, {"tokenize": True}, raise_on_unexpected=False) == {}


def test_rendering(tokenizer):
    conversation, _, _ = chat_utils.parse_chat_messages(CHAT, None)
    text = chat_utils.apply_hf_chat_template(tokenizer, conversation, PLAIN, None, mood="!", other=1)
    assert text == "[user]a\nb!"
    ids = safe_apply_chat_template(None, tokenizer, conversation, chat_template=PLAIN)
    assert tokenizer.decode(ids) == "[user]a\nb"
    with pytest.raises(VLLMValidationError, match="no chat template"):
        safe_apply_chat_template(None, tokenizer, conversation)
    with pytest.raises(VLLMValidationError, match="the chat template failed: not so"):
        safe_apply_chat_template(None, tokenizer, conversation, chat_template="{{ raise_exception('not so') }}")


def test_messages_are_made_normal():
    as_parts, media, names = asyncio.run(chat_utils.parse_chat_messages_async(CHAT, None, "openai"))
    assert as_parts == [{"role": "user", "content": [{"type": "text", "text": "a\nb"}]}]
    assert media is None and names is None
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(VLLMValidationError, match="image_url"):
        chat_utils.parse_chat_messages(image, None)


def test_loading_a_template(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(PLAIN)
    assert chat_utils.load_chat_template(None) is None
    assert chat_utils.load_chat_template(path) == chat_utils.load_chat_template(str(path)) == PLAIN
    assert chat_utils.load_chat_template(PARTS) == PARTS
    assert chat_utils.load_chat_template(str(path), is_literal=True) == str(path)
    for wrong in ("no/such/file.jinja", tmp_path / "none.jinja"):
        with pytest.raises(ValueError, match="neither a file nor a template"):
            chat_utils.validate_chat_template(wrong)
    with pytest.raises(TypeError):
        chat_utils.load_chat_template(path, is_literal=True)


def test_both_paths_have_the_same():
    for name in renderers_chat_utils.__all__:
        assert getattr(chat_utils, name) is getattr(renderers_chat_utils, name)
    assert chat_utils.make_tool_call_id() != chat_utils.make_tool_call_id()
    assert chat_utils.make_tool_call_id("kimi_k2", "f", 3) == "functions.f:3"
