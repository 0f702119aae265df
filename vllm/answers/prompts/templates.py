"""Conversations rendered by a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.answers.prompts.conversations import named_conversations
from vllm.answers.prompts.writer import ChatWriter, Written
from vllm.inputs import TokensPrompt
from vllm.inputs.images import ReadMedia
from vllm.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor


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
    **options: Any,
) -> list[str]:
    """Each conversation as a chat template writes it.

    Args:
        messages: one conversation, a list of dicts with `role` and `content`, or a list of conversations. `content` is
            a text or a list of OpenAI's text parts. Beside tool calls it may be None or missing; templates then get an
            empty text.
        tokenizer: of the model, with its template.
        chat_template: a Jinja template in place of the model's.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, to be continued; needs add_generation_prompt=False.
        tools: functions that the model may call, in OpenAI's JSON schema.
        chat_template_kwargs: further variables of the template.
        content_format: "string": templates get a content as one text, whose parts are lines; "openai": as a list of
            parts; "auto": as the template reads it, a text where it reads both.
        tool_prompt: a ToolPrompt, for templates that ignore tools; None: nothing tells of them.

    Raises:
        VLLMValidationError: a malformed message (its index is named), arguments that exclude each other, no template,
            or a template that fails on a conversation, or never writes what users say in the form that it is given.
    """
    return [each.text for each in written_conversations(messages, tokenizer, **options)]


def written_conversations(
    messages: Any, tokenizer: Tokenizer | None, *, media: ReadMedia | None = None, **options: Any
) -> list[Written]:
    """`render_texts`, with what else is known of each prompt. `media`: what parts may be beside texts."""
    media = media or ReadMedia()
    conversations = named_conversations(messages, True, media)
    writer = ChatWriter(tokenizer, media=media, **options)
    return [writer.write(name, conversation) for name, conversation in conversations]


def picture_options(processor: InputProcessor) -> dict[str, Any]:
    """The arguments of `written_conversations` that say whether and how the engine's model reads pictures."""
    options: dict[str, Any] = {"media": processor.read_media}
    # Where pictures are whole prompts, models have no template.
    template = getattr(processor.pictures, "chat_template", None) if processor.read_media.words else None
    return options if template is None else options | {"usual_template": template}


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
