"""Texts of OpenAI's content parts, and checks of JSON values that both questions and inputs use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import asks_for_nothing, check_encodable, wrong_type

MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 2**18
"""Limits of a JSON part: nested containers, values in all, bytes of compact UTF-8."""

NO_IMAGES = "this server takes text input only: it cannot see images"
_TEXT_KEYS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


def is_list(value: Any) -> bool:
    """Lists and tuples, no texts."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def check_object(name: str, value: Any, required: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, Any]:
    """An object with all of the required keys and no others but the optional ones, and some that ask for nothing."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "an object")
    for key, each in value.items():
        if key not in required and key not in optional and not asks_for_nothing(each):
            known = ", ".join((*required, *optional))
            raise VLLMValidationError(f"{name} has an unknown field {shown(key)}; known: {known}", name, key)
    for key in required:
        if key not in value:
            raise VLLMValidationError(f"{name}.{key} is required", f"{name}.{key}")
    return value


def check_text(name: str, value: Any) -> str:
    """Any text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    check_encodable(name, value)
    return value


def check_nullable_text(name: str, value: Any) -> str | None:
    return None if value is None else check_text(name, value)


def check_literal(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Check that a value is one of a few texts."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        texts = ", ".join(repr(each) for each in allowed if each is not None)
        raise VLLMValidationError(f"{name} must be one of {texts}, got {shown(value)}", name, value)


def content_text(name: str, content: Any, kinds: Sequence[str]) -> str:
    """A text, or parts of these kinds joined by line breaks."""
    if isinstance(content, str):
        return check_text(name, content)
    if not is_list(content):
        raise wrong_type(name, content, "a string or a list of parts")
    return "\n".join(_part_text(f"{name}[{index}]", part, kinds) for index, part in enumerate(content))


def _part_text(name: str, part: Any, kinds: Sequence[str]) -> str:
    if not isinstance(part, Mapping):
        raise wrong_type(name, part, "a part: an object with a type")
    kind: Any = part.get("type")
    if kind not in kinds:
        message = f"{name}.type must be one of {', '.join(map(repr, kinds))}, got {shown(kind)}"
        raise VLLMValidationError(message, f"{name}.type", kind)
    if kind == "input_json":
        check_object(name, part, ("type", "data"))
        return json_text(f"{name}.data", part["data"])
    key = _TEXT_KEYS[kind]
    check_object(name, part, ("type", key), ("prompt_cache_breakpoint",) if kind == "input_text" else ())
    mark = part.get("prompt_cache_breakpoint")
    if mark is not None:
        place = f"{name}.prompt_cache_breakpoint"
        check_literal(f"{place}.mode", check_object(place, mark, ("mode",))["mode"], ("explicit",))
    return check_text(f"{name}.{key}", part[key])


def json_text(name: str, data: Any) -> str:
    """An object, or a list of objects, as compact JSON, within the limits."""
    if not isinstance(data, Mapping) and not (is_list(data) and all(isinstance(each, Mapping) for each in data)):
        raise wrong_type(name, data, "an object or a list of objects")
    _check_json_size(name, data)
    text = any_json_text(name, data)
    if len(text.encode()) > MAX_JSON_BYTES:
        raise VLLMValidationError(f"{name} has more than {MAX_JSON_BYTES} bytes of JSON", name, len(text))
    return text


def any_json_text(name: str, data: Any) -> str:
    """Any JSON value as compact JSON."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise VLLMValidationError(f"{name} is not JSON: {error}", name) from None
    check_encodable(name, text)
    return text


def _check_json_size(name: str, data: Any) -> None:
    num_values = 0
    waiting = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        if num_values > MAX_JSON_VALUES:
            raise VLLMValidationError(f"{name} has more than {MAX_JSON_VALUES} values", name)
        inner = value.values() if isinstance(value, Mapping) else value if is_list(value) else ()
        if (isinstance(value, Mapping) or is_list(value)) and depth > MAX_JSON_DEPTH:
            raise VLLMValidationError(f"{name} is nested deeper than {MAX_JSON_DEPTH} levels", name)
        waiting += [(each, depth + 1) for each in inner]
