"""Conversations to prompts: checked, rendered by a chat template, tokenised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_boolean, check_encodable, wrong_type

# Of transformers' apply_chat_template: what LLM.chat has arguments for, and what would make the result no text.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation max_length padding "
    "return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation".split()
)
# Types of parts that are texts, and which key has the text.
_TEXT_KEYS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip


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
    conversations = _check_conversations(messages)
    if content_format == "openai":
        for _, conversation in conversations:
            for message in conversation:
                message["content"] = [{"type": "text", "text": message["content"]}]
    if tokenizer is None:
        raise VLLMValidationError("chat needs a tokenizer, and skip_tokenizer_init left it out", "messages", messages)
    if chat_template is None and tokenizer.chat_template is None:
        missing = "the model's tokenizer has no chat template; pass one as chat_template"
        raise VLLMValidationError(missing, "chat_template")
    options = {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        **(chat_template_kwargs or {}),
    }
    return [_render(name, conversation, tokenizer, options) for name, conversation in conversations]


def normal_messages(messages: Any) -> list[dict[str, Any]]:
    """One conversation as templates take it: each message's content as one text, arguments of tool calls as objects.

    Raises:
        VLLMValidationError: a malformed message; its index is named.
    """
    return [message for _, conversation in _check_conversations([messages]) for message in conversation]


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


def _check_conversations(messages: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """(name in errors, messages in normal form) of each conversation."""
    if not _is_list(messages):
        raise wrong_type("messages", messages, "a list of dicts, or a list of such lists")
    if not messages or not _is_list(messages[0]):
        named = [("messages", messages)] if messages else []
    else:
        named = [(f"messages[{index}]", conversation) for index, conversation in enumerate(messages)]
    for name, conversation in named:
        if not _is_list(conversation):
            raise wrong_type(name, conversation, "a conversation, as the first is: a list of dicts")
        if not conversation:
            raise VLLMValidationError(f"{name} has no message", name, conversation)
    return [
        (name, [_check_message(f"{name}[{index}]", message) for index, message in enumerate(conversation)])
        for name, conversation in named
    ]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    """The message with its content as one text and the arguments of its tool calls as objects."""
    if not isinstance(message, Mapping):
        raise wrong_type(name, message, "a dict with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise VLLMValidationError(f"{name} has no role", f"{name}.role", role)
    tool_calls = _check_tool_calls(name, message)
    result = {key: value for key, value in message.items() if key != "tool_calls"}
    if tool_calls:
        result["tool_calls"] = tool_calls
    result["content"] = _check_content(name, message, bool(tool_calls))
    return result


def _check_content(name: str, message: Mapping[str, Any], has_tool_calls: bool) -> str:
    """The content as one text, which templates expect; without content the refusal, or nothing beside tool calls."""
    content = message.get("content")
    if content is not None:
        return _check_parts(f"{name}.content", content)
    if message.get("refusal") is not None:
        return _check_text(f"{name}.refusal", message["refusal"])
    if has_tool_calls:
        return ""
    raise VLLMValidationError(f"{name} has no content", f"{name}.content")


def _check_parts(name: str, content: Any) -> str:
    if isinstance(content, str):
        return _check_text(name, content)
    if not _is_list(content):
        raise wrong_type(name, content, "a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{name}[{index}]"
        if isinstance(part, str):
            texts.append(_check_text(place, part))
        elif not isinstance(part, Mapping):
            raise wrong_type(place, part, "a text part")
        else:
            kind = part.get("type")
            key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
            if key is None:
                raise VLLMValidationError(f"{place} is of type {kind!r}, and only 'text' can be read", place, kind)
            texts.append(_check_text(f"{place}.{key}", part.get(key)))
    return "\n".join(texts)


def _check_text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise wrong_type(name, text, "a string")
    check_encodable(name, text)
    return text


def _check_tool_calls(name: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The message's tool calls, or its function_call, which OpenAI's API had before."""
    tool_calls, function_call = message.get("tool_calls"), message.get("function_call")
    if not tool_calls and function_call is not None:
        place = f"{name}.function_call"
        if not isinstance(function_call, Mapping):
            raise wrong_type(place, function_call, "a dict")
        return [{"type": "function", "function": _check_function(place, function_call)}]
    if tool_calls is None:
        return []
    place = f"{name}.tool_calls"
    if not _is_list(tool_calls) or not all(isinstance(call, Mapping) for call in tool_calls):
        raise wrong_type(place, tool_calls, "a list of dicts")
    result = [dict(call) for call in tool_calls]
    for index, call in enumerate(result):
        if isinstance(call.get("function"), Mapping):
            call["function"] = _check_function(f"{place}[{index}].function", call["function"])
    return result


def _check_function(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """With the arguments as an object, which templates print; OpenAI's clients send them as a text of JSON."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        return {**function, "arguments": json.loads(arguments or "{}")}
    except ValueError as error:
        place = f"{name}.arguments"
        raise VLLMValidationError(f"{place} is not JSON: {error}", place, arguments) from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
