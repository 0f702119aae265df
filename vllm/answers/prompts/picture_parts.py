"""Pictures and videos among the parts of a content, in the forms that clients have for them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.media import PictureSource
from vllm.inputs.picture_rows import ROWS
from vllm.logger import init_logger, warn_once
from vllm.utils.checks import asks_for_nothing, wrong_type

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
