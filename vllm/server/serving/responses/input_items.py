"""A response's input: items in one form, and the chat messages that they are."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from vllm.answers.prompts.conversations import has_pictures, is_picture, joined, picture_part
from vllm.exceptions import VLLMValidationError, shown
from vllm.server.errors import ApiError
from vllm.server.rendering.written_json import encode_parts

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]

# Types of parts that are texts, and which key has the text.
_TEXT_KEYS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MEDIA = {"input_file": "files", "input_audio": "audio"}
_ROLES = ("user", "assistant", "system", "developer")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def new_id(prefix: str) -> str:
    """Ids are not to be guessed: whoever knows one can read what was answered."""
    return f"{prefix}_{uuid.uuid4().hex}"


def bad_item(place: str, problem: str, code: str = "invalid_value") -> ApiError:
    """An error of the item at `place`, as input[0].content; the field is its first part."""
    return ApiError(400, f"{place} {problem}", place.partition("[")[0], code)


def normal_items(given: Any, find: FindItem, field: str = "input") -> list[Item]:
    """The items of a list, each with its type and an id; what is kept and listed. An `input` may be a text.

    Args:
        find: the item of an id, for references.
        field: the body's field, for errors.

    Raises:
        ApiError: an item that no text model takes, or a malformed one; names its place.
    """
    if isinstance(given, str) and field == "input":
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ApiError(400, f"{field} must be a text or a list of items, got {shown(given)}", field, "invalid_type")
    items = [_normal_item(item, f"{field}[{index}]", find) for index, item in enumerate(given)]
    check_returned(field, items)
    return items


def check_returned(name: str, value: Any) -> None:
    """Raises ApiError for what cannot be written as JSON again: half of a surrogate pair, a number beyond 64 bits."""
    try:
        encode_parts(value.model_dump() if isinstance(value, BaseModel) else value)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise ApiError(400, f"{name} cannot be returned as it is: {error}", name, "invalid_value") from None


def _normal_item(item: Any, place: str, find: FindItem) -> Item:
    if not isinstance(item, dict):
        raise bad_item(place, f"must be an object, got {shown(item)}", "invalid_type")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if kind == "item_reference":
        return _referred(item, place, find)
    if make is None:
        raise bad_item(place, f"is of type {shown(kind)}, which this server cannot take", "unsupported_value")
    given_id = item.get("id")
    own_id = given_id if isinstance(given_id, str) and given_id else new_id(_PREFIXES[kind])
    return {"type": kind, "id": own_id, "status": "completed", **make(item, place)}


def _referred(item: Item, place: str, find: FindItem) -> Item:
    found = find(_text(item, "id", place))
    if found is None:
        raise bad_item(f"{place}.id", f"{shown(item['id'])} is no item that is kept here", "not_found")
    return found


def _message(item: Item, place: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_item(f"{place}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": _parts(item.get("content"), f"{place}.content", kind)}


def _parts(content: Any, place: str, kind: str) -> list[Item]:
    """Parts of a message, or of a function's output."""
    if isinstance(content, str):
        return [_part(kind, content)]
    if not isinstance(content, list):
        raise bad_item(place, f"must be a text or a list of parts, got {shown(content)}", "invalid_type")
    return [_one_part(part, f"{place}[{index}]", kind) for index, part in enumerate(content)]


def _one_part(part: Any, place: str, kind: str) -> Item:
    if isinstance(part, str):
        return _part(kind, part)
    given = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_KEYS.get(given) if isinstance(given, str) else None
    if key is not None:
        text = _text(part, key, place)
        return {"type": "refusal", "refusal": text} if key == "refusal" else _part(kind, text)
    if isinstance(given, str) and given in _MEDIA:
        problem = f"is of type {given!r}: only texts and pictures are read here, no {_MEDIA[given]}"
        raise bad_item(place, problem, "unsupported_value")
    if given == "input_image":
        return _picture(part, place)
    raise bad_item(place, f"must be a part with text, got {shown(part)}")


