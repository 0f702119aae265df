"""The files of a sentence-transformers folder, read and checked for their kinds. Nothing here needs torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN_SETTINGS = "config_sentence_transformers.json"
MODULES = "modules.json"
_FOLDER = re.compile(r"\w[\w.-]*")


def read_json(path: Path) -> Any:
    """A file's content; None: there is no such file. ValueError: it is no JSON."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name} is not JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """As `read_json`. ValueError: the file holds no JSON object."""
    value = read_json(path)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path.parent.name}/{path.name} must be an object, got {value!r:.80}")
    return value


@dataclass(frozen=True)
class Module:
    """An entry of modules.json.

    Attributes:
        type: the class, with the Python module that it is in.
        folder: where its own files are.
        where: its config.json, for errors.
        config: that file's content; None: there is none.
    """

    type: str
    folder: Path
    where: str
    config: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """Name of the module's class."""
        return self.type.rpartition(".")[2]

    @property
    def settings(self) -> dict[str, Any]:
        """`config`. ValueError: there is none."""
        if self.config is None:
            raise ValueError(f"{self.where} is missing: modules.json has a {self.kind} there")
        return self.config

    def integer(self, name: str, least: int = 0) -> int:
        """A setting that must be an integer of at least `least`. ValueError: it is not."""
        value = self.settings.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{self.where}: {name} must be an integer of at least {least}, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A setting that must be true or false; null: the default. ValueError: it is none of these."""
        value = self.settings.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} must be true or false, got {value!r}")
        return value


def sentence_folder(folder: Path) -> Path:
    """The folder of a model's modules.json: its own, or the one above that has the model in its first module."""
    above = folder.parent
    return above if not (folder / MODULES).is_file() and first_module(above) == folder else folder


def first_module(folder: Path) -> Path:
    """The folder of the model that modules.json is about: its first module's where that has a config.json, or this."""
    try:
        listed = read_json(folder / MODULES)
    except ValueError:
        return folder  # an error where it is read
    entry = listed[0] if isinstance(listed, list) and listed else None
    place = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(place, str) or not _FOLDER.fullmatch(place) or (folder / "config.json").is_file():
        return folder
    return folder / place if (folder / place / "config.json").is_file() else folder


def read_modules(folder: Path) -> list[Module] | None:
    """The entries of modules.json; None: there is no such file. ValueError: it is no list of modules."""
    folder = sentence_folder(folder)
    path, where = folder / MODULES, f"{folder.name}/{MODULES}"
    if not path.is_file():
        return None
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ValueError(f"{where} must be a list of objects with type and path, got {listed!r:.80}")
    modules = []
    for index, each in enumerate(listed):
        for name in ("type", "path"):
            if not isinstance(each.get(name), str):
                raise ValueError(f"{where}: {name} of module {index} must be a text, got {each.get(name)!r}")
        place = each["path"]
        # Without a path it is the model's own, which is not a module's.
        config = read_object(folder / place / "config.json") if place else None
        modules.append(Module(each["type"], folder / place, f"{folder.name}/{place}/config.json", config))
    return modules


def own_settings(folder: Path) -> dict[str, Any]:
    """config_sentence_transformers.json; {}: there is none."""
    return read_object(sentence_folder(folder) / OWN_SETTINGS) or {}


def transformer_settings(folder: Path) -> tuple[dict[str, Any], str]:
    """sentence_bert_config.json, which older folders name after another kind of model, and its name."""
    path = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    return ({}, "") if path is None else (read_object(path) or {}, f"{folder.name}/{path.name}")


def part_of(settings: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """An object among settings; {}: there is none. ValueError: it is none."""
    value = settings.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{where}: {name} must be an object, got {value!r:.80}")
    return value or {}
