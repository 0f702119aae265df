"""Parsers of thoughts and of tool calls, and Mistral's tokenizer: callers' classes are taken, and none is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_INSTEAD_ABS_REASONING_PARSERS = "thoughts are not parted from answers; the text holds both"


class ReasoningParser:
    """Base of callers' own; none is asked for anything."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.model_tokenizer = tokenizer

    @property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's vocabulary."""
        return self.model_tokenizer.get_vocab()


class ReasoningParserManager:
    """Upstream's registry of them, without any."""

    @classmethod
    def list_registered(cls) -> list[str]:
        """Their names: none."""
        return []

    @classmethod
    def get_reasoning_parser(cls, name: str) -> type[ReasoningParser]:
        """
        Raises:
            KeyError: always.
        """
        raise KeyError(f"reasoning parser {name!r}: {_INSTEAD_ABS_REASONING_PARSERS}")

    @classmethod
    def register_module(
        cls,
        name: str | Sequence[str] | None = None,
        force: bool = True,
        module: type[ReasoningParser] | None = None,
    ) -> type[ReasoningParser] | Callable[[type[ReasoningParser]], type[ReasoningParser]]:
        """Nothing: returns the class, or a decorator that does. Whoever asks for it by its name is refused."""
        return module if module is not None else lambda parser: parser

    @classmethod
    def import_reasoning_parser(cls, plugin_path: str) -> NoReturn:
        """
        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"reasoning parsers of {plugin_path}: {_INSTEAD_ABS_REASONING_PARSERS}")


_INSTEAD_ABSTRACT_TOOL_PARSER = "calls of tools are not read from answers; read them from the text"


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
        raise KeyError(f"tool parser {name!r}: {_INSTEAD_ABSTRACT_TOOL_PARSER}")

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
        raise NotImplementedError(f"tool parsers of {plugin_path}: {_INSTEAD_ABSTRACT_TOOL_PARSER}")


class MistralTokenizer:
    """A class to import and to ask isinstance of."""

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | Path, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"MistralTokenizer.from_pretrained({str(path_or_repo_id)!r}): tekken files are not read; "
            "vllm.tokenizers.get_tokenizer reads the repository's tokenizer.json"
        )
