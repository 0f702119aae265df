"""What would read the calls of tools from an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_INSTEAD = "calls of tools are not read from answers; read them from the text"


class ToolParser:
    """Base of callers' own; none is asked for anything."""

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        self.model_tokenizer = tokenizer

    @property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's vocabulary."""
        return self.model_tokenizer.get_vocab()


class ToolParserManager:
    """Upstream's registry of them, without any."""

    @classmethod
    def list_registered(cls) -> list[str]:
        """Their names: none."""
        return []

    @classmethod
    def get_tool_parser(cls, name: str) -> type[ToolParser]:
        """
        Raises:
            KeyError: always.
        """
        raise KeyError(f"tool parser {name!r}: {_INSTEAD}")

    @classmethod
    def register_module(
        cls,
        name: str | Sequence[str] | None = None,
        force: bool = True,
        module: type[ToolParser] | None = None,
    ) -> type[ToolParser] | Callable[[type[ToolParser]], type[ToolParser]]:
        """Nothing: returns the class, or a decorator that does. Whoever asks for it by its name is refused."""
        return module if module is not None else lambda parser: parser

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> NoReturn:
        """
        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"tool parsers of {plugin_path}: {_INSTEAD}")
