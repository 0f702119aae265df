"""The messages of a conversation, checked and in one form."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from vllm.answers.syntax.channels import CHANNEL, MESSAGE, START
from vllm.answers.syntax.typed_values import loaded
from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.images import KINDS, ReadMedia
from vllm.inputs.media import PictureSource
from vllm.inputs.picture_rows import ROWS
from vllm.logger import init_logger, warn_once
from vllm.utils.checks import asks_for_nothing, check_encodable, wrong_type

# Types of parts that are texts, and which key has the text.
_TEXT_KEYS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
_TEXTS_ALONE = ReadMedia()


logger = init_logger(__name__)

SOURCE = "source"
"""The key of a picture part's PictureSource."""

# Types of parts: the medium of each, and the keys that may hold it.
_TYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url",)),
    "image": ("image", ("image", "image_url", "url", "base64", "source")),
    "image_pil": ("image", ("image_pil",)),
    "image_embeds": ("image", ("image_embeds",)),
    "video_url": ("video", ("video_url",)),
    "video": ("video", ("video", "video_url", "url")),
}
# Upstream's clients may leave the type out.
_TYPE_KEYS = ("image_url", "image_pil", "image_embeds", "image", "video_url")
_OTHER_KEYS = {"type", "detail", "uuid", "cache_control", "prompt_cache_breakpoint"}
_DETAILS = ("auto", "low", "high", "original")


def is_picture(part: Mapping[str, Any]) -> bool:
    """Whether a part of `named_conversations` is a picture or a video; its type says which."""
    return isinstance(part.get(SOURCE), PictureSource)


def is_picture_kind(kind: Any) -> bool:
    """Whether parts of this type are pictures or videos."""
    return isinstance(kind, str) and kind in _TYPES


def picture_part(name: str, part: Mapping[str, Any], kinds: Container[str] = ("image",)) -> dict[str, Any] | None:
    """A part as `is_picture` knows it; None: it is of none of the `kinds` of media.

    Args:
        name: the part, in errors.

    Raises:
        VLLMValidationError: a picture that is malformed, or of a form that is not read.
    """
    kind = part.get("type")
    if kind is None:
        kind = next((each for each in _TYPE_KEYS if each in part), None)
    medium, keys = _TYPES.get(kind, ("", ())) if isinstance(kind, str) else ("", ())
    if medium not in kinds:
        return None
    for key, value in part.items():
        if key not in (*keys, *_OTHER_KEYS) and not asks_for_nothing(value):
            message = f"{name} has an unknown field {shown(key)}; a picture of type {kind!r} has {', '.join(keys)}"
            raise VLLMValidationError(message, f"{name}.{key}")
    return {"type": medium, SOURCE: _source(name, part, keys, medium)}


def _source(name: str, part: Mapping[str, Any], keys: tuple[str, ...], medium: str) -> PictureSource:
    uuid = _checked_uuid(name, part.get("uuid"))
    detail = part.get("detail")
    given = [key for key in keys if part.get(key) is not None]
    if len(given) > 1:
        message = f"{name} has its picture twice: {' and '.join(given)}"
        raise VLLMValidationError(message, f"{name}.{given[1]}")
    if not given:
        if uuid is None:
            raise VLLMValidationError(f"{name}.{keys[0]} is required", f"{name}.{keys[0]}")
        return PictureSource(name, uuid=uuid, kind=medium)
    key = given[0]
    place, value = f"{name}.{key}", part[key]
    if key == ROWS:
        # A tensor or what torch.save writes in base64, or several of these by their names.
        return PictureSource(place, image=dict(value) if isinstance(value, Mapping) else {ROWS: value}, uuid=uuid)
    if key == "source":
        return _block_source(place, value, uuid)
    if key in ("image_url", "video_url") and isinstance(value, Mapping):
        detail = value.get("detail", detail)
        uuid = uuid or _checked_uuid(place, value.get("uuid"))
        if value.get("url") is None and uuid is not None:
            return PictureSource(name, uuid=uuid, kind=medium)
        place, value = f"{place}.url", value.get("url")
    _check_detail(name, detail)
    if isinstance(value, str):
        return PictureSource(place, **{"data" if key == "base64" else "url": value}, uuid=uuid, kind=medium)
    if medium == "video":
        frames = value[0] if isinstance(value, tuple) and value else value
        if key != "video" or not (_is_image(frames) or (isinstance(frames, list) and all(map(_is_image, frames)))):
            raise wrong_type(place, value, "a video's URL")
        return PictureSource(place, image=value, uuid=uuid, kind=medium)
    if key in ("image", "image_pil") and _is_image(value):
        return PictureSource(place, image=value, uuid=uuid)
    raise wrong_type(place, value, "a picture's URL" if key != "image_pil" else "a PIL image")


