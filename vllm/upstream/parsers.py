"""Mistral's tokenizer: a name to import and to ask isinstance of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn


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
