"""What would part a model's thoughts from its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_INSTEAD = "thoughts are not parted from answers; the text holds both"


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
        raise KeyError(f"reasoning parser {name!r}: {_INSTEAD}")

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
        raise NotImplementedError(f"reasoning parsers of {plugin_path}: {_INSTEAD}")
