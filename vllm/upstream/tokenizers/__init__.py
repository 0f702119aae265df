"""transformers' tokenizers, for callers that hold one; the engine's own are vllm/tokenizers."""

from vllm.upstream.tokenizers.hf import maybe_make_thread_pool
from vllm.upstream.tokenizers.protocol import TokenizerLike
from vllm.upstream.tokenizers.registry import (
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
    "maybe_make_thread_pool",
]
