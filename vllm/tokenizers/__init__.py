"""Tokenizers of checkpoints: ours (`tokenizer`), and transformers' for callers (`registry`)."""

from vllm.tokenizers.protocol import TokenizerLike
from vllm.tokenizers.registry import (
    TokenizerRegistry,
    cached_get_tokenizer,
    cached_tokenizer_from_config,
    get_tokenizer,
)

__all__ = [
    "TokenizerLike",
    "TokenizerRegistry",
    "cached_get_tokenizer",
    "cached_tokenizer_from_config",
    "get_tokenizer",
]
