"""Conversations rendered by a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.chat.histories import fitted
from vllm.chat.messages import named_conversations
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_boolean, check_encodable, wrong_type

# Of transformers' apply_chat_template: what LLM.chat has arguments for, and what would make the result no text.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation max_length padding "
    "return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation".split()
)


def render_conversations(
    messages: Any,
    tokenizer: Tokenizer | None,
    **options: Any,
) -> list[TokensPrompt]:
    """One prompt a conversation: the rendered text and its ids, without special tokens but those of the template.
    Arguments and errors are those of `render_texts`."""
    texts = render_texts(messages, tokenizer, **options)
    assert tokenizer is not None
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [TokensPrompt(prompt_token_ids=ids, prompt=text) for ids, text in zip(encoded, texts, strict=True)]


def render_texts(
    messages: Any,
    tokenizer: Tokenizer | None,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    content_format: str = "auto",
) -> list[str]:
    """Each conversation as a chat template writes it.

    Args:
        messages: one conversation, a list of dicts with `role` and `content`, or a list of conversations. `content` is
            a text or a list of OpenAI's text parts, which are joined by line breaks. Beside tool calls it may be None
            or missing; templates then get an empty text.
        chat_template: a Jinja template in place of the model's.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, to be continued; needs add_generation_prompt=False.
        tools: functions that the model may call, in OpenAI's JSON schema.
        chat_template_kwargs: further variables of the template.
        content_format: "openai": templates get a content as a list of one text part; otherwise as a text.

    Raises:
        VLLMValidationError: a malformed message (its index is named), arguments that exclude each other, no template,
            or a template that fails on a conversation.
    """
    _check_arguments(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
    conversations = named_conversations(messages)
    if content_format == "openai":
        for _, conversation in conversations:
            for message in conversation:
                message["content"] = [{"type": "text", "text": message["content"]}]
    if tokenizer is None:
        raise VLLMValidationError("chat needs a tokenizer, and skip_tokenizer_init left it out", "messages", messages)
    if chat_template is None and tokenizer.chat_template is None:
        missing = "the model's tokenizer has no chat template; pass one as chat_template"
        raise VLLMValidationError(missing, "chat_template")
    own: Any = chat_template or tokenizer.chat_template
    text = "\n".join(own.values()) if isinstance(own, dict) else own
    options = {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        **(chat_template_kwargs or {}),
    }
    return [_render(name, fitted(conversation, text), tokenizer, options) for name, conversation in conversations]


def load_chat_template(template: str | Path | None) -> str | None:
    """A Jinja template: the text of the file that `template` names, or `template` itself if it is one.

    Raises:
        ValueError: it is neither a file nor, having no braces, a template.
    """
    if template is None:
        return None
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        if isinstance(template, str) and any(mark in template for mark in "{}\n"):
            return template
        raise ValueError(f"chat_template {str(template)!r} is neither a file nor a template: {error}") from None


def _render(name: str, conversation: list[dict[str, Any]], tokenizer: Tokenizer, options: dict[str, Any]) -> str:
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    except Exception as error:  # a template is a program: it may raise anything, often on purpose
        reason = error or type(error).__name__
        raise VLLMValidationError(f"{name}: the chat template failed: {reason}", name) from error
    if not text:
        raise VLLMValidationError(f"{name}: the chat template made an empty prompt", name)
    check_encodable(name, text)
    return text


def _check_arguments(
    chat_template: Any, add_generation_prompt: Any, continue_final_message: Any, tools: Any, template_kwargs: Any
) -> None:
    check_boolean("add_generation_prompt", add_generation_prompt)
    check_boolean("continue_final_message", continue_final_message)
    if add_generation_prompt and continue_final_message:
        both = "continue_final_message needs add_generation_prompt=False: a message cannot be continued and followed by"
        raise VLLMValidationError(f"{both} another at once", "continue_final_message", True)
    if chat_template is not None and not isinstance(chat_template, str):
        raise wrong_type("chat_template", chat_template, "a Jinja template as a string")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong_type("tools", tools, "a list of dicts")
    if template_kwargs is None:
        return
    if not isinstance(template_kwargs, Mapping):
        raise wrong_type("chat_template_kwargs", template_kwargs, "a dict")
    taken = sorted(_RESERVED.intersection(template_kwargs))
    if taken:
        raise VLLMValidationError(f"chat_template_kwargs cannot set {taken[0]!r}", "chat_template_kwargs", taken[0])