def _block_source(name: str, source: Any, uuid: str | None) -> PictureSource:
    """Anthropic's: {"type": "base64", "media_type", "data"} or {"type": "url", "url"}."""
    if not isinstance(source, Mapping):
        raise wrong_type(name, source, "an object")
    kind = source.get("type")
    if kind not in ("base64", "url"):
        message = f"{name}.type must be 'base64' or 'url', got {shown(kind)}"
        raise VLLMValidationError(message, f"{name}.type", kind)
    key = "data" if kind == "base64" else "url"
    value = source.get(key)
    if not isinstance(value, str):
        raise wrong_type(f"{name}.{key}", value, "a string")
    if kind == "base64":
        media_type = source.get("media_type")
        if not isinstance(media_type, str) or not media_type.startswith("image/"):
            message = f"{name}.media_type must be a picture's, such as 'image/png', got {shown(media_type)}"
            raise VLLMValidationError(message, f"{name}.media_type", media_type)
    return PictureSource(f"{name}.{key}", **{key: value}, uuid=uuid)


def _is_image(value: Any) -> bool:
    """A PIL image, an array or a tensor; the engine looks closer."""
    return hasattr(value, "size") or hasattr(value, "shape")


def _checked_uuid(name: str, uuid: Any) -> str | None:
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise wrong_type(f"{name}.uuid", uuid, "a string that is not empty")
    return uuid


def _check_detail(name: str, detail: Any) -> None:
    if detail is None:
        return
    if detail not in _DETAILS:
        message = f"{name}.detail must be one of {', '.join(map(repr, _DETAILS))}, got {shown(detail)}"
        raise VLLMValidationError(message, f"{name}.detail", detail)
    if detail != "auto":
        note = "detail=%r of a picture changes nothing: the model's processor chooses sizes (mm_processor_kwargs)"
        warn_once(logger, note, detail)


def normal_messages(messages: Any) -> list[dict[str, Any]]:
    """One conversation as templates take it: each message's content as one text, arguments of tool calls as objects.

    Raises:
        VLLMValidationError: a malformed message; its index is named.
    """
    return [message for _, conversation in named_conversations([messages]) for message in conversation]


def named_conversations(
    messages: Any, keeps_parts: bool = False, media: ReadMedia = _TEXTS_ALONE
) -> list[tuple[str, list[dict[str, Any]]]]:
    """(name in errors, messages as templates take them) of one conversation, or of a list of them.

    Args:
        keeps_parts: a content that came in parts is a list of text parts, and of media (`picture_part`).
        media: what parts may be beside texts.

    Raises:
        VLLMValidationError: a malformed message; its index is named.
    """
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
        (
            name,
            [
                _check_message(f"{name}[{index}]", message, keeps_parts, media)
                for index, message in enumerate(conversation)
            ],
        )
        for name, conversation in named
    ]


def content_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A content of `named_conversations` as one text: its parts are lines. Pictures are left out."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if not is_picture(part))


