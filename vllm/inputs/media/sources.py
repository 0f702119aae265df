"""One picture or video as a request describes it."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import wrong_type

MAX_FRAMES = 768
"""The most frames of a request's video, as processors may enlarge each: those that Qwen-VL's choose at most."""

_SPACES = str.maketrans("", "", " \t\n\r\f\v")


@dataclass(frozen=True, eq=False)
class PictureSource:
    """A picture or a video that has not been loaded.

    Attributes:
        name: the request's field, in errors.
        url: a data:, http:, https: or file: URL; None: there is another source.
        data: base64 of a file.
        image: a PIL image, an array or a tensor; a video's frames.
        uuid: the caller's name for it. With nothing else, it was sent before.
        kind: "image" or "video".
    """

    name: str
    url: str | None = None
    data: str | None = None
    image: Any = None
    uuid: str | None = None
    kind: str = "image"

    @property
    def scheme(self) -> str:
        """The URL's scheme in lower case; "": it has none, or there is no URL."""
        scheme, mark, _ = (self.url or "").partition(":")
        return scheme.strip().lower() if mark else ""

    @property
    def has_frames(self) -> bool:
        """Whether it is a video whose frames are files of their own: data:video/jpeg;base64,FRAME,FRAME..."""
        head = (self.url or "").partition(",")[0]
        kind, *options = (option.strip().lower() for option in head.strip()[len("data:") :].split(";"))
        return self.kind == "video" and self.scheme == "data" and kind == "video/jpeg" and "base64" in options

    def inline_frames(self) -> list[bytes]:
        """The files of the frames of a video that `has_frames`.

        Raises:
            VLLMValidationError: they are too many, or not base64.
        """
        text = (self.url or "").partition(",")[2]
        frames = (unquote(text) if "%" in text else text).split(",")
        if len(frames) > MAX_FRAMES:
            message = f"{self.name} has {len(frames)} frames; a video has at most {MAX_FRAMES}: send some of them"
            raise VLLMValidationError(message, self.name, len(frames))
        return [base64_bytes(self.name, frame) for frame in frames]

    def inline_bytes(self) -> bytes:
        """The file that the request itself has.

        Raises:
            VLLMValidationError: it is no data URL of such a file, or not base64.
        """
        if self.data is not None:
            return base64_bytes(self.name, self.data)
        assert self.url is not None
        head, comma, text = self.url.partition(",")
        kind, *options = head.strip()[len("data:") :].split(";")
        if not comma or "base64" not in (option.strip().lower() for option in options):
            example = "data:video/mp4;base64,AAAA..." if self.kind == "video" else "data:image/png;base64,iVBORw0..."
            raise VLLMValidationError(f"{self.name} must be a data URL in base64, such as {example}", self.name)
        check_media_type(self.name, kind, self.kind)
        return base64_bytes(self.name, unquote(text) if "%" in text else text)


def base64_bytes(name: str, text: Any) -> bytes:
    """The bytes that the letters mean; white space and missing padding change nothing.

    Raises:
        VLLMValidationError: it is not base64, or there is nothing.
    """
    if not isinstance(text, str):
        raise wrong_type(name, text, "a text in base64")
    text = text.translate(_SPACES).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise VLLMValidationError(f"{name} is not base64: {error}", name) from None
    if not data:
        raise VLLMValidationError(f"{name} is an empty picture", name)
    return data


def check_media_type(name: str, kind: str, medium: str = "image") -> None:
    """Raises VLLMValidationError where the type says that it is no picture, or no video; which it is, its bytes say."""
    kind = kind.strip().lower()
    if kind and not kind.startswith(f"{medium}/") and kind != "application/octet-stream":
        what = "video" if medium == "video" else "picture"
        raise VLLMValidationError(f"{name} must be a {what}, got one of type {shown(kind)}", name, kind)
