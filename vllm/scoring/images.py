"""Pictures of a file's rows: paths below the file's folder, data URLs, or base64."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.exceptions import CliError, VLLMValidationError
from vllm.inputs.media import MediaAccess
from vllm.inputs.media.sources import base64_bytes
from vllm.scoring.files import Item

# Beginnings of files, and the types that clients name.
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_ \t\r\n")
_LEAST = 64  # letters of the smallest picture in base64


@dataclass(frozen=True)
class RowImages:
    """
    Attributes:
        field: of the rows.
        folders: what paths may lead below, links resolved; the first is what they are relative to.
    """

    field: str
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, field: str | None, file: Path, allowed: str | None) -> RowImages | None:
        """The pictures that a command's --image-field names in FILE; None: there are none.

        Raises:
            CliError: `allowed` (--allowed-local-media-path) is no folder.
        """
        if field is None:
            return None
        folders = [file.resolve().parent]
        if allowed:
            try:
                folders.append(MediaAccess.of(None, allowed).folder or folders[0])
            except ValueError as error:
                raise CliError(str(error)) from None
        return cls(field, tuple(folders))

    def check(self, name: str, item: Item) -> None:
        """CliError: a row of the file `name` has what is no picture, or the path of what may not be read."""
        for place, value in self._given(name, item):
            if value.startswith(("data:", "http:", "https:")) or _is_base64(value):
                continue
            if not any(path.is_file() for path in self._found(value)):
                raise CliError(
                    f"{place}: no file {value!r} below {self.folders[0].name or '/'}, FILE's folder; "
                    "--allowed-local-media-path names another folder"
                )

    def parts(self, item: Item) -> list[dict[str, Any]]:
        """A row's pictures as parts of a message; those of paths are read.

        Raises:
            VLLMValidationError: a file cannot be read any more.
        """
        urls = [self._url(value) for _, value in self._given("", item)]
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]

    def shown(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A row's fields without a picture that is in it; paths and addresses stay."""
        value = fields.get(self.field)
        is_short = value is None or (isinstance(value, str) and not value.startswith("data:") and not _is_base64(value))
        return fields if is_short else {key: own for key, own in fields.items() if key != self.field}

    def _given(self, name: str, item: Item) -> list[tuple[str, str]]:
        """Place and value of each picture of a row. CliError: another type than texts."""
        value, place = item.fields.get(self.field), f"{name}:{item.line}: {self.field!r}"
        if isinstance(value, str) and value.startswith("["):
            # A list in CSV.
            try:
                value = json.loads(value)
            except ValueError:
                raise CliError(f"{place} begins like a list and is not JSON (--image-field)") from None
        found = []
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                # The pictures of Hugging Face's data sets.
                each = each.get("bytes") or each.get("path")
            if each is None or each == "":
                continue
            if not isinstance(each, str):
                raise CliError(f"{place} must be a path, a data URL or base64, or a list of these (--image-field)")
            found.append((place, each))
        return found

    def _found(self, path: str) -> list[Path]:
        """The file, where it is in one of the folders."""
        try:
            whole = (self.folders[0] / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return []
        return [whole] if any(whole.is_relative_to(folder) for folder in self.folders) else []

    def _url(self, value: str) -> str:
        if value.startswith(("data:", "http:", "https:")):
            return value
        data = base64_bytes(self.field, value) if _is_base64(value) else self._read(value)
        kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), "png")
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    def _read(self, value: str) -> bytes:
        for path in self._found(value):
            for folder in self.folders:
                if path.is_relative_to(folder):
                    return MediaAccess(folder=folder).read(self.field, path.as_uri())
        raise VLLMValidationError(f"{self.field}: no file {value!r} that may be read", self.field)


def as_document(images: RowImages | None, item: Item) -> Any:
    """A row as a document of `score`: its text, or its pictures and its text; errors as of RowImages.parts."""
    parts = [] if images is None else images.parts(item)
    if not parts:
        return item.text
    return {"content": [*parts, *([{"type": "text", "text": item.text}] if item.text else [])]}


def as_message(images: RowImages, item: Item, text: str) -> list[dict[str, Any]]:
    """A conversation of one message: a row's pictures, and the text; errors as of RowImages.parts."""
    parts = images.parts(item)
    if text or not parts:
        parts.append({"type": "text", "text": text})
    return [{"role": "user", "content": parts}]


def _is_base64(value: str) -> bool:
    """Whether it is the file of a picture in base64, which no path with a suffix is."""
    if len(value) < _LEAST or not _ALPHABET.issuperset(value):
        return False
    try:
        begin = base64_bytes("", "".join(value[:_LEAST].split())[:24])
    except VLLMValidationError:
        return False
    return begin.startswith(tuple(_KINDS))