def joined(*contents: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Contents as one, with an empty line between texts; a list of parts where there are pictures."""
    if not any(has_pictures(each) for each in contents):
        return "\n\n".join(text for each in contents if (text := content_text(each)))
    parts: list[dict[str, Any]] = []
    for content in contents:
        own = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]
        if parts and own:
            parts.append({"type": "text", "text": "\n\n"})
        parts += own
    return parts


def headed(words: str, content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """A content with words before it."""
    if has_pictures(content):
        return [{"type": "text", "text": words}, *(dict(part) for part in content if not isinstance(part, str))]
    return words + content_text(content)


def has_pictures(content: str | Sequence[Mapping[str, Any]]) -> bool:
    """Whether some of its parts are pictures."""
    return not isinstance(content, str) and any(is_picture(part) for part in content)


def _check_message(name: str, message: Any, keeps_parts: bool, media: ReadMedia) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, and its content as parts or one text."""
    if not isinstance(message, Mapping):
        raise wrong_type(name, message, "a dict with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise VLLMValidationError(f"{name} has no role", f"{name}.role", role)
    tool_calls = _check_tool_calls(name, message)
    result = {key: value for key, value in message.items() if key != "tool_calls"}
    if tool_calls:
        result["tool_calls"] = tool_calls
    content = _check_content(name, message, bool(tool_calls), media)
    result["content"] = content if keeps_parts else content_text(content)
    return result


def _check_content(
    name: str, message: Mapping[str, Any], has_tool_calls: bool, media: ReadMedia
) -> str | list[dict[str, Any]]:
    """The content; without one the refusal, or nothing beside tool calls."""
    content = message.get("content")
    if content is not None:
        return checked_content(f"{name}.content", content, media)
    if message.get("refusal") is not None:
        return _check_text(f"{name}.refusal", message["refusal"])
    if has_tool_calls or any(isinstance(message.get(each), str) for each in ("reasoning", "reasoning_content")):
        return ""
    raise VLLMValidationError(f"{name} has no content", f"{name}.content")


def checked_content(name: str, content: Any, media: ReadMedia) -> str | list[dict[str, Any]]:
    """A content as `named_conversations` has it, with its parts; arguments and errors as there."""
    if isinstance(content, str):
        return _check_text(name, content)
    if not _is_list(content):
        raise wrong_type(name, content, "a string or a list of text parts")
    return [checked_part(f"{name}[{index}]", part, media) for index, part in enumerate(content)]


def checked_part(place: str, part: Any, media: ReadMedia) -> dict[str, Any]:
    """A part of `checked_content`; errors as there."""
    if isinstance(part, str):
        return {"type": "text", "text": _check_text(place, part)}
    if not isinstance(part, Mapping):
        raise wrong_type(place, part, "a text part")
    kind = part.get("type")
    reason = f": {media.why_not}" if media.why_not else ""
    if is_picture(part):
        if not media.words:
            name = part[SOURCE].name
            raise VLLMValidationError(f"{name} is a picture, and only texts can be read{reason}", name)
        return dict(part)
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is not None:
        text = _check_text(f"{place}.{key}", part.get(key))
        # Some templates ask for keys of their own, such as languages.
        return {**{name: value for name, value in part.items() if name != key}, "type": "text", "text": text}
    if (picture := picture_part(place, part, media.words)) is not None:
        return picture
    known = " and ".join(["'text'", *(KINDS[each] for each in media.words)])
    raise VLLMValidationError(f"{place} is of type {shown(kind)}, and only {known} can be read{reason}", place, kind)


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
        return {**function, "arguments": loaded(arguments or "{}")}
    except ValueError as error:
        place = f"{name}.arguments"
        raise VLLMValidationError(f"{place} is not JSON: {error}", place, arguments) from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


_FIELDS = ("reasoning", "reasoning_content", "thinking")

Message = dict[str, Any]


def fitted(messages: Sequence[Message], template: str) -> list[Message]:
    """Messages for a template: the reasoning of the assistant's by every name that templates have for it, and in
    templates of channels one call a message, followed by its result."""
    found = [_with_reasoning(each, bool(re.search(r"\bthinking\b", template))) for each in messages]
    if all(marker in template for marker in (START, CHANNEL, MESSAGE)):
        return _one_by_one([_thought_before_calls(each) for each in found])
    return found


def _with_reasoning(message: Message, has_thinking: bool) -> Message:
    text = next((each for name in _FIELDS if isinstance(each := message.get(name), str) and each), None)
    if message["role"] != "assistant" or text is None:
        return message
    names = _FIELDS if has_thinking else _FIELDS[:-1]
    return {**message, **{name: text for name in names if not message.get(name)}}


def _thought_before_calls(message: Message) -> Message:
    """Templates take one of reasoning and content beside a call, and write either as reasoning."""
    if not message.get("tool_calls") or not message.get("thinking") or not message["content"]:
        return message
    thought = f"{message['thinking']}\n\n{content_text(message['content'])}"
    return {**message, **dict.fromkeys(_FIELDS, thought), "content": ""}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Templates know the last call alone, which a result belongs to."""
    result: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        outputs: list[Message] = []
        while rest and rest[0]["role"] == "tool":
            outputs.append(rest.pop(0))
        for index, call in enumerate(calls):
            head = message if not index else {"role": message["role"], "content": ""}
            own = [each for each in outputs if _id(call) is not None and each.get("tool_call_id") == _id(call)]
            outputs = [each for each in outputs if each not in own]
            result += [{**head, "tool_calls": [call]}, *own]
        result += outputs
    return result


def _id(call: Any) -> Any:
    return call.get("id") if isinstance(call, Mapping) else None
