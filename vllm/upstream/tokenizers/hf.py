"""transformers' tokenizers, as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from vllm.upstream.tokenizers.protocol import TokenizerLike

_T = TypeVar("_T")


@runtime_checkable
class HfTokenizer(TokenizerLike, Protocol):
    """A tokenizer of transformers', fast or not."""

    name_or_path: str
    all_special_ids: list[int]
    truncation_side: str


def get_cached_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself, with the greatest id of its vocabulary as `max_token_id`; transformers' remember what
    is asked often."""
    tokenizer.max_token_id = max(tokenizer.get_vocab().values())
    return tokenizer


def maybe_make_thread_pool(tokenizer: _T, copies: int = 1) -> _T:
    """The tokenizer itself: the engine encodes batches in the library's threads."""
    return tokenizer


class CachedHfTokenizer:
    """Loads transformers' tokenizers, as a class for `tokenizer_cls`."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """AutoTokenizer's, with its errors."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            str(path_or_repo_id),
            *args,
            trust_remote_code=trust_remote_code,
            revision=revision,
            cache_dir=download_dir,
            **kwargs,
        )