def _part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _picture(part: Item, place: str) -> Item:
    if part.get("file_id") is not None:
        raise bad_item(
            f"{place}.file_id", "names a file, and no files are kept here: send image_url", "unsupported_value"
        )
    try:
        picture_part(place, part)
    except VLLMValidationError as error:
        raise bad_item(place, str(error.args[0]).removeprefix(place).lstrip()) from None
    return {"type": "input_image", "detail": "auto", "file_id": None, **part}


def _function_call(item: Item, place: str) -> Item:
    names = ("call_id", "name", "arguments")
    return {name: _text(item, name, place) for name in names}


def _function_call_output(item: Item, place: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, f"{place}.output", "input_text")
    return {"call_id": _text(item, "call_id", place), "output": output}


def _reasoning(item: Item, place: str) -> Item:
    parts: dict[str, list[Item]] = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = item.get(name) or []
        if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
            raise bad_item(f"{place}.{name}", f"must be a list of parts, got {shown(given)}", "invalid_type")
        texts = [_text(part, "text", f"{place}.{name}[{index}]") for index, part in enumerate(given)]
        parts[name] = [{"type": kind, "text": text} for text in texts]
    return parts


_KINDS: dict[str, Callable[[Item, str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _text(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_item(f"{place}.{name}", f"must be a text, got {shown(value)}", "invalid_type")
    return value


def to_messages(
    instructions: str | None, items: Iterable[Item], places: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Chat messages of instructions and items. `places`: what items are called in errors of their pictures, by id.

    Templates know system messages, and most know one, at the beginning: a developer's message is one, and those that
    begin the conversation are joined. What the model said, thought and called in one turn is one message.
    """
    messages: list[Item] = [{"role": "system", "content": instructions}] if instructions else []
    names: dict[str, str] = {}
    for item in items:
        place = (places or {}).get(item["id"], "an earlier item")
        _ADDERS[item["type"]](messages, _with_sources(item, place), names)
    count = next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if count > 1:
        messages[:count] = [{"role": "system", "content": joined(*(each["content"] for each in messages[:count]))}]
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def joined_text(parts: str | list[Item]) -> str:
    """The texts of parts."""
    if isinstance(parts, str):
        return parts
    return "\n".join(_text_of(part) for part in parts)


def _text_of(part: Item) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part["text"])


def _with_sources(item: Item, place: str) -> Item:
    """The item with its pictures as `picture_part` makes them."""
    made = dict(item)
    for name in ("content", "output"):
        parts = item.get(name)
        if isinstance(parts, list) and any(part["type"] == "input_image" for part in parts):
            made[name] = [
                picture_part(f"{place}.{name}[{index}]", part) if part["type"] == "input_image" else part
                for index, part in enumerate(parts)
            ]
    return made


def _content(parts: str | list[Item]) -> str | list[Item]:
    """A text, or parts where there are pictures."""
    if isinstance(parts, str) or not has_pictures(parts):
        return joined_text(parts)
    return [part if is_picture(part) else {"type": "text", "text": _text_of(part)} for part in parts]


def _add_message(messages: list[Item], item: Item, names: dict[str, str]) -> None:
    role, text = item["role"], _content(item["content"])
    if role != "assistant":
        messages.append({"role": "system" if role == "developer" else role, "content": text})
        return
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
        last["content"] = text  # what it thought stands before
    else:
        messages.append({"role": "assistant", "content": text})


def _add_call(messages: list[Item], item: Item, names: dict[str, str]) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    names[item["call_id"]] = item["name"]
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item["call_id"], "type": "function", "function": function})


def _add_output(messages: list[Item], item: Item, names: dict[str, str]) -> None:
    call_id = item["call_id"]
    message: Item = {"role": "tool", "tool_call_id": call_id, "content": _content(item["output"])}
    messages.append(message | ({"name": names[call_id]} if call_id in names else {}))


def _add_reasoning(messages: list[Item], item: Item, names: dict[str, str]) -> None:
    text = joined_text(item["content"] or item["summary"])
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning": text, "reasoning_content": text})


_ADDERS: dict[str, Callable[[list[Item], Item, dict[str, str]], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
}
