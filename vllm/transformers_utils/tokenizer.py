"""`vllm.tokenizers` under its older path."""

from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.tokenizers.protocol import TokenizerLike
from vllm.tokenizers.registry import cached_get_tokenizer, cached_tokenizer_from_config, get_tokenizer

AnyTokenizer = TokenizerLike

__all__ = [
    "AnyTokenizer",
    "MistralTokenizer",
    "cached_get_tokenizer",
    "cached_tokenizer_from_config",
    "get_cached_tokenizer",
    "get_tokenizer",
]
