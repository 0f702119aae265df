"""Chat templates of transformers' tokenizers."""

from __future__ import annotations

from typing import Any

from vllm.answers.prompts.content_forms import chosen_template, reads_texts, variables
from vllm.exceptions import VLLMValidationError
from vllm.upstream.chat.conversations import ChatTemplateContentFormat, ChatTemplateContentFormatOption

# Arguments of apply_chat_template itself: no variables of a template.
_OWN_ARGUMENTS = frozenset({"chat_template", "tokenize", "conversation", "tools", "add_generation_prompt"})


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: list[dict[str, Any]] | None, *, model_config: Any
) -> str | None:
    """The template that a conversation is rendered with: the one that is given or, by its name, one of the tokenizer's;
    else the tokenizer's own (for tools, where it has one for these); None without any.

    Args:
        model_config: not read: a tokenizer brings its template.
    """
    return chosen_template(getattr(tokenizer, "chat_template", None), chat_template, tools)


def resolve_chat_template_content_format(
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    given_format: ChatTemplateContentFormatOption,
    tokenizer: Any,
    *,
    model_config: Any,
) -> ChatTemplateContentFormat:
    """The form in which a template takes a message's content: the format that is given; for "auto", "openai" for a
    template that reads the parts of a content, and "string" for one that reads texts, or both."""
    if given_format != "auto":
        return given_format
    template = resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)
    return "string" if template is None or reads_texts(template) else "openai"


def resolve_chat_template_kwargs(
    tokenizer: Any, chat_template: str, chat_template_kwargs: dict[str, Any], raise_on_unexpected: bool = True
) -> dict[str, Any]:
    """The arguments that the template has variables for, or that transformers' method takes.

    Raises:
        ValueError: `chat_template` or `tokenize` is among them, unless `raise_on_unexpected` is False.
    """
    import inspect

    taken = sorted({"chat_template", "tokenize"} & set(chat_template_kwargs))
    if taken and raise_on_unexpected:
        raise ValueError(f"chat_template_kwargs cannot set {taken[0]!r}")
    own = {
        name
        for name, each in inspect.signature(tokenizer.apply_chat_template).parameters.items()
        if each.kind is not each.VAR_KEYWORD
    }
    allowed = (own | variables(chat_template)) - _OWN_ARGUMENTS | {"add_generation_prompt"}
    return {name: value for name, value in chat_template_kwargs.items() if name in allowed}


def safe_apply_chat_template(
    model_config: Any,
    tokenizer: Any,
    conversation: list[Any],
    *,
    tools: list[dict[str, Any]] | None = None,
    chat_template: str | None = None,
    tokenize: bool = True,
    **kwargs: Any,
) -> str | list[int]:
    """The conversation as ids, or as a text.

    Raises:
        VLLMValidationError: there is no template, or it fails on the conversation.
    """
    template = resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)
    if template is None:
        raise VLLMValidationError(
            "the model's tokenizer has no chat template; pass one as chat_template", parameter="chat_template"
        )
    known = resolve_chat_template_kwargs(tokenizer, template, kwargs)
    if tokenize:
        known["return_dict"] = False
    try:
        return tokenizer.apply_chat_template(
            conversation, tools=tools, chat_template=template, tokenize=tokenize, **known
        )
    except Exception as error:  # a template is a program: it may raise anything, often on purpose
        raise VLLMValidationError(
            f"the chat template failed: {error or type(error).__name__}", parameter="messages"
        ) from error


def resolve_hf_chat_template(
    tokenizer: Any,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
) -> str | None:
    """`vllm.upstream.chat.templates.resolve_chat_template`.

    Args:
        trust_remote_code: of upstream's older versions; nothing is loaded here.
    """
    return resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)


def apply_hf_chat_template(
    tokenizer: Any,
    conversation: list[Any],
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
    tokenize: bool = False,
    **kwargs: Any,
) -> str | list[int]:
    """`vllm.upstream.chat.templates.safe_apply_chat_template`, which gives a text unless told otherwise."""
    return safe_apply_chat_template(
        model_config, tokenizer, conversation, tools=tools, chat_template=chat_template, tokenize=tokenize, **kwargs
    )
