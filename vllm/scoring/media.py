"""Pictures and videos of a file's rows: paths below the file's folder, data URLs, or base64."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.exceptions import CliError, VLLMValidationError
from vllm.inputs.images import KINDS
from vllm.inputs.media import MediaAccess
from vllm.inputs.media.sources import base64_bytes
from vllm.scoring.files import Item

# Beginnings of files; that of an MP4 is behind its length.
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"\x1aE\xdf\xa3")
_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_ \t\r\n")
_LEAST = 64  # letters of the smallest picture in base64


def media_fields(args: argparse.Namespace) -> dict[str, str]:
    """The fields of rows that a command's arguments name, by the kinds of media."""
    given = {kind: getattr(args, f"{kind}_field") for kind in KINDS}
    return {kind: name for kind, name in given.items() if name is not None}


@dataclass(frozen=True)
class RowMedia:
    """
    Attributes:
        fields: of the rows, by kind.
        folders: what paths may lead below, links resolved; the first is what they are relative to.
    """

    fields: Mapping[str, str]
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, fields: Mapping[str, str], file: Path, allowed: str | None) -> RowMedia | None:
        """The media of FILE's rows in `fields`; None: there is no field.

        Raises:
            CliError: `allowed` (--allowed-local-media-path) is no folder.
        """
        if not fields:
            return None
        folders = [file.resolve().parent]
        if allowed:
            try:
                folders.append(MediaAccess.of(None, allowed).folder or folders[0])
            except ValueError as error:
                raise CliError(str(error)) from None
        return cls(fields, tuple(folders))

    def check(self, name: str, item: Item) -> None:
        """CliError: a row of the file `name` has what is neither a picture nor a video, or the path of what may not be
        read."""
        for place, value in (each for kind in self.fields for each in self._given(name, item, kind)):
            if value.startswith(("data:", "http:", "https:")) or _is_base64(value):
                continue
            if not any(path.is_file() for path in self._found(value)):
                raise CliError(
                    f"{place}: no file {value!r} below {self.folders[0].name or '/'}, FILE's folder; "
                    "--allowed-local-media-path names another folder"
                )

    def parts(self, item: Item, *kinds: str) -> list[dict[str, Any]]:
        """A row's pictures and videos, those of `kinds` alone where some are given, as parts of a message; those of
        paths are read.

        Raises:
            VLLMValidationError: a file cannot be read any more.
        """
        return [
            {"type": f"{kind}_url", f"{kind}_url": {"url": self._url(self.fields[kind], value)}}
            for kind in kinds or self.fields
            for _, value in self._given("", item, kind)
        ]

    def shown(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A row's fields without a picture or a video that is in it; paths and addresses stay."""
        own = set(self.fields.values())
        return {name: value for name, value in fields.items() if name not in own or _is_short(value)}

    def _given(self, name: str, item: Item, kind: str) -> list[tuple[str, str]]:
        """Place and value of each picture or video of a row. CliError: another type than texts."""
        field = self.fields[kind]
        value, place = item.fields.get(field), f"{name}:{item.line}: {field!r}"
        if isinstance(value, str) and value.startswith("["):
            # A list in CSV.
            try:
                value = json.loads(value)
            except ValueError:
                raise CliError(f"{place} begins like a list and is not JSON (--{kind}-field)") from None
        found = []
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                # The pictures of Hugging Face's data sets.
                each = each.get("bytes") or each.get("path")
            if each is None or each == "":
                continue
            if not isinstance(each, str):
                raise CliError(f"{place} must be a path, a data URL or base64, or a list of these (--{kind}-field)")
            found.append((place, each))
        return found

    def _found(self, path: str) -> list[Path]:
        """The file, where it is in one of the folders."""
        try:
            whole = (self.folders[0] / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return []
        return [whole] if any(whole.is_relative_to(folder) for folder in self.folders) else []

    def _url(self, field: str, value: str) -> str:
        if value.startswith(("data:", "http:", "https:")):
            return value
        data = base64_bytes(field, value) if _is_base64(value) else self._read(field, value)
        return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"

    def _read(self, field: str, value: str) -> bytes:
        for path in self._found(value):
            for folder in self.folders:
                if path.is_relative_to(folder):
                    return MediaAccess(folder=folder).read(field, path.as_uri())
        raise VLLMValidationError(f"{field}: no file {value!r} that may be read", field)


def _is_short(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.startswith("data:") and not _is_base64(value))


def as_document(media: RowMedia | None, item: Item) -> Any:
    """A row as a document of `score`: its text, or its media and its text; errors as of RowMedia.parts."""
    parts = [] if media is None else media.parts(item)
    if not parts:
        return item.text
    return {"content": [*parts, *([{"type": "text", "text": item.text}] if item.text else [])]}


def as_message(media: RowMedia, item: Item, text: str) -> list[dict[str, Any]]:
    """A conversation of one message: a row's media, and the text; errors as of RowMedia.parts."""
    parts = media.parts(item)
    if text or not parts:
        parts.append({"type": "text", "text": text})
    return [{"role": "user", "content": parts}]


def _is_base64(value: str) -> bool:
    """Whether it is the file of a picture or a video in base64, which no path with a suffix is."""
    if len(value) < _LEAST or not _ALPHABET.issuperset(value):
        return False
    try:
        begin = base64_bytes("", "".join(value[:_LEAST].split())[:24])
    except VLLMValidationError:
        return False
    return begin.startswith(_BEGINNINGS) or begin[4:8] == b"ftyp"
