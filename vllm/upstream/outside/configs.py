"""Configurations of callers: what upstream's `register_config_parser` takes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.config.checkpoint.config import CONFIG_FORMATS
from vllm.logger import init_logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

_P = TypeVar("_P", bound="type[ConfigParserBase]")
_OWN = ("auto", "hf")


class ConfigParserBase(ABC):
    """Reads a model's configuration out of whatever files describe it."""

    @abstractmethod
    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        """The entries of a file, and transformers' configuration object, which counts. `model`: the folder."""


class HFConfigParser(ConfigParserBase):
    """Reads config.json by transformers."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PretrainedConfig]:
        """See ConfigParserBase. OSError: there is no config.json."""
        from transformers import AutoConfig, PretrainedConfig

        kwargs |= {"revision": revision, "code_revision": code_revision}
        entries, _ = PretrainedConfig.get_config_dict(model, **kwargs)
        return entries, AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **kwargs)


class _Parsers(dict[str, type[ConfigParserBase]]):
    """By config_format. Upstream's callers look whether theirs is in it."""

    def __setitem__(self, name: str, parser: type[ConfigParserBase]) -> None:
        super().__setitem__(name, parser)
        if name not in _OWN:
            CONFIG_FORMATS[name] = _Reader(name, parser)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        CONFIG_FORMATS.pop(name, None)


class _Reader:
    """The entries of a config.json as the object that a parser returns would save them."""

    def __init__(self, name: str, parser: type[ConfigParserBase]) -> None:
        self._name, self._parser = name, parser

    def __call__(self, folder: Path, trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
        found = self._parser().parse(str(folder), trust_remote_code=trust_remote_code, revision=revision)
        if not (isinstance(found, tuple) and len(found) == 2 and hasattr(found[1], "to_json_string")):
            raise ValueError(
                f"config_format={self._name!r}: {self._parser.__name__}.parse must return the entries and a "
                f"PretrainedConfig, got {type(found).__name__}"
            )
        entries: dict[str, Any] = json.loads(found[1].to_json_string(use_diff=True))
        return entries


_CONFIG_FORMAT_TO_CONFIG_PARSER = _Parsers()
_CONFIG_FORMAT_TO_CONFIG_PARSER["hf"] = HFConfigParser


def register_config_parser(config_format: str) -> Callable[[_P], _P]:
    """A class decorator: `config_format` is read by the class from now on and in this process; a plug-in registers it
    for servers. One that is registered already is replaced, with a warning.

    Raises:
        ValueError: the class is no ConfigParserBase, or the engine has this format itself.
    """

    def add(parser: _P) -> _P:
        if not (isinstance(parser, type) and issubclass(parser, ConfigParserBase)):
            raise ValueError(f"register_config_parser: it must be a subclass of ConfigParserBase, got {parser!r}")
        if config_format in _OWN:
            raise ValueError(
                f"register_config_parser: config_format={config_format!r} is the engine's own: choose another"
            )
        if _CONFIG_FORMAT_TO_CONFIG_PARSER.get(config_format, parser) is not parser:
            logger.warning("config_format %s was registered already: now %s reads it", config_format, parser)
        _CONFIG_FORMAT_TO_CONFIG_PARSER[config_format] = parser
        return parser

    return add


def get_config_parser(config_format: str) -> ConfigParserBase:
    """The parser of a format. ValueError: there is none."""
    name = "hf" if config_format == "auto" else config_format
    if name not in _CONFIG_FORMAT_TO_CONFIG_PARSER:
        raise ValueError(f"config_format {config_format!r} has no parser: register one by register_config_parser")
    return _CONFIG_FORMAT_TO_CONFIG_PARSER[name]()
